"""The functions people call: `attention` on dense tensors, `attention_varlen` on packed ones, and `explain`, which says what would run."""
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from onchip.attention import derivatives, ops
from onchip.attention.contract import check_dense, check_packed, describe
from onchip.attention.explain import Explanation, explain_problem
from onchip.errors import InputError
from onchip.roofline.hardware import GPU, parse_gpu

Window = Sequence[int | None] | None


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool | str = False, window: Window = None, scale: float | None = None,
              softcap: float | None = None, bias: Tensor | None = None, mask: Tensor | None = None, alibi_slopes: Tensor | None = None,
              sinks: Tensor | None = None, dropout_p: float = 0.0, dropout_seed: int | Tensor | None = None, return_lse: bool = False,
              deterministic: bool = False, backend: str = "auto") -> Any:
    """Exact attention, out = softmax(scores) v, in O(N) memory.

        scores = softcap(scale · q kᵀ) + bias − slope · |i + offset − j|        softcap(x) = c · tanh(x / c)
        scores ← −∞ where hidden;    lse = log Σⱼ exp(scores);    p = exp(scores − lse);    out = (p ∘ keep / (1 − dropout_p)) v

    What query i (row) sees of the keys j (columns), with seq_q × seq_k as written:

        causal=True, 2×5        causal="top-left", 2×5     causal=True, 5×2     causal=True, window=(1, None), 4×4
          1 1 1 1 0               1 0 0 0 0                  0 0                  1 0 0 0
          1 1 1 1 1               1 1 0 0 0                  0 0                  1 1 0 0
                                                             0 0                  0 1 1 0
                                                             1 0                  0 0 1 1
                                                             1 1

    Args:
        q: (batch, heads, seq_q, dim). Any strides; a transposed (batch, seq, heads, dim) costs no copy, and `out` follows its memory order.
        k: (batch, kv heads, seq_k, dim); kv heads divide heads, head h reads kv head h // (heads / kv heads).
        v: (batch, kv heads, seq_k, dim_v). q, k and v share a dtype: bf16, fp16, fp32 (IEEE arithmetic, or tf32 where torch's switch for
            CUDA matmuls allows it) or fp64 (on the reference and torch-cpu backends). Under autocast they are cast to its dtype.
        causal: True or ``"bottom-right"`` lets query i see keys ≤ i + seq_k − seq_q; ``"top-left"`` keys ≤ i.
        window: (left, right): keys beside the query's own position, inclusive; None is unbounded. Without `causal`, or with True, the
            position of query i is i + seq_k − seq_q; with ``"top-left"`` it is i.
        scale: any finite number; None is 1/√dim.
        softcap: c > 0; None is none.
        bias: floating point, broadcasts to (batch, heads, seq_q, seq_k); gets a gradient in its own dtype. May hold −∞.
        mask: boolean, broadcasts like bias; True where the query sees the key. It acts together with causal and window.
        alibi_slopes: fp32 (heads,) or (batch, heads), constants; `offset` above is seq_k − seq_q, or 0 with ``"top-left"``.
        sinks: floating point (heads,): a learned logit a head, of a key with value 0 that every query sees; part of lse.
        dropout_p: probability of dropping an attention weight, 0 ≤ p < 1. lse does not depend on it.
        dropout_seed: an int of 64 bits or one int64 on q's device; None draws it from torch's generator. One seed is one mask, in both
            passes and on every backend (Philox-4x32-10 at counter (j, i, batch · heads + head, 0)).
        return_lse: return (out, lse).
        deterministic: gradients repeat bit for bit, as they also do under `torch.use_deterministic_algorithms`.
        backend: ``"auto"``, or one of those `explain` lists; a named backend runs or raises with its reason.

    Returns:
        out (batch, heads, seq_q, dim_v) in q's dtype; with `return_lse` also lse (batch, heads, seq_q), natural logarithm, fp32 (fp64 for
        fp64). Both are differentiable. A row that sees no key: out 0, lse −∞ (with sinks, the sink), every gradient 0. What a hidden key or
        value holds never matters, be it NaN; NaN in a key that is seen reaches the rows that see it.

    Raises:
        InputError: a value, shape, dtype or device that does not fit; the message names the argument, what came and what is accepted.
        TypeError: an argument of the wrong type.

    Gradients recompute the scores from lse. A second derivative, and forward mode, run dense in O(N²) memory.

    Source: FlashAttention-2 (arXiv 2307.08691); ALiBi (arXiv 2108.12409); Philox (Salmon et al., SC 2011).
    """
    key = None
    if bias is None and mask is None and alibi_slopes is None and sinks is None and type(dropout_p) is float and not dropout_p:
        key = ops.plain(q, k, v, causal, window, scale, softcap, deterministic, backend)
        route = None if key is None else ops.known(key)
        if route is not None:
            out, lse = derivatives.attention_again(route, q, k, v)
            return (out, lse) if return_lse else out
    call = check_dense(
        q, k, v, causal=causal, window=window, scale=scale, softcap=softcap, bias=bias, mask=mask, alibi_slopes=alibi_slopes, sinks=sinks,
        dropout_p=dropout_p, dropout_seed=dropout_seed, deterministic=deterministic, backend=backend)
    out, lse = derivatives.attention(call)
    if key is not None:
        ops.learn(key, call)
    return (out, lse) if return_lse else out


