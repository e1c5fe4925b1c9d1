"""Both databases of the service: SQLite in a folder, and the PostgreSQL that lives as long as the tests."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

from streamtap.server.db import Database
from streamtap.server.db.tables import metadata


@pytest.fixture(params=["sqlite", "postgresql"])
def kind(request: pytest.FixtureRequest) -> str:
    """Each kind of database in turn."""
    found: str = request.param
    return found


@pytest.fixture
def database_url(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of an empty database of each kind."""
    if kind == "sqlite":
        return f"sqlite:///{tmp_path / 'data' / 'streamtap.db'}"
    address: str = request.getfixturevalue("postgres").new_database()
    return address


@pytest.fixture(scope="session")
def migrated_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An SQLite database with today's schema and nothing in it, to copy."""
    file = tmp_path_factory.mktemp("migrated") / "streamtap.db"
    Database.open(f"sqlite:///{file}").close()
    return file


@pytest.fixture(scope="session")
def migrated_database(postgres: Any) -> str:
    """The address of one on PostgreSQL, to empty: that is quicker than to copy it."""
    address: str = postgres.new_database()
    Database.open(address).close()
    return address


@pytest.fixture
def migrated_url(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of a database of each kind that has today's schema; quicker than making it."""
    if kind == "sqlite":
        shutil.copy(request.getfixturevalue("migrated_file"), tmp_path / "streamtap.db")
        return f"sqlite:///{tmp_path / 'streamtap.db'}"
    address: str = request.getfixturevalue("migrated_database")
    with psycopg.connect(address.replace("+psycopg", "")) as connection:
        connection.execute(f"TRUNCATE {', '.join(metadata.tables)} RESTART IDENTITY".encode())
    return address


@pytest.fixture
def open_database() -> Iterator[Callable[[str], Database]]:
    """Open as many as a test needs, as several gateways would; they are closed afterwards."""
    opened: list[Database] = []

    def open_one(url: str) -> Database:
        opened.append(Database.open(url))
        return opened[-1]

    yield open_one
    for database in opened:
        database.close()


@pytest.fixture
def database(migrated_url: str, open_database: Callable[[str], Database]) -> Database:
    """An open database of each kind, with nothing in it."""
    return open_database(migrated_url)


class Moment:
    """A calendar that stands still until it is told."""

    def __init__(self) -> None:
        self.at = datetime(2026, 11, 30, 12, 0, 0, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.at

    def forward(self, seconds: float) -> None:
        self.at += timedelta(seconds=seconds)


@pytest.fixture
def moment() -> Moment:
    """The time of day that a ledger is given."""
    return Moment()
