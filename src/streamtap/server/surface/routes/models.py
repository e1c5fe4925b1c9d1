"""GET /v1/models and /v1/models/{id}/status."""

from __future__ import annotations

import re
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse

from streamtap.codec import WIRE_DTYPES
from streamtap.engines.demo_model import DEMO
from streamtap.engines.references import find_model
from streamtap.errors import InvalidInput
from streamtap.server.config import Limits, ModelConfig, Role
from streamtap.server.harvests.checks import is_harvested
from streamtap.server.models.catalog import Served, served
from streamtap.server.service import Service
from streamtap.server.surface.bodies import presented_key
from streamtap.server.surface.trace import trace_of
from streamtap.settings import Settings

_COMMIT = re.compile(r"[0-9a-f]{40}")


class Models:
    """What is served, what each model can do, and whether it is warm."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def every(self, request: Request) -> JSONResponse:
        """All models and their capabilities."""
        await _key_of(request, self._service)
        return JSONResponse(
            {"object": "list", "data": [self._described(each) for each in self._service.catalog.values()]}
        )

    async def status(self, request: Request) -> JSONResponse:
        """Whether a model answers at once, and how far its engines are."""
        await _key_of(request, self._service)
        found = served(self._service.catalog, request.path_params["model_id"])
        trace_of(request.scope).model = found.config.id
        boots: dict[Role, dict[str, Any]] = {
            role: self._service.pool.boot(found.config.id, role) for role in _roles(found)
        }
        told = {
            "warm": boots["completions"]["warm"],
            "boot": _without_warm(boots["completions"]),
            **({"activation_boot": _without_warm(boots["activations"])} if "activations" in boots else {}),
        }
        return JSONResponse(told)

    def _described(self, found: Served) -> dict[str, Any]:
        model = found.config
        told = {
            "id": model.id,
            "object": "model",
            "owned_by": model.owned_by,
            "served_model_name": found.facts.checkpoint,
            "revision": _commit_of(model),
            # Rows of another engine, or of one with arguments of its own, are not those of the bare checkpoint.
            "engine": model.engine,
            "own_arguments": bool(model.command or model.arguments),
            "gpu_shape": model.gpu_shape,
            "status": "warm" if self._service.pool.is_ready(model.id, "completions") else "cold",
            "capabilities": _known(_capabilities(found, self._service.config.limits, self._takes_jobs(model))),
        }
        return _known(told)

    def _takes_jobs(self, model: ModelConfig) -> bool:
        """Whether bulk jobs of a model are done by this gateway."""
        return is_harvested(model) and self._service.config.harvest.workers > 0


async def _key_of(request: Request, service: Service) -> None:
    key = await service.admission.authenticate(presented_key(request.scope["headers"]))
    trace_of(request.scope).key_prefix = key.prefix


def _roles(found: Served) -> tuple[Role, ...]:
    return ("completions", "activations") if found.config.activations else ("completions",)


def _capabilities(found: Served, limits: Limits, harvested: bool) -> dict[str, Any]:
    activations = found.config.activations
    return {
        "max_model_len": found.facts.max_model_len,
        "max_logprobs": limits.max_logprobs,
        "max_output_work_tokens": limits.max_output_work_tokens,
        # An engine that is not ours writes a token behind each prompt, and captures it whole.
        "least_max_tokens": 0 if found.config.engine == "transformers" else 1,
        "max_inflight_per_key": limits.max_active_per_key,
        "max_queued_per_key": limits.max_waiting_per_key,
        "rate_limit_per_minute": limits.rate_per_minute,
        "logprobs": True,
        "prompt_logprobs": True,
        "prompt_logprobs_full_vocab": True,
        "full_vocab_max_prompt_tokens": limits.full_vocab_max_prompt_tokens,
        "activations": activations,
        "max_steering_vectors": limits.max_steering_vectors if activations else None,
        "max_activation_prompt_tokens": found.config.max_activation_prompt_tokens if activations else None,
        "output_positions": True if activations else None,
        "output_dtypes": list(WIRE_DTYPES) if activations else None,
        "harvest": harvested,
        "max_harvest_prompts": limits.max_harvest_prompts if harvested else None,
        "max_harvest_tokens": limits.max_harvest_tokens if harvested else None,
        "n_layers": found.facts.n_layers,
        "hidden_size": found.facts.hidden,
        "dtype": found.facts.dtype,
    }


def _commit_of(model: ModelConfig) -> str | None:
    """The Hub's commit of a checkpoint whose files are on this machine; None of others, whose weights are not read."""
    if model.engine == "url" or model.checkpoint == DEMO:
        return None
    if model.revision is not None and _COMMIT.fullmatch(model.revision):
        return model.revision
    try:
        settings = Settings.from_environment()
        found = find_model(model.checkpoint, model.revision, settings=settings, recall=lambda _key: {"commit": ""})
    except InvalidInput:
        return None
    return found.commit if found.commit and _COMMIT.fullmatch(found.commit) else None


def _known(told: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in told.items() if value is not None}


def _without_warm(boot: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in boot.items() if name != "warm"}
