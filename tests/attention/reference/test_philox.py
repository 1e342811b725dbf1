"""Philox-4x32-10 against the known answers published with it (Random123, kat_vectors)."""
import pytest
import torch

from onchip.attention.reference.philox import keep_mask, philox4x32


@pytest.mark.parametrize(("counter", "key", "answer"), [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0), (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1))])
def test_known_answers(counter: tuple[int, ...], key: tuple[int, int], answer: tuple[int, ...]) -> None:
    seed = key[0] | key[1] << 32
    seed = torch.tensor([seed - 2**64 if seed >= 2**63 else seed])
    words = philox4x32(tuple(torch.tensor([word]) for word in counter), seed)
    assert tuple(int(word) for word in words) == answer


def test_a_word_belongs_to_its_position() -> None:
    """A block's mask is the part of the whole mask it covers."""
    seed, heads = torch.tensor([5]), torch.arange(6).view(2, 3, 1, 1)
    keys, rows = torch.arange(40), torch.arange(30)[:, None]
    whole = keep_mask(seed, 0.4, keys, rows, heads)
    part = keep_mask(seed, 0.4, keys[8:20], rows[5:9], heads[1:])
    assert whole.shape == (2, 3, 30, 40)
    assert torch.equal(part, whole[1:, :, 5:9, 8:20])
    assert whole.float().mean().item() == pytest.approx(0.6, abs=0.03)
