"""What Prometheus reads at ``/metrics``; a registry of its own for each application."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from streamtap.server.pool.engine_events import EngineEvent
from streamtap.server.surface.trace import Trace

_FIRST_BYTE_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 840)
#: Engine states as the gauge's label; the state that an engine is in is 1, the others 0.
ENGINE_STATES = ("cold", "starting", "ready", "parked", "failed")


class Metrics:
    """Counters of one gateway since it started."""

    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._requests = Counter(
            "streamtap_requests",
            "Requests answered; code is the error's, of a late one too that stands inside a 200.",
            ("endpoint", "model", "status", "code"),
            registry=registry,
        )
        self._tokens = Counter("streamtap_tokens", "Tokens charged.", ("model", "direction"), registry=registry)
        self._first_byte = Histogram(
            "streamtap_first_byte_seconds",
            "Time to the first byte of an answer.",
            ("endpoint",),
            buckets=_FIRST_BYTE_BUCKETS,
            registry=registry,
        )
        self._capture = Counter(
            "streamtap_capture_bytes", "Bytes of answers that hold a capture.", ("model",), registry=registry
        )
        self._running = Gauge("streamtap_requests_running", "Requests being answered.", registry=registry)
        self.queued = Gauge("streamtap_requests_queued", "Requests waiting for a slot of their key.", registry=registry)
        self._engines = Gauge(
            "streamtap_engine_state", "1 for the state an engine is in.", ("model", "role", "state"), registry=registry
        )
        self._cold_starts = Counter(
            "streamtap_cold_starts", "Engines started on demand.", ("model", "role"), registry=registry
        )
        self._wake_ups = Counter(
            "streamtap_wake_ups", "Parked engines woken on demand.", ("model", "role"), registry=registry
        )

    def started(self) -> None:
        """A request came in."""
        self._running.inc()

    def saw(self, trace: Trace) -> None:
        """A request is over."""
        self._running.dec()
        model = trace.model or ""
        self._requests.labels(trace.endpoint, model, str(trace.status), trace.code or "").inc()
        if trace.first_byte_at is not None:
            self._first_byte.labels(trace.endpoint).observe(max(0.0, trace.first_byte_at - trace.started))
        if trace.input_tokens or trace.output_tokens:
            self._tokens.labels(model, "input").inc(trace.input_tokens)
            self._tokens.labels(model, "output").inc(trace.output_tokens)
        if trace.capture_bytes:
            self._capture.labels(model).inc(trace.capture_bytes)

    def cold_start(self, model: str, role: str) -> None:
        """An engine is being started because a request needs it."""
        self._cold_starts.labels(model, role).inc()

    def wake_up(self, model: str, role: str) -> None:
        """A parked engine is being woken because a request needs it."""
        self._wake_ups.labels(model, role).inc()

    def heard(self, event: EngineEvent) -> None:
        """Count what the pool told."""
        if event.kind == "starting":
            self.cold_start(event.model_id, event.role)
        elif event.kind == "waking":
            self.wake_up(event.model_id, event.role)

    def engines(self, states: Iterable[Mapping[str, Any]]) -> None:
        """Each engine is in its ``state`` now; ``states`` are the pool's."""
        for told in states:
            for state in ENGINE_STATES:
                self._engines.labels(told["model"], told["role"], state).set(float(told["state"] == state))

    def text(self) -> bytes:
        """All of it in Prometheus's text format."""
        return generate_latest(self._registry)
