"""How the Hopper launch sees tensors: which it addresses in place, and that its descriptors address the right elements."""
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")
from onchip.attention.contract import Spec, empty_like_q
from onchip.attention.hopper import launch
from onchip.attention.hopper.forward import forward_kernel
from onchip.attention.problem import AttentionProblem


def zeros(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.bfloat16)


def spec_of(q: Tensor, k: Tensor, causal: int = 0) -> Spec:
    return Spec(causal, -1, 0 if causal else -1, 0.1, 0.0, 0.0, q.shape[-2], k.shape[-2], False, False)


@pytest.fixture
def plan(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))

    def make(q: Tensor, k: Tensor, v: Tensor, causal: int = 0) -> launch.Plan:
        return launch.Plan(q, k, v, empty_like_q(q, v.shape[-1]), None, False, spec_of(q, k, causal), None, None)

    return make


PLACES = {
    "contiguous": lambda: zeros(2, 3, 50, 128),
    "heads inside": lambda: zeros(2, 50, 3, 128).transpose(1, 2),
    "one of three": lambda: zeros(2, 50, 3, 3, 128).transpose(1, 3)[:, :, 1],
    "a slice": lambda: zeros(4, 5, 80, 160)[1:3, 1:4, 20:70, 16:144],
    "one row": lambda: zeros(2, 1, 3, 128).transpose(1, 2),
}


def address(descriptor, coordinates: tuple[int, ...]) -> int:
    steps = sum(c * s for c, s in zip(coordinates, descriptor.strides, strict=True))
    return (descriptor.base.data_ptr() + 2 * steps) % 2**64


@pytest.mark.parametrize("name", PLACES)
def test_descriptors_address_the_elements_in_place(name, plan):
    t = PLACES[name]()
    made = plan(t, t, t)
    assert not any(made.copies)
    for which in range(3):
        descriptor, absent = made.descriptors(which, t)
        assert absent is None
        for b, h, i in ((0, 0, 0), (1, 2, t.shape[2] - 1), (1, 0, t.shape[2] // 2)):
            begin, length = b * made.rows[which].step, t.shape[2]
            row = launch.FAR.value - length + i
            coordinates = (launch.FAR.value, begin + length, h, row, 0)  # as the kernel's `load` forms them
            assert address(descriptor, coordinates) == t[b, h, i].data_ptr()
            assert all(0 <= c < extent for c, extent in zip(coordinates, descriptor.shape, strict=True))
        assert launch.FAR.value - length + t.shape[2] == descriptor.shape[3]  # the row after the last is out of bounds


def test_heads_of_two_parts_and_parts_that_are_not_there(plan):
    q, v = zeros(1, 2, 10, 160), zeros(1, 2, 10, 136)
    made = plan(q, q, v)  # runs on the tile of 128 + 64, 128 + 64
    first, second = made.descriptors(0, q)
    assert second.base.data_ptr() == q.data_ptr() + 2 * 128
    assert (first.shape[4], second.shape[4]) == (160, 32)
    short = zeros(1, 2, 10, 104)
    _, nothing = plan(short, short, zeros(1, 2, 10, 192)).descriptors(0, short)
    assert nothing.shape[3] == 1  # no coordinate the kernel uses is in bounds: the part reads as zeros


def test_what_tma_cannot_address_is_copied(plan):
    t = zeros(2, 3, 50, 128)
    odd_address, odd_rows = zeros(2, 3, 50, 136)[..., 4:132], zeros(2, 3, 50, 132)[..., :128]
    apart = zeros(2 * 3 * 50 * 128 + 8).as_strided((2, 3, 50, 128), (3 * 50 * 128 + 8, 50 * 128, 128, 1))  # batches a part of a row apart
    for bad in (odd_address, odd_rows, apart):
        assert plan(bad, t, t).copies == [True, False, False]
        assert plan(t, bad, t).copies == [False, True, False]
    expanded = zeros(2, 1, 50, 128).expand(2, 3, 50, 128)
    assert plan(t, expanded, t).copies == [False, False, False]
    assert plan(t, expanded, t).rows[1].heads == 1
    assert plan(expanded, t, t).copies == [True, False, False]


def test_the_last_section_has_enough_tiles_for_the_end(plan):
    """B4 H8 S8192 d192 causal: 2 · 132 tiles of 64 a head are 5 heads, so 27 come before. Full, tiles are equal."""
    q = torch.empty(4, 8, 8192, 192, dtype=torch.bfloat16)
    for causal, last in ((1, 5), (0, 1)):
        values = plan(q, q, q, causal).after_pointers
        made = dict(zip(forward_kernel.arg_names[-len(values):], values, strict=True))
        assert (made["tiles"], made["last_heads"], made["early_heads"], made["early_tiles"]) == (64, last, 32 - last, (32 - last) * 64)
        assert made["total"] == 2048


def test_scratch_memory_has_room_for_every_flag(plan):
    q = torch.empty(2, 4, 300, 128, dtype=torch.bfloat16)
    made = plan(q, q, q)
    assert (made.total, made.grid) == (24, 24)
    assert (made.failed, made.chain, made.words) == (1, 1 + 24 * 2 + 24, 1 + 24 * 2 + 24 + 24)


def test_short_sequences_of_narrow_heads_have_a_tile_of_their_own(plan):
    for causal, longest in ((0, 512), (1, 2048)):
        for more, consumers in ((0, 2), (1, 3)):
            q = torch.empty(1, 2, longest + more, 64, dtype=torch.bfloat16)
            assert plan(q, q, q, causal).tile.consumers == consumers


def test_why_not(monkeypatch):
    plain = AttentionProblem(1, 2, 2, 64, 64, 64, 64)
    for there, capability, reason in ((False, (9, 0), "9.0"), (True, (8, 0), "9.0"), (True, (9, 0), None)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
        said = launch.why_not(plain)
        assert said is None if reason is None else f"compute capability {reason}" in said
    assert "head dim of v is 60" in launch.why_not(AttentionProblem(1, 2, 2, 64, 64, 64, 60))
    assert "scale is -1" in launch.why_not(AttentionProblem(1, 2, 2, 64, 64, 64, 64, scale=-1.0))
    assert launch.why_not(AttentionProblem(1, 2, 2, 64, 64, 64, 64, scale=-1.0, softcap=5.0)) is None
    assert "nothing to compute" in launch.why_not(AttentionProblem(1, 2, 2, 64, 0, 64, 64))
