"""Ports of this machine that engines listen on."""

from __future__ import annotations

import socket

HOST = "127.0.0.1"


def free_port() -> int:
    """A port that nobody listens on now; another program may still take it."""
    with socket.socket() as held:
        held.bind((HOST, 0))
        return int(held.getsockname()[1])


def is_taken(port: int) -> bool:
    """Whether somebody listens on ``port``."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return True
    return False
