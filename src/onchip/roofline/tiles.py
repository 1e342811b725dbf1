"""What a tile of fused attention costs on the chip: shared memory to the byte, registers, blocks an SM, and whether it launches.

Two kinds of kernel:

* *uniform*: all warps alike; mma.sync, cp.async (Ampere's way; runs everywhere);
* *specialised*: one producer warpgroup that only copies (TMA) and 2 or 3 consumer warpgroups that only compute (wgmma). Hopper only.

Shared memory, each buffer aligned (128 B; 1024 B for the 128-byte swizzle of TMA), rows padded by `pad` elements or swizzled (0 B)::

    forward    Q (O leaves through it) + stages · (K + V) [+ P]
    backward   K + V + stages · (Q + dO + lse + D) + dS [+ P] [+ dQ]      a block owns bc keys and walks the queries

specialised: 8-byte mbarriers, a full and an empty one for each stage of each streamed tensor and for what stays; in the backward dS
`stages` times, and dQ (fp32) staged for TMA's reduce-add; P in shared memory only with `p_in_smem`. uniform: in the backward P and dS once
each, dQ by atomics.

Registers a compute thread, accumulators spread evenly over the compute threads (64 × 128 in fp32 costs a warpgroup 64 a thread)::

    forward    S + P + O + 24                                the peak when softmax overlaps the next QKᵀ; P packed (S/2 at 2 bytes)
    backward   dK + dV + max(S + dP, P + dS + dQ) + 24       dQ formed at most 128 columns at a time

24 is this model's allowance for m, l, addresses and counters. A thread that wants more than it may have spills: the kernel launches, but
slowly.

Sources: NVIDIA CUDA C++ Programming Guide (limits, occupancy); FlashAttention-2 (arXiv 2307.08691, §3.3); FlashAttention-3 (arXiv
2407.08608, §3.1–3.2: warp specialisation, setmaxnreg, two-stage overlap).
"""
from dataclasses import dataclass

from onchip.errors import InputError, require
from onchip.roofline.dtypes import BYTES, parse_dtype
from onchip.roofline.hardware import GPU, Architecture
from onchip.roofline.shape import count_blocks

FP32 = 4
OVERHEAD = 24  # registers a thread beside the accumulators
MAX_THREADS = 1024  # a block
WARPGROUP = 128  # threads
REGISTER_UNIT = 8  # registers a thread are allocated in eights: 256 a warp

# Registers a thread by number of consumer warpgroups, (consumer, producer), as setmaxnreg splits the 64 K of an SM:
# 2·240 + 24 = 3·168 and 3·160 + 32 = 4·128.
BUDGETS: dict[int, tuple[int, int]] = {2: (240, 24), 3: (160, 32)}


def _up(value: int, unit: int) -> int:
    return count_blocks(value, unit) * unit


def splits(br: int, bc: int, consumers: int, backward: bool) -> bool:
    """True when wgmma can share a tile out evenly: 64 rows for each warpgroup; in the backward, where S may be computed transposed and no
    row needs to stay in one warpgroup, also a multiple of 8 columns for each."""
    if not backward:
        return br % (64 * consumers) == 0
    return any(m % (64 * consumers) == 0 or (m % 64 == 0 and n % (8 * consumers) == 0) for m, n in ((br, bc), (bc, br)))


