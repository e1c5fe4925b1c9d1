"""A model of which only what the cache remembers is at hand: enough to find rows, never to make them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from streamtap.activations import Provenance
from streamtap.engines.base import Engine
from streamtap.engines.tokenizing import Tokens
from streamtap.errors import NotCached
from streamtap.spec import CaptureSpec, Prompt
from streamtap.workbench.identity import identity_of


@dataclass(frozen=True)
class KnownModel:
    """A ``ModelSource`` out of the cache alone."""

    provenance: Provenance
    tokenizer_limits: Mapping[str, Any]

    @property
    def is_only_known(self) -> bool:
        """Always."""
        return True

    @property
    def may_change(self) -> bool:
        """Always."""
        return True

    def may_be(self, provenance: Provenance) -> bool:
        """Whether it is the same model."""
        return identity_of(provenance) == identity_of(self.provenance)

    def encode(self, prompts: Sequence[Prompt], spec: CaptureSpec, first_index: int) -> list[Tokens]:
        """Refuse: there is no tokenizer.

        Raises:
            NotCached: always.
        """
        raise NotCached(f"prompt {first_index} was never tokenised for {self.provenance.model}.")

    def engine(self) -> Engine:
        """Refuse: there is no model.

        Raises:
            NotCached: always.
        """
        raise NotCached(f"the cache knows rows of {self.provenance.model}, and not the model.")

    def close(self) -> None:
        """Do nothing: there is no engine."""
