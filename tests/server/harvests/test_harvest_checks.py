"""What a job comes to, and what it may not be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from streamtap.engines.tokenizing import PromptTokenizer
from streamtap.errors import HarvestUnsupported, InvalidInput, InvalidPositions, ModelNotFound, RequestTooLarge
from streamtap.harvest.asked import HarvestAsk
from streamtap.harvest.layout import ShardLayout
from streamtap.harvest.plan import plan_shards, read_prompts
from streamtap.server.config import Limits, ModelConfig
from streamtap.server.harvests.asking import ask_of
from streamtap.server.harvests.checks import check_fits, choose_model, count, is_harvested
from streamtap.server.harvests.jobs import JobAsked
from streamtap.server.models.catalog import Served
from streamtap.spec import Projection
from streamtap.testing.characters import CharacterTokenizer
from streamtap.testing.stub_gateway import FACTS, MODEL, CharacterCounter
from streamtap.wire.harvest import HarvestRequest

SHORT = replace(FACTS, max_model_len=16)
SERVED = Served(MODEL, SHORT, CharacterCounter(SHORT))


def check(request: HarvestRequest, found: Served, limits: Limits) -> JobAsked:
    check_fits(request, found, limits)
    return count(request, found, limits)


def asked(*prompts: Any, limits: Limits | None = None, **fields: Any) -> JobAsked:
    return check(HarvestRequest("stub", prompts, **fields), SERVED, limits or Limits())


def test_what_a_job_comes_to() -> None:
    job = asked("abc", "d", "e" * 99, shard_size=2)

    assert (job.model, job.lane) == ("stub", "small")
    assert (job.n_prompts, job.n_tokens, job.n_shards) == (3, 4 + 2 + 16, 2)
    assert job.layer_indices == HarvestAsk().layer_indices(4) == (1, 2, 3)
    assert asked("a", layers="all").layer_indices == (0, 1, 2, 3)
    assert asked("a", layers=(0, 3)).layer_indices == (0, 3)
    assert job.id != asked("abc").id


def test_lanes_are_the_models_sizes() -> None:
    large = SERVED._replace(config=replace(MODEL, size="large"))

    assert check(HarvestRequest("stub", ("a",)), large, Limits()).lane == "large"


@pytest.mark.parametrize(
    ("positions", "fits"),
    [("all", True), ("last", True), ((0,), True), ((15,), True), ((16,), False), ((-16,), True), ((-17,), False)],
)
def test_positions_are_held_against_what_will_run(positions: Any, fits: bool) -> None:
    """As the engine itself does it, so that no worker hears of a job that must fail."""
    request = HarvestRequest("stub", ("a" * 99,), positions=positions)
    tokenizer = PromptTokenizer(CharacterTokenizer(), context_length=16)
    (plan,) = plan_shards(read_prompts(request.prompts, tokenizer), 32)

    if fits:
        check(request, SERVED, Limits())
        ShardLayout.of(plan, ask_of(request), (0,), 8, tokenizer)
        return
    with pytest.raises(InvalidPositions, match="prompt 0"):
        check(request, SERVED, Limits())
    with pytest.raises(InvalidPositions, match="prompt 0"):
        ShardLayout.of(plan, ask_of(request), (0,), 8, tokenizer)


def test_bounds_of_one_job() -> None:
    limits = Limits(max_harvest_prompts=2, max_harvest_tokens=7)

    assert asked("abc", "ab", limits=limits).n_tokens == 7
    with pytest.raises(RequestTooLarge, match="3 prompts; one job takes at most 2"):
        asked("a", "b", "c", limits=limits)
    with pytest.raises(RequestTooLarge, match="more than 7 tokens"):
        asked("abc", "abc", limits=limits)


def test_prompts_are_not_read_where_the_model_does_not_fit() -> None:
    class Unread(CharacterCounter):
        def count(self, *_: Any, **__: Any) -> int:
            raise AssertionError("read")

    served = SERVED._replace(counter=Unread(SHORT))
    with pytest.raises(InvalidInput, match="layers names layer 9"):
        check_fits(HarvestRequest("stub", ("a",), layers=(9,)), served, Limits())
    with pytest.raises(RequestTooLarge):
        check_fits(HarvestRequest("stub", ("a", "b")), served, Limits(max_harvest_prompts=1))
    check_fits(HarvestRequest("stub", ("a", "b")), served, Limits())


def test_which_models_are_harvested() -> None:
    models = [
        MODEL,
        ModelConfig(id="mute", checkpoint="org/mute", activations=False),
        ModelConfig(id="vllm", checkpoint="org/vllm", engine="vllm"),
        ModelConfig(id="url", checkpoint="org/url", engine="url", url="http://127.0.0.1:9/v1"),
    ]
    catalog = {model.id: Served(model, FACTS, CharacterCounter(FACTS)) for model in models}

    assert [is_harvested(model) for model in models] == [True, False, False, False]
    assert choose_model(HarvestRequest("stub", ("a",)), catalog).config is MODEL
    for name in ("mute", "vllm", "url"):
        with pytest.raises(HarvestUnsupported, match=f"{name} is not harvested in bulk here; these are: stub"):
            choose_model(HarvestRequest(name, ("a",)), catalog)
    with pytest.raises(ModelNotFound, match="the models are: stub, mute, vllm, url"):
        choose_model(HarvestRequest("gpt-4", ("a",)), catalog)


def test_directions_do_not_change_what_is_counted() -> None:
    request = HarvestRequest("stub", ("abc",), projection=ask_projection(8))

    assert check(request, SERVED, Limits()).n_tokens == 4
    with pytest.raises(InvalidInput, match="project_onto is 7 wide"):
        check(replace(request, projection=ask_projection(7)), SERVED, Limits())


def ask_projection(width: int) -> Projection:
    return Projection.onto(np.ones((1, width)))
