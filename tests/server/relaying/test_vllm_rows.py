"""A vLLM's answer becomes ours on its way: same text where the bytes fit, made anew where not, never held."""

from __future__ import annotations

import asyncio
import base64
import json
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import zstandard
from numpy.typing import NDArray

from streamtap.codec import base64_chunks
from streamtap.completion import CaptureAsk, CapturedPositions
from streamtap.errors import CaptureMissed, EngineDead, EngineFailed, InvalidInput, SteeringNotFinite
from streamtap.server.relaying.asked_rows import AskedRows
from streamtap.server.relaying.vllm_rows import mapped_rows
from streamtap.wire.completions import read_completion, read_safetensors

Array = NDArray[Any]
Answer = Callable[..., bytes]
Make = Callable[..., Array]
LAYERS = (1, 2)
PROMPT, NEW = [5, 6, 7], [8, 9, 10]  # five positions


def _asked(positions: CapturedPositions = "all", dtype: Any = "bfloat16", **about: Any) -> AskedRows:
    return AskedRows(CaptureAsk(LAYERS, positions, dtype), 8, **about)


def _mapped(pieces: Iterable[bytes], asked: AskedRows, *, binary: bool = False) -> bytes:
    async def sent() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    async def main() -> list[bytes]:
        return [piece async for piece in mapped_rows(sent(), asked, binary=binary)]

    return b"".join(asyncio.run(main()))


def _cut(whole: bytes, size: int) -> Iterator[bytes]:
    return (whole[at : at + size] for at in range(0, len(whole), size))


@pytest.mark.parametrize("size", [1, 11, 100, 100_000])
@pytest.mark.parametrize(("dtype", "kind"), [("bfloat16", ml_dtypes.bfloat16), ("float32", np.float32)])
def test_text_that_fits_goes_on_as_it_is(
    dtype: str, kind: Any, size: int, answer_of_vllm: Answer, made_rows: Make
) -> None:
    values = made_rows(2, 5, kind)
    raw = answer_of_vllm(values, PROMPT, NEW)

    body = json.loads(_mapped(_cut(raw, size), _asked(dtype=dtype)))

    told = body["activations"]
    assert told["residual_stream"] == json.loads(raw)["activations"]["residual_stream"]
    assert list(told["residual_stream"])[-1] == "data"
    assert (told["layer_indices"], told["token_ids"]) == ([1, 2], [5, 6, 7, 8, 9])
    assert "positions" not in told
    assert {name: value for name, value in body.items() if name != "activations"} == {
        name: value for name, value in json.loads(raw).items() if name != "activations"
    }


