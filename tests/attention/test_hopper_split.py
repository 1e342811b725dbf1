"""Few tiles: into how many parts their keys are cut, and that the parts put together are the whole."""
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")
from onchip.attention.contract import Spec, empty_like_q
from onchip.attention.dispatch import CAPABILITIES
from onchip.attention.explain import explain_problem
from onchip.attention.hopper import launch, split, tiles
from onchip.attention.merge import merge_attention
from onchip.attention.problem import AttentionProblem
from onchip.roofline.hardware import find_gpu

D128 = tiles.forward(128, 128)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def spec_of(rows: int, keys: int, causal: int = 0, left: int = -1) -> Spec:
    return Spec(causal, left, 0 if causal else -1, 0.1, 0.0, 0.0, rows, keys, False, False)


def parts_of(batch: int, heads: int, kv_heads: int, rows: int, keys: int, causal: int = 0, left: int = -1, dim: int = 128) -> int:
    tile = tiles.forward(dim, dim, rows, causal > 0)
    return split.parts_of(tile, batch * heads, batch * kv_heads, rows, keys, spec_of(rows, keys, causal, left), 132)


@pytest.mark.parametrize(("call", "parts"), [
    ((1, 16, 16, 128, 8192), 8),  # 16 tiles: 128 tasks are one round
    ((1, 8, 8, 4, 65536), 16),  # a step of decoding, 32 heads taken for 8
    ((1, 1, 1, 128, 8192), 16),  # 64 blocks, 4 a part
    ((1, 16, 16, 1024, 1024), 1),  # 128 tiles: next to nothing stands still
    ((8, 16, 16, 4096, 4096), 1),
    ((1, 16, 16, 128, 512), 1),  # 4 blocks a tile are not worth a second kernel
    ((1, 1, 1, 1, 1), 1), ((1, 16, 16, 128, 0), 1),
])
def test_how_many_parts(call, parts):
    assert parts_of(*call) == parts


