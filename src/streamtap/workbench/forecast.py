"""What a warm-up would run and write, before it does."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from streamtap.spec import PromptLike, as_prompts
from streamtap.workbench.extraction import estimate_bytes, plan_jobs
from streamtap.workbench.lacking import find_needs
from streamtap.workbench.prompt_keys import PromptKeys
from streamtap.workbench.unified_cache import UnifiedCache


@dataclass(frozen=True)
class Forecast:
    """What ``UnifiedCache.warmup`` would do.

    ``missing`` counts the prompts of which something is not in the cache; ``estimated_bytes`` is what would be
    written, from above. ``n_tokens`` is int64 [prompts], after truncation; ``truncated_from`` int64 [prompts]
    the length before it, 0 where nothing was cut.
    """

    missing: int
    estimated_bytes: int
    free_bytes: int
    n_tokens: NDArray[np.int64]
    truncated_from: NDArray[np.int64]

    @property
    def n_prompts(self) -> int:
        """Prompts in all."""
        return len(self.n_tokens)


def forecast(cache: UnifiedCache, prompts: Sequence[PromptLike]) -> Forecast:
    """Work out what ``cache.warmup(prompts)`` would run and write; loads the model only if it was never seen.

    Raises:
        InvalidPrompt: a prompt that cannot be run, named by its index.
    """
    finder = PromptKeys(cache.store, cache.source, cache.spec)
    keyed = finder.find(as_prompts(prompts))
    needs = find_needs(cache.store, cache.provenance, cache.spec, cache.layer_indices, keyed)
    jobs = plan_jobs(finder, needs, keyed)
    vocabulary = cache.source.tokenizer_limits["vocabulary"] or 0
    lengths = [len(key.token_ids) for key in finder.keys(keyed.rows, keyed.fresh)]
    return Forecast(
        missing=sum(len(places) for places in needs.values()),
        estimated_bytes=estimate_bytes(jobs, cache.provenance, cache.spec, vocabulary),
        free_bytes=shutil.disk_usage(cache.store.root).free,
        n_tokens=np.asarray(lengths, np.int64),
        truncated_from=np.asarray(keyed.cut_from, np.int64),
    )
