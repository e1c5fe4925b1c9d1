"""``streamtap cache``: what is kept, whether it is sound, and giving the space back."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from streamtap.cli.text import columns, counted, fitting, number_ranges, show, size
from streamtap.errors import InvalidInput
from streamtap.settings import Settings

if TYPE_CHECKING:
    from streamtap.cache import CacheStore, SetInfo, VerifyReport

_folder = click.option("--cache-dir", type=click.Path(path_type=Path), help="Folder of the cached activations.")
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON; sizes in bytes.")


@click.group()
def cache() -> None:
    """Look at, check and clear what was extracted."""


@cache.command()
@_folder
@_json
def info(cache_dir: Path | None, as_json: bool) -> None:
    """Print the cache's place and size, and how much lies in it."""
    settings = Settings.from_environment()
    root = cache_dir or settings.activations_dir
    found = _totals(root) | {"models": _models(settings.models_dir)}
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    lines = [
        ("folder", str(root) if found["exists"] else f"{root} (nothing cached yet)"),
        ("size", f"{size(found['size_bytes'])} in {counted(found['files'], 'file')}; {size(found['free_bytes'])} free"),
        ("sets", str(found["sets"])),
        ("prompts", f"{found['prompts']}, counted once in each set"),
    ]
    if found["models"]:
        lines.append(("models", str(settings.models_dir)))
    lines += [("", f"{each['name']} ({size(each['size_bytes'])})") for each in found["models"]]
    show(columns(lines))


@cache.command("list")
@_folder
@_json
def list_sets(cache_dir: Path | None, as_json: bool) -> None:
    """List the sets: rows that were made by one model in one way."""
    root = _root(cache_dir)
    sets = [_described(each) for each in _sets(root)]
    if as_json:
        click.echo(json.dumps(sets, indent=2))
    elif not sets:
        click.echo(f"nothing is cached in {root}.")
    else:
        heads = ("set", "model", "holds", "positions", "dtype", "layers", "prompts", "size", "made")
        show(columns(fitting([heads, *map(_cells, sets)], shrink=1), right=(0, 6, 7)))


@cache.command()
@_folder
def verify(cache_dir: Path | None) -> None:
    """Read everything that is kept; set aside what does not match its checksum.

    Exits with 1 when something was set aside. It is run again when it is next asked for.
    """
    root = _root(cache_dir)
    if not _is_cache(root):
        click.echo(f"nothing is cached in {root}.")
        return
    with _open(root) as store:
        report = _verify(store)
    click.echo(f"read {counted(report.rows, 'row')} of {counted(report.prompts, 'prompt')}, {size(report.read_bytes)}.")
    if report.sound:
        click.echo("every row matches its checksum.")
        return
    for set_id, why in sorted({(each.set_id, each.why) for each in report.damaged}):
        count = sum((each.set_id, each.why) == (set_id, why) for each in report.damaged)
        click.echo(f"set {set_id}: {counted(count, 'prompt')} set aside: {why}.")
    click.echo("what was set aside will be run again when it is next asked for.")
    sys.exit(1)


@cache.command()
@_folder
@click.option("--model", help="Every set of this model, as 'cache list' names it.")
@click.option("--set", "numbers", type=int, multiple=True, help="The set of this number; may be given several times.")
@click.option("--all", "everything", is_flag=True, help="All sets; the models' own folders stay.")
@click.option("--yes", is_flag=True, help="Do not ask.")
def clear(cache_dir: Path | None, model: str | None, numbers: tuple[int, ...], everything: bool, yes: bool) -> None:
    """Remove sets and give their space back."""
    if sum((model is not None, bool(numbers), everything)) != 1:
        raise click.UsageError("say what to clear, with one of --model, --set and --all.")
    root = _root(cache_dir)
    sets = _chosen(_sets(root), model, numbers)
    if not sets:
        click.echo(f"nothing is cached in {root}.")
        return
    what = f"{counted(len(sets), 'set')}, {size(sum(each.bytes for each in sets))}"
    if not yes:
        if not _is_terminal():
            raise click.UsageError(f"this would remove {what}; add --yes to do it without being asked.")
        click.confirm(f"remove {what}, from {root}?", abort=True)
    with _open(root) as store:
        freed = store.clear(None if everything else [each.id for each in sets])
    click.echo(f"removed {counted(len(sets), 'set')}, {size(freed)} freed.")


def _is_terminal() -> bool:
    return sys.stdin.isatty()


