from __future__ import annotations

import subprocess
import sys
import time

import pytest

from streamtap.errors import HarvestUnavailable, InvalidInput
from streamtap.harvest.cluster_pool import Needs, connected


@pytest.mark.parametrize(("cpus", "gpus"), [(0, 0), (-1, 1), (float("nan"), 0)])
def test_an_engine_needs_something(cpus: float, gpus: float) -> None:
    with pytest.raises(InvalidInput, match="an engine needs CPUs or GPUs"):
        Needs(cpus, gpus)


@pytest.mark.parametrize(
    ("needs", "resources", "expected"),
    [
        (Needs(2), {"CPU": 5.0}, 2),
        (Needs(2, 1), {"CPU": 16.0, "GPU": 4.0}, 4),
        (Needs(2, 1), {"CPU": 6.0, "GPU": 4.0}, 3),
        (Needs(0, 0.5), {"CPU": 6.0, "GPU": 1.0}, 2),
        (Needs(1, 1), {"CPU": 6.0}, 0),
        (Needs(1), {}, 0),
    ],
)
def test_what_fits_a_machine(needs: Needs, resources: dict[str, float], expected: int) -> None:
    assert needs.fit(resources) == expected


@pytest.mark.parametrize("address", ["127.0.0.1:1", "[::1]:1", "127.0.0.1:99999", "no-address"])
def test_a_cluster_that_is_not_there_is_said_within_seconds(address: str) -> None:
    started = time.monotonic()

    with pytest.raises(HarvestUnavailable, match="no Ray cluster can be used at .*name its address"):
        connected(address).__enter__()

    assert time.monotonic() - started < 10


def test_without_ray_it_is_said_what_to_install() -> None:
    code = "import sys; sys.modules['ray'] = None; import streamtap.harvest.cluster"

    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert "MissingExtra: a harvest on a cluster needs Ray: pip install 'streamtap[ray]'." in ended.stderr
