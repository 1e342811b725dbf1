"""What a GPU can do: limits, peaks and sizes, each card with the document its figures come from.

Every register, shared-memory and bandwidth budget of the library is written here and nowhere else. A figure no public document gives is
``None`` (its roof is then unknown); one carried over from a relative is listed in `GPU.assumed`; one measured on the card at hand replaces
the datasheet's through `GPU.with_ceilings` and is listed in `GPU.measured`.

Units: rates in 1e9 or 1e12 a second as the field's name says, capacities of DRAM in decimal bytes (as sold), caches and shared memory in
binary ones (as built). Matmul peaks are dense, with fp32 accumulation.
"""
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from onchip.errors import InputError, require
from onchip.roofline.dtypes import ALIASES, BYTES, parse_dtype

KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True)
class Architecture:
    """Limits all cards of one compute capability share (CUDA C++ Programming Guide, technical specifications per compute capability)."""

    smem_per_sm: int  # bytes
    smem_per_block: int  # bytes, after the opt-in (cudaFuncSetAttribute)
    max_threads_per_sm: int
    max_blocks_per_sm: int
    vector_per_clock_sm: int  # fp32 lanes
    smem_reserved: int = KIB  # bytes the system takes from the SM's budget for each block, from compute capability 8.0 on
    smem_static_limit: int = 48 * KIB  # bytes a block may have without the opt-in
    registers_per_sm: int = 65536  # 32-bit
    max_registers_per_thread: int = 255
    exps_per_clock_sm: int = 16  # MUFU (arithmetic-throughput table, exp2)
    smem_bytes_per_clock_sm: int = 128  # 32 banks × 4 B
    warp: int = 32
    tensor_flops_per_clock_sm: int | None = None  # dense 16-bit; None where cards of one capability differ (GeForce runs at half rate)


ARCHITECTURES: Mapping[tuple[int, int], Architecture] = MappingProxyType({
    (7, 0): Architecture(96 * KIB, 96 * KIB, 2048, 32, 64, smem_reserved=0, tensor_flops_per_clock_sm=1024),
    (7, 5): Architecture(64 * KIB, 64 * KIB, 1024, 16, 64, smem_reserved=0, tensor_flops_per_clock_sm=1024),
    (8, 0): Architecture(164 * KIB, 163 * KIB, 2048, 32, 64, tensor_flops_per_clock_sm=2048),
    (8, 6): Architecture(100 * KIB, 99 * KIB, 1536, 16, 128),
    (8, 9): Architecture(100 * KIB, 99 * KIB, 1536, 24, 128),
    (9, 0): Architecture(228 * KIB, 227 * KIB, 2048, 32, 128, tensor_flops_per_clock_sm=4096),
    (10, 0): Architecture(228 * KIB, 227 * KIB, 2048, 32, 128, tensor_flops_per_clock_sm=8192),
    (12, 0): Architecture(100 * KIB, 99 * KIB, 1536, 24, 128),
})

# AMD CDNA 3 (white paper and ISA reference): a compute unit stands for an SM, LDS for shared memory, a 64-lane wavefront for a warp.
# Vector instructions issue two fp32 a lane; a transcendental takes four times as long as an add.
CDNA3 = Architecture(64 * KIB, 64 * KIB, 2048, 16, 128, smem_reserved=0, smem_static_limit=64 * KIB, registers_per_sm=131072,
                     max_registers_per_thread=512, warp=64)


