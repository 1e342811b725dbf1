"""The cells of the forward's benchmark (`attention_forward.py`): problems, who can run them, and their exact results."""
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise, product

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from onchip.attention.contract import Spec
from onchip.attention.hopper import launch
from onchip.roofline.shape import AttentionShape

WIDTH = 2048  # heads · head dim
SCORES = 1 << 27  # float64 scores in flight while the truth is worked out: 1 GB
LONG = 131072


@dataclass(frozen=True)
class Case:
    """One problem. `lengths` makes it a packed batch, and b, s of no account. `keys`: so many instead of s, few rows meet many keys and
    onchip splits them; it runs unsplit too. `worst`: scores rise from the last key to the first by more
    than the anchored softmax can hold, so that every tile with more than its diagonal is computed twice."""

    b: int
    s: int
    hq: int
    hkv: int
    d: int
    dv: int
    causal: bool = False
    window: int | None = None
    dtype: str = "bfloat16"
    lengths: tuple[int, ...] = ()
    worst: bool = False
    keys: int = 0

    @property
    def name(self) -> str:
        """The case in a few words."""
        size = f"packed {len(self.lengths)} sequences" if self.lengths else f"b{self.b} s{self.s}" + f"/{self.keys}" * bool(self.keys)
        heads = f"h{self.hq}" if self.hq == self.hkv else f"h{self.hq}/{self.hkv}"
        width = f"d{self.d}" if self.d == self.dv else f"d{self.d}/{self.dv}"
        return " ".join([size, heads, width, "causal" if self.causal else "full"] + [f"window{self.window}"] * bool(self.window)
                        + ["fp16"] * (self.dtype == "float16") + ["worst"] * self.worst + ["split"] * bool(self.keys))

    @property
    def flops(self) -> int:
        """Of the two matmuls, visible pairs only."""
        def pairs(s: int) -> int:
            causal = "bottom-right" if self.causal else None
            return AttentionShape(s, self.keys or s, 1, 1, causal=causal, window=(self.window, None)).pairs()

        total = sum(map(pairs, self.lengths)) if self.lengths else self.b * pairs(self.s)
        return 2 * total * self.hq * (self.d + self.dv)


