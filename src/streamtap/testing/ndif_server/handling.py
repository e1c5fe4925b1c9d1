"""The stand-in's HTTP: requests to calls, and what comes of those to answers."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any

from nnsight.schema.request import RequestModel

from streamtap.errors import InvalidInput
from streamtap.testing.ndif_server.forms import form_parts
from streamtap.testing.ndif_server.sockets import ClientSocket, accept_key

if TYPE_CHECKING:
    from streamtap.testing.ndif_server.server import NdifServer


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    # The words of a job are small, and each is to go out at once.
    wbufsize = 0
    disable_nagle_algorithm = True

    def __init__(self, ndif: NdifServer, *arguments: Any) -> None:
        self._ndif = ndif
        super().__init__(*arguments)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Say nothing."""

    def do_POST(self) -> None:
        """Take a job."""
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path != "/request":
            self._problem(404, "Not Found")
            return
        refused = self._ndif.refusal(self.headers.get("ndif-api-key"))
        fault = None if refused else self._ndif.next_fault()
        if fault is not None and fault.kind == "http":
            refused = fault.status, fault.said
        if refused:
            self._problem(*refused)
            return
        try:
            parts = form_parts(self.headers.get("Content-Type", ""), body)
            request = RequestModel.model_validate_json(parts["data"])
        except (InvalidInput, ValueError, KeyError) as error:
            self._problem(422, str(error))
            return
        self._answer(200, "application/json", self._ndif.take(request, parts["blob"], fault).encode())

    def do_GET(self) -> None:
        """Open a socket, or tell of a job."""
        kind, _, job = self.path.strip("/").partition("/")
        if kind == "subscribe" and self.headers.get("Sec-WebSocket-Key"):
            self._subscribe()
        elif kind == "response" and (word := self._ndif.response(job)) is not None:
            self._answer(200, "application/json", word.encode())
        elif kind == "result" and (blob := self._ndif.result(job)) is not None:
            self._answer(200, "application/octet-stream", blob)
        else:
            self._problem(404, "Not Found")

    def _subscribe(self) -> None:
        self.send_response(101)
        self.send_header("Upgrade", "websocket")
        self.send_header("Connection", "Upgrade")
        self.send_header("Sec-WebSocket-Accept", accept_key(self.headers["Sec-WebSocket-Key"]))
        self.end_headers()
        self.close_connection = True
        client = ClientSocket(self.connection, self.rfile)
        session = self._ndif.subscribe(client)
        client.wait()
        self._ndif.leave(session)

    def _problem(self, status: int, said: str) -> None:
        self._answer(status, "application/json", json.dumps({"detail": said}).encode())

    def _answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
