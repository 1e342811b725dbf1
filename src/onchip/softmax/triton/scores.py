"""s = scale · x + bias of rows, with what a mask or a triangle hides at −∞: read, and waiting until it is used."""
import triton
import triton.language as tl

from onchip.softmax.triton.addresses import INTERPRETED, ends, only, start, under_way, widen

HIDE = tl.constexpr("""{
    .reg .b32 seen;
    max.s32 seen, $3, 0;
    bmsk.clamp.b32 seen, 0, seen;
    lop3.b32 $0, $1, $2, seen, 0xE4;
}""")
SELECT = tl.constexpr("""{
    .reg .b32 seen, two;
    and.b32 seen, $6, 0x7F7F7F7F;
    add.u32 seen, seen, 0x7F7F7F7F;
    or.b32 seen, seen, $6;
    prmt.b32 two, seen, 0, 0x9988;
    lop3.b32 $0, $2, $4, two, 0xE4;
    prmt.b32 two, seen, 0, 0xBBAA;
    lop3.b32 $1, $3, $5, two, 0xE4;
}""")


@triton.jit
def _last(w, lead, i0, n, n0, VECTOR: tl.constexpr):
    """The last position that the triangle leaves a row, counted from the beginning of w's vector."""
    return lead + tl.maximum(i0 + (n - n0), -1).to(w.dtype)[:, None] - w // VECTOR * VECTOR


@triton.jit
def _seen(w, keep, lead, i0, exists, n, n0, VECTOR: tl.constexpr, CAUSAL: tl.constexpr):
    """Which positions of a block are read, and which of these count: those not above the triangle.

    A vector that the triangle cuts is read whole: a bound inside it would make every access of the row one of a single element.
    """
    keep &= exists[:, None]
    if not CAUSAL:
        return keep, keep
    last = _last(w, lead, i0, n, n0, VECTOR)
    return keep & (last >= 0), w - w // VECTOR * VECTOR <= last


@triton.jit
def _kept(mask, step, w, lead, read, VECTOR: tl.constexpr):
    """The mask's bytes of a block, a thread's those of its elements of x. By vectors of sixteen bytes it would have others, and results
    would have to be moved between threads before they are stored."""
    return tl.load(tl.max_contiguous(mask + (w - lead) * step, [1, VECTOR]), mask=read, other=0)


@triton.jit
def scores(x, mask, bias, step_x, step_mask, step_bias, w, keep, lead, i0, exists, scale, n, n0, SCALED: tl.constexpr,
           MASKED: tl.constexpr, BIASED: tl.constexpr, CAUSAL: tl.constexpr, VECTOR: tl.constexpr = 1):
    """s of a block in float32; −∞ is selected, after scaling, where a position is hidden or does not exist."""
    read, seen = _seen(w, keep, lead, i0, exists, n, n0, VECTOR, CAUSAL)
    if not (SCALED or BIASED or MASKED):
        s = tl.load(x + w * step_x, mask=read, other=float("-inf")).to(tl.float32)
        return tl.where(seen, s, float("-inf")) if CAUSAL else s
    s = tl.load(x + w * step_x, mask=read, other=0.0).to(tl.float32)
    keep = seen & read
    if MASKED:
        kept = _kept(mask, step_mask, w, lead, read, VECTOR)
        under_way(n)
        keep = seen & (kept != 0)
    if SCALED:
        s *= scale
    if BIASED:
        s += tl.load(bias + (w - lead) * step_bias, mask=read, other=0.0).to(tl.float32)
    return tl.where(keep, s, float("-inf"))


@triton.jit
def end_scores(x, mask, bias, strides_x, strides_mask, strides_bias, i2, i1, i0, lead, part, scale, n, n0, VECTOR: tl.constexpr,
               SCALED: tl.constexpr, MASKED: tl.constexpr, BIASED: tl.constexpr, CAUSAL: tl.constexpr):
    """s of a row's first vector and its last one, element by element; the row's first part has them."""
    w, keep = ends(only(lead), n, VECTOR)
    j = w - only(lead)
    keep &= part == 0
    if CAUSAL:
        keep &= j <= only(i0) + (n - n0)
    s = tl.load(x + start(strides_x, i2, i1, i0, VECTOR) + w, mask=keep, other=0.0).to(tl.float32)
    if SCALED:
        s *= scale
    if BIASED:
        s += tl.load(bias + start(strides_bias, i2, i1, i0, 1) + j * strides_bias[3], mask=keep, other=0.0).to(tl.float32)
    if MASKED:
        keep &= tl.load(mask + start(strides_mask, i2, i1, i0, 1) + j * strides_mask[3], mask=keep, other=0) != 0
    return tl.where(keep, s, float("-inf"))


