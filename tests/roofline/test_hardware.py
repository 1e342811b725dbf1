"""The GPU table against its own arithmetic, and every way of naming a card."""
import pickle
import subprocess
import sys
from dataclasses import asdict, replace

import pytest

from onchip.errors import InputError
from onchip.roofline.hardware import ARCHITECTURES, GPUS, KIB, MIB, custom_gpu, find_gpu, parse_gpu


@pytest.mark.parametrize(("name", "knee"), [("a100-80gb", 153.0), ("a100-40gb", 200.6), ("h100", 295.3), ("h200", 206.1)])
def test_knees(name: str, knee: float) -> None:
    assert round(GPUS[name].knee("bf16"), 1) == knee


@pytest.mark.parametrize(
    ("name", "sms", "tflops", "gbps", "smem_sm", "smem_block", "l2"),
    [("a100-80gb", 108, 312, 2039, 164, 163, 40), ("a100-40gb", 108, 312, 1555, 164, 163, 40),
     ("h100", 132, 989.4, 3350, 228, 227, 50), ("h200", 132, 989.4, 4800, 228, 227, 60)],
)
def test_the_cards_of_the_tables(name: str, sms: int, tflops: float, gbps: float, smem_sm: int, smem_block: int, l2: int) -> None:
    gpu = GPUS[name]
    assert (gpu.sms, gpu.matmul_rate("bfloat16"), gpu.dram_rate) == (sms, tflops * 1e12, gbps * 1e9)
    assert (gpu.smem_per_sm, gpu.smem_per_block, gpu.l2_bytes) == (smem_sm * KIB, smem_block * KIB, l2 * MIB)
    assert (gpu.smem_reserved, gpu.smem_static_limit, gpu.registers_per_sm, gpu.max_registers_per_thread) == (1024, 49152, 65536, 255)


def test_peaks_follow_from_sms_and_clock() -> None:
    """Where every card of a capability runs its tensor cores at one rate, the vendor's peak is SMs × rate × clock."""
    held_back = {"h20", "h100-pcie"}  # tensor peaks stated at a lower clock than the boost clock
    checked = set()
    for gpu in GPUS.values():
        if gpu.tensor_flops_per_clock_sm and gpu.name not in held_back:
            assert gpu.sms * gpu.tensor_flops_per_clock_sm * gpu.clock_ghz / 1e3 == pytest.approx(gpu.matmul_tflops["float16"], rel=3e-3)
            checked.add(gpu.capability)
    assert checked == {(7, 0), (7, 5), (8, 0), (9, 0), (10, 0)}


def test_fp32_peaks_follow_from_lanes() -> None:
    """An FMA a lane and clock; the vector peak of Hopper's SXM boards is stated at 1.98 GHz, B200's clock derived from its tensor peak."""
    other_clock = {"h100", "h200", "gh200", "b200"}
    for gpu in GPUS.values():
        if "float32" in gpu.matmul_tflops and gpu.name not in other_clock:
            assert 2 * gpu.vector_rate / 1e12 == pytest.approx(gpu.matmul_tflops["float32"], rel=0.01), gpu.name


def test_rates_of_an_a100() -> None:
    gpu = GPUS["a100-80gb"]
    assert gpu.smem_rate / 1e12 == pytest.approx(19.5, abs=0.05)  # 9.6 times its DRAM
    assert gpu.smem_rate / gpu.dram_rate == pytest.approx(9.6, abs=0.05)
    assert gpu.exp_rate == pytest.approx(108 * 16 * 1.41e9)
    assert gpu.l2_rate == pytest.approx(7.219e12, rel=1e-3)


@pytest.mark.parametrize(("name", "head_dim", "share"), [("a100-80gb", 128, 0.25), ("h100", 128, 0.5), ("h200", 128, 0.5), ("h200", 64, 1)])
def test_exp_clocks_against_matmul_clocks(name: str, head_dim: int, share: float) -> None:
    """A score costs one exponential and 4d matmul FLOPs."""
    gpu = GPUS[name]
    assert (1 / gpu.exp_rate) / (4 * head_dim / gpu.matmul_rate("bf16")) == pytest.approx(share, rel=1e-3)


def test_every_card_is_consistent() -> None:
    assert len(GPUS) >= 17
    for name, gpu in GPUS.items():
        assert gpu.name == name
        assert gpu.source
        assert gpu.smem_per_block + gpu.smem_reserved <= gpu.smem_per_sm
        assert gpu.max_threads_per_sm % gpu.warp == 0
        assert gpu.matmul_rate("fp16") > gpu.matmul_tflops.get("float32", 0) * 1e12
        assert set(gpu.assumed) <= set(vars(gpu))


def test_unknown_figures_are_none() -> None:
    assert GPUS["rtx-4090"].l2_rate is None
    assert GPUS["mi300x"].capability is None
    assert "l2_bytes_per_clock" in GPUS["h200"].assumed


def test_a_format_the_card_lacks() -> None:
    with pytest.raises(InputError, match=r"dtype: got bf16, accepted on V100.*float16, float32, float64$"):
        GPUS["v100"].matmul_rate("bf16")


