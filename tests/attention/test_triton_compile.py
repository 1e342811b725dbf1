"""The Triton kernels compiled for cards that are not here: shared memory within the card's, wgmma on Hopper, no spills to speak of."""
import json
import os
import subprocess
import sys

import pytest

from onchip.attention.triton import tiles

# Kernels compile only where Triton was imported without its interpreter: in a process of its own. It records what a call launches.
SCRIPT = """
import json, sys, torch
from onchip.attention.problem import Spec
from onchip.attention.triton import backward, forward, launch, tiles
from onchip.bench.inspect import compile_offline

arch, budget, d, dv, name, described, wanted = json.loads(sys.argv[1])
dtype = getattr(torch, name)
tiles.capability = lambda _: divmod(arch, 10)
tiles.shared_memory = lambda _: budget
launch.TMA_PAIRS = 0 if described else 2**62
launched = []
launch.launch = lambda kernel, programs, args, tile: launched.append((kernel, dict(zip(kernel.arg_names, args)), tile))
q, k, v, out = (torch.empty(1, 2, 8192, dim, dtype=dtype, device="meta") for dim in (d, d, dv, dv))
lse = torch.empty(1, 2, 8192, device="meta")
spec = Spec(1, -1, 0, 0.1, 0.0, 0.0, 8192, 8192, True, False)
forward.forward(q, k, v, *[None] * 7, spec)
backward.backward(out, None, q, k, v, out, lse, *[None] * 7, spec, (True, True, True, False, False))
for kernel, args, tile in launched:
    if kernel.fn.__name__ not in wanted:
        continue
    made = compile_offline(kernel, args, arch, num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=True)
    loops = [loop for loop in made.loops if loop["EX2"]]
    # the loop over whole blocks: the masked ones spill no less
    hot = min(loops, key=lambda loop: (loop["STL"] + loop["LDL"], sum(loop.values()))) if loops else made.counts
    print(json.dumps([kernel.fn.__name__, tile, made.shared, made.counts, hot, made.notes, made.unwritten]))
"""


KERNELS = ("forward_kernel", "rows_kernel", "keys_kernel", "queries_kernel")


def compiled(arch: int, kib: int, d: int, dtype: str, described: bool, kernels: tuple[str, ...] = KERNELS,
             dv: int | None = None) -> dict[str, tuple]:
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    told = json.dumps([arch, kib * 1024, d, dv or d, dtype, described, kernels])
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", SCRIPT, told], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    made = {name: tuple(rest) for name, *rest in map(json.loads, done.stdout.splitlines())}
    assert set(made) == set(kernels)
    return made


@pytest.mark.parametrize(("arch", "kib", "described"), [(90, 227, True), (90, 227, False), (80, 163, False), (86, 99, False)])
@pytest.mark.parametrize("d", [64, 128])
def test_kernels_fit_the_card_and_keep_their_loop_in_registers(arch: int, kib: int, described: bool, d: int) -> None:
    check(compiled(arch, kib, d, "bfloat16", described), arch, kib, described, 2, d)


def test_the_row_for_heads_of_256_with_descriptors() -> None:
    check(compiled(90, 227, 256, "bfloat16", True, ("keys_kernel",)), 90, 227, True, 2, 256)


def test_fp32_multiplies_on_hoppers_tensor_cores_and_takes_no_descriptors() -> None:
    check(compiled(90, 227, 64, "float32", True, ("keys_kernel", "queries_kernel")), 90, 227, False, 4, 64)  # see launch.accelerates


def test_no_value_is_lost_where_v_is_narrower_than_k() -> None:
    made = compiled(90, 227, 40, "float32", False, ("forward_kernel", "keys_kernel"), dv=24)
    assert [unwritten for *_, unwritten in made.values()] == [[], []]


def check(kernels: dict[str, tuple], arch: int, kib: int, described: bool, size: int, d: int) -> None:
    for name, (tile, shared, counts, hot, notes, unwritten) in kernels.items():
        assert shared <= kib * 1024, name
        assert hot["STL"] + hot["LDL"] <= 12, name  # of some 400 instructions: dK, dV at d = 128 on Hopper have a few, the others none
        if name != "rows_kernel":
            assert tile == list(tiles.pick(name.removesuffix("_kernel"), kib * 1024, size, d, False, described)), name
            assert counts["HGMMA" if arch == 90 else "HMMA"] > 0, name
            assert (counts["UTMALDG"] > 0) == described, name
        assert not [note for note in notes if "serialized" in note], name
        assert not unwritten, name
        assert counts["DEPBAR"] < max(counts["HGMMA"], 1), name
