"""Where jobs keep their prompts and files."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from streamtap.errors import InvalidInput, SettingsError
from streamtap.server.harvests.storage import HarvestStore


def test_requests_are_for_this_user_alone_and_gone_when_removed(tmp_path: Path) -> None:
    store = HarvestStore(str(tmp_path))
    store.put_input("job-1", b"{}")

    file = tmp_path / "harvest-inputs" / "job-1.json"
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700
    assert (store.get_input("job-1"), store.input_ids()) == (b"{}", {"job-1"})
    store.remove_input("job-1")
    store.remove_input("job-1")
    assert store.input_ids() == set()
    assert store.identity
    assert (tmp_path / "harvest").stat().st_mode & 0o777 == 0o700, "files hold prompts as token ids"
    with pytest.raises(FileNotFoundError):
        store.get_input("job-1")


def test_nothing_is_made_before_it_is_needed(tmp_path: Path) -> None:
    store = HarvestStore(str(tmp_path / "later"))

    assert store.runs == tmp_path / "later" / "harvest"
    assert list(tmp_path.iterdir()) == []


def test_a_folder_has_one_identity_whoever_asks_first(tmp_path: Path) -> None:
    ready = threading.Barrier(8)

    def ask(_: int) -> str:
        ready.wait()
        return HarvestStore(str(tmp_path / "a")).identity

    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(ask, range(8)))

    assert len(found) == 1
    assert HarvestStore(str(tmp_path / "b")).identity not in found
    assert [path.name for path in (tmp_path / "a" / "harvest-inputs").iterdir()] == ["store-id"]
    assert HarvestStore(str(tmp_path / "a")).input_ids() == set()


def test_a_store_is_known_by_its_address(tmp_path: Path) -> None:
    store = HarvestStore("s3://bucket/harvests/")

    assert store.identity == HarvestStore("s3://bucket/harvests").identity
    assert store.identity != HarvestStore("s3://bucket/others").identity
    assert (store.runs, store.run("r").url) == ("s3://bucket/harvests/harvest", "s3://bucket/harvests/harvest/r")


def test_a_run_is_removed_manifest_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = HarvestStore(str(tmp_path))
    place = store.run("r-1")
    for name in ("manifest.json", "shard_00000.safetensors", "run.json"):
        place.put(name, b"x")
    removed: list[str] = []

    class Watched:
        def names(self) -> set[str]:
            return place.names()

        def delete(self, name: str) -> None:
            removed.append(name)
            place.delete(name)

    monkeypatch.setattr(store, "run", lambda _run_id: Watched())
    store.remove_run("r-1")

    assert removed == ["manifest.json", "run.json", "shard_00000.safetensors"]
    assert not (tmp_path / "harvest" / "r-1").exists()
    store.remove_run("r-1")


@pytest.mark.parametrize("root", ["ftp://host/x", "s3://", "s3://key:secret@bucket/x"])
def test_an_address_that_is_none_is_refused_without_its_secret(root: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        HarvestStore(root)

    assert "secret" not in str(raised.value)


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(SettingsError, match="harvests cannot be kept in .*file.*name another store"):
        _ = HarvestStore(str(tmp_path / "file")).identity
