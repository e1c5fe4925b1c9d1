"""Runs one shard's prompts through an engine, batch by batch; a batch never crosses a shard."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from streamtap.activations import Activations
from streamtap.engines.base import Engine
from streamtap.errors import CaptureMissed
from streamtap.harvest.layout import ShardLayout
from streamtap.spec import Prompt


def capture_shard(engine: Engine, layout: ShardLayout, n_layers: int) -> Iterator[Activations]:
    """Rows of the shard's prompts as they are made, in any order; ``index`` counts within the shard.

    Raises:
        CaptureMissed: rows of some prompt did not come.
    """
    seen = np.zeros(len(layout.plan.prompts), np.int64)
    for members in _groups(layout):
        prompts = [Prompt(token_ids=layout.plan.prompts[i].token_ids) for i in members]
        for part in engine.capture(prompts, layout.ask.spec(n_layers), ordered=False):
            part.index[:] = members[part.index]
            seen[part.index] += 1
            yield part
    if bad := np.flatnonzero(seen != 1).tolist():
        raise CaptureMissed(
            f"prompt {layout.plan.first + bad[0]} came {seen[bad[0]]} times from the engine; expected once.",
            layer=layout.layers[0],
        )


def _groups(layout: ShardLayout) -> Sequence[NDArray[np.int64]]:
    """All prompts, or batches of at most ``batch_size`` of like length."""
    lengths = np.array([len(each.token_ids) for each in layout.plan.prompts])
    most = layout.ask.batch_size
    if most is None:
        return [np.arange(len(lengths))]
    order = np.argsort(-lengths, kind="stable")
    return [order[start : start + most] for start in range(0, len(order), most)]
