"""The service as processes, over fake engines or the demo model, and the plain model to compare with."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors

from streamtap.server.db import Database
from streamtap.server.ledger.keys import KeyLimits, Keys
from streamtap.server.toml.config_file import read_config
from streamtap.settings import Settings
from streamtap.testing.characters import SPECIAL_IDS, VOCABULARY

FAKE_WORKER = "streamtap.testing.fake_worker"
TOKENIZER = "characters.json"
#: Many requests of one key are nothing unusual here.
BUSY = {"rate_per_minute": 1_000_000}


class Service:
    """`streamtap serve` in a process of its own; ``folder`` outlives it and may be started on again."""

    def __init__(self, folder: Path, served: Sequence[Mapping[str, Any]], **tables: Any) -> None:
        self.folder = folder
        self.file = folder / "streamtap.toml"
        self.file.write_text(_toml({"port": 0, **tables}, served), encoding="utf-8")
        _write_tokenizer(folder / TOKENIZER)
        self.start()
        try:
            self.key = self.new_key(f"tester of {folder.name}")
        except BaseException:
            self.close()
            raise

    def start(self) -> None:
        command = [sys.executable, "-m", "streamtap", "serve", "--config", str(self.file)]
        variables = {**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
        with (self.folder / "service.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=variables)
        assert self.process.stdout is not None
        said = ""
        for line in self.process.stdout:
            said += line
            if "Ctrl-C" in line:
                break
        found = re.search(r"Serving .* at (http://127\.0\.0\.1:\d+/v1)", said)
        if found is None:
            self.close()
            pytest.fail(said + (self.folder / "service.log").read_text())
        self.base_url = found[1]

    def new_key(self, name: str, **limits: int) -> str:
        """A key with limits of its own, for completions and harvests."""
        database = Database.open(read_config(self.file).database_url)
        try:
            scopes = ("completions", "harvest")
            return Keys(database).create(name, scopes=scopes, limits=KeyLimits(**limits)).secret
        finally:
            database.close()

    def client(self, key: str | None = None, *, asynchronous: bool = False) -> Any:
        kind = httpx2.AsyncClient if asynchronous else httpx2.Client
        limits = httpx2.Limits(max_connections=None)
        # It speaks plain HTTP, and reading certificates takes 40 ms of each of the many clients.
        how: dict[str, Any] = {"timeout": 300, "trust_env": False, "verify": False, "limits": limits}
        return kind(base_url=self.base_url, headers=self._headers(key), **how)

    def ask(self, body: Mapping[str, Any], **headers: str) -> httpx2.Response:
        """The answer to one completion, whatever it is."""
        told = {name.replace("_", "-"): value for name, value in headers.items()}
        with self.client() as client:
            response: httpx2.Response = client.post("/completions", json=dict(body), headers=told)
            return response

    def complete(self, **body: Any) -> dict[str, Any]:
        """The body of a completion that is one."""
        response = self.ask(body)
        found: dict[str, Any] = response.json()
        assert response.status_code == 200, response.text
        assert "error" not in found, found
        return found

    def usage(self, key: str | None = None) -> dict[str, Any]:
        with self.client(key) as client:
            found: dict[str, Any] = client.get("/usage").json()
            return found

    def until_idle(self, key: str | None = None, *, seconds: float = 20) -> bool:
        """Whether no request of the key is left before long."""
        return until(lambda: _held(self.usage(key)) == (0, 0), seconds)

    def engines(self) -> list[int]:
        """Process ids of the fake engines under this gateway, without the keepers that hold them."""
        return [pid for pid, args in self.processes() if FAKE_WORKER in args and "keeper" not in args]

    def processes(self) -> list[tuple[int, str]]:
        """Id and command of every process under this gateway."""
        table = subprocess.run(["ps", "-Awwo", "pid=,ppid=,args="], capture_output=True, text=True, check=True)
        rows = [line.split(None, 2) for line in table.stdout.splitlines()]
        ours = {self.process.pid}
        for _ in range(3):
            ours |= {int(row[0]) for row in rows if int(row[1]) in ours}
        return [(int(row[0]), row[2]) for row in rows if len(row) == 3 and int(row[0]) in ours]

    def stop(self) -> int:
        """The exit status after a polite end."""
        self.process.send_signal(signal.SIGTERM)
        return self._ended(60)

    def kill(self) -> None:
        """An end without a word."""
        self.process.kill()
        self._ended(60)

    def close(self) -> None:
        """End it, whatever state it is in."""
        if self.process.poll() is None:
            try:
                self.process.send_signal(signal.SIGTERM)
                self._ended(30)
            except subprocess.TimeoutExpired:
                self.kill()

    def _ended(self, seconds: float) -> int:
        status = self.process.wait(seconds)
        if self.process.stdout is not None:
            self.process.stdout.close()
        return status

    def _headers(self, key: str | None) -> dict[str, str]:
        return {"Authorization": f"Bearer {key or self.key}"}


def until(said: Callable[[], bool], seconds: float = 20) -> bool:
    end = time.monotonic() + seconds
    while not said():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def fake_model(model_id: str = "fake", *options: str, **more: Any) -> dict[str, Any]:
    """A table of a model that a fake worker serves; ``options`` are that one's."""
    command = [sys.executable, "-m", FAKE_WORKER, "--port", "{port}", "--served-model-name", "{name}", *options]
    facts = {"n_layers": 4, "hidden_size": 8, "vocabulary": VOCABULARY, "max_model_len": 2048, "tokenizer": TOKENIZER}
    return {"id": model_id, "checkpoint": "org/fake", "command": command, **facts, **more}


