"""The options that describe an attention problem, a tile and a GPU: written once, worded alike in every command."""
import re
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from onchip.errors import InputError, require
from onchip.roofline.attention import Tile
from onchip.roofline.dtypes import parse_dtype
from onchip.roofline.hardware import GPU
from onchip.roofline.roofs import tile_on
from onchip.roofline.shape import AttentionShape

if TYPE_CHECKING:
    from onchip.attention.problem import AttentionProblem

SeqOption = Annotated[int, typer.Option("--seq", help="Sequence length N: queries, and keys unless --seq-k is given.",
                                        rich_help_panel="Problem")]
SeqKOption = Annotated[int | None, typer.Option("--seq-k", help="Keys, where they differ from queries (cross-attention, decode).",
                                                rich_help_panel="Problem", show_default=False)]
HeadDimOption = Annotated[int, typer.Option("--head-dim", help="Head dimension d of Q and K.", rich_help_panel="Problem")]
HeadDimVOption = Annotated[int | None, typer.Option("--head-dim-v", help="Head dimension of V and O, where it differs from d.",
                                                    rich_help_panel="Problem", show_default=False)]
HeadsOption = Annotated[int, typer.Option("--heads", help="Query heads.", rich_help_panel="Problem")]
KvHeadsOption = Annotated[int | None, typer.Option("--kv-heads", help="K/V heads, a divisor of --heads (grouped-query attention).",
                                                   rich_help_panel="Problem", show_default="as --heads")]
BatchOption = Annotated[int, typer.Option("--batch", help="Batch size.", rich_help_panel="Problem")]
CausalOption = Annotated[bool, typer.Option("--causal", help="Query i sees keys up to i + Sk − Sq (bottom-right aligned).",
                                            rich_help_panel="Problem")]
TopLeftOption = Annotated[bool, typer.Option("--top-left", help="Causal, aligned top-left: query i sees keys up to i.",
                                             rich_help_panel="Problem")]
WindowOption = Annotated[str | None, typer.Option("--window", metavar="LEFT,RIGHT", rich_help_panel="Problem", show_default=False,
                                                  help="Keys seen left and right of the query itself, inclusive; empty: no bound.")]
DtypeOption = Annotated[str, typer.Option("--dtype", help="Format of Q, K, V and O: bf16, fp16, fp32, e4m3 …", rich_help_panel="Problem")]
GpuOption = Annotated[str, typer.Option("--gpu", help="A card by name (h200, a100-80gb, rtx-4090 …) or by numbers: "
                                                      "'sms=132,clock_ghz=1.83,dram_gbps=4800,l2_mib=60,bf16_tflops=989'.")]
TileOption = Annotated[str, typer.Option("--tile", metavar="BRxBC", help="Query rows × keys of a tile.")]

_FEATURES = "Features"  # panel of the help page
SoftcapOption = Annotated[float | None, typer.Option("--softcap", help="Cap c of c·tanh(s / c).", rich_help_panel=_FEATURES,
                                                     show_default="none")]
DropoutOption = Annotated[float, typer.Option("--dropout", help="Probability of dropping a weight.", rich_help_panel=_FEATURES)]
BiasOption = Annotated[bool, typer.Option("--bias", help="An additive bias.", rich_help_panel=_FEATURES)]
MaskOption = Annotated[bool, typer.Option("--mask", help="A boolean mask.", rich_help_panel=_FEATURES)]
AlibiOption = Annotated[bool, typer.Option("--alibi", help="ALiBi slopes.", rich_help_panel=_FEATURES)]
SinksOption = Annotated[bool, typer.Option("--sinks", help="Learned sinks.", rich_help_panel=_FEATURES)]
VarlenOption = Annotated[bool, typer.Option("--varlen", help="Packed sequences; --seq is the longest, --batch their number.",
                                            rich_help_panel=_FEATURES)]


