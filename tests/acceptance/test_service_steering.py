"""Steering at the running service: section 5 of the contract, row by row, against hooks on the plain model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from streamtap import Client, steering_vector
from streamtap.client.directions import relative_scale
from streamtap.completion import Completion

pytestmark = pytest.mark.xdist_group("demo-model")

Rows = NDArray[np.float32]
LAYERS, HIDDEN, AT = 30, 576, 15
PROMPT = "The capital city of France is"  # six tokens; with five new ones, ten rows
FLOAT = {"output_residual_stream": True, "output_dtype": "float32"}
SCALE = 1.5

GOOD = (
    "What a wonderful day.",
    "I love this beautiful song.",
    "The food was delicious.",
    "She smiled with great joy.",
    "This is the best film ever.",
    "We had a lovely time.",
)
BAD = (
    "What a terrible day.",
    "I hate this ugly song.",
    "The food was disgusting.",
    "She cried with great pain.",
    "This is the worst film ever.",
    "We had an awful time.",
)


def _directions(*shape: int) -> Rows:
    """Numbers that bfloat16 can hold."""
    drawn = np.random.default_rng(0).normal(size=(*shape, HIDDEN), scale=0.2)
    return drawn.astype(ml_dtypes.bfloat16).astype(np.float32)


@pytest.fixture(scope="module")
def client(demo_service: Any) -> Iterator[Client]:
    with Client(demo_service.base_url, demo_service.key) as found:
        yield found


def _block(done: Completion) -> Rows:
    assert done.activations is not None
    return np.stack([done.activations.acts[layer] for layer in done.activations.layers])


def _ids(done: Completion) -> list[int]:
    assert done.activations is not None
    return [int(token) for token in done.activations.token_ids]


def _steered(client: Client, *vectors: dict[str, Any], **more: Any) -> Completion:
    return client.complete(
        PROMPT, temperature=0, apply_steering_vectors=list(vectors), **{"max_tokens": 5, **FLOAT, **more}
    )


def _worst(mine: Rows, other: Rows) -> float:
    return float((np.linalg.norm(mine - other, axis=-1) / np.linalg.norm(other, axis=-1)).max())


V, PER_POSITION = _directions(), _directions(3)
#: What is sent, and what it adds at each of ten positions, [10, hidden].
TABLE: dict[str, tuple[dict[str, Any], Callable[[Rows], Rows]]] = {
    "every position": ({"direction": V}, lambda add: add + V),
    "spans": ({"direction": V, "spans": ((1, 3), (7, 20))}, lambda add: _put(add, [1, 2, 7, 8, 9], V)),
    "a vector a position": (
        {"direction": PER_POSITION, "positions": (0, 8, 4)},
        lambda add: _put(add, [0, 8, 4], PER_POSITION),
    ),
    "the first positions": ({"direction": PER_POSITION[None]}, lambda add: _put(add, [0, 1, 2], PER_POSITION)),
}


def _put(add: Rows, places: Sequence[int], values: Rows) -> Rows:
    add[list(places)] = values
    return add


@pytest.mark.parametrize("name", TABLE)
def test_each_row_of_the_table_is_what_a_hook_on_the_plain_model_does(name: str, client: Client, plain: Any) -> None:
    sent, added = TABLE[name]
    add = SCALE * added(np.zeros((10, HIDDEN), np.float32))

    done = _steered(client, steering_vector(layer=AT, scale=SCALE, **sent))

    ids, rows = _ids(done), _block(done)
    assert _worst(rows, plain.rows(ids, lambda layer, h: h + add if layer == AT else h)) <= 1e-5
    unsteered = plain.rows(ids)
    assert _worst(rows[:AT], unsteered[:AT]) <= 1e-5
    # Where the stream is large, as at the first token, a float32 holds a small sum only so well.
    room = 1e-5 * np.abs(unsteered[AT]).max(axis=-1, keepdims=True)
    assert (np.abs(rows[AT] - unsteered[AT] - add) <= room).all()


def test_norm_match_and_a_later_vector_that_sees_the_earlier_one(client: Client, plain: Any) -> None:
    u, v = _directions(2)

    def both(layer: int, h: Rows) -> Rows:
        if layer != AT:
            return h
        first = h + np.float32(SCALE) * u
        norms = np.linalg.norm(first, axis=-1, keepdims=True)
        return first + np.float32(0.1) * v * norms / (np.linalg.norm(v) + np.float32(1e-6))

    done = _steered(client, steering_vector(u, AT, SCALE), steering_vector(v, AT, 0.1, norm_match=True), max_tokens=3)

    assert _worst(_block(done), plain.rows(_ids(done), both)) <= 1e-5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scale_zero_changes_no_bit(dtype: Any, client: Client) -> None:
    zero = steering_vector(V, AT, 0.0)
    ask = {"max_tokens": 8, "temperature": 1.0, "seed": 5, "logprobs": 3, **FLOAT, "output_dtype": dtype}

    plain_one, control = client.complete(PROMPT, **ask), client.complete(PROMPT, **ask, apply_steering_vectors=[zero])

    assert control.text == plain_one.text
    assert control.choices[0].logs == plain_one.choices[0].logs
    assert _block(control).tobytes() == _block(plain_one).tobytes()


def test_in_bfloat16_the_difference_is_the_scaled_direction_and_below_nothing_changes(client: Client) -> None:
    ask = {"max_tokens": 1, "output_dtype": "bfloat16"}
    without, with_it = (
        _steered(client, steering_vector(V, AT, 0.0), **ask),
        _steered(client, steering_vector(V, AT, SCALE), **ask),
    )

    before, after = _block(without), _block(with_it)
    assert before[:AT].tobytes() == after[:AT].tobytes()
    wide = before[AT].astype(np.float32)
    difference = after[AT].astype(np.float32) - wide
    rounding = 2**-8 * (np.abs(wide) + np.abs(wide + SCALE * V))
    assert (np.abs(difference - SCALE * V) <= rounding).all()
    assert all(before[layer].tobytes() != after[layer].tobytes() for layer in range(AT, LAYERS))


def test_a_position_changes_the_next_tokens_logprob_and_nothing_before(client: Client, plain: Any) -> None:
    ids, position = plain.ids("Paris is the capital city of France, and Berlin that of Germany."), 6

    def logprobs(scale: float) -> list[float | None]:
        push = steering_vector(V, AT, scale, positions=[position])
        (choice,) = client.complete(ids, max_tokens=0, prompt_logprobs=0, apply_steering_vectors=[push]).choices
        assert choice.prompt_logs is not None
        return [choice.prompt_logs.at(place).logprob for place in range(len(ids))]

    without, with_it = logprobs(0.0), logprobs(4.0)

    assert with_it[: position + 1] == without[: position + 1]
    assert with_it[position + 1] != without[position + 1]
    assert with_it[0] is None


def test_the_last_position_of_the_prompt_is_where_the_first_new_token_is_steered(client: Client, plain: Any) -> None:
    push = 1e4 * plain.reader_of(plain.ids(" banana")[0])
    pushed = plain.read(push)  # what a stream that is nothing else says

    def said(position: int) -> list[bool]:
        vector = steering_vector(push, LAYERS - 1, positions=[position])
        ask: Any = {"max_tokens": 3, "temperature": 0, **FLOAT, "output_residual_stream": [0]}
        return [token == pushed for token in _ids(client.complete(PROMPT, apply_steering_vectors=[vector], **ask))[6:]]

    assert said(4) == [False, False]
    assert said(5) == [True, False]
    assert said(6) == [False, True]


def test_prompts_of_a_batch_are_steered_alike(client: Client) -> None:
    prompts = ["Water boils at", PROMPT]
    push = steering_vector(V, AT, SCALE)
    ask: Any = {"max_tokens": 4, "temperature": 0, "apply_steering_vectors": [push], **FLOAT}

    together = client.complete(prompts, **ask)

    assert together.activations is not None
    for place, prompt in enumerate(prompts):
        alone = client.complete(prompt, **ask)
        mine = together.activations.prompt(place)
        assert together.choices[place].text == alone.text
        assert _worst(np.stack([mine[layer] for layer in range(LAYERS)]), _block(alone)) <= 1e-5


def test_a_difference_of_means_moves_what_the_model_prefers(client: Client) -> None:
    def last_rows(texts: Sequence[str]) -> Rows:
        done = client.complete(list(texts), max_tokens=1, output_positions="last", **FLOAT)
        assert done.activations is not None
        return np.asarray(done.activations.acts[AT], np.float32)

    good, bad = last_rows(GOOD), last_rows(BAD)
    direction = good.mean(axis=0) - bad.mean(axis=0)

    def preference(fraction: float) -> float:
        scale = relative_scale(direction, np.concatenate([good, bad]), fraction)
        push = steering_vector(direction, AT, scale)
        continuations = ["I thought the film was wonderful", "I thought the film was terrible"]
        done = client.complete(continuations, max_tokens=0, prompt_logprobs=0, apply_steering_vectors=[push])
        logs = [choice.prompt_logs for choice in done.choices]
        best, worst = (log.at(len(log) - 1).logprob for log in logs if log is not None)
        assert best is not None
        assert worst is not None
        return best - worst

    found = [preference(fraction) for fraction in (-0.1, -0.05, 0.0, 0.05, 0.1)]

    assert found == sorted(found)
    assert found[-1] - found[2] > 0.5
    assert found[2] - found[0] > 0.5
