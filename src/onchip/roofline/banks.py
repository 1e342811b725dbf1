"""Shared-memory bank conflicts: how many turns one warp-wide access takes on a given layout.

Shared memory is 32 banks of 4-byte words: byte address a lies in word w = ⌊a / 4⌋ of bank w mod 32. A request is served in phases:

| access | phases | lanes a phase |
|---|---|---|
| up to 4 bytes a lane | 1 | 32 |
| 8 bytes a lane | 2 | 16 |
| 16 bytes a lane | 4 | 8 |
| ldmatrix/stmatrix .x1 .x2 .x4 | 1, 2, 4 (one an 8×8 matrix) | 8 row addresses of 16 bytes |

Within a phase lanes that touch the same word share it (broadcast); different words of one bank wait for each other. Hence a phase takes
max over banks of the number of distinct words: its *wavefronts*, of which one is unavoidable. n wavefronts are an n-way conflict.
A lane's address must be a multiple of its access's bytes; otherwise the hardware raises an error and there is no count.

Matrices are served one after another, whatever their banks, their order and .trans. Nsight Compute counts on an H200 what this rule gives:
on rows of 64 elements of 2 bytes 28, 14 and 7 conflicts an ldmatrix.x4, .x2 and .x1, of 80 elements 4, in every order of the matrices, of
72 or swizzled none; and for a scalar column on 64, 65, 66, 72, 80 and swizzled 31, 1, 0, 3, 7 and 3.

Sources: CUDA C++ Programming Guide (shared memory; tensor map swizzle modes), PTX ISA (ldmatrix; tensor swizzling modes).
"""
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import gcd

from onchip.errors import require

BANKS = 32
WORD = 4  # bytes a bank delivers a clock
LINE = BANKS * WORD  # bytes after which the banks repeat
CHUNK = 16  # bytes swizzles keep together: the widest access of one lane
WIDTHS = (1, 2, 4, 8, 16)  # bytes one lane can access

TMA_SPANS = {"32B": 32, "64B": 64, "128B": 128}  # swizzle mode of a tensor map → bytes of the box rows it permutes
SWIZZLES = ("none", "xor", *TMA_SPANS)


