"""Completions from a model in this process: many sequences at once, each as if it were alone."""
