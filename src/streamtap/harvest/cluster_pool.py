"""Engines as processes on the machines of a Ray cluster: asked for, called, and let go; all that is Ray's is here.

A pool of fixed size would wait for ever for the engines of a machine that is gone; this one goes on with those it has.
"""

from __future__ import annotations

import logging
import math
import re
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

from streamtap.errors import HarvestFailed, HarvestUnavailable, InvalidInput, MissingExtra, StreamtapError
from streamtap.settings import defaults

try:
    import ray
    from ray.exceptions import RayError, RayTaskError
except ImportError as _error:
    raise MissingExtra("a harvest on a cluster needs Ray: pip install 'streamtap[ray]'.") from _error

from streamtap.harvest.handing_out import AT_ONCE
from streamtap.harvest.node_engine import NodeEngine
from streamtap.harvest.plan import ShardPlan

#: How long engines have to put away what they hold, before they are ended.
_GRACE_SECONDS = 10.0
#: A cluster that is started here would tell Ray's makers of itself.
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0"}
#: One attempt to reach a cluster takes 40 s, and Ray makes 20.
_BRIEF = {"RAY_gcs_server_port_wait_time_s": "1"}
_HOST_AND_PORT = re.compile(r"\[?([^/]+?)\]?:(\d+)")
_CONNECT_SECONDS = 10.0


