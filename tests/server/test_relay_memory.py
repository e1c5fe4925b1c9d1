"""A large answer is never held: neither as a whole nor for a client that does not read."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from streamtap.server.config import ModelConfig
from streamtap.testing.stub_engine import Script, StubEngine, StubPool, completion
from streamtap.testing.stub_gateway import Call, StubGateway

PIECE = b"A" * 65_536
PIECES = 3_200  # 200 MB
ASK = {"prompt": "a", "max_tokens": 1, "output_residual_stream": True}


class _Large:
    """Makes an answer of many pieces, and counts them."""

    def __init__(self) -> None:
        self.made = 0

    def __iter__(self) -> Iterator[bytes]:
        envelope = {"dtype": "float32", "original_dtype": "torch.float32", "shape": [4, 2, 8], "data": ""}
        whole = json.dumps(completion(activations={"residual_stream": envelope})).encode()
        head, _, tail = whole.rpartition(b'""')
        yield head + b'"'
        for self.made in range(1, PIECES + 1):
            yield PIECE
        yield b'"' + tail


class _Counting(Call):
    """Keeps the length alone; reads on only while ``reads`` is set."""

    received = 0

    def __init__(self, *args: Any) -> None:
        self.reads = asyncio.Event()
        super().__init__(*args)

    async def _send(self, message: Any) -> None:
        self.received += len(message.get("body", b""))
        await super()._send({**message, "body": b""})
        if self.received > 1_000_000:
            await self.reads.wait()


def _call(gateway: StubGateway) -> _Counting:
    headers = {"authorization": f"Bearer {gateway.key}"}
    return _Counting(gateway.app, "POST", "/v1/completions", headers, [json.dumps(ASK).encode()])


@pytest.mark.filterwarnings("error")
def test_the_gateway_is_flat_and_the_engine_waits_for_the_client(tmp_path: Path) -> None:
    large = _Large()
    with StubEngine(lambda _body: Script(large)) as engine:

        async def main() -> None:
            gateway = StubGateway(
                tmp_path, StubPool(engine.base_url), models=[ModelConfig(id="stub", checkpoint="org/stub")]
            )
            call = _call(gateway)
            async with asyncio.timeout(30):
                while call.received <= 1_000_000:
                    await asyncio.sleep(0.001)
            await asyncio.sleep(0.5)
            # What the sockets between them hold, and no more.
            assert large.made < PIECES // 8

            tracemalloc.start()
            call.reads.set()
            answer = await call.answer()
            _now, peak_bytes = tracemalloc.get_traced_memory()
            tracemalloc.stop()

            assert answer.whole
            assert call.received > PIECES * len(PIECE)
            assert peak_bytes < 8_000_000
            await gateway.close()

        asyncio.run(main())
