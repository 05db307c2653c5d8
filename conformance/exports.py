"""The stages as FlashInfer-Bench definitions, and adversarial Cases as its workloads.

`python -m conformance.exports --out DIR` fills DIR with the folders of a FlashInfer-Bench data set: `definitions/`,
`workloads/` and, as safetensors, the tensors of each Case in `blob/`. A definition's reference is executable: the
quantisers give the serving kernel's bits (RopeQuant's epilogue too, as far as its open sibling says them), the two
projections a float64 sum of the same codes, rounded to BF16.

What that benchmark asks of z and y, 1e-2 absolute or relative, is far looser than the bounds of this suite: it finds
a wrong layout, not a short accumulator. Schema: flashinfer-bench 0.1.2, `flashinfer_bench/data`.
"""

from __future__ import annotations

import inspect
import json
import shutil
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from safetensors.torch import save_file

from conformance import export_reference as source
from conformance.case import Case
from conformance.families import FAMILIES
from conformance.inputs import build
from conformance.terminal import guarded, say, split
from conformance.truth import Truth
from oproj import rope_quant_call as fused
from reports.files import write_atomically, write_text

Tensors = dict[str, torch.Tensor]
Json = dict[str, Any]
PRESETS = ("v4-flash", "v4-pro")
STAGES = ("quantize", "wo_a", "wo_b", "rope_quant")
_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_URL, "oproj/exports")
_NAMES = {torch.bfloat16: "bfloat16", torch.float32: "float32", torch.int64: "int64", torch.int32: "int32"}
_NAMES |= {torch.float8_e4m3fn: "float8_e4m3fn"}


@dataclass(frozen=True)
class Stage:
    """One stage at one size: the definition, and how a Case becomes its inputs.

    shapes: axis names of each input and output; sizes: the axes that are constant; functions and call: what `run` is
    made of.
    """

    name: str
    op_type: str
    description: str
    shapes: Mapping[str, tuple[tuple[str, ...], str]]
    outputs: Mapping[str, tuple[tuple[str, ...], str]]
    sizes: dict[str, int]
    functions: tuple[Callable[..., Any], ...]
    call: str
    constraints: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()

    def definition(self) -> Json:
        """The definition as JSON values."""
        used = [axis for shape, _ in self.shapes.values() for axis in shape]
        axes: Json = {axis: {"type": "const", "value": size} for axis, size in self.sizes.items()}
        axes |= {axis: {"type": "var"} for axis in used if axis not in self.sizes}
        return {
            "name": self.name,
            "op_type": self.op_type,
            "description": self.description,
            "tags": ["model:deepseek-v4", "stage:output-projection", *self.tags],
            "axes": axes,
            "inputs": {name: _tensor(*entry) for name, entry in self.shapes.items()},
            "outputs": {name: _tensor(*entry) for name, entry in self.outputs.items()},
            "constraints": list(self.constraints),
            "reference": self.reference(),
        }

    def reference(self) -> str:
        """Source text that needs torch alone and defines `run` with the inputs in their order."""
        parts = ["from __future__ import annotations\n\nimport torch\n", *map(inspect.getsource, self.functions)]
        parts.append(f"def run({', '.join(self.shapes)}):\n    return {self.call}\n")
        return "\n\n".join(parts)

    def axes_of(self, tensors: Tensors) -> dict[str, int]:
        """Sizes of the variable axes. Raises ``ValueError`` where a tensor has another dtype or size than stated."""
        found = dict(self.sizes)
        for name, (shape, dtype) in self.shapes.items():
            tensor = tensors[name]
            if _NAMES[tensor.dtype] != dtype or tensor.dim() != len(shape):
                raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}; expected {dtype} {list(shape)}")
            for axis, size in zip(shape, tensor.shape, strict=True):
                if found.setdefault(axis, size) != size:
                    raise ValueError(f"{name} has {axis}={size}; expected {found[axis]}")
        return {axis: size for axis, size in found.items() if axis not in self.sizes}


def _tensor(shape: tuple[str, ...], dtype: str) -> Json:
    return {"shape": list(shape), "dtype": dtype}


_ROTATED = {
    "positions": (("num_tokens",), "int64"),
    "cos_sin_cache": (("max_position", "rope_dim"), "float32"),
}
_QUANTISED = {
    "x_steps": (("num_tokens", "num_groups", "group_k"), "int32"),
    "x_exponents": (("num_tokens", "num_groups", "num_blocks"), "int32"),
}
_AS_INTEGERS = (
    "x_steps holds the e4m3 code's value times 512, x_exponents the exponent of its block's scale, 2^k: the serving "
    "kernel's codes and UE8M0 bytes (less 127) as numbers that a tolerance of 1e-2 tells apart. "
)
_POSITIONS = ("group_k == num_blocks * 128", "num_heads % num_groups == 0")


