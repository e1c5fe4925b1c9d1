from __future__ import annotations

from pathlib import Path

import pytest

from streamtap.errors import SettingsError
from streamtap.server.config import ServerConfig
from streamtap.server.toml.config_file import find_config, read_config
from streamtap.server.toml.config_lines import find_line

WHOLE = """
# what one machine serves
port = 8100
data_dir = "data"
database = "postgresql+psycopg://tap:hunter2@db/tap"
engines = "shared"
default_model = "b"

[limits]
rate_per_minute = 60

[timing]
deadline_seconds = 30

[[models]]
id = "a"
checkpoint = "org/one"
arguments = [
    "--x",   # [[models]]
    "id = 3",
]

[[models]]
id = "b"
checkpoint = "./two"
dtype = "float32"
idle_seconds = 5
"""


def _read(tmp_path: Path, text: str, **overrides: object) -> ServerConfig:
    file = tmp_path / "streamtap.toml"
    file.write_text(text, encoding="utf-8")
    return read_config(file, **overrides)


def _refusal(tmp_path: Path, text: str) -> str:
    with pytest.raises(SettingsError) as caught:
        _read(tmp_path, text)
    return str(caught.value)


def _model(*lines: str) -> str:
    return "\n".join(['[[models]]\nid = "a"\ncheckpoint = "org/one"', *lines])


def test_without_a_file_it_is_the_demo_model() -> None:
    config = read_config(None)

    assert [(model.id, model.checkpoint) for model in config.models] == [("demo", "demo")]
    assert config.default.id == "demo"
    assert config.database_url.startswith("sqlite:////")
    assert config.database_url.endswith("/streamtap-data/streamtap.db")
    assert config.limits.rate_per_minute == 600


def test_every_part_of_a_file_is_read(tmp_path: Path) -> None:
    config = _read(tmp_path, WHOLE)

    assert (config.port, config.engines, config.default.id) == (8100, "shared", "b")
    assert config.limits.rate_per_minute == 60
    assert config.timing.deadline_seconds == 30.0
    assert config.models[0].arguments == ("--x", "id = 3")
    assert config.models[1].idle_seconds == 5.0
    assert config.data_dir == tmp_path / "data"


def test_paths_start_at_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "weights").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")

    first = '[[models]]\nid = "a"\ncheckpoint = "weights"'
    second = '[[models]]\nid = "b"\ncheckpoint = "./two"'
    config = _read(tmp_path, f'database = "sqlite:///keys.db"\n{first}\n{second}')

    assert config.models[0].checkpoint == str(tmp_path / "weights")
    assert config.models[0].served_name == "weights"
    assert config.models[1].checkpoint == str(tmp_path / "two")
    assert config.data_dir == tmp_path / "streamtap-data"
    assert config.database_url == f"sqlite:///{tmp_path / 'keys.db'}"


def test_harvests_are_kept_in_the_data_folder_or_where_the_file_says(tmp_path: Path) -> None:
    plain = _read(tmp_path, WHOLE)
    assert (plain.harvest.store, plain.harvest_root) == (None, str(tmp_path / "data"))
    assert (plain.harvest.workers, plain.harvest.keep_days, plain.harvest.link_days) == (1, 30, 7)
    assert _read(tmp_path, WHOLE, data_dir=tmp_path / "other").harvest_root == str(tmp_path / "other")

    told = _read(tmp_path, "[harvest]\nstore = 'runs'\nkeep_days = 2\nidle_seconds = 0")
    assert (told.harvest_root, told.harvest.keep_days, told.harvest.idle_seconds) == (str(tmp_path / "runs"), 2, 0)
    assert _read(tmp_path, "[harvest]\nstore = 's3://bucket/x'").harvest_root == "s3://bucket/x"


def test_what_is_given_on_the_command_line_wins(tmp_path: Path) -> None:
    config = _read(tmp_path, WHOLE, port=9000, host=None, data_dir=tmp_path / "other")

    assert (config.port, config.host, config.data_dir) == (9000, "127.0.0.1", tmp_path / "other")
    with pytest.raises(SettingsError, match="the command line: default_model: no model has the id 'c'"):
        _read(tmp_path, WHOLE, default_model="c")


