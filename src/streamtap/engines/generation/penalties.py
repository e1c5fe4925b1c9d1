"""What makes a token less likely because it was there before."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import RepetitionPenaltyLogitsProcessor

from streamtap.completion import Sampling

#: Below it a division leaves the range of float32, and the order of the tokens is lost.
_LEAST_REPETITION = 1e-30


class Penalties:
    """Penalties of one sequence: repetition covers prompt and generated tokens, presence and frequency the latter.

    It remembers how many of the generated tokens it has counted, so each call costs what is new.
    """

    @staticmethod
    def asked(sampling: Sampling) -> bool:
        """Whether there is any."""
        return bool(sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1)

    def __init__(self, sampling: Sampling, *, prompt_ids: Sequence[int], vocabulary: int, device: str) -> None:
        self._presence, self._frequency = sampling.presence_penalty, sampling.frequency_penalty
        self._repetition = (
            RepetitionPenaltyLogitsProcessor(max(float(sampling.repetition_penalty), _LEAST_REPETITION))
            if sampling.repetition_penalty != 1
            else None
        )
        self._seen = torch.unique(torch.tensor(prompt_ids, dtype=torch.long, device=device))
        self._known = set(prompt_ids)
        self._generated: set[int] = set()
        self._counted = 0
        self._taken = torch.zeros(vocabulary, dtype=torch.float32, device=device)

    def __call__(self, logits: torch.Tensor, token_ids: Sequence[int]) -> torch.Tensor:
        """``logits`` [1, vocabulary] after ``token_ids`` were generated, as new float32 scores of the same shape."""
        for token_id in token_ids[self._counted :]:
            self._count(token_id)
        self._counted = len(token_ids)
        scores = logits if self._repetition is None else self._repetition(self._seen[None], logits)
        return (scores - self._taken).clamp_(max=torch.finfo(torch.float32).max)

    def _count(self, token_id: int) -> None:
        self._taken[token_id] += self._frequency if token_id in self._generated else self._presence + self._frequency
        self._generated.add(token_id)
        if token_id not in self._known:
            self._known.add(token_id)
            self._seen = torch.cat((self._seen, self._seen.new_tensor([token_id])))
