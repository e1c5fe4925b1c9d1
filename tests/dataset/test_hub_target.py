from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants

from streamtap.dataset import names
from streamtap.dataset.hub import HubSource
from streamtap.dataset.hub_target import HubTarget
from streamtap.errors import AccessDenied, DatasetExists, InvalidInput, TransferFailed
from streamtap.settings import Settings
from streamtap.testing.hub_server import HubServer, online_client

REPO = "tester/acts"
SHARDS = {names.hidden_file(layer, 0): random.Random(layer).randbytes(50_000) for layer in range(3)}
LAST = {names.CARD: b"---\nlicense: mit\n---\n# A dataset\n", names.INDEX: random.Random(9).randbytes(3000)}
COMMIT = "POST .*/commit/main"


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(cache_dir=tmp_path / "cache", hub_cache_dir=tmp_path / "hf")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    with HubServer(tmp_path_factory.mktemp("hub"), page_size=2) as server:
        yield server


@pytest.fixture
def hub(server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """The server as if it had just been made; a test may have stopped it."""
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    with online_client(server.start()):
        HfApi(endpoint=server.endpoint, token=server.token).delete_repo(REPO, repo_type="dataset", missing_ok=True)
        server.clear_faults()
        server.reset_counts()
        yield server


@pytest.fixture
def api(hub: HubServer) -> HfApi:
    return HfApi(endpoint=hub.endpoint, token=hub.token)


@pytest.fixture
def target(hub: HubServer, settings: Settings) -> Callable[..., HubTarget]:
    def make(**options: Any) -> HubTarget:
        return HubTarget(REPO, **{"token": hub.token, "endpoint": hub.endpoint, "settings": settings, **options})

    return make


def put(target: HubTarget, shards: Mapping[str, bytes] = SHARDS) -> None:
    for path, data in shards.items():
        file = target.room(path)
        file.write_bytes(data)
        target.put(path, file)


def publish(target: HubTarget, *, stale: tuple[str, ...] = (), last: Mapping[str, bytes] = LAST) -> str:
    files = {}
    for path, data in last.items():
        files[path] = target.room(path)
        files[path].write_bytes(data)
    return target.publish(files, stale, "Publish acts")


def push(target: HubTarget, shards: Mapping[str, bytes] = SHARDS, **options: Any) -> str:
    target.look()
    put(target, shards)
    address = publish(target, **options)
    target.close()
    return address


def held(hub: HubServer) -> dict[str, bytes]:
    paths = [path for path in hub.files(REPO) if path != ".gitattributes"]
    return {path: hub.read(REPO, path) for path in paths}


def titles(hub: HubServer) -> list[str]:
    return [commit.title for commit in hub.commits(REPO)]


def test_a_push_is_one_commit(hub: HubServer, target: Callable[..., HubTarget]) -> None:
    assert push(target()) == target().url == f"{hub.endpoint}/datasets/{REPO}"
    assert held(hub) == {**SHARDS, **LAST}
    assert titles(hub).count("Publish acts") == 1
    assert len(titles(hub)) == 2


def test_nothing_shows_before_the_commit(hub: HubServer, target: Callable[..., HubTarget]) -> None:
    push(target(), {names.hidden_file(0, 0): b"old" * 9})
    before = held(hub)
    again = target()
    again.look()
    put(again)

    assert held(hub) == before


def test_look_says_what_is_there(hub: HubServer, target: Callable[..., HubTarget]) -> None:
    assert target().look() is None
    push(target(private=True))

    found = target().look()
    assert found is not None
    assert dict(found.files) == hub.files(REPO)
    large = {**SHARDS, names.INDEX: LAST[names.INDEX]}
    assert dict(found.sums) == {path: hashlib.sha256(data).hexdigest() for path, data in large.items()}


def test_look_writes_nothing(hub: HubServer, target: Callable[..., HubTarget]) -> None:
    target().look()

    assert {request.method for request in hub.requests} == {"GET"}


@pytest.mark.parametrize(("there", "asked"), [(True, False), (False, True)])
def test_another_visibility_stops_before_a_byte_is_sent(
    hub: HubServer, target: Callable[..., HubTarget], there: bool, asked: bool
) -> None:
    push(target(private=there))
    hub.reset_counts()

    with pytest.raises(InvalidInput, match=f"private={asked} was asked for; nothing was sent"):
        target(private=asked).look()
    with pytest.raises(InvalidInput, match="nothing was sent"):
        put(target(private=asked))
    assert hub.bytes_in() == 0


@pytest.mark.parametrize("private", [None, True])
def test_the_same_visibility_is_fine(hub: HubServer, target: Callable[..., HubTarget], private: bool | None) -> None:
    push(target(private=True))

    assert target(private=private).look() is not None


def test_large_files_leave_this_machine(hub: HubServer, target: Callable[..., HubTarget], settings: Settings) -> None:
    came: list[int] = []
    publisher = target()
    file = publisher.room(names.hidden_file(0, 0))
    file.write_bytes(b"x" * 100)
    publisher.put(names.hidden_file(0, 0), file, advance=came.append)

    assert came == [100]
    assert not file.exists()
    publisher.close()
    assert list((settings.datasets_dir / "outgoing").iterdir()) == []


def test_small_files_of_git_are_kept_until_the_commit(hub: HubServer, target: Callable[..., HubTarget]) -> None:
    push(target(), {"tensors/notes.txt": b"small", **SHARDS})

    assert held(hub)["tensors/notes.txt"] == b"small"


def test_threads_may_put(hub: HubServer, target: Callable[..., HubTarget]) -> None:
    publisher = target()
    publisher.look()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda path: put(publisher, {path: SHARDS[path]}), SHARDS))
    publish(publisher)

    assert held(hub) == {**SHARDS, **LAST}
    assert [request.path for request in hub.requests].count("/api/repos/create") == 1


