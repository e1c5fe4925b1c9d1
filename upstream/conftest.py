"""A real vLLM, and the small real model that it runs; no test here asks the internet for anything."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from streamtap.engines.demo_model import demo_folder, is_unpacked
from streamtap.settings import Settings

# Before any library reads them. Keys and values of the demo model take little.
os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
# As tests/ has them, so that both compute alike; vLLM would bind threads to cores that others may use.
os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2")}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--vllm",
        metavar="PROGRAM",
        default=str(Path(sys.executable).with_name("vllm")),
        help="the vllm program of an environment that upstream/make-environment.sh made; else the one beside Python",
    )


@pytest.fixture(scope="session")
def vllm_program(pytestconfig: pytest.Config) -> str:
    """Path of the ``vllm`` program, in whose environment vllm-lens is, too."""
    program = Path(pytestconfig.getoption("--vllm")).absolute()
    if not program.is_file():
        pytest.fail(
            f"these tests need the program of an environment with vLLM, named by --vllm=PROGRAM; there is no {program}."
            " `make test-vllm` makes one and runs them.",
            pytrace=False,
        )
    return str(program)


@pytest.fixture(scope="session")
def outside() -> Settings:
    """The settings that the tests were started with, before they have their own."""
    return Settings.from_environment()


@pytest.fixture(scope="session", autouse=True)
def cache_dir_of_the_session(outside: Settings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing is put where the user keeps things."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STREAMTAP_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def demo(outside: Settings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Folder of a small real model: the one in the user's cache, or one that goes away with the tests."""
    if is_unpacked(outside):
        yield str(demo_folder(outside))
        return
    folder = tmp_path_factory.mktemp("demo")
    yield str(demo_folder(replace(outside, cache_dir=folder)))
    shutil.rmtree(folder)
