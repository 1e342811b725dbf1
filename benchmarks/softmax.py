"""Softmax and its family against torch and quack: correctness first, then time at the memory roof.

    python benchmarks/softmax.py --json benchmarks/results/h200/softmax.json
    python benchmarks/softmax.py --only widths few --dtypes bf16

Every call starts with its data out of L2 (buffers rotate, and a tensor exceeds it), implementations alternate call by call, in an order
drawn anew each time (what ran before leaves lines in L2 that are still to be written), and the median counts. Bytes are the compulsory
ones: forward one read and one write of the tensor, backward two and one, a selection or a sum one read; the copy that sets the roof, one
and one. A sleep in front of each call lets the host run ahead, so that what is timed is the card's work; the small shapes are timed by the
wall clock instead, the card's work and the host's together; beside it, a graph of calls has no host.
"""
import argparse
import importlib.metadata
import json
import sys
from pathlib import Path

import torch

from onchip.cli.common import whole_file
from softmax_cells import across, causal, selection, small, sums, widths

WIDTHS = [2**k for k in range(8, 19)]
ODD = [1000, 4095, 33000, 50257, 151936]
FEW = [(1, 2**20), (4, 2**18)]
ACROSS = [128, 1024, 4096, 8192, 16_384]
CAUSAL = [(64, 1024, 1024), (16, 4096, 4096), (4, 8192, 8192), (64, 256, 16384)]
TOPK = [(25_000, 5), (25_000, 8), (50_257, 8), (131_072, 5), (131_072, 8), (131_072, 16), (131_072, 64)]
SMALL = [(8, 128), (64, 128), (512, 128), (4096, 128), (8, 1024), (64, 4096)]
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def version(package):
    """The installed version, None when absent."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def beside(row):
    """What a line of the table adds for a small call."""
    return f", {row['card_us']:.1f} on the card" if "card_us" in row else ""


def measurements(dtype, options):
    """(section, what is measured, function without arguments) of one dtype, in order."""
    elements, repeats = options.elements, options.repeats
    yield from (("widths", f"{n}", lambda n=n: widths(n, dtype, elements, repeats)) for n in options.widths or WIDTHS)
    yield from (("odd", f"{n}", lambda n=n: widths(n, dtype, elements, repeats)) for n in ODD)
    yield from (("few", f"{r} × {n}", lambda r=r, n=n: widths(n, dtype, r * n, repeats)) for r, n in FEW)
    yield from (("across", f"{n}", lambda n=n: across(n, dtype, elements, repeats)) for n in ACROSS)
    yield from (("topk", f"{n}, k {k}", lambda n=n, k=k: selection(n, k, dtype, elements, repeats)) for n, k in TOPK)
    yield from (("causal", f"{shape}", lambda shape=shape: causal(shape, dtype, repeats)) for shape in CAUSAL)
    yield from (("sums", f"{n}", lambda n=n: sums(n, dtype, elements, repeats)) for n in (1024, 8192, 131_072))
    yield from (("small", f"{shape}", lambda shape=shape: small(shape, dtype, repeats)) for shape in SMALL)


def main():
    """Measure, print a table and write the JSON."""
    sections = ("widths", "odd", "few", "across", "topk", "causal", "sums", "small")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--only", nargs="+", choices=sections, default=sections, help="sections to run (default: all)")
    parser.add_argument("--widths", type=int, nargs="+", help="other widths than 2^8 … 2^18")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--elements", type=int, default=2**27, help="elements of a tensor (default 2^27)")
    parser.add_argument("--repeats", type=int, default=100)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/softmax.py needs a CUDA device")
    versions = {name: version(name) for name in ("torch", "triton", "quack-kernels")}
    found = {"device": torch.cuda.get_device_name(), "versions": versions, "repeats": options.repeats,
             "results": [], "others": []}  # rows by length, which the report draws, and everything else
    for dtype in options.dtypes:
        for section, what, measure in measurements(DTYPES[dtype], options):
            if section not in options.only:
                continue
            rows = [{"section": section, "dtype": str(DTYPES[dtype])[6:], **row} for row in measure()]
            found["results" if section in ("widths", "odd") else "others"] += rows
            for kind in dict.fromkeys(row["pass"] for row in rows):
                figures = "  ".join(f"{r['name']} {r['tb_per_s']:.2f} ({r['us']:.1f} µs{beside(r)})" for r in rows if r["pass"] == kind)
                print(f"{dtype} {section} {what:<16} {kind:<9} TB/s: {figures}", flush=True)
            torch.cuda.empty_cache()
        if options.json:
            with whole_file(options.json) as file:
                file.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
