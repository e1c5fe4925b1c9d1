"""Log-probabilities of tokens and of what else might have stood there, from raw logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from streamtap.completion import TokenLog

#: ``prompt_logprobs`` that asks for every token there is.
WHOLE_VOCABULARY = -1
#: Rows that are worked on at once: each costs several copies of the vocabulary.
_ROWS = 64

TextOf = Callable[[int], str]


def token_log(logits: torch.Tensor, token_id: int, top: int, text_of: TextOf, offset: int = 0) -> TokenLog:
    """What is known of ``token_id`` from ``logits`` [vocabulary], before temperature and penalties.

    ``logprob`` is in nats, computed in float32 (float64 stays); ``rank`` is 1 plus the number of tokens that are
    strictly likelier, so equals share a rank. The ``top`` likeliest tokens are listed, equals by id; the chosen one may
    not be among them.
    """
    logprobs = _logprobs(logits[None])
    own = torch.tensor([token_id], device=logits.device)
    chosen, ranks = _chosen(logprobs, own)
    ids, values = _likeliest(logprobs, top)
    listed = _listed(ids[0].tolist(), values[0].tolist(), text_of)
    return TokenLog(token_id, text_of(token_id), offset, float(chosen[0]), int(ranks[0]), listed)


class ArrayPromptLogs:
    """Log-probabilities of one prompt, held as arrays; a ``completion.PromptLogs``.

    Row i of each array is about position i + 1, since nothing stands before position 0.

    Args:
        token_ids: int32 [tokens].
        offsets: int32 [tokens], where each token's text begins, in characters.
        logprobs: float [tokens - 1], of the tokens that are there.
        ranks: int32 [tokens - 1].
        top_logprobs: float [tokens - 1, k], best first; or [tokens - 1, vocabulary] by id.
        top_ids: int32 [tokens - 1, k], or None where ``top_logprobs`` is the whole vocabulary.
        text_of: The text of a token id.
    """

    def __init__(
        self,
        *,
        token_ids: NDArray[np.int32],
        offsets: NDArray[np.int32],
        logprobs: NDArray[Any],
        ranks: NDArray[np.int32],
        top_logprobs: NDArray[Any],
        top_ids: NDArray[np.int32] | None,
        text_of: TextOf,
    ) -> None:
        self._token_ids, self._offsets = token_ids, offsets
        self._logprobs, self._ranks = logprobs, ranks
        self._top_logprobs, self._top_ids = top_logprobs, top_ids
        self._text_of = text_of

    def __len__(self) -> int:
        return len(self._token_ids)

    def at(self, position: int) -> TokenLog:
        """The token at ``position``, from 0, and its likeliest rivals, best first.

        Raises:
            IndexError: the prompt has no such position.
        """
        if not 0 <= position < len(self):
            raise IndexError(f"position {position} of a prompt of {len(self)} tokens")
        token_id, offset = int(self._token_ids[position]), int(self._offsets[position])
        if position == 0:
            return TokenLog(token_id, self._text_of(token_id), offset, None)
        row = position - 1
        top = self._every_token(row) if self._top_ids is None else self._top(self._top_ids[row], row)
        return TokenLog(
            token_id, self._text_of(token_id), offset, float(self._logprobs[row]), int(self._ranks[row]), top
        )

    def _top(self, ids: NDArray[np.int32], row: int) -> tuple[tuple[int, str, float], ...]:
        return _listed(ids.tolist(), self._top_logprobs[row].tolist(), self._text_of)

    def _every_token(self, row: int) -> tuple[tuple[int, str, float], ...]:
        logprobs = self._top_logprobs[row]
        order = np.argsort(-logprobs, kind="stable")
        return tuple(zip(order.tolist(), self._texts[order].tolist(), logprobs[order].tolist(), strict=True))

    @cached_property
    def _texts(self) -> NDArray[np.object_]:
        """The text of every id: a Python call for each at every position would take longer than all else."""
        return np.array([self._text_of(each) for each in range(self._top_logprobs.shape[1])], dtype=object)


class PromptLogBuilder:
    """Makes ``ArrayPromptLogs`` of logits that come in slices, of which nothing is kept but what was asked for.

    Args:
        token_ids: The prompt.
        top: How many of the likeliest tokens are kept at each position; -1 for the whole vocabulary.
        text_of: The text of a token id.
        offsets: Where each token's text begins, in characters; 0 for all where nobody asks.
    """

    def __init__(self, token_ids: Sequence[int], top: int, text_of: TextOf, offsets: Sequence[int] = ()) -> None:
        self._token_ids = np.asarray(token_ids, np.int32)
        self._offsets = np.asarray(offsets, np.int32) if len(offsets) else np.zeros(len(token_ids), np.int32)
        self._top, self._text_of = top, text_of
        self._count = len(token_ids) - 1
        self._filled = 0
        self._columns: dict[str, NDArray[Any]] = {}

    def add(self, logits: torch.Tensor) -> None:
        """Take ``logits`` [rows, vocabulary] of the next positions, from 0 on, as raw as they leave the model.

        The row of a position is about the token after it; that of the prompt's last position, if it comes, is about
        none of the prompt's tokens and is left out.
        """
        wanted = logits[: self._count - self._filled]
        for first in range(0, len(wanted), _ROWS):
            self._add(wanted[first : first + _ROWS])

    def finished(self) -> ArrayPromptLogs:
        """The logs of the whole prompt.

        Raises:
            ValueError: logits of some positions never came.
        """
        if self._filled != self._count:
            raise ValueError(
                f"logits of {self._filled} positions came; a prompt of {self._count + 1} needs {self._count}"
            )
        empty = np.empty((0, 0), np.float32)
        return ArrayPromptLogs(
            token_ids=self._token_ids,
            offsets=self._offsets,
            logprobs=self._columns.get("logprobs", empty),
            ranks=self._columns.get("ranks", empty),
            top_logprobs=self._columns.get("top_logprobs", empty),
            top_ids=self._columns.get("top_ids"),
            text_of=self._text_of,
        )

    def _add(self, logits: torch.Tensor) -> None:
        first, last = self._filled, self._filled + len(logits)
        logprobs = _logprobs(logits)
        own = torch.from_numpy(self._token_ids[first + 1 : last + 1]).to(logits.device, torch.long)
        chosen, ranks = _chosen(logprobs, own)
        self._put(first, "logprobs", chosen)
        self._put(first, "ranks", ranks.to(torch.int32))
        if self._top == WHOLE_VOCABULARY:
            self._put(first, "top_logprobs", logprobs)
        else:
            ids, values = _likeliest(logprobs, self._top)
            self._put(first, "top_logprobs", values)
            self._put(first, "top_ids", ids.to(torch.int32))
        self._filled = last

    def _put(self, first: int, name: str, rows: torch.Tensor) -> None:
        values = rows.cpu().numpy()
        if name not in self._columns:
            self._columns[name] = np.empty((self._count, *values.shape[1:]), values.dtype)
        self._columns[name][first : first + len(values)] = values


def _logprobs(logits: torch.Tensor) -> torch.Tensor:
    """Log-probabilities [rows, vocabulary]."""
    exact = torch.float64 if logits.dtype == torch.float64 else torch.float32
    return torch.log_softmax(logits.detach(), dim=-1, dtype=exact)


def _chosen(logprobs: torch.Tensor, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability and rank [rows] of ``token_ids`` [rows]."""
    own = logprobs.gather(1, token_ids[:, None])
    return own[:, 0], 1 + (logprobs > own).sum(dim=1)


def _likeliest(logprobs: torch.Tensor, top: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and log-probabilities [rows, top] of the likeliest tokens, best first and equals by id."""
    count = min(top, logprobs.shape[-1])
    if count == 0:
        none = logprobs[:, :0]
        return none.to(torch.long), none
    values, ids = logprobs.topk(count)
    # topk takes any of those that are equal to the last; a greedy token would then be missing from its own list.
    crowded = (logprobs >= values[:, -1:]).sum(dim=1) > count
    for row in crowded.nonzero()[:, 0].tolist():
        near = (logprobs[row] >= values[row, -1]).nonzero()[:, 0]
        ids[row] = near[torch.argsort(logprobs[row, near], descending=True, stable=True)[:count]]
    ids = ids.sort(dim=1).values
    values, order = logprobs.gather(1, ids).sort(dim=1, descending=True, stable=True)
    return ids.gather(1, order), values


def _listed(ids: list[int], values: list[float], text_of: TextOf) -> tuple[tuple[int, str, float], ...]:
    return tuple((token_id, text_of(token_id), value) for token_id, value in zip(ids, values, strict=True))
