"""Packed batches for the reference: sequences of equal lengths are gathered into dense problems, solved, and scattered back."""
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class Members(NamedTuple):
    """Sequences of one length: which ones, and where their rows lie in the packed tensors."""

    sequences: Tensor  # (n,) int64
    queries: Tensor  # (n, len_q) int64 rows of the packed q
    keys: Tensor  # (n, len_k) int64 rows of the packed k and v


def equal_lengths(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, total_q: int, total_k: int) -> Iterator[Members]:
    """Group the sequences by (len_q, len_k). Offsets beyond the data are cut off at its end, so no row outside it is ever touched."""
    device = cu_seqlens_q.device
    starts_q, starts_k = cu_seqlens_q.clamp(0, total_q).tolist(), cu_seqlens_k.clamp(0, total_k).tolist()
    groups: dict[tuple[int, int], list[int]] = defaultdict(list)
    for n in range(len(starts_q) - 1):
        groups[max(0, starts_q[n + 1] - starts_q[n]), max(0, starts_k[n + 1] - starts_k[n])].append(n)

    def rows(starts: list[int], members: list[int], length: int) -> Tensor:
        return torch.tensor([starts[n] for n in members], device=device)[:, None] + torch.arange(length, device=device)

    for (len_q, len_k), members in groups.items():
        yield Members(torch.tensor(members, device=device), rows(starts_q, members, len_q), rows(starts_k, members, len_k))


def gather(x: Tensor, rows: Tensor) -> Tensor:
    """Rows of a packed (total, H, …) tensor as a dense (n, H, length, …) one."""
    return x[rows].transpose(1, 2)


def scatter(into: Tensor, rows: Tensor, dense: Tensor) -> None:
    """The inverse of `gather`."""
    into[rows] = dense.transpose(1, 2)
