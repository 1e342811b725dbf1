"""Compiling for a card that is not here, and reading the result: against kernels whose code is known, and against text."""
import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")
from onchip.bench import inspect
from onchip.errors import InputError

# Run where Triton compiles: a process without its interpreter.
SCRIPT = '''
import json
import torch
import triton
import triton.language as tl
from onchip.bench import inspect
from onchip.errors import InputError


@triton.jit
def product(x, y, out, n, N: tl.constexpr, flags):
    i = tl.arange(0, N)
    at = i[:, None] * N + i[None, :]
    acc = tl.dot(tl.load(x + at), tl.load(y + at))
    tl.store(out + at, tl.exp2(acc) * flags[0] + n)


@triton.jit
def tall(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    s = tl.load(x + i)  # 64 values a thread, all of them held until the sum is there
    tl.store(out + i, s - tl.sum(s))


x = torch.empty(64, 64, dtype=torch.bfloat16, device="meta")
args = {"x": x, "y": x, "out": torch.empty(64, 64, device="meta"), "n": 1, "N": 64, "flags": (3, None)}
found = {}
for arch in (80, 90):
    found[f"sm_{arch}"] = inspect.compile_offline(product, args, arch, num_warps=4).figures()
with inspect.offline(90) as launched:
    for _ in range(2):
        assert product[(7,)](*args.values(), num_warps=8, num_stages=2) is None
    product[(7,)](*args.values(), num_warps=4)
found["launched"] = [(made.threads, dict(made.constants)) for made in launched]
wide = {"x": torch.empty(8192, device="meta"), "out": torch.empty(8192, device="meta"), "N": 8192}
found["tight"] = inspect.compile_offline(tall, wide, 90, num_warps=4, maxnreg=32).figures()
found["roomy"] = inspect.compile_offline(tall, wide, 90, num_warps=4).figures()
inspect._disassemble = lambda cubin: ""
found["ptx"] = inspect.compile_offline(product, args, 90, num_warps=4).figures()
try:
    inspect.compile_offline(product, args | {"N": 63}, 90)
except InputError as error:
    found["error"] = str(error)
print(json.dumps(found))
'''


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict:
    script = tmp_path_factory.mktemp("inspect") / "script.py"  # Triton reads a kernel's source from its file
    script.write_text(SCRIPT)
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1  # what the compiler says is read, not printed
    return json.loads(done.stdout)


def test_each_card_gets_its_own_matmul(found):
    """64 × 64 × 64 takes four wgmma of k = 16; on Ampere four warps share 64 × 64 / (16 × 8) tiles of four k-steps."""
    ampere, hopper = found["sm_80"], found["sm_90"]
    assert (hopper["wgmma"], hopper["mma"]) == (4, 0)
    assert (ampere["wgmma"], ampere["mma"]) == (0, 64 * 64 // (16 * 8) * 4 // 4)
    for made in (ampere, hopper):
        assert made["kernel"] == "product"
        assert made["threads"] == 128
        assert made["instructions"]["EX2"] == 64 * 64 // 128  # one an element
        assert made["shared_bytes"] == 2 * 64 * 64 * 2  # both operands
        assert 32 <= made["registers"] <= 255
        assert made["spill_stores"] == made["spill_loads"] == made["instructions"]["STL"] == 0
        assert made["compile_s"] > 0


def test_a_launch_compiles_once_and_says_what_for(found):
    (threads, first), (others, second) = found["launched"]
    assert (threads, others) == (256, 128)
    assert first == {"N": 64, "num_warps": 8, "num_stages": 2}
    assert second == {"N": 64, "num_warps": 4}


def test_spills_are_ptxas_s_own(found):
    tight, roomy = found["tight"], found["roomy"]
    assert tight["registers"] <= 32 < roomy["registers"]
    assert roomy["spill_stores"] == roomy["spill_loads"] == 0
    assert tight["spill_stores"] >= 4 * tight["instructions"]["STL"] > 0  # 4 bytes a store at least
    assert tight["spill_loads"] >= 4 * tight["instructions"]["LDL"] > 0
    assert tight["stack_bytes"] > 0


def test_without_a_disassembler_ptx_is_counted(found):
    ptx, sass = found["ptx"], found["sm_90"]
    assert (ptx["counted_in"], sass["counted_in"]) == ("PTX", "SASS")
    for name in ("HGMMA", "EX2", "HMMA", "LDL"):
        assert ptx["instructions"][name] == sass["instructions"][name], name
    assert ptx["registers"] == sass["registers"]


def test_what_does_not_compile_is_one_line(found):
    assert found["error"].startswith("arch: got sm_90, ")
    assert "power of 2" in found["error"]
    assert "\n" not in found["error"]


def test_the_interpreter_is_refused(monkeypatch):
    monkeypatch.setattr(inspect.knobs.runtime, "interpret", True)
    with pytest.raises(InputError, match="TRITON_INTERPRET"), inspect.offline(90):
        pytest.fail("it opened")


SASS = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8].tnspB, R24 ;
        /*0020*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0030*/                   MUFU.EX2 R3, R4 ;
        /*0040*/                   MUFU.RCP R3, R4 ;
        /*0050*/              @!P0 BRA 0x30 ;
        /*0060*/                   STL [R1+0x4], R5 ;
        /*0070*/                   LDGSTS.E.BYPASS.128 [R6], desc[UR4][R8.64] ;
        /*0080*/                   LDG.E.128 R8, desc[UR4][R2.64] ;
        /*0090*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*00a0*/               @P1 BRA 0x10 ;
        /*00b0*/                   BRA 0xb0;
