"""The truth in float64, and the distance of a result from it.

    s = scale · q kᵀ, −∞ selected where a query does not see a key;  lse = ln Σ exp(s);  p = exp(s − lse);  out = p v
    ds = p ∘ (dp − rowsum(p ∘ dp)), dp = dout vᵀ;  dq = scale · ds k;  dk = scale · dsᵀ q;  dv = pᵀ dout

A query that sees no key: out 0, lse −∞, and it adds nothing to any gradient.
"""
from dataclasses import dataclass

import numpy as np

from onchip.roofline.shape import AttentionShape
from onchip.simulate.formats import Array, Mask, product

BLOCK = 128  # query rows at a time: memory stays proportional to the sequence


@dataclass(frozen=True)
class Truth:
    """Float64 results, (heads, rows, dim) with heads over all batches; NaN in rows that were not asked for."""

    out: Array
    lse: Array  # (heads, rows, 1)
    dq: Array | None = None
    dk: Array | None = None  # dk and dv: the sums over the rows asked for
    dv: Array | None = None


def reference(shape: AttentionShape, scale: float, q: Array, k: Array, v: Array, dout: Array | None = None,
              wanted: Mask | None = None) -> Truth:
    """Attention of q (n, Sq, d), k (m, Sk, d), v (m, Sk, dv), n and m counting heads over all batches; with `dout` the gradients too.

    `wanted` (n, Sq), boolean: the rows to compute; all by default.
    """
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    heads = len(q)
    wanted = np.ones((heads, shape.seq_q), bool) if wanted is None else wanted
    lo, hi = np.array([shape.key_range(row) for row in range(shape.seq_q)]).T[:, :, None]
    j = np.arange(shape.seq_k)
    out, lse = np.full((heads, shape.seq_q, shape.head_dim_v), np.nan), np.full((heads, shape.seq_q, 1), np.nan)
    if dout is not None:
        dout, dq, dk, dv = dout.astype(np.float64), np.full(q.shape, np.nan), np.zeros(k.shape), np.zeros(v.shape)
    for head in range(heads):
        kv = head // shape.group
        picked = np.flatnonzero(wanted[head])
        for rows in (picked[i:i + BLOCK] for i in range(0, len(picked), BLOCK)):
            s = np.where((lo[rows] <= j) & (j < hi[rows]), scale * product(q[head, rows], k[kv].T), -np.inf)
            m = s.max(axis=1, keepdims=True)
            p = np.exp(s - np.where(m == -np.inf, 0, m))
            l = p.sum(axis=1, keepdims=True)
            p /= np.where(l == 0, 1, l)
            lse[head, rows] = np.where(l == 0, -np.inf, m + np.log(np.where(l == 0, 1, l)))
            out[head, rows] = product(p, v[kv])
            if dout is not None:
                g = dout[head, rows]
                dp = product(g, v[kv].T)
                ds = p * (dp - (p * dp).sum(axis=1, keepdims=True))
                dq[head, rows] = scale * product(ds, k[kv])
                dk[kv] += scale * product(ds.T, q[head, rows])
                dv[kv] += product(p.T, g)
    return Truth(out, lse) if dout is None else Truth(out, lse, dq, dk, dv)


@dataclass(frozen=True)
class Error:
    """Distance of x from the truth t over the executed rows; 0 and 0 when equal."""

    max_abs: float  # max |x − t|
    relative: float  # max |x − t| / max |t|
    rms: float  # ‖x − t‖₂ / ‖t‖₂


def distance(x: Array, truth: Array) -> Error:
    """Error of `x` where `truth` is not NaN. Equal infinities (an empty row's lse) are no error; a NaN in `x` makes every figure NaN."""
    known = ~np.isnan(truth)
    x, t = x[known].astype(np.float64), truth[known]
    with np.errstate(invalid="ignore"):
        difference = np.where(x == t, 0, x - t)
    size = np.where(np.isinf(t), 0, np.abs(t))
    worst, largest = np.abs(difference).max(initial=0), size.max(initial=0)
    rms, norm = np.linalg.norm(difference), np.linalg.norm(size)
    with np.errstate(divide="ignore"):
        return Error(float(worst), float(worst / largest) if worst else 0.0, float(rms / norm) if rms else 0.0)
