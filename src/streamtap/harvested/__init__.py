"""The files of a harvest: what lies in a run's folder, written last by its manifest and read by the prompt.

::

    shard_00000.safetensors …, stats.safetensors ─► manifest.json ─► HarvestedRun ─► rows of prompt i

Where they lie is a ``places.Place``: a folder, an object store, or signed links.
"""
