"""What every test lives under: no network, no folder of the person who runs it, one thread a process."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

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