"""


def test_instructions_of_a_disassembly():
    counts = inspect.count(SASS)
    assert {name: n for name, n in counts.items() if n} == {
        "HGMMA": 1, "DEPBAR": 1, "MUFU": 2, "EX2": 1, "LDGSTS": 1, "LDG": 1, "BAR": 1, "STL": 1}


def test_instructions_of_ptx():
    ptx = """
    wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%f1}, %rd1, %rd2, p, 1, 1, 0, 0;
    wgmma.wait_group.sync.aligned 0;
    ex2.approx.ftz.f32 %f1, %f2;
    fma.rn.f32 %f3, %f4, %f5, %f6;
    cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r2}], [%r3];
    cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%rd1, {%r2}], [%r1];
    mbarrier.try_wait.parity.shared::cta.b64 p, [%r1], %r2;
    barrier.sync 1, 128;
    bar.sync 0;
    ld.global.v4.b32 {%r1}, [%rd1];
    """
    assert {name: n for name, n in inspect.count(ptx, "PTX").items() if n} == {
        "HGMMA": 1, "DEPBAR": 1, "FFMA": 1, "EX2": 1, "MUFU": 1, "UTMALDG": 1, "UTMASTG": 1, "SYNCS": 1, "BAR": 2, "LDG": 1}


def test_innermost_loops():
    made = inspect.Compiled("k", {}, 128, 32, 0, 0, 0, 0, inspect.count(SASS), "SASS", (), 1.0, "", SASS)
    (loop,) = made.loops  # 0x30 … 0x50, inside 0x10 … 0xa0; a jump to itself ends the code and is none
    assert {name: n for name, n in loop.items() if n} == {"MUFU": 2, "EX2": 1}


def test_a_uniform_register_that_nothing_wrote_is_found():
    sass = """
        /*0000*/                   S2UR UR5, SR_CgaCtaId ;                                            /* 0x00 */
        /*0010*/                   ULDC.64 UR8, c[0x0][0x208] ;                                       /* 0x00 */
        /*0020*/              @P1  UIADD3 UR22, UP0, UR22, 0x40, URZ ;                                /* 0x00 */
        /*0030*/                   UMOV UR23, 0x40000040 ;                                            /* 0x00 */
        /*0040*/                   HGMMA.64x32x16.F32.BF16 R24, R100, gdesc[UR20].tnspB, R24 ;        /* 0x00 */
        /*0050*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR20], R24, gsb0 ;              /* 0x00 */
        /*0060*/                   LDG.E R2, desc[UR8][R2.64] ;                                       /* 0x00 */
        /*0070*/                   STS [R4+UR5+0x6000], R24 ;                                         /* 0x00 */
        /*0080*/                   IADD3 R71, P6, R71, UR6, RZ ;                                      /* 0x00 */
        /*0090*/                   R2UR UR6, R71 ;                                                    /* 0x00 */
"""
    assert inspect.unwritten(sass) == ["UR22 in UIADD3", "UR20 in HGMMA.64x64x16.F32.BF16", "UR21 in HGMMA.64x64x16.F32.BF16",
                                       "UR6 in IADD3"]
