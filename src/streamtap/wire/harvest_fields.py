"""Fields of a harvest that take more than one form, each read by hand so that an error names what was meant."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import PlainValidator, WithJsonSchema

from streamtap.wire.fields import MOST_ID, is_index
from streamtap.wire.problems import kind_of

_PROMPTS = "must be a list of strings or a list of lists of token ids, all of one kind and none of them empty"
_LAYERS = "must be 'all' or a list of layer numbers, 0 or more, at least one"
_POSITIONS = "must be 'all', 'last' or a list of positions, at least one; -1 is a prompt's last token"


def _prompts(value: Any) -> Any:
    if not isinstance(value, list) or not value:
        raise ValueError(f"{_PROMPTS}; got {kind_of(value)}.")
    kind = type(value[0])
    for place, item in enumerate(value):
        if type(item) is not kind or not isinstance(item, str | list) or not item:
            raise ValueError(f"{_PROMPTS}; got {kind_of(item)} at [{place}].")
        if isinstance(item, list):
            _check_ids(item, place)
    return value


def _check_ids(ids: list[Any], place: int) -> None:
    for within, item in enumerate(ids):
        if not is_index(item):
            raise ValueError(
                f"{_PROMPTS}; token ids are whole numbers, 0 or more: got {kind_of(item)} at [{place}][{within}]."
            )


def _layers(value: Any) -> Any:
    return value if value is None or value == "all" else _numbers(value, _LAYERS, least=0)


def _positions(value: Any) -> Any:
    return value if value is None or value in ("all", "last") else _numbers(value, _POSITIONS, least=-MOST_ID)


def _numbers(value: Any, expected: str, *, least: int) -> list[int]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"{expected}; got {kind_of(value)}.")
    for place, item in enumerate(value):
        if type(item) is not int or not least <= item <= MOST_ID:
            raise ValueError(f"{expected}; got {kind_of(item)} at [{place}].")
    return value


def _list_of(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1}


_ID = {"type": "integer", "minimum": 0, "maximum": MOST_ID}
_POSITION = {"type": "integer", "minimum": -MOST_ID, "maximum": MOST_ID}

PromptsField = Annotated[
    list[str] | list[list[int]],
    PlainValidator(_prompts),
    WithJsonSchema({"anyOf": [_list_of({"type": "string", "minLength": 1}), _list_of(_list_of(_ID))]}),
]
HarvestLayersField = Annotated[
    str | list[int] | None,
    PlainValidator(_layers),
    WithJsonSchema({"anyOf": [{"const": "all"}, _list_of(_ID), {"type": "null"}]}),
]
HarvestPositionsField = Annotated[
    str | list[int] | None,
    PlainValidator(_positions),
    WithJsonSchema({"anyOf": [{"enum": ["all", "last"]}, _list_of(_POSITION), {"type": "null"}]}),
]
