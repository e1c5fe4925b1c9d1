"""Shard files are safetensors, whoever wrote them and whoever reads them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import save_file

from streamtap.dataset.shards import ShardWriter, header_bytes, parse_header, read_header, read_into
from streamtap.errors import DatasetDamaged, InvalidInput

DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
}


def rows_of(dtype: Any, n_rows: int, width: int, seed: int = 0) -> NDArray[Any]:
    return np.random.default_rng(seed).integers(-100, 100, (n_rows, width)).astype(dtype)


def write(path: Path, tensors: dict[str, NDArray[Any]], cuts: int = 1) -> Any:
    writer = ShardWriter(path, {key: (rows.dtype, rows.shape) for key, rows in tensors.items()})
    for rows in tensors.values():
        for piece in np.array_split(rows, cuts):
            writer.write(piece)
    return writer.finish()


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kinds=st.lists(
        st.tuples(st.sampled_from(list(DTYPES)), st.integers(0, 9), st.integers(1, 5)), min_size=1, max_size=3
    ),
    cuts=st.integers(1, 4),
)
def test_what_is_written_the_library_reads(
    tmp_path_factory: pytest.TempPathFactory, kinds: list[tuple[str, int, int]], cuts: int
) -> None:
    path = tmp_path_factory.mktemp("shard") / "x.safetensors"
    tensors = {f"t{i}": rows_of(DTYPES[name], *shape, seed=i) for i, (name, *shape) in enumerate(kinds)}
    about = write(path, tensors, cuts)
    content = path.read_bytes()

    assert (about.size_bytes, about.sha256) == (len(content), hashlib.sha256(content).hexdigest())
    # Tensors are aligned, as the library itself has them.
    assert (8 + int.from_bytes(content[:8], "little")) % 8 == 0
    with safe_open(path, framework="pt") as opened:
        for (key, rows), (name, *_) in zip(tensors.items(), kinds, strict=True):
            assert opened.get_slice(key).get_dtype() == name
            assert opened.get_tensor(key).to(torch.float64).numpy().tolist() == rows.astype(np.float64).tolist()
    for key, tensor in read_header(path, "x").items():
        assert read(path, tensor).tobytes() == tensors[key].tobytes()


def test_what_the_library_writes_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    rows = torch.arange(12, dtype=torch.bfloat16).reshape(4, 3)
    save_file({"b": rows, "a": rows.float()}, path, metadata={"who": "else"})
    tensors = read_header(path, "x")

    assert set(tensors) == {"a", "b"}
    assert read(path, tensors["b"]).astype(np.float32).tolist() == rows.float().tolist()


def read(path: Path, tensor: Any, places: Any = None, dtype: Any = None) -> NDArray[Any]:
    chosen = np.arange(tensor.rows) if places is None else np.asarray(places, np.int64)
    out = np.empty((len(chosen), tensor.width), dtype or tensor.dtype)
    read_into(path, tensor, chosen, out)
    return out


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
@pytest.mark.parametrize("places", [[], [3], [2, 3, 4], [4, 3, 2], [0, 0, 9], list(range(10)), [9, 0, 5, 5]])
@pytest.mark.parametrize("wanted", [None, np.float32, np.float64], ids=["as stored", "float32", "float64"])
def test_any_rows_are_read_in_any_dtype(dtype: str, places: list[int], wanted: Any, tmp_path: Path) -> None:
    path, rows = tmp_path / "x.safetensors", rows_of(DTYPES[dtype], 10, 3)
    write(path, {"first": rows_of(np.int32, 1, 1), "t": rows})
    found = read(path, read_header(path, "x")["t"], places, wanted)

    assert found.dtype == (wanted or DTYPES[dtype])
    assert np.array_equal(found, rows[places].astype(found.dtype))


def test_rows_are_read_to_a_part_that_is_not_contiguous(tmp_path: Path) -> None:
    path, rows = tmp_path / "x.safetensors", rows_of(np.float32, 6, 3)
    write(path, {"t": rows})
    out = np.zeros((6, 2, 3), np.float32)
    read_into(path, read_header(path, "x")["t"], np.arange(6), out[:, 1])

    assert np.array_equal(out[:, 1], rows)
    assert not out[:, 0].any()


def test_rows_that_do_not_lie_dense_are_written_right(tmp_path: Path) -> None:
    path, rows = tmp_path / "x.safetensors", rows_of(np.float32, 6, 8)
    write(path, {"t": rows[::2, ::2].T})

    assert np.array_equal(read(path, read_header(path, "x")["t"]), rows[::2, ::2].T)


def test_a_file_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write(path, {"t": rows_of(np.float32, 1, 1)})
    with pytest.raises(FileExistsError):
        write(path, {"t": rows_of(np.float32, 1, 1)})


@pytest.mark.parametrize(
    "rows",
    [
        np.zeros((1, 2), np.float32),
        np.zeros((1, 3), np.float16),
        np.zeros((3, 3), np.float32),
        np.zeros(3, np.float32),
        np.zeros((1, 3), ">f4"),
    ],
    ids=["width", "dtype", "too many", "one number a row", "byte order"],
)
def test_rows_that_were_not_announced_are_refused(rows: NDArray[Any], tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "x", {"t": (np.dtype(np.float32), (2, 3))})
    with pytest.raises(InvalidInput, match=r"the next rows of this shard are 2 of float32 \[3\]"):
        writer.write(rows)
    writer.close()


def test_more_and_fewer_rows_than_announced_are_refused(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "x", {"t": (np.dtype(np.float32), (1, 3))})
    with pytest.raises(InvalidInput, match="1 rows that this shard announced did not come"):
        writer.finish()
    writer.write(np.zeros((1, 3), np.float32))
    with pytest.raises(InvalidInput, match="the next rows of this shard are 0"):
        writer.write(np.zeros((1, 3), np.float32))
    writer.finish()


def test_a_dtype_without_a_name_is_refused_before_a_file_is_made(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="tensor t is complex64; a file holds float64, float32"):
        ShardWriter(tmp_path / "x", {"t": (np.dtype(np.complex64), (1, 3))})
    assert not (tmp_path / "x").exists()


def header(**entry: Any) -> bytes:
    whole = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]} | entry
    return json.dumps({"t": whole}).encode()


BAD_HEADERS = {
    "no JSON": b"{nonsense",
    "no text": b"\xff\xfe\x00",
    "a list": b"[]",
    "a number": b"12",
    "deep": b"[" * 100_000,
    "no tensor": b'{"t": 3}',
    "no dtype": b'{"t": {"shape": [2, 3], "data_offsets": [0, 24]}}',
    "an unknown dtype": header(dtype="F4"),
    "one number a row": header(shape=[6]),
    "three axes": header(shape=[1, 2, 3]),
    "negative rows": header(shape=[-2, -3]),
    "a negative start": header(data_offsets=[-24, 0]),
    "rows that are words": header(shape=["2", "3"]),
    "endless rows": header(shape=[float("inf"), 3]),
    "offsets of another size": header(data_offsets=[0, 23]),
    "one offset": header(data_offsets=[0]),
    "no offsets": header(data_offsets=None),
}


@pytest.mark.parametrize("name", list(BAD_HEADERS))
def test_a_damaged_header_is_one_sentence(name: str) -> None:
    with pytest.raises(DatasetDamaged, match=r"^the header of the-file is damaged \(\w+\)\.$"):
        parse_header(BAD_HEADERS[name], "the-file")


@pytest.mark.parametrize("length", [b"", b"\x00" * 7, b"\x00" * 8, b"\xff" * 8, (10**9).to_bytes(8, "little")])
def test_a_length_that_is_none_is_one_sentence(length: bytes) -> None:
    with pytest.raises(DatasetDamaged, match="^the-file is not a safetensors file"):
        header_bytes(length, "the-file")


@pytest.mark.parametrize(
    "size", [0, 4, 8, 30, -1], ids=["empty", "half a length", "no header", "half a header", "no last byte"]
)
def test_a_file_that_was_cut_is_one_sentence(size: int, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write(path, {"t": rows_of(np.float32, 10, 3)})
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(DatasetDamaged, match="^(the header of )?the-file is "):
        read_header(path, "the-file")


def test_a_file_that_shrinks_while_it_is_read_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write(path, {"t": rows_of(np.float32, 10, 3)})
    tensor = read_header(path, "x")["t"]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DatasetDamaged, match="x.safetensors ends before its rows do"):
        read(path, tensor)
