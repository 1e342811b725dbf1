"""Speed against peers, from the benchmarks' own files: pictures over the sequence length, and every cell in a table."""
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from onchip.report import charts, html
from onchip.report.charts import Series
from onchip.report.html import Cell, finite
from onchip.report.results import File, short

PEERS = {"onchip": "onchip", "fa4": "FlashAttention-4", "cudnn": "cuDNN", "fa2": "FlashAttention-2 (SDPA)",
         "efficient": "memory-efficient (SDPA)", "torch": "torch", "quack": "quack", "copy": "copy"}


def names(rates: Iterable[Mapping[str, Any]]) -> list[str]:
    """Every contender, ours first, the rest in a fixed order."""
    found = {name for rate in rates for name in rate}
    return [name for name in PEERS if name in found] + sorted(found - PEERS.keys())


def best_ratio(rates: Mapping[str, float]) -> float | None:
    """Ours over the fastest peer's; None without a peer."""
    peers = [rate for name, rate in rates.items() if name not in ("onchip", "copy")]
    return rates["onchip"] / max(peers) if peers and "onchip" in rates else None


def _rates(contenders: Sequence[str], rates: Mapping[str, float], digits: int = 0) -> list[Cell | str | None]:
    return [html.number(rates.get(name), f"{rates.get(name, 0):.{digits}f}") for name in contenders]


def _series(contenders: Sequence[str], points: Mapping[float, Mapping[str, float]]) -> list[Series]:
    """One line a contender over the lengths it ran at."""
    every = [name for name in PEERS if name != "copy"]
    lines = []
    for name in contenders:
        style = "limit" if name == "copy" else f"s{every.index(name)}" if name in every else "s6"
        along = tuple((x, rates[name]) for x, rates in sorted(points.items()) if finite(rates.get(name)))
        if along:
            lines.append(Series(PEERS.get(name, name), style, along))
    return lines


def _pictures(parts: Iterable[str]) -> str:
    return f'<div class="grid">{"".join(parts)}</div>'


def facets(cells: Iterable[Mapping[str, Any]]) -> dict[tuple[Any, ...], dict[float, Mapping[str, float]]]:
    """(d, dv, causal, dtype) → S → rates, of dense cells with as many K/V heads as query heads, at the B·S that has most lengths."""
    by_tokens: dict[tuple[Any, ...], dict[int, dict[float, Mapping[str, float]]]] = {}
    for c in cells:
        if not c["lengths"] and c["window"] is None and c["hq"] == c["hkv"] and not c.get("worst"):
            key = c["d"], c["dv"], c["causal"], c["dtype"]
            by_tokens.setdefault(key, {}).setdefault(c["b"] * c["s"], {})[float(c["s"])] = c["tflops"]
    best = {key: max(sizes.items(), key=lambda item: (len(item[1]), item[0])) for key, sizes in by_tokens.items()}
    return {(*key, tokens): points for key, (tokens, points) in best.items() if len(points) > 1}


def forward_section(files: Sequence[File]) -> str:
    """Attention forward against every peer that ran."""
    parts = []
    for number, (file, data) in enumerate(files):
        cells, machine = data["cells"], data["machine"]
        contenders = names(c["tflops"] for c in cells)
        parts.append(html.text(f"{file}: {_machine(machine)}. TFLOP/s of the visible pairs' matmuls; all contenders of a cell in one run, "
                               "in turn, after their results were checked against float64."))
        figures = []
        for i, ((d, dv, causal, dtype, tokens), points) in enumerate(facets(cells).items()):
            series = _series(contenders, points)
            title = f"d = {d}{f', dv = {dv}' * (dv != d)}, {'causal' if causal else 'full'}, {short(dtype)}"
            svg = charts.lines(f"forward{number}-{i}", f"Attention forward, {title}", series, f"S, at B·S = {tokens}", "TFLOP/s")
            figures.append(html.figure(svg, title, html.keys(series)))
        parts.append(_pictures(figures))
        rows: list[html.Row] = [(c["case"], [*_rates(contenders, c["tflops"]), html.times(best_ratio(c["tflops"])),
                                             html.number(c["error"]["onchip"], f"{c['error']['onchip']:.2e}"),
                                             "; ".join(f"{PEERS.get(k, k)}: {v}" for k, v in c["refused"].items())]) for c in cells]
        table = html.table(f"Attention forward, TFLOP/s ({file})", "case", (*(PEERS.get(n, n) for n in contenders), "over the best peer",
                                                                  "our error", "did not run"), rows)
        parts.append(html.fold(f"All {len(cells)} cells", [table], opened=False))
    return html.section("forward", "Attention forward against its peers", parts)


