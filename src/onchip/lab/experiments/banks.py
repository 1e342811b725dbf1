"""Bank conflicts: a [64][64] tile of fp16 in five layouts, read down its columns and by ldmatrix; `roofline.banks` put to the test."""
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
    "xor": Layout(ROWS, COLS, swizzle="xor"),
}
ACCESSES = {"column": 0, "ldmatrix": 1}
MISALIGNED = "CUDA_ERROR_MISALIGNED_ADDRESS"


def variant(layout: Layout, access: str) -> Source:
    """The kernel's source for a layout and an access."""
    return source("tile", PITCH=layout.pitch // 2, SWIZZLE=int(layout.swizzle == "xor"), READ=ACCESSES[access])


def requests(layout: Layout, access: str) -> list[Request]:
    """Every warp-wide request that reads the whole tile once."""
    if access == "column":
        return [request([layout.address(half + lane, col) for lane in range(32)], 2) for col in range(COLS) for half in (0, 32)]
    return [request([layout.address(row + lane % 16, col + lane // 16 * 8) for lane in range(32)], 16)
            for row in range(0, ROWS, 16) for col in range(0, COLS, 16)]


def _predict(gpu: GPU, sizes: Sizes) -> tuple[Prediction, ...]:
    found = []
    for name, layout in LAYOUTS.items():
        for access in ACCESSES:
            made = requests(layout, access)
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
    for name, layout in LAYOUTS.items():
        for access in ACCESSES:
            key, out, clocks = f"{access}.{name}", np.zeros(THREADS, np.float32), np.zeros((THREADS // 32, 2), np.int64)
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
        tuple(variant(layout, access) for layout in LAYOUTS.values() for access in ACCESSES), _predict, _measure,
        pitfall="unpadded shared-memory tile"),
)