def test_a_file_in_this_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_config(None) is None
    (tmp_path / "streamtap.toml").write_text("")
    assert find_config(None) == Path("streamtap.toml")
    assert find_config(Path("other.toml")) == Path("other.toml")


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("port = ", 1, "this is not TOML: Invalid value at the end of the file"),
        ("\nport = 1 2", 2, "at column 10"),
        ("host = 'x'\nprot = 1", 2, "unknown key prot; did you mean port?"),
        ("port = 1\n[limits]\n\nzzz = 1", 4, "unknown key zzz; there are breaker_failures, "),
        ("port = '1'", 1, "port: expected a whole number, got '1'"),
        ("port = true", 1, "port: expected a whole number, got true"),
        ("port = 70000", 1, "port: expected a whole number of at least 0 and at most 65535, got 70000"),
        ("limits = 3", 1, "limits: expected a table, [limits], got 3"),
        ("limits = {rate_per_minute = -1}", 1, "rate_per_minute: expected a whole number of at least 1, got -1"),
        ("limits.rate_per_minute = 'x'", 1, "rate_per_minute: expected a whole number"),
        ("[timing]\nkeepalive_seconds = 0", 2, "keepalive_seconds: expected a number of more than 0, got 0"),
        ("[timing]\nstop_seconds = inf", 2, "stop_seconds: expected a number of more than 0, got inf"),
        ("[harvest]\nlink_days = 8", 2, "link_days: expected a number of at least 1e-05 and at most 7, got 8"),
        ("[harvest]\nworkers = -1", 2, "workers: expected a whole number of at least 0, got -1"),
        ("[harvest]\nlease_seconds = 1", 2, "lease_seconds: expected a number of at least 5, got 1"),
        ("[harvest]\nkeep_days = 0", 2, "keep_days: expected a number of more than 0, got 0"),
        ("[harvest]\nstor = 'x'", 2, "unknown key stor; did you mean store?"),
        ("[harvest]\nstore = 'ftp://host/x'", 2, "store: an object store is named as s3://bucket/folder"),
        ("port = 1\n[harvest]\n\nstore = 's3://u:hunter2@b/x'", 4, "without credentials or a query"),
        ("[limits]\nlarge_harvests = 0", 2, "large_harvests: expected a whole number of at least 1, got 0"),
        ("engines = 'both'", 1, "engines: expected 'separate' or 'shared', got 'both'"),
        ("models = []", 1, "models: expected tables, each opened with [[models]]"),
        ("[models]\nid = 'a'", 1, "models: expected tables"),
        ("[[models]]\nid = 'a'", 1, "model 1 has no checkpoint; every [[models]] needs id and checkpoint"),
        (_model("dtype = 'int8'"), 4, "dtype: expected auto, float32, bfloat16 or float16, got 'int8'"),
        (_model("activations = 1"), 4, "activations: expected true or false, got 1"),
        (_model("command = 'x {port}'"), 4, "command: expected a list of texts, got 'x {port}'"),
        (_model("command = ['x']"), 4, "command: expected {port} in it"),
        (_model("command = ['x', '{port}', '{folder}']"), 4, "command: unknown placeholder {folder}"),
        (_model("command = ['x', '{port']"), 4, "a brace that is meant as such is written twice"),
        (_model("engine = 'url'"), 4, "engine: engine 'url' needs url"),
        (_model("engine = 'url'", "url = 'host:80'"), 5, "url: expected http:// or https://, a host"),
        (_model("engine = 'url'", "url = 'http://h:x'"), 5, "url: expected http:// or https://, a host"),
        (_model("engine = 'url'", "url = 'http://[::1'"), 5, "url: expected http:// or https://, a host"),
        (_model("engine = 'url'", "url = 'http://:80'"), 5, "url: expected http:// or https://, a host"),
        (_model("engine = 'url'", "url = 'http://u:hunter2@h?a=b'"), 5, "got 'http://u:***@h?a=b'"),
        (_model("engine = 'url'", "url = 'http://u:hunter2@h'"), 5, "url: expected an address without user and passw"),
        (_model("engine = 'url'", "url = 'http://hunter2@h'"), 5, "api_key_file"),
        (
            "engines = 'shared'\n" + _model("engine = 'url'", "url = 'http://h'", "activations_url = 'http://i'"),
            7,
            "activations_url: engines = 'shared' asks url for everything",
        ),
        (
            _model("engine = 'url'", "url = 'http://h'", "arguments = ['x']"),
            6,
            "arguments: this is for engines that are",
        ),
        (_model("engine = 'url'", "url = 'http://h'", "api_key_file = 'no'"), 6, "api_key_file: expected a file"),
        (_model("url = 'http://h'"), 4, "url: this is for engine = 'url'"),
        (_model("engine = 'vllm'", "device = 'cpu'"), 5, "device: vLLM chooses its device itself"),
        (_model("tensor_parallel_size = 2"), 4, "tensor_parallel_size: this is for engine = 'vllm' without a command"),
        (_model("pipeline_parallel_size = 2"), 4, "pipeline_parallel_size: this is for engine = 'vllm'"),
        (_model("distributed_executor = 'ray'"), 4, "distributed_executor: this is for engine = 'vllm'"),
        (_model("park = true"), 4, "park: this is for engine = 'vllm'"),
        (_model("engine = 'url'", "url = 'http://h'", "park = true"), 6, "park: this is for engine = 'vllm'"),
        (
            _model("engine = 'vllm'", "command = ['run', '{port}']", "tensor_parallel_size = 2"),
            6,
            "tensor_parallel_size: this is for engine = 'vllm' without a command of one's own",
        ),
        (_model("engine = 'vllm'", "tensor_parallel_size = 0"), 5, "expected a whole number of at least 1"),
        (_model("engine = 'vllm'", "pipeline_parallel_size = 1.5"), 5, "expected a whole number, got 1.5"),
        (_model("engine = 'vllm'", "distributed_executor = 'mpi'"), 5, "expected 'mp' or 'ray', got 'mpi'"),
        (
            _model("engine = 'vllm'", "distributed_executor = 'ray'", "park = true"),
            6,
            "park: an engine over Ray is never parked",
        ),
        (_model("self_check = true", "activations = false"), 4, "self_check: it looks at captured rows"),
        (_model("engine = 'vllm'", "arguments = ['--seed', '-tp', '2']"), 5, "arguments: --tensor-parallel-size has"),
        (_model("engine = 'vllm'", "park = 1"), 5, "park: expected true or false, got 1"),
        (_model("tokenizer = 'nowhere'"), 4, "tokenizer: expected a tokenizer.json or a folder with one"),
        (_model("", _model()), 6, "id: 'a' is the id of model 1 already; give each its own"),
        ("[[models]]\nid = 'a/b'\ncheckpoint = 'x/y'", 2, "id: expected 1 to 64 of A-Z a-z 0-9 . _ -"),
        ("default_model = 'b'\n" + _model(), 1, "default_model: no model has the id 'b'; there are a"),
        ("\ndatabase = 'mysql://u:hunter2@h/d'", 2, "database: expected 'sqlite:///FILE' or"),
    ],
)
def test_a_fault_is_named_with_its_line(tmp_path: Path, text: str, line: int, reason: str) -> None:
    message = _refusal(tmp_path, text)

    assert message.startswith(f"{tmp_path / 'streamtap.toml'}, line {line}: ")
    assert reason in message
    assert "hunter2" not in message


