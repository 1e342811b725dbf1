"""Every kernel of the lab compiles for an A100 and for Hopper without a GPU, spills nothing and takes the shared memory planned."""
import re
import subprocess
import sys
import tempfile
from itertools import pairwise

import pytest

from onchip.errors import InputError, MissingExtra
from onchip.lab.compiler import Source, build, check_arch, read_report, source
from onchip.lab.experiments import attention, banks, pick, sources
from onchip.roofline.hardware import find_gpu
from onchip.roofline.tiles import footprint, occupancy, resident

pytest.importorskip("cuda.core")


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("one", sources(pick(None)), ids=str)
def test_kernels_compile_and_spill_nothing(one, arch):
    made = build(one, arch)
    assert made.kernels
    for kernel in made.kernels:
        assert kernel.registers > 0
        assert (kernel.spill_stores, kernel.spill_loads, kernel.stack) == (0, 0, 0), kernel


@pytest.mark.parametrize(("made", "config"), [
    (attention.PADDED, attention.config()), (attention.BUFFERED, attention.config(2)), (attention.PLAIN, attention.config(pad=0)),
])
def test_shared_memory_is_what_the_planner_says(made, config):
    assert build(made, "sm_90").resources("fa2").shared == footprint(config, "float16", 64).smem


@pytest.mark.parametrize(("arch", "card"), [("sm_80", "a100-80gb"), ("sm_90", "h200")])
@pytest.mark.parametrize("made", [attention.PLAIN, attention.PADDED, attention.SWIZZLED, attention.BUFFERED, attention.DIVIDING], ids=str)
def test_as_many_blocks_share_an_sm_as_the_predictions_say(made, arch, card):
    """The tile model alone says 4, from 104 registers a thread."""
    kernel, gpu = build(made, arch).resources("fa2"), find_gpu(card)
    blocks = resident(attention.THREADS, kernel.registers, kernel.shared, gpu).blocks
    assert blocks == attention.resident(gpu, dict(made.defines).get("STAGES", 1)) == 3
    assert occupancy(footprint(attention.config(), "float16", 64), gpu).blocks == 4


def sass(one: Source, arch: str = "sm_90") -> str:
    knobs = pytest.importorskip("triton.knobs")
    try:
        tool = knobs.nvidia.cuobjdump.path
    except RuntimeError:
        pytest.skip("this Triton brings no disassembler")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(build(one, arch).code.code)
        file.flush()
        return subprocess.run([tool, "--dump-sass", file.name], capture_output=True, text=True, check=True).stdout


def test_kernels_are_made_of_the_instructions_they_are_about():
    count = pytest.importorskip("onchip.bench.inspect").count
    fa2 = count(sass(attention.PADDED))
    # a step: 32 ldmatrix and 64 mma, besides 4 ldmatrix for Q; exponentials: 32 scores and 2 rescales, none of them twice
    assert (fa2["LDSM"], fa2["HMMA"], fa2["LDGSTS"]) == (36, 64, 0)
    assert fa2["EX2"] == 34
    assert count(sass(attention.BUFFERED))["LDGSTS"] >= 16  # K and V, 4 chunks a thread each, before the loop and in it
    assert count(sass(attention.TILED))["HMMA"] == 0
    assert "LDG.E.128" in sass(source("walk", WIDTH=4))
    assert "LDG.E.128" not in sass(source("walk", WIDTH=1))
    # scores cross memory 16 bytes a lane, P "for debugging" too: 4 stores a thread in the loop and 4 of O after it
    naive, writing = sass(attention.NAIVE), sass(source("attention_fa2", WRITE_P=1))
    assert (naive.count("LDG.E.128"), naive.count("STG.E.128"), len(re.findall(r"[LST]{2}G\.E ", naive))) == (12, 12, 0)
    assert (writing.count("STG.E.128"), len(re.findall(r"STG\.E ", writing))) == (8, 0)
    for chains in (1, 8):  # a loop of 80 shuffles, not straight code
        assert count(sass(source("shuffle", CHAINS=chains)))["SHFL"] == 80
    kinds = {"M88.4": {}, "M88.2": {"MATRICES": 2}, "M88": {"MATRICES": 1}, "MT88.4": {"TRANS": 1}}
    for kind, defines in kinds.items():
        assert set(re.findall(r"LDSM\.16\.(\S+)", sass(source("tile", PITCH=64, READ=1, SWIZZLE=0, **defines)))) == {kind}
    warp, quad = (count(sass(source("butterfly", OP=0, LANES=lanes)))["SHFL"] for lanes in (32, 4))
    assert (warp - 1) / (quad - 1) == 5 / 2  # five steps against two, besides the one that waits for x


