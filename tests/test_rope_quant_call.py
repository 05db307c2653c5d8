"""The call that FlashInfer gets: bound to its real signature, checked by name, both forms from one set of arguments."""

from __future__ import annotations

import importlib.util
import inspect
import json
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from oproj.activation import QuantizedActivation
from oproj.engines import EngineUnavailable
from oproj.rope_quant import FUNCTION, DecodeArguments, rope_quant_attn_out, rope_quant_decode

DATA = Path(__file__).parent / "data"
E4M3 = torch.float8_e4m3fn


def recorder() -> ModuleType:
    """The script that reads the signature from a wheel's source."""
    spec = importlib.util.spec_from_file_location("record", DATA / "record_flashinfer_signature.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def arguments(tokens: int = 3, heads: int = 128, dtype: torch.dtype = E4M3, **changes: Any) -> DecodeArguments:
    """One set for both calls: ``tokens`` requests of one token each, one page of 4."""
    cache = torch.zeros(1, 1, 4, 512).to(dtype)
    basis: dict[str, Any] = {
        "query": torch.zeros(tokens, 1, heads, 512).to(dtype),
        "swa_kv_cache": cache,
        "compressed_kv_cache": cache,
        "workspace_buffer": torch.zeros(64, dtype=torch.uint8),
        "sparse_indices": torch.full((tokens, 132), -1, dtype=torch.int32),
        "sparse_topk_lens": torch.full((tokens,), 128, dtype=torch.int32),
        "seq_lens": torch.full((tokens,), 9, dtype=torch.int32),
        "cos_sin_cache": torch.zeros(16, 64),
    }
    return DecodeArguments(**basis | changes)


def ragged(**changes: Any) -> DecodeArguments:
    query, cumulative = torch.zeros(3, 128, 512).to(E4M3), torch.tensor([0, 2, 3], dtype=torch.int32)
    seq_lens = torch.full((2,), 9, dtype=torch.int32)
    basis = {"query": query, "cum_seq_lens_q": cumulative, "max_q_len": 2, "seq_lens": seq_lens}
    return arguments(**basis | changes)


def parameters() -> list[dict[str, Any]]:
    """Of the installed FlashInfer, read from its source (importing it needs a GPU's libraries), else as recorded."""
    installed = importlib.util.find_spec("flashinfer")
    if installed is not None and installed.submodule_search_locations:
        source = Path(installed.submodule_search_locations[0]) / "mla" / "_core.py"
        return recorder().parameters(source.read_text())
    recorded = json.loads((DATA / "flashinfer_signature.json").read_text())
    assert (recorded["function"], recorded["version"]) == (f"flashinfer.mla.{FUNCTION}", "0.7.4")
    return recorded["parameters"]


def signature() -> inspect.Signature:
    """What ``parameters`` say, so that a call can be bound to it."""
    made = []
    for row in parameters():
        default = inspect.Parameter.empty if row["default"] is None else row["default"]
        made.append(inspect.Parameter(row["name"], inspect._ParameterKind[row["kind"]], default=default))
    return inspect.Signature(made)


class Spy:
    """Takes the call with FlashInfer's own signature."""

    def __init__(self) -> None:
        self.__signature__ = signature()
        self.calls: list[dict[str, Any]] = []

    def __call__(self, **keywords: Any) -> None:
        self.calls.append(keywords)


@pytest.mark.parametrize("make", [arguments, ragged])
def test_one_set_of_arguments_makes_both_calls(make: Any) -> None:
    args, spy, extra = make(), Spy(), {"dsv4_inv_rope_cos_sin_cache", "dsv4_output_scale"}
    x, y = (rope_quant_decode(args, fused=fused, decode=spy) for fused in (True, False))
    fused, unfused = spy.calls
    assert set(fused) - set(unfused) == extra and set(unfused) < set(fused)
    assert all(fused[name] is unfused[name] is getattr(args, name) for name in set(unfused) - {"out"})
    assert isinstance(x, QuantizedActivation) and isinstance(y, torch.Tensor)
    assert fused["out"] is x.data and fused["dsv4_output_scale"] is x.scale
    assert fused["dsv4_inv_rope_cos_sin_cache"] is args.cos_sin_cache
    assert unfused["out"] is y and y.shape == args.query.shape and y.dtype == torch.bfloat16


def test_given_buffers_are_the_ones_written() -> None:
    args, spy, out = arguments(), Spy(), rope_quant_attn_out(3)
    y = torch.empty(args.query.shape, dtype=torch.bfloat16)
    assert rope_quant_decode(args, fused=True, out=out, decode=spy, validate=True) is out
    assert rope_quant_decode(args, fused=False, out=y, decode=spy) is y
    assert [call["out"] is buffer for call, buffer in zip(spy.calls, (out.data, y), strict=True)] == [True, True]


@pytest.mark.parametrize("fused", [False, True])
def test_no_token_makes_no_call(fused: bool) -> None:
    spy = Spy()
    out = rope_quant_decode(arguments(0), fused=fused, decode=spy)
    assert not spy.calls and len(out.data if isinstance(out, QuantizedActivation) else out) == 0


@pytest.mark.parametrize("heads", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3])
def test_the_unfused_call_takes_what_the_fused_one_refuses(heads: int, dtype: torch.dtype) -> None:
    args, spy = arguments(heads=heads, dtype=dtype), Spy()
    rope_quant_decode(args, fused=False, decode=spy)
    rope_quant_decode(replace(args, sparse_indices=args.sparse_indices[:2], sparse_topk_lens=args.sparse_topk_lens[:2]),
                      fused=False, decode=spy)  # fmt: skip
    assert len(spy.calls) == 2
    if (heads, dtype) != (128, E4M3):
        with pytest.raises((TypeError, ValueError), match="query has"):
            rope_quant_decode(args, fused=True, decode=spy)


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