@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("causal", [0, 1, 2])
@pytest.mark.parametrize(("heads", "rows", "keys"), [(1, 64, 100_000), (3, 1000, 1000), (5, 2000, 9000), (66, 100, 3000), (131, 7, 20_000)])
def test_splitting_promises_something_and_leaves_a_few_blocks_a_part(heads, rows, keys, causal, dim):
    tile, spec = tiles.forward(dim, dim, rows, causal > 0), spec_of(rows, keys, causal)
    parts = split.parts_of(tile, heads, heads, rows, keys, spec, 132)
    blocks = split.tile_blocks(tile, rows, keys, spec)
    assert 1 <= parts <= max(1, min(split.MOST, max(blocks) // split.LEAST_BLOCKS))
    one, many = (split.seconds(tile, blocks, heads, rows, n, 132, 0) for n in (1, parts))
    assert parts == 1 or many < one
    if heads * len(blocks) >= 132:
        assert parts == 1


def test_a_window_is_cut_by_what_its_tiles_see():
    """4096 keys of 65,536 are 33 blocks a tile: 8 parts of at least 4, whatever the length."""
    assert parts_of(1, 1, 1, 1024, 65536, 1) > parts_of(1, 1, 1, 1024, 65536, 1, left=4096) == parts_of(1, 1, 1, 1024, 32768, 1, left=4096)


def test_more_parts_cost_more_to_merge_and_fewer_rounds_are_faster():
    blocks = [64]
    times = {parts: split.seconds(D128, blocks, 16, 128, parts, 132, 0) for parts in (1, 2, 4, 8, 9, 16)}
    assert times[1] > times[2] > times[4] > times[8]
    assert times[9] > times[8]  # 144 tasks are two rounds
    assert split.seconds(D128, blocks, 16, 128, 8, 132, 67_000_000) > 67e6 / split.DRAM_BYTES  # K and V come from memory once


@pytest.fixture
def plan(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))

    def make(q: Tensor, k: Tensor, sinks: bool = False, parts: int | None = None, **spec: int) -> launch.Plan:
        return launch.Plan(q, k, k, empty_like_q(q, k.shape[-1]), None, sinks, spec_of(q.shape[2], k.shape[2], **spec), None, None, parts)

    return make


def test_heads_that_share_keys_become_rows_where_that_saves_tiles(plan):
    def tensor(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=torch.bfloat16, device="meta")

    q, k = tensor(2, 32, 1, 128), tensor(2, 8, 65536, 128)
    made = plan(q, k)
    assert (made.group, made.parts, made.total, made.grid) == (4, 8, 16 * 8, 16 * 8)
    assert (made.rows[0].heads, made.rows[0].head, made.rows[0].row, made.rows[0].step) == (8, 4 * 128, 128, 32)
    inside = tensor(2, 1, 32, 128).transpose(1, 2)  # heads inside the sequence
    assert (plan(inside, k).group, plan(inside, k).rows[0].head, plan(inside, k).rows[0].row) == (4, 4 * 128, 128)
    assert plan(tensor(2, 32, 16, 128), k).group == 4  # 64 rows, contiguous
    apart = tensor(2, 16, 32, 128).transpose(1, 2)  # no one stride reaches the rows: worth a copy of q where the merge writes out
    assert (plan(apart, k).group, plan(apart, k).parts, plan(apart, k).copies) == (4, 8, [True, False, False])
    assert (plan(apart, k[:, :, :100]).group, plan(apart, k[:, :, :100]).copies) == (1, [False] * 3)
    assert plan(tensor(2, 32, 128, 128), k).group == 1  # no fewer tiles
    assert plan(q, k, sinks=True).group == 4  # the merge knows whose sink a row has
    assert plan(q, k[:, :, :100]).group == 4
    assert plan(q, k[:, :, :100], sinks=True).group == plan(q, k, causal=1).group == plan(q, k, left=100).group == 1


@pytest.mark.parametrize(("problem", "said"), [
    (AttentionProblem(1, 32, 8, 1, 65536, 128, 128), (16, "keys in 16 parts")),
    (AttentionProblem(1, 16, 16, 4096, 4096, 128, 128), (1, "")),
    (AttentionProblem(1, 16, 16, 128, 8192, 128, 128, sinks=True, layout="bshd"), (8, "keys in 8 parts")),
    (AttentionProblem(1, 4, 4, 64, 65536, 128, 128, varlen=True, layout="packed"), (1, "")),
])
def test_explain_says_in_how_many_parts(monkeypatch, problem, said):
    monkeypatch.setitem(CAPABILITIES, "hopper", replace(CAPABILITIES["hopper"], limits=lambda problem: None))
    answer = explain_problem(problem, gpu=find_gpu("h200"))
    assert (answer.backend, answer.parts) == ("hopper", said[0])
    assert ("parts" in str(answer)) == bool(said[1])
    assert said[1] in str(answer)


def test_scratch_and_arguments_of_a_split_call(plan):
    q, k = torch.empty(1, 2, 300, 96, dtype=torch.bfloat16), torch.empty(1, 2, 3000, 96, dtype=torch.bfloat16)
    made = plan(q, k, sinks=True, parts=3, causal=1)
    assert (made.parts, made.total, made.grid) == (3, 18, 18)
    assert (made.failed, made.unsure, made.chain, made.words) == (1, 1 + 18 * 2, 1 + 18 * 2 + 18, 1 + 18 * 2 + 18 + 18)
    assert (made.merge.partial, made.merge.floats) == (3 * 600 * 96, 3 * 600 * 97)
    names = launch.forward_kernel.arg_names[-len(made.after_pointers):]
    values = dict(zip(names, made.after_pointers, strict=True))
    assert (values["parts"], values["SPLIT"], values["SINKS"]) == (3, True, False)  # sinks are the merge's
    assert made.descriptors(3, q) == [None, None]
    whole = plan(q, k, sinks=True, parts=1, causal=1)
    assert (whole.merge, whole.total) == (None, 6)


def merged(o: Tensor, logs: Tensor, sinks: Tensor | None, dim: int, inside: bool = False, dtype: torch.dtype = torch.float32,
           ) -> tuple[Tensor, Tensor]:
    """What the kernel makes of parts o (B, H, parts, rows, width) and their lse in units of log₂; on a GPU where there is one."""
    b, h, parts, rows, width = o.shape
    out = torch.full((b, rows, h, dim) if inside else (b, h, rows, dim), math.nan, dtype=dtype, device=DEVICE)
    out = out.transpose(1, 2) if inside else out
    lse = torch.full((b, h, rows), math.nan, device=DEVICE)
    merge = split.Merge(out, parts, width)
    assert merge.floats == o.numel() + logs.numel()
    merge(torch.cat([o.flatten(), logs.flatten()]).to(DEVICE), None if sinks is None else sinks.to(DEVICE), out, lse)
    return out.cpu(), lse.cpu()


@pytest.mark.parametrize(("dim", "width"), [(8, 64), (64, 64), (96, 96), (128, 128), (136, 192), (256, 256)])
@pytest.mark.parametrize(("parts", "inside"), [(2, False), (3, True), (17, False)])
def test_merging_is_softmax_over_the_parts(dim, width, parts, inside):
    generator = torch.Generator().manual_seed(dim + parts)
    o = torch.randn(2, 3, parts, 5, width, generator=generator)
    logs = 20 * torch.randn(2, 3, parts, 5, generator=generator)
    logs[0, 1, 0, 2:4] = -math.inf  # a part that these rows do not see, whatever it left
    o[0, 1, 0, 2:4] = math.nan
    logs[1, 2, :, 4] = -math.inf  # a row that sees nothing
    logs[1, 0, 1, 0], o[1, 1, 1, 3, 4] = math.nan, math.nan
    out, lse = merged(o, logs, None, dim, inside)
    exact, exact_lse = merge_attention(list(o[..., :dim].double().unbind(2)), list((logs.double() * math.log(2)).unbind(2)))
    torch.testing.assert_close(out.double(), exact, rtol=2e-5, atol=1e-6, equal_nan=True)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-6, atol=1e-5, equal_nan=True)
    assert (out[1, 2, 4] == 0).all()
    assert lse[1, 2, 4] == -math.inf
    assert out[1, 0, 0].isnan().all()
    assert lse[1, 0, 0].isnan()
    assert out[1, 1, 3].isnan().sum() == 1
    assert out.isnan().sum() == dim + 1


