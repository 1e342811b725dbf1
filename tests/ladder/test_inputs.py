import hashlib
import json
import os
import struct
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from onchip.errors import InputError
from onchip.ladder.inputs import load_inputs, random_inputs
from onchip.roofline.shape import AttentionShape

EXAMPLE = Path(__file__).parents[2] / "examples" / "data"
RNG = np.random.default_rng(0)


def normal(*shape: int, dtype: type = np.float32) -> np.ndarray:
    return RNG.standard_normal(shape).astype(dtype)


def arrays(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], dtype: type = np.float32) -> dict[str, np.ndarray]:
    return {name: normal(*shape, dtype=dtype) for name, shape in (("q", q), ("k", k), ("v", v))}


def save(path: Path, tensors: dict[str, np.ndarray], **note: str) -> Path:
    if path.suffix == ".npz":
        np.savez(path, **tensors, **note)
    else:
        save_file(tensors, path, metadata=note or None)
    return path


def save_code(path: Path, code: str, tensors: dict[str, np.ndarray]) -> Path:
    """A .safetensors file in a format that numpy has no name for: length of the header, header, data."""
    header, start = {}, 0
    for name, x in tensors.items():
        header[name] = {"dtype": code, "shape": x.shape, "data_offsets": [start, start + x.nbytes]}
        start += x.nbytes
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(x.tobytes() for x in tensors.values()))
    return path


def rejects(path: Path, *fragments: str) -> None:
    with pytest.raises(InputError) as error:
        load_inputs(path)
    message = str(error.value)
    assert "\n" not in message
    for fragment in (str(path), *fragments):
        assert fragment in message


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
@pytest.mark.parametrize(("q", "k", "v", "sizes"), [
    ((5, 4), (7, 4), (7, 3), AttentionShape(5, 7, 4, 3)),
    ((6, 5, 4), (2, 7, 4), (2, 7, 3), AttentionShape(5, 7, 4, 3, 1, 6, 2)),
    ((2, 6, 5, 4), (2, 3, 7, 4), (2, 3, 7, 4), AttentionShape(5, 7, 4, 4, 2, 6, 3)),
])
def test_every_rank_becomes_batch_heads_seq_dim(tmp_path, suffix, q, k, v, sizes):
    tensors = arrays(q, k, v)
    inputs = load_inputs(save(tmp_path / f"x{suffix}", tensors))
    assert inputs.shape() == sizes
    assert inputs.dtype == "float32"
    assert inputs.source == f"x{suffix}"
    for name, stored in tensors.items():
        got = getattr(inputs, name)
        assert got.ndim == 4
        assert got.dtype == np.float32
        np.testing.assert_array_equal(got.reshape(stored.shape), stored)


def test_causal_goes_into_the_shape(tmp_path):
    inputs = load_inputs(save(tmp_path / "x.npz", arrays((5, 4), (7, 4), (7, 4))))
    assert inputs.shape("top-left") == AttentionShape(5, 7, 4, 4, causal="top-left")


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_note_on_the_source(tmp_path, suffix):
    path = save(tmp_path / f"x{suffix}", arrays((5, 4), (7, 4), (7, 4)), source="layer 3\n of  a model")
    assert load_inputs(path).source == "layer 3 of a model"


def test_a_source_that_is_no_text_is_ignored(tmp_path):
    np.savez(tmp_path / "x.npz", **arrays((5, 4), (7, 4), (7, 4)), source=np.arange(3))
    assert load_inputs(tmp_path / "x.npz").source == "x.npz"


@pytest.mark.parametrize(("dtype", "name", "kept"), [
    (np.float64, "float64", np.float64), (np.float16, "float16", np.float32), (np.dtype(">f4"), "float32", np.float32)])
def test_numpy_formats(tmp_path, dtype, name, kept):
    tensors = {n: x.astype(dtype) for n, x in arrays((5, 4), (7, 4), (7, 4), np.float64).items()}
    inputs = load_inputs(save(tmp_path / "x.npz", tensors))
    assert (inputs.dtype, inputs.q.dtype) == (name, kept)
    np.testing.assert_array_equal(inputs.q[0, 0], tensors["q"])


