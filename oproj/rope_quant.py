"""RopeQuant: FlashInfer's sparse MLA decode whose epilogue rotates back and quantises what ``wo_a`` reads.

Served for V4-Pro with 128 local heads on SM100 and SM103. The kernel is closed; ``software_rope_quant`` is the model
of its epilogue from FP32 attention output (row ``rope-quant`` of the quantiser table) and fills the same buffers.
Sources: vLLM 0.33.0 ``deepseek_v4/nvidia/ops/o_proj.py``; flashinfer-python 0.7.4 ``mla/_core.py``.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch

from oproj.activation import QuantizedActivation, empty_scales, empty_values
from oproj.engines import EngineUnavailable
from oproj.engines.software.quantizers import rotate_and_quantize
from oproj.rope_quant_call import (
    GROUP_K,
    GROUPS,
    HEAD_DIM,
    HEADS,
    HEADS_PER_GROUP,
    ROPE_DIM,
    DecodeArguments,
    check_decode,
    check_output,
    check_rope_quant_buffers,
    check_values,
)

__all__ = [
    "DecodeArguments",
    "query_positions",
    "rope_quant_attn_out",
    "rope_quant_decode",
    "rope_quant_unsupported_reason",
    "software_rope_quant",
]

FUNCTION = "trtllm_batch_decode_sparse_mla_dsv4"
CAPABILITIES = ((10, 0), (10, 3), (10, 7))
QUANT_KEY = "e4m3, dynamic, 1x128, symmetric, packed UE8M0"  # the serving engine's key says FP32 scales, wrongly


def rope_quant_unsupported_reason(layer: Any) -> str | None:
    """Why ``layer`` cannot take the fused epilogue, or ``None``; never raises for a layer that has the attributes.

    Reads, in this order, ``n_local_heads`` (128), ``kv_cache_torch_dtype`` (e4m3) and ``wo_a.weight.dtype`` (e4m3). As
    upstream, it does not ask for the architecture or the dimensions: the caller is an SM100 layer.
    """
    if layer.n_local_heads != HEADS:
        return f"n_local_heads is {layer.n_local_heads}; the fused epilogue takes {HEADS} (padding heads costs more)"
    if layer.kv_cache_torch_dtype != torch.float8_e4m3fn:
        return f"kv_cache_torch_dtype is {layer.kv_cache_torch_dtype}; the fused epilogue takes torch.float8_e4m3fn"
    if layer.wo_a.weight.dtype != torch.float8_e4m3fn:
        return f"wo_a.weight has dtype {layer.wo_a.weight.dtype}; the fused epilogue feeds torch.float8_e4m3fn"
    return None


def rope_quant_attn_out(num_tokens: int, device: torch.device | str | None = None) -> QuantizedActivation:
    """Buffers for ``num_tokens`` tokens: data e4m3 ``[T, 16, 4096]``, strides ``(4096, 4096*T, 1)``, uninitialised;
    scale int32 ``[T, 16, 8]``, strides ``(1, 8*Ta, Ta)``, ``Ta = 4*ceil(T/4)``, a view of the first T of Ta tokens.

    The words of tokens T..Ta-1 are zeroed: the kernel never writes them, FlashInfer asks its callers to, and the GEMM's
    TMA loads read them. vLLM 0.33.0 leaves them uninitialised. ``orig_shape`` is that of data, as upstream. Raises
    ``ValueError`` for a negative count.
    """
    if num_tokens < 0:
        raise ValueError(f"num_tokens={num_tokens} must be at least 0")
    data = empty_values(num_tokens, GROUPS, GROUP_K, torch.float8_e4m3fn, device)
    scale = empty_scales(num_tokens, GROUPS, HEADS_PER_GROUP, True, device)
    return QuantizedActivation(data, scale, torch.bfloat16, data.shape, QUANT_KEY)


def query_positions(
    seq_lens: torch.Tensor, *, q_len: int | None = None, cum_seq_lens_q: torch.Tensor | None = None
) -> torch.Tensor:
    """Positions int64 ``[N]`` that the kernel derives: ``seq_len - q_len + index in the request``.

    seq_lens: integers ``[B]``. Either ``q_len`` tokens in each request, or ``cum_seq_lens_q`` ``[B+1]`` from 0 to N.
    The kernel has no ``positions`` argument, so a caller that clamps those of draft tokens diverges here. Raises
    ``ValueError`` that names the argument, also where a request has more query tokens than ``seq_lens``.
    """
    if (q_len is None) == (cum_seq_lens_q is None):
        raise ValueError(f"q_len={q_len} and cum_seq_lens_q={cum_seq_lens_q}: expected exactly one of the two")
    if seq_lens.dim() != 1 or seq_lens.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"seq_lens has shape {tuple(seq_lens.shape)} and dtype {seq_lens.dtype}; expected ints [B]")
    if cum_seq_lens_q is None:
        if not isinstance(q_len, int) or q_len < 0:
            raise ValueError(f"q_len={q_len} must be an int of at least 0")
        cum_seq_lens_q = torch.arange(len(seq_lens) + 1, device=seq_lens.device) * q_len
    if cum_seq_lens_q.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"cum_seq_lens_q has dtype {cum_seq_lens_q.dtype}; expected ints [B+1]")
    if cum_seq_lens_q.shape != (len(seq_lens) + 1,) or int(cum_seq_lens_q[0]) != 0:
        raise ValueError(f"cum_seq_lens_q={cum_seq_lens_q.tolist()} must have {len(seq_lens) + 1} entries from 0 on")
    starts, q_lens = cum_seq_lens_q[:-1].long(), torch.diff(cum_seq_lens_q.long())
    if bool((q_lens < 0).any()):
        raise ValueError(f"cum_seq_lens_q={cum_seq_lens_q.tolist()} must not fall")
    first = seq_lens.long() - q_lens
    if bool((first < 0).any()):
        raise ValueError(f"seq_lens={seq_lens.tolist()} must be at least the query lengths {q_lens.tolist()}")
    tokens = torch.arange(int(cum_seq_lens_q[-1]), device=seq_lens.device)
    return tokens + torch.repeat_interleave(first - starts, q_lens)


def software_rope_quant(
    o: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor, out: QuantizedActivation | None = None
) -> QuantizedActivation:
    """The epilogue's model: FP32 attention output ``[T, 128, 512]`` (CPU) rotated back and quantised in one go.

    positions: int64 ``[T]`` (``query_positions``); cos_sin_cache: FP32 ``[max_position, 64]``. Writes into ``out``
    (``rope_quant_attn_out``) when given, T tokens and no padding word, as the kernel does. Raises ``TypeError``/
    ``ValueError`` that names the bad argument.
    """
    if o.dim() != 3 or tuple(o.shape[1:]) != (HEADS, HEAD_DIM):
        raise ValueError(f"o has shape {tuple(o.shape)}; expected [T, {HEADS}, {HEAD_DIM}]")
    if out is None:
        out = rope_quant_attn_out(o.shape[0], o.device)
    check_rope_quant_buffers(out, o.shape[0])
    if not o.numel():
        o = torch.empty(o.shape, dtype=o.dtype, device=o.device)  # an empty tensor may have any strides
    codes, scale = rotate_and_quantize(
        o,
        positions,
        cos_sin_cache,
        "rope-quant",
        n_groups=GROUPS,
        heads_per_group=HEADS_PER_GROUP,
        nope_dim=HEAD_DIM - ROPE_DIM,
        rope_dim=ROPE_DIM,
    )
    out.data.view(torch.uint8).copy_(codes.view(torch.uint8))
    out.scale.copy_(scale)
    return out


def rope_quant_decode(
    args: DecodeArguments,
    *,
    fused: bool,
    out: torch.Tensor | QuantizedActivation | None = None,
    validate: bool = False,
    decode: Callable[..., Any] | None = None,
) -> torch.Tensor | QuantizedActivation:
    """Attention of ``args``: codes and scales with RopeQuant (``fused``), else BF16 of query's shape.

    out: ``QuantizedActivation`` (``rope_quant_attn_out``; its padding words zeroed once) or BF16 tensor, allocated when
    missing. ``validate`` looks at lengths too and so waits for the device. ``decode``: the function to call instead
    of FlashInfer's. Raises ``TypeError``/``ValueError`` that names the bad argument, ``EngineUnavailable`` without
    FlashInfer, with one that lacks an argument, or on another architecture. Zero tokens return without a call.
    """
    if out is not None and isinstance(out, QuantizedActivation) != fused:
        raise TypeError(f"out is {type(out).__name__}; fused={fused} writes {'codes and scales' if fused else 'BF16'}")
    check_decode(args, fused=fused)
    if out is None:
        device = args.query.device
        out = (
            rope_quant_attn_out(args.num_tokens, device)
            if fused
            else torch.empty(args.query.shape, dtype=torch.bfloat16, device=device)
        )
    check_output(args, out)
    if args.num_tokens == 0:
        return out
    if validate:
        check_values(args, fused=fused)
    function = decode or _flashinfer_decode(args.query.device)
    keywords = args.keywords(out)
    _check_signature(function, keywords)
    function(**keywords)
    return out


def _flashinfer_decode(device: torch.device) -> Callable[..., Any]:
    """FlashInfer's function, on a device that it supports."""
    try:
        module = importlib.import_module("flashinfer.mla")
    except ImportError as error:
        raise EngineUnavailable(f"flashinfer.mla cannot be imported: {error}; install flashinfer-python") from error
    if not hasattr(module, FUNCTION):
        raise EngineUnavailable(f"{module.__file__} has no {FUNCTION}; flashinfer-python 0.7.4 has it")
    found = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    if found not in CAPABILITIES:
        raise EngineUnavailable(f"query is on {device}, compute capability {found}; the kernel runs on {CAPABILITIES}")
    return getattr(module, FUNCTION)


def _check_signature(function: Callable[..., Any], keywords: dict[str, Any]) -> None:
    """A version that lacks an argument must not look like a bad call of ours."""
    try:
        inspect.signature(function).bind(**keywords)
    except TypeError as error:
        raise EngineUnavailable(f"{getattr(function, '__name__', function)} of this version: {error}") from error
