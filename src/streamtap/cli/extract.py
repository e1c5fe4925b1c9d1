"""``streamtap extract``: a file of prompts to rows in the cache, and to a folder where asked for."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from streamtap.cli.backends import BACKEND_OPTIONS, with_own_options
from streamtap.cli.notice import announce_unpacking, waiting
from streamtap.cli.options import with_options
from streamtap.cli.text import as_positions, columns, counted, number_ranges, show, size

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from streamtap.spec import Prompt
    from streamtap.workbench.forecast import Forecast
    from streamtap.workbench.unified_cache import UnifiedCache

_POOLINGS = ("last_token", "first_token", "mean", "max", "none")
_FORMATS = ("text", "jsonl", "csv", "tsv", "parquet")

_WHAT = (
    click.option("--model", default="demo", show_default=True, help="'demo', a folder, a GGUF file or a Hub id."),
    click.option("--revision", help="Branch, tag or commit of a Hub id."),
    click.option("--layers", default="all", show_default=True, help="all, middle, last, 16, -1, 8-20, or 4,8,20-24."),
    click.option(
        "--pooling",
        type=click.Choice(_POOLINGS),
        default="last_token",
        show_default=True,
        help="How a prompt's rows become one; none keeps every row, which serves any pooling later.",
    ),
    click.option(
        "--positions",
        default="all",
        show_default=True,
        help="Which tokens have a row: all, last, a range such as -5:, numbers such as 0,3,-1, or role:assistant.",
    ),
    click.option("--exclude-special-tokens", is_flag=True, help="Leave BOS and its like out."),
    click.option("--perplexity/--no-perplexity", default=True, show_default=True, help="Also each perplexity."),
    click.option("--logits", type=click.Choice(("last", "all")), help="Also logits, of the last or all positions."),
    click.option("--top-k", type=click.IntRange(min=1), help="Keep only the k largest logits."),
)
_HOW = (
    click.option("--truncate", type=click.Choice(("left", "right")), help="Cut prompts longer than the context there."),
    click.option("--generation-prompt", is_flag=True, help="End a chat with the opening of the assistant's turn."),
    click.option("--exact", is_flag=True, help="Run each prompt alone and whole: slower, to the bit."),
    click.option("--dtype", default="auto", show_default=True, help="float32, bfloat16, float16, or the checkpoint's."),
    click.option("--device", default="auto", show_default=True, help="cpu, cuda:1, mps, or the best that is there."),
    click.option("--batch-size", type=click.IntRange(min=1), help="At most this many prompts in a batch."),
    click.option("--max-batch-tokens", type=click.IntRange(min=1), help="At most this many tokens in a batch."),
)
_FILES = (
    click.option("--format", "file_format", type=click.Choice(_FORMATS), help="What FILE is; else its name says it."),
    click.option("--column", help="Where the prompts are in JSONL, CSV, TSV or Parquet."),
    click.option("--limit", type=click.IntRange(min=1), help="Only the first so many prompts."),
    click.option("--cache-dir", type=click.Path(path_type=Path), help="Folder of the cached activations."),
    click.option("--out", type=click.Path(path_type=Path), help="Also write the rows to this folder."),
    click.option("--with-text", is_flag=True, help="With --out: the prompts' text beside the rows."),
    click.option("--overwrite", is_flag=True, help="With --out: replace an earlier export."),
)


@click.command()
@click.argument("file")
@with_options(_FILES, _WHAT, _HOW, BACKEND_OPTIONS)
def extract(
    file: str,
    file_format: str | None,
    column: str | None,
    limit: int | None,
    out: Path | None,
    with_text: bool,
    overwrite: bool,
    **asked: Any,
) -> None:
    """Run a model over the prompts in FILE and keep the residual stream of its layers.

    FILE is text (a prompt a line), JSONL, CSV, TSV or Parquet; - reads text from standard input.
    What the cache holds already is not run again, and a run that was stopped goes on where it was.
    """
    from streamtap.workbench.export import check_folder
    from streamtap.workbench.prompt_files import read_prompts

    if out is None and (with_text or overwrite):
        raise click.UsageError("--with-text and --overwrite need --out.")
    if asked["top_k"] is not None and asked["logits"] is None:
        raise click.UsageError("--top-k needs --logits.")
    if out is not None:
        check_folder(out, overwrite=overwrite)
    source = sys.stdin.buffer if file == "-" else file
    prompts = read_prompts(source, file_format=file_format, column=column, limit=limit)
    if asked["backend"] != "api":
        announce_unpacking(asked["model"])
    with _open_cache(**with_own_options(asked)) as cache:
        _run(cache, prompts, "standard input" if file == "-" else Path(file).name)
        if out is not None:
            _export(cache, prompts, out, with_text=with_text, overwrite=overwrite)


def _open_cache(
    pooling: Any, positions: str, perplexity: bool, logits: Any, top_k: int | None, **same: Any
) -> UnifiedCache:
    from streamtap.workbench.unified_cache import UnifiedCache

    return UnifiedCache(
        pooling=pooling,
        cache_pooled=pooling != "none",
        positions=as_positions(positions),
        compute_perplexity=perplexity,
        cache_logits=logits is not None,
        logit_positions=logits or "last",
        logit_top_k=top_k,
        **same,
    )


def _run(cache: UnifiedCache, prompts: list[Prompt], name: str) -> None:
    from streamtap.workbench.forecast import forecast

    with waiting("reading the model and the prompts"):
        found = forecast(cache, prompts)
    show(columns(list(_before(cache, found, name))))
    try:
        stats = cache.warmup(prompts)
    except KeyboardInterrupt:
        click.echo("stopped; what was extracted is kept, and the same command goes on from there.", err=True)
        raise
    click.echo(f"\n{stats}\n")
    show(columns(list(_after(cache, prompts))))


def _before(cache: UnifiedCache, found: Forecast, name: str) -> Iterator[tuple[str, str]]:
    model = cache.provenance
    yield "model", f"{model.model}, {counted(model.n_layers, 'layer')}, hidden {model.hidden}, {model.dtype}"
    held = found.n_prompts - found.missing
    tokens = f"{int(found.n_tokens.sum())} tokens"
    yield "prompts", f"{found.n_prompts} from {name}, {tokens}; {held} cached, {found.missing} to run"
    if cut := int((found.truncated_from > 0).sum()):
        yield "truncated", f"{counted(cut, 'prompt')} longer than the context"
    yield "cache", f"{cache.store.root}, {size(found.free_bytes)} free"
    if found.missing:
        yield "will write", f"about {size(found.estimated_bytes)}"


def _after(cache: UnifiedCache, prompts: list[Prompt]) -> Iterator[tuple[str, str]]:
    model, pooling = cache.provenance, cache.spec.pooling
    yield "layers", f"{number_ranges(cache.layer_indices)} ({len(cache.layer_indices)} of {model.n_layers})"
    yield "rows", f"{pooling}, one a prompt" if pooling != "none" else "every chosen position, not pooled"
    if cache.spec.perplexity:
        yield "perplexity", _perplexity(cache.get_perplexity(prompts)[:, 0])
    yield "cache holds", size(cache.store.size_bytes())


def _perplexity(means: NDArray[np.float64]) -> str:
    import numpy as np

    known = means[np.isfinite(means)]
    if not len(known):
        return "of no prompt: each has one token only"
    low, middle, high = np.quantile(known, [0, 0.5, 1])
    left = len(means) - len(known)
    return f"median {middle:.1f}, from {low:.1f} to {high:.1f}" + (f"; {left} of one token have none" if left else "")


def _export(cache: UnifiedCache, prompts: list[Prompt], out: Path, *, with_text: bool, overwrite: bool) -> None:
    from streamtap.workbench.export import export_rows
    from streamtap.workbench.progress import progress_bar

    with progress_bar("writing", len(cache.layer_indices)) as advance:
        folder = export_rows(cache, prompts, out, with_text=with_text, overwrite=overwrite, advance=advance)
    files = list(folder.iterdir())
    show(["", f"wrote {counted(len(files), 'file')}, {size(sum(file.stat().st_size for file in files))}, to {folder}"])
