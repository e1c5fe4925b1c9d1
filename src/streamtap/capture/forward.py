"""Run one forward pass over the blocks: right-padded, watched, and no further than asked."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from streamtap.capture.blocks import find_blocks
from streamtap.capture.hooks import reading
from streamtap.capture.narrowing import Narrowing
from streamtap.capture.recorder import PassLayout, Recorder

TokenIds = NDArray[np.int32]
# ``past_key_values`` is being renamed to ``cache`` in transformers 5.
_STATE_ARGUMENTS = ("cache", "past_key_values")


@dataclass(frozen=True)
class PassOutput:
    """What one pass gave: rows per layer on the host, and on the device the normed stream where the head needs it."""

    rows: dict[int, torch.Tensor]
    normed: torch.Tensor | None
    dtype: torch.dtype


class Forward:
    """A model whose blocks were found, ready to run passes; not safe for two threads at once."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.blocks = find_blocks(model)
        self.device = _input_device(model)
        self._state_argument = _state_argument(self.blocks.body)

    @property
    def keeps_states(self) -> bool:
        """Whether a prefix's key-value state can be run once and reused; recurrent states cannot."""
        return self._state_argument is not None and not getattr(self.model, "_is_stateful", False)

    def new_states(self) -> Any:
        """An empty key-value cache for one sequence."""
        from transformers import DynamicCache

        config: Any = self.model.config
        return DynamicCache(config=config)

    def repeated(self, states: Any, n: int) -> Any:
        """A copy of one sequence's ``states`` for each of ``n``."""
        mine = copy.deepcopy(states)
        mine.reorder_cache(torch.zeros(n, dtype=torch.long, device=self.device))
        return mine

    def run(
        self,
        sequences: Sequence[TokenIds],
        layout: PassLayout,
        layers: Sequence[int],
        pooling: str,
        *,
        head: bool = False,
        states: Any = None,
        narrow: Narrowing | None = None,
    ) -> PassOutput:
        """One pass over ``sequences`` of int32 [tokens], after what ``states`` already holds.

        Without ``head`` it stops behind the last of ``layers``; ``narrow`` as in ``Recorder``.

        Raises:
            CaptureMissed: a layer did not come whole and finite.
        """
        recorder = Recorder(layout, layers, self.blocks.hidden, pooling, narrow)
        watched = {layer: self.blocks.modules[layer] for layer in layers}
        stop_after = None if head or not layers else max(layers)
        arguments = {"use_cache": False} if states is None else {str(self._state_argument): states, "use_cache": True}
        output: Any = None
        with torch.no_grad(), reading(watched, recorder.read, stop_after):
            output = self.blocks.body(input_ids=self._padded(sequences, layout), **arguments)
        rows = recorder.finish() if layers else {}
        return PassOutput(rows, output[0] if head else None, recorder.dtype)

    def _padded(self, sequences: Sequence[TokenIds], layout: PassLayout) -> torch.Tensor:
        # Any id will do as padding: it stands to the right, where no real position can see it.
        ids = np.zeros((len(sequences), layout.width), np.int64)
        for b, sequence in enumerate(sequences):
            ids[b, : len(sequence)] = sequence
        return torch.from_numpy(ids).to(self.device)


def _input_device(model: Any) -> torch.device:
    embeddings = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    weight = next(iter((embeddings or model).parameters()), None)
    # Off-loaded weights wait on "meta"; their own hooks move the ids to where they run.
    return torch.device("cpu") if weight is None or weight.device.type == "meta" else weight.device


def _state_argument(body: nn.Module) -> str | None:
    names = inspect.signature(body.forward).parameters
    return next((name for name in _STATE_ARGUMENTS if name in names), None)
