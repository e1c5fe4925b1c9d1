"""What an engine process is asked over HTTP, and how its answers are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import urlsplit

from numpy.typing import NDArray

from streamtap.client.answers import Answer, may_hold_an_error, media_type, read_mapping
from streamtap.client.calls import JSON, Call
from streamtap.client.plans import Plan
from streamtap.client.sync import Client
from streamtap.completion import CaptureAsk, CapturedPositions, CompletionRequest, Sampling
from streamtap.engines.vllm import to_dialect, to_vllm
from streamtap.errors import CaptureMissed, InvalidInput
from streamtap.wire.completions import read_completion, read_safetensors
from streamtap.wire.reading import write_json
from streamtap.wire.safetensors_body import MEDIA_TYPE

T = TypeVar("T")

_GREEDY = Sampling(temperature=0.0)
_OURS = "streamtap"


@dataclass(frozen=True)
class ServedProcess:
    """A model as an engine process lists it; ``facts`` is the whole entry."""

    name: str
    is_ours: bool
    facts: Mapping[str, Any] = field(repr=False)

    def number(self, fact: str) -> int | None:
        """A whole number of the entry, or None."""
        found = self.facts.get(fact)
        return found if isinstance(found, int) and not isinstance(found, bool) else None

    def text(self, fact: str) -> str | None:
        """A text of the entry, or None."""
        found = self.facts.get(fact)
        return found if isinstance(found, str) and found else None


def address_of(url: str) -> str:
    """The base address that calls are put behind; it ends in ``/v1``.

    Raises:
        InvalidInput: it is no address, or holds a user or a key.
    """
    plain = url.strip()
    try:
        parts = urlsplit(plain)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    # It is not shown, for what stands there may be a key.
    if not is_address or "@" in plain or "?" in plain or "#" in plain:
        raise InvalidInput("an engine's address is http:// or https:// and a host, such as http://127.0.0.1:8000.")
    return plain.rstrip("/").removesuffix("/v1").rstrip("/") + "/v1"


def served_process(client: Client, name: str | None) -> ServedProcess:
    """The model ``name`` of the process, or the only one that it serves.

    Raises:
        InvalidInput: there is none of that name, or there are several and none was named.
        StreamtapError: what the process, or the way to it, reports.
    """
    listed = {str(entry.get("id")): entry for entry in client.models()}
    if name is None and len(listed) == 1:
        name = next(iter(listed))
    if name is None or name not in listed:
        asked = "several models, and none was named" if name is None else f"no model {name!r}"
        raise InvalidInput(f"the engine serves {asked}; it has {', '.join(map(repr, listed)) or 'none'}.")
    return ServedProcess(name, listed[name].get("owned_by") == _OURS, listed[name])


def capture_call(
    process: ServedProcess,
    token_ids: Sequence[int],
    layers: tuple[int, ...],
    positions: CapturedPositions,
    dtype: str,
) -> Call[NDArray[Any]]:
    """The rows of one prompt, [layers, rows, hidden]; ``dtype`` is that of rows from a process of ours.

    Any other gives the dtype that it computes in, and draws a token in any case.
    """
    request = CompletionRequest(
        prompts=(tuple(token_ids),),
        max_tokens=0 if process.is_ours else 1,
        sampling=_GREEDY,
        capture=CaptureAsk(layers, positions, "bfloat16" if dtype == "bfloat16" else "float32"),
    )
    written = to_dialect if process.is_ours else to_vllm
    body = written(request, model=process.name, stream=False, include_usage=False)

    def read(answer: Answer) -> NDArray[Any]:
        return _rows(answer, layers)

    return Call("POST", "/completions", read, write_json(body), f"{MEDIA_TYPE}, {JSON};q=0.5")


def planned(call: Call[T]) -> Plan[T]:
    """A plan of one call, which is how a client takes a call that is not one of its own."""
    found: T = yield call
    return found


def _rows(answer: Answer, layers: tuple[int, ...]) -> NDArray[Any]:
    if answer.status == 200 and media_type(answer.headers) == MEDIA_TYPE:
        completion = read_safetensors(answer.body, layers=layers)
    else:
        document = read_mapping(answer) if may_hold_an_error(answer) else answer.body
        completion = read_completion(document, layers=layers)
    rows = completion.choices[0].rows
    if rows is None:
        raise CaptureMissed(
            "the engine answered without rows; is it a vLLM whose vllm-lens is missing or switched off?",
            layer=layers[0],
        )
    return rows.values
