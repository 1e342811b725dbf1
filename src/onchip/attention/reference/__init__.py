"""The executable meaning of the contract: plain torch, any device, every feature, O(N) extra memory, its own recomputing backward.

A block of query rows meets all the keys it sees at once, so a row's softmax is one softmax, with no running maximum to rescale by.
Forward, for every block:

    s = softcap(scale · q kᵀ) + bias − slope · |i + offset − j|;   s ← −∞ where hidden
    m = max(s, sink);   p = exp(s − m);   l = Σ p + exp(sink − m);   o = (p ∘ keep/(1 − dropout)) v / l;   lse = m + log l

Backward recomputes p = exp(s − lse) and, with D = rowsum(do ∘ o) − dlse,

    dv = (p ∘ keep/(1 − dropout))ᵀ do;   dbias = p ∘ ((do vᵀ) ∘ keep/(1 − dropout) − D);   ds = dbias ∘ softcap′
    dq = scale · ds k;   dk = scale · dsᵀ q;   dsink = −Σ exp(sink − lse) D

16-bit inputs are computed in fp32, fp64 in fp64 (its lse too). Hidden pairs are selected away, never multiplied away: whatever a key,
value or query holds, NaN included, touches no row or key beyond those that see it, element by element and in both passes.

Source: FlashAttention-2 (arXiv 2307.08691), §3.1, with one block of keys.
"""
from onchip.attention.reference.passes import backward, forward

__all__ = ["backward", "forward"]