@dataclass(frozen=True, kw_only=True)
class GPU(Architecture):
    """One card, and with it the limits of its architecture."""

    name: str  # as --gpu takes it
    title: str
    capability: tuple[int, int] | None  # None: not an NVIDIA card
    sms: int
    clock_ghz: float  # boost clock the vendor's peaks are computed from
    dram_gbps: float
    dram_bytes: int | None
    # by format, only those the card has; 'float32' on the CUDA cores, the others on the tensor cores
    matmul_tflops: Mapping[str, float] = field(hash=False)
    source: str
    l2_bytes: int | None = None
    l2_bytes_per_clock: float | None = None  # read, whole chip
    assumed: tuple[str, ...] = ()  # fields taken from a relative or a third party: no document of the vendor gives them
    measured: tuple[str, ...] = ()  # ceilings measured on the card itself

    def matmul_rate(self, dtype: str) -> float:
        """Dense matmul FLOP/s in `dtype`. Raises `InputError` naming the formats the card has."""
        key = parse_dtype(dtype)
        if key not in self.matmul_tflops:
            raise InputError(f"dtype: got {dtype}, accepted on {self.title}: {', '.join(self.matmul_tflops)}")
        return self.matmul_tflops[key] * 1e12

    @property
    def dram_rate(self) -> float:
        """Device memory, B/s."""
        return self.dram_gbps * 1e9

    @property
    def l2_rate(self) -> float | None:
        """L2 → SMs, B/s; None where no figure exists."""
        return None if self.l2_bytes_per_clock is None else self.l2_bytes_per_clock * self.clock_ghz * 1e9

    @property
    def smem_rate(self) -> float:
        """Shared memory of all SMs, B/s."""
        return self._per_clock(self.smem_bytes_per_clock_sm)

    @property
    def exp_rate(self) -> float:
        """Exponentials of all SMs (MUFU), 1/s."""
        return self._per_clock(self.exps_per_clock_sm)

    @property
    def vector_rate(self) -> float:
        """fp32 instructions of all SMs, an FMA counting once, 1/s."""
        return self._per_clock(self.vector_per_clock_sm)

    def _per_clock(self, amount: int) -> float:
        return self.sms * amount * self.clock_ghz * 1e9

    def knee(self, dtype: str) -> float:
        """FLOPs a byte of DRAM at which matmul and memory take equally long."""
        return self.matmul_rate(dtype) / self.dram_rate

    def with_ceilings(self, *, dram_gbps: float | None = None, matmul_tflops: Mapping[str, float] | None = None,
                      l2_gbps: float | None = None, clock_ghz: float | None = None) -> "GPU":
        """The same card with measured ceilings in place of the datasheet's; `measured` names what was replaced.

        `l2_gbps` is kept a clock, so it belongs to the clock in force (`clock_ghz` if given too). Formats `matmul_tflops` does not name
        keep their peaks. Raises `InputError` unless every figure is above 0.
        """
        changes: dict[str, Any] = {}
        noted = list(self.measured)
        for name, value in (("clock_ghz", clock_ghz), ("dram_gbps", dram_gbps), ("l2_gbps", l2_gbps)):
            if value is not None:
                changes[name] = _positive(name, value)
                noted.append(name)
        if "l2_gbps" in changes:
            changes["l2_bytes_per_clock"] = changes.pop("l2_gbps") / changes.get("clock_ghz", self.clock_ghz)
        if matmul_tflops:
            given = _peaks(matmul_tflops)
            changes["matmul_tflops"] = {**self.matmul_tflops, **given}
            noted += [f"{dtype}_tflops" for dtype in given]
        return replace(self, **changes, measured=tuple(dict.fromkeys(noted)))


def _positive(name: str, value: float) -> float:
    require(0 < value < float("inf"), name, value, "a number above 0")
    return value


def _peaks(tflops: Mapping[str, float]) -> dict[str, float]:
    return {parse_dtype(dtype): _positive(f"{dtype}_tflops", value) for dtype, value in tflops.items()}


def _card(name: str, title: str, arch: tuple[int, int] | Architecture, source: str, *, sms: int, clock: float, gbps: float, gb: float,
          l2: float, l2_clk: float | None = None, half: float, bf16: bool = True, tf32: float | None = None, fp32: float | None = None,
          fp8: float | None = None, fp64: float | None = None, assumed: tuple[str, ...] = ()) -> GPU:
    """One row: clock in GHz, `gb` of DRAM, `l2` in MiB, `l2_clk` in B/clk, TFLOP/s by format; `half` is float16, and bfloat16 if `bf16`."""
    peaks = {"float16": half, "bfloat16": half if bf16 else None, "tf32": tf32, "float32": fp32, "float64": fp64,
             "float8_e4m3": fp8, "float8_e5m2": fp8}
    capability, limits = (None, arch) if isinstance(arch, Architecture) else (arch, ARCHITECTURES[arch])
    return GPU(
        **vars(limits), name=name, title=title, capability=capability, source=source, sms=sms, clock_ghz=clock,
        dram_gbps=gbps, dram_bytes=round(gb * 1e9), l2_bytes=round(l2 * MIB), l2_bytes_per_clock=l2_clk,
        matmul_tflops={dtype: peak for dtype, peak in peaks.items() if peak is not None}, assumed=assumed,
    )


