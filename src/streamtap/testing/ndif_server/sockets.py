"""The server's side of a websocket, as much of RFC 6455 as NDIF needs: words of the server to one client."""

from __future__ import annotations

import base64
import hashlib
import socket
import struct
import threading
from contextlib import suppress
from typing import Protocol

#: The code of a goodbye: the service starts anew.
_RESTARTING = 1012
_MAGIC = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_TEXT, _BINARY, _CLOSE, _PING, _PONG = 1, 2, 8, 9, 10
_FINAL, _KIND, _SIZE = 0x80, 0x0F, 0x7F
_MASK_BYTES = 4


class Heard(Protocol):
    """What comes from a client."""

    def read(self, size: int, /) -> bytes:
        """So many bytes, or fewer where no more come."""
        ...


def accept_key(key: str) -> str:
    """What a handshake with ``Sec-WebSocket-Key: key`` is answered with."""
    return base64.b64encode(hashlib.sha1(key.encode() + _MAGIC).digest()).decode()


def frame(payload: bytes, kind: int) -> bytes:
    """One unmasked frame that is a whole message."""
    length = len(payload)
    if length < 126:
        size = bytes([length])
    elif length < 1 << 16:
        size = b"\x7e" + struct.pack(">H", length)
    else:
        size = b"\x7f" + struct.pack(">Q", length)
    return bytes([_FINAL | kind]) + size + payload


def read_frame(stream: Heard) -> tuple[int, bytes] | None:
    """The next frame of a client as kind and payload; None where the client is gone."""
    head = stream.read(2)
    if len(head) < 2:
        return None
    size = head[1] & _SIZE
    if size > 125:
        form = ">H" if size == 126 else ">Q"
        size = struct.unpack(form, stream.read(struct.calcsize(form)))[0]
    mask, masked = stream.read(_MASK_BYTES), stream.read(size)
    return head[0] & _KIND, bytes(byte ^ mask[i % _MASK_BYTES] for i, byte in enumerate(masked))


class ClientSocket:
    """A client that listens; of what it says only pings and its goodbye are answered."""

    def __init__(self, connection: socket.socket, heard: Heard) -> None:
        self._connection, self._heard = connection, heard
        self._lock = threading.Lock()

    def send(self, message: str | bytes) -> int:
        """Say ``message`` and give how many bytes went out; to a client that is gone nothing is said."""
        kind, payload = (_TEXT, message.encode()) if isinstance(message, str) else (_BINARY, message)
        return self._send(payload, kind)

    def wait(self) -> None:
        """Return once the client has gone, or has said goodbye."""
        while (said := self._next()) is not None:
            kind, payload = said
            if kind == _PING:
                self._send(payload, _PONG)
            elif kind == _CLOSE:
                self._send(payload, _CLOSE)
                return

    def close(self) -> None:
        """End the connection without a word, as a server does that falls over."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def say_goodbye(self) -> None:
        """Close as a server does that is started anew: with a word of it, which the client answers."""
        self._send(struct.pack(">H", _RESTARTING), _CLOSE)

    def _next(self) -> tuple[int, bytes] | None:
        with suppress(OSError, struct.error):
            return read_frame(self._heard)
        return None

    def _send(self, payload: bytes, kind: int) -> int:
        whole = frame(payload, kind)
        with suppress(OSError), self._lock:
            self._connection.sendall(whole)
            return len(whole)
        return 0
