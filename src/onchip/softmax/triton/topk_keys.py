"""Sorting what is left of a row for the k largest: keys, integers in the order of the values with the place below it."""
import triton
import triton.language as tl

MAXIMA = tl.constexpr(16)  # up to so many are found one by one, in a quarter of the instructions of a bitonic sort


@triton.jit
def keys_of(s, place, NARROW: tl.constexpr):
    """Keys of x's own values in float32: 16 bits of value above 16 of place for 16-bit types, 32 above 32 for float32."""
    if NARROW == "fp32":
        bits = s.to(tl.int32, bitcast=True)
        keys = ((bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) << 32) | (0xFFFFFFFF - place.to(tl.int64))
    else:
        narrow = s.to(tl.bfloat16) if NARROW == "bf16" else s.to(tl.float16)
        bits = narrow.to(tl.int16, bitcast=True).to(tl.int32)
        keys = ((bits ^ ((bits >> 15) & 0x7FFF)) << 16) | (0xFFFF - place)
    return keys


@triton.jit
def place_of(keys, NARROW: tl.constexpr):
    """Places of keys."""
    return (0xFFFFFFFF - (keys & 0xFFFFFFFF)).to(tl.int32) if NARROW == "fp32" else 0xFFFF - (keys & 0xFFFF)


@triton.jit
def value_of(keys, NARROW: tl.constexpr, LEAST: tl.constexpr):
    """Values of keys in float32, −∞ of LEAST, which is no element's."""
    if NARROW == "fp32":
        bits = (keys >> 32).to(tl.int32)
        s = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    else:
        bits = keys >> 16
        bits = (bits ^ ((bits >> 15) & 0x7FFF)).to(tl.int16)
        s = (bits.to(tl.bfloat16, bitcast=True) if NARROW == "bf16" else bits.to(tl.float16, bitcast=True)).to(tl.float32)
    return tl.where(keys > LEAST, s, float("-inf"))


@triton.jit
def one_by_one(keys, k, I: tl.constexpr, LEAST: tl.constexpr):
    """The k largest of each row of distinct keys, [rows, I], largest first, then LEAST; keys: [repeats, rows, columns]."""
    i = tl.arange(0, I)[None, :]
    best = tl.full([keys.shape[1], I], LEAST, keys.dtype)
    for at in range(k):
        most = tl.max(tl.max(keys, axis=0), axis=1)
        best = tl.where(i == at, most[:, None], best)
        keys = tl.where(keys == most[None, :, None], LEAST, keys)
    return best


@triton.jit
def largest_keys(keys, k, rounds, K: tl.constexpr, WARPS: tl.constexpr, LEAST: tl.constexpr):
    """The k largest of distinct keys, [K], largest first, then LEAST; the number of keys is a multiple of 32 · WARPS.

    Each warp finds the `rounds` largest of its own keys without a word to the others: as many as can be among the k. Of these WARPS · K
    a few are put in order by their rank, the number of larger ones, and many by sorting.
    """
    ROW: tl.constexpr = 32 if K < 32 else K
    found = one_by_one(tl.reshape(keys, [keys.numel // (32 * WARPS), WARPS, 32]), rounds, ROW, LEAST)  # lanes keep one each
    if K > MAXIMA:
        best = tl.reshape(tl.topk(tl.reshape(found, [1, WARPS * ROW]), K), [K])
    else:
        found = tl.reshape(tl.max(tl.reshape(found, [WARPS, ROW // K, K]), axis=1), [WARPS * K])
        rank = tl.sum((found[None, :] > found[:, None]).to(tl.int32), axis=1)
        best = tl.max(tl.where(rank[:, None] == tl.arange(0, K)[None, :], found[:, None], LEAST), axis=0)
    return best


@triton.jit
def most_of(good, WARPS: tl.constexpr):
    """Of how many `good` keys of one warp are most."""
    return tl.max(tl.sum(tl.sum(tl.reshape(good.to(tl.int32), [good.numel // (32 * WARPS), WARPS, 32]), axis=0), axis=1), axis=0)
