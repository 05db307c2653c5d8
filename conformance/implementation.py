"""What is under test: an object with the stages of the output projection as methods.

`SoftwareImplementation(arch)` has them all on the bit-exact model, `EngineImplementation(engine)` on any engine. A user
overrides the stage that is theirs and names the class on the command line.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import torch

from conformance.case import CaseConfig
from conformance.inputs import LinearWeight, Weights
from oproj.activation import QuantizedActivation
from oproj.arch import Arch, get_arch
from oproj.engines import Engine, EngineUnavailable
from oproj.engines.software import SoftwareEngine
from oproj.o_proj import bf16_groups, deep_gemm_fp8_o_proj
from oproj.wo_b import fp8_wo_b, reduce_partials

ENTRY_POINTS = "oproj.implementations"
METHODS = ("quantize", "wo_a", "wo_b", "reduce", "o_proj")
REDUCTIONS = ("bf16", "fp32")  # what an implementation may declare as its ``reduction``
_CHAINED = ("quantize", "wo_a", "wo_b")


class Implementation(Protocol):
    """What the suite calls. Tensors live on ``device`` (an attribute; the CPU where there is none)."""

    name: str
    arch: Arch

    def quantize(
        self, o: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor, *, config: CaseConfig
    ) -> QuantizedActivation:
        """Inverse RoPE and block quantisation; BF16 values and an unused scale where wo_a is BF16."""

    def wo_a(self, x: QuantizedActivation, weights: Weights, *, config: CaseConfig) -> torch.Tensor:
        """z BF16 ``[T, G, R]``; x may have dead slots behind the first G."""

    def wo_b(self, z: torch.Tensor, weights: Weights, *, config: CaseConfig) -> torch.Tensor:
        """This rank's y BF16 ``[T, hidden]``."""

    def reduce(self, partials: Sequence[torch.Tensor], *, config: CaseConfig) -> torch.Tensor:
        """y over all ranks from every rank's y."""

    def o_proj(
        self,
        o: torch.Tensor,
        positions: torch.Tensor,
        cos_sin_cache: torch.Tensor,
        weights: Weights,
        *,
        config: CaseConfig,
    ) -> torch.Tensor:
        """This rank's y from the attention output."""


class EngineImplementation:
    """The output projection as served, on one engine of `oproj.engines`."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.arch = engine.arch
        self.name: str = engine.name

    @property
    def device(self) -> torch.device:
        """Where the engine's tensors live."""
        return self.engine.device

    def quantize(
        self, o: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor, *, config: CaseConfig
    ) -> QuantizedActivation:
        """Inverse RoPE and block quantisation on the engine."""
        # Only the model can be asked for another rotation arithmetic; hardware has the one it was compiled with.
        variant = {"variant": config.variant} if isinstance(self.engine, SoftwareEngine) else {}
        data, scale = self.engine.inv_rope_fp8_quant(
            o,
            positions,
            cos_sin_cache,
            n_groups=config.n_groups,
            heads_per_group=config.heads_per_group,
            nope_dim=config.nope_dim,
            rope_dim=config.rope_dim,
            quant_group_size=config.quant_group_size(self.arch),
            tma_aligned_scales=self.arch.tma_aligned_scales,
            quantize=config.fp8_wo_a(self.arch),
            **variant,
        )
        return QuantizedActivation(data, scale)

    def wo_a(self, x: QuantizedActivation, weights: Weights, *, config: CaseConfig) -> torch.Tensor:
        """Grouped FP8 product, or a BF16 product per group where the weight is BF16."""
        groups, rank = config.n_groups, config.o_lora_rank
        weight, scale = weights.wo_a.weight, weights.wo_a.weight_scale_inv
        z = torch.empty((x.data.shape[0], groups, rank), dtype=torch.bfloat16, device=x.data.device)
        if scale is None:
            bf16_groups(x.data[:, :groups], weight, out=z)
            return z
        live = x.sliced(groups)
        recipe = self.arch.recipe(config.quant_group_size(self.arch))
        self.engine.fp8_einsum("bhr,hdr->bhd", (live.data, live.scale), (weight, scale), z, recipe=recipe)
        return z

    def wo_b(self, z: torch.Tensor, weights: Weights, *, config: CaseConfig) -> torch.Tensor:
        """FP8 block linear with its own activation quantiser."""
        return fp8_wo_b(z.flatten(1), weights.wo_b.weight, _scale(weights.wo_b), engine=self.engine)

    def reduce(self, partials: Sequence[torch.Tensor], *, config: CaseConfig) -> torch.Tensor:
        """BF16 partials summed in FP32 in the order of the ranks, rounded once."""
        return reduce_partials(list(partials), "fp32")

    def o_proj(
        self,
        o: torch.Tensor,
        positions: torch.Tensor,
        cos_sin_cache: torch.Tensor,
        weights: Weights,
        *,
        config: CaseConfig,
    ) -> torch.Tensor:
        """The serving entry point on this engine; the chain of the methods where one of them is overridden, and where
        the Case asks for another rotation variant than the entry point's."""
        overridden = any(not inherits(self, stage) for stage in _CHAINED)
        if overridden or config.variant != "fma_cos":
            return chain(self, o, positions, cos_sin_cache, weights, config)
        block = config.quant_group_size(self.arch)
        return deep_gemm_fp8_o_proj(
            o,
            positions,
            cos_sin_cache,
            weights.wo_a,
            lambda flat: fp8_wo_b(flat, weights.wo_b.weight, _scale(weights.wo_b), engine=self.engine),
            n_groups=config.n_groups,
            heads_per_group=config.heads_per_group,
            nope_dim=config.nope_dim,
            rope_dim=config.rope_dim,
            o_lora_rank=config.o_lora_rank,
            einsum_recipe=self.arch.recipe(block),
            tma_aligned_scales=self.arch.tma_aligned_scales,
            engine=self.engine,
        )


