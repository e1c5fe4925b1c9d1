"""``streamtap keys``: who may use the service, and how much."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from streamtap.cli.options import with_options
from streamtap.cli.text import columns, show
from streamtap.errors import MissingExtra

if TYPE_CHECKING:
    from streamtap.server.ledger.keys import KeyRecord, Keys

_WHERE = (
    click.option("--config", type=click.Path(path_type=Path), help="Else streamtap.toml here, or the defaults."),
    click.option("--data-dir", type=click.Path(path_type=Path), help="Folder of the service's own database."),
)
_SERVERS = "default"


class _Limit(click.ParamType["int | str"]):
    """A count, or ``default`` for the server's own limit."""

    name = "N|default"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        if value == _SERVERS or isinstance(value, int):
            return value  # type: ignore[no-any-return]
        if not str(value).isascii() or not str(value).isdecimal():
            self.fail(f"{value!r} is no limit; give a number, or {_SERVERS!r} for the server's.", param, ctx)
        return int(value)


_LIMITS = tuple(
    click.option(f"--{name}", type=_Limit(), help=told)
    for name, told in (
        ("monthly-activations", "Captures in a month; 0 is unlimited, as below."),
        ("monthly-input-tokens", "Tokens of prompts in a month."),
        ("monthly-output-tokens", "Generated tokens in a month."),
        ("daily-input-tokens", "Tokens of prompts in a day."),
        ("daily-output-tokens", "Generated tokens in a day."),
        ("monthly-harvests", "Bulk harvests begun in a month."),
        ("rate-per-minute", "Requests started in a minute."),
        ("max-active", "Requests that run at one time; 1 or more."),
        ("max-waiting", "Requests that wait; 0 is none."),
    )
)


@click.group()
def keys() -> None:
    """Make, list, pause and revoke API keys.

    A key is shown once, when it is made. WHICH is a key's name, or the prefix that it starts with.
    """


@keys.command()
@click.option("--name", required=True, help="What the key is called here.")
@click.option("--user", help="Whose it is; else the name. Some limits are for all keys of one user.")
@click.option("--scopes", default="completions", show_default=True, help="completions, harvest, admin, with commas.")
@click.option("--quiet", is_flag=True, help="Print the key alone.")
@with_options(_LIMITS, _WHERE)
def create(
    name: str, user: str | None, scopes: str, quiet: bool, config: Path | None, data_dir: Path | None, **limits: Any
) -> None:
    """Make a key and print it, this once."""
    with _open(config, data_dir) as book:
        from streamtap.server.ledger.keys import KeyLimits

        made = book.create(name, user=user, scopes=_listed(scopes), limits=KeyLimits(**_given(limits)))
    if quiet:
        click.echo(made.secret)
        return
    show([made.secret, "", "It is not stored and is not shown again. Send it as `Authorization: Bearer <key>`."])


@keys.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@with_options(_WHERE)
def list_keys(as_json: bool, config: Path | None, data_dir: Path | None) -> None:
    """List the keys, without the keys themselves."""
    with _open(config, data_dir) as book:
        found = book.list()
    if as_json:
        click.echo(json.dumps([asdict(key) for key in found], indent=2, default=str))
    elif not found:
        show(["there are no keys; `streamtap keys create --name NAME` makes one."])
    else:
        rows = [("name", "user", "prefix", "scopes", "state", "made", "own limits")]
        show(columns(rows + [_cells(key) for key in found]))


@keys.command()
@click.argument("which")
@with_options(_WHERE)
def revoke(which: str, config: Path | None, data_dir: Path | None) -> None:
    """End a key for good; running servers refuse it from the next request on."""
    _tell(config, data_dir, "revoke", which)


@keys.command()
@click.argument("which")
@with_options(_WHERE)
def pause(which: str, config: Path | None, data_dir: Path | None) -> None:
    """Refuse a key until it is resumed."""
    _tell(config, data_dir, "pause", which)


@keys.command()
@click.argument("which")
@with_options(_WHERE)
def resume(which: str, config: Path | None, data_dir: Path | None) -> None:
    """Take a paused key again."""
    _tell(config, data_dir, "resume", which)


@keys.command("set")
@click.argument("which")
@click.option("--user", help="Whose it is.")
@click.option("--scopes", help="completions, harvest, admin, with commas.")
@with_options(_LIMITS, _WHERE)
def set_values(
    which: str, user: str | None, scopes: str | None, config: Path | None, data_dir: Path | None, **limits: Any
) -> None:
    """Change a key's limits, scopes or user; what is not named stays. A limit of `default` is the server's again."""
    _tell(config, data_dir, "set", which, user=user, scopes=_listed(scopes) if scopes else None, **_given(limits))


@contextmanager
def _open(config: Path | None, data_dir: Path | None) -> Iterator[Keys]:
    try:
        from streamtap.server.db import Database
        from streamtap.server.ledger.keys import Keys
        from streamtap.server.toml.config_file import find_config, read_config
    except ModuleNotFoundError as error:
        raise MissingExtra("the service's keys need its database: pip install 'streamtap[serve]'.") from error
    settings = read_config(find_config(config), data_dir=data_dir)
    database = Database.open(settings.database_url)
    try:
        yield Keys(database)
    finally:
        database.close()


def _tell(config: Path | None, data_dir: Path | None, what: str, which: str, **values: Any) -> None:
    with _open(config, data_dir) as book:
        key: KeyRecord = getattr(book, what)(which, **values)
    show([f"{key.name} ({key.prefix}) of {key.user} is {key.state}; scopes {', '.join(key.scopes)}; {_own(key)}."])


def _given(limits: dict[str, Any]) -> dict[str, int | None]:
    return {name: None if value == _SERVERS else value for name, value in limits.items() if value is not None}


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _cells(key: KeyRecord) -> tuple[str, ...]:
    made = key.created_at.date().isoformat()
    return key.name, key.user, key.prefix, ",".join(key.scopes), key.state, made, _own(key)


def _own(key: KeyRecord) -> str:
    told = [f"{name} {value}" for name, value in asdict(key.limits).items() if value is not None]
    return ", ".join(told) or "the server's limits"
