"""The command line of a model's engine."""

from __future__ import annotations

from streamtap.engines.commands import VllmOptions, filled_command, prefills_whole, vllm_command, worker_command
from streamtap.engines.demo_model import DEMO, demo_folder, is_unpacked
from streamtap.server.config import ModelConfig, Role
from streamtap.settings import Settings


def command_of(model: ModelConfig, port: int | str, role: Role = "activations") -> list[str]:
    """The command line that starts ``model``'s engine for ``role`` on ``port``."""
    name = model.served_name
    if model.command:
        command = filled_command(model.command, model=model.checkpoint, name=name, port=port)
    elif model.engine == "vllm":
        options = _vllm_options(model, captures=role == "activations")
        command = vllm_command(_for_vllm(model.checkpoint), name=name, port=port, options=options)
    else:
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


def runs_prompts_whole(model: ModelConfig) -> bool:
    """Whether each prompt goes through ``model``'s vLLM in one piece; of one that others start nobody knows."""
    return model.engine == "vllm" and not model.command and prefills_whole(model.arguments)


def _vllm_options(model: ModelConfig, *, captures: bool) -> VllmOptions:
    return VllmOptions(
        revision=model.revision,
        dtype=model.dtype,
        max_model_len=model.max_model_len,
        tensor_parallel_size=model.tensor_parallel_size,
        pipeline_parallel_size=model.pipeline_parallel_size,
        distributed_executor=model.distributed_executor,
        captures=captures,
        parks=model.park,
    )


def _for_vllm(checkpoint: str) -> str:
    """The demo model by its folder, which other programs can find."""
    settings = Settings.from_environment()
    return str(demo_folder(settings)) if checkpoint == DEMO and is_unpacked(settings) else checkpoint
