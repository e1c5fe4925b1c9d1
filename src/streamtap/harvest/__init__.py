"""Bulk harvest: prompts in, shards out, resumable; here or on a cluster.

::

    prompts ─► plan (token ids, shards) ─► engine.capture, a shard at a time ─► bf16, statistics ─► shard file ─► place
    shards that are whole ─► left out;  last shard ─► statistics merged in shard order ─► manifest
"""