@pytest.mark.parametrize("size", [1, 100, 100_000])
@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("came", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("wanted", ["bfloat16", "float32"])
def test_any_dtype_comes_out_as_the_one_that_was_asked_for(
    wanted: str, came: str, binary: bool, size: int, answer_of_vllm: Answer, made_rows: Make
) -> None:
    values = made_rows(2, 5, np.dtype(getattr(ml_dtypes, came, came)))
    asked = _asked(dtype=wanted, engine_dtype=came)

    raw = _mapped(_cut(answer_of_vllm(values, PROMPT, NEW), size), asked, binary=binary)

    done = (read_safetensors if binary else read_completion)(raw, layers=LAYERS)
    found = done.choices[0].rows
    assert found is not None
    assert found.values.dtype.name == wanted
    assert found.values.tobytes() == values.astype(found.values.dtype).tobytes()
    assert (found.layers, found.positions.tolist(), found.token_ids.tolist()) == (
        LAYERS,
        [0, 1, 2, 3, 4],
        [5, 6, 7, 8, 9],
    )
    assert (done.choices[0].text, done.usage.completion_tokens) == ("b", 3)


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize(
    ("positions", "places"),
    [
        ("last", [4]),
        ("prompt", [0, 1, 2]),
        ("generated", [3, 4]),
        ((0, 4), [0, 4]),
        ((1, 9), [1]),
        ((0, 1, 2, 3, 4), [0, 1, 2, 3, 4]),
    ],
)
def test_positions_are_chosen_here(
    positions: Any, places: list[int], binary: bool, answer_of_vllm: Answer, made_rows: Make
) -> None:
    values = made_rows(2, 5)

    raw = _mapped(_cut(answer_of_vllm(values, PROMPT, NEW), 50), _asked(positions), binary=binary)

    found = (read_safetensors if binary else read_completion)(raw, layers=LAYERS).choices[0].rows
    assert found is not None
    assert found.values.tobytes() == values[:, places].tobytes()
    assert found.positions.tolist() == places
    assert found.token_ids.tolist() == [[5, 6, 7, 8, 9][place] for place in places]


def test_no_generated_position_is_no_row(answer_of_vllm: Answer, made_rows: Make) -> None:
    raw = _mapped([answer_of_vllm(made_rows(2, 3), PROMPT, NEW[:1])], _asked("generated"))

    found = read_completion(raw, layers=LAYERS).choices[0].rows
    assert found is not None
    assert found.values.shape == (2, 0, 8)


def test_a_worker_of_ours_that_says_all_itself_says_it_once(answer_of_vllm: Answer, made_rows: Make) -> None:
    body = json.loads(answer_of_vllm(made_rows(2, 5), PROMPT, NEW))
    stream = body["activations"]["residual_stream"]
    data = stream.pop("data")
    body["activations"] = {"residual_stream": stream | {"data": data}, "layer_indices": [1, 2], "token_ids": [1] * 5}

    assert json.loads(_mapped([json.dumps(body).encode()], _asked())) == body


@pytest.mark.parametrize("lacking", ["token_ids", "prompt_token_ids"])
def test_tokens_that_an_older_vllm_does_not_tell_are_left_out(
    lacking: str, answer_of_vllm: Answer, made_rows: Make
) -> None:
    raw = answer_of_vllm(made_rows(2, 5), PROMPT, NEW, **{lacking: None})

    assert "token_ids" not in json.loads(_mapped([raw], _asked()))["activations"]
    found = read_safetensors(_mapped([raw], _asked(), binary=True)).choices[0].rows
    assert found is not None
    assert found.token_ids.tolist() == [-1] * 5


def test_a_text_that_looks_like_rows_or_tokens_is_a_text(answer_of_vllm: Answer, made_rows: Make) -> None:
    text = '"residual_stream":{"data":"AAAA"},"token_ids":[1],"usage":{"prompt_tokens":9}'

    body = json.loads(_mapped(_cut(answer_of_vllm(made_rows(2, 5), PROMPT, NEW, text=text), 9), _asked()))

    assert body["choices"][0]["text"] == text
    assert body["activations"]["token_ids"] == [5, 6, 7, 8, 9]


def _missed(raw: bytes, asked: AskedRows | None = None, kind: type[Exception] = CaptureMissed) -> str:
    for size in (7, 100_000):
        for binary in (False, True):
            with pytest.raises(kind) as caught:
                _mapped(_cut(raw, size), asked or _asked(), binary=binary)
    return str(caught.value)


@pytest.mark.parametrize(("layers", "count"), [(1, 5), (2, 4), (2, 6), (3, 5), (2, 0)])
def test_a_layer_or_a_row_that_lacks_is_missed_before_the_first_value(
    layers: int, count: int, answer_of_vllm: Answer, made_rows: Make
) -> None:
    message = _missed(answer_of_vllm(made_rows(layers, count), PROMPT, NEW))

    assert f"{layers * count * 8 * 2} bytes" in message


def test_what_comes_as_another_shape_or_dtype_than_it_says(answer_of_vllm: Answer, made_rows: Make) -> None:
    values = made_rows(2, 5)
    assert "declared rows of shape [2, 8, 5]" in _missed(
        answer_of_vllm(values, PROMPT, NEW).replace(b'"shape":[2,5,8]', b'"shape":[2,8,5]')
    )
    half = answer_of_vllm(made_rows(2, 5, np.float16), PROMPT, NEW)
    assert "set dtype in its table" in _missed(half)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_value_that_is_not_finite_never_looks_whole(value: float, answer_of_vllm: Answer, made_rows: Make) -> None:
    values = made_rows(2, 5)
    values[1, 4, 7] = value
    raw = answer_of_vllm(values, PROMPT, NEW)

    assert "block 2" in _missed(raw)
    assert "block 2" in _missed(raw, _asked(steered=True), SteeringNotFinite)


def test_a_dead_layer_is_missed(answer_of_vllm: Answer, made_rows: Make) -> None:
    values = made_rows(2, 5)
    values[0] = 0

    assert "block 1" in _missed(answer_of_vllm(values, PROMPT, NEW))


def _with_data(raw: bytes, data: bytes) -> bytes:
    body = json.loads(raw)
    body["activations"]["residual_stream"]["data"] = data.decode()
    return json.dumps(body).encode()


def test_data_that_is_no_frame_of_these_rows(answer_of_vllm: Answer, made_rows: Make) -> None:
    raw = answer_of_vllm(made_rows(2, 5), PROMPT, NEW)
    frame = base64.b64decode(json.loads(raw)["activations"]["residual_stream"]["data"])
    broken = [b"", b"AAAA", base64.b64encode(frame[:-4]), base64.b64encode(frame + b"x"), base64.b64encode(frame)[:-2]]
    broken += [base64.b64encode(bytes(160)), base64.b64encode(frame).replace(b"A", b"!", 1) + b"!"]
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(160))

    for data in [*broken, base64.b64encode(unsized)]:
        assert "rows" in _missed(_with_data(raw, data)), data


def test_an_answer_without_rows_goes_on_as_it_is_and_is_no_file(answer_of_vllm: Answer) -> None:
    raw = answer_of_vllm(None, PROMPT, NEW)

    assert _mapped(_cut(raw, 9), _asked()) == raw
    with pytest.raises(CaptureMissed, match="holds no rows"):
        _mapped([raw], _asked(), binary=True)