@dataclass(frozen=True)
class TileConfig:
    """One way to build the kernel: br query rows × bc keys a tile.

    `stages` buffers of every streamed tensor; `consumers` > 0 makes the kernel specialised and fixes `warps` at 4 · (consumers + 1); `pad`
    elements a row in uniform kernels. `backward`: the block owns bc keys and streams tiles of br queries.
    """

    br: int
    bc: int
    stages: int = 1
    warps: int = 0  # 0: 4, or what consumers imply
    consumers: int = 0
    pad: int = 0
    p_in_smem: bool = False
    backward: bool = False

    def __post_init__(self) -> None:
        for name in ("br", "bc"):
            value = getattr(self, name)
            require(value >= 16 and value % 16 == 0, f"tile {name}", value, "a multiple of 16")
        require(self.stages >= 1, "stages", self.stages, "an integer ≥ 1")
        require(self.pad >= 0, "pad", self.pad, "an integer ≥ 0")
        require(self.consumers == 0 or self.consumers in BUDGETS, "consumers", self.consumers, "0 (uniform), 2 or 3 warpgroups")
        if self.consumers:
            implied = 4 * (self.consumers + 1)
            require(self.warps in (0, implied), "warps", self.warps, f"{implied}, which {self.consumers} consumers + 1 producer make")
            require(self.pad == 0, "pad", self.pad, "0: TMA swizzles, it does not pad")
            require(splits(self.br, self.bc, self.consumers, self.backward), "tile", f"{self.br}×{self.bc}",
                    f"a tile wgmma can share out to {self.consumers} warpgroups, 64 rows each or, in the backward, 8 columns each")
        object.__setattr__(self, "warps", self.warps or 4 * (self.consumers + 1))
        require(self.warps >= 1 and self.br * self.bc >= self.warps * 128, "warps", self.warps,
                f"1 … {self.br * self.bc // 128}: each takes at least 16 × 8 of a {self.br} × {self.bc} tile")

    @property
    def specialised(self) -> bool:
        """A producer warpgroup copies, consumer warpgroups compute."""
        return self.consumers > 0

    @property
    def threads(self) -> int:
        """Threads a block."""
        return 32 * self.warps

    @property
    def compute_threads(self) -> int:
        """Threads the accumulators are spread over."""
        return WARPGROUP * self.consumers if self.specialised else self.threads

    @property
    def mma_rows(self) -> int:
        """Output rows that share one read of the other operand from shared memory: 64 with wgmma, a warp's rows (16 at least) with mma."""
        return 64 if self.specialised else max(16, self.br // self.warps)

    @property
    def splits_rows(self) -> bool:
        """A row of S lies in more than one warp, so that its maximum and sum are joined through shared memory."""
        return not self.specialised and 16 * self.warps > self.br

    def __str__(self) -> str:
        how = f"{self.consumers}+1 warpgroups" if self.specialised else f"{self.warps} warps"
        extra = f", +{self.pad} a row" * bool(self.pad) + ", P in shared memory" * self.p_in_smem
        return f"{self.br}×{self.bc}, {how}, {self.stages} stage{'s' * (self.stages > 1)}{extra}"


@dataclass(frozen=True)
class Footprint:
    """What one thread block of a configuration takes. Bytes, threads, 32-bit registers a thread."""

    config: TileConfig
    buffers: tuple[tuple[str, int], ...]  # name, bytes; in the order they lie in shared memory
    smem: int  # bytes a block, alignment included; without the 1 KiB the system reserves
    accumulators: tuple[tuple[str, float], ...]  # name, registers a compute thread at the peak
    registers: int  # a compute thread wants

    @property
    def threads(self) -> int:
        """Threads a block."""
        return self.config.threads

    @property
    def barriers(self) -> int:
        """Bytes of mbarriers."""
        return dict(self.buffers).get("mbarriers", 0)


def footprint(config: TileConfig, dtype: str, head_dim: int, head_dim_v: int | None = None) -> Footprint:
    """Shared memory and registers of `config` for Q, K of `head_dim` and V of `head_dim_v` (default: the same) in `dtype`.

    Head dims are rounded up to 32 bytes, one k-step of the tensor cores. Raises `InputError` for a format wider than 4 bytes, a bc that is
    not a multiple of the k-step, or a `pad` that breaks the 16-byte alignment of rows.
    """
    key = parse_dtype(dtype)
    e = BYTES[key]
    if e > FP32:
        raise InputError(f"dtype: got {dtype}, accepted: a format of at most 4 bytes (accumulators are fp32)")
    k_step = 32 // e
    require(config.bc % k_step == 0 and config.br % k_step == 0, "tile", f"{config.br}×{config.bc}", f"multiples of {k_step} in {key}")
    require(config.pad * e % 16 == 0, "pad", config.pad, f"a multiple of {16 // e} elements, so that rows of {key} stay 16-byte aligned")
    require(head_dim >= 1 and (head_dim_v is None or head_dim_v >= 1), "head_dim", (head_dim, head_dim_v), "integers ≥ 1")
    d, dv = _up(head_dim, k_step), _up(head_dim_v or head_dim, k_step)
    buffers = list(_buffers(config, e, d, dv).items())
    align, smem = 1024 if config.specialised else 128, 0
    for name, nbytes in buffers:
        smem = _up(smem, 8 if name == "mbarriers" else align) + nbytes
    peak = _registers(config, e, d, dv)
    return Footprint(config, tuple(buffers), smem, tuple(peak.items()), _up(round(sum(peak.values())) + OVERHEAD, REGISTER_UNIT))


def _buffers(c: TileConfig, e: int, d: int, dv: int) -> dict[str, int]:
    def rows(count: int, columns: int) -> int:
        return count * (columns + c.pad) * e

    if c.backward:
        copies = c.stages if c.specialised else 1
        sizes = {"K": rows(c.bc, d), "V": rows(c.bc, dv), "Q": c.stages * rows(c.br, d), "dO": c.stages * rows(c.br, dv),
                 "dS": copies * rows(c.br, c.bc)}
        if c.p_in_smem or not c.specialised:
            sizes["P"] = rows(c.br, c.bc)
        if c.specialised:
            sizes["dQ"] = c.br * d * FP32
        sizes |= {"lse": c.stages * c.br * FP32, "D": c.stages * c.br * FP32}
    else:
        sizes = {"Q": rows(c.br, max(d, dv)), "K": c.stages * rows(c.bc, d), "V": c.stages * rows(c.bc, dv)}
        if c.p_in_smem:
            sizes["P"] = rows(c.br, c.bc)
    if c.specialised:
        sizes["mbarriers"] = 8 * 2 * (2 * c.stages + 1 + c.backward)  # two streamed tensors, what stays, and dQ
    return sizes


def _registers(c: TileConfig, e: int, d: int, dv: int) -> dict[str, float]:
    def accumulator(rows: int, columns: int) -> float:
        return rows * columns / c.compute_threads

    s = accumulator(c.br, c.bc)
    p = 0.0 if c.p_in_smem else s * e / FP32
    if not c.backward:
        return {"S": s, "P": p, "O": accumulator(c.br, dv)}
    kept = {"dK": accumulator(c.bc, d), "dV": accumulator(c.bc, dv)}
    early = {"S": s, "dP": s}
    late = {"P": p, "dS": p, "dQ": accumulator(c.br, min(d, 128))}
    return kept | max(early, late, key=lambda part: sum(part.values()))


def register_cap(footprint: Footprint, gpu: GPU) -> int:
    """Registers a compute thread may have: the specialised budget, else what one block of this many threads leaves each, at most 255."""
    if footprint.config.specialised:
        return BUDGETS[footprint.config.consumers][0]
    return min(gpu.max_registers_per_thread, gpu.registers_per_sm // footprint.threads // REGISTER_UNIT * REGISTER_UNIT)


def spilled(footprint: Footprint, gpu: GPU) -> int:
    """Registers a thread that do not fit and go to local memory; 0 when all fit."""
    return max(0, footprint.registers - _up(register_cap(footprint, gpu), REGISTER_UNIT))


def needs_opt_in(footprint: Footprint, gpu: GPU) -> bool:
    """True when the block needs more than static shared memory may be (48 KiB): cudaFuncSetAttribute must raise the limit."""
    return footprint.smem > gpu.smem_static_limit


def launchable(footprint: Footprint, gpu: GPU) -> str | None:
    """None when the block can run on `gpu`; else why not, in words with numbers."""
    config = footprint.config
    if gpu.capability is None:
        return f"needs mma.sync or wgmma, the kernels this model describes, {gpu.title} has neither"
    has = ".".join(map(str, gpu.capability))
    if config.specialised and gpu.capability != (9, 0):
        return f"needs wgmma, which compute capability 9.0 alone has, {gpu.title} is {has}"
    if config.stages > 1 and gpu.capability < (8, 0):
        return f"needs cp.async for {config.stages} stages, which starts with compute capability 8.0, {gpu.title} is {has}"
    if footprint.threads > MAX_THREADS:
        return f"needs {footprint.threads} threads a block, {gpu.title} allows {MAX_THREADS}"
    if footprint.smem > gpu.smem_per_block:
        return f"needs {footprint.smem} B of shared memory a block, {gpu.title} allows {gpu.smem_per_block} B"
    return None


@dataclass(frozen=True)
class Occupancy:
    """Resident blocks of one SM, and what each resource alone would allow."""

    limits: tuple[tuple[str, int], ...]  # resource, blocks
    threads: int  # a block
    max_threads: int  # an SM

    @property
    def blocks(self) -> int:
        """Blocks an SM; 0 when none fits."""
        return min(blocks for _, blocks in self.limits)

    @property
    def limited_by(self) -> str:
        """The resource that allows the fewest blocks (the first of equals)."""
        return min(self.limits, key=lambda limit: limit[1])[0]

    @property
    def fraction(self) -> float:
        """Resident threads over the SM's maximum."""
        return self.blocks * self.threads / self.max_threads


def occupancy(footprint: Footprint, gpu: GPU) -> Occupancy:
    """Blocks an SM: the fewest that shared memory, registers, threads and block slots allow.

    Shared memory: what is asked for plus the reserved KiB, in units of 128 B. Registers: allocated a warp in units of 256, warps over the
    four schedulers evenly; a specialised block starts with an equal share of the register file for each thread (168 or 128) and moves
    them between warpgroups afterwards; a thread that wants more than its cap is given the cap.
    """
    if footprint.config.specialised:
        registers = gpu.registers_per_sm // footprint.threads // REGISTER_UNIT * REGISTER_UNIT
    else:
        registers = min(footprint.registers, register_cap(footprint, gpu))
    return resident(footprint.threads, registers, footprint.smem, gpu)


def resident(threads: int, registers: int, smem: int, gpu: Architecture) -> Occupancy:
    """`occupancy` of any kernel: threads and bytes of shared memory a block, registers a thread at the start."""
    warps = count_blocks(threads, gpu.warp)
    warps_by_registers = gpu.registers_per_sm // (_up(registers, REGISTER_UNIT) * gpu.warp) // 4 * 4
    limits = (
        ("shared memory", gpu.smem_per_sm // (_up(smem, 128) + gpu.smem_reserved)),
        ("registers", warps_by_registers // warps),
        ("threads", gpu.max_threads_per_sm // threads),
        ("block slots", gpu.max_blocks_per_sm),
    )
    return Occupancy(limits, threads, gpu.max_threads_per_sm)


def row_fits(n: int, dtype: str, gpu: GPU, rows: int = 1) -> bool:
    """True when `rows` rows of `n` elements fit in the shared memory of one block.

    One row of softmax over 32,768 fp16 is 64 KiB and fits; the 64 or 128 rows that a tile of attention needs at once do not.
    """
    require(n >= 1, "n", n, "an integer ≥ 1")
    require(rows >= 1, "rows", rows, "an integer ≥ 1")
    return rows * n * BYTES[parse_dtype(dtype)] <= gpu.smem_per_block
