"""The body of a bulk job and the job as a body: what is taken, what is refused and in which words."""

from __future__ import annotations

import base64
import json
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamtap.errors import BadJson, EngineDead, InvalidInput, InvalidLayers
from streamtap.harvest.asked import HarvestAsk
from streamtap.wire import harvest
from streamtap.wire.harvest import HarvestBody, HarvestRequest, read_harvest
from streamtap.wire.harvest_jobs import Accounting, HarvestResult, JobView, job_object, read_job, submitted_object

DIRECTIONS = np.array([[3.0, 4.0, 0.0], [0.0, 0.0, 2.0]], np.float32)


def onto(values: Any = DIRECTIONS, dtype: str = "float32", **more: Any) -> dict[str, Any]:
    array = np.asarray(values)
    data = base64.b64encode(array.tobytes()).decode()
    return {"data": data, "dtype": dtype, "shape": list(array.shape), "compression": "none", **more}


def read(**fields: Any) -> HarvestRequest:
    return read_harvest(json.dumps({"model": "m", "prompts": ["a"], **fields}).encode())


def refused(**fields: Any) -> str:
    with pytest.raises(InvalidInput) as error:
        read(**fields)
    return str(error.value)


def test_a_body_of_model_and_prompts_alone_has_the_defaults_of_a_harvest() -> None:
    request, plain = read(), HarvestAsk()

    assert (request.model, request.prompts) == ("m", ("a",))
    for name in ("layers", "positions", "pooling", "projection", "add_special_tokens", "shard_size", "batch_size"):
        assert getattr(request, name) == getattr(plain, name), name


def test_null_is_as_if_it_were_not_there() -> None:
    nothing = dict.fromkeys(set(HarvestBody.model_fields) - {"model", "prompts"})

    assert vars(read(**nothing)) == vars(read())


def test_everything_that_can_be_asked() -> None:
    request = read(
        prompts=[[5, 6], [7]],
        layers=[3, 1, 3],
        shard_size=4096,
        batch_size=64,
        add_special_tokens=False,
        positions=[-1, 0, -1],
        pooling="mean",
        project_onto=onto(),
    )

    assert request.prompts == ((5, 6), (7,))
    assert (request.layers, request.positions, request.pooling) == ((1, 3), (-1, 0), "mean")
    assert (request.shard_size, request.batch_size, request.add_special_tokens) == (4096, 64, False)
    assert request.projection is not None
    np.testing.assert_allclose(request.projection.directions, [[0.6, 0.8, 0.0], [0.0, 0.0, 1.0]], atol=1e-7)
    assert read(layers="all", positions="last").layers == "all"


