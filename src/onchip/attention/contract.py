"""Every check on the arguments of an attention call, once, before any choice is made.

What comes out, `Arguments`, is right by construction: the operators pass it on and no implementation checks it again.
"""
import operator
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onchip.attention.dispatch import BACKENDS
from onchip.attention.problem import CAUSAL_NAMES, AttentionProblem, Spec
from onchip.errors import InputError
from onchip.roofline.shape import parse_causal

__all__ = ["Arguments", "AttentionProblem", "Spec", "check_dense", "check_packed", "describe", "empty_like_q", "empty_lse"]

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class Arguments(NamedTuple):
    """A checked call, in the order of the operators' schema. Widths of −1 are unbounded, scale None is 1/√head_dim, softcap 0 is none."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None  # 4-D, each size 1 or full
    mask: Tensor | None  # 4-D, each size 1 or full
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    cu_seqlens_q: Tensor | None  # int32, on q's device
    cu_seqlens_k: Tensor | None
    dropout_seed: Tensor | None  # one int64, on q's device; None without dropout
    max_seqlen_q: int
    max_seqlen_k: int
    causal: int
    window_left: int
    window_right: int
    scale: float | None
    softcap: float
    dropout_p: float
    deterministic: bool
    backend: str


def check_dense(q: Tensor, k: Tensor, v: Tensor, *, causal: bool | str, window: Any, scale: Any, softcap: Any, bias: Tensor | None,
                mask: Tensor | None, alibi_slopes: Tensor | None, sinks: Tensor | None, dropout_p: float, dropout_seed: Any,
                deterministic: bool, backend: str) -> Arguments:
    """Check a dense call: q (B, Hq, Sq, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, Dv)."""
    q, k, v = _check_operands(q, k, v, 4, "(batch, heads, seq, dim)")
    batch, heads, seq_q, head_dim = q.shape
    _, kv_heads, seq_k, _ = k.shape
    if k.shape[0] != batch or k.shape[3] != head_dim:
        raise InputError(f"k: got shape {_shape(k)}, accepted: ({batch}, kv heads, seq, {head_dim}) to match q {_shape(q)}")
    if v.shape[0] != batch or v.shape[1] != kv_heads or v.shape[2] != seq_k:
        raise InputError(f"v: got shape {_shape(v)}, accepted: ({batch}, {kv_heads}, {seq_k}, dim) to match k {_shape(k)}")
    _check_group(heads, kv_heads)
    full = (batch, heads, seq_q, seq_k)
    if bias is not None:
        _check_tensor("bias", bias, q)
        if not bias.is_floating_point():
            raise InputError(f"bias: got {bias.dtype}, accepted: a floating point tensor (a boolean one is a mask)")
        bias = _broadcast("bias", bias, full)
    if mask is not None:
        _check_tensor("mask", mask, q)
        if mask.dtype != torch.bool:
            raise InputError(f"mask: got {mask.dtype}, accepted: torch.bool, True where the query sees the key (an additive one is a bias)")
        mask = _broadcast("mask", mask, full)
    return Arguments(q, k, v, bias, mask, *_check_per_head(q, alibi_slopes, sinks, heads, batch), None, None,
                     _check_dropout(q, dropout_p, dropout_seed), seq_q, seq_k, *_check_geometry(causal, window),
                     *_check_numbers(scale, softcap), float(dropout_p), deterministic, _check_backend(backend))


def check_packed(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *, max_seqlen_q: int | None,
                 max_seqlen_k: int | None, causal: bool | str, window: Any, scale: Any, softcap: Any, alibi_slopes: Tensor | None,
                 sinks: Tensor | None, dropout_p: float, dropout_seed: Any, deterministic: bool, backend: str) -> Arguments:
    """Check a packed call: q (total_q, Hq, D), k (total_k, Hkv, D), v (total_k, Hkv, Dv), offsets (sequences + 1,).

    Offsets are verified when they lie on the host. On a device they are trusted (reading them would stall it): implementations cut them off
    at the data's end, so that wrong ones give wrong rows but touch no memory outside.
    """
    q, k, v = _check_operands(q, k, v, 3, "(tokens, heads, dim)")
    heads, head_dim = q.shape[1:]
    kv_heads = k.shape[1]
    if k.shape[2] != head_dim:
        raise InputError(f"k: got shape {_shape(k)}, accepted: (tokens, kv heads, {head_dim}) to match q {_shape(q)}")
    if v.shape[0] != k.shape[0] or v.shape[1] != kv_heads:
        raise InputError(f"v: got shape {_shape(v)}, accepted: ({k.shape[0]}, {kv_heads}, dim) to match k {_shape(k)}")
    _check_group(heads, kv_heads)
    cu_seqlens_q, longest_q = _check_offsets("q", cu_seqlens_q, max_seqlen_q, q)
    cu_seqlens_k, longest_k = _check_offsets("k", cu_seqlens_k, max_seqlen_k, k)
    if cu_seqlens_q.shape[0] != cu_seqlens_k.shape[0]:
        raise InputError(f"cu_seqlens_k: got {cu_seqlens_k.shape[0]} offsets, accepted: as many as cu_seqlens_q, {cu_seqlens_q.shape[0]}")
    sequences = cu_seqlens_q.shape[0] - 1
    return Arguments(q, k, v, None, None, *_check_per_head(q, alibi_slopes, sinks, heads, sequences), cu_seqlens_q, cu_seqlens_k,
                     _check_dropout(q, dropout_p, dropout_seed), longest_q, longest_k, *_check_geometry(causal, window),
                     *_check_numbers(scale, softcap), float(dropout_p), deterministic, _check_backend(backend))


def empty_like_q(q: Tensor, dim: int) -> Tensor:
    """Uninitialised output for `q` with last dimension `dim`; its memory order follows q's.

    Dense q: (B, H, S, D), heads inside the sequence (a transposed (B, S, H, D)) exactly when q's head stride is below its row stride.
    Packed q: contiguous (total, H, D). Fakes use this very function, so compiled graphs see the true strides.
    """
    if q.dim() == 4:
        b, h, s, _ = q.shape
        strides = (s * h * dim, dim, h * dim, 1) if q.stride(1) < q.stride(2) else (h * s * dim, s * dim, dim, 1)
        # by strides: 1.5 µs where `new_empty` and a transposition take 3.4, and on a GPU's host twice that
        return torch.empty_strided((b, h, s, dim), strides, dtype=q.dtype, device=q.device)
    s, h, _ = q.shape
    return torch.empty_strided((s, h, dim), (h * dim, dim, 1), dtype=q.dtype, device=q.device)


def empty_lse(q: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """An uninitialised number for each row of a dense `q`: contiguous (B, H, S)."""
    b, h, s, _ = q.shape
    return torch.empty_strided((b, h, s), (h * s, s, 1), dtype=dtype, device=q.device)


def describe(call: Arguments) -> AttentionProblem:
    """`call` without its tensors. Global switches are read here: torch's deterministic mode and its leave to round fp32 to tf32."""
    q, cu_seqlens = call.q, call.cu_seqlens_q
    layout = "packed" if cu_seqlens is not None else "bshd" if q.stride(1) < q.stride(2) else "bhsd"
    return _problem(
        q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1, q.shape[1], call.k.shape[1], call.max_seqlen_q, call.max_seqlen_k,
        q.shape[-1], call.v.shape[-1], q.dtype, q.device.type, layout, call.causal, call.window_left, call.window_right, call.scale,
        call.softcap, call.dropout_p, call.bias is not None, call.mask is not None, call.alibi_slopes is not None, call.sinks is not None,
        cu_seqlens is not None, call.deterministic or torch.are_deterministic_algorithms_enabled(),
        q.dtype == torch.float32 and q.is_cuda and torch.backends.cuda.matmul.fp32_precision == "tf32")


