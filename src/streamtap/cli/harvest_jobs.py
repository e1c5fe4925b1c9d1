"""``streamtap harvest submit`` and what follows it: jobs on a server, from a file of prompts to a folder of rows."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from streamtap.cli.options import with_options
from streamtap.cli.text import as_positions, columns, counted, fitting, show, size
from streamtap.errors import InvalidInput

if TYPE_CHECKING:
    from streamtap.client.harvest_status import HarvestStatus
    from streamtap.client.harvests import HarvestJob
    from streamtap.spec import Prompt
    from streamtap.wire.harvest_jobs import JobView

_POOLINGS = ("none", "last_token", "first_token", "mean", "max")
_FORMATS = ("text", "jsonl", "csv", "tsv", "parquet")

_api_base = click.option(
    "--api-base", help="The server, such as http://127.0.0.1:8000/v1; else what the environment says."
)
_ids = click.argument("ids", metavar="ID...", nargs=-1, required=True)
_json = click.option("--json", "as_json", is_flag=True, help="As JSON, with the links to the files.")
_timeout = click.option("--timeout", type=click.FloatRange(min=0), help="Seconds to wait at most; the job goes on.")

_WHAT = (
    click.option("--model", required=True, help="The server's id of a model."),
    click.option("--layers", help="all, middle, last, 16, -1, 8-20, or 4,8,20-24; else three of its depth."),
    click.option("--positions", default="all", show_default=True, help="all, last, or numbers such as 0,3,-1."),
    click.option(
        "--pooling",
        type=click.Choice(_POOLINGS),
        default="none",
        show_default=True,
        help="How a prompt's rows become one; none keeps every row.",
    ),
    click.option(
        "--project-onto",
        type=click.Path(path_type=Path),
        metavar="FILE.npy",
        help="Keep products with these directions [directions, hidden] instead of the rows.",
    ),
    click.option("--no-special-tokens", is_flag=True, help="Take texts as they are, without the tokenizer's BOS."),
    click.option("--shard-size", type=click.IntRange(min=1), help="Prompts in a file; else 32."),
    click.option("--batch-size", type=click.IntRange(min=1), help="Prompts in a pass at most."),
)
_FROM = (
    click.option("--format", "file_format", type=click.Choice(_FORMATS), help="What FILE is; else its name says it."),
    click.option("--column", help="Where the prompts are in JSONL, CSV, TSV or Parquet."),
    click.option("--limit", type=click.IntRange(min=1), help="Only the first so many prompts."),
    _api_base,
)
_THEN = (
    click.option("--wait", "waits", is_flag=True, help="Return when it is done."),
    click.option("--out", type=click.Path(path_type=Path), help="Wait, and bring the files to this folder."),
)


@click.command()
@click.argument("file")
@with_options(_WHAT, _FROM, _THEN)
def submit(
    file: str,
    file_format: str | None,
    column: str | None,
    limit: int | None,
    api_base: str | None,
    waits: bool,
    out: Path | None,
    **asked: Any,
) -> None:
    """Give the prompts in FILE to a server as a job, and write the job's id; - reads text from standard input.

    Of more prompts than a job may have it makes several, and stays until the server has taken them all: name all their
    ids, in that order, to wait for them or to download them as one.
    """
    from streamtap.workbench.prompt_files import read_prompts

    source = sys.stdin.buffer if file == "-" else file
    prompts = read_prompts(source, file_format=file_format, column=column, limit=limit)
    with _client(api_base) as client:
        job = client.harvest(list(_plain(prompts)), **_asked(asked))
        _submit_rest(job)
        if waits or out is not None:
            _wait(job, None)
        else:
            click.echo(f"submitted; see `streamtap harvest wait {' '.join(job.ids)}`", err=True)
        if out is not None:
            _download(job, out)


@click.command()
@_ids
@_json
@_api_base
def status(ids: tuple[str, ...], as_json: bool, api_base: str | None) -> None:
    """Where jobs stand."""
    with _client(api_base) as client:
        _show_jobs(client.harvest_job(*ids).known.jobs, as_json)


@click.command("list")
@_json
@_api_base
def list_(as_json: bool, api_base: str | None) -> None:
    """Your newest jobs, a hundred at most."""
    with _client(api_base) as client:
        _show_jobs(client.harvests(), as_json)


@click.command()
@_ids
@_timeout
@_api_base
def wait(ids: tuple[str, ...], timeout: float | None, api_base: str | None) -> None:
    """Return when jobs are done; an error says which failed."""
    with _client(api_base) as client:
        _wait(client.harvest_job(*ids), timeout)


@click.command()
@_ids
@_api_base
def cancel(ids: tuple[str, ...], api_base: str | None) -> None:
    """End jobs; of several, those that are over stay as they are."""
    with _client(api_base) as client:
        _show_jobs(client.harvest_job(*ids).cancel().jobs, as_json=False)


@click.command()
@_ids
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The folder.")
@_timeout
@_api_base
def download(ids: tuple[str, ...], out: Path, timeout: float | None, api_base: str | None) -> None:
    """Wait for jobs, and bring their files to a folder; the same command goes on where it was stopped.

    Several jobs come as one run, whose prompts are numbered in the order of the ids.
    """
    with _client(api_base) as client:
        job = client.harvest_job(*ids)
        _wait(job, timeout)
        _download(job, out)


#: What the group of `streamtap harvest` takes from here.
COMMANDS: tuple[click.Command, ...] = (submit, status, list_, wait, cancel, download)


def _client(api_base: str | None) -> Any:
    from streamtap.client.sync import Client

    return Client(api_base)


def _plain(prompts: Iterable[Prompt]) -> Iterator[Any]:
    for index, prompt in enumerate(prompts):
        if prompt.messages is not None:
            raise InvalidInput(f"prompt {index} is a chat; a job takes texts or token ids. Write it out as a text.")
        yield prompt.text if prompt.text is not None else prompt.token_ids


def _asked(asked: dict[str, Any]) -> dict[str, Any]:
    """The options by the names that the client has for them."""
    told = {name: asked[name] for name in ("model", "layers", "shard_size", "batch_size")}
    told["positions"] = None if asked["positions"] == "all" else _positions(asked["positions"])
    told["pooling"] = None if asked["pooling"] == "none" else asked["pooling"]
    told["add_special_tokens"] = False if asked["no_special_tokens"] else None
    told["project_onto"] = None if asked["project_onto"] is None else _directions(asked["project_onto"])
    return told


def _positions(text: str) -> str | list[int]:
    found = as_positions(text)
    if isinstance(found, str) and found != "last":
        raise click.UsageError(f"--positions must be all, last, or numbers such as 0,3,-1; got {text!r}.")
    return found


def _directions(file: Path) -> Any:
    import numpy as np

    try:
        return np.load(file, allow_pickle=False)
    except OSError as error:
        raise InvalidInput(f"--project-onto needs an .npy file; {file} cannot be read ({error.strerror}).") from error
    except (EOFError, ValueError) as error:
        raise click.UsageError(f"{file} is not an .npy file of numbers.") from error


def _submit_rest(job: HarvestJob) -> None:
    """Write the ids of the jobs as they are made, and stay until all are: those made go on by themselves."""
    shown = _Shown()
    shown.tell(job.known)
    if not (unsent := job.known.unsent_prompts):
        return
    taken = f"{counted(len(job.ids), 'job')} taken; {counted(unsent, 'prompt')} wait for a slot"
    click.echo(f"{taken}, and this command with them", err=True)
    try:
        with _bar("harvesting", job.known.n_prompts) as move:

            def told(known: HarvestStatus) -> None:
                move(known.prompts_done)
                shown.tell(known)

            job.submit_rest(on_progress=told)
    finally:
        shown.tell(known := job.known)
        if known.unsent_prompts:
            left = known.n_prompts - known.unsent_prompts
            click.echo(f"only the first {counted(left, 'prompt')} of {known.n_prompts} were submitted.", err=True)


class _Shown:
    """Writes each job's id once."""

    def __init__(self) -> None:
        self._count = 0

    def tell(self, known: HarvestStatus) -> None:
        for job in known.jobs[self._count :]:
            click.echo(job.job_id)
        self._count = len(known.jobs)


