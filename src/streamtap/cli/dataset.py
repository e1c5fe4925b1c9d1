"""``streamtap dataset``: publish what was extracted, and load, pull, look at and look after datasets."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from streamtap.cli.options import with_options
from streamtap.cli.text import columns, counted, number_ranges, show, size

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from streamtap.dataset.inspection import DatasetInfo

_endpoint = click.option("--endpoint", help="Address of the Hub; else HF_ENDPOINT, or the public one.")
_version = click.option("--revision", help="Branch, tag or commit of the dataset on the Hub.")
_refresh = click.option("--refresh", is_flag=True, help="Ask for the newest version, not the one on this machine.")
_layers = click.option("--layers", help="16, 8-20 or 4,8,20-24; else all that are there.")
_cache_dir = click.option("--cache-dir", type=click.Path(path_type=Path), help="Folder of the cached activations.")

_COLUMNS = (
    click.option("--format", "file_format", type=click.Choice(("text", "jsonl", "csv", "tsv", "parquet"))),
    click.option("--column", help="Where the prompts are in JSONL, CSV, TSV or Parquet."),
    click.option("--label-column", help="Where the labels are."),
    click.option("--metadata-columns", help="Other columns to publish, with commas between them."),
)
_WHAT = (
    click.option("--model", default="demo", show_default=True, help="The model, as it was named when it was run."),
    *_COLUMNS,
    click.option("--limit", type=click.IntRange(min=1), help="Only the first so many prompts."),
    click.option("--tensors", help="hidden_layers, logits_topk, or both with a comma; else what the cache has."),
    click.option("--skip-missing", is_flag=True, help="Leave out prompts that the cache lacks."),
    _layers,
)
_WHICH = (
    click.option("--pooling", help="Where the cache has several, or every row."),
    click.option("--dtype", help="Where the cache has several."),
    click.option("--revision", help="Commit of the model, where the cache has several."),
    click.option("--positions", help="Which positions, in the same way, as all that follow."),
    click.option("--exclude-special-tokens/--keep-special-tokens", default=None, help="Whether they were left out."),
    click.option("--exact/--batched", default=None, help="Whether each prompt ran alone."),
    click.option("--quantization", help="Which quantisation, or none."),
    click.option("--engine", help="Which engine."),
    click.option("--tokenizer", help="Which tokenizer, by its fingerprint."),
    click.option("--generation-prompt/--no-generation-prompt", default=None, help="How chats end."),
    click.option("--truncate", type=click.Choice(("left", "right")), help="Where long prompts were cut."),
    click.option("--logit-top-k", type=click.IntRange(min=1), help="Size of the logits."),
    _cache_dir,
)
_shuffle = click.option(
    "--shuffle/--no-shuffle", default=True, show_default=True, help="Spread the prompts over the shards."
)
_HOW = (
    click.option("--description", help="First words of the dataset card."),
    click.option("--license", "license_name", default="cc-by-4.0", show_default=True, help="The Hub's identifier."),
    click.option("--private/--public", default=None, help="Visibility on the Hub; else its default."),
    click.option("--replace", is_flag=True, help="Replace another dataset that is there."),
    click.option("--stream", is_flag=True, help="Send each shard as soon as it is packed, and remove it here."),
    click.option("--shard-max-bytes", default="1GiB", show_default=True, help="Size of a shard file: 300MB, 1GiB, …"),
    _endpoint,
)


@click.group()
def dataset() -> None:
    """Publish activations, and load, pull and look at those of others.

    NAME is user/name on the Hub, a folder (./name), or an s3://, gs:// or az:// address. The Hub's token is
    that of HF_TOKEN, or the one logged in.
    """


@dataset.command()
@click.argument("name")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@with_options(_WHAT, _WHICH, (_shuffle,), _HOW)
def push(name: str, file: Path, **asked: Any) -> None:
    """Publish what the cache holds of the prompts in FILE as the dataset NAME.

    Nothing is extracted: `streamtap extract FILE` comes before. Everything becomes visible in one step; a push that was
    cut goes on when the same command is given again, and the same push again changes nothing.
    """
    from streamtap.workbench.prompt_files import read_prompts
    from streamtap.workbench.publish import push_dataset

    file_format, limit = asked.pop("file_format"), asked.pop("limit")
    prompts = read_prompts(file, file_format=file_format, column=asked.pop("column"), limit=limit)
    labels, metadata = _beside(file, asked.pop("label_column"), asked.pop("metadata_columns"), file_format, limit)
    url = push_dataset(
        name,
        asked.pop("model"),
        prompts,
        labels=labels,
        metadata=metadata,
        tensors=_listed(asked.pop("tensors")),
        shard_max_bytes=_bytes(asked.pop("shard_max_bytes")),
        exist_ok=asked.pop("replace"),
        license=asked.pop("license_name"),
        **asked,
    )
    click.echo(url)


@dataset.command("from-harvest")
@click.argument("run")
@click.option(
    "--repo", "name", required=True, help="user/name, a folder (./name), or an s3://, gs:// or az:// address."
)
@click.option("--model", help="What the harvested model is called here, for its tokenizer; else as the harvest does.")
@click.option(
    "--prompts",
    "file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The file that was harvested, for its texts, labels and other columns.",
)
@with_options(_COLUMNS, (_layers,))
@click.option("--shuffle", is_flag=True, help="Spread the prompts over the shards, instead of in their order.")
@with_options(_HOW)
def from_harvest(run: str, name: str, file: Path | None, **asked: Any) -> None:
    """Publish the harvest in RUN, a folder or an s3://, gs:// or az:// address, as the dataset that --repo names.

    A harvest keeps tokens and no texts: they are read off the tokens, or taken from the file of --prompts, and each is
    compared with its tokens.
    """
    from streamtap.workbench.from_harvest import dataset_from_harvest
    from streamtap.workbench.prompt_files import read_prompts

    reading = {key: asked.pop(key) for key in ("file_format", "column", "label_column", "metadata_columns")}
    prompts, labels, metadata = None, None, None
    if file is not None:
        kind = reading["file_format"]
        prompts = read_prompts(file, file_format=kind, column=reading["column"])
        labels, metadata = _beside(file, reading["label_column"], reading["metadata_columns"], kind, None)
    elif given := [key for key, value in reading.items() if value]:
        raise click.UsageError(
            f"--{given[0].removeprefix('file_').replace('_', '-')} tells of a file; name it with --prompts."
        )
    url = dataset_from_harvest(
        run,
        name,
        prompts,
        labels=labels,
        metadata=metadata,
        shard_max_bytes=_bytes(asked.pop("shard_max_bytes")),
        exist_ok=asked.pop("replace"),
        license=asked.pop("license_name"),
        **asked,
    )
    click.echo(url)


@dataset.command()
@click.argument("name")
@_layers
@click.option("--pooling", help="Which pooling, where every token has a row.")
@click.option("--out", type=click.Path(path_type=Path), help="Write the arrays to this .npz file.")
@_version
@_refresh
@_endpoint
def load(name: str, out: Path | None, **asked: Any) -> None:
    """Fetch one row a prompt at each layer; print the shapes, or write them to a file.

    The file holds layer_16 and the like, [prompts, hidden] float32, and labels where there are any; where some are
    null, labels are text, empty there.
    """
    from streamtap.workbench.dataset_rows import load_activations

    acts, labels = load_activations(name, return_labels=True, **asked)
    rows = [("layer", "shape", "mean norm")]
    rows += [(str(layer), " x ".join(map(str, acts[layer].shape)), _mean_norm(acts[layer])) for layer in acts]
    show(columns(rows, right=(0, 1, 2)))
    click.echo(f"labels: {_label_line(labels)}")
    if out is not None:
        _write_npz(out, acts, labels)


@dataset.command()
@click.argument("name")
@_layers
@click.option("--tensors", help="hidden_layers, logits_topk, or both with a comma; else what is there.")
@click.option("--overwrite", is_flag=True, help="Fetch the newest version, and replace rows that differ.")
@_cache_dir
@_version
@_endpoint
def pull(name: str, tensors: str | None, **asked: Any) -> None:
    """Fetch a dataset and put its rows into the cache, so that no model, tokenizer or network is needed."""
    from streamtap.workbench.pull import pull_dataset

    count = pull_dataset(name, tensors=_listed(tensors), **asked)
    click.echo(f"pulled {counted(count, 'prompt')} into the cache.")


@dataset.command()
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="Print JSON; sizes in bytes.")
@_version
@_refresh
@_endpoint
def inspect(name: str, as_json: bool, **asked: Any) -> None:
    """Print what a dataset holds and what a layer would cost to download; fetches the end of its index alone."""
    from streamtap.workbench.open_dataset import fetch_dataset_metadata

    found = fetch_dataset_metadata(name, **asked)
    if as_json:
        click.echo(json.dumps(_as_json(found), indent=2))
    else:
        show(columns(list(_facts(found))))


@dataset.command()
@click.argument("name")
@click.option("--keep-json", is_flag=True, help="Leave the old metadata file there.")
@click.option("--dry-run", is_flag=True, help="Read everything and change nothing.")
@_endpoint
def upgrade(name: str, keep_json: bool, dry_run: bool, **asked: Any) -> None:
    """Bring a dataset of format 1 to format 2; the index alone is written, no tensor moves."""
    from streamtap.workbench.upgrade import upgrade_dataset_format

    click.echo(upgrade_dataset_format(name, remove_json=not keep_json, dry_run=dry_run, **asked))


@dataset.command()
@click.argument("name")
@_version
@_refresh
@_endpoint
def verify(name: str, **asked: Any) -> None:
    """Fetch a whole dataset and compare every file with its manifest and index; exits with 1 where one differs."""
    from streamtap.workbench.upgrade import verify_dataset

    report = verify_dataset(name, **asked)
    click.echo(
        f"read {counted(report.files, 'file')} of {counted(report.prompts, 'prompt')}, {size(report.read_bytes)}; "
        f"{report.hashed} with a recorded hash."
    )
    if report.sound:
        click.echo("everything is as the manifest and the index say.")
        return
    show(report.faults)
    sys.exit(1)


def _beside(
    file: Path, label_column: str | None, metadata_columns: str | None, file_format: str | None, limit: int | None
) -> tuple[list[Any] | None, list[dict[str, Any]] | None]:
    names = _listed(metadata_columns) or []
    wanted = [*names, *([label_column] if label_column else [])]
    if not wanted:
        return None, None
    from streamtap.workbench.prompt_table import read_beside

    found = read_beside(file, wanted, file_format=file_format, limit=limit)
    labels = found[label_column] if label_column else None
    rows = zip(*(found[name] for name in names), strict=True)
    return labels, [dict(zip(names, row, strict=True)) for row in rows] if names else None


def _listed(text: str | None) -> list[str] | None:
    return [part.strip() for part in text.split(",")] if text else None


def _bytes(text: str) -> int:
    units = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "B": 1, "": 1}
    number = text.strip().rstrip("kKmMgGiIbB")
    unit = text.strip()[len(number) :].upper()
    if unit not in units or not number.strip().replace(".", "", 1).isdecimal():
        raise click.BadParameter(f"{text!r} is no size; write 300MB, 1GiB or a number of bytes.")
    return int(float(number) * units[unit])


def _facts(found: DatasetInfo) -> Iterator[tuple[str, str]]:
    yield "dataset", found.name + (f", version {found.version[:12]}" if found.version else "")
    yield "format", found.format_version
    yield "model", found.model_name + (f", commit {found.model_commit[:19]}" if found.model_commit else "")
    yield "prompts", f"{found.num_prompts}; index {size(found.index_bytes)}"
    if found.available_layers:
        layers = found.available_layers
        yield "layers", f"{number_ranges(layers)} ({counted(len(layers), 'layer')})"
        rows = "one a token" if found.pooling == "none" else f"one a prompt, {found.pooling}"
        yield "rows", f"{rows}; hidden {found.hidden}, {found.dtype}"
        yield "one layer", f"{size(found.layer_bytes(layers[0]))} to download"
    if (logits := found.manifest.logits) is not None:
        yield "logits", f"the {logits.k} largest of the last position"
    yield "all tensors", size(found.total_bytes)
    yield "columns", ", ".join(f"{name} ({kind})" for name, kind in found.columns.items())


def _as_json(found: DatasetInfo) -> dict[str, Any]:
    return {
        "name": found.name,
        "version": found.version,
        "format_version": found.format_version,
        "model_name": found.model_name,
        "model_commit": found.model_commit,
        "num_prompts": found.num_prompts,
        "available_layers": found.available_layers,
        "pooling": found.pooling,
        "dtype": found.dtype,
        "hidden": found.hidden,
        "index_bytes": found.index_bytes,
        "layer_bytes": {str(layer): found.layer_bytes(layer) for layer in found.available_layers},
        "total_bytes": found.total_bytes,
        "columns": dict(found.columns),
    }


def _mean_norm(rows: NDArray[np.float32]) -> str:
    import numpy as np

    return f"{np.linalg.norm(rows, axis=1).mean():.1f}" if len(rows) else "-"


def _label_line(labels: NDArray[Any] | None) -> str:
    if labels is None:
        return "none"
    known = [label for label in labels.tolist() if label is not None]
    kinds = sorted(set(known))
    shown = ", ".join(f"{kind} ({known.count(kind)})" for kind in kinds[:6]) + (", …" if len(kinds) > 6 else "")
    return shown + (f"; {len(labels) - len(known)} null" if len(known) < len(labels) else "")


def _write_npz(out: Path, acts: dict[int, Any], labels: NDArray[Any] | None) -> None:
    import numpy as np

    from streamtap.workbench.whole_file import writing_whole

    arrays = {f"layer_{layer}": rows for layer, rows in acts.items()}
    if labels is not None:
        plain = labels.tolist()
        arrays["labels"] = labels if labels.dtype != object else np.array(["" if x is None else str(x) for x in plain])
    with writing_whole(out) as draft, draft.open("wb") as file:
        np.savez(file, **arrays)
    click.echo(f"wrote {size(out.stat().st_size)} to {out}")
