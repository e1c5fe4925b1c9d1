"""The floor: the base model's own forward pass over length-sorted batches, no hooks, no head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

BUDGETS = (512, 2048, 8192)


def bare_batches(token_ids: Sequence[Sequence[int]], budget: int) -> list[torch.Tensor]:
    """Right-padded batches, longest first, of at most ``budget`` tokens."""
    batches: list[torch.Tensor] = []
    batch: list[Sequence[int]] = []
    for ids in sorted(token_ids, key=len, reverse=True):
        if batch and (len(batch) + 1) * len(batch[0]) > budget:
            batches.append(_padded(batch))
            batch = []
        batch.append(ids)
    return [*batches, _padded(batch)]


def run_bare(body: Any, batches: Sequence[torch.Tensor]) -> None:
    """Run every batch through the model's body."""
    with torch.no_grad():
        for ids in batches:
            body(input_ids=ids, use_cache=False)


def shortened(body: Any, blocks: int) -> Any:
    """The same weights with only the first ``blocks`` blocks."""
    import copy

    short = copy.copy(body)
    short._modules = dict(body._modules)
    short.config = copy.deepcopy(body.config)
    short.config.num_hidden_layers = blocks
    short.layers = torch.nn.ModuleList(list(body.layers)[:blocks])
    return short


def _padded(batch: Sequence[Sequence[int]]) -> torch.Tensor:
    ids = np.zeros((len(batch), len(batch[0])), np.int64)
    for i, each in enumerate(batch):
        ids[i, : len(each)] = each
    return torch.from_numpy(ids)
