"""HTTP bodies, shared by both ends: what OpenAI and this service call things on the wire."""
