"""Nothing in the documentation drifts: every command and every Python block in README, CONTRIBUTING and docs/ is run."""
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from importlib.metadata import metadata
from pathlib import Path

import pytest

from tests import fresh

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "examples" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXTRAS = set(metadata("onchip").get_all("Provides-Extra") or ())


def blocks(*languages: str):
    for page in PAGES:
        for number, match in enumerate(re.finditer(r"^```(\w+)\n(.*?)^```", page.read_text(), re.M | re.S)):
            if match[1] in languages:
                yield pytest.param(match[2], id=f"{page.relative_to(ROOT)}:{number}")


def commands():
    for param in blocks("sh", "bash", "console"):
        for line in re.sub(r"\\\n\s*", " ", param.values[0]).splitlines():
            line = line.split("  #")[0].strip().removeprefix("$ ")
            if line and not line.startswith("#"):
                yield pytest.param(line, id=f"{param.id}: {line}"[:110])


def program(source: str, words: list[str], folder: Path) -> tuple[object, str, str]:
    """Status, output and errors of `python -m source …` in `folder`: without Triton's interpreter, as a reader runs it."""
    os.chdir(folder)
    sys.argv = [source, *words]
    status: object = 0
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        try:
            runpy.run_module(source, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            status = end.code or 0
    return status, out.getvalue(), err.getvalue()


@pytest.mark.parametrize("line", list(dict.fromkeys(p.values[0] for p in commands())))
def test_command(line, tmp_path):
    words = shlex.split(line)
    name = Path(words[0]).name
    if name == "onchip":
        (tmp_path / "examples").symlink_to(ROOT / "examples")
        status, out, err = fresh.call(program, "onchip", words[1:], tmp_path)
        assert status == 0, err
        assert out.strip()
    elif name == "make":
        done = subprocess.run(["make", "--dry-run", "-C", ROOT, *words[1:]], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    elif words[:2] == ["pip", "install"]:
        package = re.fullmatch(r"onchip(?:\[([\w,]+)\])?", words[2])
        assert package, line
        assert set((package[1] or "").split(",")) - {""} <= EXTRAS
    elif name == "python" and words[1:3] == ["-m", "pytest"]:
        assert all((ROOT / word).exists() for word in words[3:] if not word.startswith("-"))
    elif name == "python":
        assert (ROOT / words[1]).is_file(), line
    elif name == "pre-commit":
        assert (ROOT / ".pre-commit-config.yaml").is_file()
    else:
        pytest.fail(f"no way to check {line!r}")


@pytest.mark.parametrize("code", list(blocks("python")))
def test_python_block(code, tmp_path):
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_generated_parts_are_current():
    done = subprocess.run([sys.executable, ROOT / "benchmarks" / "docs.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
