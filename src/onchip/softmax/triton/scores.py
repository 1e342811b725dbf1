"""s = scale · x + bias of rows, with what a mask or a triangle hides at −∞: read, and waiting until it is used."""
import triton
import triton.language as tl

from onchip.softmax.triton.addresses import INTERPRETED, ahead, ends, only, start, under_way, widen

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
def _kept(mask, step, w, lead, read, VECTOR: tl.constexpr, MASK_VECTOR: tl.constexpr):
    """The mask's bytes of a block, a thread's those of its elements of x. By vectors of sixteen bytes it would have others, and results
    would have to be moved between threads before they are stored. Its rows begin in vectors as x's do, or at their first elements."""
    j = w if MASK_VECTOR > 1 else w - lead
    return tl.load(tl.max_contiguous(mask + j * step, [1, VECTOR]), mask=read, other=0)


@triton.jit
def _lowest(SCALED: tl.constexpr):
    """Of 16 bits that wait unscaled, what gives s = −∞."""
    return float("inf") if SCALED < 0 else float("-inf")


@triton.jit
def ask(x, mask, bias, step_x, step_mask, step_bias, w, keep, lead, i0, exists, n, n0, SCALED: tl.constexpr, MASKED: tl.constexpr,
        BIASED: tl.constexpr, CAUSAL: tl.constexpr, VECTOR: tl.constexpr, MASK_VECTOR: tl.constexpr, NARROW: tl.constexpr,
        PIECE: tl.constexpr = 0, BLOCK_N: tl.constexpr = 0):
    """A block's elements as they come, with its mask's and its bias's, or themselves in place of these.

    Where nothing is read, what gives s = −∞, or if it has to be selected, 0. Of the PIECE-th of pieces of BLOCK_N, w being the first one's.
    """
    read, _ = _seen(w, keep, lead - PIECE * BLOCK_N, i0, exists, n, n0, VECTOR, CAUSAL)
    absent = 0.0
    if NARROW:
        absent = _lowest(SCALED)
    elif not (SCALED or BIASED or MASKED):
        absent = float("-inf")
    raw = tl.load(ahead(x, PIECE, step_x, BLOCK_N) + w * step_x, mask=read, other=absent)
    kept, add = raw, raw
    if MASKED:
        kept = _kept(ahead(mask, PIECE, step_mask, BLOCK_N), step_mask, w, lead, read, VECTOR, MASK_VECTOR)
    if BIASED:
        add = tl.load(ahead(bias, PIECE, step_bias, BLOCK_N) + (w - lead) * step_bias, mask=read, other=0.0)
    return raw, kept, add


