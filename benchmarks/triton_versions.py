"""Compile every configuration of the Hopper kernels under each Triton the library supports; no GPU is needed.

``python benchmarks/triton_versions.py [VERSION …] [-o FILE]``. Each version is installed by pip into a folder of its own (`--folder`, kept)
and put before the installed one; torch stays the installed one. The exit status says whether everything compiled.
"""
import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from onchip.cli.common import whole_file

VERSIONS = ("3.6.0", "3.7.1", "3.8.0", "3.9.0")
KEPT = ("dtype", "features", "registers", "spill_stores", "spill_loads", "local_accesses_in_loops", "wgmma", "waits", "shared_bytes",
        "planned_bytes", "ptxas_notes", "compile_s")


def install(version: str, folder: Path) -> Path | None:
    """Where Triton `version` lies, fetched when it is not there yet; None: it is the one installed beside torch."""
    if version == metadata.version("triton"):
        return None
    place = folder / f"triton-{version}"
    if not place.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(dir=folder))
        try:
            pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", fresh, f"triton=={version}")
            subprocess.run(pip, check=True)
            fresh.rename(place)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    return place


def compile_all(place: Path | None) -> dict[str, Any]:
    """What the compiler made of each configuration under the Triton in `place`; `failed` has the last words of one that could not."""
    path = os.pathsep.join(filter(None, (place and str(place), os.environ.get("PYTHONPATH"))))
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"} | {"PYTHONPATH": path}
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "onchip.attention.hopper.offline"], env=environment, capture_output=True, text=True)
    made = []
    for line in map(json.loads, done.stdout.splitlines()):
        tile, waits = line["tile"], line["instructions"]["DEPBAR"]
        head = f"{tile['d0'] + tile['d1']}/{tile['v0'] + tile['v1']}"
        made.append({"triton": line["triton"], "head_dims": head} | {key: (line | {"waits": waits})[key] for key in KEPT})
    failed = None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no message"])[-1]
    return {"failed": failed, "seconds": round(time.perf_counter() - start, 1), "configurations": made}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", default=VERSIONS, metavar="VERSION", help=f"default: {' '.join(VERSIONS)}")
    parser.add_argument("--folder", type=Path, default=Path.home() / ".cache" / "onchip", help="where versions are installed")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="put what came out into this JSON; other versions there stay")
    options = parser.parse_args()
    failed = False
    for version in options.versions:
        found = compile_all(install(version, options.folder))
        ones = found["configurations"]
        assert all(one["triton"] == version for one in ones), f"asked for Triton {version}, got {ones[0]['triton']}"
        print(f"Triton {version}: {len(ones)} configurations in {found['seconds']:.0f} s, "
              f"{sum(one['spill_stores'] + one['spill_loads'] > 0 for one in ones)} spill"
              + (f"; FAILED: {found['failed']}" if found["failed"] else ""), flush=True)
        failed |= found["failed"] is not None
        if options.output:  # each version as it is there: all of them take an hour
            before = json.loads(options.output.read_text())["versions"] if options.output.exists() else {}
            versions = dict(sorted({**before, version: found}.items()))
            report = {"torch": torch.__version__, "python": platform.python_version(), "versions": versions}
            with whole_file(options.output) as temporary:
                temporary.write_text(json.dumps(report, indent=1) + "\n")
    sys.exit(failed)