PAGES = torch.zeros(2, 1, 8, 512).to(E4M3)
BAD_CALLS = [
    (arguments(query=None), "query is NoneType"),
    (arguments(query=torch.zeros(3, 128, 512).to(E4M3)), r"query has shape \(3, 128, 512\)"),
    (ragged(query=torch.zeros(3, 1, 128, 512).to(E4M3)), r"query has shape \(3, 1, 128, 512\)"),
    (arguments(dtype=torch.float16), "query has dtype torch.float16"),
    (arguments(heads=64), "query has 64 heads; expected 128"),
    (arguments(swa_kv_cache=PAGES.bfloat16()), "swa_kv_cache has dtype torch.bfloat16"),
    (arguments(compressed_kv_cache=None), "compressed_kv_cache is NoneType"),
    (arguments(compressed_kv_cache=PAGES, kv_layout="NHD"), r"swa_kv_cache has shape .* kv_layout is NHD"),
    (arguments(swa_kv_cache=PAGES[..., :256]), r"swa_kv_cache has shape \(2, 1, 8, 256\)"),
    (arguments(swa_kv_cache=PAGES[:, :, :4]), "swa_kv_cache has strided pages"),
    (arguments(swa_kv_cache=PAGES.flatten()[8 : 8 + 2048].view(1, 1, 4, 512)), "start at a multiple of 16 bytes"),
    (arguments(kv_layout="NDH"), "kv_layout='NDH'"),
    (arguments(cos_sin_cache=torch.zeros(16, 64).double()), "cos_sin_cache has dtype torch.float64"),
    (arguments(cos_sin_cache=torch.zeros(16, 128)[:, :64]), "cos_sin_cache has shape"),
    (arguments(cos_sin_cache=torch.zeros(16, 32)), r"cos_sin_cache has shape \(16, 32\)"),
    (arguments(sparse_indices=torch.zeros(3, 132)), "sparse_indices has dtype torch.float32"),
    (arguments(sparse_indices=torch.zeros(3, 124, dtype=torch.int32)), "sparse_indices has 124 columns"),
    (arguments(sparse_indices=torch.zeros(3, 130, dtype=torch.int32)), "sparse_indices has 130 columns"),
    (arguments(sparse_indices=torch.zeros(2, 132, dtype=torch.int32)), "sparse_indices has 2 rows; expected exactly"),
    (arguments(sparse_topk_lens=int32(128, 128)), "sparse_topk_lens has 2 entries; expected 3"),
    (arguments(sparse_topk_lens=torch.zeros(3)), "sparse_topk_lens has dtype torch.float32"),
    (arguments(seq_lens=int32(9, 9)), "seq_lens has 2 entries; expected 3"),
    (arguments(seq_lens=int32(9, 9, 9)[None]), r"seq_lens has shape \(1, 3\)"),
    (ragged(cum_seq_lens_q=int32(0)), "cum_seq_lens_q has 1 entries"),
    (ragged(cum_seq_lens_q=torch.tensor([0, 2, 3])), "cum_seq_lens_q has dtype torch.int64"),
    (ragged(max_q_len=None), "max_q_len=None"),
    (arguments(max_q_len=2), "max_q_len=2 must be None or the 1 tokens"),
    (arguments(bmm1_scale=1), "bmm1_scale is int"),
    (arguments(bmm2_scale=torch.ones(1).double()), "bmm2_scale has dtype torch.float64"),
    (arguments(sinks=torch.zeros(64)), r"sinks has shape \(64,\)"),
    (arguments(backend="cake"), "backend='cake' has no fused epilogue"),
    (arguments(workspace_buffer=torch.zeros(1, device="meta")), "workspace_buffer is on meta"),
    (arguments(sparse_topk_lens=int32(128, 127, 128)), "sparse_topk_lens must lie in 128..132"),
    (arguments(sparse_topk_lens=int32(128, 133, 128)), "sparse_topk_lens must lie in 128..132"),
    (arguments(seq_lens=int32(9, 0, 9)), "seq_lens=.* must be at least the query lengths"),
    (arguments(seq_lens=int32(9, 17, 9)), "seq_lens reaches 17; cos_sin_cache has 16 rows"),
    (ragged(cum_seq_lens_q=int32(0, 2, 2)), "must rise from 0 to 3 query tokens"),
    (ragged(max_q_len=1), "max_q_len=1 is below a request's query length 2"),
]


