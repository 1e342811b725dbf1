"""q, k and v to climb the ladder with: from a file, whatever its rank and format, or random.

A file is .npz or .safetensors with arrays q, k and v, shaped (seq, dim), (heads, seq, dim) or (batch, heads, seq, dim), all three alike.
Fewer key/value heads than query heads (a divisor), more keys than queries and a v of another width are all accepted.
"""
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.lib.npyio import NpzFile
from safetensors import deserialize, safe_open

from onchip.errors import InputError, require
from onchip.roofline.dtypes import parse_dtype
from onchip.roofline.shape import AttentionShape
from onchip.simulate.formats import Array, Precision, parse_format
from onchip.simulate.problem import Problem

NAMES = ("q", "k", "v")
RANKS = {2: "(seq, dim)", 3: "(heads, seq, dim)", 4: "(batch, heads, seq, dim)"}
# safetensors' names for the formats of `onchip.roofline.dtypes`
SAFETENSORS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3", "F8_E5M2": "float8_e5m2"}


@dataclass(frozen=True, eq=False)
class Inputs:
    """q (B, H, Sq, d), k (B, Hkv, Sk, d) and v (B, Hkv, Sk, dv): finite, float64 if stored so, else float32, which changes no value."""

    q: Array
    k: Array
    v: Array
    dtype: str  # the format they were stored in
    source: str  # where they come from, in one line

    def shape(self, causal: str | None = None) -> AttentionShape:
        """The sizes, with the mask of `causal`."""
        batch, heads, seq_q, dim = self.q.shape
        _, kv_heads, seq_k, dim_v = self.v.shape
        return AttentionShape(seq_q, seq_k, dim, dim_v, batch, heads, kv_heads, causal)


def random_inputs(shape: AttentionShape, seed: int = 0) -> Inputs:
    """Normally distributed float32 q, k, v of `shape`: the numbers ``Problem.random`` of the same seed has."""
    problem = Problem.random(shape, Precision("float32"), seed)
    assert problem.q is not None
    assert problem.k is not None
    assert problem.v is not None
    return Inputs(problem.q, problem.k, problem.v, "float32", f"normally distributed, seed {seed}")


def load_inputs(path: str | Path) -> Inputs:
    """Read q, k and v from a .npz or .safetensors file.

    A string array ``source`` (.npz) or a metadata entry ``source`` (.safetensors) is kept as the note on where they come from.
    Pickled objects are never loaded. Raises `InputError`, naming the file and the array, for a file that cannot be read, an array that is
    missing, empty, not floating point, of another rank, or does not fit the others, and for NaN or infinity.
    """
    path = Path(path)
    with reading(path):
        if not path.is_file():
            raise InputError(f"{path}: {'is not a file' if path.exists() else 'no such file'}")
    readers = {".npz": _read_npz, ".safetensors": _read_safetensors}
    require(path.suffix.lower() in readers, str(path), f"a name ending in {path.suffix!r}", " or ".join(readers))
    stored, note = readers[path.suffix.lower()](path)

    dtypes = {name: _format_name(path, name, array) for name, array in stored.items()}
    require(len(set(dtypes.values())) == 1, f"{path}: q, k, v", ", ".join(dtypes.values()), "one format for all three")
    dtype = dtypes["q"]
    _check_shapes(path, stored)
    wide = {name: array.astype(np.float64 if dtype == "float64" else np.float32) for name, array in stored.items()}
    for name, array in wide.items():
        _check_finite(path, name, array)
    q, k, v = (array.reshape((1,) * (4 - array.ndim) + array.shape) for array in wide.values())
    return Inputs(q, k, v, dtype, " ".join(note.split()) or path.name)


