"""reference.o_proj against sums in exact integers and fractions, and its strides against hidden copies."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from reference import grouped_wo_a, inverse_rope, o_proj, wo_b

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
on_each_device = pytest.mark.parametrize("device", DEVICES)
few = settings(deadline=None, max_examples=40)
seeds = st.integers(0, 2**32)
WIDE = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def integers(seed: int, *shape: int, limit: int = 99) -> torch.Tensor:
    """Whole numbers as float64: their products and sums are exact here, in whatever order BLAS adds them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-limit, limit + 1, shape, generator=generator).double()


def dot(a: list[float], b: list[float]) -> Fraction:
    return sum((Fraction(p) * Fraction(q) for p, q in zip(a, b, strict=True)), Fraction(0))


@few
@given(
    seed=seeds,
    t=st.integers(0, 3),
    g=st.integers(1, 3),
    r=st.integers(0, 4),
    k=st.integers(1, 9),
    shift=st.integers(-40, 40),
)
def test_grouped_wo_a_is_the_exact_sum_on_scaled_integers(seed, t, g, r, k, shift) -> None:
    x, w = integers(seed, t, g, k) * 2.0**shift, integers(seed + 1, g, r, k)
    z = grouped_wo_a(x, w)
    assert z.shape == (t, g, r) and z.dtype == torch.float64 and z.is_contiguous()
    for i in range(t):
        for j in range(g):
            expected = [dot(x[i, j].tolist(), row) for row in w[j].tolist()]
            assert [Fraction(v) for v in z[i, j].tolist()] == expected


