"""Write the generated parts of README.md (between ``<!-- name -->`` and ``<!-- /name -->``): ``python benchmarks/readme.py [--check]``.

``--check`` writes nothing and exits with 1 where the page is not what the code and the results say.
"""
import json
import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"
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


PARTS = {"ladder": ladder}


def render(text: str) -> str:
    """`text` with every generated part made anew."""
    for name, make in PARTS.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(\n<!-- /{name} -->)", re.S)
        if not pattern.search(text):
            raise SystemExit(f"README.md has no part {name!r}")
        text = pattern.sub(lambda match, make=make: match[1] + make() + match[2], text)  # type: ignore[misc]
    return text


if __name__ == "__main__":
    before = README.read_text()
    after = render(before)
    if "--check" in sys.argv:
        sys.exit("README.md is not what benchmarks/readme.py makes" if before != after else 0)
    README.write_text(after)
