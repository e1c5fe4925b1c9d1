from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import HfApi, constants, file_download
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import _http

from streamtap.testing.hub_server import HubServer, online_client

THINGS = "tester/things"
LARGE = bytes(range(256)) * 8000


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    with HubServer(tmp_path / "hub", chunk_bytes=1_500_000) as server, online_client(server):
        yield server


@pytest.fixture
def api(hub: HubServer) -> HfApi:
    client = HfApi(endpoint=hub.endpoint, token=hub.token)
    client.create_repo(THINGS, repo_type="dataset")
    return client


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that the client waited; it does not wait for real."""
    waited: list[float] = []
    clock = SimpleNamespace(sleep=waited.append, time=time.time)
    monkeypatch.setattr(_http, "time", clock)
    monkeypatch.setattr(file_download, "time", clock)
    return waited


def _upload(api: HfApi, content: bytes = LARGE, path: str = "large.bin") -> None:
    api.upload_file(path_or_fileobj=content, path_in_repo=path, repo_id=THINGS, repo_type="dataset")


def _download(api: HfApi, tmp_path: Path) -> bytes:
    file = api.hf_hub_download(THINGS, "large.bin", repo_type="dataset", cache_dir=tmp_path / "cache")
    return Path(file).read_bytes()


@pytest.mark.parametrize("status", [429, 500, 503])
def test_an_upload_that_is_refused_is_sent_again(hub: HubServer, api: HfApi, waits: list[float], status: int) -> None:
    fault = hub.fail("^PUT /cdn/.*/parts/2", status=status, times=2)

    _upload(api)

    assert hub.read(THINGS, "large.bin") == LARGE
    assert (fault.used, fault.left) == (2, 0)
    assert [each.status for each in hub.requests if each.path.endswith("/parts/2")] == [status, status, 200]
    assert waits == [1, 2]


def test_a_client_waits_as_long_as_it_is_told(hub: HubServer, api: HfApi, waits: list[float]) -> None:
    hub.fail("/preupload/", status=429, retry_after=7)

    _upload(api)

    assert waits == [8.0]


def test_a_commit_that_fails_changes_nothing(hub: HubServer, api: HfApi) -> None:
    head = hub.commits(THINGS)[0].id
    hub.fail("/commit/main$", status=500)
    with pytest.raises(HfHubHTTPError, match="500"):
        _upload(api)
    assert hub.commits(THINGS)[0].id == head

    fault = hub.stale_parent()
    with pytest.raises(HfHubHTTPError) as refused:
        _upload(api)
    assert refused.value.response.status_code == 412
    assert fault.used == 1

    hub.reset_counts()
    _upload(api)
    assert hub.bytes_in("/cdn/") == 0  # what was sent before is there
    assert hub.read(THINGS, "large.bin") == LARGE


def test_an_upload_that_is_cut_leaves_nothing(hub: HubServer, api: HfApi, waits: list[float]) -> None:
    fault = hub.cut("^PUT /cdn/.*/parts/1", after_bytes=500_000)

    _upload(api)

    assert fault.used == 1
    assert len(waits) == 1
    assert hub.read(THINGS, "large.bin") == LARGE
    assert not [file for file in (hub.folder / "datasets" / THINGS / "lfs").iterdir() if file.is_file()]


def test_a_download_that_is_cut_goes_on_where_it_was(
    hub: HubServer, api: HfApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 500_000)  # the client keeps whole pieces of this size
    _upload(api)
    hub.reset_counts()
    fault = hub.cut("^GET /cdn/", after_bytes=1_200_000)

    assert _download(api, tmp_path) == LARGE

    first, second = [each for each in hub.requests if each.path.startswith("/cdn/")]
    assert fault.used == 1
    assert first.bytes_out == 1_200_000
    assert (second.status, second.range) == (206, "bytes=1000000-")
    assert second.bytes_out == len(LARGE) - 1_000_000


def test_only_a_body_that_is_long_enough_is_cut(hub: HubServer, api: HfApi, tmp_path: Path) -> None:
    fault = hub.cut("^GET ", after_bytes=len(LARGE))
    _upload(api)

    assert _download(api, tmp_path) == LARGE
    assert fault.used == 0


def test_one_byte_is_changed(hub: HubServer, api: HfApi, tmp_path: Path) -> None:
    _upload(api)
    fault = hub.corrupt(r"^GET /cdn/.*/large\.bin")

    first, second = (_download(api, tmp_path / name) for name in "ab")

    assert [place for place in range(len(LARGE)) if first[place] != LARGE[place]] == [len(LARGE) // 2]
    assert second == LARGE
    assert fault.used == 1


def test_a_commit_whose_answer_is_lost_is_there(hub: HubServer, api: HfApi) -> None:
    hub.lose_answer("/commit/main$")
    with pytest.raises(Exception, match="disconnected|closed"):
        _upload(api)

    assert hub.read(THINGS, "large.bin") == LARGE


def test_faults_are_taken_back(hub: HubServer, api: HfApi) -> None:
    fault = hub.fail(".", status=503, times=100)
    hub.clear_faults()

    _upload(api, b"small", "small.txt")

    assert (fault.used, fault.left) == (0, 0)