@dataclass(frozen=True)
class Needs:
    """What one engine takes of a machine: CPUs, which are its threads too, and GPUs.

    Raises:
        InvalidInput: nothing, or less than nothing.
    """

    cpus: float = 1
    gpus: float = 0

    def __post_init__(self) -> None:
        """Check both once."""
        given = (self.cpus, self.gpus)
        if not all(math.isfinite(each) and each >= 0 for each in given) or not any(given):
            raise InvalidInput(f"an engine needs CPUs or GPUs; got cpus {self.cpus!r} and gpus {self.gpus!r}.")

    def __str__(self) -> str:
        return " and ".join(f"{each:g} {name}" for name, each in (("CPU", self.cpus), ("GPU", self.gpus)) if each)

    def fit(self, resources: Mapping[str, float]) -> int:
        """How many such engines a machine has room for."""
        asked = (("CPU", self.cpus), ("GPU", self.gpus))
        return int(min(resources.get(name, 0) // each for name, each in asked if each))


@dataclass(frozen=True)
class EngineGone:
    """An engine whose process or machine is no more; ``why`` is what the cluster says of it."""

    why: str


@dataclass(frozen=True)
class Answer:
    """What came of a call: of one by name, or of a shard; ``value`` may be an error or ``EngineGone``."""

    engine: int
    call: str | ShardPlan
    value: Any


@contextmanager
def connected(address: str) -> Iterator[None]:
    """Be a driver of the cluster at ``address``; ``"auto"`` is the one of this machine, ``"local"`` one of its own.

    Where this process is a driver already it stays one afterwards.

    Raises:
        HarvestUnavailable: no cluster answers there.
        InvalidInput: this process is a driver of another.
    """
    if ray.is_initialized():
        _check_same(address)
        yield
        return
    own: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
    try:
        _check_answers(address)
        with defaults(**_QUIET, **({} if own else _BRIEF)):
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **own)
    except (OSError, OverflowError, RuntimeError, ValueError) as error:
        raise HarvestUnavailable(
            f"no Ray cluster can be used at {address!r} ({_first_line(error)}); start one with `ray start --head`, "
            "name its address, or take 'local' for one on this machine alone."
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def room_for(needs: Needs) -> int:
    """How many engines the machines that are there have room for, were nothing else on them."""
    return sum(needs.fit(node["Resources"]) for node in ray.nodes() if node["Alive"])


def has_gpus() -> bool:
    """Whether any machine has one."""
    return any(node["Resources"].get("GPU", 0) >= 1 for node in ray.nodes() if node["Alive"])


class EnginePool:
    """Engines by number; each is a process on some machine of the cluster, which ends with this one.

    Args:
        needs: What each takes.
        arguments: Those of ``NodeEngine``.
    """

    def __init__(self, needs: Needs, *arguments: Any) -> None:
        # A matrix product on other threads has other bits.
        threads = {"env_vars": {"OMP_NUM_THREADS": str(max(1, int(needs.cpus)))}}
        # One thread more than shards, for `close`.
        self._kind = ray.remote(
            num_cpus=needs.cpus,
            num_gpus=needs.gpus,
            max_restarts=0,
            max_concurrency=AT_ONCE + 1,
            scheduling_strategy="SPREAD",
            runtime_env=threads,
        )(NodeEngine)
        self._arguments = arguments
        self._numbers = count()
        self._actors: dict[int, Any] = {}
        self._calls: dict[Any, tuple[int, str | ShardPlan]] = {}
        self._placed: set[int] = set()

    def __len__(self) -> int:
        """Engines, ready or not."""
        return len(self._actors)

    @property
    def n_placed(self) -> int:
        """Engines that a machine was found for."""
        return len(self._placed)

    def ask_for_one(self) -> None:
        """Ask the cluster for an engine; an ``Answer`` to ``there`` comes once it has a machine."""
        engine = next(self._numbers)
        self._actors[engine] = self._kind.remote(*self._arguments)
        self.call(engine, "there")

    def call(self, engine: int, method: str, *args: Any, **named: Any) -> None:
        """Call a method of an engine; its ``Answer`` comes later."""
        self._called(engine, method, getattr(self._actors[engine], method).remote(*args, **named))

    def ask(self, engine: int, method: str) -> Any:
        """Call a method that takes no time, and wait for what it gives, or ``EngineGone``.

        Raises:
            StreamtapError: the method does.
        """
        value = _outcome(getattr(self._actors[engine], method).remote())
        if isinstance(value, StreamtapError):
            raise value
        return value

    def make(self, engine: int, plan: ShardPlan) -> None:
        """Let an engine make a shard; its ``Answer`` comes later."""
        self._called(engine, plan, self._actors[engine].shard.remote(plan))

    def answers(self, seconds: float) -> Iterator[Answer]:
        """What has come by now; waits for something at most so long."""
        if not self._calls:
            time.sleep(seconds)
            return
        ray.wait(list(self._calls), num_returns=1, timeout=seconds)
        ready, _ = ray.wait(list(self._calls), num_returns=len(self._calls), timeout=0)
        for ref in ready:
            # Of an engine that was let go meanwhile nothing is heard any more.
            if ref in self._calls:
                engine, call = self._calls.pop(ref)
                answer = Answer(engine, call, _outcome(ref))
                if call == "there" and not isinstance(answer.value, EngineGone):
                    self._placed.add(engine)
                yield answer

    def let_go(self, engine: int) -> None:
        """End an engine that is gone, or may be."""
        self._placed.discard(engine)
        self._calls = {ref: call for ref, call in self._calls.items() if call[0] != engine}
        ray.kill(self._actors.pop(engine))

    def close(self) -> None:
        """End all engines; those that work stop within a batch."""
        ending = [self._actors[engine].close.remote() for engine in self._placed]
        if ending:
            ray.wait(ending, num_returns=len(ending), timeout=_GRACE_SECONDS)
        for engine in list(self._actors):
            self.let_go(engine)

    def _called(self, engine: int, call: str | ShardPlan, ref: Any) -> None:
        self._calls[ref] = (engine, call)


def _outcome(ref: Any) -> Any:
    try:
        return ray.get(ref)
    except RayTaskError as error:
        if isinstance(error.cause, StreamtapError):
            return error.cause
        # Its text may hold anything; the engine's own log has it.
        failed = HarvestFailed(f"an engine of the cluster failed with {type(error.cause).__name__}; see its log.")
        failed.__cause__ = error
        return failed
    except RayError as error:
        return EngineGone(f"{type(error).__name__}: {_first_line(error)}")


def _check_answers(address: str) -> None:
    """Ray would go on asking for minutes."""
    if parts := _HOST_AND_PORT.fullmatch(address):
        socket.create_connection((parts[1], int(parts[2])), timeout=_CONNECT_SECONDS).close()


def _check_same(address: str) -> None:
    here = ray.get_runtime_context().gcs_address
    if address not in ("auto", "local", here):
        raise InvalidInput(f"this process uses the Ray cluster at {here} already; take 'auto', or a new process.")


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:200]