# What cards of one chip share. L2 of A100 and V100: 5120 and 2048 B/clk (A100 white paper). NVIDIA gives none for Hopper: A100's figure is
# carried over, since GH100 keeps the two-partition L2 (5120 B/clk is 9.4 TB/s at 1.83 GHz).
_A100: Any = {"sms": 108, "clock": 1.41, "l2": 40, "l2_clk": 5120, "half": 312, "tf32": 156, "fp32": 19.5, "fp64": 19.5}
_HOPPER: Any = {"sms": 132, "clock": 1.83, "l2_clk": 5120, "half": 989.4, "tf32": 494.7, "fp32": 66.9, "fp8": 1978.9, "fp64": 66.9}
_CARRIED = ("l2_bytes_per_clock",)

_CARDS = (
    _card("v100", "V100-SXM2-32GB", (7, 0), "NVIDIA V100 data sheet; V100 and A100 white papers",
          sms=80, clock=1.53, gbps=900, gb=32, l2=6, l2_clk=2048, half=125, bf16=False, fp32=15.7, fp64=7.8),
    _card("t4", "T4", (7, 5), "NVIDIA T4 data sheet; Turing white paper",
          sms=40, clock=1.59, gbps=320, gb=16, l2=4, half=65, bf16=False, fp32=8.1),
    _card("a100-80gb", "A100-SXM4-80GB", (8, 0), "NVIDIA A100 data sheet and white paper", gbps=2039, gb=80, **_A100),
    _card("a100-40gb", "A100-SXM4-40GB", (8, 0), "NVIDIA A100 data sheet and white paper", gbps=1555, gb=40, **_A100),
    _card("a100-80gb-pcie", "A100-PCIe-80GB", (8, 0), "NVIDIA A100 data sheet and white paper", gbps=1935, gb=80, **_A100),
    _card("a10", "A10", (8, 6), "NVIDIA A10 data sheet; GA102 white paper",
          sms=72, clock=1.695, gbps=600, gb=24, l2=6, half=125, tf32=62.5, fp32=31.2),
    _card("rtx-a6000", "RTX A6000", (8, 6), "NVIDIA GA102 white paper, appendix",
          sms=84, clock=1.8, gbps=768, gb=48, l2=6, half=154.8, tf32=77.4, fp32=38.7),
    _card("rtx-3090", "GeForce RTX 3090", (8, 6), "NVIDIA GA102 white paper, appendix",
          sms=82, clock=1.695, gbps=936, gb=24, l2=6, half=71, tf32=35.6, fp32=35.6),
    _card("l4", "L4", (8, 9), "NVIDIA L4 data sheet, halved where it counts sparsity; Ada white paper",
          sms=58, clock=2.04, gbps=300, gb=24, l2=48, half=121, tf32=60, fp32=30.3, fp8=242.5),
    _card("l40s", "L40S", (8, 9), "NVIDIA L40S data sheet; Ada white paper",
          sms=142, clock=2.52, gbps=864, gb=48, l2=96, half=362.05, tf32=183, fp32=91.6, fp8=733),
    _card("rtx-4090", "GeForce RTX 4090", (8, 9), "NVIDIA Ada white paper, appendix",
          sms=128, clock=2.52, gbps=1008, gb=24, l2=72, half=165.2, tf32=82.6, fp32=82.6, fp8=330.3),
    _card("h100", "H100-SXM5-80GB", (9, 0), "NVIDIA H100 data sheet and white paper", gbps=3350, gb=80, l2=50, assumed=_CARRIED, **_HOPPER),
    # The data sheet's vector peaks are stated at 1.755 GHz, its tensor peaks at 1.62 GHz.
    _card("h100-pcie", "H100-PCIe-80GB", (9, 0), "NVIDIA H100 data sheet and white paper; HBM2e at 1593 MHz × 5120 bit",
          sms=114, clock=1.755, gbps=2039, gb=80, l2=50, l2_clk=5120, half=756, tf32=378, fp32=51.2, fp8=1513, fp64=51.2, assumed=_CARRIED),
    _card("h200", "H200-SXM-141GB", (9, 0), "NVIDIA H200 data sheet; L2 size as the device reports it",
          gbps=4800, gb=141, l2=60, assumed=_CARRIED, **_HOPPER),
    _card("gh200", "GH200 (96 GB HBM3)", (9, 0), "NVIDIA GH200 data sheet; L2 size of the full GH100",
          gbps=4000, gb=96, l2=60, assumed=("l2_bytes", *_CARRIED), **_HOPPER),
    # NVIDIA publishes no data sheet; these are resellers' figures. 148 TFLOP/s is what 78 SMs do at 0.46 GHz: tensor cores held back.
    _card("h20", "H20-SXM-96GB", (9, 0), "resellers' specifications of the HGX H20",
          sms=78, clock=1.83, gbps=4000, gb=96, l2=60, l2_clk=5120, half=148, tf32=74, fp8=296,
          assumed=("sms", "clock_ghz", "dram_gbps", "matmul_tflops", "l2_bytes", *_CARRIED)),
    _card("b200", "B200-SXM-180GB", (10, 0), "NVIDIA HGX and DGX B200 data sheets; clock from 2250 TFLOP/s at 8192 FLOP/clk/SM",
          sms=148, clock=1.856, gbps=8000, gb=180, l2=126, half=2250, tf32=1100, fp32=80, fp8=4500, fp64=40,
          assumed=("sms", "clock_ghz", "l2_bytes")),
    _card("rtx-5090", "GeForce RTX 5090", (12, 0), "NVIDIA RTX Blackwell white paper, appendix",
          sms=170, clock=2.407, gbps=1792, gb=32, l2=96, half=209.5, tf32=104.8, fp32=104.8, fp8=419),
    # What all XCDs share is the 256 MB Infinity Cache (17.2 TB/s): it plays L2's part, the 4 MB inside each XCD does not.
    _card("mi300x", "Instinct MI300X", CDNA3, "AMD MI300X data sheet; CDNA 3 white paper",
          sms=304, clock=2.1, gbps=5300, gb=192, l2=256, l2_clk=8192, half=1307.4, tf32=653.7, fp32=163.4, fp8=2614.9, fp64=163.4),
)

