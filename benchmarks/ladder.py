"""What climbing costs on this machine: ``python benchmarks/ladder.py [-o FILE]``.

Three promises: `make ladder`'s run takes under 20 s on two cores, FlashAttention-2 with 64×64 tiles at N = 4096, d = 128 is executed and
counted in under 5 s, and the memory of the tiled rungs does not grow with N². The figures go to FILE as JSON; the exit status says whether
they hold.
"""
import argparse
import json
import os
import platform
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np

from onchip import __version__
from onchip.bench.machine import cpu_name
from onchip.cli.common import whole_file
from onchip.ladder.rungs import FORWARD, Choices
from onchip.roofline.attention import Tile
from onchip.roofline.shape import AttentionShape
from onchip.simulate.formats import Precision
from onchip.simulate.problem import Problem

ROOT = Path(__file__).parents[1]
TILE = Tile(64, 64)
TILED = [rung for rung in FORWARD if not rung.key.startswith("naive")]


def make_ladder() -> float:
    """Seconds of the command `make ladder` runs, after installation."""
    command = [sys.executable, "-m", "onchip", "ladder", "--inputs", "examples/data/minilm_qkv.npz"]
    start = time.perf_counter()
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def fa2_seconds() -> float:
    """Seconds to execute and count FlashAttention-2 on one head of 4096 × 4096."""
    problem = Problem.random(AttentionShape.square(4096, 128), Precision("bfloat16"))
    fa2 = next(rung for rung in FORWARD if rung.key == "fa2")
    start = time.perf_counter()
    result = fa2.execute(problem, TILE, Choices())
    assert result.executed == 1
    return time.perf_counter() - start


def peak_bytes(seq: int) -> dict[str, int]:
    """Peak allocation of each tiled rung at N = `seq`, d = 32; four query tiles executed."""
    problem = Problem.random(AttentionShape.square(seq, 32), Precision("bfloat16"))
    peaks = {}
    for rung in TILED:
        tracemalloc.start()
        rung.execute(problem, TILE, Choices(), sample=4)
        peaks[rung.key] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peaks


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, metavar="FILE")
    output = parser.parse_args().output
    small, large = peak_bytes(2048), peak_bytes(8192)
    growth = {key: large[key] / small[key] for key in small}
    report = {
        "machine": f"{cpu_name()}, {os.cpu_count()} cores", "onchip": __version__, "python": platform.python_version(),
        "numpy": np.__version__, "make_ladder_s": make_ladder(), "fa2_64x64_n4096_d128_s": fa2_seconds(),
        "peak_growth_2048_to_8192": growth,
    }
    print(json.dumps(report, indent=2))
    if output:
        with whole_file(output) as temporary:
            temporary.write_text(json.dumps(report, indent=2) + "\n")
    # four times the length: linear memory grows at most fourfold (a fifth to spare for what is constant), quadratic sixteenfold
    held = report["make_ladder_s"] < 20 and report["fa2_64x64_n4096_d128_s"] < 5 and max(growth.values()) < 5
    sys.exit(0 if held else "a promise is broken")
