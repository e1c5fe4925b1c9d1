from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from hashlib import sha256
from pathlib import Path

import pytest
from huggingface_hub import HfApi, HfFileSystem, constants

from streamtap.errors import MissingExtra
from streamtap.testing.hub_server import HubServer, online_client

THINGS = "tester/things"
LARGE = os.urandom(300_000)

UPLOAD = """
import sys
from huggingface_hub import HfApi
api = HfApi()
api.create_repo(sys.argv[1], repo_type="dataset")
api.upload_folder(repo_id=sys.argv[1], folder_path=sys.argv[2], repo_type="dataset")
"""
DOWNLOAD = """
import sys
from huggingface_hub import snapshot_download
snapshot_download(sys.argv[1], repo_type="dataset", local_dir=sys.argv[2])
"""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    with HubServer(tmp_path / "hub", xet=True) as server:
        yield server


def _python(hub: HubServer, tmp_path: Path, program: str, *arguments: str) -> None:
    environment = {**os.environ, **hub.environment, "HF_HOME": str(tmp_path / "home")}
    subprocess.run([sys.executable, "-c", program, *arguments], env=environment, check=True, timeout=60)


def test_another_process_uploads_and_downloads_by_xet(hub: HubServer, tmp_path: Path) -> None:
    (tmp_path / "local" / "deep").mkdir(parents=True)
    (tmp_path / "local" / "deep" / "a.safetensors").write_bytes(LARGE)
    (tmp_path / "local" / "b.bin").write_bytes(LARGE[:1000])
    (tmp_path / "local" / "c.txt").write_text("text")

    _python(hub, tmp_path, UPLOAD, THINGS, str(tmp_path / "local"))
    assert hub.read(THINGS, "deep/a.safetensors") == LARGE
    assert hub.objects() == {sha256(each).hexdigest(): 1 for each in (LARGE, LARGE[:1000])}

    _python(hub, tmp_path, DOWNLOAD, THINGS, str(tmp_path / "fetched"))
    assert (tmp_path / "fetched" / "deep" / "a.safetensors").read_bytes() == LARGE
    assert (tmp_path / "fetched" / "b.bin").read_bytes() == LARGE[:1000]
    assert [each.path for each in hub.requests if "/cdn/" in each.path or "/lfs/" in each.path] == []
    assert [each.path for each in hub.requests if "/xet-read-token/" in each.path]


def test_what_came_by_xet_is_read_over_http_too(hub: HubServer, tmp_path: Path) -> None:
    with online_client(hub):
        api = HfApi(endpoint=hub.endpoint, token=hub.token)
        api.create_repo(THINGS, repo_type="dataset")
        api.upload_file(path_or_fileobj=LARGE, path_in_repo="a.bin", repo_id=THINGS, repo_type="dataset")
        (listed,) = api.get_paths_info(THINGS, "a.bin", repo_type="dataset")
        assert len(listed.xet_hash) == 64

        files = HfFileSystem(endpoint=hub.endpoint, token=hub.token, skip_instance_cache=True)
        with files.open(f"datasets/{THINGS}/a.bin", cache_type="none") as stream:
            assert stream.read(10) == LARGE[:10]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
            file = api.hf_hub_download(THINGS, "a.bin", repo_type="dataset", cache_dir=tmp_path / "cache")
        assert Path(file).read_bytes() == LARGE
    assert hub.bytes_out("/cdn/") == len(LARGE) + 10


def test_without_xet_it_is_not_offered(hub: HubServer, tmp_path: Path) -> None:
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "a.bin").write_bytes(LARGE)
    hub.add(THINGS, tmp_path / "local")
    hub.stop()

    with HubServer(hub.folder) as plain, online_client(plain):
        api = HfApi(endpoint=plain.endpoint, token=plain.token)
        assert api.get_paths_info(THINGS, "a.bin", repo_type="dataset")[0].xet_hash is None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(constants, "HF_HUB_DISABLE_XET", False)
            upload = partial(api.upload_file, path_or_fileobj=b"\0", path_in_repo="b.bin", repo_id=THINGS)
            with pytest.raises(ConnectionError, match="404"):
                upload(repo_type="dataset")


def test_xet_needs_its_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hf_xet", None)
    with pytest.raises(MissingExtra, match=r"pip install 'streamtap\[hub\]'"):
        HubServer(tmp_path, xet=True)
