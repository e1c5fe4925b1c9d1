"""POST /v1/completions: plain ASGI, for it streams and must see a client leave."""

from __future__ import annotations

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from streamtap.errors import StreamtapError
from streamtap.server import checks
from streamtap.server.admission import Account
from streamtap.server.answering import Answering
from streamtap.server.checks import Plan
from streamtap.server.engine_call import EngineCall
from streamtap.server.service import Service
from streamtap.server.surface.bodies import header, presented_key, read_limited
from streamtap.server.surface.problems import as_known
from streamtap.server.surface.reply import Kind, Reply
from streamtap.server.surface.trace import Trace, trace_of
from streamtap.wire.requests import read_body
from streamtap.wire.safetensors_body import MEDIA_TYPE

SCOPE = "completions"
_CLAMPED = b"x-streamtap-max-tokens-clamped"


class Completions:
    """The endpoint as an ASGI application."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        trace = trace_of(scope)
        reply = Reply(send, trace, clock=self._service.clock, timing=self._service.config.timing)
        try:
            await self._answer(scope, receive, reply, trace)
        except StreamtapError as error:
            await reply.fail(error)
        except ClientDisconnect:
            raise
        except Exception as error:
            await reply.fail(as_known(error))
            raise

    async def _answer(self, scope: Scope, receive: Receive, reply: Reply, trace: Trace) -> None:
        service = self._service
        async with await service.admission.admit(presented_key(scope["headers"]), trace, scope=SCOPE) as account:
            plan = await self._checked(scope, receive, account, trace)
            plan = await _within_budget(plan, account, reply)
            reply.kind = _kind(plan, scope)
            answering = Answering(reply, started=trace.started, clock=service.clock, timing=service.config.timing)
            call = EngineCall(service, plan, account, reply, trace)
            await answering.run(lambda: call.run(answering), receive, service.stopping)

    async def _checked(self, scope: Scope, receive: Receive, account: Account, trace: Trace) -> Plan:
        """The request as it will run; the order of these checks is part of the contract."""
        service, limits = self._service, self._service.config.limits
        raw = await read_limited(scope, receive, limits.max_body_bytes)
        body = await service.read(len(raw), read_body, raw)
        found = checks.choose_model(body, service.catalog, service.config.default.id)
        trace.model = found.config.id
        request = await service.read(len(raw), checks.read_request, body, found, limits)
        if request.capture is not None:
            await account.check_activation_quota()
        counts = await service.read(len(raw), checks.count_prompts, request, found)
        return checks.plan(body, request, found, counts, limits)


async def _within_budget(plan: Plan, account: Account, reply: Reply) -> Plan:
    grant = await account.reserve(
        model=plan.served.config.id,
        input_tokens=sum(plan.prompt_tokens),
        output_tokens=plan.output_tokens,
        activations=int(plan.request.capture is not None),
        sequences=plan.sequences,
    )
    if not grant.clamped:
        return plan
    lowered = plan.lowered(grant.output_tokens)
    reply.add_header(_CLAMPED, str(lowered.request.max_tokens).encode())
    return lowered


def _kind(plan: Plan, scope: Scope) -> Kind:
    if plan.request.stream:
        return "events"
    accepts = (header(scope["headers"], b"accept") or b"").lower()
    return "binary" if plan.request.capture is not None and MEDIA_TYPE.encode() in accepts else "json"
