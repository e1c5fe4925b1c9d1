"""From the engine to the client: bytes that pass through, checked on the way and never held."""
