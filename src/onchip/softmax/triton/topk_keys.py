"""Sorting what is left of a row for the k largest: keys, integers in the order of the values with the place below it."""
import triton
import triton.language as tl

MAXIMA = tl.constexpr(16)  # up to so many are found one by one, in a quarter of the instructions of a bitonic sort


@triton.jit
def keys_of(s, place, NARROW: tl.constexpr):
    """Keys of x's own values in float32, ≥ 0: 16 bits of value above 15 of place for 16-bit types, 32 above 31 for float32."""
    bits = s.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) << 16 if NARROW == "fp16" else s.to(tl.int32, bitcast=True)
    bits ^= (bits >> 31) & (0x7FFFFFFF if NARROW == "fp32" else 0x7FFF0000)
    if NARROW == "fp32":
        keys = (bits.to(tl.int64) + 2**31 << 31) | (0x7FFFFFFF - place.to(tl.int64))
    else:  # the sign, now in bit 30, turned round: positive values are above
        keys = ((bits >> 1) & 0x7FFF8000) ^ (0x40007FFF - place)
    return keys


@triton.jit
def no_keys(place, NARROW: tl.constexpr):
    """Keys of places where nothing is: below all others, distinct as well."""
    return 0x7FFFFFFF - place.to(tl.int64) if NARROW == "fp32" else 0x7FFF - place


@triton.jit
def are(keys, NARROW: tl.constexpr):
    """Whether keys are of something."""
    return keys >= (2**31 if NARROW == "fp32" else 2**15)


@triton.jit
def place_of(keys, NARROW: tl.constexpr):
    """Places of keys."""
    return (0x7FFFFFFF - (keys & 0x7FFFFFFF)).to(tl.int32) if NARROW == "fp32" else 0x7FFF - (keys & 0x7FFF)


@triton.jit
def value_of(keys, NARROW: tl.constexpr):
    """Values of keys in float32, −∞ where nothing is."""
    bits = ((keys >> 31) - 2**31).to(tl.int32) if NARROW == "fp32" else (keys >> 15) - 2**15 << 16
    bits ^= (bits >> 31) & (0x7FFFFFFF if NARROW == "fp32" else 0x7FFF0000)
    s = (bits >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) if NARROW == "fp16" else bits.to(tl.float32, bitcast=True)
    return tl.where(are(keys, NARROW), s, float("-inf"))


@triton.jit
def _below(keys, last):
    """The largest key below the `last` one: whose distance from it, counted without sign, is largest. Whatever is not below has a distance
    without bit 31 (63), so no key need be taken out, and an addition and a maximum are one instruction (`VIADDMNMX`).
    """
    return last + tl.max(tl.max(keys - last[None, :, None], axis=0), axis=1)


@triton.jit
def one_by_one(keys, k, I: tl.constexpr, FEW: tl.constexpr):
    """The k largest of each row of distinct keys, at least k, [rows, I], largest first, then 0; keys: [repeats, rows, columns].

    FEW: k is constant and at most MAXIMA. The loop is then unrolled, except for 64 bits, of which a step is long.
    """
    i = tl.arange(0, I)[None, :]
    best = tl.zeros([keys.shape[1], I], keys.dtype)
    unsigned = tl.uint64 if keys.dtype == tl.int64 else tl.uint32
    last = tl.full([keys.shape[1]], 2**63 if keys.dtype == tl.int64 else 2**31, unsigned)
    if FEW and keys.dtype == tl.int32:
        for at in tl.static_range(k):
            last = _below(keys.to(unsigned, bitcast=True), last)
            best = tl.where(i == at, last[:, None].to(keys.dtype, bitcast=True), best)
    else:
        for at in range(k):
            last = _below(keys.to(unsigned, bitcast=True), last)
            best = tl.where(i == at, last[:, None].to(keys.dtype, bitcast=True), best)
    return best


@triton.jit
def _together(found, EACH: tl.constexpr):
    """The first EACH of each row of `found`, [rows, 32], in one dimension, all of them in every warp; what follows them is 0."""
    ROWS: tl.constexpr = found.shape[0]
    flat = tl.reshape(tl.max(tl.reshape(found, [ROWS, 32 // EACH, EACH]), axis=1), [ROWS * EACH])
    return tl.gather(flat, tl.arange(0, ROWS * EACH), 0)


@triton.jit
def largest_keys(keys, k: tl.constexpr, rounds, K: tl.constexpr, WARPS: tl.constexpr):
    """The k largest of distinct keys, [K], largest first; the number of keys is a multiple of 32 · WARPS, and not below WARPS · k.

    Each warp finds k of its own keys without a word to the others, or the `rounds` largest, if so many at most are among the k. Of these
    WARPS · K many are sorted; a few are found once more in the same way, 32 of them by a warp, or, of 64 bits, which no `REDUX` takes, put
    in order by their rank, the number of larger ones.
    """
    own = tl.reshape(keys, [keys.numel // (32 * WARPS), WARPS, 32])
    if K > MAXIMA:
        ROW: tl.constexpr = 32 if K < 32 else K
        best = tl.reshape(tl.topk(tl.reshape(one_by_one(own, rounds, ROW, False), [1, WARPS * ROW]), K), [K])
    elif keys.dtype == tl.int64:
        found = _together(one_by_one(own, k, 32, True), K)
        rank = tl.sum((found[None, :] > found[:, None]).to(tl.int32), axis=1)
        best = tl.max(tl.where(rank[:, None] == tl.arange(0, K)[None, :], found[:, None], 0), axis=0)
    else:
        EACH: tl.constexpr = K if K * WARPS > 32 else 32 // WARPS
        ROWS: tl.constexpr = WARPS * EACH // 32
        found = _together(one_by_one(own, k, 32, True), EACH)
        if ROWS > 1:
            found = _together(one_by_one(tl.reshape(found, [1, ROWS, 32]), k, 32, True), 32 // ROWS)
        best = tl.reshape(one_by_one(tl.reshape(found, [1, 1, 32]), k, K, True), [K])
    return best


@triton.jit
def most_of(good, WARPS: tl.constexpr):
    """Of how many `good` keys of one warp are most."""
    return tl.max(tl.sum(tl.sum(tl.reshape(good.to(tl.int32), [good.numel // (32 * WARPS), WARPS, 32]), axis=0), axis=1), axis=0)