@pytest.mark.parametrize(
    ("dtype", "kind"), [("float32", np.float32), ("float16", np.float16), ("bfloat16", ml_dtypes.bfloat16)]
)
def test_directions_of_each_dtype(dtype: str, kind: Any) -> None:
    request = read(project_onto=onto(DIRECTIONS.astype(kind), dtype))

    assert request.projection is not None
    assert request.projection.directions.dtype == np.float32
    np.testing.assert_allclose(request.projection.directions, [[0.6, 0.8, 0.0], [0.0, 0.0, 1.0]], atol=1e-7)


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("model", None, "model must be a model's id"),
        ("model", 1, "model must be a model's id"),
        ("prompts", [], "prompts must be a list of strings or a list of lists of token ids"),
        ("prompts", "a", "got a string"),
        ("prompts", [1, 2], "got 1 at [0]"),
        ("prompts", ["a", ""], "got an empty string at [1]"),
        ("prompts", [[1], []], "got an empty list at [1]"),
        ("prompts", ["a", [1]], "got a list of 1 at [1]"),
        ("prompts", [[True]], "got true at [0][0]"),
        ("prompts", [[-1]], "got -1 at [0][0]"),
        ("prompts", [[1.0]], "got 1.0 at [0][0]"),
        ("prompts", [[2**31]], "got 2147483648 at [0][0]"),
        ("layers", [], "layers must be 'all' or a list of layer numbers"),
        ("layers", "some", "layers must be 'all'"),
        ("layers", [-1], "got -1 at [0]"),
        ("layers", [True], "got true at [0]"),
        ("layers", 3, "got 3"),
        ("shard_size", 0, "shard_size must be a whole number from 1 to 4096; got 0"),
        ("shard_size", 4097, "got 4097"),
        ("shard_size", True, "got true"),
        ("shard_size", 2.0, "got 2.0"),
        ("batch_size", 0, "batch_size must be a whole number from 1 to 64"),
        ("batch_size", 65, "got 65"),
        ("add_special_tokens", 1, "add_special_tokens must be true or false"),
        ("positions", [], "positions must be 'all', 'last' or a list"),
        ("positions", "first", "positions must be 'all', 'last' or a list"),
        ("positions", [0, None], "got null at [1]"),
        ("pooling", "median", "pooling must be 'none', 'last_token'"),
        ("compression", "zstd", "compression is not a field here"),
        ("project_onto", [], "project_onto must be an object"),
        ("project_onto", onto(np.zeros((65, 3), np.float32)), "1 to 64 directions; got 65 at [0]"),
        ("project_onto", onto(np.zeros((0, 3), np.float32)), "project_onto.data must be"),
        ("project_onto", onto(np.ones(3, np.float32)), "project_onto.shape[1] is required"),
        ("project_onto", onto(shape=[1, 3]), "data must hold 12 bytes for shape [1, 3] of float32; it holds 24"),
        ("project_onto", onto(shape=[2, 2**31]), "project_onto.shape must be"),
        ("project_onto", onto(shape=[2, True]), "got true at [1]"),
        ("project_onto", onto(dtype="int16"), "project_onto.dtype must be 'float32', 'float16' or 'bfloat16'"),
        ("project_onto", onto(compression="zstd"), "project_onto.compression must be 'none'"),
        ("project_onto", onto(scale=1), "project_onto.scale is not a field here"),
        ("project_onto", onto(data="a b="), "project_onto: data must be standard base64"),
        ("project_onto", onto([[0.0] * 3], shape=[1, 3]), "project_onto: data must hold 12 bytes"),
        ("project_onto", onto(np.array([[1, 0, 0], [0, 0, 0]], np.float32)), "direction 1 is zero or not finite"),
        ("project_onto", onto(np.array([[1, np.inf, 0]], np.float32)), "direction 0 is zero or not finite"),
        ("project_onto", onto(np.array([[1, np.nan, 0]], np.float32)), "direction 0 is zero or not finite"),
    ],
)
def test_what_is_out_of_bounds_is_named(field: str, value: Any, expected: str) -> None:
    assert expected in refused(**{field: value})


def test_at_most_five_problems_are_told_and_nothing_of_what_was_sent() -> None:
    secret = "my secret prompt"
    text = refused(
        prompts=[secret, [1]], layers=secret, positions=secret, pooling=secret, shard_size=secret, batch_size=secret
    )

    assert text.endswith("And 1 more.")
    assert secret not in text
    assert secret not in repr(read(prompts=[secret]))


@pytest.mark.parametrize("raw", [b"", b"{", b'{"prompts": NaN}', b"\xff", b'{"prompts": ["\\ud800"], "model": "m"}'])
def test_what_is_not_json(raw: bytes) -> None:
    with pytest.raises(BadJson):
        read_harvest(raw)


@pytest.mark.parametrize("raw", [b"[]", b"null", b'"prompts"', b"1"])
def test_what_is_no_object(raw: bytes) -> None:
    with pytest.raises(InvalidInput, match="the body must be a JSON object"):
        read_harvest(raw)


def test_what_a_model_lacks() -> None:
    read(layers=[3], project_onto=onto()).check_fits(n_layers=4, hidden=3)
    read(layers="all").check_fits(n_layers=1, hidden=1)

    with pytest.raises(InvalidLayers, match="layers names layer 4; the model has layers 0 to 3"):
        read(layers=[0, 4]).check_fits(n_layers=4, hidden=3)
    with pytest.raises(InvalidInput, match="project_onto is 3 wide; the model's residual stream is 8 wide"):
        read(project_onto=onto()).check_fits(n_layers=4, hidden=8)


