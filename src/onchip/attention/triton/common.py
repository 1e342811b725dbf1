"""What the attention kernels share on the device: where a sequence lies, which keys a row sees, scores, dropout.

Conventions of every kernel of this folder

* i counts query rows, j keys, both inside their own sequence; they come shaped for broadcasting ([rows, 1] and [1, keys], or the
  transpose), so one function serves S and Sᵀ.
* Scores are in units of log₂: p = 2^(x − m). `FOLD` says that x is still the raw product q·k, multiplied by scale·log₂e only inside
  the exponential (one FMA); it holds when the scale is positive and nothing is added to the score. Otherwise `scores` makes x whole.
* An absent tensor, bound or cap is None, which Triton turns into a compile-time constant, so absence costs nothing.
* Addresses are 64-bit. Strides come in units of `UNIT` elements: 16 bytes' worth when all of the call's are multiples of 16 bytes,
  else 1. Two variants of a kernel then serve every length, where specialising each stride would compile one per parity.
"""
import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """acc + a·b in fp32; `PRECISION` ('ieee', 'bf16x6' or 'tf32') concerns fp32 operands.

    The interpreter multiplies bf16's bit patterns: widen. It is exact, so it knows no bf16x6.
    """
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="tf32" if PRECISION == "tf32" else "ieee")
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def zeros(ROWS: tl.constexpr, COLS: tl.constexpr, dtype: tl.constexpr, WGMMA: tl.constexpr):
    """An fp32 accumulator of zeros, on Hopper (`WGMMA`) made by a matmul of zeros.

    ptxas serialises every wgmma of a kernel (remark C7515) when an accumulator carried around a loop starts from anything else.
    """
    acc = tl.zeros([ROWS, COLS], tl.float32)
    if WGMMA and dtype != tl.float32:
        acc = dot(tl.zeros([ROWS, 16], dtype), tl.zeros([16, COLS], dtype), acc, "ieee")
    return acc


@triton.jit
def cast(x, dtype: tl.constexpr):
    """fp32 x in `dtype`, rounded to nearest even; the interpreter only truncates to bf16, so there the rounding is done on the bits."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = bits + 0x7FFF + ((bits >> 16) & 1)
        x = tl.where(x == x, rounded, bits).to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def segment(cu_seqlens, b, length):
    """(first row, rows) of sequence b: (0, length) when dense. Offsets are clamped to the tensor, so bad ones cannot lead outside."""
    if cu_seqlens is None:
        return tl.full((), 0, tl.int64), length
    else:  # noqa: RET505  Triton compiles what follows an `if` even when the `if` returned
        begin = tl.minimum(tl.maximum(tl.load(cu_seqlens + b), 0), length)
        end = tl.minimum(tl.maximum(tl.load(cu_seqlens + b + 1), begin), length)
        return begin.to(tl.int64), end - begin


@triton.jit
def span(first, last, before, after, length, BLOCK: tl.constexpr):
    """Positions of the other axis that a tile meets, when its own positions are [first, last] and p sees [p − before, p + after].

    Returns (lo, edges): nothing below lo or from edges[3] on is seen; blocks of [edges[0], edges[1]) and [edges[2], edges[3]) need the
    mask, those of [edges[1], edges[2]) are seen whole. Either masked part may be empty; blocks start at multiples of BLOCK.
    """
    lo, hi, all_lo, all_hi = 0, length, 0, length
    if before is not None:
        lo = tl.maximum(first - before, 0)
        all_lo = (tl.maximum(last - before, 0) + BLOCK - 1) // BLOCK * BLOCK
    if after is not None:
        hi = tl.minimum(tl.maximum(last + after + 1, 0), length)
        all_hi = tl.minimum(tl.maximum(first + after + 1, 0), length)
    left = tl.minimum(all_lo, hi)
    right = tl.maximum(left, all_hi // BLOCK * BLOCK)
    return lo, (lo // BLOCK * BLOCK, left, right, hi)


@triton.jit
def origin(tensor, at, b, h, row, UNIT: tl.constexpr):
    """Address of `row` of head h: `at` = strides of (batch, head, row) in units of UNIT."""
    return tensor + (b * at[0] + h * at[1] + row * at[2]) * UNIT


@triton.jit
def load_tile(tensor, at, tma, b, h, row, row_ok, ROWS: tl.constexpr, COLS: tl.constexpr, DIM: tl.constexpr, UNIT: tl.constexpr,
              CHECK: tl.constexpr):
    """ROWS × COLS elements from `row` on; zero where `row_ok` is False (looked at only if CHECK) and for columns DIM … COLS − 1.

    Tiles come through the tensor-memory accelerator where the call has its descriptor `tma`: one instruction instead of an address a
    register pair for each 16 bytes. A row to be hidden lies inside the tensor: zeros are selected in its place. (By pointers, masked
    blocks alone made dK, dV spill 218 words a thread at d = 128 and the forward 80; like this it is 13 and 25.)
    """
    if tma is not None:
        batch = tl.where(at[0] == 0, 0, b)  # packed: b counts sequences, the descriptor knows one batch
        tile = tma.load([batch.to(tl.int32), h.to(tl.int32), row.to(tl.int32), 0]).reshape(ROWS, COLS)
        if CHECK:
            tile = tl.where(row_ok[:, None], tile, 0.0).to(tile.dtype)
    else:
        rows, cols = tl.arange(0, ROWS)[:, None].to(tl.int64), tl.arange(0, COLS)[None, :]
        pointers = origin(tensor, at, b, h, row, UNIT) + rows * (at[2] * UNIT) + cols
        if CHECK and DIM == COLS:
            tile = tl.load(pointers, mask=row_ok[:, None], other=0.0)
        elif CHECK:
            tile = tl.load(pointers, mask=row_ok[:, None] & (cols < DIM), other=0.0)
        elif DIM == COLS:
            tile = tl.load(pointers)
        else:
            tile = tl.load(pointers, mask=cols < DIM, other=0.0)
    return tile


@triton.jit
def store_tile(tensor, at, b, h, row, value, row_ok, ROWS: tl.constexpr, COLS: tl.constexpr, DIM: tl.constexpr, UNIT: tl.constexpr):
    """Write the first DIM columns of `value` from `row` on, where the row is wanted."""
    rows, cols = tl.arange(0, ROWS)[:, None].to(tl.int64), tl.arange(0, COLS)[None, :]
    pointers = origin(tensor, at, b, h, row, UNIT) + rows * (at[2] * UNIT) + cols
    tl.store(pointers, cast(value, tensor.dtype.element_ty), mask=row_ok[:, None] & (cols < DIM))


@triton.jit
def lse_index(cu_seqlens, b, h, heads, length, first):
    """Index of a head's lse at row `first` (of the packed tensor): lse is (B, H, Sq) when dense, (H, total) when packed."""
    if cu_seqlens is None:
        h += b * heads
    return h * length + first


