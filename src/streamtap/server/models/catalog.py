"""The models that are served, with what is known of each before its engine runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from streamtap.errors import ModelNotFound
from streamtap.server.config import ModelConfig

if TYPE_CHECKING:
    from streamtap.server.models.counting import TokenCounter
    from streamtap.server.models.facts import ModelFacts


class Served(NamedTuple):
    """One model: what the configuration says, what its files say, and how its prompts are counted."""

    config: ModelConfig
    facts: ModelFacts
    counter: TokenCounter


Catalog = Mapping[str, Served]


def served(catalog: Catalog, model_id: str) -> Served:
    """The model of that id.

    Raises:
        ModelNotFound: there is none; the message names those there are.
    """
    try:
        return catalog[model_id]
    except KeyError:
        live = ", ".join(catalog)
        raise ModelNotFound(f"there is no model of that id here; the models are: {live}.") from None