def _write_tokenizer(file: Path) -> None:
    """The fake engine's own, as the gateway reads it."""
    letters = [chr(ord(" ") + place) for place in range(VOCABULARY - len(SPECIAL_IDS))]
    ids = {token: place for place, token in enumerate(("<s>", "</s>", "<pad>", "<unk>", *letters))}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", ids["<s>"])])
    tokenizer.save(str(file))


def _toml(top: Mapping[str, Any], served: Sequence[Mapping[str, Any]]) -> str:
    """Values of JSON are values of TOML."""
    tables = {name: value for name, value in top.items() if isinstance(value, dict)}
    parts = [("", {name: value for name, value in top.items() if name not in tables})]
    parts += [(f"[{name}]", table) for name, table in tables.items()]
    parts += [("[[models]]", dict(model)) for model in served]
    return "".join(f"{head}\n" + _keys(table) for head, table in parts)


def _keys(table: Mapping[str, Any]) -> str:
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items())


def _held(usage: Mapping[str, Any]) -> tuple[int, int]:
    requests = usage["requests"]
    return requests["active"]["now"], requests["waiting"]["now"]


class PlainModel:
    """The demo model in transformers alone."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._torch = torch
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)

    def ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text)["input_ids"])

    def text(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids)))

    def rows(
        self, ids: Sequence[int], steer: Callable[[int, NDArray[np.float32]], NDArray[np.float32]] | None = None
    ) -> NDArray[np.float32]:
        """What each decoder block puts out, float32 [layers, tokens, hidden]; ``steer`` may replace it on its way."""
        torch, found = self._torch, {}

        def hook(layer: int) -> Any:
            def keep(_module: Any, _inputs: Any, output: Any) -> Any:
                tensor = output if torch.is_tensor(output) else output[0]
                found[layer] = tensor[0].numpy() if steer is None else steer(layer, tensor[0].numpy())
                if steer is None:
                    return None
                changed = torch.tensor(found[layer])[None]
                return changed if torch.is_tensor(output) else (changed, *output[1:])

            return keep

        handles = [block.register_forward_hook(hook(layer)) for layer, block in enumerate(self.model.model.layers)]
        self.logits(ids)
        for handle in handles:
            handle.remove()
        return np.stack([found[layer] for layer in sorted(found)])

    def logits(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """[tokens, vocabulary]."""
        with self._torch.no_grad():
            found: NDArray[np.float32] = self.model(self._torch.tensor([list(ids)])).logits[0].numpy()
        return found

    def logprobs(self, ids: Sequence[int]) -> NDArray[np.float64]:
        """[tokens, vocabulary], of the token that follows each."""
        logits = self.logits(ids).astype(np.float64)
        shifted = logits - logits.max(axis=-1, keepdims=True)
        found: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
        return found

    def reader_of(self, token: int) -> NDArray[np.float32]:
        """The row of the head [hidden] that a token's logit is read with."""
        found: NDArray[np.float32] = self.model.lm_head.weight[token].detach().numpy()
        return found

    def read(self, row: NDArray[np.float32]) -> int:
        """The token that the final norm and the head make of a row [hidden]."""
        with self._torch.no_grad():
            return int(self.model.lm_head(self.model.model.norm(self._torch.tensor(row))).argmax())


Starts = Callable[..., Service]


@contextlib.contextmanager
def _services(folder: Path) -> Iterator[Starts]:
    with contextlib.ExitStack() as stack:

        def start(*served: Mapping[str, Any], limits: Mapping[str, Any] | None = None, **tables: Any) -> Service:
            own = folder / f"service-{len(list(folder.glob('service-*')))}"
            own.mkdir()
            service = Service(own, served, limits={**BUSY, **(limits or {})}, **tables)
            stack.callback(service.close)
            return service

        yield start


@pytest.fixture
def start_service(tmp_path: Path) -> Iterator[Starts]:
    """Start `streamtap serve` with these models and tables, as often as a test likes, each in a folder of its own."""
    with _services(tmp_path) as start:
        yield start


@pytest.fixture(scope="module")
def start_lasting_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starts]:
    """The same, for all tests of a file."""
    with _services(tmp_path_factory.mktemp("services")) as start:
        yield start


@pytest.fixture(scope="session")
def fake() -> Callable[..., dict[str, Any]]:
    """The table of a model whose engine is a fake one."""
    return fake_model


@pytest.fixture(scope="session")
def wait_until() -> Callable[..., bool]:
    """Look until it is so, or time is up."""
    return until


@pytest.fixture(scope="session")
def demo_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """The demo model under the id that the samples of the seed name, warm, in float32, one engine for everything."""
    model = {"id": "llama-8b", "checkpoint": "demo", "dtype": "float32", "device": "cpu", "idle_seconds": 0}
    folder = tmp_path_factory.mktemp("demo-service")
    service = Service(folder, [model], engines="shared", limits=BUSY)
    try:
        service.complete(prompt="a", max_tokens=1)
        yield service
    finally:
        service.close()


@pytest.fixture(scope="session")
def plain(demo_service: Service) -> PlainModel:
    """The model that ``demo_service`` serves."""
    from streamtap.engines.demo_model import demo_folder

    return PlainModel(demo_folder(Settings.from_environment()))
