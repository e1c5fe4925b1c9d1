"""The command line of a model's engine."""

from __future__ import annotations

from streamtap.engines.commands import filled_command, vllm_command, worker_command
from streamtap.engines.demo_model import DEMO, demo_folder, is_unpacked
from streamtap.server.config import ModelConfig
from streamtap.settings import Settings


def command_of(model: ModelConfig, port: int | str) -> list[str]:
    """The command line that starts ``model``'s engine on ``port``."""
    name = model.served_name
    if model.command:
        return [*filled_command(model.command, model=model.checkpoint, name=name, port=port), *model.arguments]
    if model.engine == "vllm":
        command = vllm_command(
            _for_vllm(model.checkpoint),
            name=name,
            port=port,
            revision=model.revision,
            dtype=model.dtype,
            max_model_len=model.max_model_len,
        )
        return [*command, *model.arguments]
    command = worker_command(
        model.checkpoint,
        name=name,
        port=port,
        revision=model.revision,
        dtype=model.dtype,
        device=model.device,
        max_model_len=model.max_model_len,
        max_batch_tokens=model.max_batch_tokens,
    )
    return [*command, *model.arguments]


def _for_vllm(checkpoint: str) -> str:
    """The demo model by its folder, which other programs can find."""
    settings = Settings.from_environment()
    return str(demo_folder(settings)) if checkpoint == DEMO and is_unpacked(settings) else checkpoint