@lru_cache(maxsize=4096)
def _problem(batch: int, heads: int, kv_heads: int, seq_q: int, seq_k: int, head_dim: int, head_dim_v: int, dtype: torch.dtype, device: str,
             layout: str, causal: int, left: int, right: int, scale: float | None, softcap: float, *rest: Any) -> AttentionProblem:
    if causal == 1 and seq_q <= 1:  # the last query sees every key: nothing is hidden on its right
        causal, right = 0, -1
    if causal:
        right = -1  # said by `causal`
    longest = max(seq_q, seq_k)  # a window as wide is no window
    window = (None if left < 0 or left >= longest else left, None if right < 0 or right >= longest else right)
    return AttentionProblem(batch, heads, kv_heads, seq_q, seq_k, head_dim, head_dim_v, str(dtype).removeprefix("torch."), device, layout,
                            CAUSAL_NAMES[causal], window, scale, softcap or None, *rest)


def _shape(x: Tensor) -> str:
    return str(tuple(x.shape))


def _check_operands(q: Tensor, k: Tensor, v: Tensor, rank: int, names: str) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v, cast where autocast is on: attention belongs to the operators it runs in its lower precision."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: got {type(x).__name__}, accepted: a torch.Tensor")
        if x.dim() != rank:
            raise InputError(f"{name}: got {x.dim()} dimensions {_shape(x)}, accepted: {rank} {names}")
    device = q.device
    if torch._C._is_any_autocast_enabled() and device.type != "meta" and torch.is_autocast_enabled(device.type):
        lower = torch.get_autocast_dtype(device.type)
        q, k, v = (x if x.dtype == torch.float64 or not x.is_floating_point() else x.to(lower) for x in (q, k, v))
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise InputError(f"{name}: got {x.dtype}, accepted: the dtype of q, {q.dtype}")
        if x.device != device:
            raise InputError(f"{name}: got a tensor on {x.device}, accepted: the device of q, {device}")
    if q.dtype not in DTYPES:
        raise InputError(f"q: got {q.dtype}, accepted: {', '.join(map(str, DTYPES))}")
    return q, k, v


