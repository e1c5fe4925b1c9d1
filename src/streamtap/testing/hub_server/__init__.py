"""A local Hugging Face Hub that the real client talks to."""

from streamtap.testing.hub_server.client import online_client
from streamtap.testing.hub_server.faults import Fault
from streamtap.testing.hub_server.repository import Commit
from streamtap.testing.hub_server.server import HubServer
from streamtap.testing.hub_server.watching import HubRequest

__all__ = ["Commit", "Fault", "HubRequest", "HubServer", "online_client"]