@pytest.mark.parametrize(("code", "dtype", "name"), [
    ("BF16", ml_dtypes.bfloat16, "bfloat16"), ("F8_E4M3", ml_dtypes.float8_e4m3fn, "float8_e4m3"),
    ("F8_E5M2", ml_dtypes.float8_e5m2, "float8_e5m2")])
def test_formats_only_safetensors_has(tmp_path, code, dtype, name):
    tensors = arrays((5, 4), (7, 4), (7, 4), dtype)
    inputs = load_inputs(save_code(tmp_path / "x.safetensors", code, tensors))
    assert (inputs.dtype, inputs.q.dtype) == (name, np.float32)
    np.testing.assert_array_equal(inputs.v[0, 0], tensors["v"].astype(np.float32))


def test_no_such_file(tmp_path):
    rejects(tmp_path / "nothing.npz", "no such file")


def test_a_folder(tmp_path):
    (tmp_path / "x.npz").mkdir()
    rejects(tmp_path / "x.npz", "is not a file")


def test_a_file_the_system_will_not_open(tmp_path, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, os.strerror(13), "x.npz")

    path = save(tmp_path / "x.npz", arrays((5, 4), (7, 4), (7, 4)))
    monkeypatch.setattr(np, "load", refuse)
    rejects(path, "the file cannot be read: Permission denied")


