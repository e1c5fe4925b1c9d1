"""Signed links: only those that were made here, unchanged and in time, lead to a file."""

from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamtap.blobs import MOST_SIGNED_SECONDS, BlobStore
from streamtap.errors import AccessDenied, HarvestUnavailable, SettingsError
from streamtap.server.harvests.signing import FILES, SECRET_NAME, FolderLinks, StoreLinks, links_of

NOW = datetime(2026, 11, 30, 12, 0, 0, tzinfo=UTC)
BASE = "http://127.0.0.1:8000"
RUN = "0" * 32


def signed(links: FolderLinks, *names: str, seconds: float = 60) -> list[str]:
    return links.sign(RUN, names, expires_at=NOW + timedelta(seconds=seconds), now=NOW, base=BASE)


def followed(links: FolderLinks, url: str, *, now: datetime = NOW, **changes: str) -> Path:
    parts = urlsplit(url)
    run_id, name = parts.path.removeprefix(f"{FILES}/").split("/")
    return links.opened(**{"run_id": run_id, "name": name, **dict(parse_qsl(parts.query)), **changes}, now=now)


def test_a_link_leads_to_its_file(tmp_path: Path) -> None:
    links = FolderLinks(tmp_path)
    names = ["manifest.json", "stats.safetensors", "shard_00000.safetensors", "shard_12345.safetensors.zst"]

    found = signed(links, *names)

    assert all(url.startswith(f"{BASE}/v1/harvest/files/{RUN}/") for url in found)
    assert [followed(links, url) for url in found] == [tmp_path / RUN / name for name in names]
    assert len({url.rpartition("signature=")[2] for url in found}) == len(names)


def test_every_gateway_of_a_folder_takes_the_links_of_all(tmp_path: Path) -> None:
    (url,) = signed(FolderLinks(tmp_path), "manifest.json")

    assert followed(FolderLinks(tmp_path), url) == tmp_path / RUN / "manifest.json"


def test_another_folder_does_not(tmp_path: Path) -> None:
    (url,) = signed(FolderLinks(tmp_path / "a"), "manifest.json")

    with pytest.raises(AccessDenied, match="not signed here"):
        followed(FolderLinks(tmp_path / "b"), url)


@pytest.mark.parametrize(("seconds", "fits"), [(59, True), (60, False), (61, False), (10**8, False)])
def test_a_link_ends_when_its_time_is_over(seconds: int, fits: bool, tmp_path: Path) -> None:
    links = FolderLinks(tmp_path)
    (url,) = signed(links, "manifest.json")

    if fits:
        followed(links, url, now=NOW + timedelta(seconds=seconds))
        return
    with pytest.raises(AccessDenied, match="expired; ask for the job again"):
        followed(links, url, now=NOW + timedelta(seconds=seconds))


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "stats.safetensors"},
        {"run_id": "1" * 32},
        {"expires": "9999999999"},
        {"signature": ""},
        {"signature": "0" * 64},
        {"signature": "ä"},
        {"expires": ""},
        {"expires": "-1"},
        {"expires": "١٢"},
        {"expires": "9" * 5000},
        {"name": "../../streamtap.db"},
        {"name": SECRET_NAME},
        {"name": "manifest.json\n"},
        {"run_id": ".."},
        {"run_id": ""},
    ],
)
def test_a_link_that_was_changed_is_refused(changes: dict[str, str], tmp_path: Path) -> None:
    links = FolderLinks(tmp_path)
    (url,) = signed(links, "manifest.json")

    with pytest.raises(AccessDenied, match="not signed here, or was changed"):
        followed(links, url, **changes)


@settings(max_examples=100, deadline=None)
@given(run_id=st.text(max_size=20), name=st.text(max_size=20), expires=st.text(max_size=12), signature=st.text())
def test_no_words_lead_anywhere(run_id: str, name: str, expires: str, signature: str) -> None:
    links = FolderLinks(Path("/nowhere"))
    # As if it had been read.
    links.__dict__["_secret"] = b"0" * 32

    with pytest.raises(AccessDenied):
        links.opened(run_id, name, expires=expires, signature=signature, now=NOW)


def test_the_secret_is_private_and_made_once(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: signed(FolderLinks(folder), "manifest.json")[0], range(32)))

    assert len(set(found)) == 1
    assert [entry.name for entry in folder.iterdir()] == [SECRET_NAME]
    assert stat.S_IMODE((folder / SECRET_NAME).stat().st_mode) == 0o600


def test_a_secret_that_is_none_is_not_signed_with(tmp_path: Path) -> None:
    (tmp_path / SECRET_NAME).write_text("short")

    with pytest.raises(SettingsError, match="does not hold 64 hex digits"):
        FolderLinks(tmp_path).prepare()


def test_a_folder_that_cannot_be_is_told_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(SettingsError, match="cannot keep the secret"):
        FolderLinks(tmp_path / "file").prepare()


def test_an_object_store_signs_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-of-mine")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    links = links_of("s3://bucket/harvest")
    assert isinstance(links, StoreLinks)
    links.prepare()

    found = links.sign(RUN, ["manifest.json"], expires_at=NOW + timedelta(hours=1), now=NOW, base=BASE)

    parts = urlsplit(found[0])
    assert parts.path.endswith(f"/harvest/{RUN}/manifest.json")
    assert dict(parse_qsl(parts.query))["X-Amz-Expires"] == "3600"
    assert "secret-of-mine" not in found[0]


def test_links_of_a_store_last_no_longer_than_it_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(BlobStore, "sign", lambda _self, path, seconds: asked.append((path, seconds)) or path)

    links = links_of("s3://bucket/harvest")
    for days in (365, -1):
        links.sign(RUN, ["a.json"], expires_at=NOW + timedelta(days=days), now=NOW, base=BASE)

    assert asked == [(f"{RUN}/a.json", MOST_SIGNED_SECONDS), (f"{RUN}/a.json", 1.0)]


def test_a_store_without_credentials_is_nothing_that_the_caller_can_help(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> str:
        raise AccessDenied("signing was refused; check AWS_ACCESS_KEY_ID.")

    monkeypatch.setattr(BlobStore, "sign", fails)

    with pytest.raises(HarvestUnavailable, match="cannot be signed just now") as error:
        links_of("s3://bucket/harvest").sign(RUN, ["a.json"], expires_at=NOW, now=NOW, base=BASE)
    assert "AWS" not in str(error.value)


def test_a_folder_is_named_by_its_path(tmp_path: Path) -> None:
    for store in (tmp_path, str(tmp_path)):
        links = links_of(store)
        assert isinstance(links, FolderLinks)
        assert links.folder == tmp_path
