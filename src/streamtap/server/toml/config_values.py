"""One value of ``streamtap.toml`` to the value of its field; what is wrong with it, in words."""

from __future__ import annotations

import math
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

#: Least and most, by the field's name; other whole numbers are at least 0 and other times more than 0.
_BOUNDS: dict[str, tuple[float, float]] = {
    "port": (0, 65535),
    "idle_seconds": (0, math.inf),
    "restart_backoff_seconds": (0, math.inf),
    "max_activation_prompt_tokens": (1, math.inf),
    "max_batch_tokens": (1, math.inf),
    "tensor_parallel_size": (1, 1024),
    "pipeline_parallel_size": (1, 1024),
    "max_model_len": (1, math.inf),
    "n_layers": (1, math.inf),
    "hidden_size": (1, math.inf),
    "vocabulary": (1, math.inf),
    "max_engines": (1, math.inf),
    "max_active_per_key": (1, math.inf),
    "rate_per_minute": (1, math.inf),
    "max_output_work_tokens": (1, math.inf),
    "max_prompts": (1, math.inf),
    "max_body_bytes": (1024, math.inf),
    "breaker_failures": (1, math.inf),
    "small_harvests_per_key": (1, math.inf),
    "large_harvests_per_key": (1, math.inf),
    "large_harvests": (1, math.inf),
    "max_harvest_prompts": (1, math.inf),
    "max_harvest_tokens": (1, math.inf),
    "lease_seconds": (5, math.inf),
    # The longest that an object store signs a link for.
    "link_days": (0.00001, 7),
}
_WORDS = {str: "a text", int: "a whole number", float: "a number", bool: "true or false", Path: "a path"}


def read_value(name: str, kind: Any, value: Any, folder: Path) -> Any:
    """The value of field ``name``, whose type is ``kind``; a path that is not absolute starts at ``folder``.

    Raises:
        ValueError: it is not of that type or out of range; the message says what was expected and what came.
    """
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        return read_value(name, next(each for each in get_args(kind) if each is not NoneType), value, folder)
    if origin is Literal:
        return _one_of(get_args(kind), value)
    if origin is tuple:
        return _texts(value)
    if kind in (int, float):
        return _number(name, kind, value)
    if kind is bool and isinstance(value, bool):
        return value
    if kind in (str, Path) and isinstance(value, str) and value.strip():
        return placed(value, folder) if kind is Path else value
    raise ValueError(f"expected {_WORDS[kind]}, got {shown(value)}")


def placed(path: str, folder: Path) -> Path:
    """``path`` with the user's home and ``folder`` filled in."""
    return (folder / Path(path).expanduser()).absolute()


def shown(value: Any) -> str:
    """A value of TOML in a message, cut where it is long."""
    text = {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


def _one_of(known: tuple[Any, ...], value: Any) -> Any:
    if value in known:
        return value
    raise ValueError(f"expected {', '.join(map(repr, known[:-1]))} or {known[-1]!r}, got {shown(value)}")


def _texts(value: Any) -> tuple[str, ...]:
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return tuple(value)
    raise ValueError(f"expected a list of texts, got {shown(value)}")


def _number(name: str, kind: type, value: Any) -> int | float:
    wanted = int if kind is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, wanted):
        raise ValueError(f"expected {_WORDS[kind]}, got {shown(value)}")
    least, most = _BOUNDS.get(name, (0, math.inf))
    exclusive = kind is float and name not in _BOUNDS
    if not math.isfinite(value) or not least <= value <= most or (exclusive and value == 0):
        bounds = f"more than {least}" if exclusive else f"at least {least}"
        bounds += f" and at most {most}" if math.isfinite(most) else ""
        raise ValueError(f"expected {_WORDS[kind]} of {bounds}, got {shown(value)}")
    return kind(value)  # type: ignore[no-any-return]
