"""The line of a key: who waits, who comes next, and what a client that leaves gives back."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from streamtap.server.config import Timing
from streamtap.server.ledger.keys import KeyLimits
from streamtap.testing.stub_engine import Script, StubEngine, StubPool, answers, completion
from streamtap.testing.stub_gateway import StubGateway

ONE_AT_A_TIME = KeyLimits(max_active=1, max_waiting=10)


def _ask(name: str) -> dict[str, object]:
    return {"model": "stub", "prompt": name, "max_tokens": 1}


async def _until(condition: object) -> None:
    async with asyncio.timeout(20):
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(0.002)


def test_requests_of_a_key_wait_for_their_slot_in_the_order_they_came(tmp_path: Path) -> None:
    with StubEngine(lambda _body: Script([0.05, *answers(completion()).pieces])) as engine:

        async def main() -> None:
            gateway = StubGateway(tmp_path, StubPool(engine.base_url), key_limits=ONE_AT_A_TIME)
            calls = []
            for number, name in enumerate("abcd"):
                calls.append(gateway.begin(_ask(name)))
                await _until(
                    lambda want=number: gateway.usage["requests"]["waiting"]["now"] + bool(gateway.pool.leases) > want
                )

            assert [(await call.answer()).status for call in calls] == [200] * 4
            assert [body["prompt"] for body in engine.bodies] == list("abcd")
            await gateway.close()

        asyncio.run(main())


def test_a_request_that_waits_for_its_slot_is_kept_alive(tmp_path: Path) -> None:
    timing = Timing(first_answer_seconds=0.05, keepalive_seconds=0.05)
    with StubEngine() as engine:

        async def main() -> None:
            gateway = StubGateway(tmp_path, StubPool(engine.base_url), timing=timing, key_limits=ONE_AT_A_TIME)
            held = gateway.ledger.admit(gateway.key, scope="completions", endpoint="/", request_id="other gateway's")
            call = gateway.begin(_ask("a"))
            await call.until(lambda answer: len(answer.pieces) > 2)
            assert set(call.answered.pieces) == {b" "}

            from streamtap.server.ledger import Outcome

            # By another gateway, so that nobody here is told.
            gateway.ledger.settle(held, Outcome(status=200))
            assert (await call.answer()).json == completion()
            await gateway.close()

        asyncio.run(main())


def test_a_client_that_leaves_the_line_gives_its_place_back(tmp_path: Path) -> None:
    with StubEngine() as engine:

        async def main() -> None:
            gateway = StubGateway(tmp_path, StubPool(engine.base_url), key_limits=ONE_AT_A_TIME)
            gateway.ledger.admit(gateway.key, scope="completions", endpoint="/", request_id="first")
            call = gateway.begin(_ask("a"))
            await _until(lambda: gateway.app.state.service.admission.waiting == 1)
            call.leave()
            await call.answer()

            assert gateway.usage["requests"]["waiting"]["now"] == 0
            assert gateway.app.state.service.admission.waiting == 0
            assert gateway.usage["usage"]["monthly_input_tokens"]["used"] == 0
            assert engine.bodies == []
            await gateway.close()

        asyncio.run(main())


def test_fifty_at_once_on_a_quota_of_ten(tmp_path: Path) -> None:
    body = _ask("a") | {"output_residual_stream": [0], "output_positions": "last"}
    envelope = {"dtype": "float32", "original_dtype": "torch.float32", "shape": [1, 1, 8], "data": "AAAA"}
    with StubEngine(lambda _body: answers(completion(activations={"residual_stream": envelope}))) as engine:

        async def main() -> None:
            limits = KeyLimits(max_active=50, monthly_activations=10)
            gateway = StubGateway(tmp_path, StubPool(engine.base_url), key_limits=limits)
            calls = [gateway.begin(body) for _ in range(50)]
            statuses = sorted([(await call.answer()).status for call in calls])

            assert statuses == [200] * 10 + [429] * 40
            assert len(engine.bodies) == 10
            assert gateway.usage["usage"]["monthly_activations"]["used"] == 10
            await gateway.close()

        asyncio.run(main())


def test_less_output_than_asked_for_is_granted_and_said(tmp_path: Path) -> None:
    with StubEngine() as engine:

        async def main() -> None:
            limits = KeyLimits(monthly_output_tokens=7)
            gateway = StubGateway(tmp_path, StubPool(engine.base_url), key_limits=limits)

            answer = await gateway.ask({"prompt": ["a", "b"], "max_tokens": 100})

            assert answer.headers["x-streamtap-max-tokens-clamped"] == "3"
            assert engine.bodies[0]["max_tokens"] == 3
            assert "x-streamtap-max-tokens-clamped" not in (await gateway.ask(_ask("a"))).headers
            await gateway.close()

        asyncio.run(main())


def test_a_settlement_that_the_database_failed_to_take_is_made_up_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the key would have one slot less until the gateway is started anew."""
    with StubEngine() as engine:

        async def main() -> None:
            gateway = StubGateway(tmp_path, StubPool(engine.base_url), key_limits=ONE_AT_A_TIME)
            admission = gateway.app.state.service.admission
            with monkeypatch.context() as broken:
                broken.setattr(gateway.ledger, "settle", _fail)
                assert (await gateway.ask(_ask("a"))).status == 500
                with pytest.raises(OSError, match="the database is gone"):
                    await admission.sweep()
            assert gateway.usage["requests"]["active"]["now"] == 1

            waiting = gateway.begin(_ask("b"))
            await _until(lambda: admission.waiting == 1)
            await admission.sweep()

            assert (await waiting.answer()).status == 200
            assert gateway.usage["requests"]["active"]["now"] == 0
            # The first was answered with a failure, and so was given back.
            assert gateway.usage["usage"]["monthly_input_tokens"]["used"] == 2
            await gateway.close()

        asyncio.run(main())


def _fail(*_: object) -> None:
    raise OSError("the database is gone")


def test_a_vector_that_broke_its_own_request_is_paid_for(tmp_path: Path) -> None:
    """The engine ran it; to be refused before that is free."""
    error = {"error": {"message": "too hot", "code": "steering_not_finite"}}
    with StubEngine(lambda _body: answers(error, status=400)) as engine:

        async def main() -> None:
            gateway = StubGateway(tmp_path, StubPool(engine.base_url))

            answer = await gateway.ask(_ask("abc") | {"output_residual_stream": [0]})

            assert (answer.status, answer.code) == (400, "steering_not_finite")
            used = gateway.usage["usage"]
            assert (used["monthly_activations"]["used"], used["monthly_input_tokens"]["used"]) == (1, 4)
            assert used["monthly_output_tokens"]["used"] == 0
            await gateway.close()

        asyncio.run(main())


def test_a_position_that_less_output_no_longer_reaches_is_refused_before_the_engine(tmp_path: Path) -> None:
    with StubEngine() as engine:

        async def main() -> None:
            limits = KeyLimits(monthly_output_tokens=3)
            gateway = StubGateway(tmp_path, StubPool(engine.base_url), key_limits=limits)

            body = {"prompt": "a", "max_tokens": 10, "output_residual_stream": [0], "output_positions": [8]}
            answer = await gateway.ask(body)

            assert (answer.status, answer.code) == (400, "invalid_request")
            assert "max_tokens 3" in answer.json["error"]["message"]
            assert engine.bodies == []
            assert gateway.usage["usage"]["monthly_output_tokens"]["used"] == 0
            await gateway.close()

        asyncio.run(main())
