"""Bulk jobs of the service: a row in the database, a worker process that takes it, files behind signed links.

::

    asking ─► inputs (private) + job row ─► supervisor wakes a worker ─► claim ─► harvest.run ─► place ─► done
    A worker that dies leaves its lease to run out; another takes the job and goes on from the shards that are whole.
"""
