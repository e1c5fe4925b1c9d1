"""From the name of a dataset to the place that it means."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import unquote

from streamtap.blobs import SCHEMES
from streamtap.dataset.folder import FolderSource, FolderTarget
from streamtap.dataset.object_store import StoreSource, StoreTarget
from streamtap.dataset.places import Source, Target
from streamtap.errors import InvalidInput
from streamtap.settings import Settings

_FORMS = (
    "a dataset is 'user/name' or 'hf://datasets/user/name' on the Hub, a folder './name', or an address "
    "'s3://bucket/folder', 'gs://bucket/folder' or 'az://container/folder'"
)
_REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


@dataclass(frozen=True)
class _Place:
    """What a name means; ``revision`` is what it says itself."""

    kind: Literal["folder", "store", "hub"]
    name: str
    revision: str | None = None


def open_source(
    name: str | Path,
    *,
    revision: str | None = None,
    token: str | None = None,
    endpoint: str | None = None,
    refresh: bool = False,
) -> Source:
    """The dataset called ``name``, to be read; nothing is asked of any server yet.

    A ``Path``, and a string that starts with ``.``, ``/`` or ``~``, is a folder, and so is one without
    a slash where there is a folder of that name. ``s3://``, ``gs://`` and ``az://`` lead to object stores,
    ``user/name``, ``hf://user/name`` and ``hf://datasets/user/name[@revision]`` to the Hub. ``token``
    and ``endpoint`` are the Hub's. ``refresh`` asks for the newest version, not the one known here.

    Raises:
        InvalidInput: a name of another form, or a ``revision`` where there are none.
        MissingExtra: a library that such a place needs is not installed.
    """
    place = _place(name)
    if place.kind == "hub":
        from streamtap.dataset.hub import HubSource

        chosen = _one_revision(place.revision, revision)
        return HubSource(place.name, revision=chosen, token=token, endpoint=endpoint, refresh=refresh)
    if revision is not None:
        raise InvalidInput(f"{place.name} has no revisions, as datasets on the Hub have; leave revision out.")
    if place.kind == "store":
        settings = Settings.from_environment()
        server = settings.store_servers.get(_scheme(place.name))
        return StoreSource(place.name, settings.datasets_dir, refresh=refresh, server=server)
    return FolderSource(place.name)


def open_target(
    name: str | Path,
    *,
    private: bool | None = None,
    token: str | None = None,
    endpoint: str | None = None,
) -> Target:
    """The place called ``name``, as in ``open_source``, to publish to; nothing is asked of any server yet.

    Raises:
        InvalidInput: a name of another form, one with a revision, or ``private`` where nobody but the place's
            own owner decides who sees it.
        MissingExtra: a library that such a place needs is not installed.
    """
    place = _place(name)
    if place.kind == "hub":
        from streamtap.dataset.hub_target import HubTarget

        if place.revision is not None:
            raise InvalidInput(f"datasets are published to the main branch of {place.name}; leave the @revision out.")
        return HubTarget(place.name, private=private, token=token, endpoint=endpoint)
    if private is not None:
        raise InvalidInput(
            f"private= is for the Hub; who may see {place.name} is decided by the permissions that it has there."
        )
    if place.kind == "store":
        settings = Settings.from_environment()
        return StoreTarget(place.name, settings.datasets_dir, server=settings.store_servers.get(_scheme(place.name)))
    return FolderTarget(place.name)


def _place(name: str | Path) -> _Place:
    if isinstance(name, Path):
        return _Place("folder", str(name) if name.is_absolute() else f"./{name}")
    if not isinstance(name, str) or not name.strip():
        raise InvalidInput(f"{_FORMS}; got {name!r}.")
    if name.startswith((".", "/", "~")):
        return _Place("folder", name)
    if scheme := _SCHEME.match(name):
        return _addressed(scheme[1], name)
    if _REPOSITORY.fullmatch(name):
        return _Place("hub", name)
    if "/" not in name and Path(name).is_dir():
        return _Place("folder", f"./{name}")
    # What holds an @ may hold a password before it.
    raise InvalidInput(f"{_FORMS}; got {name!r}." if "@" not in name else f"{_FORMS}; got something else.")


def _addressed(scheme: str, name: str) -> _Place:
    """The place behind an address, which may hold a password and so is not repeated when it is refused."""
    if scheme in SCHEMES:
        return _Place("store", name)
    if scheme != "hf":
        raise InvalidInput(f"{_FORMS}; got an address that starts with {scheme}://.")
    repository, at, revision = name.removeprefix("hf://").removeprefix("datasets/").rstrip("/").partition("@")
    if not _REPOSITORY.fullmatch(repository) or (at and not revision):
        raise InvalidInput("an address on the Hub is 'hf://datasets/user/name' or 'hf://datasets/user/name@revision'.")
    return _Place("hub", repository, unquote(revision) or None)


def _scheme(address: str) -> str:
    return address.partition("://")[0]


def _one_revision(named: str | None, asked: str | None) -> str | None:
    if named is not None and asked is not None and named != asked:
        raise InvalidInput(f"the address says revision {named!r} and revision={asked!r} was passed; give one of them.")
    return asked if named is None else named
