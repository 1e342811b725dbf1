"""Write the generated parts of the pages (between ``<!-- name -->`` and ``<!-- /name -->``): ``python benchmarks/docs.py [--check]``.

``--check`` writes nothing and exits with 1 where a page is not what the code and the results say.
"""
import json
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from onchip.attention.dispatch import CAPABILITIES, DTYPES
from onchip.attention.problem import FEATURES

ROOT = Path(__file__).parents[1]
LADDER = "ladder --seq 4096 --head-dim 128 --heads 16 --causal --no-measure"


def ladder() -> str:
    """The ladder at 4K, counted and predicted."""
    done = subprocess.run([sys.executable, "-m", "onchip", *LADDER.split(), "--json"], capture_output=True, text=True, check=True)
    rows = json.loads(done.stdout)["rungs"]
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


# page → its generated parts
PAGES = {"README.md": {"ladder": ladder}, "docs/capabilities.md": {"capabilities": capabilities}}


def render(page: str) -> str:
    """The page with every generated part made anew."""
    text = (ROOT / page).read_text()
    for name, make in PAGES[page].items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(\n<!-- /{name} -->)", re.S)
        if not pattern.search(text):
            raise SystemExit(f"{page} has no part {name!r}")
        part = make()
        text = pattern.sub(lambda match, part=part: match[1] + part + match[2], text)  # type: ignore[misc]
    return text


if __name__ == "__main__":
    stale = [page for page in PAGES if render(page) != (ROOT / page).read_text()]
    if "--check" in sys.argv:
        sys.exit(f"not what benchmarks/docs.py makes: {', '.join(stale)}" if stale else 0)
    for page in stale:
        (ROOT / page).write_text(render(page))