GPUS: Mapping[str, GPU] = MappingProxyType({gpu.name: gpu for gpu in _CARDS})

# What people and drivers call them, without case, punctuation and the vendor's words.
_NICKNAMES = {
    "a100": "a100-80gb", "a100sxm": "a100-80gb", "a100sxm480gb": "a100-80gb", "a10080": "a100-80gb",
    "a100sxm440gb": "a100-40gb", "a10040": "a100-40gb", "a100pcie40gb": "a100-40gb",
    "a100pcie": "a100-80gb-pcie", "a10080gbpcie": "a100-80gb-pcie", "a100pcie80gb": "a100-80gb-pcie",
    "v100sxm216gb": "v100", "v100sxm232gb": "v100",
    "a6000": "rtx-a6000", "3090": "rtx-3090", "4090": "rtx-4090", "5090": "rtx-5090",
    "h100sxm": "h100", "h100sxm5": "h100", "h10080gb": "h100", "h10080gbhbm3": "h100",
    "h200sxm": "h200", "h200141gb": "h200", "gh200480gb": "gh200", "gh200120gb": "gh200",
}


def find_gpu(name: str) -> GPU:
    """The card called `name`: ``'h200'``, ``'A100'``, ``'RTX 4090'``, or as torch reports it, ``'NVIDIA A100-SXM4-80GB'``.

    Case, spaces and dashes do not matter. Raises `InputError` listing the known cards.
    """
    key = re.sub(r"nvidia|geforce|tesla|amd|instinct|[^a-z0-9]", "", name.lower())
    known = {gpu.replace("-", ""): gpu for gpu in GPUS} | _NICKNAMES
    if key not in known:
        raise InputError(f"gpu: got {name!r}, accepted: {', '.join(GPUS)}, or numbers such as 'sms=132,dram_gbps=4800,bf16_tflops=989'")
    return GPUS[known[key]]


