"""No body yields a 500, whatever is in it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from streamtap.server.config import Limits
from streamtap.testing.stub_engine import Script, StubEngine, StubPool, answers, completion
from streamtap.testing.stub_gateway import StubGateway
from streamtap.wire.requests import CompletionBody

GOOD: dict[str, Any] = {"model": "stub", "prompt": "a", "max_tokens": 1}
FIELDS = sorted(CompletionBody.model_fields)
WRONG: list[Any] = [None, True, -1, 10**30, "", "x" * 1000, [], {"a": [1]}, [1.5], ["a", 1]]
RAW = [
    b"",
    b"\x00",
    b"\xff\xfe{\x00}\x00",
    b'{"prompt": NaN}',
    b'{"prompt": Infinity}',
    b'{"prompt": "a", "max_tokens": ' + b"9" * 100_000 + b"}",
    b'{"prompt": "a", "temperature": 1e999999}',
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b'{"prompt": "' + b"a" * 10_000_000 + b'"}',
    b'{"prompt": "' + b"\\u0000" * 1000 + b'", "max_tokens": 1}',
    b'{"prompt": "a", "prompt": "b", "max_tokens": 1}',
    b'{"\xf0\x9f": 1}',
    b'"prompt"',
    b"null",
    b"{}" * 2,
]


def _bodies() -> Iterator[bytes]:
    yield from RAW
    for field in FIELDS:
        for wrong in WRONG:
            yield json.dumps(GOOD | {field: wrong}).encode()


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from([*FIELDS, "shape", "data"]), inner, max_size=4)
    ),
    max_leaves=12,
)


def _said(body: Mapping[str, Any]) -> Script:
    if body["stream"]:
        usage = b'data: {"choices":[],"usage":{"prompt_tokens":2,"completion_tokens":1}}\n\n'
        return Script([usage, b"data: [DONE]\n\n"], media="text/event-stream")
    if "output_residual_stream" in body.get("vllm_xargs", {}):
        return answers({"error": {"message": "no rows from a stub", "code": "invalid_request"}}, status=400)
    return answers(completion())


def _statuses(folder: Path, bodies: list[bytes]) -> list[int]:
    with StubEngine(_said) as engine:

        async def main() -> list[int]:
            limits = Limits(rate_per_minute=0, max_body_bytes=20_000_000)
            gateway = StubGateway(folder, StubPool(engine.base_url), limits=limits)
            found = [(await gateway.ask(body)) for body in bodies]
            assert all(answer.whole and "x-request-id" in answer.headers for answer in found)
            assert gateway.usage["requests"]["active"]["now"] == 0
            await gateway.close()
            return [answer.status for answer in found]

        return asyncio.run(main())


def test_bodies_that_somebody_might_send(tmp_path: Path) -> None:
    bodies = list(_bodies())

    statuses = _statuses(tmp_path, bodies)

    assert {status for status in statuses if status != 200} == {400}
    assert statuses.count(200) > 10  # nulls, and values that happen to be right


@settings(
    max_examples=5,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(bodies=st.lists(st.dictionaries(st.sampled_from(FIELDS), _json, max_size=6) | _json, min_size=20, max_size=20))
def test_bodies_that_nobody_would_think_of(bodies: list[Any], tmp_path: Path) -> None:
    statuses = _statuses(tmp_path, [json.dumps(body).encode("utf-8", "surrogatepass") for body in bodies])

    assert set(statuses) <= {200, 400}