def attention_varlen(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *, max_seqlen_q: int | None = None,
                     max_seqlen_k: int | None = None, causal: bool | str = False, window: Window = None, scale: float | None = None,
                     softcap: float | None = None, alibi_slopes: Tensor | None = None, sinks: Tensor | None = None,
                     dropout_p: float = 0.0, dropout_seed: int | Tensor | None = None, return_lse: bool = False,
                     deterministic: bool = False, backend: str = "auto") -> Any:
    """`attention` of each sequence of a packed batch with itself alone; lengths may differ, and be 0.

    Args:
        q: (total_q, heads, dim).
        k: (total_k, kv heads, dim) and v: (total_k, kv heads, dim_v).
        cu_seqlens_q: int32 or int64 (sequences + 1,), offsets 0 ≤ … ≤ total_q: sequence n owns rows cu[n] … cu[n + 1] − 1. Tokens after
            the last offset belong to no sequence: out 0, lse −∞, gradients 0. On the host the offsets are verified; on a GPU they are
            trusted, and wrong ones give wrong rows but touch no memory outside the tensors.
        cu_seqlens_k: the same for keys, with as many sequences.
        max_seqlen_q: at least the longest query sequence (rows beyond it would not be computed); None reads it from the offsets, which
            waits for the GPU or, in a compiled graph, takes total_q.
        max_seqlen_k: the same for keys.
        causal, window, scale, softcap, sinks, dropout_p, dropout_seed, return_lse, deterministic, backend: as in `attention`; alignment,
            distances and dropout count inside each sequence.
        alibi_slopes: fp32 (heads,) or (sequences, heads).

    Returns:
        out (total_q, heads, dim_v) in q's dtype; with `return_lse` also lse (heads, total_q).

    Raises:
        InputError: a value, shape, dtype or device that does not fit. TypeError: an argument of the wrong type.
    """
    out, lse = derivatives.attention(check_packed(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, causal=causal, window=window,
        scale=scale, softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks, dropout_p=dropout_p, dropout_seed=dropout_seed,
        deterministic=deterministic, backend=backend))
    return (out, lse) if return_lse else out


def explain(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None, *,
            gpu: GPU | str | None = None, backend: str = "auto", **arguments: Any) -> Explanation:
    """What `attention` (or, with offsets, `attention_varlen`) would do with these arguments; nothing is computed.

    Args:
        q, k, v, cu_seqlens_q, cu_seqlens_k, backend, arguments: those of the call. Meta tensors stand for tensors on a GPU.
        gpu: the card to predict for, a name or a `GPU`; None is the card the tensors are on, if the roofline room knows it.

    Returns:
        An `Explanation`: the backend, why each other one does not run, and the time the roofs allow; `print` it.

    Raises:
        InputError and TypeError: as the call would, except that a named backend that cannot run is explained, not raised.
    """
    arguments.pop("return_lse", None)
    defaults = {"causal": False, "window": None, "scale": None, "softcap": None, "alibi_slopes": None, "sinks": None, "dropout_p": 0.0,
                "dropout_seed": 0, "deterministic": False}
    if cu_seqlens_q is None or cu_seqlens_k is None:
        call = check_dense(q, k, v, **{**defaults, "bias": None, "mask": None, **arguments}, backend=backend)
    else:
        lengths = {"max_seqlen_q": None, "max_seqlen_k": None}
        call = check_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, **{**defaults, **lengths, **arguments}, backend=backend)
    card = parse_gpu(gpu) if isinstance(gpu, str) else gpu
    if card is None and q.is_cuda:
        try:
            card = parse_gpu(torch.cuda.get_device_name(q.device))
        except InputError:
            card = None
    problem = describe(call)
    return explain_problem(replace(problem, device="cuda") if q.is_meta else problem, backend, card)