def test_pushing_the_same_again_changes_and_sends_nothing(hub: HubServer, target: Callable[..., HubTarget]) -> None:
    push(target())
    hub.reset_counts()

    assert push(target()) == f"{hub.endpoint}/datasets/{REPO}"
    assert len(titles(hub)) == 2
    assert set(hub.objects().values()) == {0}


def test_a_push_that_was_cut_short_sends_only_what_is_missing(hub: HubServer, target: Callable[..., HubTarget]) -> None:
    for n_sent in range(len(SHARDS)):
        put(target(), dict(list(SHARDS.items())[:n_sent]))
        assert n_sent == 0 or held(hub) == {}
    push(target())

    assert set(hub.objects().values()) == {1}
    assert held(hub) == {**SHARDS, **LAST}


def test_stale_files_go_in_the_same_commit(hub: HubServer, target: Callable[..., HubTarget]) -> None:
    push(target())
    first, *others = SHARDS
    push(target(), {first: b"new"}, stale=(*others, first, "tensors/never_there.safetensors"))

    assert held(hub) == {first: b"new", **LAST}
    assert len(titles(hub)) == 3


def test_a_busy_server_is_waited_for_as_it_asks(hub: HubServer, target: Callable[..., HubTarget]) -> None:
    waits: list[float] = []
    fault = hub.fail(COMMIT, status=429, retry_after=3, times=2)

    push(target(sleep=waits.append))
    assert fault.used == 2
    assert [int(wait) for wait in waits] == [3, 3]
    assert len(titles(hub)) == 2


@pytest.mark.parametrize("status", [500, 503])
def test_a_failing_server_is_asked_what_became_of_the_commit(
    hub: HubServer, target: Callable[..., HubTarget], status: int
) -> None:
    hub.fail(COMMIT, status=status)

    push(target(sleep=lambda _: None))
    assert held(hub) == {**SHARDS, **LAST}
    assert len(titles(hub)) == 2