@triton.jit
def statistics(cu_seqlens, b, h, heads, pitch, begin, first):
    """Index of the backward's own row statistics at row `first` of a sequence: (B, H, pitch) when dense, (H, pitch) when packed.

    Descriptors want every run of rows to start at a multiple of 16 bytes (elsewhere a card of today meets an illegal instruction): a head
    takes a multiple of four values, and the packed sequence b, whose rows begin at `begin`, has its own from ⌊begin/4⌋·4 + 4b on.
    """
    if cu_seqlens is None:
        return (b * heads + h) * pitch + first
    else:  # noqa: RET505
        return h * pitch + (begin // 4 + b) * 4 + first


@triton.jit
def load_rows(tensor, tma, index, ROWS: tl.constexpr):
    """ROWS row statistics from `index` on. No bounds: they are padded to a whole tile, and what lies past a sequence is masked later."""
    return tl.load(tensor + index + tl.arange(0, ROWS)) if tma is None else tma.load([index.to(tl.int32)])


@triton.jit
def pairs(tensor, at, b, h, i, j):
    """Addresses of the pairs (i, j) in a (B, H, Sq, Sk) tensor, which may pass 2³¹ elements."""
    return tensor + b * at[0] + h * at[1] + i.to(tl.int64) * at[2] + j.to(tl.int64) * at[3]


@triton.jit
def visible(i, j, ok, offset, left, right, mask, mask_at, b, h):
    """Which pairs (i, j) among `ok`, the ones inside the sequences, are let through by the causal diagonal, the window and the mask."""
    seen = ok
    if right is not None:
        seen = seen & (j <= i + (offset + right))
    if left is not None:
        seen = seen & (j >= i + (offset - left))
    if mask is not None:
        seen = seen & tl.load(pairs(mask, mask_at, b, h, i, j), mask=ok, other=0).to(tl.int1)
    return seen


@triton.jit
def tanh(x):
    """tanh to about 2 ulp: its power series near 0, where 1 − 2/(e²ˣ + 1) cancels; that form, which saturates by itself, elsewhere."""
    y = x * x
    series = -1382.0 / 155925 + y * (21844.0 / 6081075)
    series = 62.0 / 2835 + y * series
    series = -17.0 / 315 + y * series
    series = 2.0 / 15 + y * series
    series = -1.0 / 3 + y * series
    return tl.where(tl.abs(x) < 0.4, x + x * (y * series), 1.0 - 2.0 / (tl.exp2(x * (2 * LOG2E)) + 1.0))


@triton.jit
def scores(qk, i, j, ok, offset, scale, softcap, slopes, slopes_b, bias, bias_at, b, h, FOLD: tl.constexpr):
    """(x before masking, derivative of softcap): x = log₂e · (softcap(scale · qk) + bias − slope·|i + offset − j|), or qk if FOLD.

    softcap(s) = c·tanh(s/c), with derivative 1 − tanh²(s/c). Bias is read at the pairs `ok`.
    """
    x, gain = qk, 1.0
    if not FOLD:
        x *= scale
        if softcap is not None:
            t = tanh(x / softcap)
            x, gain = softcap * t, 1.0 - t * t
        if bias is not None:
            x += tl.load(pairs(bias, bias_at, b, h, i, j), mask=ok, other=0.0).to(tl.float32)
        if slopes is not None:
            x -= tl.load(slopes + b * slopes_b + h) * tl.abs(i + offset - j).to(tl.float32)
        x *= LOG2E
    return x, gain


@triton.jit
def kept(seed, i, j, head, threshold):
    """Dropout's bits: first word of Philox-4x32-10 with key `seed` and counter (j, i, head, 0), kept when ≥ threshold = round(p · 2³²).

    Counter-based (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), so every tiling of every pass draws the same.
    """
    word, _, _, _ = tl.philox(seed, j, i, head, 0)
    return word >= threshold
