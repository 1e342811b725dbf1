"""What a thread block computes on its tiles, rounded after every operation as its `Precision` says.

Tensors are two-dimensional tiles in the carrier: s and p (rows, keys), q, k, v, o (rows or keys, dim), the statistics m, l, lse, D
(rows, 1). Statistics and sums are updated in place. A row that has seen no key yet has m = −∞ and l = 0: its shift is taken as 0, so that
exp(−∞ − shift) is 0 and never NaN.
"""
from typing import Any

import numpy as np

from onchip.simulate.formats import Array, Mask, Precision, matmul, parse_format


def finite(m: Array) -> Array:
    """The shift to subtract before exp: m, and 0 where m = −∞."""
    return np.where(np.isneginf(m), 0, m)


def positive(l: Array) -> Array:
    """The divisor of a row: l, and 1 where nothing was seen (l = 0), whose numerator is 0."""
    return np.where(l == 0, 1, l)


class Arithmetic:
    """The arithmetic of attention tiles in one `Precision`; `scale` multiplies QKᵀ."""

    def __init__(self, precision: Precision, scale: float) -> None:
        self.scale = precision.carrier.type(scale)
        self._state, self._operand = parse_format(precision.state).round, parse_format(precision.scores).round
        self._accumulation = parse_format(precision.accumulation)

    # --- products

    def product(self, a: Array, b: Array) -> Array:
        """a bᵀ: S from Q and K, dP from dO and V."""
        return matmul(a, b.T, self._accumulation)

    def accumulate(self, total: Array, a: Array, b: Array) -> None:
        """total += a b, `a` (P or dS) rounded to the scores' format first."""
        total[...] = self._state(total + matmul(self._operand(a), b, self._accumulation))

    def accumulate_transposed(self, total: Array, a: Array, b: Array) -> None:
        """total += aᵀ b, `a` (P or dS) rounded to the scores' format first."""
        total[...] = self._state(total + matmul(self._operand(a).T, b, self._accumulation))

    # --- scores

    def scaled(self, s: Array) -> Array:
        """scale · s."""
        return self._state(s * self.scale)

    def masked(self, s: Array, mask: Mask | None) -> Array:
        """−∞ selected where `mask` is False; None: all visible, nothing to do."""
        return s if mask is None else np.where(mask, s, s.dtype.type(-np.inf))

    def scores(self, q: Array, k: Array, mask: Mask | None) -> Array:
        """s = scale · q kᵀ, hidden pairs −∞."""
        return self.masked(self.scaled(self.product(q, k)), mask)

    # --- softmax

    def maximum(self, s: Array, m: Array) -> None:
        """m = max(m, rowmax s)."""
        np.maximum(m, s.max(axis=1, keepdims=True), out=m)

    def exp(self, s: Array, m: Array) -> Array:
        """exp(s − m), 0 in a row whose m is −∞."""
        return self._state(np.exp(self._state(s - finite(m))))

    def add_rows(self, p: Array, l: Array) -> None:
        """l += rowsum p, the tile's own sum in the carrier."""
        l[...] = self._state(l + p.sum(axis=1, keepdims=True))

    def probabilities(self, s: Array, m: Array, l: Array) -> Array:
        """exp(s − m) / l, 0 in a row that sees nothing."""
        return self._state(self.exp(s, m) / positive(l))

    def online(self, s: Array, m: Array, l: Array, o: Array | None = None) -> Array:
        """Absorb a tile into m, l and, where given, the unnormalised o, which both carry e^(m_old − m_new). Returns p = exp(s − m_new)."""
        old = m.copy()
        self.maximum(s, m)
        p, rescale = self.exp(s, m), self.exp(old, m)
        l[...] = self._state(l * rescale)
        self.add_rows(p, l)
        if o is not None:
            o[...] = self._state(o * rescale)
        return p

    def online_normalised(self, s: Array, v: Array, m: Array, l: Array, o: Array) -> None:
        """FlashAttention-1's step (Alg. 1, lines 10–12): o stays normalised, so it carries l_old · e^(m_old − m_new) / l_new."""
        tile_m = s.max(axis=1, keepdims=True)
        p = self.exp(s, tile_m)
        old = m.copy()
        self.maximum(tile_m, m)
        old_weight, tile_weight = self._state(l * self.exp(old, m)), self.exp(tile_m, m)
        l[...] = self._state(old_weight + tile_weight * p.sum(axis=1, keepdims=True))
        pv = matmul(self._operand(p), v, self._accumulation)
        o[...] = self._state((old_weight * o + tile_weight * pv) / positive(l))

    def merge(self, part_o: Array, part_lse: Array, m: Array, l: Array, o: Array) -> None:
        """Absorb a partial result that is normalised already: its weight is e^lse, 0 for an empty part (lse = −∞)."""
        weight = self.online(part_lse, m, l, o)
        o[...] = self._state(o + weight * part_o)

    def normalised(self, o: Array, l: Array) -> Array:
        """o / l, 0 in a row that saw nothing."""
        return self._state(o / positive(l))

    def lse(self, m: Array, l: Array) -> Array:
        """m + ln l, −∞ in a row that saw nothing."""
        return self._state(m + np.log(positive(l)))

    # --- backward

    def row_dot(self, a: Array, b: Array) -> Array:
        """rowsum(a ∘ b), summed in the carrier."""
        return self._state((a * b).sum(axis=1, keepdims=True))

    def score_gradient(self, p: Array, dp: Array, delta: Array) -> Array:
        """ds = p ∘ (dp − D)."""
        return self._state(p * self._state(dp - delta))


def _nothing(*_: Any) -> None:
    return None


# The arithmetic of a dry run: the same methods, and none of them does anything.
DRY: Any = type("Dry", (), {name: staticmethod(_nothing) for name in vars(Arithmetic) if not name.startswith("_")})()
