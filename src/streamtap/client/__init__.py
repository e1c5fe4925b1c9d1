"""The SDK: one call an endpoint, blocking and async."""
