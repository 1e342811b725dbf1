"""Markdown tables of the committed results, for `benchmarks/docs.py`: speed beside peers, and the ladder as it was measured."""
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from onchip.cli.common import human_bytes, human_time
from onchip.report.gaps import explain, ratio
from onchip.report.results import Climb, Step, read_results, short
from onchip.report.speed import PEERS, best_ratio, facets, softmax_rates
from onchip.roofline.shape import AttentionShape, walk

RESULTS = Path(__file__).parent / "results" / "h200"
LADDER = RESULTS / "ladder.json"


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (headings, ["---"] * len(headings), *rows))


def against(rates: Mapping[str, float], digits: int = 0) -> str:
    """'697 (1.07x)': ours, and its ratio to the fastest peer of the same run."""
    best = best_ratio(rates)
    return f"{rates['onchip']:.{digits}f}" + ("" if best is None else f" ({best:.2f}x)")


def forward(file: Path = RESULTS / "attention_forward.json") -> str:
    """Attention forward by sequence length: a column each head dim and mask."""
    data = json.loads(file.read_text())
    columns = sorted((key, points) for key, points in facets(data["cells"]).items() if key[3] == "bfloat16" and key[0] == key[1])
    lengths = sorted({s for _, points in columns for s in points})
    rows = [[f"{s:.0f}", *(against(points[s]) if s in points else "–" for _, points in columns)] for s in lengths]
    peers = [PEERS.get(n, n) for n in PEERS if any(n in c["tflops"] for c in data["cells"]) and n != "onchip"]
    machine = data["machine"]
    tokens = sorted({key[-1] for key, _ in columns})
    return table(["S", *(f"d {d} {'causal' if causal else 'full'}" for (d, _, causal, _, _), _ in columns)], rows) + (
        f"\n\n*TFLOP/s, bf16, B·S = {', '.join(f'{t:,}' for t in tokens)}, heads × d = 2048; in brackets the ratio to the best of "
        f"{', '.join(peers)} in the same run. {machine['gpu']}, torch {machine['torch']}, Triton {machine['triton']}; which "
        "version of the kernel: [docs/notes/hopper-forward.md](docs/notes/hopper-forward.md).*")


def triton(file: Path = RESULTS / "attention_triton.json") -> str:
    """The portable kernels by shape: forward and backward, full and causal."""
    data = json.loads(file.read_text())
    found: dict[tuple[str, tuple[int, ...]], dict[tuple[str, bool], Mapping[str, float]]] = {}
    for r in data["rows"]:
        found.setdefault((short(r["dtype"]), tuple(r["shape"])), {})[r["direction"], r["causal"]] = r["tflops"]
    columns = [(direction, causal) for direction in ("forward", "backward") for causal in (False, True)]
    rows = [[f"{dtype} ({', '.join(map(str, size))})", *(against(cells[c]) if c in cells else "–" for c in columns)]
            for (dtype, size), cells in found.items()]
    return table(["(batch, heads, seq, dim)", *(f"{way} {'causal' if causal else 'full'}" for way, causal in columns)], rows) + (
        "\n\n*TFLOP/s of `backend=\"triton\"`; in brackets the ratio to SDPA's FlashAttention-2 kernel (fp32: its memory-efficient one) "
        f"in the same run. {data['device']}, torch {data['torch']}, Triton {data['triton']}.*")


def softmax(file: Path = RESULTS / "softmax.json") -> str:
    """Softmax by row length in bf16, beside what a copy reaches."""
    data = json.loads(file.read_text())
    return _softmax(data, [r for r in data["results"] if r["n"] >= 1024 and r["n"] & (r["n"] - 1) == 0])


def across(file: Path = RESULTS / "softmax.json") -> str:
    """The same over dim 0 of a matrix, whose elements do not lie side by side."""
    data = json.loads(file.read_text())
    return _softmax(data, [r for r in data["others"] if r["section"] == "across"])


