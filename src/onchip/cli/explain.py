"""``onchip explain``: which backend an attention call takes, why each other one does not, and what the roofs say of its time."""
from dataclasses import asdict
from typing import Annotated

import typer

from onchip.bench.torch_extra import load_torch
from onchip.cli import options as opt
from onchip.cli.common import JsonOption, console, print_json
from onchip.errors import require
from onchip.roofline.hardware import parse_gpu


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command(name="explain")(explain)


def explain(
    seq: opt.SeqOption = 4096, seq_k: opt.SeqKOption = None, head_dim: opt.HeadDimOption = 128, head_dim_v: opt.HeadDimVOption = None,
    heads: opt.HeadsOption = 16, kv_heads: opt.KvHeadsOption = None, batch: opt.BatchOption = 1, causal: opt.CausalOption = False,
    top_left: opt.TopLeftOption = False, window: opt.WindowOption = None, dtype: opt.DtypeOption = "bf16",
    softcap: opt.SoftcapOption = None, dropout: opt.DropoutOption = 0.0, bias: opt.BiasOption = False, mask: opt.MaskOption = False,
    alibi: opt.AlibiOption = False, sinks: opt.SinksOption = False, varlen: opt.VarlenOption = False,
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

    require(device in ("cuda", "cpu"), "--device", repr(device), "cuda, cpu")
    require(backend in BACKENDS, "--backend", repr(backend), ", ".join(BACKENDS))
    shape = opt.build_shape(seq, seq_k, head_dim, head_dim_v, heads, kv_heads, batch, causal, top_left, window)
    problem = opt.build_problem(shape, dtype, device, softcap, dropout, bias, mask, alibi, sinks, varlen)
    answer = explain_problem(problem, backend, parse_gpu(gpu) if device == "cuda" else None)
    if not as_json:
        console.print(str(answer), markup=False)
        return
    prediction = answer.prediction
    print_json({"problem": asdict(problem), "backend": answer.backend, "reasons": answer.reasons,
                "gpu": answer.gpu.name if answer.gpu else None,
                "predicted_s": prediction.time if prediction else None, "binding": prediction.binding if prediction else None})
