"""Run a model: one protocol over all that can, and the engine that runs one in this process."""
