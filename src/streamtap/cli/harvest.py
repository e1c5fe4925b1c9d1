"""``streamtap harvest``: bulk harvests, here or on a cluster (``run``), or as jobs of a server (the other commands)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from streamtap.cli.backends import BACKEND_OPTIONS, with_own_options
from streamtap.cli.notice import announce_unpacking, waiting
from streamtap.cli.options import with_options
from streamtap.cli.text import as_positions, columns, counted, number_ranges, show, size
from streamtap.errors import InvalidInput

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from streamtap.cli.harvest_bar import HarvestBar
    from streamtap.engines.base import Engine
    from streamtap.harvested.reader import HarvestedRun
    from streamtap.workbench.documents import Corpus

#: Commands that ask a server, in COMMANDS of their module.
JOBS_MODULE = "streamtap.cli.harvest_jobs"
JOBS = ("submit", "status", "wait", "cancel", "download", "list")

_POOLINGS = ("none", "last_token", "first_token", "mean", "max")
_FORMATS = ("text", "jsonl", "csv", "tsv", "parquet")

_WHAT = (
    click.option("--model", default="demo", show_default=True, help="'demo', a folder, a GGUF file or a Hub id."),
    click.option("--revision", help="Branch, tag or commit of the model on the Hub."),
    click.option("--layers", help="all, 16, -1, 8-20 or 4,8,20-24; else a quarter, half and three quarters of all."),
    click.option("--positions", default="all", show_default=True, help="Which tokens have a row: all, last, -5:, 0,3."),
    click.option(
        "--pooling", type=click.Choice(_POOLINGS), default="none", show_default=True, help="One row a prompt."
    ),
    click.option("--project-onto", type=click.Path(path_type=Path), help="A .npy file of directions [1-64, hidden]."),
    click.option("--no-special-tokens", is_flag=True, help="Add no BOS and the like, where the text carries its own."),
    click.option(
        "--dtype",
        type=click.Choice(("bfloat16", "float32")),
        default="bfloat16",
        show_default=True,
        help="Of the rows in the files.",
    ),
    click.option(
        "--compression",
        type=click.Choice(("none", "zstd")),
        default="none",
        show_default=True,
        help="Of each file.",
    ),
)
_CUT = (
    click.option("--context", type=click.IntRange(min=1), help="Tokens of a prompt or window; else the model's."),
    click.option("--chunk", is_flag=True, help="Cut long documents into windows; else they lose their end."),
    click.option("--pack", is_flag=True, help="As --chunk, and fill each window with the next document."),
    click.option("--max-tokens", type=click.IntRange(min=1), help="Stop before it would be more, over all."),
)
_FROM = (
    click.option("--format", "file_format", type=click.Choice(_FORMATS), help="What FILE is; else its name says it."),
    click.option("--column", help="Where the prompts are in JSONL, CSV, TSV, Parquet or a dataset."),
    click.option("--limit", type=click.IntRange(min=1), help="Only the first so many rows."),
    click.option("--config", help="Of a dataset on the Hub that has several."),
    click.option("--split", help="Of a dataset on the Hub; else train."),
)
_HOW = (
    click.option(
        "--shard-size", type=click.IntRange(1, 4096), default=32, show_default=True, help="Prompts in a file."
    ),
    click.option("--batch-size", type=click.IntRange(1, 64), help="Prompts in a pass; else the engine decides."),
    click.option("--model-dtype", default="auto", show_default=True, help="What the model runs in; else its own."),
    click.option("--device", default="auto", show_default=True, help="cpu, cuda:1, mps, or the best that is there."),
    click.option("--run-id", help="The run's name; else a new one."),
)
_CLUSTER = (
    click.option("--cluster", help="Run on a Ray cluster: its address, auto, or local."),
    click.option("--engines", type=click.IntRange(min=1), help="With --cluster: so many; else all there is room for."),
    click.option("--cpus-per-engine", type=click.FloatRange(min=0), help="With --cluster: CPUs of each; else 1."),
    click.option(
        "--gpus-per-engine", type=click.FloatRange(min=0), help="With --cluster: GPUs of each; else 1 or none."
    ),
)


class _Harvests(click.Group):
    """Knows the commands of jobs by name, and imports them when one is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return ["run", *JOBS]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in JOBS:
            return super().get_command(ctx, cmd_name)
        return {command.name: command for command in import_module(JOBS_MODULE).COMMANDS}.get(cmd_name)


@click.group(cls=_Harvests)
def harvest() -> None:
    """Bulk harvests: a corpus in, files of rows out, here, on a cluster or by a server."""


@harvest.command()
@click.argument("file")
@click.option("--out", required=True, help="The run's own folder, or s3://…, gs://… or az://…")
@with_options(_WHAT, _CUT, _FROM, _HOW, BACKEND_OPTIONS, _CLUSTER)
def run(
    file: str,
    out: str,
    file_format: str | None,
    column: str | None,
    limit: int | None,
    config: str | None,
    split: str | None,
    **asked: Any,
) -> None:
    """Run a model over the prompts or documents in FILE and write the rows of its layers to a run's folder.

    FILE is text (a prompt a line), JSONL, CSV, TSV or Parquet; - is text from standard input; user/name or
    hf://datasets/user/name[@revision] is a text dataset on the Hub. The same command goes on with a run that was
    stopped, from the shards that are whole.
    """
    from streamtap.workbench.documents import open_corpus

    cluster = _cluster(**{name: asked.pop(name) for name in _names(_CLUSTER)})
    corpus = open_corpus(
        sys.stdin.buffer if file == "-" else file,
        file_format=file_format,
        column=column,
        limit=limit,
        config=config,
        split=split,
    )
    options = _asked(**asked)
    is_cut = options["chunk"] or options["pack"]
    _harvest(corpus, corpus.documents if is_cut else corpus.prompts(), out, cluster, options)


