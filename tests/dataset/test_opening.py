from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from streamtap.dataset.folder import FolderSource, FolderTarget
from streamtap.dataset.hub import HubSource
from streamtap.dataset.hub_target import HubTarget
from streamtap.dataset.names import INDEX
from streamtap.dataset.object_store import StoreSource, StoreTarget
from streamtap.dataset.opening import open_source, open_target
from streamtap.errors import InvalidInput

SECRET = "tell-nobody"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder to run in, which is also home, with a dataset and a cache in it."""
    (tmp_path / "plain" / "index").mkdir(parents=True)
    (tmp_path / "plain" / INDEX).write_bytes(b"an index")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("STREAMTAP_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["plain", "./plain", "../{here}/plain", "~/plain", "{path}/plain", Path("plain")])
def test_a_folder(here: Path, name: str | Path) -> None:
    if isinstance(name, str):
        name = name.format(here=here.name, path=here)
    source, target = open_source(name), open_target(name)

    assert isinstance(source, FolderSource)
    assert source.fetch(INDEX).read_bytes() == b"an index"
    assert source.name == target.name
    assert source.name.startswith((".", "/", "~"))
    assert isinstance(target, FolderTarget)
    assert target.url == str(here / "plain")


@pytest.mark.parametrize("name", ["./new", "/new", "~/new", Path("new"), Path("a/b")])
def test_a_folder_need_not_be_there(name: str | Path) -> None:
    assert isinstance(open_source(name), FolderSource)
    assert isinstance(open_target(name), FolderTarget)


@pytest.mark.parametrize("name", ["s3://bucket", "gs://bucket/x", "az://container/x/y"])
def test_an_object_store(name: str) -> None:
    source, target = open_source(name), open_target(name)

    assert isinstance(source, StoreSource)
    assert isinstance(target, StoreTarget)
    assert source.name == target.name == target.url == name


@pytest.mark.parametrize(
    ("name", "variable"),
    [
        ("s3://bucket/x", "AWS_ENDPOINT_URL"),
        ("gs://bucket/x", "GOOGLE_BASE_URL"),
        ("az://container/x", "AZURE_STORAGE_ACCOUNT_NAME"),
    ],
)
def test_one_name_on_two_servers(name: str, variable: str, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was seen there, by a reader's or a writer's folder, is of the server or account that the name leads to."""
    monkeypatch.setenv(variable, "one")
    one = open_target(name).source()
    assert isinstance(one, StoreSource)
    held = {"files": [[INDEX, 8, "e"]]}
    one._folder.mkdir(parents=True)
    (one._folder / "pin.json").write_text(json.dumps(held))

    assert open_source(name).size_bytes(INDEX) == 8
    monkeypatch.setenv(variable, "two")
    other = open_source(name)
    assert isinstance(other, StoreSource)
    assert other._known() is None


@pytest.mark.parametrize(
    ("name", "means"),
    [
        ("user/name", "user/name"),
        ("my-org/model_acts.v1-2", "my-org/model_acts.v1-2"),
        ("hf://user/name", "user/name"),
        ("hf://datasets/user/name", "user/name"),
        ("hf://datasets/user/name/", "user/name"),
    ],
)
def test_the_hub(name: str, means: str) -> None:
    source, target = open_source(name), open_target(name)

    assert isinstance(source, HubSource)
    assert isinstance(target, HubTarget)
    assert source.name == target.name == means


def test_a_folder_named_like_a_repository_is_not_meant(here: Path) -> None:
    (here / "user" / "name").mkdir(parents=True)

    assert isinstance(open_source("user/name"), HubSource)


@pytest.mark.parametrize(
    ("name", "asked", "means"),
    [
        ("user/name", "v1", "v1"),
        ("hf://datasets/user/name@v1", None, "v1"),
        ("hf://user/name@refs%2Fpr%2F1", None, "refs/pr/1"),
        ("hf://user/name@refs/pr/1", "refs/pr/1", "refs/pr/1"),
    ],
)
def test_a_revision(name: str, asked: str | None, means: str) -> None:
    assert open_source(name, revision=asked).name == f"user/name@{means}"


def test_what_is_passed_reaches_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    passed: list[dict[str, Any]] = []
    for place in ("streamtap.dataset.hub.HubSource", "streamtap.dataset.hub_target.HubTarget"):
        monkeypatch.setattr(place, lambda *args, **kwargs: passed.append({"name": args, **kwargs}))

    open_source("user/name", revision="v1", token="t", endpoint="http://hub", refresh=True)
    open_target("user/name", private=True, token="t", endpoint="http://hub")

    assert passed == [
        {"name": ("user/name",), "revision": "v1", "token": "t", "endpoint": "http://hub", "refresh": True},
        {"name": ("user/name",), "private": True, "token": "t", "endpoint": "http://hub"},
    ]


def test_two_revisions() -> None:
    with pytest.raises(InvalidInput, match="'v1' and revision='v2'.*give one of them"):
        open_source("hf://user/name@v1", revision="v2")


@pytest.mark.parametrize("name", ["./plain", "s3://bucket/x", Path("plain")])
def test_what_only_the_hub_has(name: str | Path) -> None:
    with pytest.raises(InvalidInput, match="has no revisions"):
        open_source(name, revision="v1")
    for private in (True, False):
        with pytest.raises(InvalidInput, match="private= is for the Hub"):
            open_target(name, private=private)


def test_a_push_goes_to_the_main_branch() -> None:
    with pytest.raises(InvalidInput, match="leave the @revision out"):
        open_target("hf://datasets/user/name@v1")


@pytest.mark.parametrize("name", ["", " ", "nothing-here", "a/b/c", "user/", "user/na me", "c:\\x", None, 7, b"x"])
def test_other_names_are_refused_with_all_the_forms(name: Any) -> None:
    for open_it in (open_source, open_target):
        with pytest.raises(InvalidInput, match=r"'user/name'.*'\./name'.*'s3://.*'gs://.*'az://") as caught:
            open_it(name)
        assert repr(name) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (f"http://user:{SECRET}@127.0.0.1/x", "starts with http://"),
        (f"https://huggingface.co/datasets/user/name?token={SECRET}", "starts with https://"),
        (f"ftp://{SECRET}", "starts with ftp://"),
        (f"file:///{SECRET}", "starts with file://"),
        (f"S3://{SECRET}/x", "starts with S3://"),
        (f"s3://KEY:{SECRET}@bucket/x", "without credentials"),
        (f"az://container/x?sig={SECRET}", "without credentials"),
        (f"hf://{SECRET}@user/name", "hf://datasets/user/name"),
        (f"hf://user:{SECRET}@hub/user/name", "hf://datasets/user/name"),
        (f"hf://spaces/user/{SECRET}", "hf://datasets/user/name"),
        ("hf://user/name@", "hf://datasets/user/name"),
        ("hf://datasets/name", "hf://datasets/user/name"),
        (f"user:{SECRET}@host/x", "got something else"),
    ],
)
def test_an_address_that_is_refused_is_not_repeated(name: str, says: str) -> None:
    for open_it in (open_source, open_target):
        with pytest.raises(InvalidInput, match=says) as caught:
            open_it(name)
        assert SECRET not in str(caught.value)
