"""Captures through nnsight: in this process, or as jobs of NDIF, which runs models that do not fit here."""
