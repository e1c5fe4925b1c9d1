"""What pydantic finds wrong with a body, as sentences that name the field and never show text of the caller's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic.fields import FieldInfo

from streamtap.errors import InvalidInput

MOST_PROBLEMS = 5
_MOST_NAME = 64
_KINDS = {str: "a string", dict: "an object", float: "a number", int: "a number"}

#: More fields than any object of ours has; a body of millions of unknown ones must not be listed.
_MOST_FIELDS = 64

#: Which model describes what lies under a field.
Nested = Mapping[str, type[BaseModel]]


class StrictModel(BaseModel):
    """A part of a body: no field that is not ours, no value turned into another type."""

    model_config = ConfigDict(strict=True, extra="forbid", hide_input_in_errors=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, data: Any) -> Any:
        if isinstance(data, dict) and len(data) > _MOST_FIELDS:
            unknown = next(name for name in data if name not in cls.model_fields)
            raise ValueError(f"has {len(data)} fields; {_name(unknown)} is not a field here, nor are most of them.")
        return data


def refusal(error: ValidationError, model: type[BaseModel], nested: Nested, at: str = "") -> InvalidInput:
    """The first five problems of ``error`` as one refusal; ``at`` is where the checked part lies in the body."""
    found = [_sentence(each, model, nested, at) for each in error.errors(include_url=False)]
    return invalid(found)


def invalid(sentences: Iterable[str]) -> InvalidInput:
    """At most five of ``sentences`` as one refusal, which counts the rest."""
    found = list(sentences)
    more = [f"And {len(found) - MOST_PROBLEMS} more."] if len(found) > MOST_PROBLEMS else []
    return InvalidInput(" ".join(found[:MOST_PROBLEMS] + more))


def kind_of(value: Any) -> str:
    """What came, without the caller's words: numbers and constants as they are, anything else by its kind."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str | list) and not value:
        return f"an empty {'string' if isinstance(value, str) else 'list'}"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, int | float) and len(repr(value)) <= _MOST_NAME:
        return repr(value)
    return _KINDS.get(type(value), type(value).__name__)


def _sentence(problem: Mapping[str, Any], model: type[BaseModel], nested: Nested, at: str) -> str:
    place: Sequence[str | int] = problem["loc"]
    kind, text = problem["type"], str(problem.get("ctx", {}).get("error", ""))
    if kind == "value_error":
        return f"{_path(place, at) or 'the body'} {text}"
    if kind == "extra_forbidden":
        return f"{_path(place, at)} is not a field here."
    named, expected = _expected(place, model, nested)
    if kind == "missing":
        return f"{_path(place, at)} is required: {expected}."
    item = _path(place[named:], "")
    return f"{_path(place[:named], at)} must be {expected}; got {kind_of(problem['input'])}{item and f' at {item}'}."


def _expected(place: Sequence[str | int], model: type[BaseModel], nested: Nested) -> tuple[int, str]:
    """How many parts of ``place`` lead to a described field, and its description."""
    here: type[BaseModel] | None = model
    field: FieldInfo | None = None
    named = 0
    for depth, part in enumerate(place, 1):
        if isinstance(part, int):
            continue
        if here is None or part not in here.model_fields:
            break
        field, named = here.model_fields[part], depth
        here = nested.get(part)
    if here is not None and named < len(place):
        return len(place), "an object"
    return named, (field.description if field and field.description else "an object")


def _path(place: Sequence[str | int], at: str) -> str:
    text = at
    for part in place:
        text += f"[{part}]" if isinstance(part, int) else f"{'.' if text else ''}{_name(part)}"
    return text


def _name(part: str) -> str:
    shown = part if len(part) <= _MOST_NAME else f"{part[:_MOST_NAME]}…"
    return shown if shown.isidentifier() else repr(shown)
