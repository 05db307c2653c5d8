"""What Cases cost: processor seconds and memory of a Case from its sizes, and how long a run of many takes.

A cost is a sum of features, each a count of work (multiply-accumulates, weights made, elements quantised), times
coefficients that are not negative, so more work never costs less. The coefficients were fitted to measured Cases on the
software engine (``python -m benchmarks.cost``) and lie beside this module in ``cost.json``, with machine and versions.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from conformance.case import Case

PATH = Path(__file__).with_name("cost.json")
_TABLE_ROWS = {"far": 1 << 20, "boundaries": 1 << 17, "shuffled": 1 << 16}  # of the cos/sin table, by position family
_FEW_ROWS = 1 << 12
FEATURES = (
    "case",  # each Case once
    "made",  # weights of wo_a and wo_b that are made, in millions
    "live",  # a Case with tokens: only it is judged
    "wo_a fp8",  # weights of wo_a, in millions, in a Case with tokens; e4m3 codes
    "wo_a bf16",
    "wo_b",  # weights of wo_b, in millions, in a Case with tokens
    "elements",  # of the attention output, in millions
    "macs fp8",  # of wo_a, in millions
    "macs bf16",
    "macs wo_b",
    "partials",  # elements of the ranks' partials that are summed, in millions
    "table",  # rows of the cos/sin table, in millions, in a Case with tokens
)
Coefficients = Mapping[str, float]


def features(case: Case) -> dict[str, float]:
    """How much of each of `FEATURES` is in ``case``, on its rank."""
    config, tokens = case.config, case.tokens
    wo_a = config.n_groups * config.o_lora_rank * config.group_k / 1e6
    wo_b = config.hidden_size * config.wo_b_k / 1e6
    live, fp8 = float(tokens > 0), float(case.wo_a_dtype == "fp8")
    return {
        "case": 1.0,
        "made": wo_a + wo_b,
        "live": live,
        "wo_a fp8": live * fp8 * wo_a,
        "wo_a bf16": live * (1 - fp8) * wo_a,
        "wo_b": live * wo_b,
        "elements": tokens * config.n_groups * config.group_k / 1e6,
        "macs fp8": tokens * fp8 * wo_a,
        "macs bf16": tokens * (1 - fp8) * wo_a,
        "macs wo_b": tokens * wo_b,
        "partials": tokens * case.tp_size * config.hidden_size / 1e6 if case.tp_size > 1 else 0.0,
        "table": live * _TABLE_ROWS.get(case.position_family, _FEW_ROWS) / 1e6,
    }


@dataclass(frozen=True)
class Overhead:
    """What a run costs beside its Cases, in seconds: ``start`` until the first process works, of ``draw`` a Case of a
    profile before the first is run, of ``collect`` a Case in the process that gathers rows, and of ``finish`` a Case
    for tables and page at the end; ``finish_bytes`` of memory a Case then, when that process holds all rows."""

    start: float
    draw: float
    collect: float
    finish: float
    finish_bytes: float


@dataclass(frozen=True)
class GpuFigure:
    """One run on a GPU of ``arch`` that was timed: a rough figure, no fit. ``processor_seconds``: what the model gives
    for its Cases on the software engine; other runs are taken in proportion to theirs."""

    arch: str
    device: str
    what: str
    wall_seconds: float
    processor_seconds: float


@dataclass(frozen=True)
class Estimate:
    """How long a run takes: processor seconds of each arch, wall seconds on ``cores``, and the bytes of the largest
    Case's process and of the one that gathers rows; all 0 for a run without Cases. ``gpu_seconds``: wall seconds,
    roughly, of the arch of `GpuFigure` as its run had it."""

    cases: Mapping[str, int]
    processor_seconds: Mapping[str, float]
    cores: int
    wall_seconds: float
    process_bytes: float
    gather_bytes: float
    gpu_seconds: float

    @property
    def total_seconds(self) -> float:
        """Processor seconds of all Cases."""
        return sum(self.processor_seconds.values())


@dataclass(frozen=True)
class CostModel:
    """The fitted coefficients.

    seconds: by arch and feature, processor seconds on the machine of the fit. bytes: by feature, peak resident memory
    of a process that runs the Case. calibration: measured processor seconds there of the Cases that tell the speed of
    another machine, by arch. held_out: relative error of the summed prediction on Cases that the fit had
    not seen, by arch.
    """

    seconds: Mapping[str, Coefficients]
    bytes: Coefficients
    calibration: Mapping[str, float]
    overhead: Overhead
    gpu: GpuFigure
    held_out: Mapping[str, float]
    machine: str
    versions: Mapping[str, str]
    date: str

    def __post_init__(self) -> None:
        for arch, coefficients in self.seconds.items():
            _check_features(f"seconds[{arch!r}]", coefficients)
        _check_features("bytes", self.bytes)
        _check_numbers("calibration", self.calibration)
        _check_numbers("overhead", asdict(self.overhead))
        times = {"wall_seconds": self.gpu.wall_seconds, "processor_seconds": self.gpu.processor_seconds}
        _check_numbers("gpu", times)
        if self.seconds.keys() != self.calibration.keys():
            raise ValueError(
                f"calibration has {', '.join(self.calibration)} and seconds {', '.join(self.seconds)}: the archs of "
                "both must be the same"
            )

    def case_seconds(self, case: Case) -> float:
        """Processor seconds of ``case`` on one thread of the machine of the fit. Raises ``ValueError`` for an arch that
        was not measured."""
        if case.arch not in self.seconds:
            raise ValueError(
                f"arch={case.arch!r} has no measured cost; measured: {', '.join(self.seconds)}. "
                "`python -m benchmarks.cost` measures it"
            )
        return _dot(self.seconds[case.arch], features(case))

    def case_bytes(self, case: Case) -> float:
        """Peak resident memory of a process that runs ``case``."""
        return _dot(self.bytes, features(case))

    def estimate(
        self,
        cases: Iterable[Case],
        cores: int,
        *,
        slower: float = 1.0,
        counts: Mapping[str, int] | None = None,
        drawn: bool = False,
    ) -> Estimate:
        """What a run of ``cases`` takes on ``cores`` with a process each, all cores free.

        slower: processor time of a Case here over that on the machine of the fit (`calibrate`). counts: how many Cases
        of each arch the run has, where ``cases`` are a sample of them; ``drawn``: they are those of a profile.
        Raises ``ValueError`` for cores below 1, a factor that is no positive number, and counts without a sample.
        """
        if cores < 1:
            raise ValueError(f"cores={cores} must be at least 1")
        if not 0 < slower < math.inf:
            raise ValueError(f"slower={slower} must be a positive number")
        seen: dict[str, int] = {}
        seconds: dict[str, float] = {}
        longest = memory = 0.0
        for case in cases:
            cost = self.case_seconds(case) * slower
            seen[case.arch] = seen.get(case.arch, 0) + 1
            seconds[case.arch] = seconds.get(case.arch, 0.0) + cost
            longest, memory = max(longest, cost), max(memory, self.case_bytes(case))
        numbers = dict(seen) if counts is None else {arch: count for arch, count in counts.items() if count}
        if numbers.keys() != seen.keys():
            raise ValueError(f"counts={dict(numbers)} must name the archs of the cases: {', '.join(seen) or 'none'}")
        scaled = {arch: seconds[arch] * numbers[arch] / seen[arch] for arch in numbers}
        work, number = sum(scaled.values()), sum(numbers.values())
        wall = self._wall(work, longest, number, cores, slower, drawn) if number else 0.0
        on_gpu = scaled.get(self.gpu.arch, 0.0) / slower / self.gpu.processor_seconds
        gather = self.bytes["case"] + number * self.overhead.finish_bytes if number else 0.0
        return Estimate(numbers, scaled, cores, wall, memory, gather, self.gpu.wall_seconds * on_gpu)

    def _wall(self, work: float, longest: float, number: int, cores: int, slower: float, drawn: bool) -> float:
        """The processes share the cores with the one that gathers their rows, which alone draws and finishes."""
        overhead = self.overhead
        gathered = overhead.collect * number * slower
        alone = overhead.start + number * (overhead.finish + (overhead.draw if drawn else 0.0))
        return alone * slower + max((work + gathered) / cores, gathered, longest)

    def to_json(self) -> str:
        """All of it, as `from_json` reads it."""
        return json.dumps(asdict(self), indent=1, sort_keys=True, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> CostModel:
        """The model of a text that `to_json` gave. Raises ``ValueError`` that says what is wrong with another."""
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"coefficients are not JSON: {error}") from None
        values = _record(cls, values, "coefficients")
        values["overhead"] = Overhead(**_record(Overhead, values["overhead"], "overhead"))
        values["gpu"] = GpuFigure(**_record(GpuFigure, values["gpu"], "gpu"))
        for name in ("seconds", "bytes", "calibration", "held_out", "versions"):
            if not isinstance(values[name], dict):
                raise ValueError(f"coefficients: {name}={values[name]!r} must be an object")
        return cls(**values)


def load_model(path: Path = PATH) -> CostModel:
    """The coefficients in ``path``, by default those of the package. Raises what `CostModel.from_json` raises, with the
    file's name, and ``OSError``."""
    text = path.read_text(encoding="utf-8")
    try:
        return CostModel.from_json(text)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _dot(coefficients: Coefficients, amounts: Mapping[str, float]) -> float:
    return sum(coefficients[name] * amount for name, amount in amounts.items())


def _record(kind: type, values: Any, name: str) -> dict[str, Any]:
    known = [field.name for field in fields(kind)]
    if not isinstance(values, dict) or values.keys() != set(known):
        found = ", ".join(sorted(values)) if isinstance(values, dict) else type(values).__name__
        raise ValueError(f"{name} must be an object of {', '.join(known)}; found: {found}")
    return dict(values)


def _check_features(name: str, coefficients: Any) -> None:
    if not isinstance(coefficients, Mapping) or coefficients.keys() != set(FEATURES):
        raise ValueError(f"{name}={coefficients!r} must have a coefficient for each of {', '.join(FEATURES)}")
    _check_numbers(name, coefficients)


def _check_numbers(name: str, values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
            raise ValueError(f"{name}: {key}={value!r} must be a number of at least 0")
    if not any(values.values()):
        raise ValueError(f"{name} is all zero, which costs nothing")
