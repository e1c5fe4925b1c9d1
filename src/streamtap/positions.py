"""Which of a prompt's tokens have a row: position specs to position numbers."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamtap.errors import InvalidPositions

Mask = Callable[[NDArray[np.int32]], Any]
PositionSpec = str | int | Sequence[int] | NDArray[np.integer[Any]] | Mask

ROLE = "role:"
_RANGE = re.compile(r"(-?\d+)?:(-?\d+)?", re.ASCII)


def check_positions(spec: PositionSpec) -> None:
    """Refuse a spec that can mean nothing for any prompt.

    Raises:
        InvalidPositions: it cannot.
    """
    if callable(spec) or _is_int(spec):
        return
    if isinstance(spec, str):
        if spec in ("all", "last") or _RANGE.fullmatch(spec) or (spec.startswith(ROLE) and len(spec) > len(ROLE)):
            return
    elif _are_ints(spec):
        return
    raise InvalidPositions(
        f"positions {spec!r} is not understood; write 'all', 'last', a range such as '-5:', ints, "
        "'role:assistant', or a function of the token ids."
    )


def is_own_to_prompt(spec: PositionSpec) -> bool:
    """Whether a spec picks other positions in prompts of equal tokens, so that they belong to its identity."""
    return callable(spec) or (isinstance(spec, str) and spec.startswith(ROLE))


def canonical_positions(spec: PositionSpec) -> str:
    """A spec as text for the fingerprint; positions that are the prompt's own are hashed with it instead."""
    if is_own_to_prompt(spec):
        return "of-the-prompt"
    if isinstance(spec, str):
        return spec
    return ",".join(str(number) for number in _numbers(spec))


def from_canonical(text: str) -> PositionSpec:
    """The spec that ``canonical_positions`` wrote as ``text``."""
    parts = text.split(",")
    return [int(part) for part in parts] if all(part.lstrip("-").isdecimal() for part in parts) else text


def choose_positions(
    spec: PositionSpec,
    token_ids: NDArray[np.int32],
    *,
    excluded_ids: NDArray[np.int32] | None = None,
    role_positions: NDArray[np.int32] | None = None,
    index: int = 0,
) -> NDArray[np.int32]:
    """Positions of one prompt that ``spec`` chooses, int32 ascending.

    ``token_ids`` is int32 [tokens]; ``excluded_ids`` are token ids that never have a row;
    ``role_positions`` are those of the role that a ``role:`` spec names.

    Raises:
        InvalidPositions: a position outside the prompt, a mask of the wrong shape, or none left.
    """
    chosen = _candidates(spec, token_ids, role_positions, index)
    if excluded_ids is not None and len(excluded_ids):
        chosen = chosen[~np.isin(token_ids[chosen], excluded_ids)]
    if isinstance(spec, str) and spec == "last":
        chosen = chosen[-1:]
    if not len(chosen):
        raise InvalidPositions(
            f"prompt {index}: positions {_shown(spec)} leaves none of its {len(token_ids)} tokens; choose others."
        )
    return chosen.astype(np.int32)


def _candidates(
    spec: PositionSpec, token_ids: NDArray[np.int32], role_positions: NDArray[np.int32] | None, index: int
) -> NDArray[np.int32]:
    n = len(token_ids)
    every: NDArray[np.int32] = np.arange(n, dtype=np.int32)
    if callable(spec):
        mask: NDArray[Any] = np.asarray(spec(token_ids))
        if mask.shape != (n,) or mask.dtype != bool:
            raise InvalidPositions(
                f"prompt {index}: the mask function must return booleans of shape ({n},); "
                f"got {mask.dtype} of shape {mask.shape}."
            )
        return np.flatnonzero(mask).astype(np.int32)
    if isinstance(spec, str):
        if spec in ("all", "last"):
            return every  # "last" is cut to one after special tokens are left out
        if spec.startswith(ROLE):
            return np.zeros(0, np.int32) if role_positions is None else role_positions
        start, stop = (int(end) if end else None for end in spec.split(":"))
        return every[slice(start, stop)]
    return _explicit(_numbers(spec), n, index)


def _explicit(numbers: Sequence[int], n: int, index: int) -> NDArray[np.int32]:
    for number in numbers:
        if not -n <= number < n:
            raise InvalidPositions(f"prompt {index}: position {number} is outside its {n} tokens, 0 to {n - 1}.")
    resolved = [int(number) % n for number in numbers]
    if len(set(resolved)) != len(resolved):
        raise InvalidPositions(f"prompt {index}: positions {list(numbers)} name one token twice among its {n}.")
    return np.sort(np.asarray(resolved, dtype=np.int32))


def _numbers(spec: Any) -> list[int]:
    return [int(number) for number in ([spec] if isinstance(spec, int | np.integer) else spec)]


def _shown(spec: PositionSpec) -> str:
    return "of the mask function" if callable(spec) else repr(spec)


def _are_ints(spec: Any) -> bool:
    try:
        return len(spec) > 0 and all(_is_int(item) for item in spec)
    except TypeError:
        return False  # without a length, or an array without axes


def _is_int(value: Any) -> bool:
    try:
        operator.index(value)
    except TypeError:
        return False
    return not isinstance(value, bool | np.ndarray)
