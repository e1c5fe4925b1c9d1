"""The dataset card: made from the manifest, so that it says what is there."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from streamtap.dataset.manifest import Hidden, Manifest
from streamtap.dataset.names import INDEX, hidden_file, hidden_key

# The Hub's own steps.
_SIZES = ((1e3, "n<1K"), (1e4, "1K<n<10K"), (1e5, "10K<n<100K"), (1e6, "100K<n<1M"), (1e7, "1M<n<10M"))


def make_card(manifest: Manifest, description: str | None, license_name: str, name: str) -> str:
    """A README.md with the Hub's YAML head: what was captured, from which model, and how to load it.

    Args:
        manifest: What the dataset holds.
        description: The owner's words, put first.
        license_name: The Hub's identifier of a licence.
        name: What loaders are to call the dataset.
    """
    parts = ["---", *_head(manifest, license_name), "---", "", f"# Activations of {manifest.model}", ""]
    if description:
        parts += [description.strip(), ""]
    parts += ["| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in _facts(manifest)), ""]
    parts += [*_how_to_load(manifest, name)]
    return "\n".join(parts)


def _head(manifest: Manifest, license_name: str) -> Iterator[str]:
    yield f"license: {json.dumps(license_name, ensure_ascii=False)}"
    yield f"pretty_name: {json.dumps(f'Activations of {manifest.model}', ensure_ascii=False)}"
    yield "tags:"
    yield from (f"- {tag}" for tag in ("activations", "residual-stream", "interpretability", "streamtap", "lmprobe"))
    yield "size_categories:"
    yield f"- {next((label for most, label in _SIZES if manifest.n_prompts < most), 'n>10M')}"
    yield "configs:"
    yield "- config_name: default"
    yield "  data_files:"
    yield "  - split: train"
    # The index alone: a loader that took the shards for tables would fail on them.
    yield "    path: index/*.parquet"


def _facts(manifest: Manifest) -> Iterator[tuple[str, str]]:
    yield "model", f"`{manifest.model}`"
    yield "commit", f"`{manifest.commit}`" if manifest.commit else "not recorded"
    yield "prompts", f"{manifest.n_prompts}, in {'random' if manifest.ordering == 'random' else 'the given'} order"
    if manifest.hidden is not None:
        yield from _hidden_facts(manifest.hidden)
    positions = manifest.capture.get("identity", {}).get("positions", "all")
    if positions != "all":
        yield "positions", f"only {positions}"
    if manifest.logits is not None:
        yield "logits", f"the {manifest.logits.k} largest of the last position, raw"
    total = sum(each.size_bytes for each in manifest.files.values())
    if total:
        yield "size", f"{total / 1e6:.1f} MB in {len(manifest.files)} files"


def _hidden_facts(hidden: Hidden) -> Iterator[tuple[str, str]]:
    yield "what", "the residual stream: layer k is the output of block k (from 0), before the final norm"
    yield "layers", _ranges(hidden.layers)
    yield "rows", "one a token" if hidden.pooling is None else f"one a prompt, pooling `{hidden.pooling}`"
    yield "hidden", str(hidden.width)
    yield "dtype", hidden.dtype


def _how_to_load(manifest: Manifest, name: str) -> Iterator[str]:
    if manifest.hidden is None:
        return
    layer, hidden = manifest.hidden.layers[len(manifest.hidden.layers) // 2], manifest.hidden
    yield from ("## Load it", "", "No model is needed. With Streamtap (`pip install 'streamtap[hub]'`):", "")
    yield from _code(
        "from streamtap import load_activations",
        "",
        f"acts, labels = load_activations({name!r}, layers=[{layer}], return_labels=True)",
        f"X = acts[{layer}]  # one row a prompt, [{manifest.n_prompts}, {hidden.width}] float32",
    )
    yield from (
        "",
        "With lmprobe (`pip install 'lmprobe[hub]'`): the same two lines, `from lmprobe import load_activations`.",
        "",
    )
    yield from _plain_way(hidden, layer)
    if hidden.pooling is None:
        yield from (
            "",
            "`shard_index` and `row_offset` find a prompt's last token; the lists `token_shard_ids` and "
            "`token_shard_offsets` find all of its tokens, in their order.",
        )
    yield ""


def _plain_way(hidden: Hidden, layer: int) -> Iterator[str]:
    n_shards = hidden.last_token_shards or len(hidden.shards)
    files = hidden_file(layer, 0).replace("shard000", "shard{i:03d}")
    # numpy has no bfloat16 of its own.
    library, stack = ("torch", "torch.stack") if hidden.dtype == "bfloat16" else ("numpy", "np.stack")
    alone = "pyarrow, safetensors and torch" if library == "torch" else "pyarrow and safetensors alone"
    yield from (f"With {alone}, in the folder of the downloaded dataset:", "")
    yield from _code(
        "import torch" if library == "torch" else "import numpy as np",
        "import pyarrow.parquet as pq",
        f"from safetensors.{library} import load_file",
        "",
        f'index = pq.read_table("{INDEX}")',
        f'shards = [load_file(f"{files}")["{hidden_key(layer)}"] for i in range({n_shards})]',
        'places = zip(index["shard_index"].to_pylist(), index["row_offset"].to_pylist())',
        f"X = {stack}([shards[shard][row] for shard, row in places])  # in the order of the index",
    )


def _code(*lines: str) -> Iterator[str]:
    yield from ("```python", *lines, "```")


def _ranges(numbers: Sequence[int]) -> str:
    ordered = sorted(numbers)
    if ordered == list(range(ordered[0], ordered[-1] + 1)) and len(ordered) > 2:
        return f"{ordered[0]} to {ordered[-1]}"
    return ", ".join(map(str, ordered))
