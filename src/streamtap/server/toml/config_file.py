"""``streamtap.toml``: what is served, to whom how much, and where files go.

::

    host = "127.0.0.1"            # and port = 8000
    data_dir = "streamtap-data"   # database, engines' logs; a path that is not absolute starts at this file's folder
    database = "postgresql+psycopg://tap:secret@db/tap"   # several gateways share it; else SQLite in data_dir
    engines = "separate"          # completions and captures apart; "shared": one engine for both, where memory is short
    max_engines = 4               # processes at a time; the one used least recently makes room
    default_model = "llama-8b"

    [limits]                      # for each key, unless the key says otherwise
    rate_per_minute = 600
    monthly_activations = 5000    # 0 is unlimited

    [harvest]                     # bulk jobs
    store = "s3://bucket/harvests"   # a folder or a store that all gateways reach; else data_dir
    keep_days = 30                # then a run's files are removed
    workers = 1                   # processes for small models, and as many for large ones; 0 takes no jobs

    [timing]
    deadline_seconds = 840

    [[models]]
    id = "llama-8b"               # what clients name
    checkpoint = "meta-llama/Llama-3.1-8B"   # a Hub id, a folder, a .gguf file, or "demo"
    revision = "main"
    dtype = "bfloat16"
    device = "cuda:0"
    idle_seconds = 900            # 0 never stops it
    max_activation_prompt_tokens = 2048

    [[models]]
    id = "llama-405b"
    checkpoint = "meta-llama/Llama-3.1-405B"
    engine = "vllm"               # a `vllm serve` with vllm-lens is started
    tensor_parallel_size = 8      # devices
    arguments = ["--gpu-memory-utilization", "0.9"]   # what else it is told
    size = "large"
    gpu_shape = "8xH200"

    [[models]]
    id = "elsewhere"
    checkpoint = "org/model"
    engine = "url"                # one that runs already
    url = "http://10.0.0.5:8000"
    api_key_file = "engine.key"

Each field of ``config.ServerConfig``, ``ModelConfig``, ``Limits``, ``HarvestConfig`` and ``Timing`` is a key. Without
``[[models]]`` the demo model is served.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_type_hints

from streamtap.engines.demo_model import DEMO
from streamtap.errors import SettingsError
from streamtap.server.config import HarvestConfig, Limits, ModelConfig, ServerConfig, Timing
from streamtap.server.toml.config_lines import KeyPath, find_line
from streamtap.server.toml.config_rules import faults
from streamtap.server.toml.config_values import placed, read_value, shown

CONFIG_FILE = "streamtap.toml"

_TABLES: dict[str, type] = {"limits": Limits, "timing": Timing, "harvest": HarvestConfig}
_SQLITE_FILE = re.compile(r"(sqlite(?:\+\w+)?:///)([^/:?][^?]*)(.*)")


def read_config(path: Path | None, **overrides: Any) -> ServerConfig:
    """Read a configuration; ``overrides`` are fields of ``ServerConfig`` that win, unless they are None.

    Without a file it is the demo model under the id ``"demo"``, and every default.

    Raises:
        SettingsError: the file cannot be read, or is wrong; the message has the line, the reason and what to do.
    """
    given = {name: value for name, value in overrides.items() if value is not None}
    if path is None:
        return _checked(dataclasses.replace(ServerConfig(models=(_demo(),)), **given), "the configuration")
    return _Reader(path).config(given)


def find_config(given: Path | None) -> Path | None:
    """The file to read: ``given``, else ``streamtap.toml`` in the current folder, else None."""
    return given or (Path(CONFIG_FILE) if Path(CONFIG_FILE).is_file() else None)


def _demo() -> ModelConfig:
    return ModelConfig(id=DEMO, checkpoint=DEMO)


def _checked(config: ServerConfig, where: str) -> ServerConfig:
    for path, reason in faults(config):
        raise SettingsError(f"{where}: {path[-1]}: {reason}.")
    return config


class _Reader:
    """One file being read; knows the line of whatever is wrong."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._folder = path.absolute().parent
        self._text = self._read()
        self._tables = self._parsed()

    def config(self, overrides: Mapping[str, Any]) -> ServerConfig:
        tables = dict(self._tables)
        values = {name: self._table(kind, tables.pop(name, {}), (name,)) for name, kind in _TABLES.items()}
        values["models"] = self._models(tables.pop("models", None))
        config: ServerConfig = self._table(ServerConfig, tables, (), **values)
        if "data_dir" not in tables:
            config = dataclasses.replace(config, data_dir=self._folder / config.data_dir)
        config = dataclasses.replace(
            config, database=self._sqlite_placed(config.database), harvest=self._store_placed(config.harvest)
        )
        for where, reason in faults(config):
            raise self._error(where, f"{where[-1]}: {reason}.")
        return _checked(dataclasses.replace(config, **overrides), "the command line")

    def _read(self) -> str:
        try:
            return self._path.read_text(encoding="utf-8").replace("\r\n", "\n")
        except OSError as error:
            raise SettingsError(
                f"the configuration {self._path} cannot be read: {error.strerror}; check the path."
            ) from error
        except UnicodeDecodeError as error:
            raise SettingsError(f"{self._path} is not UTF-8 text; save it as such.") from error

    def _parsed(self) -> dict[str, Any]:
        try:
            return tomllib.loads(self._text)
        except tomllib.TOMLDecodeError as error:
            reason, _, where = str(error).rpartition(" (at ")
            told = re.match(r"line (\d+), column (\d+)", where)
            line = int(told[1]) if told else self._text.count("\n") + 1
            at = f" at column {told[2]}" if told else " at the end of the file"
            raise SettingsError(f"{self._path}, line {line}: this is not TOML: {reason}{at}.") from error

    def _error(self, where: KeyPath, reason: str) -> SettingsError:
        return SettingsError(f"{self._path}, line {find_line(self._text, where)}: {reason}")

    def _table(self, kind: type, table: Any, where: KeyPath, **ready: Any) -> Any:
        if not isinstance(table, dict):
            raise self._error(where, f"{where[-1]}: expected a table, [{where[0]}], got {shown(table)}.")
        kinds = {name: each for name, each in get_type_hints(kind).items() if name not in ready}
        values = {name: self._value(kinds, name, value, (*where, name)) for name, value in table.items()}
        return kind(**values, **ready)

    def _value(self, kinds: Mapping[str, Any], name: str, value: Any, where: KeyPath) -> Any:
        if name not in kinds:
            near = difflib.get_close_matches(name, kinds, 1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(kinds))}."
            raise self._error(where, f"unknown key {name}; {hint}")
        try:
            return read_value(name, kinds[name], value, self._folder)
        except ValueError as error:
            raise self._error(where, f"{name}: {error}.") from error

    def _models(self, tables: Any) -> tuple[ModelConfig, ...]:
        if tables is None:
            return (_demo(),)
        if not isinstance(tables, list) or not tables:
            raise self._error(("models",), "models: expected tables, each opened with [[models]].")
        return tuple(self._model(table, place) for place, table in enumerate(tables))

    def _model(self, table: Any, place: int) -> ModelConfig:
        where: KeyPath = ("models", place)
        for needed in ("id", "checkpoint"):
            if not isinstance(table, dict) or needed not in table:
                raise self._error(
                    where, f"model {place + 1} has no {needed}; every [[models]] needs id and checkpoint."
                )
        model: ModelConfig = self._table(ModelConfig, table, where)
        return self._with_local_checkpoint(model)

    def _with_local_checkpoint(self, model: ModelConfig) -> ModelConfig:
        """A checkpoint beside this file by its whole path; clients still see what was written."""
        written = model.checkpoint
        path = placed(written, self._folder)
        is_path = written.startswith((".", "~")) or written.endswith(".gguf") or (written != DEMO and path.is_dir())
        if not is_path or Path(written).is_absolute():
            return model
        return dataclasses.replace(model, checkpoint=str(path), name=model.name or written)

    def _sqlite_placed(self, url: str) -> str:
        found = _SQLITE_FILE.fullmatch(url)
        return f"{found[1]}{placed(found[2], self._folder)}{found[3]}" if found else url

    def _store_placed(self, harvest: HarvestConfig) -> HarvestConfig:
        if harvest.store is None or "://" in harvest.store:
            return harvest
        return dataclasses.replace(harvest, store=str(placed(harvest.store, self._folder)))
