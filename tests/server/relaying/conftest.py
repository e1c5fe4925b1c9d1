"""What a vLLM with vllm-lens says, in its own order of keys, and a gateway in front of one."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import zstandard
from numpy.typing import NDArray
from starlette.types import Receive, Scope, Send

from streamtap.server.config import ModelConfig, Timing
from streamtap.testing.stub_engine import Script, StubEngine, StubPool
from streamtap.testing.stub_gateway import StubGateway

Array = NDArray[Any]
HIDDEN = 8
VLLM = ModelConfig(id="stub", checkpoint="org/stub", engine="vllm", max_activation_prompt_tokens=64)
FAR = ModelConfig(id="stub", checkpoint="org/stub", engine="url", url="http://far", max_activation_prompt_tokens=64)


def rows(layers: int, count: int, dtype: Any = ml_dtypes.bfloat16) -> Array:
    """Values of [layers, count, 8] that are all different, and exact in every dtype."""
    drawn = np.random.default_rng(layers * 1000 + count).normal(size=(layers, count, HIDDEN))
    return drawn.astype(ml_dtypes.bfloat16).astype(dtype)


def vllm_answer(values: Array | None, prompt_ids: Sequence[int], new_ids: Sequence[int], **choice: Any) -> bytes:
    """A completion of one prompt as ``vllm serve`` writes it; ``values`` [layers, rows, hidden] come with it."""
    told = {
        **{"index": 0, "text": "b", "logprobs": None, "finish_reason": "length", "stop_reason": None},
        **{"token_ids": list(new_ids), "prompt_logprobs": None, "prompt_token_ids": list(prompt_ids)},
    }
    prompt, new = len(prompt_ids), len(new_ids)
    body: dict[str, Any] = {
        **{"id": "cmpl-1", "object": "text_completion", "created": 0, "model": "org/stub", "choices": [told | choice]},
        **{"service_tier": None, "system_fingerprint": None},
        "usage": {"prompt_tokens": prompt, "total_tokens": prompt + new, "completion_tokens": new},
        "kv_transfer_params": None,
    }
    if values is not None:
        body["activations"] = {"residual_stream": envelope(values)}
    return json.dumps(body, separators=(",", ":")).encode()


def envelope(values: Array) -> dict[str, Any]:
    """As vllm-lens writes it: the data first."""
    stored = values.view(np.int16) if values.dtype == ml_dtypes.bfloat16 else values
    frame = zstandard.ZstdCompressor(level=1).compress(stored.tobytes())
    about = {"dtype": str(stored.dtype), "original_dtype": f"torch.{values.dtype}", "shape": list(values.shape)}
    return {"data": base64.b64encode(frame).decode(), **about, "compression": "zstd"}


class StubVllm(StubEngine):
    """A stub that also says who it is, and how often it interrupted a request at each time that it is asked.

    Where that is empty it interrupted none, and where it is None it does not tell.
    """

    def __init__(self, script: Script, owner: str = "vllm", interruptions: Sequence[int] | None = ()) -> None:
        super().__init__(lambda _body: script)
        self.owner = owner
        self.interruptions = None if interruptions is None else list(interruptions)
        self.looks: list[str] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] == "POST":
            await super().__call__(scope, receive, send)
            return
        self.looks.append(scope["path"])
        status, body = self._told(scope["path"])
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": body})

    def _told(self, path: str) -> tuple[int, bytes]:
        if path == "/v1/models":
            return 200, json.dumps({"object": "list", "data": [{"id": "m", "owned_by": self.owner}]}).encode()
        if path == "/metrics" and self.interruptions is not None:
            counted = self.interruptions.pop(0) if self.interruptions else 0
            name, labels = "vllm:num_preemptions", '{engine="0",model_name="m"}'
            lines = [f"# TYPE {name} counter", f"{name}_total{labels} {counted}.0", f"{name}_created{labels} 1.7e+09"]
            return 200, "\n".join([*lines, ""]).encode()
        return 404, b"{}"


Act = Callable[[StubGateway, StubVllm], Coroutine[Any, Any, None]]


@dataclass
class Behind:
    """Gateways over one stub each, in folders of their own."""

    folder: Path
    made: int = field(default=0)

    def __call__(
        self, engine: StubVllm, act: Act, model: ModelConfig = VLLM, *, first_answer_seconds: float = 1.0
    ) -> None:
        """Run ``act`` with a gateway that serves ``model`` from ``engine``; nothing may be held when it is over."""
        self.made += 1
        folder = self.folder / str(self.made)
        folder.mkdir()
        timing = Timing(first_answer_seconds=first_answer_seconds, keepalive_seconds=first_answer_seconds)
        with engine:

            async def main() -> None:
                gateway = StubGateway(folder, StubPool(engine.base_url), models=[model], timing=timing)
                await act(gateway, engine)
                assert gateway.pool.held == 0
                assert gateway.usage["requests"]["active"]["now"] == 0
                await gateway.close()

            asyncio.run(main())


@pytest.fixture
def behind(tmp_path: Path) -> Behind:
    """Runs something with a gateway in front of a stub."""
    return Behind(tmp_path)


@pytest.fixture(scope="session")
def stub_vllm() -> type[StubVllm]:
    return StubVllm


@pytest.fixture(scope="session")
def answer_of_vllm() -> Callable[..., bytes]:
    return vllm_answer


@pytest.fixture(scope="session")
def made_rows() -> Callable[..., Array]:
    return rows


@pytest.fixture(scope="session")
def far_model() -> ModelConfig:
    """A model whose engine runs elsewhere."""
    return FAR
