"""The arguments of FlashInfer's sparse MLA decode for DeepSeek-V4, checked by name before the call.

One record serves the fused call (inverse RoPE and FP8 quantisation in the epilogue) and the unfused one (BF16), so that
the two can be compared. Source: flashinfer-python 0.7.4 ``mla/_core.py`` and the launcher it calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from oproj.activation import QuantizedActivation

HEADS, HEADS_PER_GROUP, HEAD_DIM, ROPE_DIM = 128, 8, 512, 64
GROUPS, GROUP_K = HEADS // HEADS_PER_GROUP, HEADS_PER_GROUP * HEAD_DIM
UNFUSED_HEADS = (8, 16, 32, 64, 128)
WINDOW = 128  # leading columns of sparse_indices that address the sliding window
_CACHE_ALIGNMENT = 16
_INT_MAX = 2**31 - 1


@dataclass(frozen=True)
class DecodeArguments:
    """What both calls take; B requests, N query tokens in all, H heads. Names are FlashInfer's.

    query: e4m3 (fused) or BF16, ``[B, Q, H, 512]``, or ragged ``[N, H, 512]`` with ``cum_seq_lens_q`` int32
    ``[B+1]`` and ``max_q_len``. Caches: dtype of query, HND ``[pages, 1, page, 512]``, NHD ``[pages, page, 1, 512]``
    or ``[pages, page, 512]``; without a compressed pool pass the window pool twice. sparse_indices: int32
    ``[N, topk]``; sparse_topk_lens: int32 ``[N]``, window slots included; seq_lens: int32 ``[B]``. cos_sin_cache:
    FP32 ``[max_position, 64]``, read by the fused call alone. Scales: float or an FP32 tensor. sinks: FP32 ``[H]``.
    """

    query: torch.Tensor
    swa_kv_cache: torch.Tensor
    compressed_kv_cache: torch.Tensor
    workspace_buffer: torch.Tensor
    sparse_indices: torch.Tensor
    sparse_topk_lens: torch.Tensor
    seq_lens: torch.Tensor
    cos_sin_cache: torch.Tensor
    bmm1_scale: float | torch.Tensor = 1.0
    bmm2_scale: float | torch.Tensor = 1.0
    sinks: torch.Tensor | None = None
    kv_layout: str = "HND"
    cum_seq_lens_q: torch.Tensor | None = None
    max_q_len: int | None = None
    enable_pdl: bool | None = None
    backend: str = "trtllm-gen"
    sparse_indices_are_storage_offsets: bool | None = None
    multi_ctas_kv_counter_buffer: torch.Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """N, the query tokens of all requests."""
        return self.query.shape[:-2].numel()

    def keywords(self, out: torch.Tensor | QuantizedActivation) -> dict[str, Any]:
        """Keyword arguments of ``flashinfer.mla.trtllm_batch_decode_sparse_mla_dsv4``: fused for quantised ``out``."""
        shared = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "cos_sin_cache"}
        if isinstance(out, torch.Tensor):
            return shared | {"out": out}
        fused = {"dsv4_inv_rope_cos_sin_cache": self.cos_sin_cache, "dsv4_output_scale": out.scale}
        return shared | {"out": out.data} | fused


def check_decode(args: DecodeArguments, *, fused: bool) -> None:
    """Raise ``TypeError``/``ValueError`` that names what FlashInfer would refuse, or take in silence.

    Looks at types, shapes, strides and devices, never at values: that would stall the stream (``check_values``).
    """
    for name in ("query", "swa_kv_cache", "compressed_kv_cache", "workspace_buffer", "cos_sin_cache"):
        _on_device(name, getattr(args, name), args.query)
    backends = ("trtllm-gen", "auto")
    if fused and args.backend not in backends:
        raise ValueError(f"backend={args.backend!r} has no fused epilogue; expected one of {backends}")
    _check_query(args, fused)
    _check_cache("swa_kv_cache", args.swa_kv_cache, args)
    _check_cache("compressed_kv_cache", args.compressed_kv_cache, args)
    _check_indices(args, fused)
    _check_numbers(args)
    if fused:
        table = args.cos_sin_cache
        _dtype("cos_sin_cache", table, torch.float32)
        if table.dim() != 2 or table.shape[1] != ROPE_DIM or not table.is_contiguous():
            raise ValueError(
                f"cos_sin_cache has shape {tuple(table.shape)} and strides {table.stride()}; expected contiguous "
                f"[max_position, {ROPE_DIM}]"
            )


def check_values(args: DecodeArguments, *, fused: bool) -> None:
    """Raise ``ValueError`` for lengths outside their range; waits for the device (not while a graph is captured)."""
    lengths, topk = args.sparse_topk_lens, args.sparse_indices.shape[-1]
    if bool(((lengths < WINDOW) | (lengths > topk)).any()):
        raise ValueError(f"sparse_topk_lens must lie in {WINDOW}..{topk} (window slots count), got {lengths.tolist()}")
    cumulative = args.cum_seq_lens_q
    q_lens = torch.diff(cumulative) if cumulative is not None else torch.full_like(args.seq_lens, args.query.shape[1])
    if cumulative is not None and (bool((q_lens < 0).any()) or cumulative[[0, -1]].tolist() != [0, args.num_tokens]):
        raise ValueError(f"cum_seq_lens_q={cumulative.tolist()} must rise from 0 to {args.num_tokens} query tokens")
    if bool((q_lens > (args.max_q_len or args.query.shape[1])).any()):
        raise ValueError(f"max_q_len={args.max_q_len} is below a request's query length {int(q_lens.max())}")
    if bool((args.seq_lens < q_lens).any()):
        raise ValueError(f"seq_lens={args.seq_lens.tolist()} must be at least the query lengths {q_lens.tolist()}")
    if fused and bool((args.seq_lens > args.cos_sin_cache.shape[0]).any()):
        raise ValueError(
            f"seq_lens reaches {int(args.seq_lens.max())}; cos_sin_cache has {len(args.cos_sin_cache)} rows"
        )


def check_output(args: DecodeArguments, out: torch.Tensor | QuantizedActivation) -> None:
    """Raise ``TypeError``/``ValueError`` for buffers that the call would refuse."""
    if isinstance(out, torch.Tensor):
        _on_device("out", out, args.query)
        _dtype("out", out, torch.bfloat16)
        if out.shape != args.query.shape:
            raise ValueError(f"out has shape {tuple(out.shape)}; expected that of query, {tuple(args.query.shape)}")
        return
    check_rope_quant_buffers(out, args.num_tokens)
    _on_device("out.data", out.data, args.query)
    _on_device("out.scale", out.scale, args.query)


def check_rope_quant_buffers(out: QuantizedActivation, num_tokens: int) -> None:
    """The exact layout that the epilogue writes: data ``[N, 16, 4096]``, scale ``[N, 16, 8]`` in columns of M words."""
    _dtype("out.data", out.data, torch.float8_e4m3fn)
    _dtype("out.scale", out.scale, torch.int32)
    for name, tensor, last in (("out.data", out.data, GROUP_K), ("out.scale", out.scale, HEADS_PER_GROUP)):
        if tuple(tensor.shape) != (num_tokens, GROUPS, last):
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; expected {(num_tokens, GROUPS, last)}")
    if num_tokens == 0:
        return
    strides = (GROUP_K, num_tokens * GROUP_K, 1)
    if out.data.stride() != strides:
        raise ValueError(f"out.data has strides {out.data.stride()}; expected {strides}")
    m = out.scale.stride(2)
    if out.scale.stride() != (1, HEADS_PER_GROUP * m, m) or m % 4 or not num_tokens <= m <= _INT_MAX:
        raise ValueError(
            f"out.scale has strides {out.scale.stride()}; expected (1, {HEADS_PER_GROUP}*M, M) with M a multiple of 4 "
            f"and at least {num_tokens}"
        )


def _check_query(args: DecodeArguments, fused: bool) -> None:
    query, ragged = args.query, args.cum_seq_lens_q is not None
    if query.dtype not in ((torch.float8_e4m3fn,) if fused else (torch.float8_e4m3fn, torch.bfloat16)):
        raise TypeError(f"query has dtype {query.dtype}; expected float8_e4m3fn{'' if fused else ' or bfloat16'}")
    if query.dim() != (3 if ragged else 4) or query.shape[-1] != HEAD_DIM:
        layout = "[N, H, 512] with cum_seq_lens_q" if ragged else "[B, Q, H, 512] without cum_seq_lens_q"
        raise ValueError(f"query has shape {tuple(query.shape)}; expected {layout}")
    allowed = (HEADS,) if fused else UNFUSED_HEADS
    if query.shape[-2] not in allowed:
        raise ValueError(f"query has {query.shape[-2]} heads; expected {' or '.join(map(str, allowed))}")
    if ragged and (type(args.max_q_len) is not int or args.max_q_len < 1):
        raise ValueError(f"max_q_len={args.max_q_len!r}; a ragged query needs a positive int")
    if not ragged and args.max_q_len not in (None, query.shape[1]):
        raise ValueError(f"max_q_len={args.max_q_len} must be None or the {query.shape[1]} tokens of a dense query")


def _check_cache(name: str, cache: torch.Tensor, args: DecodeArguments) -> None:
    if args.kv_layout not in ("HND", "NHD"):
        raise ValueError(f"kv_layout={args.kv_layout!r} is unknown; known: HND, NHD")
    _dtype(name, cache, args.query.dtype)
    head_axis = 1 if args.kv_layout == "HND" else 2
    shaped = (cache.dim() == 4 and cache.shape[head_axis] == 1) or (cache.dim() == 3 and args.kv_layout == "HND")
    if not shaped or cache.shape[-1] != HEAD_DIM:
        raise ValueError(
            f"{name} has shape {tuple(cache.shape)}; expected 512 wide with one KV head, HND [pages, 1, page, 512] or "
            f"[pages, page, 512], NHD [pages, page, 1, 512]; kv_layout is {args.kv_layout}"
        )
    if cache.stride(-1) != 1 or cache.data_ptr() % _CACHE_ALIGNMENT:
        raise ValueError(f"{name} must have a unit last stride and start at a multiple of {_CACHE_ALIGNMENT} bytes")
    pages = cache.squeeze(head_axis) if cache.dim() == 4 else cache
    dense = pages.stride(1) == HEAD_DIM and pages.stride(0) == pages.shape[1] * HEAD_DIM
    if not dense and args.sparse_indices_are_storage_offsets is None:
        raise ValueError(f"{name} has strided pages; say sparse_indices_are_storage_offsets=True or False")


def _check_indices(args: DecodeArguments, fused: bool) -> None:
    cumulative, tokens = args.cum_seq_lens_q, args.num_tokens
    if cumulative is not None:
        _int32("cum_seq_lens_q", cumulative, args, 1)
        if cumulative.shape[0] < 2:
            raise ValueError(f"cum_seq_lens_q has {cumulative.shape[0]} entries; B+1 is at least 2")
    requests = args.query.shape[0] if cumulative is None else cumulative.shape[0] - 1
    indices = args.sparse_indices
    _int32("sparse_indices", indices, args, 2)
    if indices.shape[1] < WINDOW or indices.shape[1] % 4:
        raise ValueError(f"sparse_indices has {indices.shape[1]} columns; expected a multiple of 4, at least {WINDOW}")
    if indices.shape[0] > tokens or (fused and indices.shape[0] != tokens):
        relation = "exactly" if fused else "at most"
        raise ValueError(f"sparse_indices has {indices.shape[0]} rows; expected {relation} the {tokens} query tokens")
    lengths = (
        ("sparse_topk_lens", args.sparse_topk_lens, indices.shape[0]),
        ("seq_lens", args.seq_lens, requests),
    )
    for name, tensor, length in lengths:
        _int32(name, tensor, args, 1)
        if tensor.shape[0] != length:
            raise ValueError(f"{name} has {tensor.shape[0]} entries; expected {length}")


def _check_numbers(args: DecodeArguments) -> None:
    for name in ("bmm1_scale", "bmm2_scale"):
        value = getattr(args, name)
        if not isinstance(value, (float, torch.Tensor)):
            raise TypeError(f"{name} is {type(value).__name__}; expected a float or an FP32 tensor")
        if isinstance(value, torch.Tensor):
            _dtype(name, value, torch.float32)
    if args.sinks is not None:
        _on_device("sinks", args.sinks, args.query)
        _dtype("sinks", args.sinks, torch.float32)
        if tuple(args.sinks.shape) != (args.query.shape[-2],):
            raise ValueError(f"sinks has shape {tuple(args.sinks.shape)}; expected ({args.query.shape[-2]},)")


def _int32(name: str, tensor: torch.Tensor, args: DecodeArguments, axes: int) -> None:
    _on_device(name, tensor, args.query)
    _dtype(name, tensor, torch.int32)
    if tensor.dim() != axes:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; expected {axes} axes")


def _dtype(name: str, tensor: torch.Tensor, expected: torch.dtype) -> None:
    if tensor.dtype != expected:
        raise TypeError(f"{name} has dtype {tensor.dtype}; expected {expected}")


def _on_device(name: str, tensor: Any, query: Any) -> None:
    for label, each in (("query", query), (name, tensor)):
        if not isinstance(each, torch.Tensor):
            raise TypeError(f"{label} is {type(each).__name__}; expected a torch.Tensor")
    if tensor.device != query.device:
        raise ValueError(f"{name} is on {tensor.device} but query is on {query.device}")
