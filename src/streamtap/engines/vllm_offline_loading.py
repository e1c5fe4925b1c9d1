"""Open a model on vLLM with vllm-lens, with options under which every row comes and is right."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from streamtap.engines.described import DescribedModel
from streamtap.engines.vllm_flags import NO_TRUE_ROWS
from streamtap.engines.vllm_offline_llm import GRACE_SECONDS, Llm, LlmFacts
from streamtap.errors import EngineFailed, InvalidInput, MissingExtra, Unsupported
from streamtap.settings import defaults

DTYPES = ("auto", "float32", "bfloat16", "float16")
_INSTALL = (
    "running a model on vLLM needs vllm and vllm-lens: pip install 'streamtap[vllm]', on Python 3.12 or newer. "
    "Without a GPU, upstream/make-environment.sh in Streamtap's repository makes an environment that has both."
)
#: vllm-lens reads the first of vLLM's model runners. Without a GPU, keys and values get two GB.
_VARIABLES = {
    **{"VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_LOGGING_LEVEL": "WARNING"},
    **{"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"},
}
_OWN = ("model", "revision", "dtype", "max_model_len", "tensor_parallel_size", "pipeline_parallel_size")
_REFUSED = NO_TRUE_ROWS | {"enable_prefix_caching": "tokens found in a prefix cache do not run, so they have no rows"}


@dataclass(frozen=True)
class Asked:
    """How a model is opened; see ``VllmEngine.load``.

    Raises:
        InvalidInput: a value that means nothing.
        Unsupported: one of vLLM's options under which rows would lack.
    """

    dtype: str = "auto"
    max_model_len: int | None = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    distributed_executor: str | None = None
    gpu_memory_utilization: float | None = None
    engine_options: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        """Check each value once."""
        if self.dtype not in DTYPES:
            raise InvalidInput(f"dtype must be one of {', '.join(DTYPES)}; got {self.dtype!r}.")
        for name in ("max_model_len", "tensor_parallel_size", "pipeline_parallel_size"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise InvalidInput(f"{name} must be a whole number of at least 1; got {value!r}.")
        for name, value in (self.engine_options or {}).items():
            if name in _OWN:
                raise InvalidInput(f"engine_options cannot set {name}; it is an argument of its own.")
            if name in _REFUSED and value:
                raise Unsupported(f"vLLM's option {name} is not taken: {_REFUSED[name]}. Leave it out.")

    def options(self, described: DescribedModel) -> dict[str, Any]:
        """The arguments of ``vllm.LLM``."""
        found = described.reference
        given = {
            "max_model_len": self.max_model_len,
            "distributed_executor_backend": self.distributed_executor,
            "gpu_memory_utilization": self.gpu_memory_utilization,
        }
        return {
            "model": found.name if found.is_hub else str(found.folder),
            **({"revision": found.commit, "tokenizer_revision": found.commit} if found.is_hub else {}),
            # vLLM halves a float32 checkpoint of its own accord.
            "dtype": described.dtype if self.dtype == "auto" and described.dtype in DTYPES else self.dtype,
            "tensor_parallel_size": self.tensor_parallel_size,
            "pipeline_parallel_size": self.pipeline_parallel_size,
            "enable_prefix_caching": False,
            "max_logprobs": -1,
            "use_tqdm_on_load": False,
            **{name: value for name, value in given.items() if value is not None},
            **(self.engine_options or {}),
        }


def check_installed() -> None:
    """Refuse early where the libraries lack.

    Raises:
        MissingExtra: vllm or vllm-lens is not installed.
    """
    with defaults(**_VARIABLES):
        _libraries()


def open_llm(described: DescribedModel, asked: Asked) -> tuple[Llm, LlmFacts]:
    """Open the model, which takes from half a minute to many.

    Raises:
        InvalidInput: an option that means nothing to vLLM.
        Unsupported: an option that vLLM has and vllm-lens fails with.
        EngineFailed: vLLM could not open it; its log says why.
        MissingExtra: vllm or vllm-lens is not installed.
    """
    # Its processes take what the variables say when they start.
    with defaults(**_VARIABLES):
        vllm, vllm_lens = _libraries()
        if asked.pipeline_parallel_size > 1 and vllm.platforms.current_platform.is_cpu():
            raise Unsupported(
                "vLLM with vllm-lens dies at the first request where pipeline_parallel_size is over 1 without a GPU; "
                "take tensor_parallel_size."
            )
        llm = _opened(vllm, described, asked)
    if not hasattr(llm, "register_hooks"):
        llm.llm_engine.engine_core.shutdown(timeout=GRACE_SECONDS)
        raise InvalidInput(
            "vLLM did not load vllm-lens, which is installed; unset VLLM_LENS_DISABLE and VLLM_PLUGINS, and try again."
        )
    facts = _facts(llm.llm_engine.vllm_config, f"{vllm.__version__} with vllm-lens {vllm_lens.__version__}")
    return Llm(llm, vllm, vllm.v1.engine.exceptions.EngineDeadError), facts


def _opened(vllm: Any, described: DescribedModel, asked: Asked) -> Any:
    name = described.reference.name
    try:
        return vllm.LLM(**asked.options(described))
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"vLLM does not open {name!r} with these options: {_in_short(error)}") from error
    except (RuntimeError, OSError, MemoryError) as error:
        raise EngineFailed(f"vLLM could not open {name!r}: {_in_short(error)}") from error


def _libraries() -> tuple[Any, Any]:
    try:
        import vllm
        import vllm.platforms
        import vllm.sampling_params
        import vllm.v1.engine.exceptions
        import vllm_lens
    except ImportError as error:
        raise MissingExtra(_INSTALL) from error
    return vllm, vllm_lens


def _facts(config: Any, version: str) -> LlmFacts:
    model, cache = config.model_config, config.cache_config
    return LlmFacts(
        version=version,
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(config.device_config.device_type),
        quantization=model.quantization,
        context=int(model.max_model_len),
        step_tokens=int(config.scheduler_config.max_num_batched_tokens),
        held_tokens=_held_tokens(cache),
        block_tokens=int(cache.block_size),
        most_logprobs=int(model.max_logprobs),
    )


def _held_tokens(cache: Any) -> int:
    """Room for keys and values; one block is nobody's. A model of several kinds of layers needs more than a block."""
    told = getattr(cache, "kv_cache_size_tokens", None)
    whole = int(cache.num_gpu_blocks) * int(cache.block_size) if told is None else int(told)
    return max(0, whole - int(cache.block_size))


def _in_short(error: BaseException) -> str:
    return " ".join(str(error).split())[:400]
