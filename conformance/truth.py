"""What outputs of a Case are compared with: float64 values with their bounds, and the bits of the software engine.

Each quantity is computed once per Case and only when a comparison asks for it. `Exact` and the bounds judge against
what an implementation really consumed (its own codes and scales), or against unquantised values with the quantisation
term added; tolerances themselves are `bounds`' alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, cached_property
from typing import Any, TypeVar

import torch

from conformance import bounds
from conformance.implementation import SoftwareImplementation
from conformance.inputs import Inputs, LinearWeight
from oproj.activation import QuantizedActivation
from oproj.arch import get_arch
from oproj.wo_b import quantize_z
from reference import dequantize, grouped_wo_a, inverse_rope, ue8m0_to_float64, unpack_ue8m0, wo_b

T = TypeVar("T")
U = TypeVar("U")
Pair = tuple[torch.Tensor, torch.Tensor]
# o is what was rotated and quantised, or an FP32 accumulator's rounding to BF16; or the rotation was rounded to BF16.
O_KNOWN = ("exact", "half-ulp", "rounded")
WO_B_GROUP = 128  # K elements per scale of wo_b's activations


@cache
def model_of(arch: str) -> SoftwareImplementation:
    """The software engine's implementation, whose bits are the truth of the bits tier."""
    return SoftwareImplementation(arch)


def dequantized(weight: LinearWeight) -> torch.Tensor:
    """Float64 values of a weight, exact: ``[G, R, K]`` or ``[hidden, K]`` (BF16 weights in their own shape)."""
    if weight.weight_scale_inv is None:
        return weight.weight.double()
    rows, block_k = weight.block
    return dequantize(weight.weight, weight.weight_scale_inv, block_k=block_k, block_mn=rows)


