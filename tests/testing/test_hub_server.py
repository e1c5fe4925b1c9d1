from __future__ import annotations

import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest
from huggingface_hub import CommitOperationAdd, CommitOperationCopy, CommitOperationDelete, HfApi, hf_hub_download
from huggingface_hub.errors import BadRequestError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

from streamtap.errors import InvalidInput, MissingExtra
from streamtap.testing.hub_server import HubServer, online_client

THINGS = "tester/things"
CARD = b"---\nlicense: mit\n---\n# Things\n"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    with HubServer(tmp_path / "hub", chunk_bytes=1000, page_size=3) as server, online_client(server):
        yield server


@pytest.fixture
def api(hub: HubServer) -> HfApi:
    client = HfApi(endpoint=hub.endpoint, token=hub.token)
    client.create_repo(THINGS, repo_type="dataset")
    return client


def _upload(api: HfApi, path: str, content: bytes, **options: object) -> None:
    api.upload_file(path_or_fileobj=content, path_in_repo=path, repo_id=THINGS, repo_type="dataset", **options)


def test_a_repository_is_made_once_and_starts_with_its_attributes(hub: HubServer, api: HfApi) -> None:
    assert str(api.create_repo(THINGS, repo_type="dataset", exist_ok=True)) == f"{hub.endpoint}/datasets/{THINGS}"
    with pytest.raises(HfHubHTTPError, match="already created"):
        api.create_repo(THINGS, repo_type="dataset")

    assert list(hub.files(THINGS)) == [".gitattributes"]
    assert b"*.safetensors filter=lfs" in hub.read(THINGS, ".gitattributes")
    assert api.create_repo("things").repo_id == THINGS  # a model of the same name, in the user's namespace
    assert api.whoami()["name"] == "tester"


def test_shards_that_were_sent_before_show_with_the_commit(hub: HubServer, api: HfApi, tmp_path: Path) -> None:
    shard, small = b"\1\2\3" * 1000, b"\0few"
    (tmp_path / "shard").write_bytes(shard)
    operations = [
        CommitOperationAdd("shards/a.safetensors", str(tmp_path / "shard")),
        CommitOperationAdd("index.parquet", small),
        CommitOperationAdd("README.md", CARD),
    ]
    api.preupload_lfs_files(THINGS, operations[:2], repo_type="dataset", free_memory=False)
    assert list(hub.files(THINGS)) == [".gitattributes"]
    assert hub.objects() == {sha256(each).hexdigest(): 1 for each in (shard, small)}

    done = api.create_commit(THINGS, operations, commit_message="all at once", repo_type="dataset")

    assert hub.commits(THINGS)[0].id == done.oid
    assert [commit.title for commit in hub.commits(THINGS)] == ["all at once", "initial commit"]
    assert hub.read(THINGS, "shards/a.safetensors") == shard
    assert hub.files(THINGS)["README.md"] == len(CARD)
    assert [part.bytes_in for part in hub.requests if "/parts/" in part.path] == [1000, 1000, 1000]


def test_what_is_there_is_not_sent_again(hub: HubServer, api: HfApi, tmp_path: Path) -> None:
    folder = tmp_path / "local"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "a.npy").write_bytes(b"\x93NUMPY" * 500)
    (folder / "notes.txt").write_bytes("süß".encode())

    def upload() -> None:
        api.upload_folder(repo_id=THINGS, folder_path=folder, repo_type="dataset", commit_message="a folder")

    upload()
    hub.reset_counts()
    upload()
    assert hub.bytes_in("/cdn/") == 0
    assert len(hub.commits(THINGS)) == 2

    api.create_commit(
        THINGS, [CommitOperationAdd("again.npy", folder / "deep" / "a.npy")], commit_message="x", repo_type="dataset"
    )
    assert hub.bytes_in("/cdn/") == 0
    assert hub.read(THINGS, "again.npy") == b"\x93NUMPY" * 500


def test_files_go_to_lfs_by_name_size_or_content(hub: HubServer, api: HfApi) -> None:
    _upload(api, "by_name.parquet", b"text")
    _upload(api, "by_content.dat", b"\0\1")
    _upload(api, "by_content.txt", b"\xff\xfe text in no encoding")
    _upload(api, "empty.bin", b"")
    _upload(api, "notes.md", "ä".encode() * 400)

    files = {
        each.path: each for each in api.list_repo_tree(THINGS, repo_type="dataset") if each.path != ".gitattributes"
    }
    assert {path for path, each in files.items() if each.lfs} == {"by_name.parquet", "by_content.dat", "by_content.txt"}
    assert files["by_name.parquet"].lfs.sha256 == sha256(b"text").hexdigest()
    siblings = {each.rfilename: each for each in api.dataset_info(THINGS, files_metadata=True).siblings}
    assert siblings["by_name.parquet"].lfs.sha256 == sha256(b"text").hexdigest()
    assert (siblings["notes.md"].size, siblings["notes.md"].lfs) == (800, None)


