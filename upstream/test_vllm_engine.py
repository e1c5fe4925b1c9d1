"""The engine on a real vLLM with vllm-lens, over the demo model, against that model in transformers and float32.

It runs with the Python of an environment that make-environment.sh made.
"""

from __future__ import annotations

import multiprocessing
import queue
from collections.abc import Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray

from streamtap.activations import Activations, join
from streamtap.completion import CaptureAsk, CompletionRequest, Event, SteeringVector
from streamtap.engines.vllm_offline import VllmEngine
from streamtap.errors import EngineDead, SteeringUnsupported
from streamtap.spec import CaptureSpec
from streamtap.testing import EngineSubject, EngineSuite, PlainReference
from streamtap.testing.engine_suite_holding import row_errors

CONTEXT, STEP_TOKENS, BLOCKS = 512, 64, 8
#: Prompts longer than that run in pieces, and few fit at once.
TIGHT = {"max_num_batched_tokens": STEP_TOKENS, "max_num_seqs": 32, "num_gpu_blocks_override": BLOCKS}
N_LAYERS, HIDDEN = 30, 576
EVERY_LAYER = list(range(N_LAYERS))
#: Largest ‖a − b‖ / ‖b‖ of a row.
FLOAT32, BFLOAT16 = 2e-4, 0.12
TEXT = "The capital of France is"


@pytest.fixture(scope="module")
def model(demo: str) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(demo).float().eval()


@pytest.fixture(scope="module")
def reference(model: transformers.PreTrainedModel) -> PlainReference:
    return PlainReference(model)


@pytest.fixture(scope="module")
def engine(demo: str) -> Iterator[VllmEngine]:
    engine = VllmEngine.load(demo, dtype="float32", max_model_len=CONTEXT, engine_options=TIGHT)
    yield engine
    engine.close()


def ids_of(number: int, tokens: int) -> tuple[int, ...]:
    """Token ids that no other number has."""
    return tuple(np.random.default_rng(number).integers(100, 40_000, tokens).tolist())


def captured(engine: VllmEngine, prompts: Sequence[Any], **spec: Any) -> Activations:
    return join(list(engine.capture(prompts, CaptureSpec(**spec))))


def worst(rows: dict[int, NDArray[Any]], expected: NDArray[Any]) -> float:
    """The largest relative error of ``rows`` by layer, of ``expected`` [layers, rows, hidden]."""
    return max(float(row_errors(rows[layer], expected[layer]).max()) for layer in rows)


def held_in_workers(engine: VllmEngine) -> list[int]:
    """Requests whose rows are still with each worker."""
    counts: list[int] = engine._llm._llm.collective_rpc("_debug_captured_states_count")
    return counts


def test_what_it_says_of_itself(engine: VllmEngine, demo: str) -> None:
    about = engine.provenance

    assert (about.model, about.dtype, about.engine, about.device) == (demo, "float32", "vllm", "cpu")
    assert about.engine_version.endswith("with vllm-lens 1.3.0")
    assert (about.n_layers, about.hidden) == (N_LAYERS, HIDDEN)
    assert engine.tokenizer.context_length == CONTEXT - 1


@pytest.mark.parametrize("tokens", [1, STEP_TOKENS, STEP_TOKENS + 1, 3 * STEP_TOKENS + 7, CONTEXT - 1])
def test_a_prompt_in_pieces_has_every_row_at_every_layer(
    engine: VllmEngine, reference: PlainReference, tokens: int
) -> None:
    """V08: blocks of this model hand on the stream in two parts; layer k is their sum, and the last is not normed."""
    prompt = ids_of(tokens, tokens)

    acts = captured(engine, [prompt])

    assert acts.layers == tuple(EVERY_LAYER)
    assert acts.offsets.tolist() == [0, tokens]
    assert worst(acts.acts, reference.rows(prompt)) < FLOAT32


