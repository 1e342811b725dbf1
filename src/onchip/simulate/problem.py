"""What goes into a simulated schedule and what comes out: the problem with its tensors, and the result with its counts and error."""
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from onchip.errors import InputError, require
from onchip.roofline.shape import AttentionShape
from onchip.simulate.formats import Array, Mask, Precision, parse_format
from onchip.simulate.meter import KernelCount
from onchip.simulate.reference import Error, Truth, distance, reference


@dataclass(frozen=True, eq=False)
class Problem:
    """An attention call: sizes and, unless it is only to be counted, q (B, H, Sq, d), k (B, Hkv, Sk, d), v (B, Hkv, Sk, dv).

    A backward needs `dout` (B, H, Sq, dv) as well. Tensors are kept rounded to ``precision.inputs``, and that is what the error is
    measured against. `scale` is 1/√d unless given. Raises `InputError` for a wrong shape and for values that are not finite.
    """

    shape: AttentionShape
    precision: Precision = field(default_factory=Precision)
    q: Array | None = None
    k: Array | None = None
    v: Array | None = None
    dout: Array | None = None
    scale: float | None = None

    def __post_init__(self) -> None:
        shape = self.shape
        require(np.isfinite(self.factor), "scale", self.scale, "a finite number")
        sizes = {
            "q": (shape.batch, shape.heads, shape.seq_q, shape.head_dim),
            "k": (shape.batch, shape.kv_heads, shape.seq_k, shape.head_dim),
            "v": (shape.batch, shape.kv_heads, shape.seq_k, shape.head_dim_v),
            "dout": (shape.batch, shape.heads, shape.seq_q, shape.head_dim_v),
        }
        given = [name for name in sizes if getattr(self, name) is not None]
        if given not in ([], ["q", "k", "v"], ["q", "k", "v", "dout"]):
            raise InputError(f"tensors: got {', '.join(given)}, accepted: q, k, v; q, k, v, dout; or none (counting only)")
        for name in given:
            object.__setattr__(self, name, self._stored(name, np.asarray(getattr(self, name)), sizes[name]))

    def _stored(self, name: str, values: Array, size: tuple[int, ...]) -> Array:
        require(values.shape == size, name, f"shape {values.shape}", f"{size} (batch, heads, sequence, dim)")
        stored = parse_format(self.precision.inputs).cast(values)
        for array, what in ((values, ""), (stored, f" in {self.precision.inputs}")):
            bad = int(np.count_nonzero(~np.isfinite(array)))
            require(bad == 0, name, f"{bad} values that are NaN or infinite{what}", "finite values")
        return stored

    @classmethod
    def random(cls, shape: AttentionShape, precision: Precision | None = None, seed: int = 0, *, grad: bool = False,
               scale: float | None = None) -> "Problem":
        """Normally distributed q, k, v (and dout with `grad`)."""
        rng = np.random.default_rng(seed)

        def normal(heads: int, seq: int, dim: int) -> Array:
            return rng.standard_normal((shape.batch, heads, seq, dim))

        q, k = normal(shape.heads, shape.seq_q, shape.head_dim), normal(shape.kv_heads, shape.seq_k, shape.head_dim)
        v = normal(shape.kv_heads, shape.seq_k, shape.head_dim_v)
        dout = normal(shape.heads, shape.seq_q, shape.head_dim_v) if grad else None
        return cls(shape, precision or Precision(), q, k, v, dout, scale)

    @property
    def factor(self) -> float:
        """What multiplies QKᵀ."""
        return self.shape.head_dim ** -0.5 if self.scale is None else self.scale

    def flat(self, name: str, heads: int) -> Array:
        """Tensor `name` as (heads, rows, dim), batch and heads merged (and a group's queries stacked, where `heads` is fewer than H)."""
        values = getattr(self, name)
        return values.reshape(heads, -1, values.shape[-1])

    def truth(self, wanted: Mask, *, grad: bool) -> Truth:
        """The float64 result on the rows `wanted` (batch · heads, Sq)."""
        q, dout = (None if x is None else x.reshape(-1, *x.shape[2:]) for x in (self.q, self.dout if grad else None))
        k, v = (x.reshape(-1, *x.shape[2:]) for x in (self.k, self.v) if x is not None)
        assert q is not None
        return reference(self.shape, self.factor, q, k, v, dout, wanted)


@dataclass(frozen=True, eq=False)
class Result:
    """A schedule after its run: what it moved, what it held, and its tensors.

    `tensors`: "out" (B, H, Sq, dv), "lse" (B, H, Sq), "dq", "dk", "dv" as the schedule makes them, in the carrier's dtype; rows of a
    sampled run that were not executed are NaN, and dk, dv are then the sums over the executed rows. Empty after a dry run.
    """

    name: str
    problem: Problem
    kernels: tuple[KernelCount, ...]
    tensors: dict[str, Array]
    peak: int  # most on-chip bytes alive at once in a thread block
    peak_buffers: dict[str, int]  # which buffers those were
    memory: dict[str, int]  # device memory: bytes of each tensor
    rows: Mask  # (batch · heads, Sq), boolean: the executed rows

    @property
    def executed(self) -> float:
        """Share of the query rows whose arithmetic was done; bytes and tiles count all of them."""
        return float(self.rows.mean())

    @property
    def issued(self) -> int:
        """Bytes asked of device memory, all kernels."""
        return sum(kernel.issued for kernel in self.kernels)

    @property
    def tiles(self) -> Counter[str]:
        """Tiles of S: "full" ones computed without a mask (naive: all), "masked" ones with it, "skipped" ones without a visible pair."""
        return sum((kernel.tiles for kernel in self.kernels), Counter())

    @cached_property
    def errors(self) -> dict[str, Error]:
        """Error of every tensor against float64 on the same (rounded) inputs."""
        if not self.tensors:
            return {}
        truth = self.problem.truth(self.rows, grad="dq" in self.tensors)
        return {name: distance(x.reshape(getattr(truth, name).shape), getattr(truth, name)) for name, x in self.tensors.items()}

    @property
    def out(self) -> Array:
        """The output (B, H, Sq, dv); KeyError after a dry run."""
        return self.tensors["out"]

    @property
    def lse(self) -> Array:
        """Log-sum-exp of the rows (B, H, Sq), natural logarithm; KeyError where the schedule has none."""
        return self.tensors["lse"]