@pytest.mark.parametrize("name", ["x.pt", "x", "npz"])
def test_unknown_suffix(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(b"anything")
    rejects(path, repr(path.suffix), ".npz or .safetensors")


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
@pytest.mark.parametrize("content", [b"", b"\0" * 7, b"not an archive at all", b"PK\x03\x04 cut short"])
def test_garbage(tmp_path, suffix, content):
    path = tmp_path / f"x{suffix}"
    path.write_bytes(content)
    rejects(path, "the file cannot be read")


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_cut_short(tmp_path, suffix):
    path = save(tmp_path / f"x{suffix}", arrays((5, 4), (7, 4), (7, 4)))
    path.write_bytes(path.read_bytes()[:-40])
    rejects(path, "the file cannot be read")


def test_flipped_bytes_name_the_array(tmp_path):
    path = save(tmp_path / "x.npz", tensors := arrays((5, 4), (7, 4), (7, 4)))
    path.write_bytes(path.read_bytes().replace(tensors["k"].tobytes(), bytes(tensors["k"].nbytes)))
    rejects(path, "k cannot be read", "CRC")


def test_an_array_that_claims_to_be_enormous(tmp_path):
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({1 << 50},), }}".ljust(117) + "\n"
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        for name in ("q", "k", "v"):
            archive.writestr(f"{name}.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode())
    rejects(tmp_path / "x.npz", "q cannot be read")


def test_a_single_array_is_not_an_archive(tmp_path):
    with (tmp_path / "x.npz").open("wb") as file:
        np.save(file, normal(5, 4))
    rejects(tmp_path / "x.npz", "a single array")


def test_a_member_that_is_not_an_array(tmp_path):
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        for name in ("q", "k", "v"):
            archive.writestr(name, b"text")
    rejects(tmp_path / "x.npz", "q", "an array")


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_missing_arrays_and_what_is_there(tmp_path, suffix):
    path = save(tmp_path / f"x{suffix}", {"query": normal(5, 4), "k": normal(5, 4)})
    rejects(path, "no array q, v", "there: k, query")


class Bomb:
    def __reduce__(self) -> tuple:
        return (pytest.fail, ("unpickled",))


def test_objects_are_never_unpickled(tmp_path):
    tensors = arrays((5, 4), (7, 4), (7, 4))
    np.savez(tmp_path / "x.npz", **tensors | {"v": np.array([Bomb()], object)})
    rejects(tmp_path / "x.npz", "v cannot be read", "Object arrays")


@pytest.mark.parametrize("dtype", [np.int64, np.bool_, np.complex64, np.longdouble])
def test_formats_that_are_not_floats_of_ours(tmp_path, dtype):
    tensors = arrays((5, 4), (7, 4), (7, 4))
    path = save(tmp_path / "x.npz", tensors | {"k": tensors["k"].astype(dtype)})
    rejects(path, "k", np.dtype(dtype).name, "float16, bfloat16")


def test_bfloat16_in_npz_says_where_it_belongs(tmp_path):
    rejects(save(tmp_path / "x.npz", arrays((5, 4), (7, 4), (7, 4), ml_dtypes.bfloat16)), "q", "void16", ".safetensors")


def test_integers_in_safetensors(tmp_path):
    path = save(tmp_path / "x.safetensors", arrays((5, 4), (7, 4), (7, 4)) | {"v": np.ones((7, 4), np.int32)})
    rejects(path, "v", "I32", "BF16")


def test_mixed_formats(tmp_path):
    path = save(tmp_path / "x.npz", arrays((5, 4), (7, 4), (7, 4)) | {"v": normal(7, 4, dtype=np.float16)})
    rejects(path, "float32, float32, float16", "one format")


@pytest.mark.parametrize(("q", "k", "v", "fragment"), [
    ((4,), (7, 4), (7, 4), "q: got shape (4,)"),
    ((5, 4), (7, 4), (1, 1, 1, 7, 4), "v: got shape (1, 1, 1, 7, 4)"),
    ((), (7, 4), (7, 4), "q: got shape ()"),
    ((5, 4), (0, 4), (0, 4), "k: got shape (0, 4), which is empty"),
    ((1, 5, 4), (7, 4), (7, 4), "of one rank"),
    ((5, 4), (7, 8), (7, 4), "one head dim"),
    ((5, 4), (7, 4), (6, 4), "k and v of one length"),
    ((2, 1, 5, 4), (1, 1, 7, 4), (2, 1, 7, 4), "one batch size"),
    ((4, 5, 4), (2, 7, 4), (4, 7, 4), "one number of heads"),
    ((4, 5, 4), (3, 7, 4), (3, 7, 4), "divide the query heads"),
    ((2, 5, 4), (4, 7, 4), (4, 7, 4), "divide the query heads"),
])
def test_shapes_that_do_not_fit(tmp_path, q, k, v, fragment):
    rejects(save(tmp_path / "x.npz", arrays(q, k, v)), fragment)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite(tmp_path, bad):
    tensors = arrays((2, 5, 4), (2, 7, 4), (2, 7, 4))
    tensors["k"][1, 3, 2] = tensors["k"][1, 6, 0] = bad
    rejects(save(tmp_path / "x.npz", tensors), f"k[1, 3, 2] is {bad}", "(2 are not)")


def test_random_inputs():
    shape = AttentionShape(5, 7, 4, 3, 2, 6, 2, "bottom-right")
    inputs, again, other = random_inputs(shape, 1), random_inputs(shape, 1), random_inputs(shape, 2)
    assert inputs.shape("bottom-right") == shape
    assert inputs.q.dtype == np.float32
    for name in ("q", "k", "v"):
        np.testing.assert_array_equal(getattr(inputs, name), getattr(again, name))
        assert not np.array_equal(getattr(inputs, name), getattr(other, name))
    big = random_inputs(AttentionShape.square(256, 64)).q
    assert abs(big.mean()) < 0.04  # five standard errors: 5 / √(256 · 64)
    assert abs(big.std() - 1) < 0.03


def test_the_example_is_what_its_readme_says():
    path = EXAMPLE / "minilm_qkv.npz"
    assert path.stat().st_size < 1_000_000
    inputs = load_inputs(path)
    assert inputs.shape() == AttentionShape.square(397, 32, heads=12)
    assert inputs.dtype == "float16"
    assert "all-MiniLM-L6-v2" in inputs.source
    with np.load(path) as file:
        assert str(file["text_sha256"]) == hashlib.sha256((EXAMPLE / "text.txt").read_bytes()).hexdigest()
        assert file["tokens"].shape == (397,)
        assert " ".join(file["tokens"][1:8]) == "when in the course of human events"
    s = inputs.q.astype(np.float64) @ inputs.k.astype(np.float64).swapaxes(-1, -2) / np.sqrt(32)
    assert round(s.min()) == -65
    assert round(s.max()) == 74
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    bits = -(p * np.log2(p)).sum(-1).mean((0, 2))
    assert round(bits.min(), 1) == 0.3
    assert (bits.round(1) == 8.4).sum() == 3