def test_the_same_prompt_and_one_that_begins_alike_have_all_their_rows(
    engine: VllmEngine, reference: PlainReference
) -> None:
    """V09."""
    prompt = ids_of(1, 300)
    longer = (*prompt, *ids_of(2, 20))

    first, again, grown = (captured(engine, [each], layers=[0, 15, 29]) for each in (prompt, prompt, longer))

    for acts, ids in ((first, prompt), (again, prompt), (grown, longer)):
        assert len(acts.positions) == len(ids)
        assert worst(acts.acts, reference.rows(ids)) < FLOAT32
    for layer, rows in first.acts.items():
        np.testing.assert_allclose(again.acts[layer], rows, rtol=1e-5, atol=1e-5 * np.abs(rows).max())


def test_hundreds_of_ragged_prompts_come_in_order_each_with_its_own_rows(
    engine: VllmEngine, reference: PlainReference
) -> None:
    """More than go into one call, longer ones among them than fit beside each other."""
    prompts = [ids_of(1000 + i, 1 + (i * i) % 23) for i in range(300)]
    prompts[50], prompts[51], prompts[200] = (ids_of(number, 400) for number in (50, 51, 200))

    acts = captured(engine, prompts, layers=[7])

    assert np.diff(acts.offsets).tolist() == [len(prompt) for prompt in prompts]
    assert acts.token_ids.tolist() == [token for prompt in prompts for token in prompt]
    for place in (0, 1, 49, 50, 51, 52, 137, 199, 200, 255, 256, 299):
        assert worst(acts.prompt(place), reference.rows(prompts[place])) < FLOAT32, place
    assert held_in_workers(engine) == [0]


def test_costs_beside_rows_are_those_of_the_model(engine: VllmEngine, reference: PlainReference) -> None:
    prompts = [ids_of(5, 3 * STEP_TOKENS), ids_of(6, 2)]

    acts = captured(engine, prompts, layers=[29], token_nll=True, perplexity=True)

    for place, prompt in enumerate(prompts):
        logits = torch.from_numpy(reference.logits(prompt)).double().log_softmax(-1)
        costs = -logits[range(len(prompt) - 1), list(prompt[1:])].numpy()
        np.testing.assert_allclose((acts.token_nll or ())[place], costs, atol=2e-3)
    assert worst(acts.prompt(0), reference.rows(prompts[0])) < FLOAT32


def test_text_is_what_the_model_says(engine: VllmEngine, model: transformers.PreTrainedModel) -> None:
    done = engine.complete(TEXT, max_tokens=12, temperature=0, logprobs=3, prompt_logprobs=1, echo=True)

    (choice,) = done.choices
    prompt = torch.tensor([choice.prompt_ids])
    said = model.generate(prompt, max_new_tokens=12, do_sample=False)[0, prompt.shape[1] :].tolist()
    assert list(choice.token_ids) == said
    assert choice.text == TEXT + engine.tokenizer.tokenizer.decode(said)
    logs, prompt_logs = choice.logs or (), choice.prompt_logs
    assert [log.token_id for log in logs] == [*choice.prompt_ids, *said]
    assert all(log.top[0][0] == log.token_id and len(log.top) == 3 for log in logs[prompt.shape[1] :])
    assert [choice.text[log.offset :].startswith(log.text) for log in logs] == [True] * len(logs)
    assert prompt_logs is not None
    assert [prompt_logs.at(place).logprob for place in range(5)] == pytest.approx([log.logprob for log in logs[:5]])


def test_samples_differ_by_seed_and_stop_where_they_were_told(engine: VllmEngine) -> None:
    one, same, other = (engine.complete(TEXT, max_tokens=8, n=2, seed=seed, temperature=1.5) for seed in (3, 3, 4))
    stopped = engine.complete(TEXT, max_tokens=40, temperature=0, stop=[" answer"])

    texts = [[choice.text for choice in done.choices] for done in (one, same, other)]
    assert texts[0] == texts[1] != texts[2]
    assert texts[0][0] != texts[0][1]
    assert (stopped.choices[0].finish_reason, stopped.choices[0].stop_reason) == ("stop", " answer")
    assert stopped.text.endswith("The")


