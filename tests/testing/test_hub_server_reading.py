from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from email.message import Message
from hashlib import sha256
from pathlib import Path

import datasets  # before a client is told where to go
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import HfApi, HfFileSystem, constants, hf_hub_download, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, RemoteEntryNotFoundError, RepositoryNotFoundError

from streamtap.testing.hub_server import HubServer, online_client

THINGS = "tester/things"
LARGE, SMALL = bytes(range(256)) * 40, b"a few words"
ODD_NAME = "odd/nämé %2F.bin"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    local = tmp_path / "local"
    (local / "odd").mkdir(parents=True)
    (local / "large.safetensors").write_bytes(LARGE)
    (local / "small.txt").write_bytes(SMALL)
    (local / ODD_NAME).write_bytes(LARGE[:50])
    with HubServer(tmp_path / "hub") as server, online_client(server):
        server.add(THINGS, local)
        server.reset_counts()
        yield server


class _Stay(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: object) -> None:
        return None


def _ask(url: str, headers: Mapping[str, str] = {}, method: str = "GET") -> tuple[int, bytes, Message]:
    request = urllib.request.Request(url, headers=dict(headers), method=method)
    try:
        with urllib.request.build_opener(_Stay).open(request) as answer:
            return answer.status, answer.read(), answer.headers
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read(), error.headers


def _resolve(hub: HubServer, path: str) -> str:
    return f"{hub.endpoint}/datasets/{THINGS}/resolve/main/{path}"


def test_a_small_file_comes_from_the_hub(hub: HubServer) -> None:
    status, body, headers = _ask(_resolve(hub, "small.txt"))

    assert (status, body) == (200, SMALL)
    assert headers["X-Repo-Commit"] == hub.commits(THINGS)[0].id
    assert headers["ETag"] == '"743411653a3431dfcb701cde25fd70fe5195f8e9"'
    assert _ask(_resolve(hub, "small.txt"), method="HEAD")[:2] == (200, b"")
    assert [each.bytes_out for each in hub.requests] == [len(SMALL), 0]


def test_a_large_file_comes_from_the_other_origin(hub: HubServer) -> None:
    status, body, headers = _ask(_resolve(hub, "large.safetensors"), method="HEAD")

    digest = sha256(LARGE).hexdigest()
    assert (status, body) == (302, b"")
    assert headers["X-Linked-Etag"] == f'"{digest}"'
    assert headers["X-Linked-Size"] == str(len(LARGE))
    assert headers["Location"].startswith(f"{hub.cdn}/cdn/datasets/{THINGS}/{digest}/large.safetensors?")
    assert hub.cdn != hub.endpoint
    assert _ask(headers["Location"])[:2] == (200, LARGE)
    assert hub.bytes_out("large.safetensors") == len(LARGE)


@pytest.mark.parametrize(
    ("asked", "status", "start", "stop"),
    [
        ("bytes=0-9", 206, 0, 10),
        ("bytes=100-", 206, 100, 10240),
        ("bytes=-7", 206, 10233, 10240),
        ("bytes=-99999", 206, 0, 10240),
        ("bytes=10000-99999", 206, 10000, 10240),
        ("bytes=9-3", 200, 0, 10240),
        ("lines=1-2", 200, 0, 10240),
        ("bytes=10240-", 416, 0, 0),
        ("bytes=-0", 416, 0, 0),
    ],
)
def test_ranges(hub: HubServer, asked: str, status: int, start: int, stop: int) -> None:
    link = _ask(_resolve(hub, "large.safetensors"))[2]["Location"]

    answer = _ask(link, {"Range": asked})

    assert answer[:2] == (status, LARGE[start:stop])
    told = {206: f"bytes {start}-{stop - 1}/10240", 416: "bytes */10240", 200: None}
    assert answer[2]["Content-Range"] == told[status]
    assert hub.requests[-1].range == asked


def test_a_link_is_for_one_file_one_method_and_a_while(hub: HubServer) -> None:
    link = _ask(_resolve(hub, "large.safetensors"))[2]["Location"]
    assert _ask(link)[0] == 200
    assert _ask(link, method="PUT")[0] == 405
    assert _ask(link.replace("large", "other"))[0] == 403
    assert _ask(link.replace("expires=1", "expires=9"))[0] == 403
    assert _ask(link.split("?")[0])[0] == 403

    with HubServer(hub.folder, link_seconds=0) as hasty:
        assert _ask(_ask(_resolve(hasty, "large.safetensors"))[2]["Location"])[0] == 403