def _wait(job: HarvestJob, timeout: float | None) -> None:
    try:
        with _bar("harvesting", job.known.n_prompts) as move:
            job.wait(timeout, on_progress=lambda known: move(known.prompts_done))
            move(job.known.n_prompts)
    except TimeoutError as error:
        raise click.ClickException(str(error)) from error
    except KeyboardInterrupt:
        click.echo(f"the harvest goes on; `streamtap harvest wait {' '.join(job.ids)}` waits again.", err=True)
        raise
    known = job.known
    click.echo(f"done: {counted(known.n_prompts, 'prompt')} in {counted(known.shards_done, 'file')}", err=True)


def _download(job: HarvestJob, out: Path) -> None:
    from streamtap.workbench.progress import progress_bar

    here, advance = 0, None
    with ExitStack() as held:

        def told(done: int, of_all: int) -> None:
            nonlocal here, advance
            # How much there is is known once the manifest is here.
            advance = advance or held.enter_context(progress_bar("downloading", of_all, is_bytes=True))
            advance(done - here)
            here = done

        folder = job.download(out, on_bytes=told)
    click.echo(f"{size(here)} in {folder}", err=True)


@contextmanager
def _bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar that is told how far it is, rather than how much was added."""
    from streamtap.workbench.progress import progress_bar

    here = 0
    with progress_bar(what, total) as advance:

        def move(done: int) -> None:
            nonlocal here
            advance(done - here)
            here = done

        yield move


def _show_jobs(jobs: Sequence[JobView], as_json: bool) -> None:
    from streamtap.wire.harvest_jobs import job_object

    if as_json:
        click.echo(json.dumps([job_object(job) for job in jobs], indent=1))
        return
    if not jobs:
        click.echo("no jobs")
        return
    head = ("id", "model", "state", "prompts", "submitted", "ended")
    rows = [head, *(_row(job) for job in jobs)]
    show(columns(fitting(rows, 1), right=[3]))
    for job in jobs:
        if job.error is not None:
            click.echo(f"{job.job_id} failed: {job.error}", err=True)


def _row(job: JobView) -> tuple[str, ...]:
    done = job.n_prompts if job.status == "done" else job.prompts_done
    times = (job.created_at, job.completed_at)
    return (
        *(job.job_id, job.model, job.status, f"{done}/{job.n_prompts}"),
        *("" if at is None else at.astimezone().strftime("%Y-%m-%d %H:%M:%S") for at in times),
    )