def _names(group: tuple[Callable[[Any], Any], ...]) -> list[str]:
    command = with_options(group)(click.command()(lambda: None))
    return [str(parameter.name) for parameter in command.params]


def _cluster(cluster: str | None, **options: Any) -> dict[str, Any] | None:
    given = {name: value for name, value in options.items() if value is not None}
    if cluster is None and given:
        raise click.UsageError(f"--{next(iter(given)).replace('_', '-')} needs --cluster.")
    return None if cluster is None else {"address": cluster, **given}


def _asked(
    positions: str,
    project_onto: Path | None,
    no_special_tokens: bool,
    **same: Any,
) -> dict[str, Any]:
    """The options as ``harvest_prompts`` has them."""
    loading = {name: same.pop(name) for name in ("model_dtype", "device", "revision", *_names(BACKEND_OPTIONS))}
    if (loading["backend"], loading["model_dtype"]) == ("api", "auto"):
        loading["model_dtype"] = same["dtype"]  # what a service is asked for is what the files hold
    return {
        "positions": as_positions(positions),
        "project_onto": None if project_onto is None else _directions(project_onto),
        "add_special_tokens": not no_special_tokens,
        "loading": _loading(**loading),
        **same,
    }


def _loading(model_dtype: str, **asked: Any) -> dict[str, Any]:
    """What ``load_engine`` is called with; nothing that was not asked for."""
    from streamtap.workbench.load_options import LoadOptions

    options = LoadOptions(dtype=model_dtype, **with_own_options(asked))
    told = options.arguments()
    return {name: told[name] for name in told if name in options.engine_options or name in options.asked()}


def _directions(file: Path) -> NDArray[np.generic]:
    import numpy as np

    try:
        found = np.load(file, allow_pickle=False)
    except ValueError as error:
        raise InvalidInput(f"{file.name} is not a .npy file of numbers; write it with numpy.save.") from error
    if not isinstance(found, np.ndarray) or found.dtype.kind not in "fiu":
        raise InvalidInput(
            f"{file.name} must hold one array of numbers [directions, hidden]; write it with numpy.save."
        )
    return found


def _harvest(
    corpus: Corpus, prompts: Iterator[Any], out: str, cluster: dict[str, Any] | None, options: dict[str, Any]
) -> None:
    from streamtap.cli.harvest_bar import harvest_bar
    from streamtap.harvest.local import OnCluster, harvest_prompts
    from streamtap.harvested.opening import open_place

    open_place(out).check()
    loading, model = options.pop("loading"), options.pop("model")
    with ExitStack() as held:
        where: dict[str, Any]
        if cluster is None:
            if loading.get("backend") != "api":
                announce_unpacking(model)
            engine = _loaded(model, loading, held)
            where = {"engine": engine}
            show(columns(list(_before(engine, corpus, out))))
        else:
            where = {"model": model, "model_dtype": loading.pop("dtype", "auto"), "cluster": OnCluster(**cluster)}
            where |= loading
            show(columns([("model", model), ("from", _rows(corpus)), ("to", out)]))
        try:
            with harvest_bar(corpus.n_rows, options["max_tokens"]) as bar:
                found = harvest_prompts(prompts, out=out, on_progress=bar.tell, **where, **options)
        except KeyboardInterrupt:
            click.echo("stopped; the shards that are whole stay, and the same command goes on from there.", err=True)
            raise
    show(["", *columns(list(_after(found, bar, corpus.n_rows if options["max_tokens"] else None)))])


def _loaded(model: str, loading: dict[str, Any], held: ExitStack) -> Engine:
    from streamtap.engines.opening import load_engine
    from streamtap.settings import BESIDE_OTHER_WORK, defaults

    with waiting("reading the model"), defaults(**BESIDE_OTHER_WORK):  # read when torch is loaded
        engine: Engine = load_engine(model, **loading)
    held.callback(engine.close)
    return engine


def _before(engine: Engine, corpus: Corpus, out: str) -> Iterator[tuple[str, str]]:
    about = engine.provenance
    yield "model", f"{about.model}, {counted(about.n_layers, 'layer')}, hidden {about.hidden}, {about.dtype}"
    yield "from", _rows(corpus)
    yield "to", out


def _rows(corpus: Corpus) -> str:
    return corpus.name if corpus.n_rows is None else f"{corpus.name}, {counted(corpus.n_rows, 'row')}"


def _after(found: HarvestedRun, bar: HarvestBar, n_rows: int | None) -> Iterator[tuple[str, str]]:
    manifest = found.manifest
    yield "run", manifest.run_id
    yield "layers", number_ranges(manifest.layer_indices)
    cut = len(manifest.truncated_prompts)
    yield (
        "prompts",
        f"{manifest.n_prompts}" + (f", of which {cut} longer than the context lost their end" if cut else ""),
    )
    if n_rows is not None and bar.rows_done < n_rows and bar.tokens_run:
        yield "read", f"{bar.rows_done} of {n_rows} rows: what --max-tokens has room for"
    n_bytes = sum(shard.bytes for shard in manifest.shards)
    yield "holds", f"{manifest.contents}, {manifest.dtype}, {counted(len(manifest.shards), 'shard')}, {size(n_bytes)}"
    if bar.tokens_run:
        before = f"; {bar.tokens_found} were whole before" if bar.tokens_found else ""
        yield "ran", f"{bar.tokens_run} tokens in {bar.seconds:.1f} s, {bar.tokens_per_second:.0f} tokens/s{before}"
    else:
        yield "ran", "nothing: it was whole already"
