"""Bank conflicts: a [64][64] tile of fp16 in six layouts, read down its columns and by ldmatrix; `roofline.banks` put to the test.

Where ldmatrix conflicts it is read in other orders of its matrices and with fewer of them: the rule knows no difference between orders.
"""
from dataclasses import dataclass

import numpy as np

from onchip.lab.bench import Bench
from onchip.lab.compiler import Source, source
from onchip.lab.experiment import Experiment, Prediction, Sizes, at_least, exactly
from onchip.roofline.banks import Layout, Request, request
from onchip.roofline.hardware import GPU

ROWS = COLS = 64
READS, THREADS = 16, 256  # kernels/tile.cu
LAYOUTS = {
    "64": Layout(ROWS, COLS), "65": Layout(ROWS, COLS, pad=1), "66": Layout(ROWS, COLS, pad=2), "72": Layout(ROWS, COLS, pad=8),
    "80": Layout(ROWS, COLS, pad=16), "xor": Layout(ROWS, COLS, swizzle="xor"),
}


@dataclass(frozen=True)
class Access:
    """A read of the whole tile: down its columns, a half a lane (`matrices` 0), or by ldmatrix.

    Matrices are numbered down the columns (0: rows 0–7, 1: rows 8–15, then the two beside them) or, `across`, along the rows.
    """

    matrices: int = 0
    across: bool = False
    trans: bool = False

    @property
    def defines(self) -> dict[str, int]:
        """The macros of kernels/tile.cu, but for those that are what it takes by itself: 4 matrices, down the columns, as they lie."""
        fewer = {"MATRICES": self.matrices} if self.matrices in (1, 2) else {}
        return {"READ": int(self.matrices > 0), **fewer, **({"ACROSS": 1} if self.across else {}), **({"TRANS": 1} if self.trans else {})}


ACCESSES = {
    "column": Access(), "ldmatrix": Access(4), "ldmatrix across": Access(4, across=True), "ldmatrix.trans": Access(4, trans=True),
    "ldmatrix.trans across": Access(4, across=True, trans=True), "ldmatrix.x2": Access(2), "ldmatrix.x1": Access(1),
}
# Every layout is read both ways, and those under which ldmatrix conflicts in other orders as well. Could two matrices share a phase, those
# beside each other would: on [64][64] they lie in different banks, 8-way each; on [64][80] 2-way, each in half of the banks.
ORDERS = {"64": list(ACCESSES), "80": ["column", "ldmatrix", "ldmatrix across", "ldmatrix.trans"]}
PAIRS = [(name, access) for name in LAYOUTS for access in ORDERS.get(name, ["column", "ldmatrix"])]
MISALIGNED = "CUDA_ERROR_MISALIGNED_ADDRESS"


def variant(layout: Layout, access: str) -> Source:
    """The kernel's source for a layout and an access."""
    return source("tile", PITCH=layout.pitch // 2, SWIZZLE=int(layout.swizzle == "xor"), **ACCESSES[access].defines)


def requests(layout: Layout, access: str) -> list[Request]:
    """Every warp-wide request that reads the whole tile once."""
    if access == "column":
        return [request([layout.address(half + lane, col) for lane in range(32)], 2) for col in range(COLS) for half in (0, 32)]
    how = ACCESSES[access]
    tall, wide = 8 if how.matrices == 1 else 16, 16 if how.matrices == 4 else 8
    corners = [divmod(matrix, 2) if how.across else divmod(matrix, 2)[::-1] for matrix in range(how.matrices)]
    lanes = [(8 * below + row, 8 * beside) for below, beside in corners for row in range(8)]
    return [request([layout.address(top + row, left + col) for row, col in lanes], 16)
            for top in range(0, ROWS, tall) for left in range(0, COLS, wide)]


def _predict(gpu: GPU, sizes: Sizes) -> tuple[Prediction, ...]:
    found = []
    for name, access in PAIRS:
        made = requests(LAYOUTS[name], access)
        key, worst = f"{access}.{name}", max(made, key=lambda one: one.degree or 0)
        where = f"[64][{name}] {access}" if name != "xor" else f"[64][64] swizzled, {access}"
        if any(one.misaligned for one in made):
            found.append(Prediction(f"{key}.misaligned", f"{where}: refused as misaligned", exactly(1), "yes/no", "banks.request"))
            continue
        wavefronts, ideal = (sum(getattr(one, what) for one in made) * READS for what in ("wavefronts", "ideal"))
        found += [
            Prediction(f"{key}.conflicts", f"{where}: {worst.verdict}; conflicts", exactly(wavefronts - ideal), "", "banks.request"),
            Prediction(f"{key}.clocks", f"{where}: no more than a wavefront a clock", at_least(round(0.97 * wavefronts)), "clocks",
                       "banks.request, less 3 % for the reads of the clock"),
        ]
    return tuple(found)


def _measure(bench: Bench) -> None:
    card = bench.card
    x = np.random.default_rng(0).integers(0, 8, (ROWS, COLS)).astype(np.float16)
    for name, access in PAIRS:
        layout, key = LAYOUTS[name], f"{access}.{name}"
        out, clocks = np.zeros(THREADS, np.float32), np.zeros((THREADS // 32, 2), np.int64)
        if any(one.misaligned for one in requests(layout, access)):
            if not bench.counting:
                error = card.fault(variant(layout, access), "tile", (1,), (THREADS,), x, out, clocks)
                bench.found[f"{key}.misaligned"] = float(error == MISALIGNED)
            continue
        kernel = card.kernel(variant(layout, access), "tile")
        given, sums, ticks = card.array(x), card.empty(out.shape, out.dtype), card.empty(clocks.shape, clocks.dtype)

        def call(kernel: object = kernel, given: object = given, sums: object = sums, ticks: object = ticks) -> None:
            card.launch(kernel, (1,), (THREADS,), given, sums, ticks)

        call()
        bench.equal(f"tile {key}", card.numpy(sums).sum(dtype=float), READS * x.sum(dtype=float), 0)
        bench.measure(key, call)
        spent = card.numpy(ticks)
        bench.found[f"{key}.clocks"] = float(spent[:, 1].max() - spent[:, 0].min())


EXPERIMENTS = (
    Experiment(
        "tiles", "Padding by 8 halves, or a XOR swizzle for no byte, frees ldmatrix of conflicts and leaves the scalar column 4-way; "
        "padding by 2 frees the column and breaks ldmatrix.",
        tuple(variant(LAYOUTS[name], access) for name, access in PAIRS), _predict, _measure,
        pitfall="unpadded shared-memory tile"),
)