def triton_section(files: Sequence[File]) -> str:
    """Attention's Triton kernels, forward and backward."""
    parts = []
    for file, data in files:
        parts.append(html.text(f"{file}: {data['device']}, torch {data['torch']}, triton {data['triton']}. TFLOP/s; shapes are (batch, "
                               "heads, seq, head dim); a bar is the ratio that was asked for."))
        groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
        for r in data["rows"]:
            groups.setdefault((r["direction"], r["dtype"]), []).append(r)
        for (direction, dtype), found in sorted(groups.items(), key=lambda item: item[0][1]):
            contenders = names(r["tflops"] for r in found)
            rows: list[html.Row] = [(f"({', '.join(map(str, r['shape']))}) {'causal' if r['causal'] else 'full'}", [
                *_rates(contenders, r["tflops"]), html.times(r["ratio"]), html.times(r["bar"], 1)]) for r in found]
            parts.append(html.table(f"{direction}, {short(dtype)}", "case", (*(PEERS.get(n, n) for n in contenders), "ratio", "bar"), rows))
        packed: list[html.Row] = [
            (f"{r['direction']}, {len(r['lengths'])} sequences, {'causal' if r['causal'] else 'full'}",
             [*(html.number(r["tflops"][n], f"{r['tflops'][n]:.0f}") for n in ("packed", "equal")), html.times(r["ratio"]),
              html.times(r["bar"], 1)]) for r in data["packed"]]
        parts.append(html.table("Packed sequences against as many of equal length, TFLOP/s", "case",
                                ("packed", "equal", "ratio", "bar"), packed) if packed else "")
    return html.section("triton", "Attention in Triton", parts)


def softmax_rates(rows: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], dict[float, dict[str, float]]]:
    """(pass, dtype) → N → name → TB/s."""
    found: dict[tuple[str, str], dict[float, dict[str, float]]] = {}
    for r in rows:
        found.setdefault((r["pass"], r["dtype"]), {}).setdefault(float(r["n"]), {})[r["name"]] = r["tb_per_s"]
    return found


def softmax_section(files: Sequence[File]) -> str:
    """Softmax against the copy that bounds it; the pictures keep to powers of two, the tables have every length."""
    parts = []
    for number, (file, data) in enumerate(files):
        parts.append(html.text(f"{file}: {data['device']}. TB/s of compulsory bytes: forward one read and one write, backward two and one. "
                               "Dashed: a copy."))
        figures, tables = [], []
        for i, ((way, dtype), points) in enumerate(softmax_rates(data["results"]).items()):
            contenders, title = names(points.values()), f"{way}, {short(dtype)}"
            even = {n: rates for n, rates in points.items() if n.is_integer() and int(n) & (int(n) - 1) == 0}
            if len(even) > 1:
                series = _series(contenders, even)
                svg = charts.lines(f"softmax{number}-{i}", f"Softmax {title}", series, "N, elements of a row", "TB/s")
                figures.append(html.figure(svg, title, html.keys(series)))
            rows: list[html.Row] = [(f"N = {n:.0f}", [*_rates(contenders, rates, 2), html.times(best_ratio(rates))])
                                    for n, rates in sorted(points.items())]
            headings = (*(PEERS.get(n, n) for n in contenders), "over the best peer")
            tables.append(html.table(f"Softmax {title}, TB/s ({file})", "row", headings, rows))
        parts += [_pictures(figures), html.fold("All figures", [*tables, *_others(file, data.get("others", ()))], opened=False)]
    return html.section("softmax", "Softmax against a copy", parts)


def _others(file: str, rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """What is measured beside whole rows by length: selections, sums, masks, small calls. A table each, in TB/s; small calls in µs."""
    groups: dict[tuple[str, str], dict[str, dict[str, Mapping[str, Any]]]] = {}
    for r in rows:
        size = " × ".join(map(str, r["shape"] if "shape" in r else (r["rows"], r["n"]))) + (f", k = {r['k']}" if "k" in r else "")
        groups.setdefault((r["pass"], r["dtype"]), {}).setdefault(size, {})[r["name"]] = r
    tables = []
    for (what, dtype), sizes in groups.items():
        small = what == "small"  # whose rates are too small to be kept
        key, unit, digits = ("us", "µs", 1) if small else ("tb_per_s", "TB/s", 2)
        contenders = names(sizes.values())
        found: list[html.Row] = [
            (size, [*_rates(contenders, {n: r[key] for n, r in by_name.items()}, digits),
                    html.times(best_ratio({n: 1 / r["us"] if small else r["tb_per_s"] for n, r in by_name.items()}))])
            for size, by_name in sizes.items()]
        headings = (*(PEERS.get(n, n) for n in contenders), "over the best peer")
        tables.append(html.table(f"{what}, {short(dtype)}, {unit} ({file})", "size", headings, found))
    return tables


def _machine(machine: Mapping[str, Any]) -> str:
    return ", ".join(str(value) if key == "gpu" else f"{key} {value}" for key, value in machine.items() if value)
