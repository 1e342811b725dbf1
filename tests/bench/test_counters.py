"""Reading Nsight Compute without it: a stand-in for its reader and for the program itself."""
import stat
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from onchip.bench import counters
from onchip.errors import InputError


class Action:
    """A launch as `ncu_report` shows it."""

    def __init__(self, name: str, within: str, unit: str = "ns", **values: float) -> None:
        self._unit = unit
        self._name, self._within, self._values = name, within, {counters.METRICS[key][-1]: value for key, value in values.items()}

    def name(self) -> str:
        return self._name

    def metric_names(self) -> tuple[str, ...]:
        return tuple(self._values)

    def metric_by_name(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(as_double=lambda: self._values[name], unit=lambda: self._unit)

    def nvtx_state(self) -> SimpleNamespace | None:
        if not self._within:
            return None
        names = [["outer", self._within], ["a library's own"]]
        return SimpleNamespace(domains=lambda: [0, 1], domain_by_id=lambda d: SimpleNamespace(push_pop_ranges=lambda: names[d]))


def reader(*groups: list[Action]) -> SimpleNamespace:
    ranges = [SimpleNamespace(num_actions=lambda g=g: len(g), action_by_idx=lambda i, g=g: g[i]) for g in groups]
    return SimpleNamespace(load_report=lambda path: SimpleNamespace(num_ranges=lambda: len(ranges), range_by_idx=lambda i: ranges[i]))


def test_every_launch_is_read_in_order_and_in_bytes_and_seconds() -> None:
    first = Action("scores_kernel", "naive", seconds=2500.0, dram_read=64.0, l2_read=10.0)
    launches = counters.read(Path("report"), reader([first], [Action("row_kernel", ""), Action("output_kernel", "naive", registers=128.0)]))
    within = ("outer", "naive", "a library's own")
    assert [(x.kernel, x.within) for x in launches] == [("scores_kernel", within), ("row_kernel", ()), ("output_kernel", within)]
    assert (launches[0].seconds, launches[0].dram_read, launches[0].l2_read) == (2.5e-6, 64.0, 320.0)
    assert launches[0].registers is None
    assert launches[2].registers == 128


def test_time_comes_in_the_unit_the_report_says_and_what_has_no_answer_is_none() -> None:
    actions = [Action("k", "", "usecond", seconds=3.0), Action("k", "", "second", seconds=2.0, dram_read=float("nan"))]
    first, second = counters.read(Path("report"), reader(actions))
    assert (first.seconds, second.seconds, second.dram_read) == (3e-6, 2.0, None)


def fake_ncu(folder: Path, body: str) -> Path:
    (folder / "extras" / "python").mkdir(parents=True)
    (folder / "extras" / "python" / "ncu_report.py").write_text("def load_report(path):\n    raise AssertionError(path)\n")
    program = folder / "ncu"
    program.write_text(f"#!{sys.executable}\nimport sys\n{body}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return program


def test_without_leave_to_count_the_message_says_what_gives_it(tmp_path: Path) -> None:
    ncu = fake_ncu(tmp_path, "print('==ERROR== ERR_NVGPUCTRPERM - The user does not have permission'); sys.exit(1)")
    with pytest.raises(InputError, match="NVreg_RestrictProfilingToAdminUsers=0"):
        counters.count(["true"], ncu)


def test_a_profiler_that_fails_is_quoted(tmp_path: Path) -> None:
    ncu = fake_ncu(tmp_path, "print('==PROF== Connected'); print('==ERROR== Failed to find metric'); sys.exit(1)")
    with pytest.raises(InputError, match="counted nothing: ==ERROR== Failed to find metric"):
        counters.count(["true"], ncu)


def test_the_profiler_gets_the_program_and_what_to_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what the program marks is counted; the list of all the card's counters is not asked for, which would take long."""
    asked = tmp_path / "asked"
    ncu = fake_ncu(tmp_path, f"open({str(asked)!r}, 'a').write('\\n'.join(sys.argv[1:]))\n"
                             "open(sys.argv[sys.argv.index('--export') + 1], 'w')")
    monkeypatch.setattr(counters, "read", lambda report, reader: ["read"])
    assert counters.count(["python", "-c", "pass"], ncu) == ["read"]
    words = asked.read_text().splitlines()
    assert words[-3:] == ["python", "-c", "pass"]
    assert words[words.index("--profile-from-start") + 1] == "off"
    assert words[words.index("--metrics") + 1].split(",") == [names[0] for names in counters.METRICS.values()]


def test_a_counter_that_the_card_calls_otherwise_is_asked_for_by_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = tmp_path / "asked"
    ncu = fake_ncu(tmp_path, "if '--query-metrics' in sys.argv:\n"
                             "    print('dram__bytes_read  Counter  byte\\nsm__pipe_tensor_op_hmma_cycles_active  Counter')\n"
                             "    sys.exit()\n"
                             f"names = sys.argv[sys.argv.index('--metrics') + 1]\nopen({str(asked)!r}, 'w').write(names)\n"
                             "if 'sm__pipe_tensor_cycles_active' in names:\n    print('==ERROR== Failed to find metric'); sys.exit(1)\n"
                             "open(sys.argv[sys.argv.index('--export') + 1], 'w')")
    monkeypatch.setattr(counters, "read", lambda report, reader: ["read"])
    assert counters.count(["true"], ncu) == ["read"]
    assert asked.read_text().split(",") == ["dram__bytes_read.sum", counters.METRICS["tensor_pipe"][1], "launch__registers_per_thread"]


def test_a_profiler_that_hangs_is_given_up(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="took more than 0 s"):
        counters.count(["true"], fake_ncu(tmp_path, "import time; time.sleep(60)"), seconds=0.3)


def test_a_missing_profiler_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(counters, "_installed", list)
    monkeypatch.setenv("PATH", str(tmp_path))
    if not Path("/usr/local/cuda/bin/ncu").exists():
        with pytest.raises(InputError, match="ncu: found none"):
            counters.find_ncu()
    with pytest.raises(InputError, match="ncu: got /nowhere/ncu"):
        counters.find_ncu("/nowhere/ncu")
    (tmp_path / "ncu").write_text("")
    (tmp_path / "ncu").chmod(0o755)
    assert counters.find_ncu() == tmp_path / "ncu"
    with pytest.raises(InputError, match="Python reader"):
        counters.find_reader(tmp_path / "ncu")
