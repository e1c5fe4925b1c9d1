from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from streamtap.completion import PromptLogs, TokenLog
from streamtap.engines.generation.logs import ArrayPromptLogs, PromptLogBuilder, token_log

PROMPT = [4, 0, 2, 2]


def _text(token_id: int) -> str:
    return f"<{token_id}>"


def _logits(rows: int = 4, vocabulary: int = 7) -> torch.Tensor:
    return torch.randn((rows, vocabulary), generator=torch.Generator().manual_seed(2)) * 3


def _built(top: int, logits: torch.Tensor, *, sizes: list[int] | None = None) -> ArrayPromptLogs:
    builder = PromptLogBuilder(PROMPT, top, _text, offsets=[0, 3, 6, 9])
    for part in logits.split(sizes or [len(logits)]):
        builder.add(part)
    return builder.finished()


def _naive(logits: torch.Tensor, position: int, top: int) -> TokenLog:
    """The log of the prompt's token at ``position``, by the book."""
    values = [float(each) for each in logits[position - 1].double()]
    total = math.log(sum(map(math.exp, values)))
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    token = PROMPT[position]
    listed = tuple((i, _text(i), values[i] - total) for i in order[:top])
    return TokenLog(token, _text(token), 3 * position, values[token] - total, order.index(token) + 1, listed)


def _assert_same(one: TokenLog, other: TokenLog) -> None:
    assert (one.token_id, one.text, one.offset, one.rank) == (other.token_id, other.text, other.offset, other.rank)
    assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
    assert [entry[:2] for entry in one.top] == [entry[:2] for entry in other.top]
    assert [entry[2] for entry in one.top] == pytest.approx([entry[2] for entry in other.top], abs=1e-5)


def test_a_token_and_its_rivals() -> None:
    shares = torch.tensor([0.5, 0.125, 0.25, 0.125])

    log = token_log(shares.log() + 3, 2, 2, _text, offset=9)

    assert (log.token_id, log.text, log.offset, log.rank) == (2, "<2>", 9, 2)
    assert log.logprob == pytest.approx(math.log(0.25), abs=1e-6)
    assert [entry[:2] for entry in log.top] == [(0, "<0>"), (2, "<2>")]
    assert [entry[2] for entry in log.top] == pytest.approx([math.log(0.5), math.log(0.25)], abs=1e-6)


def test_a_chosen_token_need_not_be_among_the_likeliest() -> None:
    log = token_log(torch.tensor([3.0, 2.0, 1.0, 0.0]), 3, 1, _text)

    assert (log.rank, [entry[0] for entry in log.top]) == (4, [0])


def test_with_none_asked_the_token_alone_is_known() -> None:
    log = token_log(torch.zeros(4), 3, 0, _text)

    assert (log.logprob, log.top) == (pytest.approx(math.log(0.25)), ())


def test_equals_share_a_rank_and_are_listed_by_id() -> None:
    logits = torch.tensor([1.0, 5.0, 2.0, 5.0, 5.0, 9.0] + [5.0] * 40)

    log = token_log(logits, 40, 4, _text)

    assert log.rank == 2
    assert [entry[0] for entry in log.top] == [5, 1, 3, 4]


def test_a_greedy_token_leads_its_own_list() -> None:
    logits = _logits(1, 5000)[0].bfloat16().round()
    likeliest = int(logits.float().argmax())

    assert token_log(logits, likeliest, 1, _text).top[0][0] == likeliest


def test_more_than_the_vocabulary_is_the_vocabulary() -> None:
    assert len(token_log(torch.zeros(4), 3, 100, _text).top) == 4


def test_float64_is_kept_and_less_is_raised_to_float32() -> None:
    logits = torch.tensor([0.1, 0.7, -0.3], dtype=torch.float64)
    exact = float(torch.log_softmax(logits, -1)[1])

    assert token_log(logits, 1, 0, _text).logprob == exact
    assert token_log(logits.bfloat16(), 1, 0, _text).logprob == pytest.approx(exact, abs=5e-3)


def test_a_token_that_cannot_be_has_minus_infinity() -> None:
    log = token_log(torch.tensor([0.0, -math.inf, 0.0]), 1, 3, _text)

    assert (log.logprob, log.rank) == (-math.inf, 3)
    assert [entry[0] for entry in log.top] == [0, 2, 1]


@pytest.mark.parametrize("top", [0, 1, 3, 7, 100, -1])
@pytest.mark.parametrize("sizes", [[4], [3, 1], [1, 1, 1, 1]])
def test_prompt_logs_are_those_of_each_position(top: int, sizes: list[int]) -> None:
    logits = _logits()

    logs: PromptLogs = _built(top, logits, sizes=sizes)

    assert len(logs) == 4
    assert logs.at(0) == TokenLog(4, "<4>", 0, None, None, ())
    for position in (1, 2, 3):
        _assert_same(logs.at(position), _naive(logits, position, 7 if top == -1 else top))


def test_the_row_of_the_last_position_may_be_left_out() -> None:
    logits = _logits()

    assert _built(2, logits[:3]).at(3) == _built(2, logits).at(3)


def test_the_whole_vocabulary_lists_equals_by_id() -> None:
    logs = _built(-1, torch.zeros((4, 7)))

    assert [entry[:2] for entry in logs.at(1).top] == [(i, _text(i)) for i in range(7)]
    assert logs.at(1).rank == 1


def test_many_rows_at_once_are_the_same_rows() -> None:
    prompt = [int(each) for each in np.random.default_rng(0).integers(0, 11, 300)]
    logits = _logits(300, 11)
    builder = PromptLogBuilder(prompt, 2, _text)

    builder.add(logits)
    logs = builder.finished()

    for position in (1, 64, 65, 128, 299):
        alone = token_log(logits[position - 1], prompt[position], 2, _text)
        _assert_same(logs.at(position), alone)


def test_only_what_was_asked_is_kept() -> None:
    logits = _logits(4, 10_000)
    builder = PromptLogBuilder(PROMPT, 5, _text)

    builder.add(logits)

    assert sum(column.nbytes for column in builder._columns.values()) == 3 * (4 + 4 + 5 * (4 + 4))


def test_a_prompt_of_one_token_needs_no_logits() -> None:
    for top in (2, -1):
        logs = PromptLogBuilder([5], top, _text).finished()

        assert (len(logs), logs.at(0).token_id) == (1, 5)


def test_what_never_came_is_an_error() -> None:
    builder = PromptLogBuilder(PROMPT, 1, _text)
    builder.add(_logits()[:2])

    with pytest.raises(ValueError, match="logits of 2 positions came; a prompt of 4 needs 3"):
        builder.finished()


@pytest.mark.parametrize("position", [-1, 4])
def test_no_position_beyond_the_prompt(position: int) -> None:
    with pytest.raises(IndexError, match=f"position {position} of a prompt of 4 tokens"):
        _built(1, _logits()).at(position)
