"""How prompts are cut into jobs, and what the body of a job holds."""

from __future__ import annotations

import json
from base64 import b64decode
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from streamtap.client.harvest_bodies import (
    JobLimits,
    cut_into_jobs,
    halves,
    harvest_fields,
    harvest_layers,
    harvest_prompts,
    needs_depth,
)
from streamtap.client.harvest_calls import submit_call
from streamtap.errors import InvalidInput, InvalidLayers
from streamtap.testing.models import tiny_model
from streamtap.wire.harvest import read_harvest


def test_a_body_is_what_the_server_reads() -> None:
    directions = np.random.default_rng(0).standard_normal((3, 8))
    options: dict[str, Any] = {
        "positions": np.array([0, -1]),
        "pooling": "mean",
        "project_onto": directions,
        "shard_size": np.int64(7),
        "batch_size": None,
        "add_special_tokens": False,
    }
    fields = {**harvest_fields("m", options), "layers": harvest_layers([3, 1, 3], None)}
    call = submit_call(fields, harvest_prompts(["a", "Grüße"]))
    assert call.body is not None
    asked = read_harvest(call.body)

    assert (asked.model, asked.prompts, asked.layers) == ("m", ("a", "Grüße"), (1, 3))
    assert (asked.positions, asked.pooling, asked.shard_size, asked.batch_size) == ((0, -1), "mean", 7, None)
    assert asked.add_special_tokens is False
    assert asked.projection is not None
    units = directions / np.linalg.norm(directions, axis=1, keepdims=True)
    np.testing.assert_allclose(asked.projection.directions, units, rtol=1e-6)
    # As they were given: to scale them is the server's part, and done twice it would change a bit.
    sent = json.loads(call.body)["project_onto"]
    assert np.frombuffer(b64decode(sent["data"]), "<f4").tolist() == directions.astype("<f4").ravel().tolist()


def test_directions_may_be_a_models_own_weights() -> None:
    weights = next(tiny_model("llama").parameters())[:5]

    assert weights.requires_grad
    assert harvest_fields("m", {"project_onto": weights})["project_onto"]["shape"] == [5, 32]


def test_what_was_not_said_is_not_sent() -> None:
    assert harvest_fields("m", {"positions": None, "pooling": None}) == {"model": "m"}


@pytest.mark.parametrize(
    ("layers", "depth", "sent"),
    [
        (None, None, None),
        ("all", None, "all"),
        (5, None, [5]),
        ([2, 0, 2], None, [0, 2]),
        (np.array([2, 1]), None, [1, 2]),
        (-1, 8, [7]),
        ([0, -2], 8, [0, 6]),
        ("middle", 8, [4]),
        ("1,6-7", 8, [1, 6, 7]),
    ],
)
def test_layers_need_the_depth_only_where_they_say_so(layers: Any, depth: int | None, sent: Any) -> None:
    assert needs_depth(layers) is (depth is not None)
    assert harvest_layers(layers, depth) == sent


def test_layers_that_the_model_lacks() -> None:
    with pytest.raises(InvalidLayers):
        harvest_layers(-9, 8)
    with pytest.raises(InvalidInput, match="does not tell how deep the model is"):
        harvest_layers("middle", None)


def test_jobs_keep_within_every_limit() -> None:
    prompts = harvest_prompts([[1] * (1 + i % 7) for i in range(100)])
    limits = JobLimits(prompts=9, tokens=30, body_bytes=120)

    jobs = cut_into_jobs(prompts, limits, around_bytes=20)

    assert [prompt for job in jobs for prompt in job] == prompts
    for job in jobs:
        assert len(job) <= 9
        assert sum(map(len, job)) <= 30
        assert len(json.dumps(job, separators=(",", ":"))) <= 120
    # None could take the first prompt of the next.
    for job, following in pairwise(jobs):
        more = [*job, following[0]]
        size = len(json.dumps(more, separators=(",", ":"))) + 19
        assert len(more) > 9 or sum(map(len, more)) > 30 or size > 120


def test_a_prompt_over_the_limits_is_a_job_of_its_own_and_the_server_decides() -> None:
    assert cut_into_jobs(["a", "b" * 100, "c"], JobLimits(tokens=10)) == [["a"], ["b" * 100], ["c"]]


def test_a_long_prompt_counts_no_more_than_the_context() -> None:
    prompts = harvest_prompts(["b" * 3000] * 4)

    assert len(cut_into_jobs(prompts, JobLimits(tokens=100))) == 4
    assert len(cut_into_jobs(prompts, JobLimits(tokens=100, context=25))) == 1


def test_halves_lose_nothing() -> None:
    assert halves(["a", "b", "c"]) == [["a"], ["b", "c"]]
    assert halves(["a"]) == [["a"]]


def test_limits_are_those_that_a_model_tells_of() -> None:
    told = {"max_harvest_prompts": 10, "max_harvest_tokens": 0, "max_model_len": 64, "n_layers": 3}

    assert JobLimits.told(told) == JobLimits(prompts=10, context=64)
    assert JobLimits.told({}) == JobLimits(4096, 2_000_000, 50 * 1024 * 1024, None)