@triton.jit
def waits(asked, w, keep, lead, i0, exists, scale, n, n0, SCALED: tl.constexpr, MASKED: tl.constexpr, BIASED: tl.constexpr,
          CAUSAL: tl.constexpr, VECTOR: tl.constexpr, NARROW: tl.constexpr, PIECE: tl.constexpr = 0, BLOCK_N: tl.constexpr = 0):
    """Of what `ask` gave, s in float32, −∞ where a position is hidden or does not exist; NARROW: elements of 16 bits as they came, and
    what gives s = −∞."""
    raw, kept, add = asked
    lead -= PIECE * BLOCK_N
    if NARROW:
        hidden = _lowest(SCALED)
        s = raw
        if MASKED:
            s = _select(s, hidden, kept)
        if CAUSAL:
            s = _hide(s, hidden, w - w // VECTOR * VECTOR, _last(w, lead, i0, n, n0, VECTOR))
    else:
        read, seen = _seen(w, keep, lead, i0, exists, n, n0, VECTOR, CAUSAL)
        s = raw.to(tl.float32)
        if SCALED:
            s *= scale
        if BIASED:
            s += add.to(tl.float32)
        if SCALED or BIASED or MASKED:
            seen &= read
        if MASKED:
            seen &= kept != 0
        if SCALED or BIASED or MASKED or CAUSAL:
            s = tl.where(seen, s, float("-inf"))
    return s


@triton.jit
def scores(x, mask, bias, step_x, step_mask, step_bias, w, keep, lead, i0, exists, scale, n, n0, SCALED: tl.constexpr,
           MASKED: tl.constexpr, BIASED: tl.constexpr, CAUSAL: tl.constexpr, VECTOR: tl.constexpr = 1, MASK_VECTOR: tl.constexpr = 1):
    """s of a block in float32; −∞ is selected, after scaling, where a position is hidden or does not exist."""
    asked = ask(x, mask, bias, step_x, step_mask, step_bias, w, keep, lead, i0, exists, n, n0, SCALED, MASKED, BIASED, CAUSAL, VECTOR,
                MASK_VECTOR, False)
    if MASKED:
        under_way(n)
    return waits(asked, w, keep, lead, i0, exists, scale, n, n0, SCALED, MASKED, BIASED, CAUSAL, VECTOR, False)


@triton.jit
def ask_ends(x, mask, bias, strides_x, strides_mask, strides_bias, i2, i1, i0, lead, part, n, n0, VECTOR: tl.constexpr,
             MASKED: tl.constexpr, BIASED: tl.constexpr, CAUSAL: tl.constexpr):
    """As `ask`, of a row's first vector and its last one, element by element, and which of these count; the row's first part has them."""
    w, keep = ends(only(lead), n, VECTOR)
    j = w - only(lead)
    keep &= part == 0
    if CAUSAL:
        keep &= j <= only(i0) + (n - n0)
    raw = tl.load(x + start(strides_x, i2, i1, i0, VECTOR) + w, mask=keep, other=0.0)
    kept, add = raw, raw
    if MASKED:
        kept = tl.load(mask + start(strides_mask, i2, i1, i0, 1) + j * strides_mask[3], mask=keep, other=0)
    if BIASED:
        add = tl.load(bias + start(strides_bias, i2, i1, i0, 1) + j * strides_bias[3], mask=keep, other=0.0)
    return raw, kept, add, keep


@triton.jit
def end_scores(asked, scale, SCALED: tl.constexpr, MASKED: tl.constexpr, BIASED: tl.constexpr):
    """s of what `ask_ends` gave."""
    raw, kept, add, keep = asked
    s = raw.to(tl.float32)
    if SCALED:
        s *= scale
    if BIASED:
        s += add.to(tl.float32)
    if MASKED:
        keep &= kept != 0
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
def larger(a, b, SCALED: tl.constexpr, NARROW: tl.constexpr):
    """Of two pieces that wait, element by element, what has the larger s; two of 16 bits at once."""
    SMALLER: tl.constexpr = SCALED < 0
    if not NARROW:
        best = tl.maximum(a, b)
    elif INTERPRETED:
        wide_a, wide_b = a.to(tl.float32), b.to(tl.float32)
        best = (tl.minimum(wide_a, wide_b) if SMALLER else tl.maximum(wide_a, wide_b)).to(a.dtype)
    else:
        TYPE: tl.constexpr = "f16x2" if a.dtype == tl.float16 else "bf16x2"
        HOW: tl.constexpr = ("min." if SMALLER else "max.") + TYPE + " $0, $1, $2;"
        pairs = [a.to(tl.int16, bitcast=True), b.to(tl.int16, bitcast=True)]
        best = tl.inline_asm_elementwise(HOW, "=r,r,r", pairs, dtype=tl.int16, is_pure=True, pack=2).to(a.dtype, bitcast=True)
    return best


@triton.jit
def whole(waiting, scale, SCALED: tl.constexpr, NARROW: tl.constexpr):
    """s of what waits."""
    s = waiting.to(tl.float32)
    return s * scale if NARROW and SCALED else s


@triton.jit
def below(waiting, shift, scale, SCALED: tl.constexpr, NARROW: tl.constexpr, AGAIN: tl.constexpr):
    """s − shift of it: scaled and subtracted by one instruction, in one rounding. AGAIN: see `widen`."""
    s = widen(waiting, AGAIN)
    return tl.fma(s, scale, -shift) if NARROW and SCALED else s - shift
