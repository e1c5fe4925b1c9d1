"""Ragged rows: picking, joining and ordering prompts never mixes their rows."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streamtap.activations import Activations, Provenance, in_asked_order, join
from streamtap.errors import InvalidInput, MissingExtra

#: The same examples in every run, however busy the machine.
STEADY = settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])

MADE_BY = Provenance("tiny", "abc", "tok", "float32")
OPTIONAL = ("perplexity", "token_nll", "logits", "logit_ids", "logit_offsets")


def made(
    counts: list[int], index: list[int] | None = None, *, full: bool = True, dtype: Any = np.float32
) -> Activations:
    """Prompt i has ``counts[i]`` rows, each filled with its number in the caller's list; one logit row more."""
    owners = list(range(len(counts))) if index is None else index
    rows = np.repeat(np.array(owners, np.int64), counts)
    logit_rows = np.repeat(np.array(owners, np.int64), [count + 1 for count in counts])
    head: dict[str, Any] = {}
    if full:
        head = {
            "perplexity": np.array(owners, np.float64)[:, None] + [0, 0.1, 0.2],
            "token_nll": tuple(np.full(count, owner, np.float32) for owner, count in zip(owners, counts, strict=True)),
            "logits": np.stack([logit_rows, -logit_rows], axis=1).astype(np.float32),
            "logit_ids": np.stack([logit_rows, logit_rows], axis=1).astype(np.int32),
            "logit_offsets": np.concatenate([[0], np.cumsum([count + 1 for count in counts])]).astype(np.int64),
        }
    return Activations(
        acts={layer: np.stack([rows, rows + layer], axis=1).astype(dtype) for layer in (3, 1)},
        offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        token_ids=rows.astype(np.int32),
        positions=np.concatenate([np.arange(count) for count in counts] or [np.arange(0)]).astype(np.int32),
        provenance=MADE_BY,
        index=np.array(owners, np.int64),
        **head,
    )


def assert_owned_by(acts: Activations, owners: list[int], counts: list[int]) -> None:
    """Every value of prompt i says that it is ``owners[i]``'s."""
    assert len(acts) == len(owners)
    assert acts.index.tolist() == owners
    assert acts.layers == (1, 3)
    for i, (owner, count) in enumerate(zip(owners, counts, strict=True)):
        start, stop = acts.offsets[i : i + 2]
        assert stop - start == count
        for layer, rows in acts.prompt(i).items():
            assert rows.tolist() == [[owner, owner + layer]] * count
        assert acts.token_ids[start:stop].tolist() == [owner] * count
        assert acts.positions[start:stop].tolist() == list(range(count))
        if acts.perplexity is not None:
            assert acts.token_nll is not None
            assert acts.logits is not None
            assert acts.logit_ids is not None
            assert acts.logit_offsets is not None
            assert acts.perplexity[i, 0] == owner
            assert acts.token_nll[i].tolist() == [owner] * count
            first, last = acts.logit_offsets[i : i + 2]
            assert acts.logits[first:last].tolist() == [[owner, -owner]] * (count + 1)
            assert acts.logit_ids[first:last].tolist() == [[owner, owner]] * (count + 1)


@STEADY
@given(st.lists(st.integers(0, 4), min_size=1, max_size=6), st.data(), st.booleans())
def test_picked_prompts_bring_all_that_is_theirs(counts: list[int], data: st.DataObject, full: bool) -> None:
    picks = data.draw(st.lists(st.integers(-len(counts), len(counts) - 1), max_size=8))

    picked = made(counts, full=full).select(picks)

    owners = [pick % len(counts) for pick in picks]
    assert_owned_by(picked, owners, [counts[owner] for owner in owners])
    assert (picked.perplexity is not None) == full


@STEADY
@given(st.lists(st.integers(0, 4), min_size=1, max_size=8), st.data())
def test_batches_in_any_order_come_back_in_the_callers(counts: list[int], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(counts))))
    cut = data.draw(st.integers(0, len(counts)))
    parts = [made([counts[i] for i in part], list(part)) for part in (order[:cut], order[cut:])]

    assert_owned_by(join(parts), list(order), [counts[i] for i in order])
    assert_owned_by(in_asked_order(parts), list(range(len(counts))), counts)


def test_equal_prompts_keep_their_places() -> None:
    assert_owned_by(in_asked_order([made([2, 2], [1, 0]), made([3], [2])]), [0, 1, 2], [2, 2, 3])


def test_a_mask_picks_as_in_any_array() -> None:
    assert_owned_by(made([1, 2, 3]).select(np.array([True, False, True])), [0, 2], [1, 3])


@pytest.mark.parametrize("places", [[3], [-4], [0.5], [True, False]], ids=str)
def test_a_prompt_that_is_not_there_is_not_picked(places: Any) -> None:
    with pytest.raises(IndexError):
        made([1, 2, 3]).select(places)


def test_one_prompt_may_be_counted_from_the_end() -> None:
    acts = made([1, 2, 3])

    assert acts.prompt(-1)[1].tolist() == acts.prompt(2)[1].tolist() == [[2, 3]] * 3
    for i in (3, -4):
        with pytest.raises(IndexError):
            acts.prompt(i)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"acts": {1: np.zeros((3, 2), np.float32)}}, r"layers \[1, 3\].*another holds \[1\]"),
        ({"pooling": "mean"}, "'none'.*'mean'"),
        ({"provenance": dataclasses.replace(MADE_BY, commit="def")}, "one model"),
        ({"provenance": dataclasses.replace(MADE_BY, dtype="bfloat16")}, "one model"),
        ({"perplexity": None}, "1 of 2 hold perplexity"),
        ({"token_nll": None}, "1 of 2 hold token_nll"),
        ({"logits": None}, "1 of 2 hold logits"),
        ({"logit_ids": None}, "1 of 2 hold logit_ids"),
    ],
    ids=str,
)
def test_parts_that_are_not_of_one_kind_are_not_joined(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidInput, match=reason):
        join([made([1, 2]), dataclasses.replace(made([1, 2], [2, 3]), **change)])


def test_parts_of_two_devices_are_of_one_model() -> None:
    other = dataclasses.replace(made([1], [2]), provenance=dataclasses.replace(MADE_BY, device="cuda:1"))

    assert_owned_by(join([made([1, 2]), other]), [0, 1, 2], [1, 2, 1])


def test_nothing_is_not_joined() -> None:
    with pytest.raises(InvalidInput, match="at least one Activations"):
        join([])


def test_rows_without_index_have_no_order() -> None:
    acts = dataclasses.replace(made([1, 2]), index=np.zeros(0, np.int64))

    with pytest.raises(InvalidInput, match="index names 0 of 2 prompts"):
        in_asked_order([acts])
    assert len(acts.select([1])) == 1


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64, ml_dtypes.bfloat16])
def test_torch_tensors_have_the_same_bits(dtype: Any) -> None:
    acts = made([1, 2], dtype=dtype)
    acts = dataclasses.replace(acts, acts={1: acts.acts[1][:, ::-1]})  # not contiguous

    tensor = acts.torch()[1]

    assert str(tensor.dtype) == f"torch.{np.dtype(dtype).name}"
    assert tensor.double().tolist() == acts.acts[1].astype(np.float64).tolist()


def test_without_torch_the_message_is_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)

    with pytest.raises(MissingExtra, match=r"pip install 'streamtap\[local\]'"):
        made([1]).torch()
