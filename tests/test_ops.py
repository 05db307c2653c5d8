"""The path as torch ops: same bits when compiled, exact strides for the tracer, nothing allocated with buffers."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from o_proj_arguments import RANK, arguments, in_slots, same_bits
from oproj import ops
from oproj.activation import QuantizedActivation
from oproj.buffers import OProjBuffers
from oproj.engines.software import SoftwareEngine
from oproj.o_proj import deep_gemm_fp8_o_proj
from oproj.quantize import fused_inv_rope_fp8_quant

ROWS = [("sm90", 128), ("sm100", 128), ("sm100", 32)]
SIZES = ("n_groups", "heads_per_group", "nope_dim", "rope_dim")
CALL = (*SIZES, "o_lora_rank", "einsum_recipe", "tma_aligned_scales")


@pytest.fixture(autouse=True)
def _forget_graphs() -> Iterator[None]:
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch.compiler.reset()


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])


def compiled(args: dict[str, Any], backend: str, **options: Any) -> Any:
    def call(o: Any, positions: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return deep_gemm_fp8_o_proj(**args | {"o": o, "positions": positions, "cos_sin_cache": table})

    return torch.compile(call, fullgraph=True, backend=backend, **options)


def tensors(args: dict[str, Any]) -> tuple[Any, ...]:
    return args["o"], args["positions"], args["cos_sin_cache"]


# torch.compile ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch, block", ROWS)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_one_graph_has_the_bits_of_the_eager_call_at_every_token_count(arch: str, block: int, backend: str) -> None:
    run = compiled(arguments(arch, 3, 2, block), backend, dynamic=True)
    with torch.no_grad():
        for tokens in (3, 5, 8, 1, 0):
            args = arguments(arch, tokens, 2, block)
            assert same_bits(run(*tensors(args)), deep_gemm_fp8_o_proj(**args))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 3  # any T, and T = 0, 1 as torch treats sizes


@pytest.mark.parametrize("arch", ["sm90", "sm120"])
def test_a_named_software_engine_is_found_again_by_the_ops(arch: str) -> None:
    args = arguments(arch, 3, engine=SoftwareEngine(arch))
    assert same_bits(compiled(args, "aot_eager")(*tensors(args)), deep_gemm_fp8_o_proj(**args))


def test_an_engine_of_the_users_own_cannot_be_traced() -> None:
    class Mine(SoftwareEngine):
        name = "mine"

    args = arguments("sm90", 3, engine=Mine("sm90"))
    with pytest.raises(Exception, match=r"engine 'mine' cannot be traced by torch\.compile"):
        compiled(args, "eager")(*tensors(args))


def test_weights_that_ask_for_gradients_and_a_bf16_wo_a_compile() -> None:
    args = arguments("sm90", 3)
    weight = torch.nn.Parameter(torch.randn((2, RANK, 1024), generator=torch.Generator().manual_seed(0)).bfloat16())
    args["cos_sin_cache"].requires_grad_()
    args["wo_a"].weight_scale_inv.requires_grad_()
    for wo_a in (args["wo_a"], SimpleNamespace(weight=weight)):
        call = args | {"wo_a": wo_a}
        assert same_bits(compiled(call, "aot_eager")(*tensors(call)), deep_gemm_fp8_o_proj(**call))


@pytest.mark.parametrize("arch, block", ROWS)
def test_a_quantised_activation_compiles(arch: str, block: int) -> None:
    args = arguments(arch, 5)
    wide = in_slots(args, 4, 0)

    def call(data: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return deep_gemm_fp8_o_proj(**args | {"o": QuantizedActivation(data, scale)})

    run = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert same_bits(run(wide.data, wide.scale), deep_gemm_fp8_o_proj(**args))


def test_a_bad_position_is_named_when_the_compiled_call_runs() -> None:
    args = arguments("sm90", 3)
    run = compiled(args, "aot_eager")
    run(*tensors(args))
    with pytest.raises(ValueError, match="positions lie in"):
        run(args["o"], args["positions"] + 6, args["cos_sin_cache"])


def test_wo_b_can_be_the_gemm_op() -> None:
    args = arguments("sm100", 3)
    x, scale = fused_inv_rope_fp8_quant(*tensors(args), 2, 2, tma_aligned_scales=True)
    weight = (args["wo_a"].weight[0], args["wo_a"].weight_scale_inv[0])

    def gemm(engine: Any) -> torch.Tensor:
        y = torch.empty((3, RANK), dtype=torch.bfloat16)
        engine.fp8_gemm_nt((x[:, 0], scale[:, 0]), weight, y, recipe=(1, 1, 128))
        return y

    run = torch.compile(lambda: gemm(ops.OpsEngine("sm100")), fullgraph=True, backend="aot_eager")
    assert same_bits(run(), gemm(SoftwareEngine("sm100")))


# Ops ----------------------------------------------------------------------------------------------------------------


def quantiser_call(args: dict[str, Any], block: int, quantize: bool = True) -> tuple[Any, ...]:
    return (*tensors(args), *(args[name] for name in SIZES), block, args["tma_aligned_scales"], quantize)


@pytest.mark.parametrize("arch, block", ROWS)
@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.parametrize("quantize", [True, False])
def test_the_tracer_sees_the_shapes_dtypes_and_strides_of_the_real_run(arch, block, tokens, quantize) -> None:
    args = arguments(arch, tokens, 2, block)
    call = quantiser_call(args, block, quantize)
    real = torch.ops.oproj.inv_rope_fp8_quant(*call)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = torch.ops.oproj.inv_rope_fp8_quant(*(mode.from_tensor(t) for t in call[:3]), *call[3:])
    for seen, is_so in zip(fake, real, strict=True):
        assert (seen.shape, seen.dtype, seen.device) == (is_so.shape, is_so.dtype, is_so.device)
        assert tokens == 0 or seen.stride() == is_so.stride()


@pytest.mark.parametrize("arch, block", ROWS)
def test_opcheck(arch: str, block: int) -> None:
    """torch's schema test compares values, which it cannot do in FP8; the BF16 mode stands for it."""
    tests = ("test_faketensor", "test_autograd_registration")
    args = arguments(arch, 5, 2, block)
    call = quantiser_call(args, block)
    x, scale = torch.ops.oproj.inv_rope_fp8_quant(*call)
    op = torch.ops.oproj.inv_rope_fp8_quant.default
    torch.library.opcheck(op, call, test_utils=tests)
    torch.library.opcheck(op, quantiser_call(args, block, False), test_utils=("test_schema", *tests))
    z = torch.empty((5, 2, RANK), dtype=torch.bfloat16)
    weight = (args["wo_a"].weight, args["wo_a"].weight_scale_inv)
    einsum = (x, scale, *weight, z, list(args["einsum_recipe"]))
    torch.library.opcheck(torch.ops.oproj.fp8_einsum.default, einsum, test_utils=tests)


