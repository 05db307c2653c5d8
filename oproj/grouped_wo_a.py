"""``DeepseekV4GroupedWoA``: the first output projection as one linear a head group, split over ranks by groups.

Names and calls of vLLM's ``deepseek_v4.common.grouped_wo_a``. Group g meets its own rows of the weight only; adapters
follow the same rule, so the delta of group g is ``(x_g A^T) B_g^T`` and never mixes groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from oproj.activation import QuantizedActivation
from oproj.arch import Arch, arch_of_capability, get_arch
from oproj.checkpoint import ArchWeight, CheckpointError, WeightReport, local_groups, wo_a_for_arch
from oproj.checkpoint_forms import stays_fp8
from oproj.config import CheckpointScale
from oproj.engines import Engine, EngineUnavailable, Recipe, get_engine
from oproj.grouped_lora import GroupedLora
from oproj.o_proj import deep_gemm_fp8_o_proj
from oproj.quantize import fused_inv_rope_fp8_quant
from oproj.weights import layout_weight_scales


class DeepseekV4GroupedWoA(torch.nn.Module):
    """``wo_a``: ``input_size`` = K of one group, ``output_size`` = n_groups*R of all ranks.

    Attributes as the serving engine has them: ``weight`` (e4m3 or BF16 ``[n_local_groups, R, K]``), for FP8 its scales
    in the layout of ``arch`` as ``weight_scale_inv`` (``weight_scale`` for 32 x 32 blocks), ``n_local_groups``,
    ``is_bmm``, ``bmm_batch_size``. They hold nothing until ``load_weights`` or ``load_state_dict`` was called.

    dtype: e4m3, or BF16 for a checkpoint of that form; e4m3 weights of 32 x 32 blocks are BF16 on rows that do not
    serve them. arch: a row or its name; by default the engine's, else that of the current GPU. engine: by default
    ``software`` for CPU tensors and ``deep_gemm`` for CUDA ones. Raises ``ValueError``/``TypeError`` that names the
    argument, ``EngineUnavailable`` where no architecture is known.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        n_groups: int,
        tp_size: int = 1,
        tp_rank: int = 0,
        arch: Arch | str | None = None,
        dtype: torch.dtype = torch.float8_e4m3fn,
        weight_block: tuple[int, int] = (128, 128),
        checkpoint_scale: CheckpointScale = "e8m0",
        engine: Engine | None = None,
        device: Any = None,
    ) -> None:
        super().__init__()
        self.arch = _arch_of(arch, engine)
        self.n_groups, self.tp_size, self.tp_rank = n_groups, tp_size, tp_rank
        self.n_local_groups = local_groups(n_groups, tp_size, tp_rank)
        _check_sizes(input_size, output_size, n_groups, dtype, weight_block)
        self.input_size, self.output_size = input_size, output_size
        self.o_lora_rank = output_size // n_groups
        self.weight_block = (weight_block[0], weight_block[1])
        self.checkpoint_scale, self.engine = checkpoint_scale, engine
        self.stored_dtype = dtype
        self.is_bmm, self.bmm_batch_size = True, self.n_local_groups
        self.lora = GroupedLora(
            self.input_size, self.o_lora_rank, n_groups, tp_rank * self.n_local_groups, self.n_local_groups
        )
        self.loaded = False
        self._allocate(device)
        self.register_load_state_dict_post_hook(_note_loaded)

    def _allocate(self, device: Any) -> None:
        """Uninitialised parameters in the shape, dtype and strides that loading fills."""
        fp8 = self.stored_dtype == torch.float8_e4m3fn and stays_fp8(self.arch, self.weight_block)
        shape = (self.n_local_groups, self.o_lora_rank, self.input_size)
        dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
        self.weight = _parameter(torch.empty(shape, dtype=dtype, device=device))
        if fp8:
            block = self.weight_block
            meta = self.weight.is_meta  # the layout looks at values, and a meta tensor has none
            where = "cpu" if meta else device
            blocks = torch.ones((shape[0], shape[1] // block[0], -(-shape[2] // block[1])), device=where)
            scale = layout_weight_scales(blocks, arch=self.arch, rows=shape[1], block=block)
            if meta:
                scale = torch.empty_strided(scale.shape, scale.stride(), dtype=scale.dtype, device="meta")
            name = "weight_scale" if block == (32, 32) else "weight_scale_inv"
            self.register_parameter(name, _parameter(scale))

    def extra_repr(self) -> str:
        return (
            f"K={self.input_size}, R={self.o_lora_rank}, groups={self.n_local_groups} of {self.n_groups} "
            f"(rank {self.tp_rank} of {self.tp_size}), {self.arch.name}, {self.weight.dtype}"
        )

    # Weights ------------------------------------------------------------------------------------------------------

    def load_weights(
        self, state: Mapping[str, torch.Tensor], *, prefix: str = "", requantize: bool = False
    ) -> WeightReport:
        """Take this rank's groups from checkpoint tensors and lay them out for the architecture.

        state: ``<prefix>weight`` ``[n_groups*R, K]`` and, for e4m3, ``<prefix>scale`` or
        ``<prefix>weight_scale_inv`` ``[n_groups*R/b, K/b]``, of all ranks. Raises ``CheckpointError`` that names the
        tensor, what it is and what is expected; other tensors under ``prefix`` are refused.
        """
        known = {f"{prefix}{name}" for name in ("weight", "scale", "weight_scale_inv")}
        stray = sorted(name for name in state if name.startswith(prefix) and name not in known)
        if stray:
            raise CheckpointError(f"{stray[0]} is not a tensor of wo_a; expected {', '.join(sorted(known))}")
        scales = [name for name in sorted(known) if name in state and not name.endswith("weight")]
        if len(scales) > 1:
            raise CheckpointError(f"both {scales[0]} and {scales[1]} are there; expected one")
        weight_name, scale_name = f"{prefix}weight", scales[0] if scales else f"{prefix}scale"
        weight: Any = state.get(weight_name)
        if weight is not None and weight.dtype != self.stored_dtype:
            raise CheckpointError(f"{weight_name} has dtype {weight.dtype}; expected {self.stored_dtype}")
        found = wo_a_for_arch(
            weight,
            state.get(scale_name),
            arch=self.arch,
            n_groups=self.n_groups,
            o_lora_rank=self.o_lora_rank,
            k=self.input_size,
            block=self.weight_block,
            checkpoint_scale=self.checkpoint_scale,
            tp_size=self.tp_size,
            tp_rank=self.tp_rank,
            requantize=requantize,
            names=(weight_name, scale_name),
        )
        return self.set_weight(found)

    @torch.no_grad()
    def set_weight(self, found: ArchWeight) -> WeightReport:
        """Copy one rank's weight that is in this architecture's layout already (``load_o_proj(...).wo_a``)."""
        own, given = dict(self.named_parameters()), found.state_dict()
        for name in sorted(own.keys() | given.keys()):
            have, want = (t.get(name) for t in (given, own))
            text = [f"{t.dtype} {tuple(t.shape)}" if t is not None else "nothing" for t in (have, want)]
            if text[0] != text[1]:
                raise CheckpointError(f"{name} is {text[0]}; {self.arch.name} expects {text[1]}")
        for name, parameter in own.items():
            parameter.copy_(given[name])
        self.loaded = True
        return found.report

    # The projection -----------------------------------------------------------------------------------------------

    def grouped_input(
        self,
        o: torch.Tensor,
        positions: torch.Tensor,
        cos_sin_cache: torch.Tensor,
        *,
        n_groups: int,
        heads_per_group: int,
        nope_dim: int,
        rope_dim: int,
    ) -> torch.Tensor:
        """BF16 ``[T, n_groups, K]``: o turned back by its positions, one rounding, strides ``(K, T*K, 1)``.

        o: BF16 ``[T, n_groups*heads_per_group, nope_dim+rope_dim]``, unit last stride. Raises ``TypeError`` for a
        ``QuantizedActivation``, which is turned already, else as ``fused_inv_rope_fp8_quant`` does.
        """
        if isinstance(o, QuantizedActivation):
            raise TypeError("o is a QuantizedActivation; grouped_input needs the BF16 attention output")
        self._check_groups(n_groups, heads_per_group * (nope_dim + rope_dim))
        x, _ = fused_inv_rope_fp8_quant(
            o,
            positions,
            cos_sin_cache,
            n_groups,
            heads_per_group,
            nope_dim,
            rope_dim,
            self.weight_block[1],
            self.arch.tma_aligned_scales,
            False,
            engine=self._engine_for(o),
        )
        return x

    def grouped_forward(
        self,
        o: torch.Tensor | QuantizedActivation,
        positions: torch.Tensor,
        cos_sin_cache: torch.Tensor,
        *,
        n_groups: int,
        heads_per_group: int,
        nope_dim: int,
        rope_dim: int,
        o_lora_rank: int,
        einsum_recipe: Recipe,
        tma_aligned_scales: bool,
    ) -> torch.Tensor:
        """z BF16 ``[T, n_groups, o_lora_rank]``: ``deep_gemm_fp8_o_proj`` with this weight and no second projection.

        With adapters, their FP32 delta is added to the BF16 z and the sum is rounded to BF16 once more. Raises
        ``RuntimeError`` before weights are loaded, ``TypeError`` for adapters on a ``QuantizedActivation`` (they read
        the unquantised groups), else as ``deep_gemm_fp8_o_proj`` does.
        """
        if not self.loaded:
            raise RuntimeError("wo_a holds no weights yet; call load_weights or load_state_dict first")
        self._check_groups(n_groups, heads_per_group * (nope_dim + rope_dim))
        if o_lora_rank != self.o_lora_rank:
            raise ValueError(f"o_lora_rank={o_lora_rank}; this wo_a has {self.o_lora_rank}")
        if tma_aligned_scales != self.arch.tma_aligned_scales:
            raise ValueError(
                f"tma_aligned_scales={tma_aligned_scales}; {self.arch.name} has {self.arch.tma_aligned_scales}"
            )
        if self.lora.active and isinstance(o, QuantizedActivation):
            raise TypeError("o is a QuantizedActivation; adapters read the BF16 attention output")
        sizes: dict[str, Any] = {
            "n_groups": n_groups,
            "heads_per_group": heads_per_group,
            "nope_dim": nope_dim,
            "rope_dim": rope_dim,
        }
        flat = deep_gemm_fp8_o_proj(
            o,
            positions,
            cos_sin_cache,
            self,
            lambda z: z,
            **sizes,
            o_lora_rank=o_lora_rank,
            einsum_recipe=einsum_recipe,
            tma_aligned_scales=tma_aligned_scales,
            engine=self._engine_for(o.data if isinstance(o, QuantizedActivation) else o),
        )
        z = flat.unflatten(1, (n_groups, o_lora_rank))
        if not self.lora.active or isinstance(o, QuantizedActivation):
            return z
        x = self.grouped_input(o, positions, cos_sin_cache, **sizes)
        return (z.float() + self.lora_delta(x)).to(torch.bfloat16)

    forward = grouped_forward

    def _check_groups(self, n_groups: int, k: int) -> None:
        if n_groups != self.n_local_groups:
            raise ValueError(f"n_groups={n_groups}; this rank of wo_a has {self.n_local_groups} of {self.n_groups}")
        if k != self.input_size:
            raise ValueError(f"heads_per_group * (nope_dim + rope_dim) = {k}; wo_a has K={self.input_size}")

    def _engine_for(self, values: Any) -> Engine:
        if self.engine is not None:
            return self.engine
        on_gpu = isinstance(values, torch.Tensor) and values.device.type == "cuda"
        return get_engine("deep_gemm" if on_gpu else "software", self.arch)

    # Adapters (``oproj.grouped_lora``) ----------------------------------------------------------------------------

    def add_adapter(self, name: str, a: torch.Tensor, b: torch.Tensor, *, scale: float = 1.0) -> None:
        """Add LoRA ``scale * (x_g a^T) b_g^T`` for every group g: a ``[r, K]``, b ``[n_groups*R, r]`` of all ranks."""
        self.lora.add(name, a, b, scale=scale, device=self.weight.device)

    def remove_adapter(self, name: str) -> None:
        """Forget an adapter; ``KeyError`` lists those that are there."""
        self.lora.remove(name)

    def scale_adapter(self, name: str, scale: float) -> None:
        """Give an adapter another factor (0 switches it off); ``KeyError`` as ``remove_adapter``."""
        self.lora.rescale(name, scale)

    def lora_delta(self, x: torch.Tensor) -> torch.Tensor:
        """FP32 ``[T, G, R]``: what the adapters add for BF16 x ``[T, G, K]`` (``GroupedLora.delta``)."""
        return self.lora.delta(x)


def _note_loaded(module: Any, incompatible: Any) -> None:
    module.loaded = module.loaded or not incompatible.missing_keys


def _parameter(tensor: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(tensor, requires_grad=False)


def _arch_of(arch: Arch | str | None, engine: Engine | None) -> Arch:
    row = get_arch(arch) if arch is not None else engine.arch if engine is not None else None
    if row is None and torch.cuda.is_available():
        row = arch_of_capability(*torch.cuda.get_device_capability())
    if row is None:
        raise EngineUnavailable("no GPU of a known architecture; pass arch=, for example arch='sm90'")
    if engine is not None and engine.arch is not row:
        raise ValueError(f"arch={row.name} but engine is for {engine.arch.name}")
    return row


def _check_sizes(k: int, output_size: int, n_groups: int, dtype: torch.dtype, block: tuple[int, int]) -> None:
    if k < 1 or output_size < 1 or output_size % n_groups:
        raise ValueError(
            f"input_size={k}, output_size={output_size}: both must be positive, the latter a multiple of "
            f"n_groups={n_groups}"
        )
    if dtype not in (torch.float8_e4m3fn, torch.bfloat16):
        raise TypeError(f"dtype={dtype}; expected float8_e4m3fn or bfloat16")
    if tuple(block) not in ((128, 128), (32, 32)):
        raise ValueError(f"weight_block={block}; known: (128, 128), (32, 32)")
    if dtype == torch.float8_e4m3fn and output_size // n_groups % block[0]:
        raise ValueError(
            f"output_size / n_groups = {output_size // n_groups} is not a multiple of {block[0]}-row blocks"
        )
