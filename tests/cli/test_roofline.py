"""``onchip roofline``: the published figures through the command line, and what it says to bad input."""
import json

import pytest
import typer
from typer.testing import CliRunner

from onchip.cli import roofline
from onchip.errors import InputError

app = typer.Typer()
roofline.register(app)


def run(*args: str):
    return CliRunner().invoke(app, list(args), catch_exceptions=False)


def report(*args: str) -> dict:
    return json.loads(run(*args, "--json").stdout)


def test_the_32k_case():
    r = report("--gpu", "a100-80gb", "--seq", "32768", "--head-dim", "128")
    assert {k: round(v, 3) for k, v in r["naive_to_fused"].items()} == {"8N^2+8Nd": 2.400, "12N^2+8Nd": 3.596}
    assert {k: round(v, 3) for k, v in r["naive_to_fused_limit"].items()} == {"8N^2+8Nd": 2.391, "12N^2+8Nd": 3.586}
    assert r["naive_textbook_bytes"] == 8623489024
    rungs = {x["rung"]: x for x in r["rungs"]}
    assert list(rungs) == ["naive_scaled", "naive", "tiled", "online", "fa1", "fa2"]
    assert rungs["naive"]["textbook_bytes"] == rungs["naive"]["dram_bytes"] == 8623489024
    assert round(rungs["fa2"]["issued_bytes"] / 1e6) == 4312
    assert rungs["fa2"]["binding"] == "tensor cores"
    assert rungs["naive"]["predicted_s"] / rungs["fa2"]["predicted_s"] == pytest.approx(2.400, abs=5e-4)


@pytest.mark.parametrize(("gpu", "limit"), [("a100-80gb", 2.391), ("h200", 3.221), ("h100", 4.614)])
def test_limits(gpu, limit):
    # 4.6139: facts are stated to three decimals, rounded up
    assert report("--gpu", gpu)["naive_to_fused_limit"]["8N^2+8Nd"] == pytest.approx(limit, abs=1.1e-3)


def test_every_kernel_names_its_roofs_and_sums_to_its_rung():
    for rung in report("--seq", "2048", "--heads", "8", "--causal")["rungs"]:
        assert rung["predicted_s"] == pytest.approx(sum(k["predicted_s"] for k in rung["kernels"]))
        assert rung["issued_bytes"] == sum(k["issued_bytes"] for k in rung["kernels"])
        for kernel in rung["kernels"]:
            assert kernel["predicted_s"] == max(kernel["roofs_s"].values())


def test_decode_gets_split_kv_and_packs_the_group():
    r = report("--seq", "1", "--seq-k", "65536", "--heads", "32", "--kv-heads", "8", "--tile", "16x128")
    last = r["rungs"][-1]
    assert last["rung"] == "split_kv"
    assert last["issued_bytes"] == pytest.approx(2 * 8 * 65536 * 128 * 2, rel=0.01)
    assert last["predicted_s"] < r["rungs"][-2]["predicted_s"] / 4


def test_a_card_by_numbers():
    numbers = "sms=108,clock_ghz=1.41,dram_gbps=2039,l2_mib=40,bf16_tflops=312"
    by_name, by_numbers = (report("--gpu", gpu, "--seq", "32768") for gpu in ("a100-80gb", numbers))
    assert by_numbers["naive_to_fused"] == by_name["naive_to_fused"]


def test_tables_say_what_they_show():
    out = run("--seq", "4096", "--heads", "16", "--kernels").stdout
    for word in ("issued", "DRAM", "FA1, K/V outer", "Kernels and their roofs", "S = QKᵀ", "Compulsory", "3.321x", "3.221x"):
        assert word in out
    assert "recomputing (FA2)" in run("--seq", "512", "--backward").stdout


def test_plot_is_written_whole(tmp_path):
    target = tmp_path / "roof.svg"
    run("--seq", "512", "--plot", str(target))
    assert target.read_text().rstrip().endswith("</svg>")
    assert [p.name for p in tmp_path.iterdir()] == ["roof.svg"]


@pytest.mark.parametrize(("args", "words"), [
    (("--seq", "0"), ("--seq", "0")), (("--head-dim", "-4"), ("--head-dim", "-4")), (("--gpu", "h999"), ("h999", "h200")),
    (("--tile", "64"), ("--tile", "'64'", "ROWSxKEYS")), (("--tile", "0x64"), ("tile br", "0")), (("--window", "a,b"), ("--window", "a,b")),
    (("--heads", "6", "--kv-heads", "4"), ("kv_heads", "4", "6")), (("--dtype", "int4"), ("int4", "bfloat16")),
    (("--gpu", "a100", "--dtype", "e4m3"), ("e4m3", "bfloat16")), (("--plot", "x.pdf"), ("--plot", "x.pdf", ".png")),
    (("--plot", "/nowhere/x.png"), ("/nowhere", "does not exist"))])
def test_bad_input_is_one_clear_message(args, words):
    with pytest.raises(InputError) as error:
        run(*args)
    message = str(error.value)
    assert "\n" not in message
    for word in words:
        assert word in message
