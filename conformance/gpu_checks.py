"""What only a GPU can show of the production path: ``python -m conformance.gpu_checks --out DIR``.

The whole chain on real DeepGEMM against the model, bit for bit, at every local shape of V4-Flash and V4-Pro; one graph
of ``torch.compile``; CUDA graph replay with new inputs; no wait for the device and no allocation in the hot call. Exit
codes of ``oproj``; ``gpu_checks.json`` holds every check.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from conformance.bulk import Draw, Tally
from conformance.gpu_layer import Layer
from conformance.record import FACTS, write_json
from oproj.buffers import OProjBuffers
from oproj.config import get_preset
from oproj.engines import EngineUnavailable
from oproj.engines.deep_gemm import DeepGemmEngine
from oproj.engines.discovery import current_gpu
from oproj.engines.software import SoftwareEngine
from oproj.rope import cos_sin_cache

PRESETS = ("v4-flash", "v4-pro")
TP_SIZES = (1, 2, 4, 8)
TOKENS = (1, 3, 64)
MAX_POSITION = 1 << 16
HOST_QUANTISER = "the engine's quantiser is 'software': it goes through the host"


@dataclass(frozen=True)
class Result:
    """One check: ``pass`` or ``fail``, how many outputs were compared and differ, and what happened."""

    check: str
    result: str
    compared: int = 0
    mismatched: int = 0
    detail: str = ""


@dataclass
class Bench:
    """What every check works with: the GPU's engine, the model on the same GPU, and one layer for the hot call."""

    hardware: DeepGemmEngine
    model: SoftwareEngine
    draw: Draw
    table: torch.Tensor
    hot: Layer


def chain(bench: Bench) -> Iterator[Result]:
    """Quantise, wo_a and wo_b on the GPU against the model, at every local shape and token count."""
    for name in PRESETS:
        for tp in TP_SIZES:
            layer = Layer(bench.hardware.arch, get_preset(name).shard(tp), bench.draw, bench.table)
            tally = Tally("chain")
            for tokens in TOKENS:
                o, positions = layer.inputs(tokens)
                x = layer.model_x(o, positions, SoftwareEngine(bench.hardware.arch))
                found = layer.quantised(o, positions, bench.hardware)
                tally.add(f"T={tokens} codes", found[0].contiguous(), x.data.contiguous())
                tally.add(f"T={tokens} scales", found[1].contiguous(), x.scale.contiguous())
                z, model_z = layer.z(o, positions, engine=bench.hardware), layer.z(x, positions, engine=bench.model)
                tally.add(f"T={tokens} z", z, model_z)
                tally.add(f"T={tokens} y", layer.y(z, bench.hardware), layer.y(model_z, bench.model))
            yield of_tally(f"chain {name} tp {tp}", tally)


def no_tokens(bench: Bench) -> Iterator[Result]:
    """T = 0 gives an empty y of the right shape."""
    o, positions = bench.hot.inputs(0)
    y = bench.hot.y(bench.hot.z(o, positions), bench.hardware)
    yield passed("no tokens", tuple(y.shape) == (0, bench.hot.config.hidden_size), f"y {tuple(y.shape)}")


