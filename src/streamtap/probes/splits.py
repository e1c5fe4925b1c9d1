"""Train, validation and test rows, with related rows on one side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from streamtap.errors import InvalidInput, InvalidRows
from streamtap.probes.labels import read_labels

Part = Literal["train", "validation", "test"]
PARTS: tuple[Part, ...] = ("train", "validation", "test")

#: Shuffles tried, of which the best balanced with every label in every part is taken ...
_ATTEMPTS = 32
#: ... or the first whose squared relative miss, summed over parts and labels, is as small as this.
_CLOSE = 1e-3


@dataclass(frozen=True, eq=False)
class Split:
    """Row ids of each part, int64, ascending: ids, not places, so that a reordered table splits alike.

    Raises:
        InvalidRows: a row id in more than one part, or twice in one.
    """

    train: NDArray[np.int64]
    validation: NDArray[np.int64]
    test: NDArray[np.int64]

    def __post_init__(self) -> None:
        """Refuse a split whose parts overlap."""
        self.check_disjoint()

    def check_disjoint(self) -> None:
        """Check that no row is in two parts.

        Raises:
            InvalidRows: one is.
        """
        ids, counts = np.unique(np.concatenate([self.train, self.validation, self.test]), return_counts=True)
        if np.any(counts > 1):
            raise InvalidRows(
                f"row {int(ids[np.argmax(counts > 1)])} is in the split more than once "
                f"({int((counts > 1).sum())} rows are); each row belongs to one part."
            )

    def check_training(self, row_ids: Sequence[int] | NDArray[np.int64]) -> None:
        """Check that none of ``row_ids``, meant for fitting, is a test row.

        Raises:
            InvalidRows: some are.
        """
        leaked = np.intersect1d(np.asarray(row_ids, dtype=np.int64), self.test)
        if len(leaked):
            raise InvalidRows(f"{len(leaked)} rows to be fitted on are test rows, the first is {int(leaked[0])}.")

    def places(self, part: Part, row_ids: Sequence[int] | NDArray[np.int64] | None = None) -> NDArray[np.int64]:
        """Places in a table, whose rows are ``row_ids`` in that order, of the rows of ``part``, int64 [rows].

        Left out, ``row_ids`` are 0, 1, 2, …: the places are the ids.

        Raises:
            InvalidRows: the table lacks a row of the part, or holds one twice.
        """
        wanted: NDArray[np.int64] = getattr(self, part)
        if row_ids is None:
            return wanted
        ids = _as_ids(row_ids)
        order = np.argsort(ids, kind="stable")
        found = np.searchsorted(ids[order], wanted)
        missing = (found >= len(ids)) | (ids[order[np.minimum(found, len(ids) - 1)]] != wanted)
        if missing.any():
            raise InvalidRows(f"the table lacks row {int(wanted[np.argmax(missing)])} of the split's {part} part.")
        return order[found]


def grouped_split(
    groups: Sequence[Any] | NDArray[Any],
    labels: Any,
    test: float = 0.25,
    validation: float = 0.2,
    random_state: int = 0,
    row_ids: Sequence[int] | NDArray[np.int64] | None = None,
) -> Split:
    """Split rows so that all rows of one group fall into one part, each part with its share of every label.

    ``groups`` [rows] names what rows have in common (a fact, a template, a source); for unrelated
    rows pass ``range(n)``. ``test`` and ``validation`` are shares of all rows, met as closely as
    whole groups allow. The result depends on ids, groups, labels and ``random_state``, not on the
    order of the rows.

    Raises:
        InvalidInput: shares that leave no part for training.
        InvalidRows: lengths that differ, or groups that cannot give every part every label.
    """
    _check_shares(test, validation)
    ids = np.arange(len(groups)) if row_ids is None else _as_ids(row_ids)
    label_codes = np.unique(read_labels(labels, len(groups)), return_inverse=True)[1]
    if len(ids) != len(groups):
        raise InvalidRows(f"row_ids and groups must be of one length; got {len(ids)} and {len(groups)}.")
    group_codes = _group_codes(groups)
    counts = np.zeros((int(group_codes.max()) + 1, int(label_codes.max()) + 1))
    np.add.at(counts, (group_codes, label_codes), 1)
    _check_possible(counts)
    sides = _best_sides(counts, np.array([1 - test - validation, validation, test]), random_state)[group_codes]
    return Split(*(np.sort(ids[sides == side]) for side in range(3)))


def _best_sides(counts: NDArray[np.float64], shares: NDArray[np.float64], random_state: int) -> NDArray[np.int64]:
    """Part number of each group, [groups], for ``counts`` [groups, labels]."""
    target = shares[:, None] * counts.sum(axis=0)
    random = np.random.default_rng(random_state)
    best: tuple[float, NDArray[np.int64]] | None = None
    for _ in range(_ATTEMPTS):
        sides = _sides(counts, target, random.permutation(len(counts)))
        held = np.stack([counts[sides == side].sum(axis=0) for side in range(3)])
        miss = float((((held - target) / target) ** 2).sum())
        if held.min() > 0 and (best is None or miss < best[0]):
            best = miss, sides
        if best is not None and best[0] <= _CLOSE:
            break
    if best is None:
        raise InvalidRows(
            f"{len(counts)} groups could not be shared out so that training, validation and test each hold every "
            "label; use smaller groups, more rows of the rarest label, or other shares."
        )
    return best[1]


def _sides(counts: NDArray[np.float64], target: NDArray[np.float64], order: NDArray[np.int64]) -> NDArray[np.int64]:
    """Give each group, the large ones first, to the part that then lies nearest its target."""
    sides = np.zeros(len(counts), dtype=np.int64)
    held = np.zeros_like(target)
    for group in order[np.argsort(-counts[order].sum(axis=1), kind="stable")]:
        # What a part gains in squared relative distance by taking this group.
        before = (((held - target) / target) ** 2).sum(axis=1)
        after = (((held + counts[group] - target) / target) ** 2).sum(axis=1)
        sides[group] = int(np.argmin((after - before) * target.sum(axis=1)))
        held[sides[group]] += counts[group]
    return sides


def _group_codes(groups: Sequence[Any] | NDArray[Any]) -> NDArray[np.int64]:
    array = np.asarray(groups)
    if array.ndim != 1 or array.dtype == object:
        # Tuples and mixed names become text, type included, so that 1 and "1" stay two groups.
        array = np.array([f"{type(group).__name__} {group}" for group in groups])
    return np.asarray(np.unique(array, return_inverse=True)[1], dtype=np.int64)


def _as_ids(row_ids: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    ids = np.asarray(row_ids)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise InvalidRows(f"row ids must be whole numbers, one a row; got {ids.dtype} of shape {ids.shape}.")
    if len(np.unique(ids)) != len(ids):
        raise InvalidRows("row ids must differ from each other; some occur twice.")
    return ids.astype(np.int64)


def _check_shares(test: float, validation: float) -> None:
    if not (test > 0 and validation > 0 and test + validation < 1):
        raise InvalidInput(f"test and validation must be above 0 and together below 1; got {test} and {validation}.")


def _check_possible(counts: NDArray[np.float64]) -> None:
    fewest = int((counts > 0).sum(axis=0).min())
    if fewest < 3:
        raise InvalidRows(
            f"a split into training, validation and test needs every label in at least 3 groups; "
            f"one label is in {fewest} of {len(counts)}."
        )
