"""``Job``: one bulk job as everybody sees it, and what is asked for to make one."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal, NamedTuple, get_args

from streamtap.wire.harvest_jobs import OVER, JobState

Lane = Literal["small", "large"]
LANES: tuple[Lane, ...] = get_args(Lane)


class JobError(NamedTuple):
    """Why a job failed: a code of CONTRACT section 9, and one sentence."""

    code: str
    message: str


@dataclass(frozen=True)
class JobAsked:
    """What a job is to be; ``id`` and ``run_id`` are made here, so that its prompts can be stored before its row.

    Args:
        model: Short id of the model.
        lane: Of the model's size.
        n_prompts: Prompts of the whole job.
        n_tokens: Tokens of all of them as they will run, cut to the context; what the key is charged.
        n_shards: Files that it comes to.
        layer_indices: The layers that are kept, ascending.
    """

    model: str
    lane: Lane
    n_prompts: int
    n_tokens: int
    n_shards: int
    layer_indices: tuple[int, ...]
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    run_id: str = field(default_factory=lambda: uuid.uuid4().hex)


@dataclass(frozen=True)
class Job:
    """A job at one moment; a change makes a new one.

    ``n_tokens`` is what it was charged. ``worker`` has it just now. ``attempts`` counts the workers that took it since
    a shard last became whole. ``worked_seconds`` is how long workers had it in all. ``timings`` are seconds by what
    they went to; empty before it is done. ``files_kept`` is False once the files were removed.
    """

    id: str
    key_id: int
    model: str
    lane: Lane
    state: JobState
    run_id: str
    n_prompts: int
    n_tokens: int
    n_shards: int
    layer_indices: tuple[int, ...]
    created_at: datetime
    started_at: datetime | None = None
    completed_at: datetime | None = None
    prompts_done: int = 0
    shards_done: int = 0
    attempts: int = 0
    worker: str | None = None
    error: JobError | None = None
    worked_seconds: float = 0.0
    timings: Mapping[str, float] = field(default_factory=dict)
    files_kept: bool = True

    @property
    def is_over(self) -> bool:
        """Whether its state never changes again."""
        return self.state in OVER