class SoftwareImplementation(EngineImplementation):
    """Every stage on the bit-exact software engine of ``arch`` (a row or its name); override what is yours."""

    def __init__(self, arch: Arch | str) -> None:
        super().__init__(SoftwareEngine(arch))
        if type(self) is not SoftwareImplementation:
            self.name = type(self).__name__


def chain(
    implementation: Implementation,
    o: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    weights: Weights,
    config: CaseConfig,
) -> torch.Tensor:
    """quantize, wo_a, wo_b of ``implementation``, one after another: this rank's y."""
    x = implementation.quantize(o, positions, cos_sin_cache, config=config)
    z = implementation.wo_a(x, weights, config=config)
    return implementation.wo_b(z, weights, config=config)


def inherits(implementation: object, method: str) -> bool:
    """Whether ``method`` is the one of `EngineImplementation`, not overridden by class or instance."""
    function = getattr(getattr(implementation, method, None), "__func__", None)
    return function is getattr(EngineImplementation, method)


def is_the_model(implementation: object, stage: str) -> bool:
    """Whether ``stage`` of ``implementation`` is the software engine itself, which cannot be its own judge.

    An engine that derives from it, or has one of its methods replaced, is somebody's own.
    """
    engine = getattr(implementation, "engine", None)
    if engine is None or not inherits(implementation, stage):
        return False
    if stage == "reduce":
        return True
    if stage == "o_proj":
        return all(is_the_model(implementation, part) for part in _CHAINED)
    if stage == "quantize" and getattr(engine, "quantizer", "") == "software":  # an engine may leave it to the model
        return True
    return type(engine) is SoftwareEngine and not any(callable(value) for value in vars(engine).values())


def load_implementation(spec: str, arch: Arch | str) -> Implementation:
    """The implementation that ``spec`` names: ``package.module:Mine``, ``path/to/file.py:Mine``, or the name of an
    entry point of the group `oproj.implementations`. A class is built with the arch row, an instance is taken as it is.

    Raises ``ValueError`` where the name leads nowhere or what it names is no implementation for ``arch``,
    ``EngineUnavailable`` where its module needs a package that is not installed.
    """
    row = get_arch(arch)
    target = _resolve(spec)
    implementation = _built(spec, target, row) if isinstance(target, type) else target
    missing = [name for name in ("name", "arch", *METHODS) if not hasattr(implementation, name)]
    if missing:
        raise ValueError(
            f"implementation={spec!r} lacks {', '.join(missing)}; derive it from conformance.SoftwareImplementation "
            "to override only what is yours"
        )
    if get_arch(implementation.arch) is not row:
        raise ValueError(f"implementation={spec!r} is for {implementation.arch.name}, not for {row.name}")
    _check_attributes(spec, implementation)
    return implementation


