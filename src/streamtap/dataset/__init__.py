"""The portable format of activations: a Parquet index, safetensors shards, and a manifest that makes them whole."""