def _check_tensor(name: str, x: Tensor, q: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: got {type(x).__name__}, accepted: a torch.Tensor or None")
    if x.device != q.device:
        raise InputError(f"{name}: got a tensor on {x.device}, accepted: the device of q, {q.device}")


def _check_group(heads: int, kv_heads: int) -> None:
    if heads != kv_heads and (kv_heads == 0 or heads % kv_heads != 0):
        raise InputError(f"k: got {kv_heads} heads, accepted: a divisor of q's {heads} heads")


def _broadcast(name: str, x: Tensor, full: tuple[int, int, int, int]) -> Tensor:
    """`x` as a 4-D view, leading sizes of 1 added; every size must be 1 or the full one."""
    fits = x.dim() <= 4 and all(size == 1 or size == want for size, want in zip(reversed(x.shape), reversed(full), strict=False))
    if not fits:
        raise InputError(f"{name}: got shape {_shape(x)}, accepted: anything that broadcasts to {full} (batch, heads, queries, keys)")
    return x[(None,) * (4 - x.dim())] if x.dim() < 4 else x


def _check_per_head(q: Tensor, slopes: Tensor | None, sinks: Tensor | None, heads: int, batch: int) -> tuple[Tensor | None, Tensor | None]:
    if slopes is not None:
        _check_tensor("alibi_slopes", slopes, q)
        if slopes.dtype != torch.float32:
            raise InputError(f"alibi_slopes: got {slopes.dtype}, accepted: torch.float32")
        if not (slopes.shape == (heads,) or slopes.shape == (batch, heads)):
            raise InputError(f"alibi_slopes: got shape {_shape(slopes)}, accepted: ({heads},) or ({batch}, {heads})")
        if slopes.requires_grad and torch.is_grad_enabled():
            raise InputError("alibi_slopes: got a tensor that requires grad, accepted: constant slopes (learn them through bias)")
    if sinks is not None:
        _check_tensor("sinks", sinks, q)
        if not sinks.is_floating_point() or sinks.shape != (heads,):
            raise InputError(f"sinks: got {sinks.dtype} {_shape(sinks)}, accepted: a floating point ({heads},), one logit a head")
    # kernels step through heads one by one, and read what memory holds
    return (None if slopes is None else slopes.resolve_neg().contiguous(), None if sinks is None else sinks.resolve_neg().contiguous())


def _check_dropout(q: Tensor, p: float, seed: Any) -> Tensor | None:
    """The seed as one int64 on q's device; drawn from torch's generator when not given. None without dropout."""
    if not 0 <= p < 1:
        raise InputError(f"dropout_p: got {p}, accepted: 0 ≤ p < 1")
    if p == 0:
        return None
    if seed is None:
        return torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=q.device)
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64 or seed.numel() != 1 or seed.device != q.device:
            got = f"{seed.dtype} {_shape(seed)} on {seed.device}"
            raise InputError(f"dropout_seed: got {got}, accepted: an int, or one torch.int64 on {q.device}")
        return seed.reshape(1)
    seed = operator.index(seed)
    if not -(2**63) <= seed < 2**64:
        raise InputError(f"dropout_seed: got {seed}, accepted: 64 bits, −2⁶³ … 2⁶⁴ − 1")
    return torch.full((1,), seed - 2**64 if seed >= 2**63 else seed, dtype=torch.int64, device=q.device)