def _root(cache_dir: Path | None) -> Path:
    return cache_dir or Settings.from_environment().activations_dir


def _is_cache(root: Path) -> bool:
    from streamtap.cache.space import INDEX_FILE

    return (root / INDEX_FILE).is_file()


def _open(root: Path) -> CacheStore:
    from streamtap.cache import CacheStore

    return CacheStore(root)


def _sets(root: Path) -> list[SetInfo]:
    # Opening makes the folder, and to look must not.
    if not _is_cache(root):
        return []
    with _open(root) as store:
        return store.sets()


def _totals(root: Path) -> dict[str, Any]:
    sets = _sets(root)
    from streamtap.cache.space import size_bytes

    standing = next(path for path in (root, *root.absolute().parents) if path.is_dir())
    return {
        "folder": str(root),
        "exists": _is_cache(root),
        "size_bytes": size_bytes(root),
        "free_bytes": shutil.disk_usage(standing).free,
        "files": sum(file.is_file() for file in root.rglob("*")) if _is_cache(root) else 0,
        "sets": len(sets),
        "prompts": sum(each.prompts for each in sets),
    }


def _models(folder: Path) -> list[dict[str, Any]]:
    found = sorted(folder.iterdir()) if folder.is_dir() else []
    return [{"name": each.name, "size_bytes": _size_bytes(each)} for each in found]


def _size_bytes(path: Path) -> int:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)


def _described(found: SetInfo) -> dict[str, Any]:
    identity, names = found.identity, [channel.name for channel in found.channels]
    layers = sorted(int(name.removeprefix("layer_")) for name in names if name.startswith("layer_"))
    return {
        "set": found.id,
        "model": _model_of(found),
        "commit": identity.get("model"),
        "kind": identity.get("kind"),
        "pooling": identity.get("pooling"),
        "positions": identity.get("positions"),
        "exclude_special_tokens": identity.get("exclude_special_tokens"),
        "exact": identity.get("exact"),
        "top_k": identity.get("top_k"),
        "dtype": identity.get("dtype"),
        "quantization": identity.get("quantization"),
        "layers": layers,
        "prompts": found.prompts,
        "rows": found.rows,
        "size_bytes": found.bytes,
        "made": datetime.fromtimestamp(found.created_seconds).astimezone().isoformat(timespec="seconds"),
    }


def _model_of(found: SetInfo) -> str:
    return str(found.provenance.get("model") or found.identity.get("model") or "unknown")


def _cells(found: dict[str, Any]) -> tuple[str, ...]:
    holds = [str(found["kind"])]
    holds += [str(found["pooling"]).replace("none", "not pooled")] if found["pooling"] else []
    holds += [f"top {found['top_k']}"] if found["top_k"] else []
    holds += ["exact"] if found["exact"] else []
    positions = [str(found["positions"] or "–"), *(["no specials"] if found["exclude_special_tokens"] else [])]
    return (
        str(found["set"]),
        found["model"],
        ", ".join(holds),
        ", ".join(positions),
        str(found["dtype"]),
        number_ranges(found["layers"]) or "–",
        str(found["prompts"]),
        size(found["size_bytes"]),
        found["made"][:10],
    )


def _chosen(sets: list[SetInfo], model: str | None, numbers: tuple[int, ...]) -> list[SetInfo]:
    if model is not None:
        found = [each for each in sets if _model_of(each) == model]
        if sets and not found:
            names = ", ".join(dict.fromkeys(_model_of(each) for each in sets))
            raise InvalidInput(f"no set is of the model {model!r}; the cache has sets of {names}.")
        return found
    if numbers:
        known = {each.id: each for each in sets}
        if unknown := sorted(set(numbers) - set(known)):
            raise InvalidInput(f"there is no set {unknown[0]}; the cache has {', '.join(map(str, known)) or 'none'}.")
        return [known[number] for number in dict.fromkeys(numbers)]
    return sets


def _verify(store: CacheStore) -> VerifyReport:
    from streamtap.workbench.progress import progress_bar

    with progress_bar("checking, % read", 100) as advance:
        return store.verify(_percent(advance))


def _percent(advance: Callable[[int], None]) -> Callable[[int, int], None]:
    shown = 0

    def tick(done_bytes: int, total_bytes: int) -> None:
        nonlocal shown
        percent = 100 * done_bytes // max(1, total_bytes)
        advance(percent - shown)
        shown = percent

    return tick