def _softmax(data: Mapping[str, Any], results: list[Mapping[str, Any]]) -> str:
    rates = {way: softmax_rates(results)[way, "bfloat16"] for way in ("forward", "backward")}
    present = {way: [n for n in PEERS if any(n in r for r in points.values())] for way, points in rates.items()}
    columns = [(way, name) for way in rates for name in present[way]]
    rows = [[f"{n:.0f}", *(f"{rates[way].get(n, {})[name]:.2f}" if name in rates[way].get(n, {}) else "–" for way, name in columns)]
            for n in sorted(rates["forward"])]
    versions = ", ".join(f"{name} {version}" for name, version in data["versions"].items() if version)
    return table(["N", *(f"{way}: {PEERS[name]}" for way, name in columns)], rows) + (
        "\n\n*TB/s of compulsory bytes (forward one read and one write, backward two and one), bf16, data out of L2. "
        f"{data['device']}, {versions}.*")


def causal(file: Path = RESULTS / "attention_forward.json") -> str:
    """What a causal mask saves at d = 128: tiles by count, time as measured."""
    cells = [c for c in json.loads(file.read_text())["cells"] if (c["d"], c["dv"], c["dtype"]) == (128, 128, "bfloat16") and
             c["hq"] == c["hkv"] and c["window"] is None and not c["lengths"] and not c.get("worst")]
    times = {(c["b"] * c["s"], c["s"], c["causal"]): c["seconds"] for c in cells}
    tokens = max(n for n, _, _ in times if sum((n, s, True) in times for _, s, _ in times) > 2)
    names = [n for n in PEERS if any(n in seconds for seconds in times.values())]
    rows = []
    for s in sorted({s for n, s, _ in times if n == tokens}):
        full, masked = times[tokens, s, False], times[tokens, s, True]
        shape = AttentionShape.square(s, 128, causal="bottom-right")
        shares = (f"{masked[n] / full[n]:.1%}" if n in masked and n in full else "–" for n in names)
        rows.append([str(s), f"{walk(shape, 128, 128).area / s**2:.1%}", *shares])
    return table(["N", "scores computed", *(f"{PEERS[n]}: time" for n in names)], rows)


def backward(file: Path = RESULTS / "attention_triton.json") -> str:
    """The Triton backward at the longest shape, and its memory."""
    data = json.loads(file.read_text())
    found = [r for r in data["rows"] if (r["direction"], r["dtype"]) == ("backward", "bfloat16")]
    longest = max(r["shape"][2] for r in found)
    rows = [[f"({', '.join(map(str, r['shape']))}) {'causal' if r['causal'] else 'full'}", human_time(r["seconds"]["onchip"]),
             against(r["tflops"])] for r in found if r["shape"][2] == longest]
    memory = ", ".join(f"{human_bytes(m['backward'])} at N = {m['seq']}" for m in data["memory"])
    return table(["(batch, heads, seq, dim)", "backward", "TFLOP/s (over SDPA's FlashAttention-2)"], rows) + (
        f"\n\nMemory beyond inputs and outputs: {memory}.")


def measured(file: Path = LADDER) -> str:
    """The ladder of the card, problem by problem; says so where it was not measured."""
    if not file.is_file():
        return (f"Not measured yet. On a GPU, `python benchmarks/ladder_gpu.py --json benchmarks/results/h200/{file.name}` writes what "
                "belongs here.")
    return "\n\n".join(problem(climb) for climb in read_results([file]).ladders)


