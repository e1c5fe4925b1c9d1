from __future__ import annotations

import json
import queue
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner, Result
from safetensors.numpy import load_file

from streamtap.cli.main import main
from streamtap.completion import Delta, Event, Finished
from streamtap.errors import InvalidInput
from streamtap.testing.fake_completer import FakeCompleter
from streamtap.wire import sse
from streamtap.wire.answers import json_answer
from streamtap.wire.errors import error_body
from streamtap.wire.requests import read_body

KEY = "stp_abcdefgh_secret"
PROMPT = "The sky is"
HEAD: dict[str, Any] = {"id": "cmpl-1", "created": 0, "model": "org/checkpoint"}


class _Server(ThreadingHTTPServer):
    """Completes with a fake model of four layers and width 8, as the service would; ``asked`` are the bodies."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[dict[str, Any]] = []

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, _Server)
        raw = self.rfile.read(int(self.headers["content-length"]))
        self.server.asked.append(json.loads(raw) | {"key": self.headers["authorization"]})
        body = read_body(raw)
        try:
            events = _events(body.to_request(max_tokens=body.max_tokens or 1, n_layers=4, hidden=8))
        except InvalidInput as error:
            self._send(400, "application/json", error_body(error, "r-1"))
            return
        finished = events[-1]
        assert isinstance(finished, Finished)
        if body.stream:
            chunks = [sse.chunk_event(event, **HEAD) for event in events if isinstance(event, Delta)]
            self._send(200, sse.MEDIA_TYPE, b"".join([*chunks, sse.usage_event(finished.usage, **HEAD), sse.DONE]))
        else:
            self._send(200, "application/json", b"  " + b"".join(json_answer(finished, **HEAD)))

    def _send(self, status: int, kind: str, content: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        return


def _events(request: Any) -> list[Event]:
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    FakeCompleter().submit(request, events.put)
    found: list[Event] = []
    while not found or not isinstance(found[-1], Finished):
        found.append(events.get(timeout=20))
    return found


@pytest.fixture(scope="module")
def running() -> Iterator[_Server]:
    with _Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def server(running: _Server, monkeypatch: pytest.MonkeyPatch) -> _Server:
    running.asked.clear()
    monkeypatch.setenv("STREAMTAP_API_BASE", running.base)
    monkeypatch.setenv("STREAMTAP_API_KEY", KEY)
    return running


def _run(*arguments: Any, **more: Any) -> Result:
    return CliRunner().invoke(main, ["complete", *map(str, arguments)], **more)


def test_the_text_alone_is_written(server: _Server) -> None:
    result = _run(PROMPT, "--model", "llama", "--temperature", 0, "--seed", 3, "--stop", "zz", "--stop", "yy")

    assert result.exit_code == 0, result.output
    assert len(result.stdout) == 64 + 1
    assert server.asked == [
        {
            "model": "llama",
            "prompt": PROMPT,
            "max_tokens": 64,
            "temperature": 0.0,
            "seed": 3,
            "stop": ["zz", "yy"],
            "key": f"Bearer {KEY}",
        }
    ]


def test_the_text_may_come_from_standard_input(server: _Server) -> None:
    assert _run("-", "--max-tokens", 5, input=PROMPT).stdout == _run(PROMPT, "--max-tokens", 5).stdout
    assert [asked["prompt"] for asked in server.asked] == [PROMPT, PROMPT]


def test_the_text_may_come_as_it_is_made(server: _Server) -> None:
    streamed = _run(PROMPT, "--max-tokens", 9, "--stream")

    assert streamed.exit_code == 0, streamed.output
    assert streamed.stdout == _run(PROMPT, "--max-tokens", 9).stdout
    assert server.asked[0]["stream"] is True


def test_a_server_may_be_named_on_the_command_line(server: _Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STREAMTAP_API_BASE")

    assert _run(PROMPT, "--max-tokens", 2, "--api-base", server.base).exit_code == 0


def test_rows_go_to_a_safetensors_file(server: _Server, tmp_path: Path) -> None:
    result = _run(PROMPT, "--max-tokens", 4, "--layers", "1,2-3", "--out", tmp_path / "rows.safetensors")

    assert result.exit_code == 0, result.output
    rows = load_file(tmp_path / "rows.safetensors")
    assert server.asked[0]["output_residual_stream"] == [1, 2, 3]
    assert rows["residual_stream"].shape == (3, 14, 8)
    assert rows["residual_stream"].dtype.name == "bfloat16"
    assert rows["layer_indices"].tolist() == [1, 2, 3]
    assert rows["positions"].tolist() == list(range(14))
    assert rows["offsets"].tolist() == [0, 14]
    assert rows["token_ids"].shape == (14,)
    assert result.stderr == f"wrote 3 layers of 14 rows to {tmp_path / 'rows.safetensors'}\n"
    assert [file.name for file in tmp_path.iterdir()] == ["rows.safetensors"]


def test_rows_in_an_npz_file_are_the_same(server: _Server, tmp_path: Path) -> None:
    for name in ("rows.npz", "rows.safetensors"):
        assert _run(PROMPT, "--positions", "last", "--out", tmp_path / name).exit_code == 0

    with np.load(tmp_path / "rows.npz") as rows:
        narrow = load_file(tmp_path / "rows.safetensors")
        assert rows["residual_stream"].dtype == np.float32
        assert rows["residual_stream"].shape == (4, 1, 8)
        np.testing.assert_array_equal(rows["residual_stream"].astype(ml_dtypes.bfloat16), narrow["residual_stream"])
        assert rows["token_ids"].tolist() == narrow["token_ids"].tolist()
    assert server.asked[0]["output_residual_stream"] is True
    assert server.asked[0]["max_tokens"] == 1


def test_a_direction_is_added(server: _Server, tmp_path: Path) -> None:
    np.save(tmp_path / "v.npy", np.arange(8.0))
    plain, steered = tmp_path / "plain.npz", tmp_path / "steered.npz"
    assert _run(PROMPT, "--layers", "2", "--out", plain).exit_code == 0
    steering = ("--steer", tmp_path / "v.npy", "--layer", 2, "--scale", -2)
    result = _run(PROMPT, "--layers", "2", "--out", steered, *steering)

    assert result.exit_code == 0, result.output
    with np.load(plain) as before, np.load(steered) as after:
        change = after["residual_stream"] - before["residual_stream"]
    np.testing.assert_allclose(change, np.broadcast_to(-2 * np.arange(8.0), change.shape), atol=0.2)
    assert server.asked[1]["apply_steering_vectors"][0]["scale"] == -2.0


def test_what_the_server_refuses_is_one_sentence(server: _Server, tmp_path: Path) -> None:
    result = _run(PROMPT, "--layers", "9", "--out", tmp_path / "rows.npz")

    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert "layer" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_no_server_is_one_sentence_that_says_how_to_name_it() -> None:
    result = _run(PROMPT)

    assert result.exit_code == 2
    assert "no server was named: give --api-base or set STREAMTAP_API_BASE" in result.stderr
    assert "--local demo" in result.stderr


def test_no_key_is_one_sentence(server: _Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STREAMTAP_API_KEY")

    result = _run(PROMPT)

    assert result.exit_code == 1
    assert f"error: no API key for {server.base}: " in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layers", "1"], "--layers needs --out"),
        (["--out", "rows.npz", "--stream"], "--stream cannot be had with --out"),
        (["--out", "rows.txt"], "--out must end in .safetensors or .npz; got 'rows.txt'"),
        (["--out", "nowhere/rows.npz"], "there is no folder nowhere"),
        (["--out", "rows.npz", "--layers", "-1"], "--layers must be all, or numbers and ranges"),
        (["--layer", "1"], "need --steer"),
        (["--steer", "v.npy"], "--steer needs --layer"),
        (["--steer", "notes.npy", "--layer", "1"], "notes.npy is not an .npy file of numbers"),
        (["--steer", "empty.npy", "--layer", "1"], "empty.npy is not an .npy file of numbers"),
        (["--steer", "none.npy", "--layer", "1"], "none.npy cannot be read (No such file or directory)"),
        (["--local", "demo", "--model", "llama"], "--api-base and --model are for a server"),
    ],
)
def test_what_does_not_go_together_is_refused_before_anything_is_asked(
    server: _Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.npy").write_text("no numbers")
    (tmp_path / "empty.npy").touch()

    result = _run(PROMPT, *arguments)

    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
    assert server.asked == []


def test_a_file_is_replaced_only_when_asked(server: _Server, tmp_path: Path) -> None:
    file = tmp_path / "rows.npz"
    file.write_text("mine")

    refused = _run(PROMPT, "--out", file)
    assert (refused.exit_code, file.read_text()) == (2, "mine")
    assert _run(PROMPT, "--out", file, "--overwrite").exit_code == 0
    with np.load(file) as rows:
        assert "residual_stream" in rows


def test_a_model_may_run_in_this_process(model: str, tmp_path: Path) -> None:
    np.save(tmp_path / "v.npy", np.zeros(64))
    arguments = (PROMPT, "--local", model, "--max-tokens", 4, "--temperature", 0)
    streamed = _run(*arguments, "--stream")
    whole = _run(*arguments, "--out", tmp_path / "rows.npz", "--layers", "0,1", "--positions", "generated")

    assert (streamed.exit_code, whole.exit_code) == (0, 0), streamed.output + whole.output
    assert streamed.stdout == whole.stdout
    with np.load(tmp_path / "rows.npz") as rows:
        assert rows["residual_stream"].shape[:2] == (2, 3)
