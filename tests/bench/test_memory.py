import pytest
import torch

from onchip.bench.memory import LiveBytes, peak_extra_bytes

KB = 1024
ROW = torch.ones(256)  # 1 KB in float32


def peak(fn) -> int:
    return peak_extra_bytes(fn)[0]


def test_the_result_comes_back_with_the_bytes_it_takes():
    nbytes, result = peak_extra_bytes(lambda: ROW + 1)
    assert nbytes == KB
    assert torch.equal(result, torch.full((256,), 2.0))


def test_what_was_there_before_is_not_extra():
    assert peak(lambda: ROW.view(16, 16).T[3:]) == 0
    assert peak(lambda: torch.ones(256).add_(ROW).mul_(2)) == KB


def test_in_place_on_what_was_there_before_is_not_extra():
    before = torch.ones(256)
    assert peak(lambda: before.mul_(2).view(2, 128)) == 0


def test_nothing_made():
    assert peak(lambda: None) == 0


def test_a_chain_keeps_two_alive():
    assert peak(lambda: ((ROW + 1) * 2).exp()) == 2 * KB


def test_names_keep_tensors_alive():
    def keep() -> torch.Tensor:
        a = ROW + 1
        b = a * 2
        c = b.exp()
        return a + b + c  # a, b, c; then a + b, then the sum

    def drop() -> torch.Tensor:
        a = ROW + 1
        b = a * 2
        del a
        return b.exp()

    assert peak(keep) == 5 * KB
    assert peak(drop) == 2 * KB


def test_the_peak_is_not_the_end():
    def bump() -> torch.Tensor:
        big = torch.ones(8, 256)
        small = big.sum()
        del big
        return small

    with LiveBytes() as count:
        result = bump()
        assert count.peak == 8 * KB + 4
        assert count.live == 4
        del result
        assert count.live == 0


def test_a_view_keeps_the_whole_storage():
    with LiveBytes() as count:
        view = torch.ones(8, 256)[0]
        assert count.live == 8 * KB
        del view
        assert count.live == 0


def test_a_loop_that_reuses_does_not_add_up():
    def loop() -> torch.Tensor:
        total = torch.zeros(256)
        for _ in range(10):
            total += ROW * 2
        return total

    assert peak(loop) == 2 * KB


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.uint8, torch.bool])
def test_bytes_not_elements(dtype):
    assert peak(lambda: torch.zeros(3, 5, dtype=dtype)) == 15 * dtype.itemsize


def test_several_results_and_expanded_ones():
    assert peak(lambda: torch.ones(4, 64).max(dim=0)) == 4 * 64 * 4 + 64 * 4 + 64 * 8
    assert peak(lambda: torch.ones(64, 1).expand(64, 1000)) == 64 * 4


def test_a_resized_storage_is_counted_at_its_size():
    assert peak(lambda: torch.mm(ROW.view(16, 16), ROW.view(16, 16), out=torch.empty(0))) == KB


def test_attention_in_one_line():
    q = torch.ones(1, 2, 64, 8)
    scores = 2 * 64 * 64 * 4
    assert peak(lambda: (q @ q.mT * 0.5).softmax(-1) @ q) == 2 * scores  # beside them out, later and smaller


def test_backward_counts():
    w = torch.ones(256, requires_grad=True)
    (w * w).sum().backward()  # the gradient is there from now on
    grad = w.grad
    assert grad is not None
    assert peak(lambda: (w * 3).sum().backward()) == KB + 8  # w · 3, freed before its gradient is made; the sum and a one
    assert w.grad is grad


def test_counts_nothing_outside():
    with LiveBytes() as count:
        pass
    kept = ROW + 1
    assert (count.live, count.peak) == (0, 0)
    del kept