@few
@given(seed=seeds, t=st.integers(0, 3), g=st.integers(1, 3), r=st.integers(1, 4), hidden=st.integers(0, 4))
def test_wo_b_is_the_exact_group_major_sum(seed, t, g, r, hidden) -> None:
    z, w = integers(seed, t, g, r), integers(seed + 1, hidden, g * r)
    flat = [[z[i, c // r, c % r].item() for c in range(g * r)] for i in range(t)]
    expected = torch.tensor([[float(dot(row, w[n].tolist())) for n in range(hidden)] for row in flat])
    for form in (z, z.flatten(1)):
        y = wo_b(form, w)
        assert y.dtype == torch.float64 and y.shape == (t, hidden)
        assert torch.equal(y, expected.double().view(t, hidden))


@pytest.mark.parametrize("k", [7, 512, 4096])
def test_sums_keep_the_bound_that_the_module_states(k: int) -> None:
    """|s - exact| <= gamma_k * sum |products|, gamma_k = k u/(1 - k u), u = 2^-53."""
    generator = torch.Generator().manual_seed(k)
    x, w = (torch.randn(2, 2, k, dtype=torch.float64, generator=generator) for _ in range(2))
    z, y = grouped_wo_a(x, w), wo_b(x[:, 0], w[0])
    gamma = Fraction(k, 2**53 - k)
    sums = [(z[t, g, r], x[t, g], w[g, r]) for t in (0, 1) for g in (0, 1) for r in (0, 1)]
    sums += [(y[t, n], x[t, 0], w[0, n]) for t in (0, 1) for n in (0, 1)]
    for got, a, b in sums:
        magnitude = dot(a.abs().tolist(), b.abs().tolist())
        assert abs(Fraction(got.item()) - dot(a.tolist(), b.tolist())) <= gamma * magnitude


@on_each_device
def test_a_group_sees_nothing_of_the_others(device: str) -> None:
    x, w = integers(0, 3, 4, 32).to(device), integers(1, 4, 5, 32).to(device)
    clean = grouped_wo_a(x, w)
    for group in range(4):
        others = [g for g in range(4) if g != group]
        poisoned_x, poisoned_w = x.clone(), w.clone()
        poisoned_x[:, others], poisoned_w[others] = math.nan, math.inf
        z = grouped_wo_a(poisoned_x, poisoned_w)
        assert torch.equal(z[:, group], clean[:, group]) and z[:, others].isnan().all()


def test_nan_and_inf_stay_in_their_token_and_group() -> None:
    x, w = torch.ones(2, 2, 8), torch.ones(2, 3, 8)
    x[1, 0, 5], x[0, 1, 2], w[1, 2, 2] = math.nan, math.inf, 0.0
    z = grouped_wo_a(x, w)
    assert z[1, 0].isnan().all()
    assert z[0, 1].tolist()[:2] == [math.inf, math.inf] and z[0, 1, 2].isnan()  # Inf * 0
    assert z[0, 0].tolist() == [8.0, 8.0, 8.0] and z[1, 1].tolist()[:2] == [8.0, 8.0]
    assert wo_b(z, torch.ones(1, 6)).isnan().all()


@few
@given(seed=seeds, t=st.integers(0, 3), g=st.integers(1, 4), per_group=st.integers(1, 3), plain=st.integers(0, 3))
def test_the_chain_is_the_textbook_sum(seed, t, g, per_group, plain) -> None:
    """Straight from the definition in Python numbers: group j takes heads j*per_group and following."""
    width, r, hidden, length = 4, 3, 2, 6
    d = plain + width
    o, table = integers(seed, t, g * per_group, d), integers(seed + 1, length, width)
    w_a, w_b = integers(seed + 2, g, r, per_group * d), integers(seed + 3, hidden, g * r)
    positions = integers(seed + 4, t).long() % length
    x, z, y = o_proj(o, positions, table, w_a, w_b, n_groups=g, rope_dim=width)
    turned = [
        [one_head(o[i, h].tolist(), table[positions[i]].tolist()) for h in range(g * per_group)] for i in range(t)
    ]
    grouped = [[joined(heads[j * per_group : (j + 1) * per_group]) for j in range(g)] for heads in turned]
    a, b = w_a.tolist(), w_b.tolist()
    low = [[[float(dot(token[j], row)) for row in a[j]] for j in range(g)] for token in grouped]
    out = [[float(dot(joined(token), row)) for row in b] for token in low]
    assert (x.tolist(), z.tolist(), y.tolist()) == (grouped, low, out)
    assert all(v.dtype == torch.float64 and v.is_contiguous() for v in (x, z, y))
    assert (x.shape, z.shape, y.shape) == ((t, g, per_group * d), (t, g, r), (t, hidden))


def joined(parts: list[list[float]]) -> list[float]:
    return [value for part in parts for value in part]


def one_head(values: list[float], row: list[float]) -> list[float]:
    """A head whose last 4 values turn back by the angles of row = cos, cos, sin, sin (conjugate product)."""
    out = values[:-4]
    for pair in range(2):
        turned = complex(*values[len(out) : len(out) + 2]) * complex(row[pair], row[2 + pair]).conjugate()
        out += [turned.real, turned.imag]
    return out


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_share_z_and_their_partial_sums_add_up(ranks: int) -> None:
    t, heads, g, r = 3, 32, 4, 8
    positions = torch.tensor([2, 0, 2])
    o, table = integers(0, t, heads, 512, limit=9), integers(1, 3, 64, limit=9)
    w_a, w_b = integers(2, g, r, 4096, limit=9), integers(3, 5, g * r, limit=9)
    _, z, y = o_proj(o, positions, table, w_a, w_b, n_groups=g)
    partials, own = [], g // ranks
    for rank in range(ranks):
        mine = slice(rank * own, (rank + 1) * own)
        columns = slice(rank * own * r, (rank + 1) * own * r)
        part = o[:, rank * heads // ranks : (rank + 1) * heads // ranks]
        _, z_part, y_part = o_proj(part, positions, table, w_a[mine], w_b[:, columns], n_groups=own)
        assert torch.equal(z_part, z[:, mine])
        partials.append(y_part)
    assert torch.equal(torch.stack(partials).sum(0), y)


@on_each_device
@pytest.mark.parametrize("dtype", WIDE)
def test_served_strides_and_dtypes_are_read_as_they_are(dtype, device: str) -> None:
    t, g, r, k, hidden = 5, 2, 16, 256, 8
    group_major = integers(0, g, t, k, limit=9).to(dtype).to(device)
    x = group_major.as_strided((t, g, k), (k, t * k, 1))
    w = integers(1, g, k, r, limit=9).to(dtype).to(device).transpose(1, 2)  # K is not the contiguous dim
    z = grouped_wo_a(x, w)
    assert torch.equal(z, grouped_wo_a(x.double().contiguous(), w.double().contiguous()))
    slots = torch.full((t, g + 2, r), math.nan, dtype=torch.float64, device=device)
    slots[:, :g] = z
    w_b = integers(2, g * r, hidden, limit=9).to(dtype).to(device).T
    assert torch.equal(wo_b(slots[:, :g], w_b), wo_b(z.contiguous(), w_b.double().contiguous()))


def copies(call: Callable[[], torch.Tensor]) -> set[str]:
    """The copying operators that a call runs, those inside other operators included."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        call()
    names = {event.name for event in seen.events()}
    assert names & {"aten::bmm", "aten::mm"}
    return names & {"aten::copy_", "aten::clone", "aten::contiguous"}


def test_float64_operands_reach_blas_without_a_copy() -> None:
    t, g, k, r = 8, 2, 128, 64
    token_major, group_major = integers(0, t, g, k), integers(0, g, t, k).transpose(0, 1)
    w_a, w_b, z = integers(1, g, r, k), integers(2, 16, g * r), integers(3, t, g, r)
    assert not copies(lambda: grouped_wo_a(token_major, w_a))
    assert not copies(lambda: grouped_wo_a(group_major, w_a))
    assert not copies(lambda: wo_b(z, w_b))
    spread = token_major.repeat_interleave(2, dim=-1)[..., ::2]  # no BLAS takes a stride in both dims
    assert copies(lambda: grouped_wo_a(spread, w_a)) and copies(lambda: wo_b(z, w_b.float()))


def test_parameters_that_require_grad_are_accepted() -> None:
    w_a, w_b = (torch.nn.Parameter(integers(s, *shape)) for s, shape in ((0, (1, 3, 64)), (1, (2, 3))))
    o = integers(2, 2, 1, 64)
    _, _, y = o_proj(o, torch.tensor([0, 1]), integers(3, 2, 64), w_a, w_b, n_groups=1)
    assert y.shape == (2, 2) and not y.requires_grad


@on_each_device
def test_zero_tokens(device: str) -> None:
    o = torch.empty(0, 16, 512, dtype=torch.bfloat16, device=device)
    positions = torch.empty(0, dtype=torch.int64, device=device)
    table, w_a = torch.ones(4, 64, device=device), torch.ones(2, 8, 4096, device=device)
    x, z, y = o_proj(o, positions, table, w_a, torch.ones(32, 16, device=device), n_groups=2)
    assert (x.shape, z.shape, y.shape) == ((0, 2, 4096), (0, 2, 8), (0, 32))
    assert {x.dtype, z.dtype, y.dtype} == {torch.float64}


def test_inputs_are_not_modified() -> None:
    o, table, w_a, w_b = integers(0, 2, 2, 64), integers(1, 2, 64), integers(2, 1, 3, 128), integers(3, 4, 3)
    inputs = o, torch.tensor([1, 0]), table, w_a, w_b
    before = [tensor.clone() for tensor in inputs]
    x, z, y = o_proj(*inputs, n_groups=1)
    for result in (x, z, y):
        result.fill_(math.nan)
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))
    assert torch.equal(inverse_rope(*inputs[:3]), inverse_rope(*before[:3]))


@pytest.mark.parametrize(
    "x, w",
    [
        ((2, 3, 8), (3, 4, 9)),
        ((2, 3, 8), (2, 4, 8)),
        ((2, 1, 8), (3, 4, 8)),
        ((2, 3, 8), (1, 4, 8)),
        ((2, 24), (3, 4, 8)),
        ((2, 3, 8), (12, 8)),
    ],
)
def test_grouped_wo_a_refuses_shapes_that_do_not_fit(x, w) -> None:
    with pytest.raises(ValueError, match=r"x must be \[T, G, K\]"):
        grouped_wo_a(torch.ones(x), torch.ones(w))


@pytest.mark.parametrize(
    "z, w",
    [
        ((2, 3, 4), (5, 11)),
        ((2, 12), (5, 13)),
        ((2, 3, 2, 2), (5, 12)),
        ((12,), (5, 12)),
        ((2, 12), (1, 5, 12)),
        ((2, 12), (12, 5)),
        ((0, 3, 4), (5, 11)),
    ],
)
def test_wo_b_refuses_shapes_that_do_not_fit(z, w) -> None:
    with pytest.raises(ValueError, match=r"z must be \[T, G, R\]"):
        wo_b(torch.ones(z), torch.ones(w))


def test_o_proj_refuses_heads_that_do_not_divide() -> None:
    rest = torch.tensor([0, 1]), torch.ones(2, 64), torch.ones(2, 3, 128), torch.ones(5, 6)
    o = torch.ones(2, 4, 64)
    assert o_proj(o, *rest, n_groups=2)[2].shape == (2, 5)
    for bad, groups in ((o[:, :3], 2), (o, 3), (o, 0), (o, -2), (o.flatten(1), 2)):
        with pytest.raises(ValueError, match=f"a multiple of n_groups = {groups}"):
            o_proj(bad, *rest, n_groups=groups)
    with pytest.raises(ValueError, match="x must be"):
        o_proj(o, *rest, n_groups=4)


def test_codes_are_refused_as_values() -> None:
    x, w = torch.ones(2, 1, 8), torch.ones(1, 4, 8)
    for dtype in (torch.float8_e4m3fn, torch.uint8, torch.int64):
        for call in (lambda d: grouped_wo_a(x.to(d), w), lambda d: wo_b(x.to(d), w[0])):
            with pytest.raises(TypeError, match=r"^[xz] is"):
                call(dtype)
        for call in (lambda d: grouped_wo_a(x, w.to(d)), lambda d: wo_b(x, w[0].to(d))):
            with pytest.raises(TypeError, match=r"^w is"):
                call(dtype)
