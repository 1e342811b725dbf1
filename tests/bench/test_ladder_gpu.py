"""benchmarks/ladder_gpu.py without a GPU: what it has timed outlives a profiler's reader that crashes."""
import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from onchip.bench.machine import Ceilings
from onchip.ladder.counted import Job
from onchip.roofline.softmax import Rows
from tests.bench.test_counters import CRASH, fake_ncu

ROOT = Path(__file__).parents[2]


def test_times_are_kept_where_the_reader_crashes(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location("ladder_gpu", ROOT / "benchmarks" / "ladder_gpu.py")
    assert spec is not None
    assert spec.loader is not None
    ladder_gpu = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(ladder_gpu)
    ncu = fake_ncu(tmp_path, "open(sys.argv[sys.argv.index('--export') + 1], 'w')", CRASH)
    rows = Rows(64, 4096, "bfloat16")
    timed = {"measured": [{"key": "chip", "seconds": 1e-6}], "counted": []}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(ladder_gpu, "measure_ceilings", lambda *args: Ceilings("NVIDIA H200", "bfloat16", 4e12, 7e14))
    monkeypatch.setattr(ladder_gpu, "card", lambda ceilings: SimpleNamespace(title="H200"))
    monkeypatch.setattr(ladder_gpu, "run", lambda *args: {"softmax": [(timed, Job(rows, rows.dtype, ("chip",)))]})
    monkeypatch.setattr(sys, "argv", ["ladder_gpu.py", "--ncu", str(ncu), "--json", str(tmp_path / "ladder.json")])
    assert ladder_gpu.main() == 1
    assert json.loads((tmp_path / "ladder.json").read_text())["softmax"] == [timed]
    said = capsys.readouterr().err
    assert said.startswith("softmax: ncu: the report was written, but Nsight's Python reader ")
    assert "died of SIGSEGV in load_report (ncu_report.py:" in said
    assert said.count("\n") == 1
