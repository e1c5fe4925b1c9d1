from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from transformers import TopPLogitsWarper

from streamtap.completion import Sampling
from streamtap.engines.generation.sampling import Sampler, finite_rows

SEEDED = Sampling(seed=7)
GREEDY = Sampling(temperature=0)
SHARES = torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.0625])


def _sampler(sampling: Sampling, *, prompt_ids: Sequence[int] = (0,), vocabulary: int = 5, stream: int = 0) -> Sampler:
    return Sampler(sampling, prompt_ids=prompt_ids, vocabulary=vocabulary, stream=stream)


def _drawn(sampler: Sampler, logits: torch.Tensor, count: int) -> list[int]:
    found: list[int] = []
    for _ in range(count):
        found.append(sampler.pick(logits, found))
    return found


def _ever(sampling: Sampling, logits: torch.Tensor, count: int = 150) -> set[int]:
    return set(_drawn(_sampler(replace(sampling, seed=1), vocabulary=len(logits)), logits, count))


def _random(vocabulary: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(vocabulary, generator=torch.Generator().manual_seed(seed))


def test_the_draws_follow_the_distribution() -> None:
    counts = Counter(_drawn(_sampler(SEEDED), SHARES.log(), 2500))

    assert [counts[i] / 2500 for i in range(5)] == pytest.approx(SHARES.tolist(), abs=0.03)


def test_temperature_makes_the_distribution_flatter_or_steeper() -> None:
    counts = Counter(_drawn(_sampler(replace(SEEDED, temperature=0.5)), SHARES.log(), 2500))
    squares = SHARES**2 / (SHARES**2).sum()

    assert [counts[i] / 2500 for i in range(5)] == pytest.approx(squares.tolist(), abs=0.03)


def test_a_seed_gives_the_same_draws_again() -> None:
    logits = _random(300)
    first, again = (_drawn(_sampler(SEEDED, vocabulary=300), logits, 50) for _ in range(2))

    assert first == again
    assert len(set(first)) > 30
    assert first != _drawn(_sampler(Sampling(seed=8), vocabulary=300), logits, 50)


def test_samples_of_one_seed_differ() -> None:
    logits = _random(300)
    drawn = [tuple(_drawn(_sampler(SEEDED, vocabulary=300, stream=i), logits, 20)) for i in range(4)]

    assert len(set(drawn)) == 4
    assert drawn[2] == tuple(_drawn(_sampler(SEEDED, vocabulary=300, stream=2), logits, 20))


def test_samples_of_neighbouring_seeds_differ() -> None:
    logits = _random(300)
    after, beside = _sampler(Sampling(seed=8), vocabulary=300), _sampler(SEEDED, vocabulary=300, stream=1)

    assert _drawn(after, logits, 20) != _drawn(beside, logits, 20)


def test_draws_do_not_depend_on_what_runs_beside() -> None:
    logits = torch.stack([_random(300, seed) for seed in range(3)])
    alone = _drawn(_sampler(SEEDED, vocabulary=300), logits[1], 20)

    torch.manual_seed(3)
    samplers = [_sampler(sampling, vocabulary=300) for sampling in (GREEDY, SEEDED, Sampling())]
    found: list[list[int]] = [[], [], []]
    for _ in range(20):
        torch.rand(5)
        for sampler, row, tokens in zip(samplers, logits, found, strict=True):
            tokens.append(sampler.pick(row, tokens))

    assert found[1] == alone
    assert set(found[0]) == {int(logits[0].argmax())}


def test_without_a_seed_draws_are_new_each_time() -> None:
    logits = torch.zeros(1000)
    drawn = []
    for _ in range(2):
        torch.manual_seed(0)
        drawn.append(_drawn(_sampler(Sampling(), vocabulary=1000), logits, 20))

    assert drawn[0] != drawn[1]


def test_any_integer_is_a_seed() -> None:
    logits = _random(300)
    drawn = {tuple(_drawn(_sampler(Sampling(seed=seed), vocabulary=300), logits, 20)) for seed in (0, 2**64, 10**30)}

    assert len(drawn) == 3


def test_greedy_takes_the_first_of_the_likeliest() -> None:
    logits = torch.tensor([0.0, 2.0, 1.0, 2.0, -math.inf])

    assert _drawn(_sampler(GREEDY), logits, 3) == [1, 1, 1]


def test_top_k_top_p_and_min_p_leave_the_likeliest() -> None:
    logits = SHARES.log()

    assert _ever(Sampling(top_k=2), logits) == {0, 1}
    assert _ever(Sampling(top_k=1), logits) == {0}
    assert _ever(Sampling(top_k=100), logits) == {0, 1, 2, 3, 4}
    assert _ever(Sampling(top_p=0.7), logits) == {0, 1}
    assert _ever(Sampling(top_p=0.8), logits) == {0, 1, 2}
    assert _ever(Sampling(top_p=1e-9), logits) == {0}
    assert _ever(Sampling(min_p=0.2), logits) == {0, 1, 2}
    assert _ever(Sampling(min_p=1.0), logits) == {0}


def test_they_act_after_the_temperature_and_top_p_after_top_k() -> None:
    logits = SHARES.log()

    # Squared, the shares are 0.73, 0.18, 0.05, …
    assert _ever(Sampling(top_p=0.7, temperature=0.5), logits) == {0}
    assert _ever(Sampling(min_p=0.2, temperature=0.5), logits) == {0, 1}
    # Of the two that top_k leaves, the first holds 0.67.
    assert _ever(Sampling(top_p=0.6, top_k=2), logits) == {0}


@pytest.mark.parametrize("spread", [0.1, 3.0, 12.0])
@pytest.mark.parametrize("top_p", [0.01, 0.5, 0.9, 0.999])
def test_the_nucleus_of_a_large_vocabulary_is_that_of_transformers(spread: float, top_p: float) -> None:
    logits = _random(5000) * spread
    wanted = TopPLogitsWarper(top_p)(None, logits[None])[0]

    sampler = _sampler(Sampling(top_p=top_p), vocabulary=5000)
    scores = sampler._warps[-1](None, logits[None])[0]

    assert torch.equal(scores, wanted)


def test_presence_and_frequency_count_generated_tokens_alone() -> None:
    logits = torch.tensor([2.0, 1.5, 0.0, -9.0, -9.0])
    presence = _sampler(replace(GREEDY, presence_penalty=1.0), prompt_ids=[0, 0, 1])
    frequency = _sampler(replace(GREEDY, frequency_penalty=0.4), prompt_ids=[0, 0, 1])

    assert _drawn(presence, logits, 4) == [0, 1, 0, 0]
    # 2.0; 1.6 and 1.5; 1.2 and 1.5; 1.2 and 1.1; 0.8 and 1.1
    assert _drawn(frequency, logits, 5) == [0, 0, 1, 0, 1]


def test_a_negative_penalty_favours_what_was_there() -> None:
    logits = torch.tensor([1.0, 1.2, 0.0, 0.0, 0.0])

    assert _sampler(replace(GREEDY, presence_penalty=-0.5)).pick(logits, [0]) == 0


def test_repetition_covers_the_prompt_and_what_was_generated() -> None:
    logits = torch.tensor([2.0, 1.5, 1.2, -0.1, -0.2])
    sampling = replace(GREEDY, repetition_penalty=2.0)

    assert _drawn(_sampler(sampling, prompt_ids=[0]), logits, 3) == [1, 2, 0]
    assert _drawn(_sampler(sampling, prompt_ids=[0, 1, 1, 2]), logits, 1) == [0]
    # Below zero a penalty multiplies: -0.1 becomes -0.2, no likelier than the other.
    low = torch.tensor([-9.0, -9.0, -9.0, -0.1, -0.15])
    assert _sampler(sampling, prompt_ids=[3]).pick(low, []) == 4


def test_repetition_acts_before_presence() -> None:
    logits = torch.tensor([2.0, 0.4, 0.0, 0.0, 0.0])
    sampling = replace(GREEDY, repetition_penalty=2.0, presence_penalty=0.5)

    # 2 / 2 - 0.5 = 0.5; the other way round it would be 0.75, and the other token at 0.45 between them.
    assert _sampler(sampling, prompt_ids=[2]).pick(logits, [0]) == 0
    assert _sampler(sampling, prompt_ids=[2]).pick(torch.tensor([2.0, 0.6, 0.0, 0.0, 0.0]), [0]) == 1


def test_penalties_leave_the_logits_alone() -> None:
    logits = torch.tensor([2.0, 1.5, 1.2, -0.1, -0.2])
    before = logits.clone()
    sampling = Sampling(1.5, 0.9, 3, 0.1, 1.0, 1.0, 1.5, seed=1)

    _drawn(_sampler(sampling), logits, 5)

    assert torch.equal(logits, before)


@pytest.mark.parametrize("temperature", [5e-324, 1e-40, 1e-6, 100, 100.0])
@pytest.mark.parametrize("repetition", [5e-324, 1.0, 2])
@pytest.mark.parametrize("scale", [1.0, 1e30])
def test_extremes_do_not_overflow(temperature: float, repetition: float, scale: float) -> None:
    logits = torch.tensor([3.0, 5.0, -4.0, 0.0, -math.inf]) * scale
    sampling = Sampling(temperature, top_p=0.99, min_p=1e-9, repetition_penalty=repetition, seed=1)

    drawn = _drawn(_sampler(sampling, prompt_ids=[0, 1, 4]), logits, 20)

    assert set(drawn) <= {0, 1, 2, 3}
    if temperature < 1e-3 and repetition < 2 and scale == 1:
        assert set(drawn) == {1}


def test_a_temperature_of_100_is_nearly_flat() -> None:
    assert _ever(Sampling(temperature=100.0), torch.tensor([9.0, 1.0, -3.0, 0.0, -9.0])) == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-53, 1.0])
