"""Who is told which key: NDIF's own goes to NDIF alone, and none where others on the way could read it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from nnsight.schema.config import CONFIG

from streamtap.engines.nnsight.engine import NnsightEngine
from streamtap.engines.nnsight.remote_model import NDIF, remote_model
from streamtap.engines.opening import load_engine
from streamtap.engines.references import ModelReference
from streamtap.errors import InvalidInput, StreamtapError
from streamtap.spec import CaptureSpec
from streamtap.testing.ndif_server import NdifServer
from streamtap.testing.ndif_server.handling import Handler
from streamtap.testing.ndif_server.sockets import ClientSocket

NAME, KEY = "org/tiny", "11111111-2222-3333-4444-555555555555"
OTHER = "99999999-2222-3333-4444-555555555555"


@pytest.fixture
def known(bare_folder: Path) -> ModelReference:
    return ModelReference(NAME, bare_folder, None, "sha256:of-files")


@pytest.fixture
def told(ndif: NdifServer, monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """The keys that the stand-in is told, on its socket and with each job; it takes all of them."""
    keys: list[str | None] = []
    subscribe = Handler._subscribe

    def heard(handler: Handler) -> None:
        keys.append(handler.headers.get("ndif-api-key"))
        subscribe(handler)

    monkeypatch.setattr(Handler, "_subscribe", heard)
    monkeypatch.setattr(ndif, "refusal", keys.append)
    return keys


def run(engine: NnsightEngine) -> None:
    engine.trying(0)
    list(engine.capture([[5, 6, 7]], CaptureSpec(layers=[0])))


def test_ndifs_key_is_told_to_no_other_server(
    ndif: NdifServer, known: ModelReference, told: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NDIF_API_KEY", KEY)
    monkeypatch.setattr(CONFIG.API, "APIKEY", KEY)

    run(NnsightEngine.load(NAME, remote=ndif.url, reference=known))

    assert told == [None, None]


def test_a_key_that_is_given_is_told(ndif: NdifServer, known: ModelReference, told: list[str | None]) -> None:
    engine: Any = load_engine(NAME, backend="nnsight", remote=ndif.url, api_key=OTHER, reference=known)

    run(engine)

    assert told == [OTHER, OTHER]


@pytest.mark.parametrize("remote", [True, "by its address"])
def test_ndif_itself_gets_its_key_by_whichever_name(
    ndif: NdifServer,
    known: ModelReference,
    told: list[str | None],
    monkeypatch: pytest.MonkeyPatch,
    remote: bool | str,
) -> None:
    monkeypatch.setenv("NDIF_API_KEY", KEY)
    monkeypatch.setattr(CONFIG.API, "HOST", ndif.url)

    run(NnsightEngine.load(NAME, remote=remote if remote is True else f"{ndif.url}/", reference=known))
    run(NnsightEngine.load(NAME, remote=True, api_key=OTHER, reference=known))

    assert told == [KEY, KEY, OTHER, OTHER]


def test_a_key_goes_over_plain_http_only_to_this_machine(
    known: ModelReference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NDIF_API_KEY", KEY)

    def place(host: str, api_key: str | None = OTHER) -> Any:
        return remote_model(NAME, None, "auto", None, host, known, api_key).place

    for host in ("http://gpu.example:5000", "http://192.0.2.7", "http://127.0.0.1.example"):
        with pytest.raises(InvalidInput, match="asked over plain http.*give an https:// address") as caught:
            place(host)
        assert OTHER not in str(caught.value)
        assert place(host, None).api_key is None
    for host in ("http://localhost:5000", "http://[::1]:5000", "http://127.0.0.2", "https://gpu.example"):
        assert place(host).api_key == OTHER
    monkeypatch.setattr(CONFIG.API, "HOST", "http://gpu.example:5000")
    with pytest.raises(InvalidInput, match="asked over plain http"):
        place(NDIF, None)


def test_a_key_does_not_follow_to_where_a_server_sends(
    ndif: NdifServer, known: ModelReference, told: list[str | None], elsewhere: str
) -> None:
    with pytest.raises(StreamtapError, match="the way to 127.0.0.1"):
        run(NnsightEngine.load(NAME, remote=elsewhere, api_key=OTHER, reference=known))

    assert told == []


@pytest.fixture
def elsewhere(ndif: NdifServer) -> Iterator[str]:
    """Sends everyone on to the stand-in."""

    class Sending(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(307)
            self.send_header("Location", ndif.url.replace("http", "ws") + "/subscribe")
            self.end_headers()

        log_message: Any = lambda *_said: None

    with ThreadingHTTPServer(("127.0.0.1", 0), Sending) as server:
        thread = threading.Thread(target=partial(server.serve_forever, poll_interval=0.02))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_a_key_is_not_shown(
    ndif: NdifServer, known: ModelReference, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = remote_model(NAME, None, "auto", None, ndif.url, known, OTHER).place
    monkeypatch.setattr(NdifServer, "subscribe", lambda _server, client: _said(client, f"who is {OTHER}?"))
    engine = NnsightEngine.load(NAME, remote=ndif.url, api_key=OTHER, reference=known)
    engine.patience = type(engine.patience)(1, lambda _seconds: None)

    with caplog.at_level(logging.DEBUG), pytest.raises(StreamtapError) as caught:
        list(engine.capture([[5, 6, 7]], CaptureSpec(layers=[0])))

    assert OTHER not in repr(place) + repr(engine.provenance) + str(caught.value)
    assert "asking again" in caplog.text
    assert OTHER not in caplog.text


def _said(client: ClientSocket, word: str) -> str:
    client.send(word)
    return ""