def compiled(bench: Bench) -> Iterator[Result]:
    """torch.compile in one graph equals eager."""
    tally = Tally("compile")
    run = torch.compile(lambda o, p: bench.hot.z(o, p), fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for tokens in TOKENS:
            o, positions = bench.hot.inputs(tokens)
            tally.add(f"T={tokens}", run(o, positions), bench.hot.z(o, positions))
    yield of_tally("torch.compile(fullgraph=True)", tally)


def replay_quantised(bench: Bench) -> Iterator[Result]:
    """wo_a of a quantised activation, captured once and replayed with new codes."""
    tally, model = Tally("replay"), SoftwareEngine(bench.hardware.arch)
    x = bench.hot.model_x(*bench.hot.inputs(64), model)
    graph, z = captured(lambda: bench.hot.z(x, None))
    for _ in range(2):
        new = bench.hot.model_x(*bench.hot.inputs(64), model)
        x.data.copy_(new.data)
        x.scale.copy_(new.scale)
        graph.replay()
        tally.add("z", z, bench.hot.z(new, None))
    yield of_tally("CUDA graph of a quantised activation", tally)


def replay(bench: Bench) -> Iterator[Result]:
    """The hot call, captured once and replayed with new attention output and positions."""
    name, tally = "CUDA graph of the hot call", Tally("replay")
    if bench.hardware.quantizer == "software":
        yield Result(name, "fail", detail=f"not captured: {HOST_QUANTISER}")
        return
    o, positions = bench.hot.inputs(64)
    buffers = OProjBuffers.allocate(64, **bench.hot.sizes, device=o.device)
    graph, z = captured(lambda: bench.hot.z(o, positions, buffers=buffers))
    for _ in range(2):
        new_o, new_positions = bench.hot.inputs(64)
        o.copy_(new_o)
        positions.copy_(new_positions)
        graph.replay()
        tally.add("z", z, bench.hot.z(new_o, new_positions))
    yield of_tally(name, tally)


def replay_wo_b(bench: Bench) -> Iterator[Result]:
    """wo_b, captured once and replayed with a new z."""
    tally = Tally("replay")
    z, new = (bench.hot.z(*bench.hot.inputs(64)) for _ in range(2))
    y = torch.empty((64, bench.hot.config.hidden_size), dtype=torch.bfloat16, device=z.device)
    bench.hot.y(z, bench.hardware, y)
    with no_sync():  # what waits for the device cannot be captured, and a failed capture spoils the context
        bench.hot.y(z, bench.hardware, y)
    graph, y = captured(lambda: bench.hot.y(z, bench.hardware, y))
    z.copy_(new)
    graph.replay()
    tally.add("y", y, bench.hot.y(new, bench.hardware))
    yield of_tally("CUDA graph of wo_b", tally)


def quiet(bench: Bench) -> Iterator[Result]:
    """No wait for the device in the hot call, as far as torch sees it."""
    o, positions = bench.hot.inputs(64)
    bench.hot.z(o, positions)
    with no_sync():
        bench.hot.z(o, positions)
    yield passed("no sync in the hot call", True)


def frugal(bench: Bench) -> Iterator[Result]:
    """No allocation in the hot call when it is given buffers."""
    o, positions = bench.hot.inputs(64)
    buffers = OProjBuffers.allocate(64, **bench.hot.sizes, device=o.device)
    bench.hot.z(o, positions, buffers=buffers)
    before = torch.cuda.memory_stats(o.device)["allocation.all.allocated"]
    z = bench.hot.z(o, positions, buffers=buffers)
    count = torch.cuda.memory_stats(o.device)["allocation.all.allocated"] - before
    yield passed("no allocation in the hot call", count == 0, f"{count} allocations")
    tally = Tally("buffers")
    tally.add("z", z, bench.hot.z(o, positions))
    yield of_tally("buffers change no bit", tally)


# Captures last: one that goes wrong may spoil the context for what follows.
CHECKS: dict[str, Callable[[Bench], Iterator[Result]]] = {
    "chain": chain,
    "no tokens": no_tokens,
    "torch.compile(fullgraph=True)": compiled,
    "no allocation in the hot call": frugal,
    "no sync in the hot call": quiet,
    "CUDA graph of a quantised activation": replay_quantised,
    "CUDA graph of the hot call": replay,
    "CUDA graph of wo_b": replay_wo_b,
}


def of_tally(name: str, tally: Tally) -> Result:
    """A comparison passes where something was compared and nothing differs."""
    good = tally.compared > 0 and tally.mismatched == 0
    return Result(name, "pass" if good else "fail", tally.compared, tally.mismatched, tally.first)


def passed(name: str, good: bool, detail: str = "") -> Result:
    """A check that is true or not."""
    return Result(name, "pass" if good else "fail", detail=detail)


@contextmanager
def no_sync() -> Iterator[None]:
    """Torch raises where it would wait for the device."""
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def captured(call: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """A graph of ``call`` after a warm-up on another stream, and the tensor that replays write."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


def run_checks(bench: Any, checks: dict[str, Callable[[Any], Iterator[Result]]]) -> list[Result]:
    """Every result; a check that raises is a failure with its error, and the others still run."""
    results = []
    for name, check in checks.items():
        start = time.monotonic()
        try:
            for result in check(bench):
                results.append(result)
                print(f"{result.result} {result.check} ({time.monotonic() - start:.1f} s)", flush=True)
        except Exception as error:
            hint = f"; {HOST_QUANTISER}" if bench.hardware.quantizer == "software" else ""
            results.append(Result(name, "fail", detail=f"{type(error).__name__}: {error}{hint}"))
            print(f"fail {name}", flush=True)
            traceback.print_exc()
    return results


def table(results: list[Result]) -> str:
    """One line a check, for people."""
    width = max((len(result.check) for result in results), default=0)
    return "\n".join(
        f"{r.result:<5} {r.check:<{width}} {r.compared:>12} compared {r.mismatched:>8} differ  {r.detail[:160]}"
        for r in results
    )


def exit_code(results: list[Result]) -> int:
    """0 all passed, 1 a check failed, 4 nothing was compared."""
    if any(result.result != "pass" for result in results):
        return 1
    return 0 if sum(result.compared for result in results) else 4


def main(out: Path) -> int:
    """Run every check on the current GPU and write ``gpu_checks.json``; exit codes of ``oproj``."""
    try:
        hardware = DeepGemmEngine(current_gpu()[1] or "sm90")
    except EngineUnavailable as error:
        print(f"nothing checked: {error}", file=sys.stderr)
        return 3
    draw = Draw(hardware.device)
    positions = cos_sin_cache("yarn", MAX_POSITION).to(hardware.device)
    hot = Layer(hardware.arch, get_preset("v4-pro"), draw, positions)
    bench = Bench(hardware, SoftwareEngine(hardware.arch, device=hardware.device), draw, positions, hot)
    results = run_checks(bench, CHECKS)
    described = hardware.describe()
    facts = {"arch": hardware.arch.name, **{name: described.get(name) for name in (*FACTS, "quantizer")}}
    facts["date"] = datetime.now(timezone.utc).isoformat(timespec="seconds")
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "gpu_checks.json", {"schema": 1, **facts, "checks": [asdict(result) for result in results]})
    print(f"\non {', '.join(f'{name} {value}' for name, value in facts.items())}\n{table(results)}")
    return exit_code(results)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m conformance.gpu_checks", description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, type=Path, help="folder of gpu_checks.json")
    sys.exit(main(parser.parse_args().out))
