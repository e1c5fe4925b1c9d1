"""A local Hub, and ``lmprobe`` in an environment of its own that talks to it."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamtap.engines.demo_model import demo_folder, is_unpacked
from streamtap.settings import Settings
from streamtap.testing import HubServer, online_client

HERE = Path(__file__).parent
VERSION = "0.10.3"
_LOG_LINES = 40

Found = Mapping[str, Any]
#: Runs one job of ``lmprobe_job.py`` by its name and gives what it found.
Job = Callable[..., Found]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--lmprobe", metavar="PYTHON", help="Python of an environment made of interop/requirements.txt")


class Lmprobe:
    """The library in its process; jobs are run one after the other."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process, self._log = process, log
        self.version = self._answer()

    def run(self, name: str, asked: Mapping[str, Any], cache: Path, out: Path) -> Found:
        """What a job found; its traceback is the failure's text."""
        assert self._process.stdin is not None
        job = {"do": name, "with": dict(asked), "cache": str(cache), "out": str(out)}
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        if said := self._answer():
            pytest.fail(f"lmprobe failed at {name}:\n{json.loads(said)}\nIts log ends:\n{self._end_of_log()}")
        with np.load(out) as arrays:
            found = {key: arrays[key] for key in arrays.files}
        return {key.removeprefix("json:"): _read(key, value) for key, value in found.items()}

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            pytest.fail(f"the process of lmprobe ended; its log ends:\n{self._end_of_log()}")
        return line.strip()

    def _end_of_log(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-_LOG_LINES:])


def _read(key: str, value: np.ndarray[Any, Any]) -> Any:
    return json.loads(str(value)) if key.startswith("json:") else value


@pytest.fixture(scope="session")
def outside() -> Settings:
    """The user's own settings, before the tests have theirs."""
    return Settings.from_environment()


@pytest.fixture(scope="session")
def demo(outside: Settings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Folder of a small real model: the one in the user's cache, or one that goes away with the tests."""
    if is_unpacked(outside):
        yield str(demo_folder(outside))
        return
    folder = tmp_path_factory.mktemp("demo")
    yield str(demo_folder(replace(outside, cache_dir=folder)))
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def hub(outside: Settings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    """A Hub that this process, too, takes for the only one; what is fetched or kept goes away with the tests."""
    folder = tmp_path_factory.mktemp("ours")
    with HubServer(tmp_path_factory.mktemp("hub")) as server, pytest.MonkeyPatch.context() as patch:
        own = {"STREAMTAP_CACHE_DIR": str(folder / "cache"), "HF_HOME": str(folder / "hf"), "HF_HUB_CACHE": ""}
        for name, value in (own | server.environment).items():
            patch.setenv(name, value)
        with online_client(server):
            yield server


@pytest.fixture(scope="session")
def lmprobe_process(
    hub: HubServer, pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Lmprobe]:
    python = pytestconfig.getoption("--lmprobe")
    if not python or not Path(python).is_file():
        pytest.fail(
            f"these tests need the Python of an environment with lmprobe {VERSION}, named by --lmprobe=PYTHON; got "
            f"{python!r}. `make test-interop` makes one and runs them.",
            pytrace=False,
        )
    with _started(python, hub, tmp_path_factory.mktemp("lmprobe")) as running:
        assert running.version == VERSION
        yield running


@contextmanager
def _started(python: str, hub: HubServer, folder: Path) -> Iterator[Lmprobe]:
    own = {"HOME": str(folder), "HF_HOME": str(folder / "hf"), "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
    environment = {"PATH": os.environ["PATH"], **own, **hub.environment}
    log = folder / "log.txt"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [python, str(HERE / "lmprobe_job.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment,
            text=True,
        )
    try:
        yield Lmprobe(process, log)
    finally:
        # It ends with its standard input.
        process.communicate(timeout=60)


@pytest.fixture(scope="module")
def new_lmprobe(lmprobe_process: Lmprobe, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Job]:
    """Makes a runner of jobs with an empty cache of their own."""

    def new() -> Job:
        folder = tmp_path_factory.mktemp("jobs")
        count = itertools.count()

        def run(name: str, **asked: Any) -> Found:
            return lmprobe_process.run(name, asked, folder / "cache", folder / f"found-{next(count)}.npz")

        return run

    return new


@pytest.fixture
def lmprobe(new_lmprobe: Callable[[], Job]) -> Job:
    """Runs jobs; those of one test share a cache."""
    return new_lmprobe()
