from __future__ import annotations

import pytest

from streamtap.workbench.tokenizing_rules import CHAT, RULES, may_be_cut, plain_rule, same_rules


def test_the_numbers_stand_in_published_datasets() -> None:
    """So they may never mean anything else."""
    assert CHAT == 16
    assert [(each["truncate"], each["generation_prompt"]) for each in RULES] == [
        *[(None, False), ("right", False), ("left", False)],
        *[(None, True), ("right", True), ("left", True)],
    ]


@pytest.mark.parametrize("number", range(6))
def test_rules_that_give_the_same_tokens_go_together(number: int) -> None:
    assert same_rules(number, is_chat=False, may_be_cut=False) == [0, 1, 2, 3, 4, 5]
    assert same_rules(number, is_chat=True, may_be_cut=True) == [number]
    assert same_rules(number, is_chat=False, may_be_cut=True) == sorted([number, (number + 3) % 6])
    assert same_rules(number, is_chat=True, may_be_cut=False) == ([0, 1, 2] if number < 3 else [3, 4, 5])
    for is_chat in (False, True):
        for cut in (False, True):
            assert plain_rule(number, is_chat=is_chat, may_be_cut=cut) == min(
                same_rules(number, is_chat=is_chat, may_be_cut=cut)
            )


def test_only_a_prompt_that_fills_the_context_may_have_been_cut() -> None:
    assert may_be_cut(1, 64, 64)
    assert may_be_cut(5, 65, 64)
    assert not may_be_cut(1, 63, 64)
    assert not may_be_cut(0, 64, 64)
    assert not may_be_cut(3, 64, 64)
    assert not may_be_cut(1, 64, None)
