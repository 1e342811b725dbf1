"""The Triton kernels compiled for cards that are not here: shared memory within the card's, wgmma on Hopper, no spills to speak of."""
from typing import Any

import pytest
import torch

from onchip.attention.triton import tiles
from tests import fresh

KERNELS = ("forward_kernel", "rows_kernel", "keys_kernel", "queries_kernel")


def launched(arch: int, kib: int, d: int, dv: int, name: str, described: bool, wanted: tuple[str, ...]) -> list[list[Any]]:
    """What a call launches on such a card, compiled: for a process of its own, where kernels compile and what is patched stays so."""
    from onchip.attention.problem import Spec
    from onchip.attention.triton import backward, forward, launch
    from onchip.bench.inspect import compile_offline

    tiles.capability = lambda _: divmod(arch, 10)
    tiles.shared_memory = lambda _: kib * 1024
    launch.TMA_PAIRS = 0 if described else 2**62
    calls = []
    launch.launch = lambda kernel, programs, args, tile: calls.append((kernel, dict(zip(kernel.arg_names, args, strict=False)), tile))
    dtype = getattr(torch, name)
    q, k, v, out = (torch.empty(1, 2, 8192, dim, dtype=dtype, device="meta") for dim in (d, d, dv, dv))
    lse = torch.empty(1, 2, 8192, device="meta")
    spec = Spec(1, -1, 0, 0.1, 0.0, 0.0, 8192, 8192, True, False)
    forward.forward(q, k, v, *[None] * 7, spec)
    backward.backward(out, None, q, k, v, out, lse, *[None] * 7, spec, (True, True, True, False, False))
    made = []
    for kernel, args, tile in calls:
        if kernel.fn.__name__ in wanted:
            one = compile_offline(kernel, args, arch, num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=True)
            loops = [loop for loop in one.loops if loop["EX2"]]
            # the loop over whole blocks: the masked ones spill no less
            hot = min(loops, key=lambda loop: (loop["STL"] + loop["LDL"], sum(loop.values()))) if loops else one.counts
            made.append([kernel.fn.__name__, list(tile), one.shared, dict(one.counts), hot, list(one.notes), one.unwritten])
    return made


def compiled(arch: int, kib: int, d: int, dtype: str, described: bool, kernels: tuple[str, ...] = KERNELS,
             dv: int | None = None) -> dict[str, tuple]:
    made = {name: tuple(rest) for name, *rest in fresh.call(launched, arch, kib, d, dv or d, dtype, described, kernels)}
    assert set(made) == set(kernels)
    return made


@pytest.mark.parametrize(("arch", "kib", "described", "d"), [
    (90, 227, True, 64), (90, 227, True, 128), (90, 227, False, 128), (80, 163, False, 128), (86, 99, False, 64), (86, 99, False, 128)])
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
        if arch == 90 and described:  # by pointers to masked tiles dK, dV spilled 210 to 238 words a thread: half of the backward's DRAM
            assert counts["STL"] <= 48, name
        if name != "rows_kernel":
            assert tile == list(tiles.pick(name.removesuffix("_kernel"), kib * 1024, size, d, False, described)), name
            assert counts["HGMMA" if arch == 90 else "HMMA"] > 0, name
            assert (counts["UTMALDG"] > 0) == described, name
        assert not [note for note in notes if "serialized" in note], name
        assert not unwritten, name
        assert counts["DEPBAR"] < max(counts["HGMMA"], 1), name
