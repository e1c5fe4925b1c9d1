"""Rows by completions: one request for each sequence, with no more in the answer than is kept.

::

    sequence ─► token ids, max_tokens 1, layers, positions ─► rows [layers, rows, hidden], log-likelihoods
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from streamtap.capture.runs import TokenRun
from streamtap.client.sync import Client
from streamtap.completion import Completion, PromptLogs, WireDtype
from streamtap.engines.api_asking import Asking
from streamtap.engines.api_lanes import Lanes
from streamtap.engines.api_told import Told
from streamtap.engines.by_sequence import SequenceRows, Wanted, chosen_rows, pooled_rows
from streamtap.errors import CaptureMissed, InvalidPrompt
from streamtap.pooling import ONE_TOKEN

_DTYPES: dict[WireDtype, np.dtype[Any]] = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
}
_NO_COSTS = np.zeros(0, np.float32)


@dataclass(frozen=True)
class Inline:
    """Captures of single sequences by ``client``, side by side in ``lanes``; rows are made ``dtype``."""

    client: Client
    told: Told
    dtype: WireDtype
    lanes: Lanes = field(repr=False)
    asking: Asking = field(repr=False)

    def each(self, runs: Sequence[TokenRun], wanted: Wanted) -> Iterator[tuple[int, SequenceRows]]:
        """What is wanted of each run, with its place among them, as it comes.

        Raises:
            CaptureMissed: an answer is not whole, or another's.
            StreamtapError: what the service refuses.
        """

        def one(place: int, stopped: threading.Event) -> SequenceRows:
            with self.asking.plainly():
                return self._one(runs[place], wanted, stopped)

        return self.lanes.each(one, range(len(runs)))

    def _one(self, run: TokenRun, wanted: Wanted, stopped: threading.Event) -> SequenceRows:
        picked = self._picked(run, wanted.pooling)
        nll = _NO_COSTS if wanted.nll else None
        parts: list[NDArray[Any]] = []
        for layers in self._portions(run, wanted.layers, picked):
            with_nll = wanted.nll and not parts and len(run.token_ids) > 1
            if not layers and not with_nll:
                continue
            completion = self._asked(run, layers, picked, with_nll, stopped)
            if with_nll:
                nll = costs_of(completion.choices[0].prompt_logs, run)
            if layers:
                parts.append(self._rows(completion, run, layers, picked, wanted.pooling))
        return SequenceRows(np.concatenate(parts) if parts else None, nll)

    def _picked(self, run: TokenRun, pooling: str) -> NDArray[np.int32] | None:
        """The positions to ask for; None for every one, or where the service sends no fewer."""
        if not self.told.chooses_rows:
            return None
        picked = run.chosen
        if pooling in ONE_TOKEN:
            picked = picked[-1:] if pooling == "last_token" else picked[:1]
        return None if len(picked) == len(run.token_ids) else picked

    def _portions(
        self, run: TokenRun, layers: tuple[int, ...], picked: NDArray[np.int32] | None
    ) -> list[tuple[int, ...]]:
        """The layers in runs that one capture may have: of fewer layers it may have as many more positions."""
        cap, depth = self.told.capture_positions, self.told.n_layers
        if cap is None or depth is None or not layers:
            return [layers]
        rows = len(picked) if picked is not None and self.told.runs_prompts_alone else len(run.token_ids)
        most = max(1, cap * depth // rows)
        return [layers[start : start + most] for start in range(0, len(layers), most)]

    def _asked(
        self,
        run: TokenRun,
        layers: tuple[int, ...],
        picked: NDArray[np.int32] | None,
        with_nll: bool,
        stopped: threading.Event,
    ) -> Completion:
        n_tokens = len(run.token_ids)
        options: dict[str, Any] = {"max_tokens": self.told.max_tokens(n_tokens), "temperature": 0.0}
        if layers:
            options["output_residual_stream"] = list(layers)
            if self.dtype != "bfloat16":
                options["output_dtype"] = self.dtype
            if picked is not None:
                options["output_positions"] = "last" if picked.tolist() == [n_tokens - 1] else picked.tolist()
        if with_nll:
            options["prompt_logprobs"] = 0
        ids = run.token_ids.tolist()
        try:
            return self.asking(lambda: self.client.complete(ids, model=self.told.id, **options), stopped=stopped)
        except InvalidPrompt as error:
            # To the service it was the only one.
            error.index = run.name
            error.add_note(f"It is prompt {run.name} of those that were asked for.")
            raise

    def _rows(
        self,
        completion: Completion,
        run: TokenRun,
        layers: tuple[int, ...],
        picked: NDArray[np.int32] | None,
        pooling: str,
    ) -> NDArray[Any]:
        rows = completion.choices[0].rows
        positions = np.arange(len(run.token_ids), dtype=np.int32) if picked is None else picked
        if rows is None or rows.layers != layers or not np.array_equal(rows.positions, positions):
            raise CaptureMissed(
                f"the service's rows of prompt {run.name} are not those of the layers and positions that were asked "
                "for; nothing of them is kept.",
                layer=layers[0],
            )
        told = rows.token_ids >= 0
        if (rows.token_ids[told] != run.token_ids[positions[told]]).any():
            raise CaptureMissed(
                f"the service's rows of prompt {run.name} stand on other tokens than were sent.", layer=layers[0]
            )
        made = chosen_rows(rows.values, run, pooling) if picked is None else pooled_rows(rows.values, pooling)
        return made.astype(_DTYPES[self.dtype], copy=False)


def costs_of(logs: PromptLogs | None, run: TokenRun) -> NDArray[np.float32]:
    """Negative log-likelihood of each token but the first, float32 [tokens - 1], in nats.

    Raises:
        CaptureMissed: a token lacks, or is another than was sent.
    """
    n_tokens = len(run.token_ids)
    if logs is None or len(logs) != n_tokens:
        came = "none" if logs is None else str(len(logs))
        raise CaptureMissed(
            f"the service gave log-likelihoods of {came} of the {n_tokens} tokens of prompt {run.name}.", layer=-1
        )
    costs = np.empty(n_tokens - 1, np.float32)
    for position in range(1, n_tokens):
        costs[position - 1] = -_logprob(logs, position, run)
    return costs


def _logprob(logs: PromptLogs, position: int, run: TokenRun) -> float:
    try:
        log = logs.at(position)
    except (KeyError, TypeError, ValueError, AttributeError):
        log = None
    if log is None or log.token_id != run.token_ids[position] or log.logprob is None:
        raise CaptureMissed(f"the service gave no log-likelihood of token {position} of prompt {run.name}.", layer=-1)
    return log.logprob