def crossing(file: Path = LADDER) -> str:
    """From issued bytes to the counters around the L2, on the first problem and the first backward that were counted."""
    if not file.is_file():
        return "Not measured yet."
    counted = [climb for climb in read_results([file]).ladders if any(s.sm_bytes for s in climb.steps)]
    shown = [next((c for c in counted if c.backward is backward), None) for backward in (False, True)]
    rows = []
    for climb in filter(None, shown):
        for s in climb.steps:
            if s.issued and s.sm_bytes and s.l2_bytes:
                own, shared = (sum(getattr(x, name) for x in s.expected) for name in ("l2_own", "l2_shared"))
                merged = "–" if s.merged is None else f"{s.merged:.1f}"
                rows.append([s.title, human_bytes(s.issued), human_bytes(s.sm_bytes), f"{s.sm_bytes / s.issued:.2f}x",
                             human_bytes(s.l2_bytes), human_bytes(own), human_bytes(shared), merged])
    headings = ("rung", "issued", "crossed", "ratio", "looked up", "of it: own", "shared, before merging", "merged into one")
    names = "; ".join(climb.name for climb in shown if climb)
    return f"{table(headings, rows)}\n\n*{names}.*" if rows else "Not counted yet."


def incident(file: Path = LADDER) -> str:
    """Naive against fused as N grows: time, memory beyond q, k and v, and what is busy; and where memory ends."""
    grown = read_results([file]).incidents if file.is_file() else []
    if not grown:
        return "Not measured yet."
    shown = ("naive", "hopper")
    titles = {s.key: s.title for climb in grown[0] for s in climb.steps}
    rows, ends = [], []
    for climb in grown[0]:
        steps = {s.key: s for s in climb.steps}
        first, second = (steps.get(key) for key in shown)
        cells = [cell for step in (first, second) for cell in (
            ("–",) * 3 if step is None or step.measured is None else
            (human_time(step.measured), human_bytes(step.peak_bytes or 0), _busy(step, climb)))]
        faster = f"{first.measured / second.measured:.1f}x" if first and second and first.measured and second.measured else "–"
        rows.append([str(climb.shape.seq_q), *cells, faster])
        ends += [f"N = {climb.shape.seq_q}: {titles.get(key, key)} was not run: {reason}." for key, reason in climb.skipped.items()
                 if key == shown[0]]
    headings = ["N", *(f"{titles.get(key, key)}: {what}" for key in shown for what in ("time", "memory", "DRAM, tensor pipe")), "faster"]
    job = grown[0][0]
    return "\n\n".join([table(headings, rows), *ends, f"*{job.device}, {job.shape.query_heads} heads, d = {job.shape.head_dim}, "
                         f"{short(job.dtype)}, full. Memory: most bytes alive beyond q, k and v.*"])


def _busy(step: Step, climb: Climb) -> str:
    """Shares of the copy rate and of the tensor pipe; a dash where they were not counted."""
    if step.dram_counted is None or step.tensor_pipe is None or climb.roof is None or not step.measured:
        return "–"
    return f"{step.dram_counted / step.measured / climb.roof.bandwidth:.0%}, {step.tensor_pipe:.0f} %"


def problem(climb: Climb) -> str:
    """One problem: time and DRAM bytes predicted and found, and why where they part."""
    def cell(value: float | None, show: Any) -> str:
        return "–" if value is None else show(value)

    def times(value: float | None) -> str:
        return cell(value, lambda x: f"{x:.2f}x")

    rows = [[s.title, s.roof or "–", cell(s.predicted, human_time), cell(s.measured, human_time), times(ratio(s.measured, s.predicted)),
             times(ratio(climb.steps[0].measured, s.measured)), cell(s.dram_predicted, human_bytes), cell(s.dram_counted, human_bytes),
             times(ratio(s.dram_counted, s.dram_predicted)), cell(s.tensor_pipe, lambda x: f"{x:.0f} %"), explain(s, climb)]
            for s in climb.steps]
    headings = ("rung", "roof", "predicted", "measured", "ratio", "speed-up", "DRAM predicted", "counted", "ratio", "tensor pipe",
                "gap over 10 %")
    skipped = "".join(f"\n\n{key} was not run: {reason}." for key, reason in climb.skipped.items())
    return f"**{climb.device}, {climb.name}**\n\n{table(headings, rows)}{skipped}"
