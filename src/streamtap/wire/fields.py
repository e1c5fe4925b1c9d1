"""Fields that take more than one form, each read by hand so that an error names what was meant."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import PlainValidator, WithJsonSchema

from streamtap.wire.problems import kind_of

MOST_ID = 2**31 - 1
_MOST_STOPS = 4
_WORDS = ("all", "last", "prompt", "generated")

_PROMPT = "must be a string, a list of strings, a list of token ids or a list of such lists, and none of them empty"
_LAYERS = "must be true, false or a list of layer numbers, 0 or more, at least one"
_POSITIONS = "must be 'all', 'last', 'prompt', 'generated' or a list of positions, 0 or more, at least one"
_STOP = f"must be a string or a list of up to {_MOST_STOPS} strings, none of them empty"
_TOP_K = "must be -1 (off) or a whole number from 1"


def is_index(value: Any) -> bool:
    """Whether ``value`` is a whole number from 0 to 2**31 - 1; a bool is none."""
    return type(value) is int and 0 <= value <= MOST_ID


def _prompt(value: Any) -> Any:
    if isinstance(value, str) and value:
        return value
    if not isinstance(value, list) or not value:
        raise ValueError(f"{_PROMPT}; got {kind_of(value)}.")
    if type(value[0]) is int:
        return _ids(value, "")
    for place, item in enumerate(value):
        if type(item) is not type(value[0]) or not isinstance(item, str | list) or not item:
            raise ValueError(f"{_PROMPT}; got {kind_of(item)} at [{place}].")
        if isinstance(item, list):
            _ids(item, f"[{place}]")
    return value


def _ids(value: list[Any], at: str) -> list[Any]:
    for place, item in enumerate(value):
        if not is_index(item):
            raise ValueError(
                f"{_PROMPT}; token ids are whole numbers, 0 or more: got {kind_of(item)} at {at}[{place}]."
            )
    return value


def _layers(value: Any) -> Any:
    return value if value is None or isinstance(value, bool) else _indices(value, _LAYERS)


def _positions(value: Any) -> Any:
    return value if value is None or (isinstance(value, str) and value in _WORDS) else _indices(value, _POSITIONS)


def _indices(value: Any, expected: str) -> Any:
    if not isinstance(value, list) or not value:
        raise ValueError(f"{expected}; got {kind_of(value)}.")
    for place, item in enumerate(value):
        if not is_index(item):
            raise ValueError(f"{expected}; got {kind_of(item)} at [{place}].")
    return value


def _stop(value: Any) -> Any:
    texts = [value] if isinstance(value, str) else value
    if texts is None:
        return None
    if not isinstance(texts, list) or len(texts) > _MOST_STOPS:
        raise ValueError(f"{_STOP}; got {f'{len(texts)} of them' if isinstance(texts, list) else kind_of(texts)}.")
    for item in texts:
        if not isinstance(item, str) or not item:
            raise ValueError(f"{_STOP}; got {kind_of(item)}.")
    return texts


def _top_k(value: Any) -> Any:
    if value is None or (type(value) is int and (value == -1 or value >= 1)):
        return value
    raise ValueError(f"{_TOP_K}; got {kind_of(value)}.")


_ID_SCHEMA = {"type": "integer", "minimum": 0, "maximum": MOST_ID}
_IDS_SCHEMA = {"type": "array", "items": _ID_SCHEMA, "minItems": 1}
_TEXT_SCHEMA = {"type": "string", "minLength": 1}

PromptField = Annotated[
    str | list[str] | list[int] | list[list[int]],
    PlainValidator(_prompt),
    WithJsonSchema(
        {
            "anyOf": [
                _TEXT_SCHEMA,
                {"type": "array", "items": _TEXT_SCHEMA, "minItems": 1},
                _IDS_SCHEMA,
                {"type": "array", "items": _IDS_SCHEMA, "minItems": 1},
            ]
        }
    ),
]
LayersField = Annotated[
    bool | list[int] | None,
    PlainValidator(_layers),
    WithJsonSchema({"anyOf": [{"type": "boolean"}, _IDS_SCHEMA, {"type": "null"}]}),
]
PositionsField = Annotated[
    str | list[int] | None,
    PlainValidator(_positions),
    WithJsonSchema({"anyOf": [{"enum": list(_WORDS)}, _IDS_SCHEMA, {"type": "null"}]}),
]
StopField = Annotated[
    list[str] | None,
    PlainValidator(_stop),
    WithJsonSchema(
        {"anyOf": [_TEXT_SCHEMA, {"type": "array", "items": _TEXT_SCHEMA, "maxItems": _MOST_STOPS}, {"type": "null"}]}
    ),
]
TopKField = Annotated[
    int | None,
    PlainValidator(_top_k),
    WithJsonSchema({"anyOf": [{"const": -1}, {"type": "integer", "minimum": 1}, {"type": "null"}]}),
]