def test_one_model_over_many_devices_is_read(tmp_path: Path) -> None:
    lines = ("tensor_parallel_size = 8", "pipeline_parallel_size = 2", "distributed_executor = 'ray'")
    (model,) = _read(tmp_path, _model("engine = 'vllm'", *lines)).models

    assert (model.tensor_parallel_size, model.pipeline_parallel_size) == (8, 2)
    assert (model.distributed_executor, model.park) == ("ray", False)
    assert _read(tmp_path, _model("engine = 'vllm'", "distributed_executor = 'mp'", "park = true")).models[0].park
    # What every model has without a word is no fault of any kind of engine.
    plain = _read(tmp_path, _model("tensor_parallel_size = 1", "pipeline_parallel_size = 1", "park = false")).models[0]
    assert (plain.tensor_parallel_size, plain.distributed_executor, plain.park) == (1, None, False)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="no.toml cannot be read: No such file or directory; check the path"):
        read_config(tmp_path / "no.toml")
    (tmp_path / "latin.toml").write_bytes(b"host = '\xe9'")
    with pytest.raises(SettingsError, match="latin.toml is not UTF-8 text"):
        read_config(tmp_path / "latin.toml")


def test_the_example_in_the_description_is_right(tmp_path: Path) -> None:
    from streamtap.server.toml import config_file

    (tmp_path / "engine.key").write_text("secret")
    example = (config_file.__doc__ or "").split("::\n")[1].split("\nEach field")[0]

    config = _read(tmp_path, "\n".join(line.removeprefix("    ") for line in example.splitlines()))

    assert [model.engine for model in config.models] == ["transformers", "vllm", "url"]
    assert config.harvest_root == "s3://bucket/harvests"


@pytest.mark.parametrize(
    ("path", "line"),
    [
        (("port",), 3),
        (("limits",), 9),
        (("limits", "rate_per_minute"), 10),
        (("models", 0), 15),
        (("models", 0, "arguments"), 18),
        (("models", 1, "id"), 24),
        (("models", 1, "idle_seconds"), 27),
        (("models", 1, "nothing"), 23),
        (("nothing",), 1),
    ],
)
def test_lines_of_keys_are_found(path: tuple[str | int, ...], line: int) -> None:
    assert find_line(WHOLE, path) == line


def test_lines_after_strings_of_many_lines_and_quoted_keys_are_found() -> None:
    first = 'a = """\nb = 1\n"""\n"b c" = { d = [1,\n2] }\nb.e = \'\'\'x\'\'\'\n'
    text = first + '[t.u]\nb = "#["\nc = 1\n[[t.v]]\n[t.v.w]\nx = 1'

    assert find_line(text, ("b c",)) == 4
    assert find_line(text, ("b", "e")) == 6
    assert find_line(text, ("t", "u", "c")) == 9
    assert find_line(text, ("t", "v", 0, "w", "x")) == 12