def test_a_stream_is_the_text_piece_by_piece(engine: VllmEngine) -> None:
    whole = engine.complete(TEXT, max_tokens=10, temperature=0).text

    pieces = [delta.text for delta in engine.stream(TEXT, max_tokens=10, temperature=0)]

    assert "".join(pieces) == whole
    assert len(pieces) > 5


def test_a_captured_completion_that_is_left_leaves_nothing_with_the_workers(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
    held: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
    step = engine._llm._steps.step

    def watched_step() -> Any:
        outputs = step()
        held.put(held_in_workers(engine))  # by the thread that steps: vLLM's socket takes no other beside it
        return outputs

    with monkeypatch.context() as patch:
        patch.setattr(engine._llm._steps, "step", watched_step)
        cancel = engine.submit(CompletionRequest((ids_of(9, 8),), 400, capture=CaptureAsk((1, 2))), inbox.put)
        while (counts := held.get(timeout=60)) == [0]:
            pass
        cancel()
        assert counts == [1]
        first = engine.complete(ids_of(10, 8), max_tokens=2, capture=[1, 2], temperature=0)

    assert first.activations is not None
    assert inbox.empty()
    assert held_in_workers(engine) == [0]


def test_single_positions_of_a_prompt_in_one_piece_are_steered_and_of_one_in_more_refused(
    engine: VllmEngine,
) -> None:
    vectors = np.random.default_rng(0).standard_normal((1, 1, HIDDEN)).astype(np.float32)
    vector = SteeringVector((15,), vectors, 4.0, positions=(STEP_TOKENS - 1,))
    prompts = [ids_of(11, STEP_TOKENS), ids_of(12, STEP_TOKENS)]

    plain, steered = (engine.complete(prompts, max_tokens=1, capture=[15], steer=each) for each in ([], [vector]))

    assert plain.activations is not None
    assert steered.activations is not None
    moved = steered.activations.acts[15] - plain.activations.acts[15]
    pushed = np.zeros_like(moved)
    pushed[[STEP_TOKENS - 1, 2 * STEP_TOKENS - 1]] = 4 * vectors[0, 0]
    np.testing.assert_allclose(moved, pushed, atol=2e-2)
    with pytest.raises(SteeringUnsupported, match="in pieces"):
        engine.complete(ids_of(13, STEP_TOKENS + 1), max_tokens=1, steer=[vector])


@pytest.fixture(scope="module")
def narrow_process() -> list[Any]:
    """The process of ``narrow``."""
    return []


@pytest.fixture(scope="module")
def narrow(demo: str, narrow_process: list[Any]) -> Iterator[VllmEngine]:
    """In what most large models run in."""
    before = multiprocessing.active_children()
    engine = VllmEngine.load(demo, dtype="bfloat16", max_model_len=CONTEXT)
    narrow_process += [process for process in multiprocessing.active_children() if process not in before]
    yield engine
    engine.close()


def test_rows_of_half_the_size_are_near_and_in_their_own_dtype(narrow: VllmEngine, reference: PlainReference) -> None:
    prompts = [ids_of(20, 40), ids_of(21, 7)]

    acts = captured(narrow, prompts)

    assert {rows.dtype for rows in acts.acts.values()} == {np.dtype(ml_dtypes.bfloat16)}
    assert narrow.provenance.dtype == "bfloat16"
    for place, prompt in enumerate(prompts):
        assert worst(acts.prompt(place), reference.rows(prompt)) < BFLOAT16


def test_processes_that_were_killed_are_said_to_be_gone(narrow: VllmEngine, narrow_process: list[Any]) -> None:
    """The last test of this engine."""
    (process,) = narrow_process
    process.kill()

    with pytest.raises(EngineDead):
        captured(narrow, [ids_of(22, 5)], layers=[0])


@pytest.fixture(scope="module")
def subject(engine: VllmEngine, reference: PlainReference) -> EngineSubject:
    return EngineSubject(
        engine,
        reference,
        tolerance=FLOAT32,
        same=1e-5,
        score_tolerance=2e-3,
        logits=False,
        completes=True,
        steers=True,
        prefix_tokens=300,
    )


class TestEngineSuite(EngineSuite):
    """Last, for its last test closes the engine."""
