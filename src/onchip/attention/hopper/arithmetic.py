"""What a consumer computes of a block: its products, which scores are hidden, maxima and sums of rows, p in 16 bits."""
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from onchip.attention.hopper.schedule import BM

HIDDEN = gl.constexpr(float("-inf"))


@gluon.jit
def multiply_qk(call, x, slot, stage):
    """s = q kᵀ, under way."""
    zero = gl.zeros([BM, call.BN], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, call.BN, 16]))
    s = warpgroup_mma(x.q_s[0].index(slot), x.k_s[0].index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
    if call.D1 > 0:
        s = warpgroup_mma(x.q_s[1].index(slot), x.k_s[1].index(stage).permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def multiply_pv(call, x, p, stage, o, o1):
    """o += p v, under way."""
    dtype: gl.constexpr = x.v_s[0].dtype
    o = warpgroup_mma(unpack(p, dtype, gl.DotOperandLayout(0, o.type.layout, 2)), x.v_s[0].index(stage), o, is_async=True)
    if call.V1 > 0:
        o1 = warpgroup_mma(unpack(p, dtype, gl.DotOperandLayout(0, o1.type.layout, 2)), x.v_s[1].index(stage), o1, is_async=True)
    return o, o1


@gluon.jit
def wait_pv(call, pending: gl.constexpr, o, o1):
    """o and o1 complete; `pending` matmuls issued after them may still run."""
    if call.V1 > 0:
        o, o1 = warpgroup_mma_wait(pending, deps=(o, o1))
    else:
        o = warpgroup_mma_wait(pending, deps=(o,))
    return o, o1


@gluon.jit
def score(s, cap, SOFTCAP: gl.constexpr):
    """What `scale` turns into logits: q·k, or its softcap."""
    if SOFTCAP:
        s = 1.0 - 2.0 / (gl.exp2(s * cap) + 1.0)
    return s


@gluon.jit
def hide(s, call, first, row, rows, keys):
    """s of query rows first, first + 1, … and keys row, row + 1, …, with −∞ where the row does not see the key.

    Written so that a thread compares two numbers for each of its rows with constants: 8a + b ≤ limit − row − 2·lane.
    """
    r = in_lanes(s)
    LANES: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, r.type.layout))  # (rows, 4)
    REGISTERS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, r.type.layout))  # (keys / 8, 2)
    lowest, highest = call.sight(first + gl.arange(0, BM, gl.SliceLayout(1, LANES)), rows, keys)
    at = row + 2 * gl.arange(0, 4, gl.SliceLayout(0, LANES))[None, :]
    a = 8 * gl.arange(0, r.shape[1], gl.SliceLayout(1, REGISTERS))[:, None] + gl.arange(0, 2, gl.SliceLayout(0, REGISTERS))[None, :]
    a = gl.expand_dims(gl.expand_dims(a, 0), 2)
    seen = a <= gl.expand_dims(gl.expand_dims(highest[:, None] - at, 1), 3)
    if call.LEFT:
        seen = seen & (a >= gl.expand_dims(gl.expand_dims(lowest[:, None] - at, 1), 3))
    return gl.convert_layout(gl.reshape(gl.where(seen, r, HIDDEN), s.shape), s.type.layout)


@gluon.jit
def raise_maximum(s, m, l, scale):
    """(new maximum, new l, factor by which what was summed before shrinks)."""
    new = gl.maximum(m, gl.max(s, 1) * scale)
    alpha = gl.exp2(m - finite(new))
    return new, l * gl.convert_layout(alpha, gl.SliceLayout(1, l.type.layout))[:, None], alpha


@gluon.jit
def finite(m):
    """The shift for a row maximum: 0 where no key was seen yet, so that −∞ − (−∞) never happens."""
    return gl.where(m == HIDDEN, 0.0, m)


@gluon.jit
def partial_sums(p):
    """Row sums over the columns one thread holds, (rows, 4)."""
    return gl.sum(gl.sum(in_lanes(p), 3), 1)


@gluon.jit
def in_lanes(s):
    """s (rows, keys) as (rows, keys / 8, 4, 2): in the accumulator layout axis 2 counts lanes, and axes 1 and 3 a thread's registers."""
    return gl.reshape(s, [s.shape[0], s.shape[1] // 8, 4, 2])


@gluon.jit
def pack(p, dtype: gl.constexpr):
    """p (rows, keys) rounded to 16 bits, two neighbours in an int32 (rows, keys / 2): carried through a loop one by one, they are taken
    apart and put together again, 64 instructions a block."""
    even, odd = gl.split(gl.reshape(p, [p.shape[0], p.shape[1] // 2, 2]))
    if dtype == gl.float16:
        return gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [even, odd], dtype=gl.int32, is_pure=True, pack=1)
    else:  # noqa: RET505
        return gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [even, odd], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def unpack(p, dtype: gl.constexpr, layout: gl.constexpr):
    """The inverse of `pack`, as an operand of wgmma."""
    pairs = gl.join(p.to(gl.int16).to(dtype, bitcast=True), (p >> 16).to(gl.int16).to(dtype, bitcast=True))
    return gl.convert_layout(gl.reshape(pairs, [p.shape[0], 2 * p.shape[1]]), layout)
