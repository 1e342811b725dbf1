"""``onchip explain``: which backend an attention call takes, why each other one does not, and what the roofs say of its time."""
from dataclasses import asdict
from typing import Annotated

import typer

from onchip.bench.torch_extra import load_torch
from onchip.cli import options as opt
from onchip.cli.common import JsonOption, console, print_json
from onchip.errors import require
from onchip.roofline.dtypes import parse_dtype
from onchip.roofline.hardware import parse_gpu

FEATURES = "Features"  # panel of the help page


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command(name="explain")(explain)


def explain(
    seq: opt.SeqOption = 4096, seq_k: opt.SeqKOption = None, head_dim: opt.HeadDimOption = 128, head_dim_v: opt.HeadDimVOption = None,
    heads: opt.HeadsOption = 16, kv_heads: opt.KvHeadsOption = None, batch: opt.BatchOption = 1, causal: opt.CausalOption = False,
    top_left: opt.TopLeftOption = False, window: opt.WindowOption = None, dtype: opt.DtypeOption = "bf16",
    softcap: Annotated[float | None, typer.Option("--softcap", help="Cap c of c·tanh(s / c).", rich_help_panel=FEATURES,
                                                  show_default="none")] = None,
    dropout: Annotated[float, typer.Option("--dropout", help="Probability of dropping a weight.", rich_help_panel=FEATURES)] = 0.0,
    bias: Annotated[bool, typer.Option("--bias", help="An additive bias.", rich_help_panel=FEATURES)] = False,
    mask: Annotated[bool, typer.Option("--mask", help="A boolean mask.", rich_help_panel=FEATURES)] = False,
    alibi: Annotated[bool, typer.Option("--alibi", help="ALiBi slopes.", rich_help_panel=FEATURES)] = False,
    sinks: Annotated[bool, typer.Option("--sinks", help="Learned sinks.", rich_help_panel=FEATURES)] = False,
    varlen: Annotated[bool, typer.Option("--varlen", help="Packed sequences; --seq is the longest, --batch their number.",
                                         rich_help_panel=FEATURES)] = False,
    device: Annotated[str, typer.Option("--device", help="Where the tensors are: cuda or cpu.")] = "cuda",
    backend: Annotated[str, typer.Option("--backend", help="auto, or the backend you would name.")] = "auto",
    gpu: opt.GpuOption = "h200", as_json: JsonOption = False,
) -> None:
    """Say what `onchip.attention` would do with a call like this, without making it.

    Named are the backend that runs, the reason why each other one does not, and the time below which no kernel can get on the card, with
    the roof that binds. From Python, `onchip.explain(q, k, v, …)` says the same of real tensors.

    Examples:

    - `onchip explain --seq 8192 --causal`
    - `onchip explain --head-dim 320 --dtype fp32 --bias` asks about an unusual call.
    - `onchip explain --device cpu --dtype fp32 --seq 2048 --window 256,0`
    - `onchip explain --varlen --batch 16 --seq 2048 --json`
    """
    load_torch("onchip explain")
    from onchip.attention.dispatch import BACKENDS
    from onchip.attention.explain import explain_problem
    from onchip.attention.problem import AttentionProblem

    require(device in ("cuda", "cpu"), "--device", repr(device), "cuda, cpu")
    require(backend in BACKENDS, "--backend", repr(backend), ", ".join(BACKENDS))
    require(0 <= dropout < 1, "--dropout", dropout, "a probability 0 ≤ p < 1")
    require(softcap is None or softcap > 0, "--softcap", softcap, "a number > 0")
    shape = opt.build_shape(seq, seq_k, head_dim, head_dim_v, heads, kv_heads, batch, causal, top_left, window)
    problem = AttentionProblem(**asdict(shape), dtype=parse_dtype(dtype), device=device, softcap=softcap, dropout_p=dropout, bias=bias,
                               mask=mask, alibi=alibi, sinks=sinks, varlen=varlen, layout="packed" if varlen else "bhsd")
    answer = explain_problem(problem, backend, parse_gpu(gpu) if device == "cuda" else None)
    if not as_json:
        console.print(str(answer), markup=False)
        return
    prediction = answer.prediction
    print_json({"problem": asdict(problem), "backend": answer.backend, "reasons": answer.reasons,
                "gpu": answer.gpu.name if answer.gpu else None,
                "predicted_s": prediction.time if prediction else None, "binding": prediction.binding if prediction else None})
