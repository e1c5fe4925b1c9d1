"""No token in what is logged, raised, written, published or printed, however a call ends."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

import streamtap
from streamtap import UnifiedCache
from streamtap.dataset import hub_waiting, names
from streamtap.errors import AccessDenied, InvalidInput, StreamtapError, TransferFailed
from streamtap.testing import FakeEngine, HubServer, online_client

SECRET = "hf_secretofthetests"
REPO, PROMPTS = "tester/acts", ["one prompt", "another prompt"]


@dataclass
class Place:
    hub: HubServer
    folder: Path

    def push(self, **options: Any) -> object:
        return streamtap.push_dataset(REPO, "fake", PROMPTS, cache_dir=self.folder / "rows", **options)

    def load(self, **options: Any) -> object:
        return streamtap.load_activations(REPO, refresh=True, **options)

    def rows(self, **options: Any) -> object:
        return streamtap.load_rows(REPO, refresh=True, **options)

    def tensors(self, **options: Any) -> object:
        return streamtap.load_activation_dataset(REPO, refresh=True, **options)

    def metadata(self, **options: Any) -> object:
        return streamtap.fetch_dataset_metadata(REPO, refresh=True, **options)

    def pull(self, **options: Any) -> object:
        return streamtap.pull_dataset(REPO, overwrite=True, cache_dir=self.folder / "pulled", **options)

    def verify(self, **options: Any) -> object:
        return streamtap.verify_dataset(REPO, refresh=True, **options)

    def upgrade(self, **options: Any) -> object:
        return streamtap.upgrade_dataset_format(REPO, **options)


#: The first publishes what the others read.
CALLS = ["push", "load", "rows", "tensors", "metadata", "pull", "verify", "upgrade"]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[Place]:
    """A Hub whose owner has the secret; at the end it is in no log, and in no file on either side."""
    monkeypatch.setenv("STREAMTAP_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hf"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    caplog.set_level(logging.DEBUG)
    with UnifiedCache(FakeEngine(2), compute_perplexity=False, cache_dir=tmp_path / "rows") as cache:
        cache.warmup(PROMPTS)
    with HubServer(tmp_path / "hub", token=SECRET) as hub, online_client(hub):
        yield Place(hub, tmp_path)
    assert len(caplog.records) > 0
    assert SECRET not in "".join(map(logging.Formatter().format, caplog.records))
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert [file for file in files if SECRET.encode() in file.read_bytes()] == []


def refused(call: Callable[..., object], **options: Any) -> StreamtapError:
    """What a call raises, after a look at all that a log of it may hold."""
    with pytest.raises(StreamtapError) as caught:
        call(**options)
    shown = "".join(traceback.format_exception(caught.value))
    link: BaseException | None = caught.value
    while link is not None:
        shown += repr(link) + repr(vars(link))
        link = link.__cause__ or link.__context__
    assert SECRET not in shown
    return caught.value


def test_a_good_token_is_left_nowhere(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with the line break that copying it brings along."""
    for name in CALLS:
        assert getattr(place, name)(token=f"{SECRET}\n"), name
    monkeypatch.setenv("HF_TOKEN", f" {SECRET}\r\n")
    for name in CALLS:
        assert getattr(place, name)(), name
    published = b"".join(place.hub.read(REPO, path) for path in place.hub.files(REPO))
    assert names.INDEX in place.hub.files(REPO)
    assert SECRET.encode() not in published


def test_a_token_that_is_refused(place: Place) -> None:
    """Another one's secret: the server says 401."""
    place.push(token=SECRET)
    for name in CALLS:
        place.hub.reset_counts()
        assert isinstance(refused(getattr(place, name), token=f"{SECRET}-but-wrong"), AccessDenied), name
        assert {each.status for each in place.hub.requests} == {401}


@pytest.mark.parametrize("token", [f"{SECRET}\nX-Other: 1", f"{SECRET} {SECRET}", f"{SECRET}é"])
def test_a_token_that_no_header_can_hold(place: Place, monkeypatch: pytest.MonkeyPatch, token: str) -> None:
    for name in CALLS:
        assert isinstance(refused(getattr(place, name), token=token), InvalidInput), name
    monkeypatch.setenv("HF_TOKEN", token.replace("\n", " "))
    for name in CALLS:
        assert isinstance(refused(getattr(place, name)), InvalidInput), name
    assert place.hub.requests == []


def test_a_server_that_does_not_answer(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.2)
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.2)
    monkeypatch.setattr(hub_waiting, "FIRST_CONTACT_SECONDS", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        for name in CALLS:
            error = refused(getattr(place, name), token=SECRET, endpoint=endpoint)
            assert isinstance(error, TransferFailed)
            assert "timed out" in str(error), name


def test_an_address_that_holds_a_secret(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    for endpoint in (f"http://user:{SECRET}@127.0.0.1:9", f"http://127.0.0.1:9/?token={SECRET}"):
        monkeypatch.delenv("HF_ENDPOINT", raising=False)
        for name in CALLS:
            assert "(it is not shown here)" in str(refused(getattr(place, name), endpoint=endpoint)), name
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        for name in CALLS:
            assert "(it is not shown here)" in str(refused(getattr(place, name))), name
    assert place.hub.requests == []


@pytest.mark.parametrize(
    "address",
    [
        f"https://user:{SECRET}@huggingface.co/datasets/tester/acts",
        f"hf://{SECRET}@huggingface.co/tester/acts",
        f"s3://key:{SECRET}@bucket/folder",
        f"s3://bucket/folder?X-Amz-Signature={SECRET}",
        f"tester:{SECRET}@huggingface.co",
    ],
)
def test_a_name_that_holds_a_secret(place: Place, address: str) -> None:
    for call in (streamtap.load_activations, streamtap.fetch_dataset_metadata, streamtap.upgrade_dataset_format):
        assert isinstance(refused(lambda call=call: call(address)), InvalidInput)
    pushing = lambda: streamtap.push_dataset(address, "fake", PROMPTS, cache_dir=place.folder / "rows")  # noqa: E731
    assert isinstance(refused(pushing), InvalidInput)


@pytest.mark.parametrize("token", [f"{SECRET}-but-wrong", f"{SECRET} {SECRET}"])
def test_the_command_line_prints_none(place: Place, token: str) -> None:
    place.push(token=SECRET)
    environment = {**os.environ, **place.hub.environment, "HF_TOKEN": token, "HF_DEBUG": "1"}
    command = [sys.executable, "-m", "streamtap", "--debug", "dataset", "load", REPO]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)

    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert SECRET not in done.stdout + done.stderr
