"""The researcher's objects: the cache of a model's activations, probes, sweeps and what they print."""
