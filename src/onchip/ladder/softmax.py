"""The softmax rungs on a GPU: eager's five kernels, three passes, two passes, and the library's own one read and one write.

`onchip.roofline.softmax` counts each. Further passes cost DRAM only where the rows of all blocks that run at once exceed the L2.
"""
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from onchip.ladder.kernels import softmax as kernels
from onchip.roofline import softmax as ledger
from onchip.roofline.hardware import GPU
from onchip.roofline.ledger import Pipeline
from onchip.roofline.roofs import Prediction, predict
from onchip.roofline.softmax import Rows
from onchip.roofline.tiles import resident
from onchip.softmax import softmax


@dataclass(frozen=True)
class SoftmaxRung:
    """One way to compute it, and its ledger."""

    key: str
    title: str
    ledger: Callable[[Rows], Pipeline]
    run: Callable[[Tensor], Tensor]
    warps: int = 32  # a block; what runs at once must stay in L2 for a second pass to find it there

    def blocks_per_sm(self, gpu: GPU) -> int:
        """Blocks that an SM of `gpu` runs at once: threads are what limits these kernels, of some 32 registers."""
        return resident(32 * self.warps, 32, 0, gpu).blocks

    def predict(self, rows: Rows, gpu: GPU) -> Prediction:
        """Its time on `gpu`."""
        return predict(self.ledger(rows), gpu, rows.dtype, self.blocks_per_sm(gpu))


def eager(x: Tensor) -> Tensor:
    """As it is written: maximum, difference, exponential, sum, quotient; five kernels, every step through memory."""
    s = x - x.amax(-1, keepdim=True)
    p = s.exp()
    return p / p.sum(-1, keepdim=True)


SOFTMAX_RUNGS = (
    SoftmaxRung("eager", "eager, five kernels", ledger.eager, eager),
    SoftmaxRung("torch", "torch.softmax", ledger.safe, lambda x: torch.softmax(x, -1)),
    SoftmaxRung("safe", "three passes", ledger.safe, kernels.safe, kernels.LAUNCH.warps),
    SoftmaxRung("online", "online, two passes", lambda rows: ledger.online(rows, kernels.BLOCK), kernels.online, kernels.LAUNCH.warps),
    SoftmaxRung("chip", "row on chip", ledger.resident, softmax),
)