def parse_window(text: str | None) -> tuple[int | None, int | None]:
    """``'128,0'`` → (128, 0); ``'128,'`` → (128, None)."""
    if text is None:
        return None, None
    match = re.fullmatch(r"\s*(\d*)\s*,\s*(\d*)\s*", text)
    if not match:
        raise InputError(f"--window: got {text!r}, accepted: LEFT,RIGHT with whole numbers, either may be empty, e.g. 128,0")
    left, right = (int(part) if part else None for part in match.groups())
    return left, right


def parse_tile(text: str, gpu: GPU | None = None) -> Tile:
    """``'128x64'`` → 128 query rows × 64 keys; wgmma's 64-row operands on a GPU that has it."""
    match = re.fullmatch(r"(\d+)[x×](\d+)", text.strip().lower())
    if not match:
        raise InputError(f"--tile: got {text!r}, accepted: ROWSxKEYS, e.g. 128x64")
    br, bc = map(int, match.groups())
    return Tile(br, bc) if gpu is None else tile_on(gpu, br, bc)


def build_shape(seq: int, seq_k: int | None, head_dim: int, head_dim_v: int | None, heads: int, kv_heads: int | None, batch: int,
                causal: bool, top_left: bool, window: str | None) -> AttentionShape:
    """The `AttentionShape` the options describe; `InputError` names the option at fault."""
    sizes = {"--seq": seq, "--seq-k": seq_k, "--head-dim": head_dim, "--head-dim-v": head_dim_v, "--heads": heads,
             "--kv-heads": kv_heads, "--batch": batch}
    for option, value in sizes.items():
        require(value is None or value >= 1, option, value, "a whole number ≥ 1")
    mode = "top-left" if top_left else "bottom-right" if causal else None
    return AttentionShape(seq, seq_k or seq, head_dim, head_dim_v or head_dim, batch, heads, kv_heads or heads, mode, parse_window(window))


def build_problem(shape: AttentionShape, dtype: str, device: str, softcap: float | None, dropout: float, bias: bool, mask: bool,
                  alibi: bool, sinks: bool, varlen: bool) -> "AttentionProblem":
    """The `AttentionProblem` of that shape with those features, which needs torch; `InputError` names the option at fault."""
    from onchip.attention.problem import AttentionProblem

    require(0 <= dropout < 1, "--dropout", dropout, "a probability 0 ≤ p < 1")
    require(softcap is None or softcap > 0, "--softcap", softcap, "a number > 0")
    return AttentionProblem(**asdict(shape), dtype=parse_dtype(dtype), device=device, softcap=softcap, dropout_p=dropout, bias=bias,
                            mask=mask, alibi=alibi, sinks=sinks, varlen=varlen, layout="packed" if varlen else "bhsd")


def describe(shape: AttentionShape, dtype: str, tile: Tile | None = None) -> str:
    """The problem in one line: ``B1 H32/8, N 4096, d 128, bfloat16, causal bottom-right, tile 128×64``."""
    heads = f"H{shape.heads}" + (f"/{shape.kv_heads}" if shape.kv_heads != shape.heads else "")
    lengths = f"N {shape.seq_q}" if shape.seq_q == shape.seq_k else f"Sq {shape.seq_q}, Sk {shape.seq_k}"
    dims = f"d {shape.head_dim}" + (f"/{shape.head_dim_v}" if shape.head_dim_v != shape.head_dim else "")
    parts = [f"B{shape.batch} {heads}", lengths, dims, parse_dtype(dtype)]
    if shape.causal:
        parts.append(f"causal {shape.causal}")
    if shape.window != (None, None):
        parts.append("window " + ",".join("∞" if width is None else str(width) for width in shape.window))
    return ", ".join(parts if tile is None else [*parts, f"tile {tile.br}×{tile.bc}"])


def notes(card: GPU) -> list[str]:
    """What the reader should know about the card's figures."""
    lines = [f"Figures of the {card.title}: {card.source}."]
    if card.assumed:
        lines.append(f"Carried over from a relative, not documented for this card: {', '.join(card.assumed)}.")
    if card.l2_rate is None:
        lines.append("No public figure for its L2 bandwidth: the L2 roof is left out.")
    return lines
