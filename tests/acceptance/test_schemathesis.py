"""Schemathesis over the live ``/openapi.json``: whatever it sends, the answers are those that the document promises."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    ignored_auth,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

pytestmark = pytest.mark.xdist_group("schemathesis")

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    unsupported_method,
    ignored_auth,
    negative_data_rejection,
]
#: How often each operation is asked as the document wants it, and otherwise, where there is anything to get wrong.
OPERATIONS = {
    "POST /v1/completions": (100, 100),
    "POST /v1/chat/completions": (1, 0),
    "GET /v1/models": (2, 2),
    "GET /v1/models/{model_id}/status": (5, 5),
    "GET /v1/usage": (2, 2),
    "POST /v1/harvest": (50, 50),
    "GET /v1/harvest": (2, 2),
    "GET /v1/harvest/{job_id}": (5, 10),
    "DELETE /v1/harvest/{job_id}": (5, 5),
    "GET /v1/harvest/files/{run_id}/{name}": (5, 10),
    "GET /health": (1, 0),
    "GET /metrics": (1, 0),
}
MODES = {"right": GenerationMode.POSITIVE, "wrong": GenerationMode.NEGATIVE}
ASKED = [(label, mode, n) for label, times in OPERATIONS.items() for mode, n in zip(MODES, times, strict=True) if n]


@pytest.fixture(scope="module")
def service(start_lasting_service: Any, fake: Any) -> Any:
    """A gateway over warm engines."""
    found = start_lasting_service(fake())
    for more in ({}, {"output_residual_stream": True}):
        found.complete(prompt=[0, 69], max_tokens=1, **more)
    return found


@pytest.fixture(scope="module")
def schema(service: Any) -> Any:
    return schemathesis.openapi.from_url(service.base_url.removesuffix("/v1") + "/openapi.json")


def test_the_document_names_every_operation(schema: Any) -> None:
    assert {operation.ok().label for operation in schema.get_all_operations()} == set(OPERATIONS)


@pytest.mark.parametrize(("label", "mode", "n_examples"), ASKED, ids=[f"{label}, {mode}" for label, mode, _ in ASKED])
def test_answers_are_as_the_document_says(label: str, mode: str, n_examples: int, schema: Any, service: Any) -> None:
    operation = next(each.ok() for each in schema.get_all_operations() if each.ok().label == label)
    headers = {"Authorization": f"Bearer {service.key}"}
    statuses: Counter[int] = Counter()

    @settings(
        max_examples=n_examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=MODES[mode]))
    def ask(case: schemathesis.Case) -> None:
        if mode == "right" and isinstance(case.body, dict):
            case.body = _served(case.body)
        answer = case.call(headers=headers, timeout=60)
        statuses[answer.status_code] += 1
        case.validate_response(answer, checks=CHECKS, headers=headers)
        assert answer.headers.get("x-request-id")

    ask()

    assert statuses.total() >= n_examples
    if (label, mode) == ("POST /v1/completions", "right"):
        assert statuses[200] >= 20
    assert service.usage()["requests"]["active"]["now"] == 0


def _served(body: dict[str, Any]) -> dict[str, Any]:
    """The same, so that more than the checks of a body get to see it."""
    known = {name: _whole(value) for name, value in body.items() if name != "model"}
    return {"max_tokens": 2, **known}


def _whole(value: Any) -> Any:
    """JSON Schema takes 9.0 for a whole number, and we do not."""
    if isinstance(value, list):
        return [_whole(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
