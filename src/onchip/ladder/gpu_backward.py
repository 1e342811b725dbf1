"""The backward's rungs on a GPU: autograd of eager torch, the naive backward in kernels of its own, and the library's recomputing one.

Each keeps what its forward leaves it (P, or O and lse), which is made before the clock starts. The prediction is the ledger's with the
tiles that really run, as in `onchip.ladder.gpu`.
"""
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from onchip.attention.dispatch import implementation, why_not
from onchip.attention.problem import AttentionProblem
from onchip.ladder.gpu import cublas_tile, eager, triton_tile
from onchip.ladder.kernels import backward as kernels
from onchip.ladder.kernels import unfused
from onchip.roofline.attention import Formats, Tile
from onchip.roofline.backward import apart_backward, naive_backward
from onchip.roofline.dtypes import BYTES
from onchip.roofline.hardware import GPU
from onchip.roofline.ledger import Pipeline
from onchip.roofline.roofs import Prediction, predict, tile_on

Gradients = tuple[Tensor, Tensor, Tensor]
BACKENDS = {"apart_backward": "triton"}  # rung → backend of the library whose kernels it is


@dataclass(frozen=True)
class BackwardRung:
    """One way to the gradients: ``prepare(q, k, v, dout, causal)`` runs the forward and returns the call that makes (dq, dk, dv)."""

    key: str
    title: str
    schedule: str  # key of the rung in `onchip.ladder.rungs` that counts it
    ledger: Callable[[AttentionProblem, GPU], Pipeline]
    prepare: Callable[[Tensor, Tensor, Tensor, Tensor, bool], Callable[[], Gradients]]
    squares: int  # arrays of Sq · Sk alive at once, P included

    def refusal(self, problem: AttentionProblem) -> str | None:
        """Why it cannot run `problem` on this machine; None when it can."""
        if self.key == "naive_backward" and problem.seq_k > unfused.ROW:
            return f"a row of {problem.seq_k} scores is more than the {unfused.ROW} that a program holds"
        return why_not(BACKENDS[self.key], problem) if self.key in BACKENDS else None

    def pipeline(self, problem: AttentionProblem, gpu: GPU) -> Pipeline:
        """Its ledger for `problem`, with the tiles it runs on `gpu`."""
        return self.ledger(problem, gpu)

    def predict(self, problem: AttentionProblem, gpu: GPU) -> Prediction:
        """Its time on `gpu`."""
        return predict(self.ledger(problem, gpu), gpu, problem.dtype)

    def needed_bytes(self, problem: AttentionProblem) -> int:
        """Device memory it needs beyond q, k, v and dout: its arrays of scores, O and the gradients."""
        rows, keys = problem.batch * problem.heads * problem.seq_q, problem.batch * problem.kv_heads * problem.seq_k
        width = problem.head_dim + problem.head_dim_v
        return (rows * (self.squares * problem.seq_k + width) + keys * width) * BYTES[problem.dtype]


def _formats(problem: AttentionProblem) -> Formats:
    return Formats(problem.dtype, problem.dtype)


def _eager_ledger(problem: AttentionProblem, gpu: GPU) -> Pipeline:
    rows, keys = cublas_tile(problem, gpu)
    return naive_backward(problem.shape, tile_on(gpu, rows, keys), _formats(problem), key_rows=rows, scale_kernel=True,
                          mask_kernel=problem.shape.masked, product_kernel=True)


def _naive_ledger(problem: AttentionProblem, gpu: GPU) -> Pipeline:
    return naive_backward(problem.shape, tile_on(gpu, unfused.SCORES.br, unfused.STRIP), _formats(problem), key_rows=kernels.KEYS.bc)


def _recomputing_ledger(problem: AttentionProblem, gpu: GPU) -> Pipeline:
    keys, queries = recomputing_tiles(problem, gpu)
    # rows of a product are keys in the one kernel, queries in the other
    of_keys = Tile(*keys, tile_on(gpu, keys[1], keys[0]).mma_rows)
    return apart_backward(problem.shape, of_keys, _formats(problem), query_tile=tile_on(gpu, *queries))


def recomputing_tiles(problem: AttentionProblem, gpu: GPU) -> tuple[tuple[int, int], tuple[int, int]]:
    """(rows, keys) of the tiles with which the Triton backward makes dK and dV, and dQ, on `gpu`; dense and plain, as the rungs are."""
    keys, queries = triton_tile("keys", problem, gpu, rows=True), triton_tile("queries", problem, gpu)
    return (keys.bm, keys.bn), (queries.bm, queries.bn)


def autograd(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, causal: bool) -> Callable[[], Gradients]:
    """torch's own: the graph of the eager snippet, walked back."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = eager(q, k, v, causal)
    return lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)  # type: ignore[return-value]


def naive(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, causal: bool) -> Callable[[], Gradients]:
    """P stored by the naive forward's kernels."""
    p = unfused.probabilities(q, k, v, causal)
    return lambda: kernels.naive_backward(p, q, k, v, dout)


def recomputing(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, causal: bool) -> Callable[[], Gradients]:
    """The library's Triton backward, called as its operator calls it."""
    problem = AttentionProblem(q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3], v.shape[3],
                               causal="bottom-right" if causal else None)
    nothing, spec, memo = (None,) * 7, problem.spec, dict[str, object]()
    forward, backward = (implementation("triton", direction) for direction in ("forward", "backward"))
    out, lse = forward(q, k, v, *nothing, spec)
    return lambda: backward(dout, None, q, k, v, out, lse, *nothing, spec, (True, True, True, False, False), memo)[:3]


BACKWARD_RUNGS = (
    BackwardRung("eager_backward", "autograd, torch eager", "naive_scaled_backward", _eager_ledger, autograd, 3),
    BackwardRung("naive_backward", "naive backward", "naive_backward", _naive_ledger, naive, 2),
    BackwardRung("apart_backward", "recomputing, dQ apart", "apart_backward", _recomputing_ledger, recomputing, 0),
)


def true_gradients(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, causal: bool, rows: int = 2048) -> Gradients:
    """The gradients in float64 on q's own device, head by head and `rows` queries at a time."""
    group, scale, offset = q.shape[1] // k.shape[1], q.shape[-1] ** -0.5, k.shape[2] - q.shape[2]
    dq, dk, dv = (torch.zeros_like(x, dtype=torch.float64) for x in (q, k, v))
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            key, value = k[b, h // group].double(), v[b, h // group].double()
            for i in range(0, q.shape[2], rows):
                query, do = q[b, h, i:i + rows].double(), dout[b, h, i:i + rows].double()
                s = scale * query @ key.mT
                if causal:
                    s = s.masked_fill_(torch.ones(s.shape, dtype=torch.bool, device=s.device).triu_(1 + offset + i), -torch.inf)
                p = torch.softmax(s, -1).nan_to_num_(0.0)  # a row that sees nothing is 0
                dp = do @ value.mT
                ds = p * (dp - (p * dp).sum(-1, keepdim=True))
                dq[b, h, i:i + rows] = scale * ds @ key
                dk[b, h // group] += scale * ds.mT @ query
                dv[b, h // group] += p.mT @ do
    return dq, dk, dv
