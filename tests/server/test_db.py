from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import inspect, text

from streamtap.errors import SettingsError
from streamtap.server.db import Database, counters, migrating
from streamtap.server.db.counters import Amount, CounterId
from streamtap.server.db.tables import metadata

A, B = CounterId("key:1", "2026-11", "input_tokens"), CounterId("user:ada", "2026-11", "input_tokens")


def test_a_new_database_has_today_s_tables_and_columns(database: Database) -> None:
    with database.reading() as connection:
        found = inspect(connection)
        columns = {name: {column["name"] for column in found.get_columns(name)} for name in metadata.tables}
        indexes = {index["name"] for name in metadata.tables for index in found.get_indexes(name)}
        versions = connection.execute(text(f"SELECT version_num FROM {migrating.VERSION_TABLE}")).scalars().all()

    assert columns == {name: set(table.columns.keys()) for name, table in metadata.tables.items()}
    assert {str(index.name) for table in metadata.tables.values() for index in table.indexes} <= indexes
    assert versions == [migrating.NEWEST]


def test_migrations_and_tables_say_the_same(database: Database) -> None:
    from alembic.autogenerate import compare_metadata

    with database.reading() as connection:
        options = {"version_table": migrating.VERSION_TABLE, "compare_type": True}
        assert compare_metadata(MigrationContext.configure(connection, opts=options), metadata) == []


def test_the_newest_version_is_the_last_file() -> None:
    script = ScriptDirectory(str(Path(migrating.__file__).parent / "migrations"))

    assert script.get_heads() == [migrating.NEWEST]


def test_opening_again_changes_nothing(database_url: str, open_database: Callable[[str], Database]) -> None:
    with open_database(database_url).writing() as connection:
        counters.change(connection, {A: 3})

    with open_database(database_url).reading() as connection:
        assert counters.read(connection, ["key:1"], ["2026-11"]) == {A: 3}


def test_a_newer_schema_is_refused(database_url: str, open_database: Callable[[str], Database]) -> None:
    with open_database(database_url).writing() as connection:
        connection.execute(text(f"UPDATE {migrating.VERSION_TABLE} SET version_num = '9999'"))

    with pytest.raises(SettingsError, match=r"has schema 9999, which a newer Streamtap made; .* knows up to 0002"):
        Database.open(database_url)


def test_a_database_of_the_first_schema_keeps_what_it_holds(
    database_url: str, open_database: Callable[[str], Database], monkeypatch: pytest.MonkeyPatch
) -> None:
    from alembic import command

    upgrade = command.upgrade
    with monkeypatch.context() as patch:
        patch.setattr(migrating, "NEWEST", "0001")
        patch.setattr(command, "upgrade", lambda config, _revision: upgrade(config, "0001"))
        with open_database(database_url).writing() as connection:
            counters.change(connection, {A: 3})
            assert not inspect(connection).has_table("harvest_jobs")

    with open_database(database_url).reading() as connection:
        assert counters.read(connection, ["key:1"], ["2026-11"]) == {A: 3}
        assert inspect(connection).has_table("harvest_jobs")
        assert "monthly_harvests" in {column["name"] for column in inspect(connection).get_columns("api_keys")}