def _built(spec: str, target: type, row: Arch) -> Any:
    """An object of the class that ``spec`` names; whatever stops it from being made is bad input."""
    try:
        return target(row)
    except (EngineUnavailable, KeyboardInterrupt):
        raise
    except BaseException as error:  # sys.exit in the code under test must not end the program as if all were well
        kind = type(error).__name__
        raise ValueError(f"implementation={spec!r} cannot be built for {row.name}: {kind}: {error}") from error


def _check_attributes(spec: str, implementation: Any) -> None:
    name, reduction = implementation.name, getattr(implementation, "reduction", REDUCTIONS[0])
    if not isinstance(name, str) or not name:
        raise ValueError(f"implementation={spec!r} has name={name!r}; it must be a text that is not empty")
    if reduction not in REDUCTIONS:
        raise ValueError(f"implementation={spec!r} has reduction={reduction!r}; known: {', '.join(REDUCTIONS)}")
    device = getattr(implementation, "device", "cpu")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:
        first = str(error).partition("\n")[0]
        raise EngineUnavailable(f"implementation={spec!r} works on device={device!r}: {first}") from error


def _scale(weight: LinearWeight) -> torch.Tensor:
    if weight.weight_scale_inv is None:
        raise ValueError("an FP8 weight needs a weight_scale_inv")
    return weight.weight_scale_inv


def _resolve(spec: str) -> Any:
    if ":" not in spec:
        return _entry_point(spec)
    where, _, name = spec.rpartition(":")
    module = _module_of_file(Path(where)) if where.endswith(".py") else _module_of_name(where)
    if not hasattr(module, name):
        public = ", ".join(n for n in vars(module) if not n.startswith("_")) or "nothing"
        raise ValueError(f"implementation={spec!r}: {where} has no {name!r}; it has {public}")
    return getattr(module, name)


def _entry_point(name: str) -> Any:
    found = {point.name: point for point in metadata.entry_points(group=ENTRY_POINTS)}
    if name not in found:
        known = ", ".join(sorted(found)) or "none"
        raise ValueError(
            f"implementation={name!r} is unknown; entry points of {ENTRY_POINTS}: {known}; or give package.module:Mine "
            "or path/to/file.py:Mine"
        )
    return _importing(name, found[name].load)


def _module_of_name(name: str) -> ModuleType:
    try:
        missing = importlib.util.find_spec(name) is None
    except ModuleNotFoundError:  # a parent package is absent
        missing = True
    except (ImportError, ValueError) as error:  # not the name of a module
        raise ValueError(f"implementation module {name!r}: {error}") from None
    if missing:
        raise ValueError(f"implementation module {name!r} is not installed, and is not in the current folder")
    return _importing(name, lambda: importlib.import_module(name))


def _module_of_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ValueError(f"implementation file {str(path)!r} does not exist")
    spec = importlib.util.spec_from_file_location(f"oproj_implementation_{path.stem}", path)
    loader = spec.loader if spec else None
    if spec is None or loader is None:
        raise ValueError(f"implementation file {str(path)!r} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up by name
    _importing(str(path), lambda: loader.exec_module(module))
    return module


def _importing(what: str, load: Any) -> Any:
    try:
        return load()
    except ImportError as error:
        raise EngineUnavailable(f"implementation {what!r} cannot be imported: {error}") from error
    except (EngineUnavailable, KeyboardInterrupt):
        raise
    except BaseException as error:  # also sys.exit, which would end the program with the module's own code
        raise ValueError(f"implementation {what!r} cannot be imported: {type(error).__name__}: {error}") from error
