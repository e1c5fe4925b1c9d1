"""Rows of token sequences from vLLM: as many at once as its memory has room for, each one's held to its tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamtap.capture.runs import TokenRun
from streamtap.engines.by_sequence import SequenceRows, Wanted, chosen_rows
from streamtap.engines.vllm_offline_llm import Llm, LlmFacts
from streamtap.errors import CaptureMissed

#: Sequences, and bytes of their rows, in one call: a worker holds them all until it is over, and copies them thrice.
MOST_SEQUENCES, MOST_BYTES = 256, 64 << 20
_WIDEST = 4


class RowMaker:
    """Makes the rows of a model that ``llm`` runs; a ``by_sequence.Make``.

    Args:
        llm: Runs token ids.
        facts: What there is room for.
        hidden: Width of a row.
    """

    def __init__(self, llm: Llm, facts: LlmFacts, hidden: int) -> None:
        self._llm, self._facts, self._hidden = llm, facts, hidden

    def __call__(self, runs: Sequence[TokenRun], wanted: Wanted) -> Iterable[tuple[int, SequenceRows]]:
        """Each run's place among ``runs``, in order, and what came of it.

        Raises:
            CaptureMissed: rows or log-likelihoods of a run lack, or are not those of its tokens.
            EngineFailed: vLLM failed.
        """
        for start, stop in self.calls(runs, wanted):
            window = runs[start:stop]
            outputs = self._llm.generate(
                [run.token_ids.tolist() for run in window], [self._params(wanted) for _ in window]
            )
            for place, run in enumerate(window, start):
                yield place, made_of(outputs.pop(0), run, wanted)

    def calls(self, runs: Sequence[TokenRun], wanted: Wanted) -> Iterator[tuple[int, int]]:
        """First and end of the runs that go into one call.

        Never more than vLLM holds the keys and values of at once: it would run one of them a second time, and
        vllm-lens would put the rows of both times together.
        """
        start, sequences, size, held = 0, 0, 0, 0
        for place, run in enumerate(runs):
            tokens = len(run.token_ids)
            own_size, own_held = tokens * len(wanted.layers) * self._hidden * _WIDEST, self._facts.held_by(tokens)
            full = (
                sequences == MOST_SEQUENCES or size + own_size > MOST_BYTES or held + own_held > self._facts.held_tokens
            )
            if sequences and full:
                yield start, place
                start, sequences, size, held = place, 0, 0, 0
            sequences, size, held = sequences + 1, size + own_size, held + own_held
        if sequences:
            yield start, len(runs)

    def _params(self, wanted: Wanted) -> Any:
        asked = {"extra_args": {"output_residual_stream": list(wanted.layers)}} if wanted.layers else {}
        scored = {"prompt_logprobs": 0} if wanted.nll else {}
        return self._llm.params(max_tokens=1, temperature=0.0, detokenize=False, **asked, **scored)


def made_of(output: Any, run: TokenRun, wanted: Wanted) -> SequenceRows:
    """What a ``RequestOutput`` holds of ``run``.

    Raises:
        CaptureMissed: not a row for each token at each layer, or not a log-likelihood for each token.
    """
    name, tokens = f"prompt {run.name}", len(run.token_ids)
    rows = None
    if wanted.layers:
        values = stream_of(output, wanted.layers, tokens, name)
        rows = chosen_rows(values, run, wanted.pooling)
    return SequenceRows(rows, _losses(output, run, name) if wanted.nll else None)


def stream_of(output: Any, layers: Sequence[int], tokens: int, name: str) -> NDArray[Any]:
    """The residual stream that vllm-lens put beside an answer, [layers, tokens, hidden].

    Raises:
        CaptureMissed: there is none, or a layer or a token lacks in it.
    """
    from streamtap.capture.arrays import to_numpy

    captured = getattr(output, "activations", None) or {}
    stream = captured.get("residual_stream")
    if stream is None or tuple(stream.shape[:2]) != (len(layers), tokens):
        came = "nothing" if stream is None else f"{list(stream.shape)[:2]}"
        raise CaptureMissed(
            f"vLLM gave {came} of the residual stream of {name}; expected [layers, tokens] of "
            f"[{len(layers)}, {tokens}].",
            layer=layers[0],
        )
    return to_numpy(stream)


def _losses(output: Any, run: TokenRun, name: str) -> NDArray[np.float32]:
    """Nats of every token but the first, float32 [tokens - 1]."""
    told = list(output.prompt_logprobs or ())
    if len(told) != len(run.token_ids) or any(not each for each in told[1:]):
        raise CaptureMissed(
            f"vLLM gave log-likelihoods of {len(told)} tokens of {name}; expected {len(run.token_ids)}.", layer=0
        )
    pairs = zip(run.token_ids[1:].tolist(), told[1:], strict=True)
    return np.array([-each[token].logprob for token, each in pairs], np.float32)
