"""Packed batches: each sequence as if it were alone, empty members, tails, and offsets that lie."""
import math
import re

import numpy as np
import pytest
import torch

from onchip.attention import attention, attention_varlen
from onchip.errors import InputError
from onchip.testing.attention import Case, Target, build, check, offsets, run

LENGTHS = ((3, 5), (17, 17), (0, 4), (6, 0), (1, 9))


@pytest.mark.parametrize("more", [{}, {"causal": True}, {"causal": "top-left", "window": (2, 1)}, {"window": (3, 0), "softcap": 4.0},
                                  {"alibi": 2, "sinks": True}, {"alibi": 1, "causal": True}, {"dropout_p": 0.3, "causal": True}],
                         ids=lambda more: "+".join(more) or "plain")
def test_every_feature_counts_inside_each_sequence(target: Target, more: dict) -> None:
    check(Case(heads=2, kv_heads=1, lengths=LENGTHS, tail=2, seed=7, **more), target)


def test_packed_is_each_sequence_by_itself(target: Target) -> None:
    case = Case(heads=2, kv_heads=2, lengths=LENGTHS, causal=True)
    inputs = build(case, target.device)
    got = run(case, inputs, target.backend)
    cu_q, cu_k = (cu.tolist() for cu in offsets(case))
    for n in range(len(LENGTHS)):
        one = (x.detach()[a:b].transpose(0, 1)[None] for x, (a, b) in
               ((inputs.q, cu_q[n : n + 2]), (inputs.k, cu_k[n : n + 2]), (inputs.v, cu_k[n : n + 2])))
        out, lse = attention(*one, causal=True, return_lse=True, backend=target.backend)
        assert torch.allclose(got["out"][cu_q[n] : cu_q[n + 1]], out[0].transpose(0, 1), atol=1e-6)
        assert torch.equal(got["lse"][:, cu_q[n] : cu_q[n + 1]].isfinite(), lse[0].isfinite())


def test_zero_length_members(target: Target) -> None:
    """Keys of a sequence without queries get gradient exactly 0; queries without keys give out 0 and lse −∞."""
    case = Case(heads=4, kv_heads=1, dim=64, dim_v=64, lengths=((0, 13), (9, 7), (5, 0), (0, 0), (4, 11), (0, 6)))
    got = check(case, target)
    for name in ("dk", "dv"):
        assert (got[name][:13] == 0).all()
        assert (got[name][-6:] == 0).all()
    assert (got["out"][9:14] == 0).all()
    assert (got["lse"][:, 9:14] == -math.inf).all()


def test_every_sequence_empty(target: Target) -> None:
    cu = torch.zeros(4, dtype=torch.int32, device=target.device)
    q = torch.randn(0, 2, 16, device=target.device, requires_grad=True)
    out, lse = attention_varlen(q, q, q, cu, cu, return_lse=True, backend=target.backend)
    assert out.shape == (0, 2, 16)
    assert lse.shape == (2, 0)
    out.sum().backward()
    none = attention_varlen(q, q, q, cu[:1], cu[:1], backend=target.backend)
    assert none.shape == (0, 2, 16)


def test_tokens_after_the_last_offset_get_zeros(target: Target) -> None:
    case = Case(heads=2, kv_heads=1, lengths=((14, 14), (28, 28), (9, 9)), tail=2, causal=True)
    inputs = build(case, target.device)
    got = check(case, target, inputs)
    for name in ("out", "dq", "dk", "dv"):
        assert (got[name][-2:] == 0).all(), name
    assert (got["lse"][:, -2:] == -math.inf).all()
    for x in (inputs.q, inputs.k, inputs.v, inputs.dout):
        x.data[-2:] = math.nan
    for name, right in run(case, inputs, target.backend).items():
        assert torch.equal(right, got[name]), name


def test_shapes_and_dtype_of_lse(target: Target) -> None:
    case = Case(heads=4, kv_heads=4, lengths=((3, 3), (0, 0), (7, 7)), dtype="bfloat16")
    assert run(case, build(case, target.device), target.backend)["lse"].shape == (4, 10)
    for seq in (5, 33):
        case = Case(batch=1, heads=2, kv_heads=2, seq_q=seq, seq_k=seq, dtype="bfloat16")
        lse = run(case, build(case, target.device), target.backend)["lse"]
        assert lse.shape == (1, 2, seq)
        assert lse.dtype == torch.float32
        assert lse.is_contiguous()


@pytest.mark.parametrize(("cu", "says"), [
    ([1, 3, 8], "start at 0"), ([0, 3, 9], "end at most at 8"), ([0, 5, 3, 8], "never fall"), ([], "sequences + 1")])
def test_offsets_on_the_host_that_lie_are_refused(cu: list[int], says: str) -> None:
    q = torch.randn(8, 2, 16)
    good = torch.tensor([0] + [8] * (len(cu) - 1), dtype=torch.int32)
    for side in (0, 1):
        pair = [good, good]
        pair[side] = torch.tensor(cu, dtype=torch.int32)
        with pytest.raises(InputError, match=re.escape(says)) as error:
            attention_varlen(q, q, q, *pair)
        assert str(error.value).startswith(f"cu_seqlens_{'qk'[side]}: got")


def test_a_longest_length_that_is_too_short_is_refused() -> None:
    q, cu = torch.randn(8, 2, 16), torch.tensor([0, 3, 8], dtype=torch.int32)
    with pytest.raises(InputError, match=r"max_seqlen_k: got 4, accepted: at least the longest sequence, 5"):
        attention_varlen(q, q, q, cu, cu, max_seqlen_q=8, max_seqlen_k=4)
    with pytest.raises(InputError, match="as many as cu_seqlens_q, 3"):
        attention_varlen(q, q, q, cu, torch.tensor([0, 8], dtype=torch.int32))


def test_offsets_may_be_int64_and_lie_on_the_host(target: Target) -> None:
    case = Case(heads=2, kv_heads=2, lengths=((3, 3), (5, 5)))
    inputs = build(case, target.device)
    want = run(case, inputs, target.backend)["out"]
    host = torch.tensor([0, 3, 8])
    for cu in (host, host.to(target.device), host.int()):
        got = attention_varlen(inputs.q, inputs.k, inputs.v, cu, cu, backend=target.backend)
        assert torch.equal(got, want)
    roomy = attention_varlen(inputs.q, inputs.k, inputs.v, host, host, max_seqlen_q=64, max_seqlen_k=64, backend=target.backend)
    assert torch.allclose(roomy, want, atol=1e-6)


def test_equal_lengths_are_solved_together() -> None:
    """What lets the reference take very many sequences: one dense problem a pair of lengths."""
    from onchip.attention.reference.packed import equal_lengths

    lengths = np.array([3, 0, 3, 5, 3])
    cu = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32)
    groups = list(equal_lengths(cu, cu, 14, 14))
    assert [group.sequences.tolist() for group in groups] == [[0, 2, 4], [1], [3]]
    assert groups[0].queries.tolist() == [[0, 1, 2], [3, 4, 5], [11, 12, 13]]


def test_offsets_beyond_the_data_are_cut_off_at_its_end() -> None:
    """Offsets on a device cannot be verified without waiting for it; whatever they say, no row outside the tensors is touched."""
    from onchip.attention.reference.packed import equal_lengths

    for group in equal_lengths(torch.tensor([0, 5, 3, 40]), torch.tensor([-2, 6, 90, 7]), 8, 9):
        for rows, total in ((group.queries, 8), (group.keys, 9)):
            assert ((rows >= 0) & (rows < total)).all()
