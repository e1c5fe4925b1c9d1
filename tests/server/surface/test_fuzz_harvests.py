"""No body of a bulk job yields a 500, whatever is in it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from streamtap.server.config import Limits
from streamtap.wire.harvest import HarvestBody

GOOD: dict[str, Any] = {"model": "stub", "prompts": ["ab", "c"]}
FIELDS = sorted(HarvestBody.model_fields)
WRONG: list[Any] = [
    None,
    True,
    -1,
    0,
    10**30,
    "",
    "x" * 1000,
    "last",
    [],
    {"a": [1]},
    [1.5],
    ["a", 1],
    [[1]],
    [0],
    [-1],
]
ONTO = {"data": "AACAPw==", "dtype": "float32", "shape": [1, 1], "compression": "none"}
RAW = [
    b"",
    b"\x00",
    b"null",
    b'{"prompts": NaN}',
    b"[" * 100_000,
    b'{"prompts":' * 100_000,
    b'{"model": "stub", "prompts": ["' + b"a" * 10_000_000 + b'"]}',
    b'{"model": "stub", "prompts": ["' + b"\\u0000" * 1000 + b'"]}',
    b'{"model": "stub", "prompts": [' + b",".join([b'"a"'] * 100_000) + b"]}",
    b'{"model": "stub", "prompts": [[' + b",".join([b"5"] * 3_000_000) + b"]]}",
    b'{"model": "stub", "prompts": ["a"], "prompts": "b"}',
]
LIMITS = Limits(rate_per_minute=0, max_body_bytes=20_000_000, small_harvests_per_key=10**6)


def _bodies() -> Iterator[bytes]:
    yield from RAW
    for field in FIELDS:
        for wrong in WRONG:
            yield json.dumps(GOOD | {field: wrong}).encode()
    for field in ONTO:
        for wrong in WRONG:
            yield json.dumps(GOOD | {"project_onto": ONTO | {field: wrong}}).encode()


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from([*FIELDS, *ONTO]), inner, max_size=4),
    max_leaves=12,
)


def _statuses(with_gateway: Callable[..., None], bodies: list[bytes]) -> list[int]:
    found: list[int] = []

    async def act(gateway: Any) -> None:
        before = len(gateway.store.input_ids())
        for body in bodies:
            answer = await gateway.submit(body)
            assert answer.whole
            assert "x-request-id" in answer.headers
            assert answer.status == 202 or answer.json["error"]["message"]
            found.append(answer.status)
        assert gateway.usage["requests"]["active"]["now"] == 0
        assert len(gateway.store.input_ids()) - before == found.count(202)

    with_gateway(act, limits=LIMITS)
    return found


def test_bodies_that_somebody_might_send(with_gateway: Callable[..., None]) -> None:
    statuses = _statuses(with_gateway, list(_bodies()))

    assert set(statuses) == {202, 400, 413}
    assert statuses.count(202) > 10  # nulls, and values that happen to be right


@settings(
    max_examples=5,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(bodies=st.lists(st.dictionaries(st.sampled_from(FIELDS), _json, max_size=6) | _json, min_size=20, max_size=20))
def test_bodies_that_nobody_would_think_of(bodies: list[Any], with_gateway: Callable[..., None]) -> None:
    raw = [json.dumps(body).encode("utf-8", "surrogatepass") for body in bodies]

    assert set(_statuses(with_gateway, raw)) <= {202, 400}