@pytest.mark.parametrize("args, message", BAD_CALLS, ids=[message for _, message in BAD_CALLS])
def test_what_flashinfer_would_refuse_is_named_before_the_call(args: DecodeArguments, message: str) -> None:
    spy = Spy()
    with pytest.raises((TypeError, ValueError), match=message):
        rope_quant_decode(args, fused=True, decode=spy, validate=True)
    assert not spy.calls


def test_lengths_at_their_limits_and_strided_pages_with_an_encoding_pass() -> None:
    args = arguments(
        sparse_topk_lens=int32(128, 132, 130),
        seq_lens=int32(1, 16, 9),
        swa_kv_cache=PAGES[:, :, :4],
        sparse_indices_are_storage_offsets=True,
    )
    spy = Spy()
    rope_quant_decode(args, fused=True, decode=spy, validate=True)
    assert len(spy.calls) == 1


def scale_with(*strides: int) -> torch.Tensor:
    return torch.zeros(4096, dtype=torch.int32).as_strided((3, 16, 8), strides)


GOOD = rope_quant_attn_out(3)


@pytest.mark.parametrize(
    "out, message",
    [
        (torch.empty(3, 1, 128, 512, dtype=torch.bfloat16), "out is Tensor; fused=True"),
        (replace(GOOD, data=GOOD.data.view(torch.uint8)), "out.data has dtype torch.uint8"),
        (replace(GOOD, data=GOOD.data.contiguous()), r"out.data has strides \(65536, 4096, 1\)"),
        (replace(GOOD, data=GOOD.data[:, :8]), r"out.data has shape \(3, 8, 4096\)"),
        (replace(GOOD, scale=GOOD.scale.view(torch.float32)), "out.scale has dtype torch.float32"),
        (replace(GOOD, scale=scale_with(128, 8, 1)), r"out.scale has strides \(128, 8, 1\)"),
        (replace(GOOD, scale=scale_with(1, 40, 5)), "M a multiple of 4"),
        (replace(GOOD, scale=scale_with(1, 0, 0)), "at least 3"),
        (replace(GOOD, scale=scale_with(1, 64, 4)), r"out.scale has strides \(1, 64, 4\)"),
        (rope_quant_attn_out(4), r"out.data has shape \(4, 16, 4096\)"),
    ],
)
def test_buffers_of_another_layout_are_refused(out: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        rope_quant_decode(arguments(), fused=True, out=out, decode=Spy())


def test_a_wider_scale_buffer_is_taken() -> None:
    out = replace(GOOD, scale=scale_with(1, 64, 8))
    assert rope_quant_decode(arguments(), fused=True, out=out, decode=Spy()) is out


def test_a_version_without_the_epilogue_is_unavailable_not_called() -> None:
    def older(query: Any, swa_kv_cache: Any, workspace_buffer: Any, **known: Any) -> None: ...

    kept = [p for p in signature().parameters.values() if not p.name.startswith("dsv4_")]
    older.__signature__ = inspect.Signature(kept)  # type: ignore[attr-defined]
    with pytest.raises(EngineUnavailable, match="dsv4_inv_rope_cos_sin_cache"):
        rope_quant_decode(arguments(), fused=True, decode=older)
    rope_quant_decode(arguments(), fused=False, decode=older)


def test_without_flashinfer_or_its_device_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer.mla", None)
    with pytest.raises(EngineUnavailable, match=r"flashinfer\.mla cannot be imported"):
        rope_quant_decode(arguments(), fused=True)
    monkeypatch.setitem(sys.modules, "flashinfer.mla", SimpleNamespace(__file__="old.py"))
    with pytest.raises(EngineUnavailable, match=f"old.py has no {FUNCTION}"):
        rope_quant_decode(arguments(), fused=True)
    monkeypatch.setitem(sys.modules, "flashinfer.mla", SimpleNamespace(**{FUNCTION: Spy()}))
    with pytest.raises(EngineUnavailable, match="query is on cpu"):
        rope_quant_decode(arguments(), fused=True)


def test_a_signature_is_recorded_from_a_wheel(tmp_path: Path) -> None:
    source = f"def {FUNCTION}(query, out=None, scale: float = 1.0, *, kv='fp8', must): ...\n"
    wheel = tmp_path / "made.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("flashinfer/mla/_core.py", source)
        archive.writestr("made-1.2.dist-info/METADATA", "Metadata-Version: 2.4\nName: made\nVersion: 1.2\n\ntext")
    target = tmp_path / "found.json"
    recorder().main(str(wheel), target)
    found = json.loads(target.read_text())
    rows = [(row["name"], row["kind"], row["default"]) for row in found["parameters"]]
    either, named = "POSITIONAL_OR_KEYWORD", "KEYWORD_ONLY"
    assert rows == [
        ("query", either, None),
        ("out", either, "None"),
        ("scale", either, "1.0"),
        ("kv", named, "'fp8'"),
        ("must", named, None),
    ]
    assert (found["distribution"], found["version"], len(found["sha256"])) == ("made", "1.2", 64)
