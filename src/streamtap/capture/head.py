"""The language-model head, in slices: logits and log-likelihoods without positions x vocabulary at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from streamtap.capture.forward import Forward
from streamtap.capture.recorder import PassLayout
from streamtap.errors import Unsupported

#: float32 logits held at once.
SLICE_BYTES = 64 << 20
_CHECK_TOKENS = 4


@dataclass(frozen=True)
class HeadRows:
    """What the head gave for the rows asked, on the host.

    ``nll`` is float32 [rows], nats, NaN where a row had no target; ``logits`` float32
    [kept rows, vocabulary or k]; ``ids`` int32 of that shape when a top k was taken.
    """

    nll: NDArray[np.float32]
    logits: NDArray[np.float32] | None
    ids: NDArray[np.int32] | None


class Head:
    """The head of a causal language model, checked once against the model's own logits."""

    def __init__(self, forward: Forward) -> None:
        model: Any = forward.model
        self._matrix = model.get_output_embeddings()
        if self._matrix is None:
            raise Unsupported(
                f"{type(model).__name__} has no language-model head, so it gives no logits or perplexity; "
                "load it as a causal language model, or set compute_perplexity=False and cache_logits=False."
            )
        config = forward.blocks.text_config
        self._softcap = getattr(config, "final_logit_softcapping", None) or getattr(config, "logits_soft_cap", None)
        self._scale = float(getattr(model, "logit_scale", None) or 1.0) / float(
            getattr(config, "logits_scaling", None) or 1.0
        )
        self._check(forward)

    @property
    def vocabulary(self) -> int:
        """Logits of one row."""
        return int(self._matrix.weight.shape[0])

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """Logits [rows, vocabulary] of ``normed`` [rows, hidden], in float32 (float64 for float64)."""
        raw: torch.Tensor = self._matrix(normed) * self._scale
        if self._softcap is not None:
            raw = torch.tanh(raw / self._softcap) * self._softcap
        return raw if raw.dtype == torch.float64 else raw.float()

    def read(
        self, normed: torch.Tensor, targets: NDArray[np.int64], keep: NDArray[np.bool_], top_k: int | None
    ) -> HeadRows:
        """Log-likelihoods of ``targets`` [rows] (-1: none) and the logits of the rows to ``keep`` [rows].

        ``normed`` is [rows, hidden].
        """
        nll = np.full(len(targets), np.nan, np.float32)
        kept: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        with torch.no_grad():
            for start, stop in self._slices(len(targets)):
                logits = self.logits(normed[start:stop])
                nll[start:stop] = _nll(logits, targets[start:stop])
                if keep[start:stop].any():
                    kept.append(_kept(logits, keep[start:stop], top_k))
        if not kept:
            return HeadRows(nll, None, None)
        values = torch.cat([value for value, _ in kept]).numpy().astype(np.float32, copy=False)
        ids = [i for _, i in kept if i is not None]
        return HeadRows(nll, values, torch.cat(ids).numpy().astype(np.int32) if ids else None)

    def _slices(self, n: int) -> Iterator[tuple[int, int]]:
        step = max(1, SLICE_BYTES // (4 * self.vocabulary))
        return ((start, min(start + step, n)) for start in range(0, n, step))

    def _check(self, forward: Forward) -> None:
        ids = np.arange(1, _CHECK_TOKENS + 1, dtype=np.int32)
        layout = PassLayout((len(ids),), (np.zeros(0, np.int32),), (0,))
        normed = forward.run([ids], layout, (), "none", head=True).normed
        assert normed is not None
        with torch.no_grad():
            mine = self.logits(normed[0])
            own = forward.model(input_ids=torch.from_numpy(ids[None].astype(np.int64)).to(forward.device)).logits[0]
        own = own.to(mine.device, mine.dtype)
        error = float((mine - own).norm() / own.norm().clamp_min(1e-30))
        # Some families round their logits to float32 even where all else is float64.
        if not error <= (1e-3 if mine.dtype != torch.float64 else 1e-6):
            raise Unsupported(
                f"the logits of {type(forward.model).__name__} are not its output matrix times the normed stream "
                f"(relative error {error:.1e}), so Streamtap cannot give its logits or perplexity; "
                "set compute_perplexity=False and cache_logits=False."
            )


def _nll(logits: torch.Tensor, targets: NDArray[np.int64]) -> NDArray[np.float32]:
    wanted = torch.from_numpy(np.maximum(targets, 0)).to(logits.device)
    values = torch.logsumexp(logits, dim=-1) - logits.gather(1, wanted[:, None])[:, 0]
    nll = values.cpu().numpy().astype(np.float32)
    nll[targets < 0] = np.nan
    return nll


def _kept(logits: torch.Tensor, keep: NDArray[np.bool_], top_k: int | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    rows = logits[torch.from_numpy(keep).to(logits.device)]
    if top_k is None:
        return rows.cpu(), None
    best = torch.topk(rows, min(top_k, rows.shape[-1]), dim=-1)
    return best.values.cpu(), best.indices.cpu()
