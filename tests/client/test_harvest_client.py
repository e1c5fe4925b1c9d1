"""Harvests by both clients, against a server that keeps real files behind links."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import httpx2
import ml_dtypes
import numpy as np
import pytest

from streamtap.errors import (
    HarvestFailed,
    HarvestNotCancellable,
    HarvestNotFound,
    InvalidInput,
    InvalidPrompt,
    ModelNotFound,
    RequestTooLarge,
    TransferFailed,
)
from streamtap.testing.stub_harvests import KEY, Asked, Reply, StubHarvests

PROMPTS = [f"prompt {i}" + " and more" * (i % 3) for i in range(10)]


def _expected(stub: StubHarvests, text: str, layer: int, **options: Any) -> tuple[list[int], Any]:
    ids = list(stub.engine.tokenizer.tokenizer(text, **options)["input_ids"])
    return ids, stub.engine.rows(ids, layer).astype(ml_dtypes.bfloat16)


def test_a_harvest_from_its_prompts_to_its_rows(user: Any) -> None:
    run = user(user.done(layers="all", shard_size=4).open())

    assert len(run) == len(PROMPTS)
    assert run.layers == (0, 1, 2, 3)
    for i, text in enumerate(PROMPTS):
        ids, rows = _expected(user.stub, text, 2)
        assert run.token_ids(i).tolist() == ids
        np.testing.assert_array_equal(run.prompt(i, layers=2)[2], rows)


@pytest.mark.parametrize(
    ("layers", "held"),
    [(None, (1, 2, 3)), ([3, 0], (0, 3)), (2, (2,)), (-1, (3,)), ("1-2", (1, 2)), (np.array([1]), (1,))],
)
def test_layers_are_said_as_everywhere(user: Any, layers: Any, held: tuple[int, ...]) -> None:
    assert user(user.done(layers=layers).open()).layers == held


def test_token_ids_run_as_they_are(user: Any) -> None:
    ids = [[5, 6, 7], np.array([8, 9]), (10,)]

    run = user(user.done(ids).open())

    assert [run.token_ids(i).tolist() for i in range(3)] == [[5, 6, 7], [8, 9], [10]]


def test_text_may_be_taken_without_special_tokens(user: Any) -> None:
    run = user(user.done(["abc"], add_special_tokens=False, layers=[0]).open())

    ids, rows = _expected(user.stub, "abc", 0, add_special_tokens=False)
    assert run.token_ids(0).tolist() == ids
    np.testing.assert_array_equal(run.prompt(0)[0], rows)


def test_positions_pooling_and_directions(user: Any) -> None:
    directions = np.array([[3.0] + [0.0] * 7, [0.0, 0.0, -2.0] + [0.0] * 5])
    run = user(user.done(layers=[1], positions=[0, -1], project_onto=directions).open())
    pooled = user(user.done(layers=[1], pooling="last_token", positions="all").open())

    ids, rows = _expected(user.stub, PROMPTS[2], 1)
    exact = user.stub.engine.rows(ids, 1)[[0, -1]]
    np.testing.assert_allclose(run.prompt(2)[1], exact[:, [0, 2]] * [1, -1], rtol=1e-6)
    assert run.positions(2).tolist() == [0, len(ids) - 1]
    np.testing.assert_array_equal(pooled.prompt(2)[1], rows[-1:])


def test_more_prompts_than_a_job_may_have_are_several_jobs(user: Any) -> None:
    user.stub.most_prompts, user.stub.slots = 3, 10

    job = user.done(layers=[2], shard_size=2)
    run = user(job.open())

    sizes = [len(request.prompts) for request in user.stub.requests.values()]
    assert (sum(sizes), max(sizes) <= 3, len(job.ids)) == (10, True, len(sizes))
    assert len(run) == len(PROMPTS)
    for i, text in enumerate(PROMPTS):
        np.testing.assert_array_equal(run.prompt(i)[2], _expected(user.stub, text, 2)[1])
    picked = run.activations([9, 0, 5, 0])
    assert picked.index.tolist() == [9, 0, 5, 0]
    np.testing.assert_array_equal(picked.prompt(2)[2], run.prompt(5)[2])
    again = user(user(user.client.harvest_job(*job.ids)).open())
    assert [len(part) for part in again.runs] == sizes


def test_prompts_are_cut_into_jobs_beforehand_by_what_the_server_tells(user: Any) -> None:
    user.stub.most_tokens, user.stub.most_prompts, user.stub.slots = 40_000, 4096, 10

    job = user.harvest([[4] * 9] * 5000, layers=[0], pooling="last_token")

    assert [len(request.prompts) for request in user.stub.requests.values()] == [4096, 904]
    assert [asked.path for asked in user.stub.asked] == ["/v1/models", "/v1/harvest", "/v1/harvest"]
    assert job.known.n_prompts == 5000


def test_tokens_that_were_guessed_too_low_are_cut_again(user: Any) -> None:
    user.stub.most_tokens, user.stub.slots = 50, 20

    job = user.done([f"{i} is a prompt" for i in range(12)])

    assert user.posts() > len(job.ids) == len(user.stub.jobs)
    assert len(user(job.open())) == 12


def test_a_prompt_that_fits_no_job_is_refused(user: Any) -> None:
    user.stub.most_tokens = 20

    with pytest.raises(RequestTooLarge, match="more prompts or tokens") as caught:
        user.harvest(["short", "a text of far more tokens than twenty"])

    told = "This is of the job that begins with prompt 1 of the harvest; the jobs before it go on: job-0."
    assert caught.value.__notes__ == [told], "they run, and nobody else knows their names"


def test_a_first_job_that_is_refused_is_told_without_more(user: Any) -> None:
    user.stub.most_tokens = 1

    with pytest.raises(RequestTooLarge) as caught:
        user.harvest(["short"])

    assert not hasattr(caught.value, "__notes__")


def test_a_job_that_fails_says_why(user: Any) -> None:
    user.stub.broken = "the checkpoint cannot be loaded."

    job = user.harvest()
    with pytest.raises(HarvestFailed, match="job-0 failed: the checkpoint cannot be loaded"):
        user(job.wait())
    with pytest.raises(HarvestNotFound, match="has no files"):
        user(job.open())


def test_a_wait_ends_in_time_and_may_go_on(user: Any) -> None:
    user.stub.looks = 4

    job = user.harvest()
    with pytest.raises(TimeoutError, match=r"job-0 is running after 3.5 s; it goes on"):
        user(job.wait(3.5))

    assert sum(user.clock.slept) == 3.5
    assert user(job.wait(60)).known.state == "done"


def test_progress_is_told(user: Any) -> None:
    user.stub.looks, user.stub.most_prompts = 4, 5
    told: list[tuple[int, int, str]] = []

    user(user.harvest().wait(on_progress=lambda known: told.append((known.prompts_done, known.n_prompts, known.state))))

    assert told == sorted(told)
    assert (told[0][0] < 10, told[-1]) == (True, (10, 10, "done"))
    assert all(asked.query.get("wait", "2") == "2" for asked in user.stub.asked)


def test_a_job_is_cancelled(user: Any) -> None:
    user.stub.most_prompts, user.stub.slots = 4, 1
    job = user.harvest()

    known = user(job.cancel())

    assert (known.state, known.unsent_prompts, known.is_over) == ("cancelled", 0, True)
    with pytest.raises(HarvestNotCancellable, match="job-0 is cancelled already"):
        user(job.cancel())
    with pytest.raises(HarvestFailed, match="job-0 was cancelled"):
        user(job.wait())


def test_jobs_are_found_again(user: Any) -> None:
    first = user.harvest(["a"])
    user.harvest(["b", "c"])

    assert [(job.job_id, job.n_prompts) for job in user(user.client.harvests())] == [("job-1", 2), ("job-0", 1)]
    found = user(user.client.harvest_job(*first.ids))
    assert user(found.status()).state == "done"
    with pytest.raises(HarvestNotFound):
        user(user.client.harvest_job("job-9"))
    with pytest.raises(InvalidInput, match="name the harvest by the id"):
        user(user.client.harvest_job())


def test_a_job_is_never_asked_for_twice(user: Any) -> None:
    user.fails = [httpx2.ConnectError("refused"), httpx2.RemoteProtocolError("closed")]

    with pytest.raises(TransferFailed, match="may have been begun; look before you ask again") as caught:
        user.harvest()

    assert (caught.value.retryable, user.fails, user.posts()) == (False, [], 0)
    user.fails = [httpx2.ReadTimeout("")]
    with pytest.raises(TransferFailed, match=r"sent nothing .* may have been begun"):
        user.harvest()


def test_an_answer_that_makes_no_sense_may_have_been_a_job(user: Any) -> None:
    user.stub.before = lambda asked: Reply(202, {}, b"<html>") if asked.method == "POST" else None

    with pytest.raises(TransferFailed, match="may have been begun"):
        user.harvest()

    assert user.posts() == 1


@pytest.mark.parametrize("status", [502, 504])
def test_a_proxy_that_gave_up_on_a_submission_is_no_reason_to_submit_again(user: Any, status: int) -> None:
    user.stub.most_prompts, user.stub.slots = 5, 1
    job = user.harvest()
    before, user.stub.slots = user.posts(), 3
    user.stub.before = lambda asked: Reply(status, {}, b"<html>") if asked.method == "POST" else None

    with pytest.raises(TransferFailed, match="may have been begun; look before you ask again"):
        user(job.wait())
    assert user.posts() == before + 1


def test_a_wait_outlasts_a_server_that_is_away(user: Any) -> None:
    user.stub.looks = 2
    job = user.harvest()
    user.fails = [httpx2.ConnectError("refused")] * 12
    user.stub.before = _replies(Reply(502, {}, b"<html>"), Reply(503, {}, b""))

    assert user(job.wait()).known.state == "done"
    assert user.fails == []
    assert len(user.waited_out) == 12 + 2


def test_a_wait_gives_a_server_up_that_stays_away(user: Any) -> None:
    job = user.harvest()
    user.fails = [httpx2.ConnectError("refused")] * 10_000

    with pytest.raises(TransferFailed, match="cannot be reached"):
        user(job.wait())

    assert 1100 < sum(user.clock.slept) < 1300


def _replies(*replies: Reply) -> Callable[[Asked], Reply | None]:
    left = list(replies)
    return lambda _asked: left.pop(0) if left else None


def test_a_poll_that_is_declined_is_made_when_the_server_says(user: Any, stub: StubHarvests) -> None:
    stub.looks = 2
    job = user.harvest()
    plain = stub.answer("GET", "http://server/v1/harvest/job-0", {"authorization": f"Bearer {KEY}"}, b"")
    declined = {**plain.headers, "x-streamtap-longpoll": "declined", "retry-after": "7"}
    stub.before = _replies(Reply(200, declined, plain.body))

    assert user(job.wait()).known.state == "done"
    assert user.clock.slept == [7.0]


def test_a_server_that_holds_no_poll_is_not_asked_all_the_time(user: Any) -> None:
    user.stub.looks = 100

    user(user.harvest().wait())

    assert user.clock.slept == [2.0] * 99


def test_links_are_signed_anew_when_they_end_and_need_no_client(user: Any) -> None:
    run = user(user.done(shard_size=2).open())
    user.stub.end_links()
    user.close()

    assert run.token_ids(9).tolist() == _expected(user.stub, PROMPTS[9], 0)[0]
    user.stub.end_links()
    run.verify()
    statistics = run.statistics()
    assert statistics["mean"].shape == (3, 8)


def test_links_and_key_are_kept_apart_and_out_of_logs(user: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)

    run = user(user.done().open())
    run.prompt(0)

    links = [asked for asked in user.stub.asked if asked.path.startswith("/files/")]
    assert links
    assert [asked for asked in links if "authorization" in asked.headers] == []
    assert "secret" not in caplog.text + repr(run) + repr(user.client)
    user.stub.before = lambda asked: Reply(403, {}, b"") if asked.path.startswith("/files/") else None
    with pytest.raises(TransferFailed, match="refuses the link to shard_00000") as caught:
        run.place.get("shard_00000.safetensors")
    assert "secret" not in str(caught.value) + caplog.text


def test_rows_are_not_there_before_the_end(user: Any) -> None:
    user.stub.looks = 5
    job = user.harvest()

    with pytest.raises(InvalidInput, match="job-0 is running; its files come when it is done"):
        user(job.open())


def test_files_that_are_kept_no_longer_are_said_to_be(user: Any, stub: StubHarvests) -> None:
    job = user.done()
    view = stub.jobs["job-0"]
    stub.jobs["job-0"] = type(view)(view.job_id, "done", view.model, view.n_prompts, view.run_id)

    with pytest.raises(HarvestNotFound, match="kept no longer"):
        user(job.open())


@pytest.mark.parametrize(
    ("prompts", "options", "kind", "message"),
    [
        ("one text", {}, InvalidInput, r"Wrap it: \[prompt\]"),
        ([], {}, InvalidInput, "at least one prompt; got none"),
        (["a", [1]], {}, InvalidInput, "all texts or all token ids; the list holds both"),
        (["a", ""], {}, InvalidPrompt, "prompt 1 is empty"),
        ([[1], []], {}, InvalidPrompt, "prompt 1 is empty"),
        ([5, 6], {}, InvalidPrompt, "prompt 0 is of type int"),
        ([[1.5]], {}, InvalidInput, "token ids of prompt 0 must be whole numbers"),
        (["a"], {"layers": []}, InvalidInput, "at least one layer"),
        (["a"], {"layers": "9-12"}, InvalidInput, "layer"),
        (["a"], {"layers": [9]}, InvalidInput, "names layer 9; the model has layers 0 to 3"),
        (["a"], {"pooling": "median"}, InvalidInput, "pooling must be one of"),
        (["a"], {"project_onto": np.zeros((1, 8))}, InvalidInput, "zero or not finite"),
        (["a"], {"project_onto": np.ones(8)}, InvalidInput, r"must be \[directions, hidden\]"),
        (["a"], {"project_onto": np.ones((65, 8))}, InvalidInput, "1 to 64 directions"),
        (["a"], {"project_onto": np.ones((1, 9))}, InvalidInput, "9 wide"),
        (["a"], {"shard_size": 0}, InvalidInput, "shard_size"),
        (["a"], {"colour": "red"}, InvalidInput, "no option colour"),
        (["a"], {"model": "other"}, ModelNotFound, "no model other"),
        (["a"], {"model": "other", "layers": -1}, ModelNotFound, "no model 'other'; it has stub"),
        (["a"], {"model": ""}, InvalidInput, "needs the server's id of a model"),
        (["a \ud800"], {}, InvalidInput, "cannot be written as JSON"),
    ],
)
def test_what_cannot_be_asked_is_refused(
    user: Any, prompts: Any, options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        user.harvest(prompts, **options)

    assert user.stub.jobs == {}