def test_a_token_of_probability_0_is_never_drawn(uniform: float, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.full((1000,), -math.inf)
    logits[[10, 500, 700]] = 0.1

    monkeypatch.setattr(torch, "rand", lambda *_, **__: torch.tensor(uniform, dtype=torch.float64))

    place = {0.0: 10, 0.5: 500}.get(uniform, 700)
    assert _sampler(SEEDED, vocabulary=1000).pick(logits, []) == place


def test_a_sum_that_is_rounded_leads_to_a_possible_token(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.tensor([-math.inf, 0.0, -math.inf, 0.0, -math.inf])

    for place, wanted in enumerate([1, 1, 1, 3, 3]):
        monkeypatch.setattr(torch, "searchsorted", lambda *_, place=place, **__: torch.tensor([place]))
        assert _sampler(SEEDED).pick(logits, []) == wanted


def test_logits_in_bfloat16_are_taken() -> None:
    assert _sampler(replace(SEEDED, top_k=1)).pick(SHARES.log().bfloat16(), []) == 0


def test_what_cannot_be_drawn_from_is_not_finite() -> None:
    good = torch.tensor([0.0, -math.inf])
    rows = torch.stack(
        [good, torch.tensor([math.nan, 0.0]), torch.tensor([math.inf, 0.0]), torch.full((2,), -math.inf)]
    )

    assert finite_rows(rows).tolist() == [True, False, False, False]
    for row in (rows[1], rows[3]):
        with pytest.raises(ValueError, match="not finite"):
            _sampler(SEEDED, vocabulary=2).pick(row, [])
