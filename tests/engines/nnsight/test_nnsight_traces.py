"""What a trace holds, and the bytes that come of it."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from streamtap.capture.runs import TokenRun
from streamtap.engines.by_sequence import Wanted
from streamtap.engines.nnsight.traces import Limits, Sizes, cut_traces, plan_trace, read_trace, result_bytes
from streamtap.errors import CaptureMissed

SIZES = Sizes(hidden=4, dtype="bfloat16", vocabulary=10)


def run(n: int, chosen: list[int] | None = None) -> TokenRun:
    places = list(range(n)) if chosen is None else chosen
    return TokenRun(np.arange(n, dtype=np.int32) + 1, np.array(places, np.int32), 0)


def test_a_trace_is_padded_on_the_right_and_knows_its_rows() -> None:
    trace = plan_trace([run(2), run(3, [0, 2])], Wanted((0,), "none", nll=True, logits="last"), SIZES)

    assert trace.token_ids.tolist() == [[1, 2, 0], [1, 2, 3]]
    assert (trace.batch.tolist(), trace.positions.tolist(), trace.counts) == ([0, 0, 1, 1], [0, 1, 0, 2], [2, 2])
    assert (trace.predicting.tolist(), trace.targets.tolist()) == ([0, 3, 4], [2, 2, 3])
    assert trace.kept.tolist() == [1, 5]
    assert trace.needs_head
    assert not plan_trace([run(1)], Wanted((0,), "none", nll=True), SIZES).needs_head


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (Wanted((0, 1), "none"), 2 * 3 * 4 * 2),
        (Wanted((0, 1), "mean"), 2 * 4 * 2),
        (Wanted((), "mean", nll=True), 4 * 4),
        (Wanted((), "mean", logits="last"), 10 * 4),
        (Wanted((), "mean", logits="all", top_k=2), 5 * 2 * 8),
    ],
)
def test_what_a_sequence_gives_is_known_before(wanted: Wanted, expected: int) -> None:
    sequence = run(5, [0, 2, 4])

    assert result_bytes(sequence, wanted, SIZES) == expected
    made = read_trace(np.zeros(expected, np.uint8), [sequence], wanted, SIZES)[0]
    assert sum(each.nbytes for each in vars(made).values() if each is not None) == expected


def test_traces_are_cut_by_prompts_tokens_and_what_comes_back() -> None:
    runs = [run(n) for n in (5, 9, 1, 4)]

    def cut(**limits: Any) -> list[tuple[int, ...]]:
        found = Limits(**{"prompts": None, "tokens": 1000, **limits})
        return list(cut_traces(runs, range(4), Wanted((0,), "none"), SIZES, found))

    assert cut() == [(1, 0, 3, 2)]
    assert cut(prompts=2) == [(1, 0), (3, 2)]
    assert cut(tokens=10) == [(1,), (0, 3), (2,)]
    assert cut(result_bytes=5 * 4 * 2) == [(1,), (0,), (3, 2)]


@pytest.mark.parametrize("over", [-8, 1, 8])
def test_bytes_that_are_not_those_of_the_trace_are_refused(over: int) -> None:
    wanted = Wanted((0, 1), "none", nll=True)
    whole = result_bytes(run(3), wanted, SIZES)

    with pytest.raises(CaptureMissed, match="a trace gave"):
        read_trace(np.zeros(whole + over, np.uint8), [run(3)], wanted, SIZES)


def test_logits_that_no_vocabulary_fits_are_refused() -> None:
    wanted = Wanted((), "none", logits="last")

    with pytest.raises(CaptureMissed, match="7 bytes of logits"):
        read_trace(np.zeros(7, np.uint8), [run(3)], wanted, SIZES)


def test_without_nnsight_the_command_that_adds_it_is_said() -> None:
    code = "import sys; sys.modules['nnsight'] = None; import streamtap.engines.nnsight.engine"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert "MissingExtra" in done.stderr
    assert "pip install 'streamtap[nnsight]'" in done.stderr
