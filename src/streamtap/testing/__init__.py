"""For the tests of Streamtap and of what is built on it: tiny models, a reference, the engines' suite, a local Hub."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streamtap.testing.engine_suite import EngineSubject, EngineSuite, PlainReference
    from streamtap.testing.fake_engine import FakeEngine
    from streamtap.testing.hub_server import HubServer, online_client

__all__ = ["EngineSubject", "EngineSuite", "FakeEngine", "HubServer", "PlainReference", "online_client"]

_HOMES = {
    "EngineSubject": "streamtap.testing.engine_suite",
    "EngineSuite": "streamtap.testing.engine_suite",
    "FakeEngine": "streamtap.testing.fake_engine",
    "HubServer": "streamtap.testing.hub_server",
    "PlainReference": "streamtap.testing.engine_suite",
    "online_client": "streamtap.testing.hub_server",
}


def __getattr__(name: str) -> Any:
    """Load a name from its module on first use, for some need torch and some a web server."""
    if name not in _HOMES:
        raise AttributeError(f"module 'streamtap.testing' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
