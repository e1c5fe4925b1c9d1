"""``streamtap.toml``, read with the line of every fault."""