def test_a_commit_deletes_and_copies(hub: HubServer, api: HfApi) -> None:
    for path in ("a/1.txt", "a/2.txt", "b.bin", "c.txt"):
        _upload(api, path, path.encode())
    api.create_commit(
        THINGS,
        [
            CommitOperationDelete("a/"),
            CommitOperationDelete("c.txt"),
            CommitOperationCopy("b.bin", "copy.bin"),
        ],
        commit_message="tidy",
        repo_type="dataset",
    )

    assert list(hub.files(THINGS)) == [".gitattributes", "b.bin", "copy.bin"]
    assert hub.read(THINGS, "copy.bin") == b"b.bin"
    with pytest.raises(HfHubHTTPError, match="EntryNotFound|Entry Not Found"):
        api.delete_file("nothing.txt", THINGS, repo_type="dataset")


def test_a_commit_is_whole_or_not_at_all(hub: HubServer, api: HfApi) -> None:
    head = hub.commits(THINGS)[0].id
    with pytest.raises(BadRequestError, match="a cannot be a file and a folder"):
        api.create_commit(
            THINGS,
            [CommitOperationAdd("fine.txt", b"x"), CommitOperationAdd("a", b"x"), CommitOperationAdd("a/b", b"x")],
            commit_message="x",
            repo_type="dataset",
        )
    lacking = CommitOperationAdd("lacking.bin", b"\0 never sent")
    lacking._is_uploaded, lacking._upload_mode = True, "lfs"
    with pytest.raises(BadRequestError, match="no LFS object"):
        api.create_commit(THINGS, [lacking], commit_message="x", repo_type="dataset")

    assert hub.commits(THINGS)[0].id == head


def test_a_commit_on_an_old_parent_is_refused(hub: HubServer, api: HfApi) -> None:
    old = api.dataset_info(THINGS).sha
    _upload(api, "a.txt", b"1", parent_commit=old)
    with pytest.raises(HfHubHTTPError) as refused:
        _upload(api, "b.txt", b"2", parent_commit=old)

    assert refused.value.response.status_code == 412
    assert "b.txt" not in hub.files(THINGS)


def test_branches_and_tags_keep_their_commit(hub: HubServer, api: HfApi, tmp_path: Path) -> None:
    _upload(api, "a.txt", b"first")
    api.create_branch(THINGS, repo_type="dataset", branch="run/1")
    api.create_tag(THINGS, repo_type="dataset", tag="v1")
    _upload(api, "a.txt", b"second", revision="run/1")

    refs = api.list_repo_refs(THINGS, repo_type="dataset")
    assert [each.name for each in refs.branches] == ["main", "run/1"]
    assert [each.target_commit for each in refs.tags] == [api.dataset_info(THINGS, revision="v1").sha]
    for revision, content in {"run/1": "second", "v1": "first", "main": "first"}.items():
        file = hf_hub_download(THINGS, "a.txt", repo_type="dataset", revision=revision, cache_dir=tmp_path / "cache")
        assert Path(file).read_text() == content
    titles = [commit.title for commit in api.list_repo_commits(THINGS, repo_type="dataset", revision="run/1")]
    assert len(titles) == 3
    with pytest.raises(HfHubHTTPError, match="409"):
        api.create_tag(THINGS, repo_type="dataset", tag="v1")

    api.delete_tag(THINGS, repo_type="dataset", tag="v1")
    api.delete_branch(THINGS, repo_type="dataset", branch="run/1")
    with pytest.raises(RevisionNotFoundError):
        api.dataset_info(THINGS, revision="v1")


def test_a_tree_comes_in_pages(hub: HubServer, api: HfApi, tmp_path: Path) -> None:
    names = [f"d{i}/{name}.txt" for i in range(3) for name in "ab"]
    for name in names:
        (tmp_path / "local" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "local" / name).write_text(name)
    hub.add(THINGS, tmp_path / "local")
    hub.reset_counts()

    items = list(api.list_repo_tree(THINGS, repo_type="dataset", recursive=True, expand=True))
    assert [each.path for each in items] == sorted([".gitattributes", "d0", "d1", "d2", *names])
    assert {each.path: each.last_commit.title for each in items}["d0"] == "add a folder"
    assert {each.path: each.last_commit.title for each in items}[".gitattributes"] == "initial commit"
    assert len(hub.requests) == 4  # ten items, three on a page

    assert [each.path for each in api.list_repo_tree(THINGS, "d1", repo_type="dataset")] == ["d1/a.txt", "d1/b.txt"]
    found = api.get_paths_info(THINGS, ["d1", "d0/a.txt", "nothing"], repo_type="dataset")
    assert [type(each).__name__ for each in found] == ["RepoFolder", "RepoFile"]