def test_a_sink_is_counted_once():
    generator = torch.Generator().manual_seed(0)
    o, logs = torch.randn(1, 2, 4, 5, 64, generator=generator), torch.randn(1, 2, 4, 5, generator=generator)
    logs[0, 1, :, 2] = -math.inf  # a row that sees nothing but the sink
    for sinks in (torch.tensor([0.5, -3.0]), torch.tensor([-math.inf, 80.0]).bfloat16()):
        out, lse = merged(o, logs, sinks, 64, dtype=torch.float16)
        logits = torch.cat([logs.double() * math.log(2), sinks.double().view(1, 2, 1, 1).expand(1, 2, 1, 5)], 2)
        exact_lse = torch.logsumexp(logits, 2)
        exact = (torch.exp(logits - exact_lse[:, :, None])[:, :, :4, :, None] * o.double()).sum(2)
        torch.testing.assert_close(out.double(), exact, rtol=2**-10, atol=2**-14)
        torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-6, atol=1e-5)
        assert (out[0, 1, 2] == 0).all()


def test_rows_of_folded_heads_find_their_way():
    """Parts of heads taken for one, (B · H / group, parts, group · rows), to out of any layout and the sink of each head."""
    generator = torch.Generator().manual_seed(1)
    o, logs = torch.randn(2, 6, 3, 4, 64, generator=generator), torch.randn(2, 6, 3, 4, generator=generator)
    sinks = torch.randn(6, generator=generator)
    for inside in (False, True):
        out, lse = merged(o, logs, sinks, 64, inside)
        o3, logs3 = (x.unflatten(1, (2, 3)).movedim(3, 2).flatten(3, 4).contiguous() for x in (o, logs))  # group of 3
        again, lse_again = (torch.full_like(x, math.nan, device=DEVICE) for x in (out, lse))
        split.Merge(again, 3, 64, group=3)(torch.cat([o3.flatten(), logs3.flatten()]).to(DEVICE), sinks.to(DEVICE), again, lse_again)
        assert torch.equal(out, again.cpu())
        assert torch.equal(lse, lse_again.cpu())


def test_large_scores_keep_their_weights():
    """lse of ±20,000, where e^lse is infinite or nothing."""
    logs = torch.tensor([20000.0, 20001.0, -20000.0, -math.inf]).view(1, 1, 4, 1)
    o = torch.tensor([3.0, 6.0, 1e30, math.nan]).view(1, 1, 4, 1, 1).expand(1, 1, 4, 1, 64)
    out, lse = merged(o, logs, None, 64)
    torch.testing.assert_close(out, torch.full_like(out, 5.0))
    assert float(lse) == pytest.approx((20001 + math.log2(1.5)) * math.log(2))
