"""Files of any shapes are safetensors, whoever wrote them and whoever reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save_file

from streamtap.errors import InvalidInput
from streamtap.tensor_file import header_bytes, make_header, parse_header, read_tensors, tensor_bytes, view_of

DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
}
TENSORS = st.dictionaries(
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=9).filter(lambda name: name[0] != "_"),
    st.tuples(st.sampled_from(list(DTYPES)), st.lists(st.integers(0, 4), max_size=4)),
    max_size=4,
)


def values_of(dtype: Any, shape: Any, seed: int = 0) -> NDArray[Any]:
    return np.asarray(np.random.default_rng(seed).integers(-100, 100, shape)).astype(dtype)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kinds=TENSORS, metadata=st.dictionaries(st.text(max_size=5).filter(str.isprintable), st.just('ü"\n😀')))
def test_what_is_written_is_read_by_us_and_by_the_library(
    tmp_path_factory: pytest.TempPathFactory, kinds: dict[str, tuple[str, list[int]]], metadata: dict[str, str]
) -> None:
    tensors = {key: values_of(DTYPES[name], shape, i) for i, (key, (name, shape)) in enumerate(kinds.items())}
    raw = tensor_bytes(tensors, metadata)
    found, told = read_tensors(raw, "x")

    assert told == metadata
    assert list(found) == list(tensors)
    for key, values in tensors.items():
        assert (found[key].dtype, found[key].shape) == (values.dtype, values.shape)
        assert found[key].tobytes() == values.tobytes()
        assert not found[key].flags.writeable
    path = tmp_path_factory.mktemp("file") / "x.safetensors"
    path.write_bytes(raw)
    with safe_open(path, framework="np") as opened:
        assert (opened.metadata() or {}) == metadata
        for key, values in tensors.items():
            assert opened.get_tensor(key).tobytes() == values.tobytes()


def test_a_header_says_where_each_tensor_lies() -> None:
    shapes = {"a": (DTYPES["BF16"], (2, 3, 5)), "b": (DTYPES["I32"], (4,)), "none": (DTYPES["F32"], (0, 7))}
    header, places = make_header(shapes)

    assert len(header) % 8 == 0
    assert int.from_bytes(header[:8], "little") == len(header) - 8 == header_bytes(header[:8], "x")
    assert parse_header(header[8:], "x") == (places, {})
    assert [(place.start - len(header), place.stop - len(header)) for place in places.values()] == [
        (0, 60),
        (60, 76),
        (76, 76),
    ]
    assert all((place.dtype, place.shape) == shapes[name] for name, place in places.items())


def test_a_tensor_is_seen_in_a_part_of_its_file() -> None:
    tensors = {"a": values_of(np.int32, 5), "b": values_of(np.float32, (2, 3), 1)}
    raw = tensor_bytes(tensors)
    place = parse_header(raw[8 : 8 + header_bytes(raw[:8], "x")], "x")[0]["b"]

    assert view_of(raw[place.start - 3 : place.stop], place, place.start - 3).tolist() == tensors["b"].tolist()
    assert view_of(memoryview(raw), place).tolist() == tensors["b"].tolist()


def test_what_the_library_writes_is_read(tmp_path: Path) -> None:
    tensors = {"b": values_of(np.float16, (2, 2)), "a": values_of(np.int64, (3,), 1)}
    save_file(tensors, tmp_path / "x", metadata={"who": "else"})
    found, metadata = read_tensors((tmp_path / "x").read_bytes(), "x")

    assert metadata == {"who": "else"}
    assert {key: values.tolist() for key, values in found.items()} == {
        key: values.tolist() for key, values in tensors.items()
    }


@pytest.mark.parametrize("dtype", [">f4", "complex64", "uint8", "bool"])
def test_a_dtype_without_a_name_is_refused(dtype: str) -> None:
    with pytest.raises(InvalidInput, match="^tensor t is .*; a file holds float64, float32"):
        make_header({"t": (np.dtype(dtype), (1,))})


def header(**entry: Any) -> bytes:
    return json.dumps({"t": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]} | entry}).encode()


BAD_HEADERS = {
    "no JSON": b"{nonsense",
    "no text": b"\xff\xfe\x00",
    "a list": b"[]",
    "a number": b"12",
    "deep": b"[" * 100_000,
    "no tensor": b'{"t": 3}',
    "no dtype": b'{"t": {"shape": [2, 3], "data_offsets": [0, 24]}}',
    "metadata that is none": b'{"__metadata__": 3}',
    "an unknown dtype": header(dtype="F4"),
    "a dtype that is none": header(dtype=["F32"]),
    "a shape that is none": header(shape=6),
    "negative lengths": header(shape=[-2, -3]),
    "a negative start": header(data_offsets=[-24, 0]),
    "lengths that are words": header(shape=["2", "3"]),
    "lengths that are no whole numbers": header(shape=[2.0, 3.0]),
    "lengths that are true": header(shape=[True, 6]),
    "endless lengths": header(shape=[float("inf"), 3]),
    "offsets of another size": header(data_offsets=[0, 23]),
    "one offset": header(data_offsets=[0]),
    "no offsets": header(data_offsets=None),
}


@pytest.mark.parametrize("name", list(BAD_HEADERS))
def test_a_damaged_header_is_one_sentence(name: str) -> None:
    with pytest.raises(InvalidInput, match=r"^the header of the-file is damaged \(\w+\)\.$"):
        parse_header(BAD_HEADERS[name], "the-file")


@pytest.mark.parametrize("length", [b"", b"\x00" * 7, b"\x00" * 8, b"\xff" * 8, (10**9).to_bytes(8, "little")])
def test_a_length_that_is_none_is_one_sentence(length: bytes) -> None:
    with pytest.raises(InvalidInput, match="^the-file is not a safetensors file"):
        header_bytes(length, "the-file")


def test_a_file_that_was_cut_anywhere_is_one_sentence() -> None:
    raw = tensor_bytes({"t": values_of(np.float32, (10, 3)), "u": values_of(np.int32, 1)})
    for size in range(len(raw)):
        with pytest.raises(InvalidInput, match="^(the header of )?the-file is "):
            read_tensors(raw[:size], "the-file")


@pytest.mark.parametrize("shape", [[2**62, 2**62], [2**70]])
def test_a_header_that_names_more_than_there_is(shape: list[int]) -> None:
    size = int(np.prod(np.array(shape, object))) * 4
    text = json.dumps({"t": {"dtype": "F32", "shape": shape, "data_offsets": [0, size]}}).encode()
    with pytest.raises(InvalidInput, match="the-file is cut short"):
        read_tensors(len(text).to_bytes(8, "little") + text, "the-file")
