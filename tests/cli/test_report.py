"""``onchip report`` through the command line: the file is whole or not there, bad input is one line and status 2."""
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from onchip.cli import report
from onchip.errors import InputError
from tests.report import made_up

app = typer.Typer()
report.register(app)


def test_writes_the_page_and_says_where(tmp_path):
    made_up.write(tmp_path, "ladder.json", made_up.ladder())
    odd = made_up.write(tmp_path, "odd.json", {})
    page = tmp_path / "page.html"
    result = CliRunner().invoke(app, [str(tmp_path), "-o", str(page)], catch_exceptions=False)
    assert result.exit_code == 0
    assert result.stdout == f"wrote {page}\n"
    assert str(odd) in result.stderr
    assert page.read_text().endswith("</html>\n")
    assert {file.name for file in tmp_path.iterdir()} == {"ladder.json", "odd.json", "page.html"}


def test_a_page_that_is_there_outlives_a_failure(tmp_path):
    page = tmp_path / "page.html"
    page.write_text("before")
    broken = made_up.ladder()
    broken["ladder"][0]["shape"]["seq_q"] = 0
    with pytest.raises(InputError):
        CliRunner().invoke(app, [str(made_up.write(tmp_path, "a.json", broken)), "-o", str(page)], catch_exceptions=False)
    assert page.read_text() == "before"


@pytest.mark.parametrize(("words", "says"), [
    (["nowhere.json"], "nowhere.json"),
    (["odd.json"], "of an unknown kind"),
    (["text.json"], "not readable JSON"),
    (["lab.json", "-o", "page.pdf"], "page.pdf, accepted: a name ending in .html"),
    (["lab.json", "-o", "nowhere/page.html"], "nowhere does not exist"),
])
def test_bad_input_is_one_line_and_status_2(tmp_path: Path, words, says):
    made_up.write(tmp_path, "odd.json", {"a": 1})
    made_up.write(tmp_path, "lab.json", made_up.lab())
    (tmp_path / "text.json").write_text("plain words")
    done = subprocess.run([sys.executable, "-m", "onchip", "report", *words], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == ""
    assert says in done.stderr
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.glob("*.html"))
