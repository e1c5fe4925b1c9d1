"""Which column of a table holds the prompts, where nobody said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from streamtap.errors import InvalidInput

_USUAL = ("prompt", "text")


def choose_column(columns: Mapping[str, Sequence[Any]], name: str) -> str:
    """The column named ``prompt`` or ``text``, or else the only one whose values can be prompts.

    ``columns`` gives some values of each column of the file ``name``; text that is a number can be no prompt.

    Raises:
        InvalidInput: none can be, or several; the columns are listed.
    """
    usual = [column for column in _USUAL if column in columns]
    found = usual or [column for column, values in columns.items() if _can_be_prompts(values)]
    if len(found) == 1:
        return found[0]
    which = "several columns" if found else "no column"
    raise InvalidInput(
        f"{name} has {which} that could hold the prompts; name one of its columns: "
        f"{', '.join(map(repr, columns)) or 'it has none'}."
    )


def _can_be_prompts(values: Sequence[Any]) -> bool:
    return any(_is_words(value) or _is_list(value) for value in values)


def _is_list(value: Any) -> bool:
    """Whether it is a list as messages or token ids are; a list of floats is rather an embedding."""
    return isinstance(value, list) and bool(value) and all(isinstance(item, int | dict) for item in value)


def _is_words(value: Any) -> bool:
    if not isinstance(value, str) or not value:
        return False
    try:
        float(value)
    except ValueError:
        return True
    return False