def test_a_migration_that_fails_leaves_nothing(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    upgrade = migrating._upgrade

    def broken(connection: object, found: str | None) -> None:
        upgrade(connection, found)  # type: ignore[arg-type]
        raise RuntimeError("the power went")

    with monkeypatch.context() as patch:
        patch.setattr(migrating, "_upgrade", broken)
        with pytest.raises(RuntimeError, match="the power went"):
            Database.open(database_url)

    database = Database.open(database_url)
    with database.reading() as connection:
        assert inspect(connection).has_table("api_keys")
    database.close()


OPEN_AND_COUNT = """
import sys
from streamtap.server.db import Database, counters
database = Database.open(sys.argv[1])
for _ in range(5):
    with database.writing() as connection:
        counters.change(connection, {counters.CounterId("key:1", "2026-11", "input_tokens"): 1})
"""


def test_several_processes_open_a_new_database_at_once(
    database_url: str, open_database: Callable[[str], Database]
) -> None:
    running = [subprocess.Popen([sys.executable, "-c", OPEN_AND_COUNT, database_url]) for _ in range(2)]

    assert [process.wait() for process in running] == [0, 0]
    with open_database(database_url).reading() as connection:
        assert counters.read(connection, ["key:1"], ["2026-11"]) == {A: 10}


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("", "database must be an address such as sqlite:"),
        ("streamtap.db", "database must be an address such as sqlite:"),
        ("mysql://root:hunter2@here/there", "must be sqlite or postgresql.psycopg; got 'mysql'"),
        ("sqlite://", "must name a file"),
        ("sqlite:///:memory:", "must name a file"),
        (
            "postgresql+psycopg://ada:hunter2@127.0.0.1:1/none",
            r"ada:\*\*\*@127.0.0.1:1/none cannot be opened: .*refused",
        ),
    ],
)
def test_an_address_that_cannot_be_is_refused_without_its_password(address: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said) as raised:
        Database.open(address)

    assert "hunter2" not in str(raised.value)


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("to do: " * 1000)

    with pytest.raises(SettingsError, match=r"notes.txt cannot be opened: file is not a database"):
        Database.open(f"sqlite:///{file}")

    assert file.read_text() == "to do: " * 1000


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(SettingsError, match=r"file/streamtap.db cannot be opened: "):
        Database.open(f"sqlite:///{tmp_path}/file/streamtap.db")


def test_sqlite_s_file_is_for_its_owner_alone_and_in_wal(tmp_path: Path) -> None:
    file = tmp_path / "new" / "folder" / "streamtap.db"

    Database.open(f"sqlite:///{file}").close()

    assert file.stat().st_mode & 0o777 == 0o600
    connection = sqlite3.connect(file)
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    connection.close()


def test_a_block_that_raises_is_undone(database: Database) -> None:
    def broken() -> None:
        with database.writing() as connection:
            counters.change(connection, {A: 5})
            raise KeyError("no")

    with pytest.raises(KeyError):
        broken()

    with database.reading() as connection:
        assert counters.read(connection, ["key:1"], ["2026-11"]) == {}


def test_readers_do_not_wait_for_a_writer(database: Database) -> None:
    with database.writing() as connection:
        counters.change(connection, {A: 5})
        with database.reading() as other:
            assert counters.read(other, ["key:1"], ["2026-11"]) == {}


def test_an_amount_over_the_ceiling_is_not_held_and_the_others_are(database: Database) -> None:
    with database.writing() as connection:
        assert counters.hold(connection, [Amount(A, 7, 10), Amount(B, 11, 10)]) == {A}
        assert counters.hold(connection, [Amount(A, 3, 10), Amount(B, 10, 10)]) == {A, B}
        assert counters.hold(connection, [Amount(A, 1, 10), Amount(B, 1, 10)]) == set()
        assert counters.lock(connection, [A, B]) == {A: 10, B: 10}


def test_a_counter_is_exact_among_many_threads(database: Database) -> None:
    def try_one(_: int) -> bool:
        with database.writing() as connection:
            return bool(counters.hold(connection, [Amount(B, 1, 10), Amount(A, 1, 10)]))

    with ThreadPoolExecutor(20) as pool:
        assert sum(pool.map(try_one, range(60))) == 10


def test_an_error_of_the_driver_carries_no_values(database: Database) -> None:
    with pytest.raises(Exception, match="no_such_table") as raised, database.writing() as connection:
        connection.execute(text("INSERT INTO no_such_table VALUES (:secret)"), {"secret": "hunter2"})

    assert "hunter2" not in str(raised.value)