@pytest.mark.parametrize("access", banks.ACCESSES)
def test_no_read_of_a_tile_is_merged_with_another(access):
    """Counts are worth as much as the requests behind them: each of READS turns of a loop holds all that a warp makes in one read."""
    tile, load = banks.LAYOUTS["64"], r"LDS\b" if access == "column" else r"LDSM\b"
    code = [(int(at, 16), what) for at, what in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", sass(banks.variant(tile, access)))]
    loops = [(int(back[1], 16), at) for at, what in code if (back := re.search(r"\bBRA 0x([0-9a-f]+)", what)) and int(back[1], 16) < at]
    turns = ([what for at, what in code if start <= at <= end] for start, end in loops)
    turn, = (turn for turn in turns if any(re.match(load, what) for what in turn))
    assert sum(bool(re.match(load, what)) for what in turn) == len(banks.requests(tile, access)) * 32 // banks.THREADS
    counter = re.search(rf"ISETP\.NE\S* P\d, PT, (R\d+), {banks.READS:#x},", "\n".join(turn))[1]
    assert any(re.match(rf"IADD3 {counter}, {counter}(\.reuse)?, 0x1,", what) for what in turn)


@pytest.mark.parametrize("one", [source("reduce", HOW=2), source("butterfly", OP=0, LANES=32), source("butterfly", OP=1, LANES=4)], ids=str)
def test_each_step_of_a_timed_chain_waits_for_the_one_before(one):
    chain = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?(SHFL|FADD|FFMA|FMUL|FMNMX)\b", sass(one))
    assert chain.count("SHFL") > 30
    assert ("SHFL", "SHFL") not in set(list(pairwise(chain))[1:])  # the first may be the exchange that waits for x


def test_reading_the_report():
    log = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'one' for 'sm_80'
ptxas info    : Function properties for one
ptxas         .     16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 20 registers, used 1 barriers, 16 bytes cumulative stack size, 32 bytes smem, 372 bytes cmem[0]
ptxas info    : Compiling entry function 'two' for 'sm_80'
ptxas info    : Function properties for two
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, used 0 barriers
"""
    one, two = read_report(log)
    assert (one.kernel, one.registers, one.stack, one.spill_stores, one.spill_loads, one.shared) == ("one", 20, 16, 8, 12, 32)
    assert (two.kernel, two.registers, two.stack, two.shared) == ("two", 8, 0, 0)


@pytest.mark.parametrize(("given", "arch"), [("sm_80", "sm_80"), ("90", "sm_90"), (" SM_90a", "sm_90"), ("sm89", "sm_89")])
def test_architectures(given, arch):
    assert check_arch(given) == arch


@pytest.mark.parametrize("given", ["sm_75", "hopper", "", "sm_9"])
def test_an_architecture_without_the_instructions_is_refused(given):
    with pytest.raises(InputError, match=r"arch: got .*, accepted: sm_80, sm_86"):
        check_arch(given)


def test_an_error_in_a_source_is_one_line():
    with pytest.raises(InputError, match=r"^tile PITCH=-1 READ=0 SWIZZLE=0 for sm_80: tile\.cu\(\d+\): error: .*") as caught:
        build(source("tile", PITCH=-1, READ=0, SWIZZLE=0), "sm_80")
    assert "\n" not in str(caught.value)


def test_without_the_compiler_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    with pytest.raises(MissingExtra, match=r"pip install 'onchip\[lab\]'"):
        build(source("oversized"), "sm_80")
