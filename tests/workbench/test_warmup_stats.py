from __future__ import annotations

from dataclasses import FrozenInstanceError, fields

import pytest

from streamtap.workbench.warmup_stats import WarmupStats


def test_it_prints_as_users_know_it() -> None:
    stats = WarmupStats(500, 0, 500, 0, 500, 142.3)

    expected = (
        "WarmupStats(total=500, activations=0 cached + 500 extracted, perplexity=0 cached + 500 extracted, time=142.3s)"
    )
    assert str(stats) == f"{stats}" == expected


def test_logits_are_printed_where_there_are_any() -> None:
    stats = WarmupStats(3, 2, 1, 0, 0, 0.04, logits_cached=2, logits_extracted=1)

    assert str(stats) == (
        "WarmupStats(total=3, activations=2 cached + 1 extracted, perplexity=0 cached + 0 extracted, "
        "logits=2 cached + 1 extracted, time=0.0s)"
    )


def test_the_hit_rate_counts_prompts_whose_rows_were_there() -> None:
    assert WarmupStats(8, 6, 2, 0, 8).cache_hit_rate == 0.75
    assert WarmupStats(0, 0, 0).cache_hit_rate == 0.0


def test_it_has_the_fields_that_users_know() -> None:
    names = [field.name for field in fields(WarmupStats)]

    assert names == [
        "total_prompts",
        "activations_cached",
        "activations_extracted",
        "perplexity_cached",
        "perplexity_extracted",
        "elapsed_seconds",
        "logits_cached",
        "logits_extracted",
    ]
    with pytest.raises(FrozenInstanceError):
        WarmupStats(1, 1, 0).total_prompts = 2  # type: ignore[misc]