def test_an_answer_that_is_cut_short_is_no_file(answer_of_vllm: Answer, made_rows: Make) -> None:
    raw = answer_of_vllm(made_rows(2, 5), PROMPT, NEW)

    for length in (len(raw) - 1, raw.index(b'"data"') + 40, 20):
        with pytest.raises(EngineDead):
            _mapped([raw[:length]], _asked(), binary=True)
        with pytest.raises(json.JSONDecodeError):
            json.loads(_mapped([raw[:length]], _asked()))


def test_an_error_in_place_of_a_file_is_raised() -> None:
    with pytest.raises(CaptureMissed, match="broke"):
        _mapped([b'{"error":{"message":"broke","code":"capture_failed"}}'], _asked(), binary=True)


def test_an_answer_that_counts_its_tokens_last_cannot_be_looked_at_on_its_way(
    answer_of_vllm: Answer, made_rows: Make
) -> None:
    body = json.loads(answer_of_vllm(made_rows(2, 5), PROMPT, NEW))
    body["usage"] = body.pop("usage")
    raw = json.dumps(body).encode()

    with pytest.raises(EngineFailed, match="before it said how many tokens"):
        _mapped(_cut(raw, 100), _asked())
    # A small one is there whole.
    assert json.loads(_mapped([raw], _asked()))["activations"]["layer_indices"] == [1, 2]


def test_two_captures_are_one_too_many(answer_of_vllm: Answer, made_rows: Make) -> None:
    body = json.loads(answer_of_vllm(made_rows(2, 5), PROMPT, NEW))
    body["more"] = body["activations"]

    with pytest.raises(EngineFailed, match="two captures"):
        _mapped([json.dumps(body).encode()], _asked())


def test_a_completion_that_no_file_holds_is_the_callers(
    answer_of_vllm: Answer, made_rows: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamtap.server.relaying.vllm_rows.MOST_HEADER_BYTES", 1000)
    raw = answer_of_vllm(made_rows(2, 5), PROMPT, NEW, text="x" * 1000)

    with pytest.raises(InvalidInput, match="ask for application/json"):
        _mapped([raw], _asked(), binary=True)


class _Large:
    """Some 50 MB of rows, made as they are asked for: 32 layers of 400 rows, 1024 wide, in float32."""

    layers, count, hidden = 32, 400, 1024

    def __init__(self, answer: Answer, layer: Array) -> None:
        raw = answer(np.zeros((1, 1, 8), np.float32), list(range(self.count)), [1])
        self._lead, _, rest = raw.partition(b'"data":"')
        tail = rest[rest.index(b'"') :]
        self._tail = tail.replace(b"[1,1,8]", f"[{self.layers},{self.count},{self.hidden}]".encode())
        self._values = np.broadcast_to(layer, (self.layers, self.count, self.hidden))

    def __iter__(self) -> Iterator[bytes]:
        yield self._lead + b'"data":"'
        for chunk in base64_chunks(self._values):
            yield from _cut(chunk, 65_536)
        yield self._tail


def _peak_bytes(pieces: Iterable[bytes], asked: AskedRows, *, binary: bool) -> tuple[int, int]:
    """Bytes that came out, and the most that was held meanwhile."""

    async def sent() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    async def main() -> tuple[int, int]:
        total = 0
        tracemalloc.start()
        try:
            async for piece in mapped_rows(sent(), asked, binary=binary):
                total += len(piece)
            return total, tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("positions", "dtype", "binary"),
    [("all", "float32", False), ("all", "bfloat16", False), ("prompt", "bfloat16", True), ("last", "float32", False)],
)
def test_a_large_answer_is_never_held(positions: Any, dtype: Any, binary: bool, answer_of_vllm: Answer) -> None:
    drawn = np.random.default_rng(0).normal(size=(_Large.count, _Large.hidden)).astype(np.float32)
    asked = AskedRows(CaptureAsk(tuple(range(_Large.layers)), positions, dtype), _Large.hidden)

    total, peak = _peak_bytes(_Large(answer_of_vllm, drawn), asked, binary=binary)

    # A layer that the sender makes by itself is 1.6 MB.
    assert peak < 16_000_000
    assert total > {"all": 20_000_000, "prompt": 20_000_000, "last": 5_000}[positions]


def test_zeros_that_unpack_without_end_are_not_held_either(answer_of_vllm: Answer) -> None:
    zeros = np.zeros((_Large.count, _Large.hidden), np.float32)
    asked = AskedRows(CaptureAsk(tuple(range(_Large.layers)), "all", "bfloat16"), _Large.hidden, steered=True)

    total, peak = _peak_bytes(_Large(answer_of_vllm, zeros), asked, binary=True)

    assert total > 25_000_000
    assert peak < 80_000_000
