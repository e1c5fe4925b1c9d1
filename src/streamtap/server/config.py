"""What ``streamtap.toml`` says, as frozen values; ``config_file`` reads them and names the line of a fault."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

EngineKind = Literal["transformers", "vllm", "url"]
Role = Literal["completions", "activations"]


@dataclass(frozen=True)
class ModelConfig:
    """One model that is served.

    ``id`` is what clients name; ``checkpoint`` what is loaded, and what answers call ``model`` unless ``name`` says
    otherwise. ``command`` replaces the command line that ``engine`` would start, with ``{port}`` in it, and may have
    ``{model}`` and ``{name}``; ``arguments`` are added to it. ``url`` is where a running engine of kind ``url``
    answers. ``n_layers``, ``hidden_size``, ``max_model_len``, ``vocabulary`` and ``tokenizer`` (a folder or a
    tokenizer.json) are read from the checkpoint's files where they are None. ``idle_seconds`` 0 never stops it.

    Of ``engine = "vllm"``: ``tensor_parallel_size`` and ``pipeline_parallel_size`` spread one model over so many
    devices, ``distributed_executor`` is what starts them (``"ray"`` for several machines), and ``park`` lets an idle
    engine give up its device's memory and keep its weights in the host's, instead of ending. ``self_check`` compares
    each engine for activations with the float32 reference when it starts, and refuses one whose rows are not the
    model's.
    """

    id: str
    checkpoint: str
    name: str | None = None
    revision: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    engine: EngineKind = "transformers"
    command: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    url: str | None = None
    activations_url: str | None = None
    api_key_file: Path | None = None
    activations: bool = True
    n_layers: int | None = None
    hidden_size: int | None = None
    vocabulary: int | None = None
    max_model_len: int | None = None
    tokenizer: Path | None = None
    max_activation_prompt_tokens: int = 2048
    max_batch_tokens: int | None = None
    idle_seconds: float = 900.0
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    distributed_executor: Literal["mp", "ray"] | None = None
    park: bool = False
    self_check: bool = False
    size: Literal["small", "large"] = "small"
    gpu_shape: str | None = None
    owned_by: str = "streamtap"

    @property
    def served_name(self) -> str:
        """What answers call ``model``, and what the engine is asked for."""
        return self.name or self.checkpoint


@dataclass(frozen=True)
class Limits:
    """What one key may do, unless the key says otherwise, and what one request may be; 0 is unlimited for quotas."""

    max_active_per_key: int = 16
    max_waiting_per_key: int = 64
    rate_per_minute: int = 600
    monthly_activations: int = 0
    monthly_input_tokens: int = 0
    monthly_output_tokens: int = 0
    daily_input_tokens: int = 0
    daily_output_tokens: int = 0
    user_monthly_input_tokens: int = 0
    user_monthly_output_tokens: int = 0
    user_daily_input_tokens: int = 0
    user_daily_output_tokens: int = 0
    monthly_harvests: int = 0
    small_harvests_per_key: int = 3
    large_harvests_per_key: int = 1
    large_harvests: int = 2
    max_harvest_prompts: int = 4096
    max_harvest_tokens: int = 2_000_000
    max_output_work_tokens: int = 32_000
    max_prompts: int = 1024
    max_steering_vectors: int = 8
    max_logprobs: int = 100
    full_vocab_max_prompt_tokens: int = 1024
    max_body_bytes: int = 50 * 1024 * 1024
    breaker_failures: int = 5
    breaker_seconds: float = 60.0


@dataclass(frozen=True)
class Timing:
    """How long things take, in seconds; section 6 of the contract has the defaults."""

    first_answer_seconds: float = 1.0
    keepalive_seconds: float = 5.0
    deadline_seconds: float = 840.0
    stop_seconds: float = 30.0
    start_seconds: float = 840.0
    restart_backoff_seconds: float = 1.0
    max_backoff_seconds: float = 60.0


@dataclass(frozen=True)
class HarvestConfig:
    """Bulk jobs. ``store`` is a folder or ``s3://…``, ``gs://…``, ``az://…``; None is ``data_dir``.

    ``workers`` is how many processes each lane may have at a time, 0 for none: then this gateway takes no jobs. They
    start when there is a job and end when idle. A worker that was not heard of for ``lease_seconds`` loses its job to
    another. Files are removed ``keep_days`` after the job's end, and links to them hold ``link_days``.
    """

    store: str | None = None
    keep_days: float = 30.0
    link_days: float = 7.0
    workers: int = 1
    idle_seconds: float = 300.0
    lease_seconds: float = 30.0


@dataclass(frozen=True)
class ServerConfig:
    """The whole service of one gateway."""

    models: tuple[ModelConfig, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    data_dir: Path = Path("streamtap-data")
    database: str = ""
    engines: Literal["separate", "shared"] = "separate"
    max_engines: int = 4
    default_model: str | None = None
    limits: Limits = field(default_factory=Limits)
    timing: Timing = field(default_factory=Timing)
    harvest: HarvestConfig = field(default_factory=HarvestConfig)

    @property
    def database_url(self) -> str:
        """SQLAlchemy's address of the database; SQLite in ``data_dir`` unless one was named."""
        return self.database or f"sqlite:///{(self.data_dir / 'streamtap.db').absolute()}"

    @property
    def harvest_root(self) -> str:
        """The folder or address under which bulk jobs keep their prompts and files."""
        return self.harvest.store or str(self.data_dir.absolute())

    def roles(self, model: ModelConfig) -> tuple[Role, ...]:
        """Which engines the model has: two apart, or one for both, which is then the one for activations."""
        if not model.activations:
            return ("completions",)
        return ("activations",) if self.engines == "shared" else ("completions", "activations")

    @property
    def default(self) -> ModelConfig:
        """The model of a request that names none."""
        wanted = self.default_model or self.models[0].id
        return next(model for model in self.models if model.id == wanted)
