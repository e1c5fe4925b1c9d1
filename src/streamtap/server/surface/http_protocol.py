"""HTTP as uvicorn reads it, with what it says of a request that is none in our words, and an end to endless headers."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from streamtap.errors import InvalidInput
from streamtap.server.surface.problems import problem
from streamtap.server.surface.request_ids import HEADER, new_request_id
from streamtap.server.surface.trace import Trace

#: More than any client sends; a piece that comes at once has a quarter of it at most, and may be of the body already.
_MOST_HEAD_BYTES = 1024 * 1024


class Protocol(HttpToolsProtocol):
    """One connection."""

    _in_head = True
    _head_bytes = 0

    def data_received(self, data: bytes) -> None:
        """Some bytes of requests came."""
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > _MOST_HEAD_BYTES:
                self.send_400_response("")
                return
        super().data_received(data)

    def on_headers_complete(self) -> None:
        """The body follows."""
        self._in_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Another request may follow."""
        self._in_head, self._head_bytes = True, 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no request, and end the connection, for nobody knows where the next one begins."""
        if self.cycle is None or not self.cycle.response_started or self.cycle.response_complete:
            self.transport.write(_refusal())
        self.transport.close()


def _refusal() -> bytes:
    request_id = new_request_id()
    error = InvalidInput("this is not HTTP/1.1 as the service reads it; check the request's first line and headers.")
    _, headers, body = problem(error, Trace(request_id, "other", "", 0.0))
    told = [*headers, (HEADER, request_id.encode()), (b"connection", b"close")]
    return b"".join([b"HTTP/1.1 400 Bad Request\r\n", *(b"%b: %b\r\n" % each for each in told), b"\r\n", body])
