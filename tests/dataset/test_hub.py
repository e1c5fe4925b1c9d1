from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from huggingface_hub import HfApi, constants, scan_cache_dir

from streamtap.dataset import names
from streamtap.dataset.hub import HubSource
from streamtap.errors import AccessDenied, DatasetNotFound, InvalidInput, TransferFailed
from streamtap.settings import Settings
from streamtap.testing.hub_server import HubServer, online_client

REPO = "tester/acts"
SHARD = "tensors/hidden_layer003_shard000.safetensors"
INDEX_BYTES = random.Random(1).randbytes(70_000)
SHARD_BYTES = random.Random(2).randbytes(2_000_000)
CDN_SHARD = r"GET /cdn/.*hidden_layer003"


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(cache_dir=tmp_path / "cache", hub_cache_dir=tmp_path / "hf")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    with HubServer(tmp_path_factory.mktemp("hub")) as server:
        yield server


@pytest.fixture
def hub(server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """The server as if it had just been made; a test may have stopped it."""
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    with online_client(server.start()):
        HfApi(endpoint=server.endpoint, token=server.token).delete_repo(REPO, repo_type="dataset", missing_ok=True)
        server.clear_faults()
        server.add(REPO, dataset_in(tmp_path / "first"))
        server.reset_counts()
        yield server


def dataset_in(folder: Path, index: bytes = INDEX_BYTES) -> Path:
    for path, data in {names.INDEX: index, SHARD: SHARD_BYTES, names.CARD: b"---\nlicense: mit\n---\n"}.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    return folder


def source(hub: HubServer, settings: Settings, **options: object) -> HubSource:
    return HubSource(REPO, endpoint=hub.endpoint, settings=settings, **options)  # type: ignore[arg-type]


def asked(hub: HubServer) -> list[str]:
    return [request.method for request in hub.requests]


def test_the_first_use_asks_for_the_commit_once(hub: HubServer, settings: Settings) -> None:
    dataset = source(hub, settings)
    assert asked(hub) == []

    assert [dataset.version, dataset.version] == [hub.commits(REPO)[0].id] * 2
    assert asked(hub) == ["GET"]
    assert dataset.name == REPO


def test_a_commit_is_not_asked_for(hub: HubServer, settings: Settings) -> None:
    commit = hub.commits(REPO)[0].id

    assert source(hub, settings, revision=commit, refresh=True).version == commit
    assert asked(hub) == []


def test_a_range_costs_its_bytes_and_one_request(hub: HubServer, settings: Settings) -> None:
    dataset = source(hub, settings)
    assert dataset.read_range(SHARD, 1_000_000, 1_001_000) == SHARD_BYTES[1_000_000:1_001_000]
    hub.reset_counts()

    assert dataset.read_range(SHARD, 5, 12) == SHARD_BYTES[5:12]
    assert [(request.method, request.bytes_out) for request in hub.requests] == [("GET", 7)]


def test_a_tail_takes_two_requests(hub: HubServer, settings: Settings) -> None:
    dataset = source(hub, settings)
    assert dataset.version
    hub.reset_counts()

    assert dataset.read_tail(names.INDEX, 1000) == (INDEX_BYTES[-1000:], len(INDEX_BYTES))
    assert asked(hub) == ["HEAD", "GET"]
    assert hub.bytes_out() == 1000
    assert dataset.read_tail(names.INDEX, 1 << 30) == (INDEX_BYTES, len(INDEX_BYTES))


def test_small_files_of_git_are_read_by_range_too(hub: HubServer, settings: Settings) -> None:
    dataset = source(hub, settings)

    assert dataset.read_range(names.CARD, 4, 11) == b"license"
    assert dataset.read_tail(names.CARD, 4) == (b"---\n", 21)


@pytest.mark.parametrize(("start", "stop"), [(0, 0), (1_999_990, 2_000_010), (3_000_000, 3_000_001)])
def test_a_range_ends_where_the_file_does(hub: HubServer, settings: Settings, start: int, stop: int) -> None:
    dataset = source(hub, settings)

    for _again in range(2):
        assert dataset.read_range(SHARD, start, stop) == SHARD_BYTES[start:stop]


def test_a_range_that_is_none_is_refused(hub: HubServer, settings: Settings) -> None:
    with pytest.raises(InvalidInput, match="got 5 and 4"):
        source(hub, settings).read_range(SHARD, 5, 4)


def test_the_second_time_is_offline(hub: HubServer, settings: Settings) -> None:
    first = source(hub, settings)
    first.read_range(SHARD, 10, 20)
    first.read_tail(names.INDEX, 100)
    whole = first.fetch(names.CARD)
    hub.stop()

    second = source(hub, settings)
    assert second.version == first.version
    assert second.read_range(SHARD, 10, 20) == SHARD_BYTES[10:20]
    assert second.read_tail(names.INDEX, 100) == (INDEX_BYTES[-100:], len(INDEX_BYTES))
    assert second.size_bytes(SHARD) == len(SHARD_BYTES)
    assert second.on_disk(names.CARD) == second.fetch(names.CARD) == whole
    assert second.on_disk(SHARD) is None


def test_a_newer_commit_is_seen_on_refresh_only(hub: HubServer, settings: Settings, tmp_path: Path) -> None:
    old = source(hub, settings)
    old.fetch(names.INDEX)
    new = hub.add(REPO, dataset_in(tmp_path / "second", index=b"new"))

    assert source(hub, settings).fetch(names.INDEX).read_bytes() == INDEX_BYTES
    fresh = source(hub, settings, refresh=True)
    assert fresh.on_disk(names.INDEX) is None
    assert fresh.fetch(names.INDEX).read_bytes() == b"new"
    assert old.fetch(names.INDEX).read_bytes() == INDEX_BYTES
    assert source(hub, settings).version == new.id


def test_a_repository_of_which_nothing_was_read_is_looked_at_again(
    hub: HubServer, settings: Settings, tmp_path: Path
) -> None:
    with pytest.raises(DatasetNotFound, match="no such file"):
        source(hub, settings).read_tail("index/other.parquet", 100)
    new = hub.add(REPO, dataset_in(tmp_path / "second", index=b"new"))

    assert source(hub, settings).version == new.id


def test_tags_and_branches_are_revisions(hub: HubServer, settings: Settings, tmp_path: Path) -> None:
    HfApi(endpoint=hub.endpoint, token=hub.token).create_tag(REPO, tag="v1", repo_type="dataset")
    hub.add(REPO, dataset_in(tmp_path / "second", index=b"new"))

    tagged = source(hub, settings, revision="v1")
    assert tagged.fetch(names.INDEX).read_bytes() == INDEX_BYTES
    assert tagged.name == f"{REPO}@v1"
    assert source(hub, settings).fetch(names.INDEX).read_bytes() == b"new"


@pytest.mark.parametrize("revision", ["", "../main", "a//b", "a\nb"])
def test_a_revision_that_none_can_be_is_refused(hub: HubServer, settings: Settings, revision: str) -> None:
    with pytest.raises(InvalidInput, match="revision must be a branch"):
        source(hub, settings, revision=revision)


def test_a_whole_file_lies_in_the_cache_of_the_hub_client(hub: HubServer, settings: Settings) -> None:
    came: list[int] = []
    dataset = source(hub, settings)

    file = dataset.fetch(SHARD, advance=came.append)
    assert file.read_bytes() == SHARD_BYTES
    assert sum(came) == len(SHARD_BYTES)
    cache = scan_cache_dir(settings.hub_cache_dir)
    (repo,) = cache.repos
    assert (repo.repo_id, repo.repo_type, list(repo.refs)) == (REPO, "dataset", ["main"])
    assert cache.warnings == []


def test_a_damaged_file_is_replaced(hub: HubServer, settings: Settings) -> None:
    dataset = source(hub, settings)
    file = dataset.fetch(SHARD)
    file.write_bytes(b"damaged")

    assert dataset.fetch(SHARD).read_bytes() == b"damaged"
    assert dataset.fetch(SHARD, again=True).read_bytes() == SHARD_BYTES


def test_a_server_without_ranges_is_not_read_to_the_end(
    hub: HubServer, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = tmp_path / "large" / SHARD
    large.parent.mkdir(parents=True)
    large.write_bytes(SHARD_BYTES + bytes(48 << 20))
    hub.add(REPO, tmp_path / "large")
    monkeypatch.setattr("streamtap.testing.hub_server.ranges.byte_range", lambda *_: None)

    assert source(hub, settings).read_range(SHARD, 100, 200) == SHARD_BYTES[100:200]
    # What the two ends of the connection hold back is not nothing.
    assert hub.bytes_out("hidden_layer003") < 24 << 20


def test_another_range_than_asked_for_is_not_taken(
    hub: HubServer, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamtap.testing.hub_server.ranges.byte_range", lambda *_: (0, 50))

    with pytest.raises(TransferFailed, match="sent bytes 0 to 50 where 100 to 200 were asked for"):
        source(hub, settings, sleep=lambda _: None).read_range(SHARD, 100, 200)


def test_a_link_that_ran_out_is_asked_for_anew(hub: HubServer, settings: Settings) -> None:
    dataset = source(hub, settings)
    dataset.read_range(SHARD, 0, 10)
    hub.fail(CDN_SHARD, status=403)
    hub.reset_counts()

    assert dataset.read_range(SHARD, 10, 20) == SHARD_BYTES[10:20]
    assert asked(hub) == ["GET", "HEAD", "GET"]


def test_a_link_that_never_works_is_said(hub: HubServer, settings: Settings) -> None:
    hub.fail(CDN_SHARD, status=403, times=9)

    with pytest.raises(AccessDenied, match="HTTP 403") as refused:
        source(hub, settings).read_range(SHARD, 0, 10)
    assert "signature" not in str(refused.value)


def test_a_cut_connection_is_tried_again(hub: HubServer, settings: Settings) -> None:
    waits: list[float] = []
    hub.cut(CDN_SHARD, after_bytes=500)

    assert source(hub, settings, sleep=waits.append).read_range(SHARD, 0, 1000) == SHARD_BYTES[:1000]
    assert len(waits) == 1


def test_a_busy_server_is_waited_for_as_it_asks(hub: HubServer, settings: Settings) -> None:
    waits: list[float] = []
    hub.fail("GET /api/datasets", status=429, retry_after=7, times=2)

    assert source(hub, settings, sleep=waits.append).version == hub.commits(REPO)[0].id
    assert [int(wait) for wait in waits] == [7, 7]


def test_patience_ends(hub: HubServer, settings: Settings) -> None:
    waits: list[float] = []
    hub.fail("GET /api/datasets", status=503, times=1000)

    with pytest.raises(TransferFailed, match="looking at tester/acts failed for longer than we wait.*HTTP 503"):
        _ = source(hub, settings, sleep=waits.append, patience_seconds=100).version
    assert 60 < sum(waits) <= 100


def test_a_server_that_was_never_there_is_not_waited_for_long(hub: HubServer, settings: Settings) -> None:
    waits: list[float] = []
    hub.stop()

    with pytest.raises(TransferFailed, match="Check the network"):
        _ = source(hub, settings, sleep=waits.append).version
    assert sum(waits) < 31


def test_offline_mode_is_said_at_once(hub: HubServer, settings: Settings) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        with pytest.raises(TransferFailed, match="HF_HUB_OFFLINE is set"):
            source(hub, settings).fetch(SHARD)
    assert asked(hub) == []


@pytest.mark.parametrize("token", [None, "hf_test"])
def test_an_absent_dataset_may_be_private(hub: HubServer, settings: Settings, token: str | None) -> None:
    with pytest.raises(DatasetNotFound, match="none of that name.*private.*hf auth login"):
        HubSource("tester/absent", endpoint=hub.endpoint, settings=settings, token=token).fetch(SHARD)


def test_a_private_dataset_needs_a_token(hub: HubServer, settings: Settings) -> None:
    HfApi(endpoint=hub.endpoint, token=hub.token).update_repo_settings(REPO, private=True, repo_type="dataset")

    with pytest.raises(DatasetNotFound, match="it is private; to read a private one pass token="):
        source(hub, settings).fetch(names.CARD)
    dataset = source(hub, settings, token="hf_read")
    assert dataset.read_range(names.CARD, 4, 11) == b"license"
    assert dataset.fetch(SHARD).read_bytes() == SHARD_BYTES


def test_a_revision_that_is_not_there_is_named(hub: HubServer, settings: Settings) -> None:
    with pytest.raises(DatasetNotFound, match="tester/acts@v9: tester/acts has no such branch"):
        source(hub, settings, revision="v9").fetch(SHARD)


def test_threads_share_one_pin_and_one_location(hub: HubServer, settings: Settings) -> None:
    dataset = source(hub, settings)

    with ThreadPoolExecutor(8) as pool:
        parts = list(pool.map(lambda n: dataset.read_range(SHARD, n * 1000, (n + 1) * 1000), range(20)))
    assert b"".join(parts) == SHARD_BYTES[:20_000]
    assert asked(hub).count("HEAD") == 1
    assert hub.bytes_out("hidden_layer003") == 20_000


@pytest.mark.parametrize("name", ["", "a--b/c", "a/b/c", "x.git", "a b"])
def test_names_that_the_hub_cannot_have_are_refused(settings: Settings, name: str) -> None:
    with pytest.raises(InvalidInput, match="is not the name of a dataset on the Hub"):
        HubSource(name, settings=settings)


@pytest.mark.parametrize("endpoint", ["localhost:80", "ftp://x", "https://"])
def test_addresses_that_are_none_are_refused(settings: Settings, endpoint: str) -> None:
    with pytest.raises(InvalidInput, match="the address of the Hub must be"):
        HubSource(REPO, endpoint=endpoint, settings=settings)
