"""What an attention call is, without its tensors: the frozen descriptions that flow from the contract to every implementation."""
from dataclasses import dataclass

from onchip.roofline.shape import AttentionShape

# What a call may ask for beyond plain attention, and how a sentence names it. The rows of the capability table.
FEATURES = {
    "causal": "causal mask", "window": "window", "softcap": "softcap", "bias": "bias", "mask": "mask", "alibi": "ALiBi slopes",
    "sinks": "sinks", "dropout": "dropout", "varlen": "packed sequences", "gqa": "grouped heads",
    "cross": "different query and key lengths", "dv": "different head dims of q/k and v",
}

CAUSAL_NAMES = (None, "bottom-right", "top-left")  # by `Spec.causal`


@dataclass(frozen=True)
class Spec:
    """The numbers an implementation needs beside its tensors. All checks are done: an implementation may rely on every line here.

    Query i stands at key position i + offset, offset = 0 for `causal` 2, else Sk − Sq (of its own sequence when packed);
    it sees key j when i + offset − window_left ≤ j ≤ i + offset + window_right, where a width of −1 is unbounded.
    `causal` has already capped `window_right` at 0, so the two widths and the offset say everything about the mask's shape.
    """

    causal: int  # 0 none, 1 bottom-right, 2 top-left
    window_left: int
    window_right: int
    scale: float
    softcap: float  # 0 = none
    dropout_p: float  # in [0, 1)
    max_seqlen_q: int  # the dense length, or the longest packed one
    max_seqlen_k: int
    deterministic: bool
    tf32: bool  # fp32 matmuls may round their operands to tf32


@dataclass(frozen=True)
class AttentionProblem:
    """One call as dispatch, `explain`, the roofline prediction and the benchmarks see it: sizes, formats and features, no tensors.

    A packed batch is described by its number of sequences and its longest lengths.
    """

    batch: int
    heads: int
    kv_heads: int
    seq_q: int
    seq_k: int
    head_dim: int
    head_dim_v: int
    dtype: str = "bfloat16"
    device: str = "cuda"
    layout: str = "bhsd"  # of q: 'bhsd', 'bshd' (heads inside the sequence), 'packed'
    causal: str | None = None
    window: tuple[int | None, int | None] = (None, None)
    scale: float | None = None  # None: 1/√head_dim
    softcap: float | None = None
    dropout_p: float = 0.0
    bias: bool = False
    mask: bool = False
    alibi: bool = False
    sinks: bool = False
    varlen: bool = False
    deterministic: bool = False
    tf32: bool = False

    @property
    def shape(self) -> AttentionShape:
        """The geometry, for the ledger and the roofs (which ask for at least one of everything)."""
        return AttentionShape(self.seq_q, self.seq_k, self.head_dim, self.head_dim_v, self.batch, self.heads, self.kv_heads,
                              self.causal, self.window)

    @property
    def resolved_scale(self) -> float:
        """`scale`, or 1/√head_dim; 1 when head_dim = 0, where every score is 0 whatever the scale."""
        if self.scale is not None:
            return self.scale
        return self.head_dim ** -0.5 if self.head_dim else 1.0

    @property
    def features(self) -> tuple[str, ...]:
        """Names of what this call asks for beyond plain attention, keys of `FEATURES`."""
        asked = {
            "causal": self.causal is not None,
            "window": any(w is not None for w in self.window),
            "softcap": self.softcap is not None,
            "bias": self.bias,
            "mask": self.mask,
            "alibi": self.alibi,
            "sinks": self.sinks,
            "dropout": self.dropout_p > 0,
            "varlen": self.varlen,
            "gqa": self.heads != self.kv_heads,
            "cross": self.seq_q != self.seq_k,
            "dv": self.head_dim != self.head_dim_v,
        }
        return tuple(name for name in FEATURES if asked[name])

    @property
    def spec(self) -> Spec:
        """The same call in the form implementations take."""
        left, right = (-1 if width is None else width for width in self.window)
        if self.causal is not None:
            right = 0
        return Spec(CAUSAL_NAMES.index(self.causal), left, right, self.resolved_scale, self.softcap or 0.0, self.dropout_p,
                    self.seq_q, self.seq_k, self.deterministic, self.tf32)