def quantize_stage(heads: int, groups: int) -> Stage:
    """Inverse RoPE and block quantisation of BF16 attention output."""
    return Stage(
        name=f"dsv4_inv_rope_fp8_quant_h{heads}_g{groups}",
        op_type="inv_rope_fp8_quant",
        description="Rotates the last 64 values of each head back and quantises blocks of 128 to e4m3. " + _AS_INTEGERS
        + "Served layout: codes [T, G, K] with strides (K, K*T, 1), scales MN-major.",
        shapes={"o": (("num_tokens", "num_heads", "head_dim"), "bfloat16"), **_ROTATED},
        outputs=_QUANTISED,
        sizes=_quantised_sizes(heads, groups),
        functions=source.QUANTIZERS,
        call=f"rotate_and_quantize(o, positions, cos_sin_cache, {groups}, 'log2')",
        constraints=_POSITIONS,
    )  # fmt: skip


def rope_quant_stage() -> Stage:
    """RopeQuant: the same in the attention's epilogue, from its FP32 accumulator."""
    return Stage(
        name=f"dsv4_rope_quant_epilogue_h{fused.HEADS}_g{fused.GROUPS}",
        op_type="rope_quant_epilogue",
        description="Epilogue of FlashInfer's sparse MLA decode for DeepSeek-V4 with RopeQuant: FP32 attention output, "
        "rotated back and quantised without a rounding to BF16 between, the scale by an exact ceiling. " + _AS_INTEGERS
        + "The kernel is closed: the rule is that of its open sibling (fmhaReduction.cu, flashinfer-python 0.7.4).",
        shapes={"o": (("num_tokens", "num_heads", "head_dim"), "float32"), **_ROTATED},
        outputs=_QUANTISED,
        sizes=_quantised_sizes(fused.HEADS, fused.GROUPS),
        functions=source.QUANTIZERS,
        call=f"rotate_and_quantize(o, positions, cos_sin_cache, {fused.GROUPS}, 'ceil')",
        constraints=_POSITIONS,
        tags=("fi_api:flashinfer.mla.trtllm_batch_decode_sparse_mla_dsv4", "route:rope_quant"),
    )  # fmt: skip


