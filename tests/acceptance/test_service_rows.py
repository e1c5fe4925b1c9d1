"""Rows of the running service against the plain model's blocks, run by transformers in this process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from streamtap import Client
from streamtap.completion import Completion

pytestmark = pytest.mark.xdist_group("demo-model")

LAYERS, HIDDEN = 30, 576
PROMPT = "The capital city of France is"
FLOAT = {"output_residual_stream": True, "output_dtype": "float32"}


@pytest.fixture(scope="module")
def client(demo_service: Any) -> Iterator[Client]:
    with Client(demo_service.base_url, demo_service.key) as found:
        yield found


@pytest.fixture(scope="module")
def whole(client: Client) -> Completion:
    """Five new tokens after a prompt of six, every row of it."""
    return client.complete(PROMPT, max_tokens=5, temperature=0, **FLOAT)


def _block(done: Completion) -> NDArray[Any]:
    """[layers, rows, hidden]."""
    assert done.activations is not None
    return np.stack([done.activations.acts[layer] for layer in done.activations.layers])


def _worst(mine: NDArray[Any], other: NDArray[np.float32]) -> float:
    """Of all rows, the largest relative distance."""
    apart = np.linalg.norm(mine.astype(np.float32) - other, axis=-1)
    return float((apart / np.linalg.norm(other, axis=-1)).max())


def test_six_tokens_and_five_new_ones_give_ten_rows(whole: Completion, plain: Any) -> None:
    assert whole.activations is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (6, 5)
    assert _block(whole).shape == (LAYERS, 10, HIDDEN)
    assert _block(whole).dtype == np.float32
    assert whole.activations.positions.tolist() == list(range(10))
    assert whole.activations.token_ids[:6].tolist() == plain.ids(PROMPT)
    assert plain.text([*whole.activations.token_ids[6:], plain.read(_block(whole)[-1, -1])]) == whole.text


def test_prompt_and_generated_rows_are_those_of_the_plain_blocks(whole: Completion, plain: Any) -> None:
    assert whole.activations is not None
    rows = plain.rows(whole.activations.token_ids.tolist())

    assert _worst(_block(whole), rows) <= 1e-5


def test_the_last_row_through_norm_and_head_gives_the_next_token(whole: Completion, plain: Any) -> None:
    assert whole.activations is not None
    rows, ids = _block(whole), whole.activations.token_ids.tolist()

    # Each row of a greedy text from the end of the prompt on, up to the token that was never fed back.
    read = [plain.read(row) for row in rows[-1, 5:]]

    assert read[:-1] == ids[6:]
    assert read[-1] == int(plain.logits(ids)[-1].argmax())


def test_bfloat16_is_the_same_rounded_once(client: Client, whole: Completion, plain: Any) -> None:
    done = client.complete(PROMPT, max_tokens=5, temperature=0, output_residual_stream=True)

    assert done.text == whole.text
    assert _block(done).dtype == ml_dtypes.bfloat16
    assert np.array_equal(_block(done), _block(whole).astype(ml_dtypes.bfloat16))
    assert done.activations is not None
    assert _worst(_block(done), plain.rows(done.activations.token_ids.tolist())) <= 2**-8


@pytest.mark.parametrize("layers", [[15, 20], [29], [20, 3, 3]], ids=str)
def test_some_layers_are_those_of_all(layers: list[int], client: Client, whole: Completion) -> None:
    done = client.complete(PROMPT, max_tokens=5, temperature=0, **{**FLOAT, "output_residual_stream": layers})

    assert done.activations is not None
    assert done.activations.layers == tuple(sorted(set(layers)))
    assert np.array_equal(_block(done), _block(whole)[sorted(set(layers))])


@pytest.mark.parametrize(
    ("positions", "rows"),
    [("last", [9]), ("prompt", range(6)), ("generated", range(6, 10)), ([0, 5, 8], [0, 5, 8])],
    ids=str,
)
def test_some_positions_are_those_of_all(positions: Any, rows: Any, client: Client, whole: Completion) -> None:
    done = client.complete(PROMPT, max_tokens=5, temperature=0, **FLOAT, output_positions=positions)

    assert done.activations is not None
    assert done.activations.positions.tolist() == list(rows)
    assert np.array_equal(_block(done), _block(whole)[:, list(rows)])


def test_one_token_gives_the_rows_of_the_prompt(client: Client, whole: Completion) -> None:
    done = client.complete(PROMPT, temperature=0, **FLOAT)

    assert (done.usage.completion_tokens, _block(done).shape) == (1, (LAYERS, 6, HIDDEN))
    assert _worst(_block(done), _block(whole)[:, :6]) <= 1e-5


def test_each_prompt_of_a_batch_has_its_own_rows(client: Client, plain: Any) -> None:
    prompts = ["Water boils at one hundred degrees", [504], PROMPT]
    # Greedy: a token drawn by chance may end up where two huge terms cancel, and float32 itself keeps 4 digits.
    done = client.complete(
        [plain.ids(each) if isinstance(each, str) else each for each in prompts], max_tokens=3, temperature=0, **FLOAT
    )

    assert done.activations is not None
    assert len(done.choices) == len(done.activations.offsets) - 1 == 3
    for place in range(3):
        mine = done.activations.prompt(place)
        ids = done.activations.token_ids[slice(*done.activations.offsets[place : place + 2])].tolist()
        assert ids[: len(done.choices[place].prompt_ids)] == list(done.choices[place].prompt_ids)
        assert _worst(np.stack([mine[layer] for layer in range(LAYERS)]), plain.rows(ids)) <= 1e-5


def test_a_binary_answer_has_the_same_rows(client: Client, whole: Completion) -> None:
    done = client.complete(PROMPT, max_tokens=5, temperature=0, binary=True, **FLOAT)

    assert (done.text, done.usage) == (whole.text, whole.usage)
    assert np.array_equal(_block(done), _block(whole))