def test_bounds_are_those_of_a_harvest() -> None:
    most = {"shard_size": harvest.MOST_SHARD_PROMPTS, "batch_size": harvest.MOST_BATCH_PROMPTS}
    for name, value in most.items():
        HarvestAsk(**{name: value})
        with pytest.raises(InvalidInput):
            HarvestAsk(**{name: value + 1})


_values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 10**12) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["data", "shape", "x"]), inner),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(body=st.dictionaries(st.sampled_from([*HarvestBody.model_fields, "more"]), _values))
def test_whatever_comes_is_a_request_or_a_refusal(body: dict[str, Any]) -> None:
    try:
        found = read_harvest(json.dumps(body).encode())
    except InvalidInput:
        return
    assert found.prompts
    assert found.model == body["model"]


AT = datetime(2026, 11, 30, 12, 0, 1, 500_000, tzinfo=UTC)
DONE = JobView(
    job_id="j",
    status="done",
    model="m",
    n_prompts=3,
    run_id="r",
    created_at=AT,
    completed_at=AT + timedelta(seconds=5),
    prompts_done=3,
    shards_done=2,
    result=HarvestResult(2, (1, 2), "http://m", ("http://0", "http://1"), "http://s", {"capture_s": 1.5}),
    urls_expire_at=AT + timedelta(days=7),
    accounting=Accounting(5.0, 4.0, 1.0),
)
FAILED = JobView("j", "failed", "m", 3, run_id="r", created_at=AT, completed_at=AT, error=EngineDead("it ended."))


def test_a_job_as_the_contract_has_it() -> None:
    assert submitted_object(DONE) == {"job_id": "j", "status": "done", "model": "m", "n_prompts": 3}
    assert job_object(DONE) == {
        "job_id": "j",
        "status": "done",
        "model": "m",
        "n_prompts": 3,
        "run_id": "r",
        "created_at": "2026-11-30T12:00:01.500000+00:00",
        "completed_at": "2026-11-30T12:00:06.500000+00:00",
        "progress": {"prompts_done": 3, "shards_done": 2},
        "result": {
            "n_shards": 2,
            "layer_indices": [1, 2],
            "manifest_url": "http://m",
            "shard_urls": ["http://0", "http://1"],
            "stats_url": "http://s",
            "timings": {"capture_s": 1.5},
        },
        "urls_expire_at": "2026-12-07T12:00:01.500000+00:00",
        "accounting": {"wall_clock_s": 5.0, "in_container_s": 4.0, "unaccounted_s": 1.0},
    }
    assert job_object(FAILED)["error"]["code"] == "engine_dead"


@pytest.mark.parametrize("view", [DONE, FAILED, JobView("j", "pending", "m", 1), JobView("j", "cancelled", "m", 1)])
def test_a_job_comes_back_as_it_was_sent(view: JobView) -> None:
    back = read_job(json.loads(json.dumps(job_object(view))))

    assert (back.error and (back.error.code, str(back.error))) == (view.error and (view.error.code, str(view.error)))
    assert {**vars(back), "error": None} == {**vars(view), "error": None}
    assert back.is_over == (view.status in ("done", "failed", "cancelled"))


def test_times_are_told_in_utc() -> None:
    east = AT.astimezone(timezone(timedelta(hours=2)))

    assert job_object(JobView("j", "pending", "m", 1, created_at=east))["created_at"].endswith("12:00:01.500000+00:00")


@pytest.mark.parametrize(
    "body",
    [
        None,
        [],
        {},
        "job",
        {**job_object(DONE), "status": "lost"},
        {**job_object(DONE), "result": {}},
        {**job_object(DONE), "created_at": "yesterday"},
        {**job_object(DONE), "accounting": {"wall_clock_s": 1}},
        {**job_object(DONE), "progress": 5},
    ],
)
def test_what_is_no_job(body: Any) -> None:
    with pytest.raises(InvalidInput, match="not a harvest job"):
        read_job(body)