@pytest.mark.parametrize(
    ("given", "name"),
    [("a100", "a100-80gb"), ("A100-80GB", "a100-80gb"), ("NVIDIA A100-SXM4-80GB", "a100-80gb"), ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
     ("NVIDIA A100 80GB PCIe", "a100-80gb-pcie"), ("NVIDIA H200", "h200"), ("h 200", "h200"), ("NVIDIA H100 80GB HBM3", "h100"),
     ("NVIDIA H100 PCIe", "h100-pcie"), ("NVIDIA GH200 480GB", "gh200"), ("NVIDIA GeForce RTX 4090", "rtx-4090"), ("rtx_5090", "rtx-5090"),
     ("Tesla V100-SXM2-32GB", "v100"), ("Tesla T4", "t4"), ("NVIDIA L40S", "l40s"), ("AMD Instinct MI300X", "mi300x"),
     ("NVIDIA B200", "b200")],
)
def test_names(given: str, name: str) -> None:
    assert find_gpu(given) is GPUS[name]


def test_unknown_name_lists_the_known() -> None:
    with pytest.raises(InputError, match=r"gpu: got 'h300', accepted: v100, t4.*mi300x"):
        find_gpu("h300")


def test_ceilings_replace_only_what_was_measured() -> None:
    gpu = GPUS["h200"].with_ceilings(dram_gbps=4250, matmul_tflops={"bf16": 691}, l2_gbps=5500)
    assert (gpu.dram_rate, gpu.matmul_rate("bf16"), gpu.matmul_rate("fp16")) == (4.25e12, 691e12, 989.4e12)
    assert gpu.l2_rate == pytest.approx(5.5e12)
    assert gpu.measured == ("dram_gbps", "l2_gbps", "bfloat16_tflops")
    assert gpu.exp_rate == GPUS["h200"].exp_rate
    assert GPUS["h200"].measured == ()


def test_a_measured_clock_moves_the_on_chip_roofs() -> None:
    gpu = GPUS["h200"].with_ceilings(clock_ghz=1.5, l2_gbps=6000)
    assert gpu.exp_rate == pytest.approx(132 * 16 * 1.5e9)
    assert gpu.l2_rate == pytest.approx(6e12)


def test_custom_card() -> None:
    gpu = custom_gpu(sms=132, dram_gbps=4800, matmul_tflops={"bf16": 989.4}, l2_mib=60, l2_gbps=5500)
    assert gpu.knee("bf16") == pytest.approx(GPUS["h200"].knee("bf16"))
    assert gpu.clock_ghz == pytest.approx(1.83, abs=1e-3)  # from the peak
    assert (gpu.smem_per_block, gpu.l2_bytes) == (227 * KIB, 60 * MIB)
    assert gpu.l2_rate == pytest.approx(5.5e12)
    assert custom_gpu(sms=10, dram_gbps=100, matmul_tflops={"fp32": 5}, capability=(8, 6), clock_ghz=1.2).smem_per_sm == 100 * KIB


@pytest.mark.parametrize(
    ("text", "message"),
    [("h300", "gpu: got 'h300'"), ("sms=132,dram_gbps=4800", "matmul_tflops: got none"), ("dram_gbps=4800,bf16_tflops=9", "sms=…"),
     ("sms=132,bf16_tflops=9", "dram_gbps=…"), ("sms=1.5,dram_gbps=1,bf16_tflops=9", "sms: got 1.5"), ("h200,sms=5", "got 'sms=5'"),
     ("h200,dram_gbps=fast", "dram_gbps: got 'fast'"), ("h200,dram_gbps=-1", "dram_gbps: got '-1'"), ("h200,dram_gbps=nan", "'nan'"),
     ("h200,", "got ''"), ("sms=1,dram_gbps=1,bf16_tflops=9,capability=9", "capability: got '9'"),
     ("sms=1,dram_gbps=1,bf16_tflops=9,capability=3.5", "capability: got 3.5"),
     ("sms=1,dram_gbps=1,bf16_tflops=9,capability=8.9", "clock_ghz: got nothing"), ("h200,int3_tflops=5", "got 'int3_tflops=5'")],
)
def test_bad_text_is_one_clear_line(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_gpu(text)
    assert message in str(caught.value)
    assert "accepted" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_parse_all_three_forms() -> None:
    assert parse_gpu("NVIDIA H200") is GPUS["h200"]
    assert parse_gpu("sms=132, dram_gbps=4800, bf16_tflops=989.4").knee("bf16") == pytest.approx(206.1, abs=0.05)
    assert parse_gpu("sms=108,dram_gbps=1555,fp16_tflops=312,capability=8.0").clock_ghz == pytest.approx(1.41, abs=0.001)
    measured = parse_gpu("h200,dram_gbps=4250,bf16_tflops=691")
    assert (measured.dram_gbps, measured.matmul_tflops["bfloat16"]) == (4250, 691)


def test_a_card_is_a_plain_value() -> None:
    gpu = GPUS["h200"]
    assert hash(gpu) == hash(replace(gpu))
    assert asdict(gpu)["matmul_tflops"]["bfloat16"] == 989.4
    assert pickle.loads(pickle.dumps(gpu)) == gpu


def test_architectures_are_shared() -> None:
    for gpu in GPUS.values():
        if gpu.capability is not None:
            assert gpu.smem_per_block == ARCHITECTURES[gpu.capability].smem_per_block


def test_needs_no_numpy_and_no_torch() -> None:
    code = "import sys, onchip.roofline.hardware; sys.exit(bool({'numpy', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
