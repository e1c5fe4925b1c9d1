"""An answer as a caller holds it: text, counts, and rows as ``Activations``; no torch is needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamtap.activations import Activations, Provenance
from streamtap.codec import decode, is_finite
from streamtap.completion import Choice, Completion, Rows, Usage
from streamtap.errors import BadJson, CaptureMissed, EngineFailed, InvalidInput
from streamtap.ragged import offsets_of
from streamtap.wire.errors import read_error
from streamtap.wire.logprobs import ReadPromptLogs, read_logprobs
from streamtap.wire.reading import read_json
from streamtap.wire.safetensors_reading import read_file
from streamtap.wire.scan import read_usage

#: What an answer does not say of a token or position.
UNKNOWN = -1


def read_completion(raw: bytes | Mapping[str, Any], *, layers: Sequence[int] | None = None) -> Completion:
    """The completion that a JSON answer holds.

    ``layers`` are those that were asked for, in any order; they name the rows of a server that does not. Without them
    such rows are called 0, 1, ….

    Raises:
        StreamtapError: the answer is an error, of the class that the server raised.
        CaptureMissed: rows that are broken, not finite, of fewer or other layers than were asked for, or of only some
            choices.
        EngineFailed: the answer is not a completion.
    """
    body = _document(raw)
    asked = None if layers is None else tuple(sorted(set(layers)))
    parts = [item.get("activations") for item in body["choices"]]
    # One at the top is the first choice's; it never speaks for another.
    parts[0] = parts[0] or body.get("activations")
    completion = _completion(body, [None if part is None else _rows(part, asked) for part in parts])
    if len(parts) == 1 and parts[0] is not None and "positions" not in parts[0]:
        _check_count(completion)
    return completion


def read_safetensors(raw: bytes, *, layers: Sequence[int] | None = None) -> Completion:
    """The completion that a safetensors answer holds; rows are views into ``raw``.

    Raises:
        StreamtapError: as ``read_completion``.
    """
    metadata, tensors = read_file(raw)
    body = _document(metadata.get("completion", "").encode())
    endings = ["" if len(body["choices"]) == 1 else f".{item.get('index')}" for item in body["choices"]]
    rows = [_tensor_rows(tensors, ending) for ending in endings]
    asked = None if layers is None else tuple(sorted(set(layers)))
    for each in rows:
        if each is not None:
            _check_layers(each.layers, asked, len(each.values))
            _check_finite(each.layers, each.values)
    return _completion(body, rows)


def _document(raw: bytes | Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        body = raw if isinstance(raw, Mapping) else read_json(raw)
    except BadJson as error:
        raise EngineFailed(f"the server's answer is not JSON, or was cut short: {error}") from error
    if isinstance(body, Mapping) and body.get("error"):
        raise read_error(body, 200)
    choices = body.get("choices") if isinstance(body, Mapping) else None
    if not isinstance(choices, list) or not choices or not all(isinstance(item, dict) for item in choices):
        raise EngineFailed("the server's answer is not a completion: it has no choices.")
    return body


def _completion(body: Mapping[str, Any], rows: Sequence[Rows | None]) -> Completion:
    model = str(body.get("model") or "")
    held = [each for each in rows if each is not None]
    if 0 < len(held) < len(rows):
        raise CaptureMissed(f"the answer has rows of {len(held)} of {len(rows)} choices.", layer=UNKNOWN)
    pairs = zip(body["choices"], rows, strict=True)
    return Completion(
        choices=tuple(_choice(item, place, each) for place, (item, each) in enumerate(pairs)),
        usage=read_usage(body.get("usage")) or Usage(0, 0),
        model=model,
        id=str(body.get("id") or ""),
        activations=_activations(held, model) if held else None,
    )


def _choice(item: Mapping[str, Any], place: int, rows: Rows | None) -> Choice:
    logs, prompt_logs = item.get("logprobs"), item.get("prompt_logprobs")
    return Choice(
        index=int(item.get("index", place)),
        text=str(item.get("text") or ""),
        prompt_ids=(),
        token_ids=(),
        finish_reason="stop" if item.get("finish_reason") == "stop" else "length",
        stop_reason=item.get("stop_reason"),
        logs=None if logs is None else read_logprobs(logs),
        prompt_logs=None if prompt_logs is None else ReadPromptLogs(prompt_logs),
        rows=rows,
    )


def _rows(part: Mapping[str, Any], asked: tuple[int, ...] | None) -> Rows:
    values = _values(part.get("residual_stream"))
    named = part.get("layer_indices")
    layers = tuple(named) if named is not None else asked or tuple(range(len(values)))
    _check_layers(layers, asked, len(values))
    _check_finite(layers, values)
    count = values.shape[1]
    # A server that lists no positions sends the rows of every one.
    positions = _numbers(part.get("positions"), np.arange(count, dtype=np.int32))
    return Rows(layers, values, positions, _numbers(part.get("token_ids"), np.full(count, UNKNOWN, np.int32)))


def _values(envelope: Any) -> NDArray[Any]:
    """The rows [layers, rows, hidden] that an envelope holds."""
    try:
        values = decode(
            envelope["data"],
            dtype=envelope["dtype"],
            original_dtype=envelope.get("original_dtype"),
            shape=envelope["shape"],
            compression=envelope.get("compression"),
        )
    except (InvalidInput, KeyError, TypeError, AttributeError) as error:
        raise CaptureMissed(f"the answer's rows cannot be read: {error}", layer=UNKNOWN) from error
    if values.ndim != 3:
        raise CaptureMissed(f"the answer's rows have {values.ndim} axes; expected 3.", layer=UNKNOWN)
    return values


def _check_count(completion: Completion) -> None:
    """Rows of every position: one for each token but the last one drawn, which is never fed back."""
    rows, usage = completion.choices[0].rows, completion.usage
    fed = usage.prompt_tokens + max(0, usage.completion_tokens - 1)
    if rows is not None and usage.total_tokens and len(rows.positions) != fed:
        raise CaptureMissed(
            f"the answer has rows of {len(rows.positions)} positions; its usage says {fed}.", layer=rows.layers[0]
        )


def _check_finite(layers: tuple[int, ...], values: NDArray[Any]) -> None:
    for layer, rows in zip(layers, values, strict=True):
        if not is_finite(rows):
            raise CaptureMissed(f"the answer's rows of layer {layer} hold a value that is not finite.", layer=layer)


def _numbers(said: Sequence[int] | None, otherwise: NDArray[np.int32]) -> NDArray[np.int32]:
    numbers = otherwise if said is None else np.asarray(said, np.int32)
    if numbers.shape != otherwise.shape:
        raise CaptureMissed(f"the answer has {len(otherwise)} rows, but tells of {len(numbers)}.", layer=UNKNOWN)
    return numbers


def _check_layers(layers: tuple[int, ...], asked: tuple[int, ...] | None, held: int) -> None:
    if len(layers) != held:
        raise CaptureMissed(f"the answer has rows of {held} layers where {len(layers)} were expected.", layer=UNKNOWN)
    if asked is not None and layers != asked:
        missing = [layer for layer in asked if layer not in layers]
        raise CaptureMissed(
            f"layers {list(asked)} were asked for, the answer has {list(layers)}.",
            layer=missing[0] if missing else UNKNOWN,
        )


def _tensor_rows(tensors: Mapping[str, NDArray[Any]], ending: str) -> Rows | None:
    if (values := tensors.get(f"residual_stream{ending}")) is None:
        return None
    try:
        layers, ids, positions = (tensors[name + ending] for name in ("layer_indices", "token_ids", "positions"))
    except KeyError as error:
        raise CaptureMissed(f"the answer's file has rows, but no tensor {error}.", layer=UNKNOWN) from error
    return Rows(tuple(layers.tolist()), values, positions, ids)


def _activations(rows: Sequence[Rows], model: str) -> Activations:
    first = rows[0]
    if any(each.layers != first.layers for each in rows):
        raise CaptureMissed("the answer's choices have rows of different layers.", layer=UNKNOWN)
    return Activations(
        acts={layer: _joined([each.values[place] for each in rows]) for place, layer in enumerate(first.layers)},
        offsets=offsets_of(np.array([each.values.shape[1] for each in rows], np.int64)),
        token_ids=_joined([each.token_ids for each in rows]),
        positions=_joined([each.positions for each in rows]),
        provenance=Provenance(
            model=model,
            commit="",
            tokenizer="",
            dtype=first.values.dtype.name,
            engine="api",
            hidden=first.values.shape[2],
        ),
        index=np.arange(len(rows), dtype=np.int64),
    )


def _joined(parts: list[NDArray[Any]]) -> NDArray[Any]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
