from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from huggingface_hub import HfApi, constants

from streamtap.dataset import names
from streamtap.dataset.hub import HubSource
from streamtap.errors import TransferFailed
from streamtap.settings import Settings
from streamtap.testing.hub_server import HubServer, online_client

REPO = "tester/acts"
SHARD = names.hidden_file(3, 0)
INDEX_BYTES, SHARD_BYTES = b"index" * 1000, b"shard" * 1000


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(cache_dir=tmp_path / "cache", hub_cache_dir=tmp_path / "hf")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """The Hub that this process is told of."""
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    with HubServer(tmp_path / "hub") as server, online_client(server):
        server.add(REPO, dataset_in(tmp_path / "first"))
        server.reset_counts()
        yield server


@pytest.fixture
def offline(hub: HubServer) -> Iterator[Callable[[bool], None]]:
    """Tells the client that it is offline; undone before ``hub`` puts the client back as it was."""
    with pytest.MonkeyPatch.context() as patch:
        yield lambda value: patch.setattr(constants, "HF_HUB_OFFLINE", value)


def dataset_in(folder: Path, index: bytes = INDEX_BYTES) -> Path:
    for path, data in {names.INDEX: index, SHARD: SHARD_BYTES}.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    return folder


def source(hub: HubServer, settings: Settings, *, refresh: bool = False) -> HubSource:
    return HubSource(REPO, endpoint=hub.endpoint, settings=settings, refresh=refresh)


def asked(hub: HubServer) -> list[str]:
    return [request.method for request in hub.requests]


def by_another_program(hub: HubServer, settings: Settings) -> None:
    api = HfApi(endpoint=hub.endpoint, token=hub.token)
    api.snapshot_download(REPO, repo_type="dataset", cache_dir=settings.hub_cache_dir)
    hub.reset_counts()


def test_what_other_programs_downloaded_costs_one_small_request(hub: HubServer, settings: Settings) -> None:
    by_another_program(hub, settings)

    for requests in (["GET"], []):
        dataset = source(hub, settings)
        assert dataset.read_tail(names.INDEX, 10) == (INDEX_BYTES[-10:], len(INDEX_BYTES))
        assert dataset.read_range(SHARD, 100, 300) == SHARD_BYTES[100:300]
        assert dataset.fetch(SHARD).read_bytes() == SHARD_BYTES
        assert asked(hub) == requests
        assert hub.bytes_out() < 1000
        hub.reset_counts()


def test_what_other_programs_downloaded_is_all_there_is_offline(
    hub: HubServer, settings: Settings, offline: Callable[[bool], None]
) -> None:
    by_another_program(hub, settings)
    offline(True)

    assert source(hub, settings).fetch(names.INDEX).read_bytes() == INDEX_BYTES
    with pytest.raises(TransferFailed, match="HF_HUB_OFFLINE is set"):
        HubSource(REPO, endpoint=hub.endpoint.replace("127.0.0.1", "localhost"), settings=settings).fetch(names.INDEX)
    assert asked(hub) == []


def test_what_was_read_here_last_is_read(hub: HubServer, settings: Settings, tmp_path: Path) -> None:
    old = source(hub, settings)
    old.read_range(SHARD, 0, 10)
    new = hub.add(REPO, dataset_in(tmp_path / "second", index=b"new"))
    by_another_program(hub, settings)

    assert source(hub, settings).version == old.version
    assert source(hub, settings, refresh=True).version == new.id
    assert source(hub, settings).version == new.id
    assert asked(hub) == ["GET"]


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[HubServer]:
    """Another Hub with a dataset of the same name."""
    with HubServer(tmp_path / "elsewhere") as server:
        server.add(REPO, dataset_in(tmp_path / "second", index=b"of another server"))
        server.reset_counts()
        yield server


@pytest.mark.parametrize("is_offline", [False, True])
def test_two_servers_share_a_cache_and_are_kept_apart(
    hub: HubServer, elsewhere: HubServer, settings: Settings, offline: Callable[[bool], None], is_offline: bool
) -> None:
    assert source(hub, settings).fetch(names.INDEX).read_bytes() == INDEX_BYTES
    assert source(elsewhere, settings).fetch(names.INDEX).read_bytes() == b"of another server"
    hub.reset_counts()
    elsewhere.reset_counts()
    offline(is_offline)

    for _again in range(2):
        assert source(hub, settings).fetch(names.INDEX).read_bytes() == INDEX_BYTES
        assert source(elsewhere, settings).fetch(names.INDEX).read_bytes() == b"of another server"
    assert asked(hub) == asked(elsewhere) == []


def test_the_client_is_not_believed_offline_what_came_from_another_server(
    hub: HubServer, elsewhere: HubServer, settings: Settings, offline: Callable[[bool], None]
) -> None:
    source(elsewhere, settings).fetch(names.INDEX)
    offline(True)

    with pytest.raises(TransferFailed, match="HF_HUB_OFFLINE is set"):
        source(hub, settings).fetch(names.INDEX)


@pytest.mark.parametrize("other", ["https://127.0.0.1:80", "http://127.0.0.1-80", "http://127.0.0.1/80"])
def test_addresses_that_look_alike_are_kept_apart(
    settings: Settings, offline: Callable[[bool], None], other: str
) -> None:
    HubSource(REPO, endpoint="http://127.0.0.1:80", settings=settings).moved_to("a" * 40)
    offline(True)

    assert HubSource(REPO, endpoint="http://127.0.0.1:80", settings=settings).version == "a" * 40
    with pytest.raises(TransferFailed, match="HF_HUB_OFFLINE is set"):
        _ = HubSource(REPO, endpoint=other, settings=settings).version