@triton.jit
def _hide(x, hidden, w, last):
    """16-bit elements, `hidden` where w > last: by a mask of two at once. Selected one by one, the row would take a register an element."""
    if INTERPRETED:
        return tl.where(w <= last, x.to(tl.float32), hidden).to(x.dtype)
    hidden = (tl.zeros(x.shape, tl.float32) + hidden).to(x.dtype)
    bits = ((last - w + 1) * 16).to(tl.int32)  # seen ones, from the first of two elements on
    pair = [x.to(tl.int16, bitcast=True), hidden.to(tl.int16, bitcast=True), bits]
    x16 = tl.inline_asm_elementwise(HIDE, "=r,r,r,r,r", pair, dtype=tl.int16, is_pure=True, pack=2)
    return x16.to(x.dtype, bitcast=True)


@triton.jit
def _select(x, hidden, kept):
    """16-bit elements, `hidden` where `kept`, bytes, is 0. The highest bit of a byte that is not 0 is set, and two bytes are made of it."""
    if INTERPRETED:
        return tl.where(kept != 0, x.to(tl.float32), hidden).to(x.dtype)
    hidden = (tl.zeros(x.shape, tl.float32) + hidden).to(x.dtype)
    four = [x.to(tl.int16, bitcast=True), hidden.to(tl.int16, bitcast=True), kept]
    x16 = tl.inline_asm_elementwise(SELECT, "=r,=r,r,r,r,r,r", four, dtype=tl.int16, is_pure=True, pack=4)
    return x16.to(x.dtype, bitcast=True)


@triton.jit
def wait(x, mask, bias, step_x, step_mask, step_bias, w, keep, lead, i0, exists, scale, n, n0, SCALED: tl.constexpr, MASKED: tl.constexpr,
         BIASED: tl.constexpr, CAUSAL: tl.constexpr, VECTOR: tl.constexpr, NARROW: tl.constexpr):
    """What waits of a piece of the row: s, or elements of 16 bits as they came."""
    if NARROW:
        hidden = 0.0 if SCALED else float("-inf")
        if (MASKED or CAUSAL) and SCALED:  # scale is not 0
            hidden = tl.where(scale < 0.0, float("inf"), float("-inf"))
        read, _ = _seen(w, keep, lead, i0, exists, n, n0, VECTOR, CAUSAL)
        waiting = tl.load(x + w * step_x, mask=read, other=hidden)
        if MASKED:
            kept = _kept(mask, step_mask, w, lead, read, VECTOR)
        if CAUSAL or (MASKED and waiting.shape[0] > 1):
            under_way(n)
        if MASKED:
            waiting = _select(waiting, hidden, kept)
        if CAUSAL:
            waiting = _hide(waiting, hidden, w - w // VECTOR * VECTOR, _last(w, lead, i0, n, n0, VECTOR))
    else:
        waiting = scores(x, mask, bias, step_x, step_mask, step_bias, w, keep, lead, i0, exists, scale, n, n0, SCALED, MASKED, BIASED,
                         CAUSAL, VECTOR)
    return waiting


@triton.jit
def take(waiting, keep, scale, SCALED: tl.constexpr, HIDING: tl.constexpr, NARROW: tl.constexpr, TIME: tl.constexpr):
    """s of it, for the TIME-th time. What a triangle or a mask hides of 16-bit elements is −∞ when they are scaled, others need to be told
    of."""
    s = waiting.to(tl.float32) if TIME == 1 else widen(waiting, TIME > 2)
    if NARROW and SCALED:
        s *= scale
        if not HIDING:
            s = tl.where(keep, s, float("-inf"))
    return s