def custom_gpu(*, sms: int, dram_gbps: float, matmul_tflops: Mapping[str, float], capability: tuple[int, int] = (9, 0),
               clock_ghz: float | None = None, l2_mib: float | None = None, l2_gbps: float | None = None,
               dram_gb: float | None = None) -> GPU:
    """A card by numbers.

    `matmul_tflops` gives the dense peak of each format the card has; an SM's limits follow from the compute `capability` (default 9.0).
    Left out, `clock_ghz` follows from the 16-bit peak where all cards of that capability run the tensor cores at one rate (7.0, 7.5, 8.0,
    9.0, 10.0) and must be given elsewhere; any other figure left out is unknown, and so is its roof. Raises `InputError`.
    """
    require(capability in ARCHITECTURES, "capability", ".".join(map(str, capability)), ", ".join(f"{a}.{b}" for a, b in ARCHITECTURES))
    require(sms >= 1 and sms == int(sms), "sms", sms, "an integer ≥ 1")
    peaks = _peaks(matmul_tflops)
    require(bool(peaks), "matmul_tflops", "none", "at least one peak, such as bf16_tflops=989")
    for name, value in (("dram_gbps", dram_gbps), ("clock_ghz", clock_ghz), ("l2_mib", l2_mib), ("l2_gbps", l2_gbps), ("dram_gb", dram_gb)):
        if value is not None:
            _positive(name, value)
    arch = ARCHITECTURES[capability]
    if clock_ghz is None:
        half = peaks.get("bfloat16") or peaks.get("float16")
        if half is None or arch.tensor_flops_per_clock_sm is None:
            raise InputError("clock_ghz: got nothing, accepted: the boost clock in GHz (the peaks given do not tell it)")
        clock_ghz = half * 1e3 / (sms * arch.tensor_flops_per_clock_sm)
    return GPU(
        **vars(arch), name="custom", title="custom GPU", capability=capability, source="given by the caller", sms=int(sms),
        clock_ghz=clock_ghz, dram_gbps=dram_gbps, dram_bytes=None if dram_gb is None else round(dram_gb * 1e9), matmul_tflops=peaks,
        l2_bytes=None if l2_mib is None else round(l2_mib * MIB), l2_bytes_per_clock=None if l2_gbps is None else l2_gbps / clock_ghz,
    )


_NUMBERS = ("sms", "clock_ghz", "dram_gbps", "dram_gb", "l2_mib", "l2_gbps")
_CEILINGS = ("clock_ghz", "dram_gbps", "l2_gbps")


def parse_gpu(text: str) -> GPU:
    """What ``--gpu`` takes: a name, numbers, or a name followed by measured ceilings.

    ``'h200'``; ``'sms=132,dram_gbps=4800,bf16_tflops=989'`` (see `custom_gpu`; the compute capability as ``capability=8.0``);
    ``'h200,dram_gbps=4250,bf16_tflops=691'`` (see `GPU.with_ceilings`). Raises `InputError` for an unknown card, field or number.
    """
    items = [item.strip() for item in text.split(",")]
    base = find_gpu(items.pop(0)) if "=" not in items[0] else None
    numbers = _CEILINGS if base else _NUMBERS
    given: dict[str, Any] = {}
    peaks: dict[str, float] = {}
    for item in items:
        key, _, value = item.partition("=")
        dtype = key.removesuffix("_tflops")
        if key in numbers:
            given[key] = _number(key, value)
        elif dtype != key and (dtype in BYTES or dtype in ALIASES):
            peaks[dtype] = _number(key, value)
        elif key == "capability" and not base:
            require(re.fullmatch(r"\d+\.\d", value) is not None, key, repr(value), "a compute capability such as 9.0")
            given[key] = tuple(map(int, value.split(".")))
        else:
            accepted = [*numbers, "bf16_tflops (or any format's)", *([] if base else ["capability"])]
            raise InputError(f"gpu: got {item!r} in {text!r}, accepted: {', '.join(accepted)}")
    if base:
        return base.with_ceilings(matmul_tflops=peaks, **given) if items else base
    for needed in ("sms", "dram_gbps"):
        require(needed in given, "gpu", repr(text), f"numbers with {needed}=… among them")
    return custom_gpu(matmul_tflops=peaks, **given)


def _number(key: str, value: str) -> float:
    try:
        return _positive(key, float(value))
    except ValueError:
        raise InputError(f"{key}: got {value!r}, accepted: a number above 0") from None