@contextmanager
def reading(path: Path, what: str = "the file") -> Iterator[None]:
    """Turn whatever a parser raises into one line: OSError, ValueError, BadZipFile, zlib.error, EOFError …, no parser states them all."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error) or type(error).__name__
        raise InputError(f"{path}: {what} cannot be read: {' '.join(reason.split())}") from error


def _read_npz(path: Path) -> tuple[dict[str, Array], str]:
    with reading(path), path.open("rb") as handle:  # opened here: numpy leaves a file it cannot parse open
        file = np.load(handle, allow_pickle=False)
        if not isinstance(file, NpzFile):
            raise InputError(f"{path}: holds a single array, accepted: an archive of q, k and v (numpy.savez)")
        _check_names(path, file.files)
        arrays = {}
        for name in NAMES:
            with reading(path, name):
                arrays[name] = file[name]
            # a member that is not in .npy format comes back as bytes
            require(isinstance(arrays[name], np.ndarray), f"{path}: {name}", type(arrays[name]).__name__, "an array")
        with reading(path, "source"):
            note = file["source"] if "source" in file.files else np.array("")
    return arrays, str(note) if note.dtype.kind == "U" and note.ndim == 0 else ""


def _read_safetensors(path: Path) -> tuple[dict[str, Array], str]:
    with reading(path):
        with safe_open(path, framework="np") as file:
            names, metadata = list(file.keys()), file.metadata() or {}
        _check_names(path, names)
        # read as bytes: the library's own numpy reader knows neither bfloat16 nor the 8-bit formats
        tensors = dict(deserialize(path.read_bytes()))
    arrays = {}
    for name in NAMES:
        code = tensors[name]["dtype"]
        require(code in SAFETENSORS, f"{path}: {name}", code, f"a floating-point format ({', '.join(SAFETENSORS)})")
        arrays[name] = np.frombuffer(tensors[name]["data"], parse_format(SAFETENSORS[code]).dtype).reshape(tensors[name]["shape"])
    return arrays, metadata.get("source", "")


def _check_names(path: Path, there: Iterable[str]) -> None:
    missing = [name for name in NAMES if name not in there]
    require(not missing, str(path), f"no array {', '.join(missing)} (there: {', '.join(sorted(there)) or 'none'})", "arrays q, k and v")


def _format_name(path: Path, name: str, array: Array) -> str:
    try:
        return parse_dtype(array.dtype.name)
    except InputError:
        hint = "; bfloat16 and 8-bit floats come as .safetensors, .npz loses their format" if array.dtype.kind == "V" else ""
        accepted = f"a floating-point format ({', '.join(SAFETENSORS.values())}){hint}"
        raise InputError(f"{path}: {name}: got {array.dtype.name}, accepted: {accepted}") from None


def _check_shapes(path: Path, arrays: dict[str, Array]) -> None:
    for name, array in arrays.items():
        require(array.ndim in RANKS, f"{path}: {name}", f"shape {array.shape}", " or ".join(RANKS.values()))
        require(array.size > 0, f"{path}: {name}", f"shape {array.shape}, which is empty", "at least one element")
    q, k, v = (array.shape for array in arrays.values())

    def fits(condition: bool, accepted: str) -> None:
        require(condition, f"{path}: q, k, v", f"shapes {q}, {k}, {v}", accepted)

    fits(len(q) == len(k) == len(v), "three arrays of one rank")
    fits(q[-1] == k[-1], "q and k of one head dim")
    fits(k[-2] == v[-2], "k and v of one length")
    fits(len(q) < 4 or q[0] == k[0] == v[0], "one batch size")
    if len(q) > 2:
        fits(k[-3] == v[-3], "k and v with one number of heads")
        fits(q[-3] % k[-3] == 0, "key/value heads that divide the query heads")


def _check_finite(path: Path, name: str, array: Array) -> None:
    bad = ~np.isfinite(array)
    if bad.any():
        first = tuple(int(i) for i in np.unravel_index(bad.argmax(), array.shape))
        raise InputError(f"{path}: {name}{list(first)} is {array[first]}, accepted: finite values ({int(bad.sum())} are not)")