def grid(tokens: list[int]) -> list[Case]:
    """The cells the project answers for; then the longest, and what a repeat of every tile costs."""
    cases = []
    for n, d, s, causal in product(tokens, (64, 128, 256), (512, 1024, 2048, 4096, 8192, 16384, 32768), (False, True)):
        if s <= n:
            cases.append(Case(n // s, s, WIDTH // d, WIDTH // d, d, d, causal))
    n = max(tokens)
    for causal in (False, True):
        cases += [Case(n // 8192, 8192, 32, 8, 128, 128, causal), Case(n // 8192, 8192, 16, 16, 96, 96, causal),
                  Case(n // 8192, 8192, 16, 16, 192, 128, causal), Case(n // 8192, 8192, 8, 8, 192, 192, causal),
                  Case(n // 8192, 8192, 16, 16, 128, 128, causal, dtype="float16")]
        lengths = [round(100 * 80 ** (i / 15)) for i in range(16)]  # 100 … 8000, log-spaced, mean near 2K
        cases.append(Case(0, 0, 16, 16, 128, 128, causal, lengths=tuple(lengths)))
    cases.append(Case(max(1, n // 16384), 16384, 16, 16, 128, 128, True, window=1024))
    for causal in (False, True):
        cases += [Case(1, LONG, 8, 8, 128, 128, causal), Case(n // 4096, 4096, 16, 16, 128, 128, causal, worst=True)]
    few = ((1, 128, 16, 16, 8192), (1, 1, 32, 8, 65536), (8, 1, 32, 8, 8192), (4, 16, 32, 8, 4096), (1, 1024, 4, 4, 16384))
    return cases + [Case(b, s, hq, hkv, 128, 128, keys=keys) for b, s, hq, hkv, keys in few]


def chosen(cases: list[Case], words: list[str]) -> list[Case]:
    """Cells whose names have all of `words`, where "a,b" is a or b; a whole name is that cell alone."""
    found = [case for case in cases if all(set(word.split(",")) & set(case.name.split()) for word in words)]
    return [case for case in found if case.name.split() == words] or found


def inputs(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """q, k, v as (B, S, H, D) or packed (total, H, D) in memory, the layout all contenders read without a copy; offsets if packed."""
    lead = ((sum(case.lengths),),) * 3 if case.lengths else ((case.b, case.s), *((case.b, case.keys or case.s),) * 2)
    generator = torch.Generator("cuda").manual_seed(case.s + case.d)
    q, k, v = (torch.randn(*first, h, d, device="cuda", dtype=getattr(torch, case.dtype), generator=generator)
               for first, h, d in zip(lead, (case.hq, case.hkv, case.hkv), (case.d, case.d, case.dv), strict=True))
    if case.worst:  # scores fall by one unit of log₂ a key: 128 and more over a block, and a sum may not pass 2^100
        q = q * 0.1 + 1
        k = k - torch.arange(case.s, device="cuda")[:, None, None] / (math.log2(math.e) * math.sqrt(case.d))
        q, k = q.to(v.dtype), k.to(v.dtype)
    cu = torch.tensor([0, *torch.tensor(case.lengths).cumsum(0)], device="cuda", dtype=torch.int32) if case.lengths else None
    return q, k, v, cu


def contenders(case: Case, q: Tensor, k: Tensor, v: Tensor, cu: Tensor | None) -> dict[str, Callable[[], Tensor]]:
    """What can run the case."""
    longest = max(case.lengths, default=case.s)
    spec = Spec(int(case.causal), -1 if case.window is None else case.window, 0 if case.causal else -1, case.d**-0.5, 0.0, 0.0, longest,
                case.keys or longest, False, False)
    qt, kt, vt = (q, k, v) if case.lengths else (x.transpose(1, 2) for x in (q, k, v))
    runs: dict[str, Callable[[], Tensor]] = {}
    if cu is not None:
        runs["onchip"] = lambda: launch.run(q, k, v, None, cu, cu, spec)[0]
    else:
        runs["onchip"] = lambda: launch.run(qt, kt, vt, None, None, None, spec)[0].transpose(1, 2)
        if case.keys:
            runs["unsplit"] = lambda: launch.run(qt, kt, vt, None, None, None, spec, parts=1)[0].transpose(1, 2)
        if case.window is None:
            def cudnn() -> Tensor:
                with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                    out = scaled_dot_product_attention(qt, kt, vt, is_causal=case.causal, enable_gqa=case.hq != case.hkv)
                return out.transpose(1, 2)
            runs["cudnn"] = cudnn
    try:
        from flash_attn.cute.interface import flash_attn_func, flash_attn_varlen_func
    except ImportError:
        return runs
    window = (None, None) if case.window is None else (case.window, 0)
    if cu is not None:
        runs["fa4"] = lambda: flash_attn_varlen_func(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=longest, max_seqlen_k=longest,
                                                     causal=case.causal, disable_scheduler_metadata=True)[0]
    else:
        runs["fa4"] = lambda: flash_attn_func(q, k, v, causal=case.causal, window_size=window)[0]
    return runs


def blocks(case: Case, rows: int, heads: int) -> Iterator[tuple[slice, slice, slice]]:
    """(heads, rows, keys they see) of a sequence, few enough at a time."""
    keys = case.keys or rows
    tall, wide = max(1, min(rows, SCORES // keys)), max(1, SCORES // (rows * keys))
    for h, start in product(range(0, heads, wide), range(0, rows, tall)):
        stop = min(start + tall, rows)
        yield (slice(h, min(h + wide, heads)), slice(start, stop),
               slice(0 if case.window is None else max(0, start - case.window), stop if case.causal else keys))


def truth(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The exact output in float64, q's shape."""
    out = torch.empty(*q.shape[:-1], case.dv, device="cuda", dtype=torch.float64)
    ends = [0, *torch.tensor(case.lengths).cumsum(0).tolist()] if case.lengths else [i * case.s for i in range(case.b + 1)]
    for i, (start, stop) in enumerate(pairwise(ends)):
        q1, k1, v1, out1 = ((x[start:stop] if case.lengths else x[i]).transpose(0, 1) for x in (q, k, v, out))
        for heads, rows, keys in blocks(case, stop - start, case.hq):
            kv = torch.arange(heads.start, heads.stop, device="cuda") // (case.hq // case.hkv)
            x = q1[heads, rows].double() @ k1[kv, keys].double().mT * case.d**-0.5
            distance = torch.arange(keys.start, keys.stop, device="cuda") - torch.arange(rows.start, rows.stop, device="cuda")[:, None]
            if case.causal:
                x.masked_fill_(distance > 0, -math.inf)
            if case.window is not None:
                x.masked_fill_(distance < -case.window, -math.inf)
            out1[heads, rows] = torch.softmax(x, -1) @ v1[kv, keys].double()
    return out
