"""The next token of a sequence, drawn as its request asks and whatever runs beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any

import torch
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from streamtap.completion import Sampling
from streamtap.engines.generation.penalties import Penalties

#: Below it a quotient of logits is no number; long before, the likeliest token is certain.
_LEAST_TEMPERATURE = 1e-30
#: To sort a vocabulary takes longer than all else here, and the nucleus is nearly always within so many tokens.
_NUCLEI = (128, 2048)

_Warp = Callable[[Any, torch.Tensor], torch.Tensor]


class Sampler:
    """Draws the tokens of one sequence.

    Repetition penalty, presence and frequency, temperature, min_p, top_k and top_p act in this order; temperature 0
    takes the likeliest token after the penalties, of equals the first. Each draw costs one uniform number of the
    sequence's own generator, on the CPU: with a seed they depend on the seed and ``stream`` alone.

    Args:
        sampling: How to draw.
        prompt_ids: The prompt, which the repetition penalty covers.
        vocabulary: How many logits there are.
        device: Where the logits are.
        stream: The number of this sample among those of one seed.
    """

    def __init__(
        self,
        sampling: Sampling,
        *,
        prompt_ids: Sequence[int],
        vocabulary: int,
        device: str = "cpu",
        stream: int = 0,
    ) -> None:
        self._penalties = (
            Penalties(sampling, prompt_ids=prompt_ids, vocabulary=vocabulary, device=device)
            if Penalties.asked(sampling)
            else None
        )
        self._greedy = sampling.temperature == 0
        self._warps = _warps(sampling)
        self._generator = _generator(sampling.seed, stream)

    def pick(self, logits: torch.Tensor, token_ids: Sequence[int]) -> int:
        """The next token after ``token_ids``, those generated so far, from ``logits`` [vocabulary], left as they are.

        Raises:
            ValueError: the logits are not finite, as ``finite_rows`` tells.
        """
        scores = logits.float()[None]
        if self._penalties is not None:
            scores = self._penalties(scores, token_ids)
        if self._greedy:
            return int(scores.argmax())
        # Only differences count, and those of the likeliest token cannot overflow.
        scores = scores - scores.amax()
        for warp in self._warps:
            scores = warp(None, scores)
        return _draw(torch.softmax(scores, dim=-1)[0], self._generator)


def finite_rows(logits: torch.Tensor) -> torch.Tensor:
    """Bool [...]: which rows of ``logits`` [..., vocabulary] hold no NaN nor +inf, and something above -inf."""
    return torch.isfinite(logits.amax(dim=-1))


def _warps(sampling: Sampling) -> list[_Warp]:
    warps: list[_Warp] = []
    if sampling.temperature not in (0, 1):
        warps.append(TemperatureLogitsWarper(max(float(sampling.temperature), _LEAST_TEMPERATURE)))
    if sampling.min_p > 0:
        warps.append(MinPLogitsWarper(float(sampling.min_p)))
    if sampling.top_k is not None and sampling.top_k > 0:
        warps.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warps.append(_Nucleus(sampling.top_p))
    return warps


class _Nucleus:
    """top_p over the likeliest tokens alone, where their share of the whole is large enough.

    A share p of the whole is a share p / m of tokens that hold m of it.
    """

    def __init__(self, top_p: float) -> None:
        self._top_p = float(top_p)
        self._whole: _Warp = TopPLogitsWarper(self._top_p)

    def __call__(self, _: Any, scores: torch.Tensor) -> torch.Tensor:
        whole = scores.logsumexp(dim=-1, keepdim=True)
        for count in _NUCLEI:
            best, ids = scores.topk(min(count, scores.shape[-1]))
            share = float((best - whole).exp().sum())
            if share > self._top_p:
                kept = TopPLogitsWarper(min(self._top_p / share, 1.0))(None, best)
                return torch.full_like(scores, -torch.inf).scatter(-1, ids, kept)
        return self._whole(None, scores)


def _generator(seed: int | None, stream: int) -> torch.Generator:
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        # Hashed, since seeds that differ by one would otherwise be the samples of one another.
        generator.manual_seed(int.from_bytes(blake2b(f"{seed}/{stream}".encode(), digest_size=8).digest(), "little"))
    return generator


def _draw(probabilities: torch.Tensor, generator: torch.Generator) -> int:
    """An index of ``probabilities`` [vocabulary], by one uniform number; never one whose probability is 0."""
    # In float64, so that the last of many unlikely tokens still counts.
    exact = torch.float32 if probabilities.device.type == "mps" else torch.float64
    sums = probabilities.cumsum(0, dtype=exact)
    point = sums[-1:] * torch.rand((), generator=generator, dtype=torch.float64).item()
    place = torch.searchsorted(sums, point, right=True).clamp_(max=len(sums) - 1)
    token_id, share, total = torch.cat((place.to(exact), probabilities[place].to(exact), sums[-1:])).tolist()
    if not total > 0:
        raise ValueError("no token can be drawn from logits that are not finite")
    return int(token_id) if share > 0 else _nearest_possible(probabilities, int(token_id))


def _nearest_possible(probabilities: torch.Tensor, place: int) -> int:
    """The last index up to ``place`` that has a probability, else the first: only a rounded sum leads past it."""
    before = probabilities[: place + 1].nonzero()
    return int(before[-1]) if len(before) else int(probabilities.nonzero()[0])