@dataclass(frozen=True)
class Layout:
    """A rows × cols tile in shared memory, row after row: `pad` unused elements end each row, `swizzle` permutes its 16-byte chunks.

    * ``'none'``: element (r, c) at byte (r · (cols + pad) + c) · element_bytes.
    * ``'xor'``: chunk ← chunk ⊕ (⌊r · w / 8⌋ mod w) with w = gcd(chunks a row, 8): a chunk of any 8 consecutive rows fills all 32 banks.
    * ``'32B'``, ``'64B'``, ``'128B'``: what a TMA copy in that mode writes. The tile is cut into boxes one span wide, one after the other,
      each starting where the pattern does (a multiple of 8 spans); 1, 2 or 3 address bits from bit 4 up are XORed with those from bit 7.

    Raises `InputError` for sizes below 1, a negative pad, an element that is no power of two up to 8 bytes, padding under a TMA swizzle
    (boxes are dense), and ``'xor'`` on rows that are not whole chunks.
    """

    rows: int
    cols: int
    element_bytes: int = 2
    pad: int = 0  # elements
    swizzle: str = "none"

    def __post_init__(self) -> None:
        for name, least in (("rows", 1), ("cols", 1), ("pad", 0)):
            value = getattr(self, name)
            require(isinstance(value, int) and value >= least, name, repr(value), f"an integer ≥ {least}")
        require(self.element_bytes in (1, 2, 4, 8), "element_bytes", self.element_bytes, "1, 2, 4 or 8")
        require(self.swizzle in SWIZZLES, "swizzle", repr(self.swizzle), ", ".join(SWIZZLES))
        if self.swizzle in TMA_SPANS:
            require(self.pad == 0, "pad", self.pad, f"0 with swizzle {self.swizzle}: a TMA copy writes its rows without gaps")
        elif self.swizzle == "xor":
            require(self.pitch % CHUNK == 0, "swizzle", f"'xor' on rows of {self.pitch} B", f"padded rows of a multiple of {CHUNK} B")

    @property
    def pitch(self) -> int:
        """Bytes from the start of a row to the start of the next one (inside a box, for the TMA modes)."""
        return TMA_SPANS.get(self.swizzle) or (self.cols + self.pad) * self.element_bytes

    @property
    def nbytes(self) -> int:
        """Bytes the tile occupies."""
        if self.swizzle not in TMA_SPANS:
            return self.rows * self.pitch
        return -(-self.cols * self.element_bytes // self.pitch) * self._box_bytes

    @property
    def extra_bytes(self) -> int:
        """Bytes occupied beyond the elements themselves."""
        return self.nbytes - self.rows * self.cols * self.element_bytes

    @property
    def _box_bytes(self) -> int:
        return -(-self.rows // 8) * 8 * self.pitch

    def address(self, row: int, col: int) -> int:
        """Byte address of element (row, col), the tile starting at 0 (aligned to 8 spans, at most 1 KiB, for the TMA modes)."""
        byte = col * self.element_bytes
        if self.swizzle in TMA_SPANS:
            box, byte = divmod(byte, self.pitch)
            linear = box * self._box_bytes + row * self.pitch + byte
            return linear ^ ((linear >> 7) % (self.pitch // CHUNK) << 4)
        if self.swizzle == "xor":
            width = gcd(self.pitch // CHUNK, 8)
            byte ^= row * width // 8 % width * CHUNK
        return row * self.pitch + byte


@dataclass(frozen=True)
class Pattern:
    """Which elements the lanes of a warp touch: the first warp of a walk over the tile, starting at (0, 0).

    The walk runs `along` a ``'row'`` (then the next row) or down a ``'column'`` of `height` rows (0: the tile's; then the next column),
    each lane taking `width` bytes (0: one element). The matrix operations are columns of 16-byte rows: .x4 addresses 16 rows × 32 bytes.
    """

    along: str
    width: int = 0
    lanes: int = 32
    height: int = 0


PATTERNS: dict[str, Pattern] = {
    "column": Pattern("column"),
    "row": Pattern("row"),
    **{f"{along}-{width}B": Pattern(along, width) for width in (4, 8, 16) for along in ("column", "row")},
    "ldmatrix.x1": Pattern("column", CHUNK, lanes=8, height=8),
    "ldmatrix.x2": Pattern("column", CHUNK, lanes=16, height=16),
    "ldmatrix.x4": Pattern("column", CHUNK, lanes=32, height=16),
}


def parse_pattern(name: str, argument: str = "pattern") -> str:
    """The canonical name: ``'ldmatrix'``, ``'stmatrix.x4.trans'`` → ``'ldmatrix.x4'`` (same addresses). Raises `InputError` if unknown."""
    matrix = re.fullmatch(r"(?:ld|st)matrix(?:\.x([124]))?(?:\.trans)?", name)
    key = f"ldmatrix.x{matrix[1] or 4}" if matrix else name
    require(key in PATTERNS, argument, repr(name), f"{', '.join(PATTERNS)} (stmatrix and .trans alike; ldmatrix alone is .x4)")
    return key


@dataclass(frozen=True)
class Phase:
    """The lanes served together; `words` holds, lane by lane from `first_lane`, the 4-byte words each of them touches."""

    first_lane: int
    words: tuple[tuple[int, ...], ...]

    @property
    def banks(self) -> tuple[tuple[int, ...], ...]:
        """Lane by lane, the banks it touches: word mod 32."""
        return tuple(tuple(word % BANKS for word in lane) for lane in self.words)

    @property
    def queues(self) -> tuple[tuple[int, ...], ...]:
        """Bank by bank, the distinct words asked of it in the order of the lanes: the k-th one is served in the k-th wavefront."""
        queues: list[dict[int, None]] = [{} for _ in range(BANKS)]
        for lane in self.words:
            for word in lane:
                queues[word % BANKS][word] = None
        return tuple(map(tuple, queues))

    @property
    def wavefronts(self) -> int:
        """Turns the phase takes: the longest queue."""
        return max(map(len, self.queues))


@dataclass(frozen=True)
class Request:
    """One warp-wide access: what `conflicts` and `request` return. A misaligned one has no phases and no figures (None)."""

    width: int  # bytes a lane
    addresses: tuple[int, ...]  # lane by lane, bytes
    phases: tuple[Phase, ...]

    @property
    def misaligned(self) -> bool:
        """True when the hardware would raise a misaligned-address error."""
        return not self.phases

    @property
    def ideal(self) -> int | None:
        """Wavefronts without a conflict: one a phase, as no phase touches more than 32 words."""
        return len(self.phases) or None

    @property
    def wavefronts(self) -> int | None:
        """Wavefronts the request takes, all phases."""
        return sum(phase.wavefronts for phase in self.phases) or None

    @property
    def degree(self) -> int | None:
        """n of the n-way conflict: wavefronts of the worst phase; 1 is conflict-free."""
        return max((phase.wavefronts for phase in self.phases), default=None)

    @property
    def bandwidth_left(self) -> float | None:
        """ideal / wavefronts: 1/n when every phase conflicts n ways."""
        return len(self.phases) / self.wavefronts if self.wavefronts else None

    @property
    def verdict(self) -> str:
        """``'conflict-free'``, ``'n-way'`` or ``'misaligned'``."""
        if self.misaligned:
            return "misaligned"
        return "conflict-free" if self.degree == 1 else f"{self.degree}-way"


def request(addresses: Sequence[int], width: int) -> Request:
    """Count one request from its lanes' byte addresses, each accessing `width` bytes.

    For ldmatrix and stmatrix pass the 8, 16 or 32 row addresses with a width of 16. Fewer than 32 addresses leave the other lanes idle.
    Raises `InputError` for no or more than 32 addresses, a negative address, and a width other than 1, 2, 4, 8 or 16.
    """
    require(width in WIDTHS, "width", width, ", ".join(map(str, WIDTHS)))
    require(1 <= len(addresses) <= 32, "addresses", f"{len(addresses)} of them", "1 to 32, one a lane")
    require(min(addresses) >= 0, "addresses", min(addresses), "byte addresses ≥ 0")
    if any(address % width for address in addresses):
        return Request(width, tuple(addresses), ())
    lanes = min(32, LINE // width)
    words = [tuple(range(a // WORD, (a + width - 1) // WORD + 1)) for a in addresses]
    return Request(width, tuple(addresses), tuple(Phase(i, tuple(words[i : i + lanes])) for i in range(0, len(words), lanes)))


def conflicts(layout: Layout, pattern: str) -> Request:
    """Count the request `pattern` (a name in `PATTERNS`) makes on `layout`.

    Misaligned as soon as the rows' starts are not multiples of the access's bytes, also where the first warp stays within row 0.
    Raises `InputError` for an unknown pattern, for elements wider than its access and for a tile too small for it.
    """
    name = parse_pattern(pattern)
    walk = PATTERNS[name]
    width = walk.width or layout.element_bytes
    require(width >= layout.element_bytes, "pattern", f"{name} on elements of {layout.element_bytes} B", "an access that holds an element")
    per_unit = width // layout.element_bytes
    units, height = layout.cols // per_unit, walk.height or layout.rows
    least = height if walk.height else 1, (walk.lanes // height if walk.height else 1) * per_unit
    require(layout.rows >= least[0] and layout.cols >= least[1],
            "pattern", f"{name} on a {layout.rows}×{layout.cols} tile", f"a tile of at least {least[0]}×{least[1]}")
    lanes = range(min(walk.lanes, layout.rows * units))
    spots = [divmod(lane, units) if walk.along == "row" else (lane % height, lane // height) for lane in lanes]
    addresses = tuple(layout.address(row, unit * per_unit) for row, unit in spots)
    if layout.rows > 1 and layout.pitch % width:
        return Request(width, addresses, ())
    return request(addresses, width)


@dataclass(frozen=True)
class Remedy:
    """Layouts that serve all the patterns asked for without a conflict; their `extra_bytes` is the price. None: there is none."""

    padded: Layout | None
    swizzled: Layout | None


def best_padding(layout: Layout, patterns: Sequence[str]) -> Remedy:
    """The smallest padding, and the first swizzle, under which every one of `patterns` is conflict-free on a tile of `layout`'s shape.

    The search over paddings is exhaustive: 128 bytes more a row change neither the bank nor the alignment of any address, so one line's
    worth of paddings is all there are. Raises `InputError` for an unknown pattern and for a tile too small for it.
    """
    def clean(candidate: Layout) -> bool:
        return all(conflicts(candidate, pattern).degree == 1 for pattern in patterns)

    plain = replace(layout, pad=0, swizzle="none")
    padded = (replace(plain, pad=pad) for pad in range(LINE // plain.element_bytes))
    # rows that are not whole chunks take the TMA modes (which round each row up to the span) but not a XOR within the row
    whole = plain.pitch % CHUNK == 0
    swizzled = (replace(plain, swizzle=swizzle) for swizzle in SWIZZLES[1 if whole else 2 :])
    return Remedy(next(filter(clean, padded), None), next(filter(clean, swizzled), None))


def table(rows: int = 64) -> Iterator[tuple[Layout, Request, Request]]:
    """For two-byte elements and the usual leading dimensions, then a XOR swizzle: (layout, scalar down a column, ldmatrix)."""
    layouts = [Layout(rows, 64, pad=pad) for pad in (0, 1, 2, 4, 8, 16)]
    layouts += [Layout(rows, 128), Layout(rows, 128, pad=8), Layout(rows, 64, swizzle="xor")]
    for layout in layouts:
        yield layout, conflicts(layout, "column"), conflicts(layout, "ldmatrix.x4")