class Truth:
    """Float64 values, bounds and model bits of one Case. ``x`` is an activation as some implementation emitted it.

    ``o_known``: ``half-ulp`` where the implementation quantises an accumulator of which o is the rounding to BF16,
    ``rounded`` where it rounds to BF16 what it quantises. ``k_order``: the order in which wo_a and wo_b sum K, where it
    is not ascending, as ``{"wo_a": "descending"}``; ``any`` has the bound of every order, which is much wider.
    """

    def __init__(self, inputs: Inputs, o_known: str = "exact", k_order: Mapping[str, str] | None = None) -> None:
        if o_known not in O_KNOWN:
            raise ValueError(f"o_known={o_known!r} must be one of {O_KNOWN}")
        self.inputs, self.o_known, self.k_order = inputs, o_known, dict(k_order or {})
        if not set(self.k_order) <= {"wo_a", "wo_b"} or not set(self.k_order.values()) <= set(bounds.ORDERS):
            raise ValueError(f"k_order={self.k_order!r} must give wo_a or wo_b one of {bounds.ORDERS}")
        self.config = inputs.config
        self.arch = get_arch(inputs.case.arch)
        self.model = model_of(self.arch.name)
        self.fp8 = self.config.fp8_wo_a(self.arch)
        self.block = self.config.quant_group_size(self.arch)
        self._last: tuple[QuantizedActivation, torch.Tensor] | None = None
        self._bounds: dict[tuple[str, int, int], tuple[object, object, torch.Tensor]] = {}

    # Exact values

    @cached_property
    def x(self) -> torch.Tensor:
        """Rotated activations, float64 ``[T, G, K]``."""
        config, inputs = self.config, self.inputs
        turned = inverse_rope(inputs.o, inputs.positions, inputs.cos_sin_cache, rope_dim=config.rope_dim)
        return turned.view(len(turned), config.n_groups, config.group_k)

    @cached_property
    def wo_a(self) -> torch.Tensor:
        """wo_a, float64 ``[G, R, K]``."""
        return dequantized(self.inputs.weights.wo_a).view(self.config.n_groups, self.config.o_lora_rank, -1)

    @cached_property
    def wo_b(self) -> torch.Tensor:
        """wo_b, float64 ``[hidden, G*R]``."""
        return dequantized(self.inputs.weights.wo_b)

    @cached_property
    def z(self) -> torch.Tensor:
        """z without any quantisation of the activations, float64 ``[T, G, R]``."""
        return grouped_wo_a(self.x, self.wo_a)

    # Model bits

    @cached_property
    def model_x(self) -> QuantizedActivation:
        """The software engine's activation."""
        inputs = self.inputs
        return self.model.quantize(inputs.o, inputs.positions, inputs.cos_sin_cache, config=self.config)

    def model_z(self, x: QuantizedActivation) -> torch.Tensor:
        """The software engine's z of ``x``; remembered, since most implementations emit the model's own x."""
        if self._last is None or not _same_bits(self._last[0], x):
            self._last = (x, self.model.wo_a(x, self.inputs.weights, config=self.config))
        return self._last[1]

    def model_y(self, z: torch.Tensor) -> torch.Tensor:
        """The software engine's y of ``z``."""
        return self.model.wo_b(z, self.inputs.weights, config=self.config)

    # quantize

    @cached_property
    def x_slack(self) -> torch.Tensor:
        """Bound on the error of the rotation (and of its rounding to BF16 where wo_a is BF16), ``[T, G, K]``."""
        half = self.config.rope_dim // 2
        rows = self.inputs.cos_sin_cache[self.inputs.positions][:, None]
        if self.fp8 and self.o_known == "half-ulp":
            return bounds.hidden_rotation_bound(self.inputs.o, rows[..., :half], rows[..., half:]).view(self.x.shape)
        variant: Any = self.inputs.case.variant
        output: Any = "fp32" if self.fp8 and self.o_known != "rounded" else "bf16"
        bound = bounds.inverse_rope_bound(self.inputs.o, rows[..., :half], rows[..., half:], variant, output=output)
        return bound.view(self.x.shape)

    def x_values(self, x: QuantizedActivation) -> torch.Tensor:
        """Float64 values ``[T, G, K]`` of an activation."""
        return dequantize(x.data, x.scale, block_k=self.block) if self.fp8 else x.data.double()

    def x_bound(self, x: QuantizedActivation) -> torch.Tensor:
        """Bound on ``x_values(x) - self.x``."""
        if not self.fp8:
            return self.x_slack
        return bounds.quantize_bound(self.x, scale_values(x.scale), self.x_slack)

    # wo_a, on the codes of x, and against unquantised activations

    def z_consumed(self, x: QuantizedActivation) -> torch.Tensor:
        """z of the codes that wo_a was given, float64 ``[T, G, R]``."""
        return grouped_wo_a(self.x_values(x), self.wo_a)

    def z_bound(self, x: QuantizedActivation, z: torch.Tensor) -> torch.Tensor:
        """Bound on ``z - z_consumed(x)``."""
        return self._once("z", x, z, self._z_bound)

    def _z_bound(self, x: QuantizedActivation, z: torch.Tensor) -> torch.Tensor:
        weight, scale = self._wo_a
        if not self.fp8:
            product = bounds.bf16_gemm_bound(
                x.data.transpose(0, 1), weight.view(self.wo_a.shape), result=z.transpose(0, 1)
            )
            return product.transpose(0, 1)
        order: Any = self.k_order.get("wo_a", "ascending")
        return bounds.grouped_gemm_bound(
            self.arch, x.data, x.scale, weight, scale, z_hat=z, gran_k=self.block, order=order
        )

    def z_format_bound(self, x: QuantizedActivation, z: torch.Tensor) -> torch.Tensor:
        """Bound on ``z - self.z``: what quantising x may move, through abs(wo_a), and ``z_bound``."""
        return self._once("z format", x, z, self._z_format_bound)

    def _z_format_bound(self, x: QuantizedActivation, z: torch.Tensor) -> torch.Tensor:
        z_bound = self.z_bound(x, z)
        weight, scale = self._wo_a
        if not self.fp8:
            return (grouped_wo_a(self.x_slack, self.wo_a.abs()) + z_bound) * bounds.F64_SLACK
        return bounds.format_bound_z(
            self.arch, self.x, x.scale, weight, scale, z_bound, slack=self.x_slack, gran_k=self.block
        )

    # wo_b, on its own quantiser's codes of z, and against z or the whole chain

    def consumed_by_wo_b(self, z: torch.Tensor) -> Pair:
        """Codes and scales that the served quantiser makes of BF16 z ``[T, G, R]``."""
        quantized = quantize_z(z.flatten(1), self.arch)
        return quantized.data, quantized.scale

    def y_consumed(self, codes: Pair) -> torch.Tensor:
        """y of wo_b's codes, float64 ``[T, hidden]``."""
        return wo_b(dequantize(*codes, block_k=WO_B_GROUP), self.wo_b)

    def y_bound(self, codes: Pair, y: torch.Tensor) -> torch.Tensor:
        """Bound on ``y - y_consumed(codes)``."""
        order: Any = self.k_order.get("wo_b", "ascending")

        def bound(_: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return bounds.gemm_bound(self.arch, *codes, *self._wo_b, z_hat=y, gran_k=WO_B_GROUP, order=order)

        return self._once("y", codes[0], y, bound)

    def y_format_bound(
        self, z: torch.Tensor, z_bound: torch.Tensor, codes: Pair, y_bound: torch.Tensor
    ) -> torch.Tensor:
        """Bound on ``y - wo_b . z`` where z itself is known within ``z_bound``."""
        return bounds.format_bound_y(
            self.arch, z.flatten(1).double(), z_bound.flatten(1), codes[1], *self._wo_b, y_bound, gran_k=WO_B_GROUP
        )

    def y_of(self, z: torch.Tensor) -> torch.Tensor:
        """wo_b . z in float64."""
        return wo_b(z.double(), self.wo_b)

    def _once(self, name: str, a: T, b: U, compute: Callable[[T, U], torch.Tensor]) -> torch.Tensor:
        """``compute(a, b)``, remembered for these very objects: the tiers of a Case share their bounds."""
        key = (name, id(a), id(b))
        if key not in self._bounds:
            self._bounds[key] = (a, b, compute(a, b))  # holding a and b keeps their ids theirs
        return self._bounds[key][2]

    @property
    def _wo_a(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.inputs.weights.wo_a.weight, self.inputs.weights.wo_a.weight_scale_inv

    @property
    def _wo_b(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.inputs.weights.wo_b.weight, self.inputs.weights.wo_b.weight_scale_inv


def scale_values(scale: torch.Tensor) -> torch.Tensor:
    """Float64 values of FP32 scales or packed UE8M0 words, one per block of K."""
    return ue8m0_to_float64(unpack_ue8m0(scale)) if scale.dtype == torch.int32 else scale.double()


def _same_bits(a: QuantizedActivation, b: QuantizedActivation) -> bool:
    """Whether two activations hold the same codes and scales (views of FP8 compare as bytes)."""
    if a.data.shape != b.data.shape or a.scale.shape != b.scale.shape:
        return False
    pairs = ((a.data, b.data), (a.scale, b.scale))
    return all(torch.equal(_as_bytes(p), _as_bytes(q)) for p, q in pairs)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
