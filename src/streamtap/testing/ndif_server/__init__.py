"""A stand-in of NDIF on this machine: it runs the traces that nnsight's client sends, on models that it is given."""

from streamtap.testing.ndif_server.executing import Served
from streamtap.testing.ndif_server.server import NdifServer
from streamtap.testing.ndif_server.watching import NdifJobSeen

__all__ = ["NdifJobSeen", "NdifServer", "Served"]
