"""How the files and tensors of a dataset are called, which readers of the format rely on."""

from __future__ import annotations

INDEX = "index/train-00000-of-00001.parquet"
CARD = "README.md"
#: Where the metadata of versions 1.x lies, and what later ones may have left beside it.
SIDECAR = "lmprobe_info.json"
STAGE_MARK = "_stage_complete"
FOLDERS = ("index/", "tensors/")

HIDDEN, LOGITS, ROUTER = "hidden_layers", "logits_topk", "router_logits"
LOGIT_VALUES, LOGIT_IDS = "logits_topk.values", "logits_topk.indices"

HIDDEN_PATTERN = "tensors/hidden_layer{layer:03d}_shard{shard:03d}.safetensors"
HIDDEN_KEY_PATTERN = "hidden.layer_{layer}"
LOGITS_PATTERN = "tensors/logits_topk_{shard:03d}.safetensors"


def hidden_file(layer: int, shard: int) -> str:
    """Path of the file that holds one layer of one shard."""
    return HIDDEN_PATTERN.format(layer=layer, shard=shard)


def hidden_key(layer: int) -> str:
    """Name of the tensor [rows, hidden] in it."""
    return HIDDEN_KEY_PATTERN.format(layer=layer)


def logits_file(shard: int) -> str:
    """Path of the file that holds one shard's logits."""
    return LOGITS_PATTERN.format(shard=shard)


def is_ours(path: str) -> bool:
    """Whether a path in a repository is a file of the format, which a new version of the dataset replaces."""
    return path in (CARD, SIDECAR, STAGE_MARK) or path.startswith(FOLDERS)
