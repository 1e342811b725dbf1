"""Which backend a call takes, why each other one does not run, and what the roofs say of its time."""
from dataclasses import dataclass, replace

from onchip.attention.dispatch import CAPABILITIES, choose, why_not
from onchip.attention.hopper import tiles as hopper
from onchip.attention.problem import FEATURES, AttentionProblem
from onchip.errors import InputError
from onchip.roofline.attention import Formats, fa2, split_kv
from onchip.roofline.dtypes import BYTES
from onchip.roofline.hardware import GPU
from onchip.roofline.roofs import Prediction, predict, tile_on

_TILE = (128, 64)  # what the prediction is made for where the backend has no tiles of its own: a usual one of FlashAttention-2


@dataclass(frozen=True)
class Explanation:
    """The answer of `onchip.explain`; `str()` gives it as text."""

    problem: AttentionProblem
    backend: str | None  # what runs; None when the named backend cannot
    reasons: dict[str, str]  # backend → why it does not run
    gpu: GPU | None
    tile: tuple[int, int] | None  # query rows × keys that the backend's forward meets at a time on `gpu`; None without a prediction
    prediction: Prediction | None  # of a FlashAttention-2 forward with this tile on `gpu`; None where it is not known
    parts: int = 1  # in which the backend's forward meets each tile's keys on `gpu`, merged by a second kernel; the prediction counts both

    def __str__(self) -> str:
        p = self.problem
        sizes = f"batch {p.batch}, heads {p.heads}/{p.kv_heads}, seq {p.seq_q}×{p.seq_k}, dim {p.head_dim}/{p.head_dim_v}"
        asked = ", ".join(FEATURES[name] for name in p.features) or "nothing beyond plain attention"
        lines = [f"attention: {sizes}, {p.dtype} on {p.device}, {p.layout}", f"asks for: {asked}", f"runs on:  {self.backend or 'nothing'}"]
        lines += [f"  not {name}: {reason}" for name, reason in self.reasons.items()]
        if self.gpu is not None and self.tile is not None and self.prediction is not None:
            kernel = self.prediction.slowest
            after = f", next {kernel.next[0]} at {kernel.next[1]:.0%} of it" if kernel.next else ""
            split = f", keys in {self.parts} parts" if self.parts > 1 else ""
            lines.append(f"forward on {self.gpu.title}: no faster than {_time(self.prediction.time)}, bound by {kernel.binding}{after} "
                         f"(roofs, tiles of {self.tile[0]}×{self.tile[1]}{split})")
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
    others = {name: reasons[name] for name in CAPABILITIES if name in reasons}
    return Explanation(problem, chosen, others, gpu, *_predict(problem, chosen, gpu))


def forward_cut(problem: AttentionProblem, gpu: GPU) -> tuple[int, hopper.Tile, int]:
    """(query heads taken for one, tile, parts of a tile's keys) with which the Hopper backend would run the forward on `gpu`."""
    if problem.varlen:
        return 1, hopper.forward(problem.head_dim, problem.head_dim_v, problem.seq_q, problem.spec.window_right >= 0), 1
    from onchip.attention.hopper.split import cut  # Triton is imported where it can run

    joined = (problem.layout == "bhsd" or problem.seq_q == 1) and not problem.sinks
    return cut((problem.batch, problem.heads, problem.seq_q, problem.head_dim), problem.kv_heads, problem.head_dim_v, problem.spec, gpu.sms,
               joined=joined)


def forward_tile(problem: AttentionProblem, backend: str | None, gpu: GPU) -> tuple[int, int]:
    """(query rows, keys) of the tile with which `backend` would run the forward on `gpu`."""
    if backend == "hopper":
        _, tile, _ = forward_cut(problem, gpu)
        return tile.rows, tile.keys
    if backend == "triton":
        from onchip.attention.triton import launch, tiles  # Triton is imported where it can run

        unit = 16 // BYTES[problem.dtype]  # a descriptor's strides are multiples of 16 bytes
        described = problem.head_dim % unit == problem.head_dim_v % unit == 0 and launch.accelerates(
            gpu.capability or (0, 0), BYTES[problem.dtype], problem.batch * problem.heads * problem.seq_q * problem.seq_k)
        extra = problem.bias or problem.mask or problem.alibi or problem.softcap is not None or problem.dropout_p > 0
        tile = tiles.pick("forward", gpu.smem_per_block, BYTES[problem.dtype], launch.block(max(problem.head_dim, problem.head_dim_v)),
                          extra, described)
        return tile.bm, tile.bn
    return _TILE


def _predict(problem: AttentionProblem, backend: str | None, gpu: GPU | None) -> tuple[tuple[int, int] | None, Prediction | None, int]:
    """(tile, prediction, parts); none where nothing runs or the card is not known."""
    if backend is None or gpu is None:
        return None, None, 1
    if min(problem.batch, problem.heads, problem.seq_q, problem.seq_k, problem.head_dim, problem.head_dim_v) == 0:
        return None, None, 1
    dtype = "tf32" if problem.tf32 else problem.dtype
    tile = forward_tile(problem, backend, gpu)
    group, _, parts = forward_cut(problem, gpu) if backend == "hopper" else (1, tile, 1)
    formats = Formats(problem.dtype, problem.dtype)
    try:
        if parts > 1:
            schedule = split_kv(problem.shape, tile_on(gpu, *tile), parts, formats, pack_gqa=group > 1)
        else:
            schedule = fa2(problem.shape.packed() if group > 1 else problem.shape, tile_on(gpu, *tile), formats)
        return tile, predict(schedule, _as_used(gpu, problem, backend), dtype), parts
    except InputError:  # the card has no peak for this dtype
        return None, None, 1


def _as_used(gpu: GPU, problem: AttentionProblem, backend: str) -> GPU:
    """`gpu` with the peak of the products the backend makes: Triton's of fp32 are six of bf16, where the head is narrow enough."""
    if backend != "triton" or problem.dtype != "float32" or problem.tf32 or "bfloat16" not in gpu.matmul_tflops:
        return gpu
    from onchip.attention.triton.launch import SPLIT_DIM  # Triton is imported where it can run

    if (gpu.capability or (0, 0)) < (8, 0) or max(problem.head_dim, problem.head_dim_v) > SPLIT_DIM:
        return gpu
    return replace(gpu, matmul_tflops={**gpu.matmul_tflops, "float32": gpu.matmul_tflops["bfloat16"] / 6})


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.3g} µs" if seconds < 1e-3 else f"{seconds * 1e3:.3g} ms"