# Buffers ------------------------------------------------------------------------------------------------------------


def buffers_of(args: dict[str, Any], max_tokens: int, **changes: Any) -> OProjBuffers:
    return OProjBuffers.allocate(max_tokens, **{name: args[name] for name in CALL} | changes)


class Allocations(TorchDispatchMode):
    """Names of the torch operations that return new memory."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        fresh = any(r.alias_info is None for r in func._schema.returns)
        if fresh:
            self.seen.append(str(func))
        return func(*args, **kwargs or {})


class WritesInto(SoftwareEngine):
    """An engine that fills what it is given, as a GPU kernel does, and reports where."""

    def __init__(self, arch: str) -> None:
        super().__init__(arch)
        self.wrote: list[int] = []

    def fp8_einsum(self, expr: str, a: Any, b: Any, d: torch.Tensor, c: Any = None, *, recipe: Any = None) -> None:
        self.wrote += [a[0].data_ptr(), a[1].data_ptr(), d.data_ptr()]
        d.fill_(1)

    def inv_rope_fp8_quant(self, *_: Any, out: Any = None, **__: Any) -> Any:  # type: ignore[override]
        out[0].view(torch.uint8).fill_(1)
        out[1].fill_(1)
        return out


@pytest.mark.parametrize("arch, block", ROWS)
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_with_buffers_and_an_engine_that_writes_into_them_nothing_is_allocated(arch, block, tokens) -> None:
    engine = WritesInto(arch)
    args = arguments(arch, tokens, 2, block, engine=engine)
    mine = buffers_of(args, 8)
    with Allocations() as allocations:
        flat = deep_gemm_fp8_o_proj(**args, buffers=mine)
    assert allocations.seen == []
    assert tokens == 0 or engine.wrote == [t.data_ptr() for t in (mine.values, mine.scales, mine.z)]
    assert tokens == 0 or flat.data_ptr() == mine.z.data_ptr()
    with Allocations() as allocations:  # the counter counts
        torch.zeros(1)
    assert allocations.seen


@pytest.mark.parametrize("arch, block", ROWS)
def test_buffers_change_no_bit_and_serve_every_smaller_batch(arch: str, block: int) -> None:
    mine = buffers_of(arguments(arch, 8, 2, block), 8)
    mine.scales.fill_(-1)
    for tokens in (8, 5, 1, 0, 7):
        args = arguments(arch, tokens, 2, block)
        z = deep_gemm_fp8_o_proj(**args, buffers=mine)
        assert same_bits(z, deep_gemm_fp8_o_proj(**args))
        values, scales, _ = mine.views(tokens)
        alone = fused_inv_rope_fp8_quant(*quantiser_call(args, block)[:9])
        for found, expected in zip((values, scales), alone, strict=True):
            assert torch.equal(bits(found), bits(expected))
            assert tokens == 0 or found.stride() == expected.stride()
        if tokens:
            aligned = scales.stride(2)
            whole = scales.as_strided((2, scales.shape[2], aligned), (scales.shape[2] * aligned, aligned, 1))
            assert (whole[..., tokens:] == 0).all()


@pytest.mark.parametrize("arch, block", ROWS)
def test_buffers_in_a_compiled_call(arch: str, block: int) -> None:
    args = arguments(arch, 5, 2, block)
    mine = buffers_of(args, 8)
    mine.z.fill_(7)
    z = compiled(args | {"buffers": mine}, "aot_eager")(*tensors(args))
    assert same_bits(z, deep_gemm_fp8_o_proj(**args)) and same_bits(mine.views(5)[2].flatten(1), z)


def test_buffers_for_bf16_weights() -> None:
    args = arguments("sm90", 3)
    args["wo_a"] = SimpleNamespace(weight=torch.ones((2, RANK, 1024), dtype=torch.bfloat16))
    mine = buffers_of(args, 4, quantize=False)
    assert same_bits(deep_gemm_fp8_o_proj(**args, buffers=mine), deep_gemm_fp8_o_proj(**args))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"n_groups": 1}, "buffers are for n_groups=1; the call has n_groups=2"),
        ({"o_lora_rank": 8}, "buffers are for o_lora_rank=8"),
        ({"heads_per_group": 1}, "buffers are for K=512"),
        ({"device": "meta"}, "buffers are on meta but o is on cpu"),
        ({"quantize": False}, "buffer values has dtype torch.bfloat16; expected torch.float8_e4m3fn"),
        ({"tma_aligned_scales": True}, "buffer scales has dtype torch.int32; expected torch.float32"),
        ({"einsum_recipe": (1, 1, 32)}, "buffer scales has shape"),
    ],
)
def test_buffers_of_another_call_are_refused(change: dict[str, Any], message: str) -> None:
    args = arguments("sm90", 3)
    with pytest.raises((ValueError, TypeError), match=message):
        deep_gemm_fp8_o_proj(**args, buffers=buffers_of(args, 4, **change))


def test_too_many_tokens_for_the_buffers_and_an_empty_size_are_refused() -> None:
    args = arguments("sm90", 5)
    with pytest.raises(ValueError, match="buffers are for at most 4 tokens; o has 5"):
        deep_gemm_fp8_o_proj(**args, buffers=buffers_of(args, 4))
    with pytest.raises(ValueError, match="max_tokens=0 must be at least 1"):
        buffers_of(args, 0)


def test_out_of_other_strides_or_without_room_for_padding_rows_is_refused() -> None:
    args = arguments("sm90", 5)
    call = quantiser_call(args, 128)[:9]
    values, scales = fused_inv_rope_fp8_quant(*call)
    fused_inv_rope_fp8_quant(*call, out=(values, scales))
    with pytest.raises(ValueError, match="buffer values has strides"):
        fused_inv_rope_fp8_quant(*call, out=(values.contiguous(), scales))
    short = torch.empty(2 * 8 * 8 - 3).as_strided(scales.shape, scales.stride())
    with pytest.raises(ValueError, match=r"scales has no room for its padding rows 5\.\.7"):
        fused_inv_rope_fp8_quant(*call, out=(values, short))
    with pytest.raises(TypeError, match="buffer scales is NoneType"):
        fused_inv_rope_fp8_quant(*call, out=(values, None))  # type: ignore[arg-type]