def test_a_commit_whose_answer_was_lost_is_not_made_twice(
    hub: HubServer, target: Callable[..., HubTarget], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, lost = HfApi.create_commit, []

    def applied_and_cut(*args: Any, **options: Any) -> None:
        real(*args, **options)
        lost.append(True)
        raise ConnectionResetError("the answer was lost")

    monkeypatch.setattr(HfApi, "create_commit", applied_and_cut)
    push(target(sleep=lambda _: None))
    assert lost == [True]
    assert len(titles(hub)) == 2


def test_a_cut_upload_is_sent_again(hub: HubServer, target: Callable[..., HubTarget]) -> None:
    cut = hub.cut("PUT /cdn/", after_bytes=10_000)

    push(target(sleep=lambda _: None))
    assert cut.used == 1
    assert held(hub) == {**SHARDS, **LAST}


def test_a_stale_parent_is_looked_at_again(hub: HubServer, target: Callable[..., HubTarget]) -> None:
    hub.stale_parent()

    push(target())
    assert held(hub) == {**SHARDS, **LAST}
    assert len(titles(hub)) == 2


def test_a_parent_that_is_always_stale_is_given_up(hub: HubServer, target: Callable[..., HubTarget]) -> None:
    hub.stale_parent(times=100)

    with pytest.raises(TransferFailed, match="others commit to it all the time"):
        push(target())
    assert held(hub) == {}


def test_who_edits_other_files_is_no_rival(hub: HubServer, api: HfApi, target: Callable[..., HubTarget]) -> None:
    publisher = target()
    publisher.look()
    put(publisher)
    edit(api, "LICENSE")
    publish(publisher)

    assert held(hub) == {**SHARDS, **LAST, "LICENSE": b"edited"}


@pytest.mark.parametrize("path", [names.CARD, names.hidden_file(7, 0)])
def test_who_publishes_meanwhile_is_not_overwritten(
    hub: HubServer, api: HfApi, target: Callable[..., HubTarget], path: str
) -> None:
    publisher = target()
    publisher.look()
    put(publisher)
    edit(api, path)

    with pytest.raises(DatasetExists, match="somebody else published to tester/acts in the meantime"):
        publish(publisher)
    assert held(hub) == {path: b"edited"}


def test_what_was_seen_may_be_old_when_nothing_is_to_be_done(
    hub: HubServer, api: HfApi, target: Callable[..., HubTarget]
) -> None:
    push(target())
    publisher = target()
    publisher.look()
    put(publisher)
    operation = CommitOperationDelete(names.hidden_file(0, 0))
    api.create_commit(REPO, [operation], commit_message="remove", repo_type="dataset")

    with pytest.raises(DatasetExists, match="somebody else published"):
        publish(publisher)


def test_who_makes_the_dataset_meanwhile_is_not_overwritten(
    hub: HubServer, api: HfApi, target: Callable[..., HubTarget]
) -> None:
    publisher = target()
    publisher.look()
    api.create_repo(REPO, repo_type="dataset")
    edit(api, names.CARD)

    with pytest.raises(DatasetExists, match="somebody else made the dataset"):
        put(publisher)


def test_the_source_reads_what_was_just_published(hub: HubServer, target: Callable[..., HubTarget]) -> None:
    first = names.hidden_file(0, 0)
    push(target())
    assert target().source().fetch(first).read_bytes() == SHARDS[first]
    publisher = target()
    push(publisher, {first: b"new"})

    fresh = publisher.source()
    assert fresh.version == hub.commits(REPO)[0].id
    assert fresh.fetch(first).read_bytes() == b"new"


def test_a_token_that_may_only_read_is_refused(hub: HubServer, target: Callable[..., HubTarget]) -> None:
    with pytest.raises(AccessDenied, match="accepts this token, but not for this"):
        push(target(token="hf_read"))


def test_without_a_token_nothing_begins(hub: HubServer, target: Callable[..., HubTarget]) -> None:
    with pytest.raises(AccessDenied, match="needs a token that may write"):
        target(token=None).look()


def test_a_card_that_the_hub_refuses_is_said(hub: HubServer, target: Callable[..., HubTarget]) -> None:
    with pytest.raises(TransferFailed, match="the metadata has no end"):
        push(target(), last={names.CARD: b"---\nlicense: mit\n"})
    assert held(hub) == {}


@pytest.mark.parametrize("path", ["model.bin", "tensors/../x", "index//x", "/etc/x"])
def test_files_that_are_none_of_the_format_are_refused(target: Callable[..., HubTarget], path: str) -> None:
    with pytest.raises(InvalidInput, match="is no file of the format"):
        target().room(path)


def test_a_name_without_a_user_is_refused(settings: Settings) -> None:
    with pytest.raises(InvalidInput, match="as in 'user/acts'"):
        HubTarget("acts", settings=settings)


def edit(api: HfApi, path: str) -> None:
    operation = CommitOperationAdd(path, b"edited")
    api.create_commit(REPO, [operation], commit_message="edit", repo_type="dataset")


def test_whoever_published_reads_the_new_one_on_the_same_machine(
    hub: HubServer, target: Callable[..., HubTarget], settings: Settings
) -> None:
    def read() -> bytes:
        return (
            HubSource(REPO, token=hub.token, endpoint=hub.endpoint, settings=settings).fetch(names.INDEX).read_bytes()
        )

    push(target())
    assert read() == LAST[names.INDEX]
    new = {**LAST, names.INDEX: b"another index"}
    push(target(), last=new)

    assert read() == b"another index"
    hub.reset_counts()
    push(target(), last=new)
    assert read() == b"another index"
    assert titles(hub)[:3] == ["Publish acts", "Publish acts", "initial commit"]
