"""The stand-in of NDIF is honest: it runs what it is sent, on the model, and on nothing that a server lacks."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
import torch
from nnsight.intervention.backends.remote import RemoteBackend, RemoteError
from nnsight.schema.config import CONFIG

from streamtap.layers import resolve_layers
from streamtap.testing.models import tiny_model
from streamtap.testing.ndif_server import NdifServer, Served
from streamtap.testing.ndif_server.forms import form_parts
from streamtap.testing.ndif_server.sockets import accept_key, frame, read_frame
from streamtap.testing.tokenizers import tiny_tokenizer

MODEL_KEY = 'nnsight.modeling.transformers.TransformersModel:{"repo_id": "org/tiny", "revision": null}'
IDS = torch.tensor([[5, 6, 7, 8]])


@pytest.fixture(scope="module")
def served() -> Served:
    return Served.over(tiny_model("llama"), tiny_tokenizer())


@pytest.fixture(scope="module")
def ndif(served: Served) -> Iterator[NdifServer]:
    with NdifServer({"org/tiny": served}) as server:
        yield server


def backend_of(ndif: NdifServer, **options: Any) -> Any:
    backend = RemoteBackend(MODEL_KEY, host=ndif.url, **options)
    backend.display.enabled = False
    return backend


@pytest.fixture
def client() -> Any:
    """Another copy of the model, with other weights: what comes back cannot have been made here."""
    return Served.over(tiny_model("llama", seed=5), tiny_tokenizer()).model


def test_nnsights_own_client_gets_the_values_of_the_model_that_is_served(
    ndif: NdifServer, client: Any, served: Served
) -> None:
    logits = stream = None
    with client.trace(input_ids=IDS, backend=backend_of(ndif)):
        stream = client.model.layers[1].output.save()
        logits = client.output.logits.save()

    right = served.model._module(input_ids=IDS, use_cache=False).logits
    assert logits is not None
    assert stream is not None
    assert torch.allclose(logits, right, atol=1e-5)
    assert stream.shape == (1, 4, 32)
    assert not torch.allclose(logits, client._module(input_ids=IDS, use_cache=False).logits, atol=1e-2)


def test_an_intervention_changes_what_comes_after_it(ndif: NdifServer, client: Any) -> None:
    logits = None
    with client.trace(input_ids=IDS, backend=backend_of(ndif)):
        client.model.layers[1].output[:] = 0
        logits = client.output.logits.save()

    assert logits is not None
    assert torch.allclose(logits[0, 0], logits[0, -1], atol=1e-4)


def test_a_job_that_nobody_subscribed_to_is_polled(ndif: NdifServer, client: Any, served: Served) -> None:
    backend = backend_of(ndif, blocking=False)
    with client.trace(input_ids=IDS, backend=backend):
        last = client.output.logits[:, -1].save()  # noqa: F841 - it comes back by this name

    deadline, saved = time.monotonic() + 30, None
    while saved is None and time.monotonic() < deadline:
        saved = backend.poll()
        time.sleep(0.02)

    assert saved is not None
    right = served.model._module(input_ids=IDS, use_cache=False).logits[:, -1]
    assert torch.allclose(saved["last"], right, atol=1e-5)
    assert httpx2.get(f"{ndif.url}/response/nobody").status_code == 404


def test_an_error_inside_a_trace_is_the_jobs(ndif: NdifServer, client: Any) -> None:
    with pytest.raises(RemoteError, match="out of range|index"), client.trace(input_ids=IDS, backend=backend_of(ndif)):
        client.model.layers[0].output[:, 99].save()


def test_what_no_server_has_is_not_found(ndif: NdifServer, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import cloudpickle.cloudpickle as pickling

    monkeypatch.setattr(pickling, "_PICKLE_BY_VALUE_MODULES", set())
    monkeypatch.setattr("nnsight.ndif._PULLED_ENV", True)  # as for a Streamtap that is installed, and not a folder

    with (
        pytest.raises(RemoteError, match="No module named 'streamtap'"),
        client.trace(input_ids=IDS, backend=backend_of(ndif)),
    ):
        client.model.layers[resolve_layers(0, 3)[0]].output.save()


def test_results_come_uncompressed_where_the_client_asks_for_that(
    ndif: NdifServer, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CONFIG.API, "COMPRESS", False)
    stream = None
    with client.trace(input_ids=IDS, backend=backend_of(ndif)):
        stream = client.model.layers[0].output.save()

    assert stream is not None
    assert ndif.jobs[-1].result_bytes > stream.numel() * 4


def test_requests_that_are_none_are_refused(ndif: NdifServer) -> None:
    assert httpx2.post(f"{ndif.url}/request", content=b"?").status_code == 422
    assert httpx2.post(f"{ndif.url}/elsewhere", content=b"?").status_code == 404
    assert httpx2.get(f"{ndif.url}/subscribe").status_code == 404
    assert httpx2.get(f"{ndif.url}/result/nobody").status_code == 404


def test_clients_that_leave_while_it_stops_do_not_disturb_it() -> None:
    class Leaving:
        """Gone at once when it is closed, as a thread of the server's may find it."""

        closed = False

        def send(self, word: str) -> None:
            self.session = json.loads(word)["session_id"]

        def close(self) -> None:
            server.leave(self.session)
            self.closed = True

    server = NdifServer({}).start()
    clients = [Leaving(), Leaving()]
    for client in clients:
        server.subscribe(client)  # type: ignore[arg-type]

    server.stop()

    assert all(client.closed for client in clients)


def test_parts_of_a_form_come_back_to_the_byte() -> None:
    blob = bytes(range(256)) * 3 + b"\r\n\r\n--x\r\n"
    body = b'--bound\r\nContent-Disposition: form-data; name="data"\r\n\r\n{}\r\n--bound\r\n'
    body += b'Content-Disposition: form-data; name="blob"; filename="request"\r\n\r\n' + blob + b"\r\n--bound--\r\n"

    assert form_parts("multipart/form-data; boundary=bound", body) == {"data": b"{}", "blob": blob}


def test_frames_are_those_of_the_standard() -> None:
    assert accept_key("dGhlIHNhbXBsZSBub25jZQ==") == "s3pPLMBiTxaQ9kYGzzhZRbK+xOo="  # RFC 6455, 1.3
    assert frame(b"Hello", 1) == bytes.fromhex("810548656c6c6f")  # 5.7
    assert frame(bytes(256), 2)[:4] == bytes.fromhex("827e0100")
    assert frame(bytes(65536), 2)[:10] == bytes.fromhex("827f0000000000010000")
    masked = io.BytesIO(bytes.fromhex("818537fa213d7f9f4d5158"))
    assert read_frame(masked) == (1, b"Hello")
    assert read_frame(masked) is None
