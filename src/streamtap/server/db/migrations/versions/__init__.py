"""One file a change of the schema; those that were released never change."""
