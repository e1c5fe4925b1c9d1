from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from streamtap.blobs import Blob, BlobStore
from streamtap.dataset import store_pin
from streamtap.dataset.names import CARD, INDEX, SIDECAR, hidden_file
from streamtap.dataset.object_store import StoreSource, StoreTarget
from streamtap.dataset.places import Found
from streamtap.errors import AccessDenied, DatasetDamaged, DatasetExists, DatasetNotFound, TransferFailed

SHARD, SECOND = hidden_file(0, 0), hidden_file(0, 1)
OLD = {INDEX: b"old index", CARD: b"old card", SHARD: b"old shard", SECOND: b"old second", SIDECAR: b"{}"}
NEW = {INDEX: b"new index", CARD: b"new card", SHARD: b"new shard"}
OWN = {"notes.txt": b"mine", "code/deep/run.py": b"mine too"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "datasets"


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def cut() -> None:
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
        # Obstore would wait for the server.
        monkeypatch.setattr("streamtap.blobs._RETRIES", 0)

    return cut


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asked of the server, in order."""
    asked: list[str] = []
    for name in ("head", "get_range", "download", "entries", "put_file", "delete"):
        real = getattr(BlobStore, name)

        def noting(self: BlobStore, *args: object, _real: object = real, _name: str = name, **kwargs: object) -> object:
            path = getattr(args[0], "path", args[0]) if args else ""
            asked.append(f"{_name} {path}".rstrip())
            return _real(self, *args, **kwargs)  # type: ignore[operator]

        monkeypatch.setattr(BlobStore, name, noting)
    return asked


def fill(url: str, files: Mapping[str, bytes]) -> BlobStore:
    store = BlobStore(url)
    for path, content in files.items():
        store.put(path, content)
    return store


def held(url: str) -> dict[str, bytes]:
    store = BlobStore(url)
    top, folders = store.entries()
    blobs = [*top, *(blob for each in folders for blob in store.walk(each))]
    return {blob.path: store.get_range(blob.path, 0, 1000) for blob in blobs}


def put(target: StoreTarget, files: Mapping[str, bytes]) -> None:
    for path, content in files.items():
        if path not in (INDEX, CARD):
            target.room(path).write_bytes(content)
            target.put(path, target.room(path))


def publish(target: StoreTarget, files: Mapping[str, bytes], stale: tuple[str, ...] = ()) -> str:
    last = {path: target.room(path) for path in files if path in (INDEX, CARD)}
    for path, file in last.items():
        file.write_bytes(files[path])
    try:
        return target.publish(last, stale, "a push")
    finally:
        target.close()


def push(target: StoreTarget, files: Mapping[str, bytes], stale: tuple[str, ...] = ()) -> str:
    target.look()
    put(target, files)
    return publish(target, files, stale)


# To read.


def test_a_dataset_is_read(s3_url: str, folder: Path) -> None:
    fill(s3_url, OLD)
    source = StoreSource(s3_url + "/", folder)

    assert source.name == s3_url
    assert source.on_disk(SHARD) is None
    assert source.size_bytes(SHARD) == 9
    assert source.read_range(SHARD, 4, 7) == b"sha"
    assert source.read_range(SHARD, 4, 70) == b"shard"
    assert source.read_range(SHARD, 40, 70) == source.read_range(SHARD, 4, 4) == b""
    assert source.read_tail(SHARD, 5) == (b"shard", 9)
    assert source.read_tail(SHARD, 50) == (b"old shard", 9)
    assert source.read_tail(SHARD, 0) == (b"", 9)
    assert source.fetch(SHARD).read_bytes() == b"old shard"
    assert source.on_disk(SHARD) == source.fetch(SHARD)
    assert source.fetch(SHARD).name == "hidden_layer000_shard000.safetensors"
    assert source.read_range(SHARD, 4, 7) == b"sha"
    assert source.version is None


def test_a_second_read_asks_nobody(s3_url: str, folder: Path, offline: Callable[[], None]) -> None:
    fill(s3_url, OLD)
    first = StoreSource(s3_url, folder)
    first.fetch(INDEX)
    first.read_range(SHARD, 4, 9)
    offline()
    second = StoreSource(s3_url, folder)

    assert second.fetch(INDEX).read_bytes() == b"old index"
    assert second.read_range(SHARD, 4, 9) == b"shard"
    assert second.read_range(SHARD, 5, 8) == b"har"
    assert second.read_tail(SHARD, 2) == (b"rd", 9)
    assert second.size_bytes(SECOND) == 10
    with pytest.raises(TransferFailed, match="reading s3://"):
        second.read_range(SHARD, 3, 9)
    assert StoreSource(s3_url, folder, refresh=True).on_disk(INDEX) is None
    with pytest.raises(TransferFailed, match="listing s3://"):
        StoreSource(s3_url, folder, refresh=True).fetch(INDEX)


def test_only_what_is_asked_for_is_fetched(s3_url: str, folder: Path, asked: list[str]) -> None:
    fill(s3_url, OLD)
    came: list[int] = []
    source = StoreSource(s3_url, folder)
    source.read_range(SHARD, 4, 7)
    source.fetch(SECOND, advance=came.append)
    source.fetch(SECOND, advance=came.append)

    assert asked == ["entries", f"head {INDEX}", f"get_range {SHARD}", f"download {SECOND}", f"get_range {SECOND}"]
    assert came == [10]


def test_again_replaces_what_is_on_disk(s3_url: str, folder: Path) -> None:
    fill(s3_url, OLD)
    source = StoreSource(s3_url, folder)
    source.fetch(SHARD).write_bytes(b"damaged!!")

    assert source.fetch(SHARD).read_bytes() == b"damaged!!"
    assert source.fetch(SHARD, again=True).read_bytes() == b"old shard"


def test_versions_are_never_mixed(s3_url: str, folder: Path) -> None:
    fill(s3_url, OLD)
    old = StoreSource(s3_url, folder)
    assert old.read_range(INDEX, 0, 3) == b"old"
    push(StoreTarget(s3_url, folder / "of another machine"), NEW, stale=(SECOND, SIDECAR))
    again = StoreSource(s3_url, folder)

    for source in (old, again):
        assert source.read_range(INDEX, 0, 3) == b"old"
        for ask in (lambda: source.read_range(SHARD, 0, 3), lambda: source.fetch(SHARD), lambda: source.fetch(SECOND)):  # noqa: B023
            with pytest.raises(DatasetDamaged, match="was replaced or removed .* refresh=True"):
                ask()

    newest = StoreSource(s3_url, folder, refresh=True)
    assert newest.read_range(SHARD, 0, 9) == b"new shard"
    assert StoreSource(s3_url, folder).fetch(INDEX).read_bytes() == b"new index"
    with pytest.raises(DatasetNotFound, match="holds no file tensors/hidden_layer000_shard001"):
        newest.fetch(SECOND)


def test_what_a_new_version_left_as_it_was_is_not_fetched_again(s3_url: str, folder: Path, asked: list[str]) -> None:
    fill(s3_url, OLD)
    StoreSource(s3_url, folder).fetch(SHARD)
    push(StoreTarget(s3_url, folder), {INDEX: b"upgraded"})
    del asked[:]

    assert StoreSource(s3_url, folder, refresh=True).fetch(SHARD).read_bytes() == b"old shard"
    assert asked == ["entries", f"head {INDEX}"]


def test_a_listing_that_a_push_ran_through_is_made_again(
    s3_url: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(s3_url, OLD)
    check = store_pin._still_there
    pushes = [{**NEW, INDEX: b"%d" % number} for number in range(3)]

    def check_late(store: BlobStore, blob: Blob) -> bool:
        if pushes:
            push(StoreTarget(s3_url, folder / "other"), pushes.pop())
        return check(store, blob)

    monkeypatch.setattr(store_pin, "_still_there", check_late)
    with pytest.raises(TransferFailed, match="is being replaced"):
        StoreSource(s3_url, folder).fetch(SHARD)
    assert StoreSource(s3_url, folder).fetch(INDEX).read_bytes() == b"0"


def test_what_is_not_there(s3_url: str, folder: Path) -> None:
    with pytest.raises(DatasetNotFound, match=r"holds no dataset: index/.*parquet is not there"):
        StoreSource(s3_url, folder).fetch(INDEX)
    with pytest.raises(DatasetNotFound, match="s3://no-such-bucket: there is no such bucket"):
        StoreSource("s3://no-such-bucket", folder).fetch(INDEX)
    fill(s3_url, OLD)
    # Nothing was remembered of the failed look.
    with pytest.raises(DatasetNotFound, match="holds no file tensors/none"):
        StoreSource(s3_url, folder).size_bytes("tensors/none")
    with pytest.raises(DatasetDamaged, match="not a path inside"):
        StoreSource(s3_url, folder).fetch("../outside")


def test_a_damaged_pin_is_made_again(s3_url: str, folder: Path) -> None:
    fill(s3_url, OLD)
    StoreSource(s3_url, folder).fetch(INDEX)
    (pin,) = folder.rglob("pin.json")
    for damage in ("", "{", "[]", json.dumps({"files": [1]}), json.dumps({"files": 1})):
        pin.write_text(damage)

        assert StoreSource(s3_url, folder).fetch(INDEX).read_bytes() == b"old index"
        assert json.loads(pin.read_text())["url"] == s3_url


def test_addresses_and_servers_are_kept_apart(s3_url: str, folder: Path) -> None:
    fill(s3_url, OLD)
    StoreSource(s3_url, folder).fetch(INDEX)

    assert StoreSource(s3_url, folder).on_disk(INDEX)
    assert StoreSource(s3_url, folder, server="http://elsewhere").on_disk(INDEX) is None
    assert StoreSource(s3_url.replace("/my-", "-my-"), folder).on_disk(INDEX) is None


def test_what_has_no_etag_is_looked_at_again(
    s3_url: str, folder: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamtap.blobs._blob", lambda meta: Blob(meta["path"], meta["size"], None))
    fill(s3_url, OLD)
    first = StoreSource(s3_url, folder)
    assert first.read_range(SHARD, 0, 3) == b"old"
    assert first.fetch(INDEX).read_bytes() == b"old index"
    assert first.on_disk(INDEX)
    fill(s3_url, NEW)

    second = StoreSource(s3_url, folder)
    assert second.on_disk(INDEX) is None
    assert second.read_range(SHARD, 0, 3) == second.read_range(SHARD, 0, 3) == b"new"
    assert second.fetch(INDEX).read_bytes() == second.fetch(INDEX).read_bytes() == b"new index"
    assert second.read_range(INDEX, 0, 3) == b"new"
    assert [asked.count(each) for each in ("entries", f"download {INDEX}")] == [2, 2]


def test_threads_share_a_source(s3_url: str, folder: Path, asked: list[str]) -> None:
    fill(s3_url, OLD)
    source = StoreSource(s3_url, folder)
    with ThreadPoolExecutor(8) as pool:
        files = list(pool.map(source.fetch, [SHARD, SECOND] * 4))

    assert [file.read_bytes() for file in files] == [b"old shard", b"old second"] * 4
    assert asked.count("entries") == 1


# To publish.


def test_a_new_dataset(s3_url: str, folder: Path) -> None:
    target = StoreTarget(s3_url, folder)
    assert target.look() is None
    with pytest.raises(DatasetNotFound):
        target.source().fetch(INDEX)

    assert push(target, NEW) == target.url == s3_url
    assert held(s3_url) == NEW
    assert target.source().fetch(SHARD).read_bytes() == b"new shard"
    assert list((folder / "outgoing").iterdir()) == []


def test_an_older_dataset_is_replaced_and_other_files_stay(s3_url: str, folder: Path, asked: list[str]) -> None:
    fill(s3_url, {**OLD, **OWN})
    target = StoreTarget(s3_url, folder)
    assert target.look() == Found({path: len(content) for path, content in {**OLD, "notes.txt": b"mine"}.items()})
    del asked[:]

    push(target, NEW, stale=(SECOND, SIDECAR, "notes.txt"))

    assert held(s3_url) == {**NEW, **OWN}
    writes = [each for each in asked if each.split()[0] in ("put_file", "delete")]
    assert writes == [
        *(f"delete {INDEX}", f"put_file {SHARD}", f"put_file {CARD}", f"put_file {INDEX}"),
        *(f"delete {SIDECAR}", f"delete {SECOND}"),
    ]


def test_whoever_published_reads_the_new_one_on_the_same_machine(s3_url: str, folder: Path) -> None:
    for files, stale in ((OLD, ()), (NEW, (SIDECAR, SECOND))):
        push(StoreTarget(s3_url, folder, server="here"), files, stale)

        assert StoreSource(s3_url, folder, server="here").fetch(INDEX).read_bytes() == files[INDEX]


def test_an_index_alone_is_replaced_in_one_step(s3_url: str, folder: Path, asked: list[str]) -> None:
    fill(s3_url, OLD)
    push(StoreTarget(s3_url, folder), {INDEX: b"upgraded"}, stale=(SIDECAR,))

    assert held(s3_url) == {path: content for path, content in {**OLD, INDEX: b"upgraded"}.items() if path != SIDECAR}
    assert f"delete {INDEX}" not in asked


def test_a_push_that_was_cut_shows_no_dataset_and_is_resumed(s3_url: str, folder: Path, asked: list[str]) -> None:
    fill(s3_url, OLD)
    cut = StoreTarget(s3_url, folder)
    cut.look()
    put(cut, {SHARD: b"new shard"})
    cut.close()
    with pytest.raises(DatasetNotFound):
        StoreSource(s3_url, folder).fetch(INDEX)
    target = StoreTarget(s3_url, folder)
    del asked[:]

    assert target.look() is None
    put(target, {SHARD: b"new shard", hidden_file(1, 0): b"another"})
    publish(target, NEW)

    assert held(s3_url) == {**NEW, hidden_file(1, 0): b"another"}
    assert f"put_file {SHARD}" not in asked
    assert f"put_file {hidden_file(1, 0)}" in asked


def test_the_same_name_and_size_is_not_the_same_file(s3_url: str, folder: Path) -> None:
    push(StoreTarget(s3_url, folder), {**NEW, SHARD: b"one shard"})
    push(StoreTarget(s3_url, folder), {**NEW, SHARD: b"two shard"})

    assert held(s3_url) == {**NEW, SHARD: b"two shard"}


def test_the_same_again_sends_no_shard_and_keeps_the_index_up(s3_url: str, folder: Path, asked: list[str]) -> None:
    push(StoreTarget(s3_url, folder), NEW)
    del asked[:]
    push(StoreTarget(s3_url, folder), NEW)

    assert f"put_file {SHARD}" not in asked
    assert f"delete {INDEX}" not in asked
    assert held(s3_url) == NEW


@pytest.mark.parametrize("old", [OLD, {}], ids=["replaced", "created"])
def test_two_pushes_at_once(s3_url: str, folder: Path, old: dict[str, bytes]) -> None:
    fill(s3_url, old)
    second = StoreTarget(s3_url, folder)
    second.look()
    push(StoreTarget(s3_url, folder), NEW, stale=tuple(old))

    with pytest.raises(DatasetExists, match="somebody else published to s3://"):
        publish(second, {INDEX: b"second"})
    if old:
        with pytest.raises(DatasetExists, match="somebody else published to s3://"):
            put(second, {SHARD: b"second"})
    second.close()

    assert held(s3_url) == NEW


def test_wrong_keys_are_refused_before_anything_is_sent(
    s3_url: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "tell-nobody")

    with pytest.raises(AccessDenied, match="was refused") as caught:
        StoreTarget(s3_url, folder).look()
    assert "tell-nobody" not in str(caught.value)