def test_repositories_are_changed_listed_moved_and_deleted(hub: HubServer, api: HfApi) -> None:
    api.create_repo("other/hidden", repo_type="dataset", private=True)
    assert [each.id for each in api.list_datasets()] == ["other/hidden", THINGS]
    assert [each.id for each in HfApi(endpoint=hub.endpoint, token=False).list_datasets()] == [THINGS]

    assert api.dataset_info("other/hidden").private is True
    api.update_repo_settings("other/hidden", repo_type="dataset", private=False)
    assert api.dataset_info("other/hidden").private is False

    api.move_repo("other/hidden", "other/shown", repo_type="dataset")
    assert api.dataset_info("other/shown").id == "other/shown"
    api.delete_repo("other/shown", repo_type="dataset")
    with pytest.raises(RepositoryNotFoundError):
        api.dataset_info("other/shown")
    api.delete_repo("other/shown", repo_type="dataset", missing_ok=True)


def test_a_card_without_an_end_is_refused(api: HfApi) -> None:
    with pytest.raises(ValueError, match="the metadata has no end"):
        _upload(api, "README.md", b"---\nlicense: mit\n")


def test_a_server_of_the_same_folder_has_it_all(hub: HubServer, api: HfApi, tmp_path: Path) -> None:
    _upload(api, "large.bin", b"\0" * 5000)
    _upload(api, "small.txt", b"text")
    api.create_tag(THINGS, repo_type="dataset", tag="v1")
    api.update_repo_settings(THINGS, repo_type="dataset", private=True)

    with HubServer(tmp_path / "hub") as again:
        assert again.commits(THINGS) == hub.commits(THINGS)
        assert again.read(THINGS, "large.bin", revision="v1") == b"\0" * 5000
        assert again.objects() == {sha256(b"\0" * 5000).hexdigest(): 0}
        assert again.requests == []
        info = HfApi(endpoint=again.endpoint, token=again.token).dataset_info(THINGS)
        assert (info.private, info.sha) == (True, hub.commits(THINGS)[0].id)


def test_a_folder_is_added_without_http(hub: HubServer, tmp_path: Path) -> None:
    (tmp_path / "local").mkdir()
    with pytest.raises(InvalidInput, match="a folder with files"):
        hub.add("tester/seeded", tmp_path / "local")
    (tmp_path / "local" / "a.safetensors").write_bytes(b"weights")

    commit = hub.add("tester/seeded", tmp_path / "local", repo_type="model", private=True, message="seeded")

    assert hub.requests == []
    assert hub.read("tester/seeded", "a.safetensors", repo_type="model") == b"weights"
    assert HfApi(endpoint=hub.endpoint, token=hub.token).model_info("tester/seeded").sha == commit.id
    with pytest.raises(InvalidInput, match="expected namespace/name"):
        hub.add("../../outside", tmp_path / "local")


def test_it_starts_and_stops_many_times(tmp_path: Path) -> None:
    hub = HubServer(tmp_path)
    for _ in range(3):
        with hub:
            endpoint = hub.endpoint
            assert urllib.request.urlopen(endpoint).read().startswith(b"A local Hub")
            assert urllib.request.urlopen(hub.cdn).status == 200
        with pytest.raises(urllib.error.URLError):
            urllib.request.urlopen(endpoint)
    hub.stop()

    assert [thread.name for thread in threading.enumerate() if "hub" in thread.name] == []


def test_what_cannot_be_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with HubServer(tmp_path) as hub:
        port = int(hub.endpoint.rsplit(":", 1)[1])
        with pytest.raises(InvalidInput, match=f"port {port} of 127.0.0.1 cannot be used"):
            HubServer(tmp_path / "other", port=port).start()
        with pytest.raises(InvalidInput, match="there is no dataset 'tester/none'"):
            hub.files("tester/none")
        with pytest.raises(InvalidInput, match="regular expression"):
            hub.fail("(")
        with pytest.raises(InvalidInput, match="times must be 1 or more"):
            hub.corrupt("x", times=0)
    with pytest.raises(InvalidInput, match="chunk_bytes must be 1 or more"):
        HubServer(tmp_path, chunk_bytes=0)

    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(MissingExtra, match=r"pip install 'streamtap\[serve\]'"):
        HubServer(tmp_path)