def _check_geometry(causal: bool | str, window: Any) -> tuple[int, int, int]:
    """(causal, left, right) as in `Spec`: causal caps the right width at 0."""
    mode = CAUSAL_NAMES.index(parse_causal(causal))
    if window is None:
        return mode, -1, 0 if mode else -1
    if not isinstance(window, tuple | list) or len(window) != 2:
        raise InputError(f"window: got {window!r}, accepted: (left, right), each an integer ≥ 0 or None (unbounded)")
    left, right = (_check_width(width, window) for width in window)
    return mode, left, 0 if mode else right


def _check_width(width: Any, window: Any) -> int:
    if width is None:
        return -1
    if isinstance(width, bool) or not hasattr(width, "__index__") or width < 0:
        raise InputError(f"window: got {window!r}, accepted: (left, right), each an integer ≥ 0 or None (unbounded)")
    return operator.index(width)


def _check_numbers(scale: Any, softcap: Any) -> tuple[float | None, float]:
    if scale is not None:
        scale = _number("scale", scale, "a finite number, or None for 1/√head_dim")
    if softcap is None:
        return scale, 0.0
    softcap = _number("softcap", softcap, "a finite number > 0, or None")
    if softcap <= 0:
        raise InputError(f"softcap: got {softcap}, accepted: a finite number > 0, or None")
    return scale, softcap


def _number(name: str, x: Any, accepted: str) -> float:
    """A finite Python float from any kind of scalar: Python's, numpy's, or a tensor of one element."""
    if isinstance(x, bool | str | bytes) or not hasattr(x, "__float__"):
        raise TypeError(f"{name}: got {type(x).__name__}, accepted: {accepted}")
    value = float(x)
    if not abs(value) < float("inf"):
        raise InputError(f"{name}: got {value}, accepted: {accepted}")
    return value


def _check_backend(backend: str) -> str:
    if backend not in BACKENDS:
        raise InputError(f"backend: got {backend!r}, accepted: {', '.join(BACKENDS)}")
    return backend


def _check_offsets(side: str, cu_seqlens: Tensor, longest: int | None, packed: Tensor) -> tuple[Tensor, int]:
    """Offsets as int32 on the tensor's device, and the longest length: given, read, or (in a traced graph) bounded by the token count."""
    name, total = f"cu_seqlens_{side}", packed.shape[0]
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(f"{name}: got {type(cu_seqlens).__name__}, accepted: a torch.Tensor")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] == 0 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise InputError(f"{name}: got {cu_seqlens.dtype} {_shape(cu_seqlens)}, accepted: int32 or int64 (sequences + 1,)")
    if cu_seqlens.device not in (packed.device, torch.device("cpu")):
        raise InputError(f"{name}: got a tensor on {cu_seqlens.device}, accepted: {packed.device} or cpu")
    if longest is not None and longest < 0:
        raise InputError(f"max_seqlen_{side}: got {longest}, accepted: an integer ≥ 0 or None")
    readable = type(cu_seqlens) is Tensor and not torch.compiler.is_compiling()
    if readable and cu_seqlens.device.type == "cpu":
        offsets = cu_seqlens.tolist()
        lengths = [b - a for a, b in pairwise(offsets)]
        if offsets[0] != 0 or offsets[-1] > total or min(lengths, default=0) < 0:
            raise InputError(f"{name}: got {_short(offsets)}, accepted: offsets that start at 0, never fall, and end at most at {total}")
        actual = max(lengths, default=0)
        if longest is not None and longest < actual:
            raise InputError(f"max_seqlen_{side}: got {longest}, accepted: at least the longest sequence, {actual}")
        longest = actual if longest is None else longest
    elif longest is None:
        longest = int((cu_seqlens[1:] - cu_seqlens[:-1]).max()) if readable and cu_seqlens.shape[0] > 1 else total
    return cu_seqlens.to(packed.device, torch.int32).contiguous(), longest


def _short(values: list[int]) -> str:
    return str(values) if len(values) <= 8 else f"[{', '.join(map(str, values[:4]))}, …, {', '.join(map(str, values[-3:]))}]"
