"""Write the generated parts of the pages (between ``<!-- name -->`` and ``<!-- /name -->``): ``python benchmarks/docs.py [--check]``.

``--check`` writes nothing and exits with 1 where a page is not what the code and the results say.
"""
import json
import re
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import tables
from onchip.attention.dispatch import CAPABILITIES, DTYPES
from onchip.attention.problem import FEATURES
from onchip.cli import lab_tables as lab
from onchip.cli.common import whole_file
from onchip.report.ladders import picture
from onchip.report.results import Climb, Results, add

ROOT = Path(__file__).parents[1]
LAB = ROOT / "benchmarks" / "results" / "h200" / "lab.json"
LADDER = "ladder --seq 4096 --head-dim 128 --heads 16 --causal --no-measure"


@cache
def climbed() -> dict[str, Any]:
    """What the ladder at 4K says of itself."""
    done = subprocess.run([sys.executable, "-m", "onchip", *LADDER.split(), "--json"], capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


def pictured() -> Climb:
    """The rungs of the README's picture: as they were measured at 4K, causal, or as they are predicted until they are."""
    results = Results()
    add(results, tables.LADDER, json.loads(tables.LADDER.read_text()) if tables.LADDER.is_file() else climbed())
    return next(c for c in results.ladders if c.shape.seq_q == 4096 and c.shape.causal)


def caption() -> str:
    """What the picture shows."""
    climb = pictured()
    measured = any(step.measured for step in climb.steps)
    shown = "predicted (hollow) and measured (filled)" if measured else "as the model predicts it"
    return f"*Where each rung stands under the roof, {shown}: {climb.name}. Roof: {climb.roof.source if climb.roof else 'not known'}.*"


def ladder() -> str:
    """The ladder at 4K, counted and predicted."""
    rows = climbed()["rungs"]
    first = rows[0]["predicted_s"]
    lines = ["| rung | issued GB | DRAM GB | FLOP/B issued | roof | predicted µs | speed-up | error |", "|---|---|---|---|---|---|---|---|"]
    for r in rows:
        cells = (r["title"], f"{r['counted_bytes'] / 1e9:.2f}", f"{r['dram_bytes'] / 1e9:.3f}", f"{r['flop_per_issued_byte']:.0f}",
                 r["binding"], f"{r['predicted_s'] * 1e6:.0f}", f"{first / r['predicted_s']:.2f}x", f"{r['error']['out']['rms']:.0e}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def capabilities() -> str:
    """What each backend of `onchip.attention` serves, from the dispatcher's own data."""
    names = list(CAPABILITIES)
    lines = [f"| | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]

    def row(title: str, cells: Iterable[str]) -> None:
        lines.append(f"| {title} | {' | '.join(cells)} |")

    able = CAPABILITIES.values()
    row("devices", ("any" if c.devices is None else ", ".join(d + " (when named)" * (d in c.only_named) for d in c.devices) for c in able))
    for dtype in DTYPES:
        row(dtype, ("yes" if dtype in c.dtypes else "no" for c in able))
    row("head dims", (f"{c.head_dims[0]} … {c.head_dims[1]}" if c.head_dims[1] < 1 << 30 else f"{c.head_dims[0]} …" for c in able))
    for feature, title in FEATURES.items():
        row(title, ("yes" if feature in c.features else "no" for c in able))
    return "\n".join(lines)


def triton_versions() -> str:
    """What each Triton makes of the Hopper kernels, from the results of `benchmarks/triton_versions.py`."""
    versions = json.loads((ROOT / "benchmarks" / "results" / "cpu" / "triton_versions.json").read_text())["versions"]
    lines = ["| Triton | compile | spill | most bytes stored + loaded | in a loop | serialised wgmma | bytes over plan | seconds each |",
             "|---|---|---|---|---|---|---|---|"]
    for version, found in versions.items():
        made = found["configurations"]
        spilling = [one for one in made if one["spill_stores"] + one["spill_loads"]]
        most = max(made, key=lambda one: one["spill_stores"] + one["spill_loads"])
        over = [one["shared_bytes"] - one["planned_bytes"] for one in made]
        cells = (f"{len(made)}" + (f", then {found['failed']}" if found["failed"] else ""), len(spilling),
                 f"{most['spill_stores']} + {most['spill_loads']}", sum(one["local_accesses_in_loops"] > 0 for one in made),
                 sum(any("wgmma" in note for note in one["ptxas_notes"]) for one in made), f"{min(over)} … {max(over)}",
                 f"{sorted(one['compile_s'] for one in made)[len(made) // 2]:.1f}")
        lines.append(f"| {version} | {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


# page → its generated parts
PAGES = {"README.md": {"picture": caption, "ladder": ladder, "forward": tables.forward, "triton": tables.triton, "softmax": tables.softmax,
                       "across": tables.across},
         "docs/ladder.md": {"ladder": ladder, "measured": tables.measured, "crossing": tables.crossing, "incident": tables.incident},
         "docs/questions.md": {"backward": tables.backward, "causal": tables.causal},
         "docs/capabilities.md": {"capabilities": capabilities},
         "docs/notes/triton-versions.md": {"versions": triton_versions},
         "docs/pitfalls.md": {"verdicts": lambda: lab.verdicts(lab.results(LAB)), "predictions": lambda: lab.predictions(lab.results(LAB))}}
PICTURE = "docs/roofline.svg"


def render(page: str) -> str:
    """The page with every generated part made anew, or the picture."""
    if page == PICTURE:
        return picture(pictured())
    text = (ROOT / page).read_text()
    for name, make in PAGES[page].items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(\n<!-- /{name} -->)", re.S)
        if not pattern.search(text):
            raise SystemExit(f"{page} has no part {name!r}")
        part = make()
        text = pattern.sub(lambda match, part=part: match[1] + part + match[2], text)  # type: ignore[misc]
    return text


if __name__ == "__main__":
    pages = {page: render(page) for page in (*PAGES, PICTURE)}
    stale = [page for page, text in pages.items() if text != (ROOT / page).read_text()]
    if "--check" in sys.argv:
        sys.exit(f"not what benchmarks/docs.py makes: {', '.join(stale)}" if stale else 0)
    for page in stale:
        with whole_file(ROOT / page) as file:
            file.write_text(pages[page])
