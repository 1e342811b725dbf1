"""Reading Nsight Compute without it: a stand-in for its reader and for the program itself."""
import stat
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from onchip.bench import counters
from onchip.errors import InputError

# `ncu_report` as far as it is used. Like the real one's, what its objects hand out is gone when they are.
READER = """
NAN = float("nan")


class Domain:
    def __init__(self, names): self.names = names
    def push_pop_ranges(self): return self.names
    def __del__(self): self.names.clear()


class State:
    def __init__(self, *domains): self.all = domains
    def domains(self): return tuple(range(len(self.all)))
    def domain_by_id(self, number): return Domain(list(self.all[number]))


class Metric:
    def __init__(self, value, unit): self.value, self.says = value, unit
    def has_value(self): return self.value is not None
    def unit(self): return self.says
    def as_double(self):
        assert self.value is not None, "the real one crashes"
        return self.value


class Action:
    def __init__(self, name, within, **metrics): self.called, self.within, self.metrics = name, within, metrics
    def name(self): return self.called
    def metric_names(self): return tuple(self.metrics)
    def metric_by_name(self, name): return Metric(*self.metrics[name])
    def nvtx_state(self): return self.within and State(["outer", self.within], ["a library's own"])


class Range:
    def __init__(self, actions): self.actions = actions
    def num_actions(self): return len(self.actions)
    def action_by_idx(self, index): return self.actions[index]


class Context:
    def __init__(self, *groups): self.groups = groups
    def num_ranges(self): return len(self.groups)
    def range_by_idx(self, index): return Range(self.groups[index])


def load_report(path):
    import sys
    assert "torch" not in sys.modules, "a process of its own"
    assert path.endswith("report"), path
    return Context(GROUPS)
"""
CRASH = "def load_report(path):\n    import os, signal\n    os.kill(os.getpid(), signal.SIGSEGV)\n"


def reader(folder: Path, groups: str) -> Path:
    """A file `ncu_report.py` whose reports have these launches."""
    file = folder / "ncu_report.py"
    file.write_text(READER.replace("GROUPS", groups))
    return file


def test_every_launch_is_read_in_order_and_in_bytes_and_seconds(tmp_path: Path) -> None:
    time, dram, l2 = (counters.METRICS[key][0] for key in ("seconds", "dram_read", "l2_read"))
    first = {time: (2500.0, "ns"), dram: (64.0, "byte"), l2: (10.0, "sector"), "another": (None, "")}
    last = {counters.METRICS["tensor_pipe"][1]: (50.0, "%"), "launch__registers_per_thread": (128.0, "register/thread")}
    groups = f"[Action('scores_kernel', 'naive', **{first})], [Action('row_kernel', None), Action('output_kernel', 'naive', **{last})]"
    launches = counters.read(Path("report"), reader(tmp_path, groups))
    within = ("outer", "naive", "a library's own")
    assert [(x.kernel, x.within) for x in launches] == [("scores_kernel", within), ("row_kernel", ()), ("output_kernel", within)]
    assert (launches[0].seconds, launches[0].dram_read, launches[0].l2_read) == (2.5e-6, 64.0, 320.0)
    assert launches[0].registers is None
    assert (launches[2].tensor_pipe, launches[2].registers) == (50, 128)


def test_time_comes_in_the_unit_the_report_says_and_what_has_no_answer_is_none(tmp_path: Path) -> None:
    time, dram, written = (counters.METRICS[key][0] for key in ("seconds", "dram_read", "dram_written"))
    actions = [f"Action('k', None, **{{{time!r}: ({value}, {unit!r}), {dram!r}: (NAN, 'byte'), {written!r}: (None, 'byte')}})"
               for value, unit in ((3.0, "usecond"), (2.0, "second"), (0.0, "ms"))]
    launches = counters.read(Path("report"), reader(tmp_path, f"[{', '.join(actions)}]"))
    assert [x.seconds for x in launches] == [3e-6, 2.0, 0.0]
    assert all(x.dram_read is x.dram_written is None for x in launches)


def test_launches_of_other_threads_belong_to_the_mark_before_them(tmp_path: Path) -> None:
    """Autograd's: they lie in no range of the thread that asked for the gradients."""
    within = [("mark", "backward"), (), ("a library's own",), ("mark", "softmax"), ("softmax",), ()]
    actions = [f"Action('k{n}', None)" for n in range(len(within))]
    launches = counters.read(Path("report"), reader(tmp_path, f"[{', '.join(actions)}]"))
    marked = [replace(launch, within=tuple(counters.MARK if name == "mark" else name for name in names))
              for launch, names in zip(launches, within, strict=True)]
    assert [(x.kernel, x.within) for x in counters.filed(marked)] == [
        ("k1", ("backward",)), ("k2", ("backward", "a library's own")), ("k4", ("softmax",)), ("k5", ("softmax",))]
    assert counters.filed(launches) == launches


def test_a_reader_that_crashes_is_an_error_that_says_where(tmp_path: Path) -> None:
    """As NVIDIA's did on an H200, taking the program with it that had just measured."""
    file = tmp_path / "ncu_report.py"
    file.write_text(CRASH)
    with pytest.raises(InputError) as error:
        counters.read(Path("report"), file)
    assert str(error.value).startswith(f"ncu: the report was written, but Nsight's Python reader {file} died of SIGSEGV in load_report "
                                       "(ncu_report.py:")
    assert "), called by launches (report_reader.py:" in str(error.value)


def test_a_reader_that_crashes_after_the_answer_has_answered(tmp_path: Path) -> None:
    file = reader(tmp_path, "[Action('k', None)]")
    file.write_text(file.read_text() + "\nimport atexit, os\natexit.register(os.abort)\n")
    assert [x.kernel for x in counters.read(Path("report"), file)] == ["k"]


def test_a_reader_that_raises_or_hangs_is_quoted_or_given_up(tmp_path: Path) -> None:
    file = reader(tmp_path, "1 / 0")
    with pytest.raises(InputError, match="failed: ZeroDivisionError: division by zero"):
        counters.read(Path("report"), file)
    file.write_text("import time; time.sleep(60)")
    with pytest.raises(InputError, match="reading the report took more than 1 s"):
        counters.read(Path("report"), file, 0.6)


def fake_ncu(folder: Path, body: str, reader: str = "def load_report(path):\n    raise AssertionError(path)\n") -> Path:
    (folder / "extras" / "python").mkdir(parents=True)
    (folder / "extras" / "python" / "ncu_report.py").write_text(reader)
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
    monkeypatch.setattr(counters, "read", lambda report, reader, seconds: ["read"])
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
    monkeypatch.setattr(counters, "read", lambda report, reader, seconds: ["read"])
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