def _quantised_sizes(heads: int, groups: int) -> dict[str, int]:
    group_k = heads // groups * fused.HEAD_DIM
    sizes = {"num_heads": heads, "head_dim": fused.HEAD_DIM, "rope_dim": fused.ROPE_DIM}
    return sizes | {"num_groups": groups, "group_k": group_k, "num_blocks": group_k // 128}


def wo_a_stage(groups: int, group_k: int) -> Stage:
    """The grouped projection of FP8 codes."""
    return Stage(
        name=f"dsv4_grouped_wo_a_fp8_g{groups}_k{group_k}",
        op_type="grouped_fp8_gemm",
        description="z[t, g] = wo_a[g] x[t, g] of e4m3 codes, activation scales per 1 x 128 and weight scales per "
        "128 x 128. Summed in float64; a tensor core truncates, and what it may lose is bounded elsewhere.",
        shapes={
            "x": (("num_tokens", "num_groups", "group_k"), "float8_e4m3fn"),
            "x_scale": (("num_tokens", "num_groups", "num_blocks"), "float32"),
            "weight": (("num_groups", "lora_rank", "group_k"), "float8_e4m3fn"),
            "weight_scale": (("num_groups", "rank_blocks", "num_blocks"), "float32"),
        },
        outputs={"z": (("num_tokens", "num_groups", "lora_rank"), "bfloat16")},
        sizes={"num_groups": groups, "group_k": group_k, "num_blocks": group_k // 128},
        functions=source.WO_A,
        call="grouped_wo_a(x, x_scale, weight, weight_scale)",
        constraints=("group_k == num_blocks * 128", "rank_blocks == -(-lora_rank // 128)"),
    )


def wo_b_stage() -> Stage:
    """The second projection, with the quantisation of its input."""
    return Stage(
        name="dsv4_wo_b_fp8",
        op_type="fp8_block_linear",
        description="Quantises z per 1 x 128 to e4m3 with scales 2^k (at least 2^-33) and multiplies by a weight with "
        "128 x 128 scales: one rank's part of the hidden state. Summed in float64.",
        shapes={
            "z": (("num_tokens", "width"), "bfloat16"),
            "weight": (("hidden_size", "width"), "float8_e4m3fn"),
            "weight_scale": (("hidden_blocks", "num_blocks"), "float32"),
        },
        outputs={"y": (("num_tokens", "hidden_size"), "bfloat16")},
        sizes={},
        functions=source.WO_B,
        call="wo_b(z, weight, weight_scale)",
        constraints=("width == num_blocks * 128", "hidden_blocks == -(-hidden_size // 128)"),
    )


def cases(presets: Sequence[str] = PRESETS, families: Sequence[str] = tuple(FAMILIES), tokens: int = 3) -> list[Case]:
    """One Case per preset and family, one rank of eight, columns cut and K whole.

    SM90, whose scales are plain FP32 numbers: that benchmark compares packed words as floats, where wrong bytes pass.
    """
    chosen = [(preset, family) for preset in presets for family in families]
    return [
        Case("sm90", p, tokens, hidden_size=128, o_lora_rank=128, tp_size=8, family=f, position_family="small")
        for p, f in chosen
    ]


def stages_of(case: Case) -> list[tuple[Stage, Tensors]]:
    """The stages that a Case feeds, with the inputs of each: served codes go into wo_a, the engine's z into wo_b."""
    inputs, config = build(case), case.config
    truth, weights = Truth(inputs), inputs.weights
    if not truth.fp8 or case.padding_slots or weights.wo_a.block != (128, 128):
        raise ValueError(f"case {case.id} must have an FP8 wo_a with 128 x 128 blocks and no padding slots")
    x = truth.model_x
    rotation = {"positions": inputs.positions, "cos_sin_cache": inputs.cos_sin_cache}
    wo_a, wo_b = (
        {"weight": each.weight, "weight_scale": each.weight_scale_inv} for each in (weights.wo_a, weights.wo_b)
    )
    z = truth.model_z(x).flatten(1)
    heads = {"o": _heads(inputs.o, fused.HEADS).float(), **rotation}
    return [
        (quantize_stage(config.n_heads, config.n_groups), {"o": inputs.o, **rotation}),
        (wo_a_stage(config.n_groups, config.group_k), {"x": x.data, "x_scale": x.scale, **wo_a}),  # type: ignore[dict-item]
        (wo_b_stage(), {"z": z, **wo_b}),  # type: ignore[dict-item]
        (rope_quant_stage(), _between_bf16(heads)),
    ]


def _heads(o: torch.Tensor, heads: int) -> torch.Tensor:
    """The heads of ``o`` again and again until there are ``heads``."""
    return o.repeat(1, -(-heads // o.shape[1]), 1)[:, :heads]


def _between_bf16(tensors: Tensors) -> Tensors:
    """FP32 attention output that BF16 cannot hold: every value with a tail of its own below BF16's last bit."""
    o = tensors["o"]
    tail = torch.arange(o.numel(), dtype=torch.int64).mul(40503).bitwise_and(0x7FFF).view(o.shape).int()
    bits = torch.where(o == 0, 0, tail) | o.contiguous().view(torch.int32)
    return tensors | {"o": bits.view(torch.float32)}


def export(out: Path, chosen: Iterable[Case] | None = None) -> dict[str, int]:
    """Write the data set into ``out``; the number of workloads of each definition.

    What an earlier export left in its three folders is replaced. Raises ``ValueError`` for a Case that no stage takes
    and a folder that has files of someone else's.
    """
    _clear(out)
    workloads: dict[str, list[str]] = {}
    for case in cases() if chosen is None else chosen:
        for stage, tensors in stages_of(case):
            if stage.name not in workloads:
                path = out / "definitions" / stage.op_type / f"{stage.name}.json"
                write_text(path, json.dumps(stage.definition(), indent=1) + "\n")
            workloads.setdefault(stage.name, []).append(json.dumps(_workload(stage, case, tensors, out)))
            _append(out, stage, workloads[stage.name])
    return {name: len(lines) for name, lines in workloads.items()}


def _append(out: Path, stage: Stage, lines: list[str]) -> None:
    write_text(out / "workloads" / stage.op_type / f"{stage.name}.jsonl", "".join(f"{line}\n" for line in lines))


def _clear(out: Path) -> None:
    known = {"definitions", "workloads", "blob"}
    foreign = sorted(path.name for path in out.iterdir() if path.name not in known) if out.exists() else []
    if foreign:
        raise ValueError(f"{out} has {foreign[0]}, which is no part of an export; name a folder of its own")
    for name in known:
        if (out / name).exists():
            shutil.rmtree(out / name)


def _workload(stage: Stage, case: Case, tensors: Tensors, out: Path) -> Json:
    """A workload's trace; its tensors are written beside it."""
    identity = str(uuid.uuid5(_NAMESPACE, f"{stage.name}/{case.to_json()}"))
    path = Path("blob") / "workloads" / stage.op_type / stage.name / f"{identity}.safetensors"
    held = {name: tensor.contiguous() for name, tensor in tensors.items()}
    notes = {"case": case.to_json()}  # of several entries the order on disk would differ from run to run
    write_atomically(out / path, lambda temporary: save_file(held, temporary, metadata=notes))
    inputs = {name: {"type": "safetensors", "path": path.as_posix(), "tensor_key": name} for name in stage.shapes}
    workload = {"axes": stage.axes_of(tensors), "inputs": inputs, "uuid": identity}
    return {"definition": stage.name, "workload": workload, "solution": None, "evaluation": None}


def main(
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder of the data set; an earlier export is replaced.")],
    preset: Annotated[
        list[str] | None, typer.Option(help=f"Models: {', '.join(PRESETS)}; separate with commas.")
    ] = None,
    family: Annotated[list[str] | None, typer.Option(help=f"Input families: {', '.join(FAMILIES)}.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each workload.")] = 3,
) -> None:
    """Write FlashInfer-Bench definitions of the stages, and adversarial Cases as their workloads."""
    counts = guarded(lambda: export(out, cases(split(preset, PRESETS), split(family, tuple(FAMILIES)), tokens)))
    for name, count in counts.items():
        say(f"{name}: {count} workloads")
    say(f"{len(counts)} definitions in {out}")


if __name__ == "__main__":
    typer.run(main)
