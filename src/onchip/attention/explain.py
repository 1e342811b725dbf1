"""Which backend a call takes, why each other one does not run, and what the roofs say of its time."""
from dataclasses import dataclass

from onchip.attention.dispatch import CAPABILITIES, choose, why_not
from onchip.attention.problem import FEATURES, AttentionProblem
from onchip.errors import InputError
from onchip.roofline.attention import Formats, fa2
from onchip.roofline.hardware import GPU
from onchip.roofline.roofs import Prediction, predict, tile_on

_BR, _BC = 128, 64  # tile of the schedule the prediction is made for


@dataclass(frozen=True)
class Explanation:
    """The answer of `onchip.explain`; `str()` gives it as text."""

    problem: AttentionProblem
    backend: str | None  # what runs; None when the named backend cannot
    reasons: dict[str, str]  # backend → why it does not run
    gpu: GPU | None
    prediction: Prediction | None  # of a FlashAttention-2 forward on `gpu`; None where it is not known

    def __str__(self) -> str:
        p = self.problem
        sizes = f"batch {p.batch}, heads {p.heads}/{p.kv_heads}, seq {p.seq_q}×{p.seq_k}, dim {p.head_dim}/{p.head_dim_v}"
        asked = ", ".join(FEATURES[name] for name in p.features) or "nothing beyond plain attention"
        lines = [f"attention: {sizes}, {p.dtype} on {p.device}, {p.layout}", f"asks for: {asked}", f"runs on:  {self.backend or 'nothing'}"]
        lines += [f"  not {name}: {reason}" for name, reason in self.reasons.items()]
        if self.gpu is not None and self.prediction is not None:
            kernel = self.prediction.slowest
            after = f", next {kernel.next[0]} at {kernel.next[1]:.0%} of it" if kernel.next else ""
            lines.append(f"forward on {self.gpu.title}: no faster than {_time(self.prediction.time)}, bound by {kernel.binding}{after} "
                         f"(roofs, tiles of {_BR}×{_BC})")
        return "\n".join(lines)


def explain_problem(problem: AttentionProblem, backend: str = "auto", gpu: GPU | None = None) -> Explanation:
    """Explain `problem`, which needs no tensors and no GPU of its own."""
    reasons = {}
    for name in CAPABILITIES:
        reason = why_not(name, problem)
        if reason is not None:
            reasons[name] = reason
    try:
        chosen = choose(problem, backend)
    except InputError:
        chosen = None
    for name, able in CAPABILITIES.items():
        if name != chosen and name not in reasons:
            on_request = backend != "auto" or problem.device in able.only_named
            reasons[name] = "it could, when named" if on_request else f"{chosen} comes first"
    return Explanation(problem, chosen, {name: reasons[name] for name in CAPABILITIES if name in reasons}, gpu, _predict(problem, gpu))


def _predict(problem: AttentionProblem, gpu: GPU | None) -> Prediction | None:
    if gpu is None or min(problem.batch, problem.heads, problem.seq_q, problem.seq_k, problem.head_dim, problem.head_dim_v) == 0:
        return None
    dtype = "tf32" if problem.tf32 else problem.dtype
    try:
        return predict(fa2(problem.shape, tile_on(gpu, _BR, _BC), Formats(problem.dtype, problem.dtype)), gpu, dtype)
    except InputError:  # the card has no peak for this dtype
        return None


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.3g} µs" if seconds < 1e-3 else f"{seconds * 1e3:.3g} ms"
