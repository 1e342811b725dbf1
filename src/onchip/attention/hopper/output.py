"""How a consumer's rows of o leave: rounded, by TMA; or in fp32, of one part of a split tile, from the registers."""
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from onchip.attention.hopper.producer import store
from onchip.attention.hopper.schedule import BM


@gluon.jit
def store_tile(c: gl.constexpr, call, x, b, h, first, rows, q_begin, factor, o, o1):
    """64 rows of o, scaled and rounded, through shared memory."""
    dtype: gl.constexpr = x.v_s[0].dtype
    V0: gl.constexpr = o.shape[1]
    V1: gl.constexpr = call.V1
    rounded = (o * gl.convert_layout(factor, gl.SliceLayout(1, o.type.layout))[:, None]).to(dtype)
    tma.store_wait(0)
    if call.PIECES == 1:
        x.o_s[0].index(c).store(rounded)
        if V1 > 0:
            x.o_s[1].index(c).store((o1 * gl.convert_layout(factor, gl.SliceLayout(1, o1.type.layout))[:, None]).to(dtype))
        fence_async_shared()
        store(x.o[0], q_begin + b * x.step_o, rows, h, first, 0, x.o_s[0].index(c))
        if V1 > 0:
            store(x.o[1], q_begin + b * x.step_o, rows, h, first, 0, x.o_s[1].index(c))
    else:
        left, right = gl.split(gl.permute(gl.reshape(rounded, [BM, 2, V0 // 2]), (0, 2, 1)))
        x.o_s[0].index(c).store(left)
        fence_async_shared()
        store(x.o[0], q_begin + b * x.step_o, rows, h, first, 0, x.o_s[0].index(c))
        tma.store_wait(0)
        x.o_s[0].index(c).store(right)
        fence_async_shared()
        store(x.o[0], q_begin + b * x.step_o, rows, h, first, V0 // 2, x.o_s[0].index(c))


@gluon.jit
def store_part(call, x, lse, row, rows, lse2, factor, o, o1):
    """o and lse of 64 rows (of the first `rows` of them) of one part, from `row` on, counted through all rows of all parts."""
    width: gl.constexpr = o.shape[1] + call.V1
    i = gl.arange(0, BM, lse2.type.layout)
    gl.store(lse + row + i, lse2, mask=i < rows)
    store_columns(x.partial + row * width, width, rows, o, factor)
    if call.V1 > 0:
        store_columns(x.partial + row * width + o.shape[1], width, rows, o1, factor)


@gluon.jit
def store_columns(to, width: gl.constexpr, rows, o, factor):
    """The first `rows` rows of o, scaled, into columns of a matrix `width` wide, from the registers: a quad of lanes writes 32 bytes."""
    ROWS: gl.constexpr = gl.SliceLayout(1, o.type.layout)
    i = gl.arange(0, BM, ROWS)[:, None]
    column = gl.arange(0, o.shape[1], gl.SliceLayout(0, o.type.layout))[None, :]
    gl.store(to + i * width + column, o * gl.convert_layout(factor, ROWS)[:, None], mask=i < rows)