def test_files_are_downloaded_to_a_cache(hub: HubServer, tmp_path: Path) -> None:
    for path, content in (("large.safetensors", LARGE), ("small.txt", SMALL), (ODD_NAME, LARGE[:50])):
        file = hf_hub_download(THINGS, path, repo_type="dataset", cache_dir=tmp_path / "cache")
        assert Path(file).read_bytes() == content
    whole = snapshot_download(THINGS, repo_type="dataset", local_dir=tmp_path / "whole")
    assert {each.name for each in Path(whole).iterdir()} >= {"large.safetensors", "small.txt", "odd"}
    with pytest.raises(RemoteEntryNotFoundError):
        hf_hub_download(THINGS, "nothing.txt", repo_type="dataset", cache_dir=tmp_path / "cache")


def test_a_file_system_reads_only_the_bytes(hub: HubServer) -> None:
    files = HfFileSystem(endpoint=hub.endpoint, token=hub.token, skip_instance_cache=True)
    with files.open(f"datasets/{THINGS}/large.safetensors", cache_type="none") as stream:
        stream.seek(1000)
        assert stream.read(10) == LARGE[1000:1010]

    assert hub.bytes_out("/cdn/") == 10
    assert f"datasets/{THINGS}/odd" in files.ls(f"datasets/{THINGS}", detail=False)


def test_a_private_repository_is_there_for_those_with_a_token(hub: HubServer, tmp_path: Path) -> None:
    owner, nobody = (HfApi(endpoint=hub.endpoint, token=token) for token in (hub.token, False))
    assert nobody.dataset_info(THINGS).id == THINGS
    owner.update_repo_settings(THINGS, repo_type="dataset", private=True)

    for ask in (
        lambda: nobody.dataset_info(THINGS),
        lambda: nobody.hf_hub_download(THINGS, "small.txt", repo_type="dataset", cache_dir=tmp_path / "cache"),
        lambda: list(nobody.list_repo_tree(THINGS, repo_type="dataset")),
        lambda: owner.dataset_info("tester/nothing"),
    ):
        with pytest.raises(RepositoryNotFoundError):
            ask()
    file = owner.hf_hub_download(THINGS, "small.txt", repo_type="dataset", cache_dir=tmp_path / "cache")
    assert Path(file).read_bytes() == SMALL


def test_a_token_may_only_read_or_be_none_of_ours(hub: HubServer) -> None:
    reader, stranger = (HfApi(endpoint=hub.endpoint, token=token) for token in ("hf_read", "hf_stranger"))
    assert reader.dataset_info(THINGS).id == THINGS
    with pytest.raises(HfHubHTTPError, match="this token may only read"):
        reader.upload_file(path_or_fileobj=b"x", path_in_repo="x", repo_id=THINGS, repo_type="dataset")
    with pytest.raises(HfHubHTTPError, match="Invalid credentials"):
        stranger.dataset_info(THINGS)
    with pytest.raises(RepositoryNotFoundError):
        HfApi(endpoint=hub.endpoint, token=False).create_repo("nobody/things")


def test_datasets_load_from_it(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
    local = tmp_path / "table"
    (local / "data").mkdir(parents=True)
    pq.write_table(pa.table({"text": ["a", "b"], "label": [0, 1]}), local / "data" / "train-00000.parquet")
    (local / "README.md").write_text("---\nconfigs:\n- config_name: default\n  data_files: data/*.parquet\n---\n")
    hub.add("tester/table", local, private=True)

    table = datasets.load_dataset("tester/table", split="train", cache_dir=str(tmp_path / "cache"), token=hub.token)

    assert table.to_dict() == {"text": ["a", "b"], "label": [0, 1]}


def test_outside_of_it_the_client_is_as_it_was(tmp_path: Path) -> None:
    from huggingface_hub import constants

    before = (constants.HF_HUB_OFFLINE, constants.ENDPOINT, datasets.config.HF_ENDPOINT)
    with HubServer(tmp_path) as hub:
        with online_client(hub):
            inside = (constants.HF_HUB_OFFLINE, constants.ENDPOINT, datasets.config.HF_ENDPOINT)
        assert inside == (False, hub.endpoint, hub.endpoint)
        with pytest.raises(KeyError), online_client(hub):
            raise KeyError
        assert before == (constants.HF_HUB_OFFLINE, constants.ENDPOINT, datasets.config.HF_ENDPOINT)
        assert hub.environment["HF_ENDPOINT"] == hub.endpoint
