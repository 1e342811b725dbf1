"""The table of tiles: every width served, nothing a card cannot hold, compiled without spills."""
import json
import os
import subprocess
import sys

import pytest

from onchip.roofline.hardware import ARCHITECTURES
from onchip.softmax.triton import plan


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("n", [1, 2, 3, 255, 256, 257, 1024, 1025, 32768, 32769, 10**6, 2**31 + 7])
def test_a_resident_tile_holds_the_row_and_a_streamed_one_has_full_blocks(n, across):
    chosen = plan.choose(n, across)
    assert chosen.block_n & (chosen.block_n - 1) == 0
    assert chosen.block_m & (chosen.block_m - 1) == 0
    assert not chosen.resident or n <= chosen.block_n < 2 * n
    assert chosen.resident or chosen.programs_per_sm > 0


def test_which_plan_serves_which_width():
    def widest(across):
        return max(2**k for k in range(32) if plan.choose(2**k, across).resident)

    assert (widest(False), widest(True)) == (32768, 512)
    assert not plan.choose(32769, False).resident


def test_neighbouring_rows_fill_whole_sectors():
    for n in (1, 19, 64, 512, 513, 10**6):
        assert plan.choose(n, True).block_m * 2 >= 32


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (9, 0)])
def test_registers_hold_every_tile(capability):
    """A row lives in registers as float32; a quarter at least is left for addresses and temporaries."""
    card = ARCHITECTURES[capability]
    for across in (False, True):
        for n in [2**k for k in range(17)]:
            chosen = plan.choose(n, across)
            per_thread = chosen.block_m * chosen.block_n / (32 * chosen.warps)
            assert per_thread / 0.75 <= min(card.max_registers_per_thread, card.registers_per_sm / (32 * chosen.warps))


def test_plans_compile_for_hopper_and_move_16_bytes_at_a_time():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    cases = [((8, 32768), -1), ((8, 65536), -1), ((2, 512, 256), -2)]  # the heaviest of each kind
    done = subprocess.run([sys.executable, "-m", "tests.softmax.compile_plans", json.dumps(cases)], env=environment, text=True,
                          capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    kernels = json.loads(done.stdout)
    assert len(kernels) == 2 * 2 * len(cases)
    for kernel in kernels:
        assert kernel["stack"] <= (96 if kernel["name"] == "backward" else 0), kernel  # the widest backwards spill a little: see the plan
        assert kernel["accesses"] == kernel["wide"] > 0, kernel
