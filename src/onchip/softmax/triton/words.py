"""Words of a card's memory through which groups of thread blocks exchange (`onchip.softmax.triton.parts`), and what marks them as new."""
from threading import Lock
from typing import Any

import torch

from onchip.launcher import follows_others

WORDS = 1 << 13  # 4 for each thread block


class _Exchange:
    """Words of a stream, whose launches follow each other, and the next tag that no launch has used."""

    def __init__(self, device: torch.device) -> None:
        self.words, self.tag, self.lock = torch.zeros(WORDS, dtype=torch.int64, device=device), 1, Lock()

    def tags(self, rounds: int) -> int:
        """The first of `rounds` new tags."""
        with self.lock:  # two threads may launch on one stream
            if self.tag + rounds >= 2**31:
                self.words.zero_()
                self.tag = 1
            self.tag += rounds
            return self.tag - rounds


_EXCHANGES: dict[tuple[torch.device, int], _Exchange] = {}


def exchange(device: torch.device, stream: int, rounds: int) -> tuple[Any, ...]:
    """(words, tag) for a launch of `rounds` exchanges; nothing for none."""
    if not rounds:
        return ()
    if device.type != "cuda" or not follows_others(stream):
        return _Exchange(device).words, 1
    found = _EXCHANGES.get((device, stream))
    if found is None:
        found = _EXCHANGES[device, stream] = _Exchange(device)
    return found.words, found.tags(rounds)


def pointers(through: tuple[Any, ...]) -> tuple[int, ...]:
    """The same as a kernel gets them."""
    return (through[0].data_ptr(), through[1]) if through else ()
