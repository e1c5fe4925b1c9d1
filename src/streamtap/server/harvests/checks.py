"""What a bulk job must pass before a worker hears of it, in the contract's order; a refused one has used no quota."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from streamtap.errors import HarvestUnsupported, RequestTooLarge
from streamtap.positions import choose_positions
from streamtap.server.config import Limits, ModelConfig
from streamtap.server.harvests.asking import ask_of
from streamtap.server.harvests.jobs import JobAsked
from streamtap.server.models.catalog import Catalog, Served, served
from streamtap.wire.harvest import HarvestRequest


def is_harvested(model: ModelConfig) -> bool:
    """Whether bulk jobs of a model can be run: its worker loads the checkpoint itself."""
    return model.engine == "transformers" and model.activations


def choose_model(request: HarvestRequest, catalog: Catalog) -> Served:
    """The model that a job names.

    Raises:
        ModelNotFound: there is no such model.
        HarvestUnsupported: nothing here harvests it.
    """
    found = served(catalog, request.model)
    if not is_harvested(found.config):
        able = ", ".join(each.config.id for each in catalog.values() if is_harvested(each.config)) or "none"
        raise HarvestUnsupported(f"the model {found.config.id} is not harvested in bulk here; these are: {able}.")
    return found


def check_fits(request: HarvestRequest, found: Served, limits: Limits) -> None:
    """Hold a job against its model, as far as that needs no look at its prompts.

    Raises:
        RequestTooLarge: more prompts than one job may have.
        InvalidLayers: a layer that the model lacks.
        InvalidInput: directions of another width.
    """
    if (n_prompts := len(request.prompts)) > limits.max_harvest_prompts:
        raise RequestTooLarge(
            f"prompts has {n_prompts} prompts; one job takes at most {limits.max_harvest_prompts}. Send several jobs."
        )
    request.check_fits(n_layers=found.facts.n_layers, hidden=found.facts.hidden)


def count(request: HarvestRequest, found: Served, limits: Limits) -> JobAsked:
    """What the job will be; its prompts are tokenised, which takes time.

    Raises:
        RequestTooLarge: more tokens than one job may have.
        InvalidPositions: a position that a prompt lacks.
        InvalidPrompt: a prompt that cannot be run.
    """
    n_tokens = 0
    for tokens in _counted(request, found):
        n_tokens += tokens
        if n_tokens > limits.max_harvest_tokens:
            raise RequestTooLarge(
                f"the prompts have more than {limits.max_harvest_tokens} tokens, which is all that one job takes; send "
                "several jobs."
            )
    return JobAsked(
        model=found.config.id,
        lane=found.config.size,
        n_prompts=len(request.prompts),
        n_tokens=n_tokens,
        n_shards=-(-len(request.prompts) // request.shard_size),
        layer_indices=ask_of(request).layer_indices(found.facts.n_layers),
    )


def _counted(request: HarvestRequest, found: Served) -> Iterator[int]:
    """Tokens of each prompt as it will run: what is longer than the context loses its end."""
    for index, prompt in enumerate(request.prompts):
        whole = found.counter.count(prompt, request.add_special_tokens, index=index)
        tokens = min(whole, found.facts.max_model_len)
        if isinstance(request.positions, tuple):
            choose_positions(request.positions, np.zeros(tokens, np.int32), index=index)
        yield tokens
