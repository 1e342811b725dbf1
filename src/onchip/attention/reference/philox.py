"""Dropout bits by counter: Philox-4x32-10 in torch integer arithmetic, the meaning every kernel must reproduce.

A random word belongs to a position, not to a moment: counter = (key index j, query row i, batch · heads + head, 0), key = the 64-bit seed,
first output word. Any tiling, either pass and any backend therefore draws the same mask. Indices are those inside the (packed) sequence.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011, §3.3.
"""
import torch
from torch import Tensor

_M0, _M1 = 0xD2511F53, 0xCD9E8D57  # multipliers
_W0, _W1 = 0x9E3779B9, 0xBB67AE85  # key increments (golden ratio, √3 − 1)
_LOW = 0xFFFFFFFF


def _multiply(m: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of m · x for 32-bit words held in int64: the product wraps modulo 2⁶⁴, which keeps all its bits."""
    product = x * m
    return (product >> 32) & _LOW, product & _LOW


def philox4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], seed: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ten rounds. `counter`: four int64 tensors of 32-bit words, broadcast together; `seed`: int64, its low word is the first key."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & _LOW, (seed >> 32) & _LOW
    for _ in range(10):
        high0, low0 = _multiply(_M0, c0)
        high1, low1 = _multiply(_M1, c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
    return c0, c1, c2, c3


def keep_mask(seed: Tensor, dropout_p: float, keys: Tensor, rows: Tensor, heads: Tensor) -> Tensor:
    """True where a probability survives: word ≥ round(dropout_p · 2³²).

    `keys` (..., L) hold j, `rows` (..., R, 1) hold i and `heads` hold batch · Hq + head, all int64 and broadcast together.
    """
    word, *_ = philox4x32((keys, rows, heads, torch.zeros_like(keys)), seed)
    return word >= round(dropout_p * 2**32)
