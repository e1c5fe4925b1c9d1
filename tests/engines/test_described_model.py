"""A model without its weights: the facts of the loaded one, from a folder or the Hub; each fault is one sentence."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import transformers

from streamtap.engines import described as module
from streamtap.engines.config_file import NAMES, dtype_in, number_in, text_config
from streamtap.engines.described import DescribedModel, described_model
from streamtap.engines.references import ModelReference, find_model
from streamtap.engines.tokenizer_files import first_line, load_tokenizer, quiet_transformers, source_of
from streamtap.engines.transformers import TransformersEngine
from streamtap.errors import InvalidInput
from streamtap.settings import Settings
from streamtap.spec import CaptureSpec, Prompt
from streamtap.testing import HubServer, online_client
from streamtap.testing.models import tiny_model
from streamtap.testing.tokenizers import tiny_tokenizer


def save(folder: Path, family: str = "llama") -> Path:
    tiny_model(family).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama in a folder of its own."""
    return save(tmp_path_factory.mktemp("model"))


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may spoil."""
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def reconfigured(folder: Path, **fields: Any) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))
    return folder


def assert_same_model(found: DescribedModel, engine: TransformersEngine) -> None:
    about, mine, theirs = engine.provenance, found.tokenizer, engine.tokenizer
    assert (found.n_layers, found.hidden, found.dtype) == (about.n_layers, about.hidden, about.dtype)
    assert (found.reference.commit, found.tokenizer_print) == (about.commit, about.tokenizer)
    assert (mine.context_length, mine.vocabulary) == (theirs.context_length, theirs.vocabulary)
    assert mine.special_ids.tolist() == theirs.special_ids.tolist()


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3", "opt", "qwen3", "gpt_neox"])
def test_it_says_what_the_loaded_model_says(tmp_path: Path, family: str) -> None:
    folder = str(save(tmp_path, family))

    assert_same_model(described_model(folder), TransformersEngine.load(folder))


def test_texts_and_chats_become_the_loaded_models_tokens(saved: Path) -> None:
    prompts = [Prompt(text="a cat sat."), Prompt(messages=(("user", "why?"),)), Prompt(token_ids=[5, 6])]
    found, engine = described_model(str(saved)), TransformersEngine.load(str(saved))

    mine, theirs = (each.encode(prompts, CaptureSpec()) for each in (found.tokenizer, engine.tokenizer))

    assert [each.token_ids.tolist() for each in mine] == [each.token_ids.tolist() for each in theirs]


def test_it_needs_neither_weights_nor_torch(copied: Path) -> None:
    expected = described_model(str(copied)).tokenizer_print
    (copied / "model.safetensors").unlink()
    code = (
        "import sys\n"
        "sys.modules['torch'] = None  # as if it were not installed\n"
        "from streamtap.engines.described import described_model\n"
        "found = described_model(sys.argv[1])\n"
        "print(found.tokenizer_print, found.n_layers, *found.tokenizer.read('a cat', 0))\n"
    )

    done = subprocess.run([sys.executable, "-c", code, str(copied)], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    ids = " ".join(map(str, tiny_tokenizer()("a cat")["input_ids"]))
    assert done.stdout == f"{expected} 3 {ids}\n"


def test_a_reference_that_was_found_is_not_found_again(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hashing the weights of a large model takes minutes."""
    known = ModelReference("its-name", saved, None, "sha256:known")
    monkeypatch.setattr(module, "find_model", lambda *_args, **_named: pytest.fail("it was looked for"))

    assert described_model("its-name", reference=known).reference is known


def test_the_demo_model_is_unpacked_first(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def found(name: str, _revision: str | None, *, settings: Settings) -> ModelReference:
        done.append(f"found {name}")
        return ModelReference(name, saved, None, "sha256:demo")

    monkeypatch.setattr(module, "unpack_demo", lambda _settings: done.append("unpacked"))
    monkeypatch.setattr(module, "find_model", found)

    assert described_model("demo").n_layers == 3
    assert done == ["unpacked", "found demo"]


def test_a_model_without_tokenizer_takes_token_ids(copied: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (copied / name).unlink(missing_ok=True)

    found = described_model(str(copied))

    assert found.tokenizer.tokenizer is None
    assert found.tokenizer.special_ids.tolist() == [0, 1, 2]
    assert found.tokenizer.read([5, 96], 0).tolist() == [5, 96]


def test_several_end_tokens_are_all_special(copied: Path) -> None:
    found = described_model(str(reconfigured(copied, eos_token_id=[1, 40], pad_token_id=None)))

    assert {1, 40} <= set(found.tokenizer.special_ids.tolist())


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "config cut short": (lambda folder: (folder / "config.json").write_text("{"), "config.json cannot be read as JSON"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
    "no object": (lambda folder: (folder / "config.json").write_text("[]"), "config.json holds no JSON object"),
    "bytes": (lambda folder: (folder / "config.json").write_bytes(b"\xff\xfe"), "config.json cannot be read as JSON"),
    "no depth": (lambda folder: reconfigured(folder, num_hidden_layers=None), "tells no depth and width"),
    "no width": (lambda folder: reconfigured(folder, hidden_size=0), "tells no depth and width"),
    "tokenizer config": (
        lambda folder: (folder / "tokenizer_config.json").write_text('{"a":'),
        "the tokenizer of .* could not be read",
    ),
    "tokenizer config of another kind": (
        lambda folder: (folder / "tokenizer_config.json").write_text("[]"),
        "the tokenizer of .* could not be read",
    ),
    "tokenizer of another kind": (
        lambda folder: (folder / "tokenizer.json").write_text("[]"),
        "the tokenizer of .* could not be read",
    ),
    "tokenizer cut short": (
        lambda folder: (folder / "tokenizer.json").write_text('{"version": "1.0",'),
        "the tokenizer of .* could not be read",
    ),
}


@pytest.mark.parametrize(("spoil", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_a_folder_that_is_not_whole_is_refused_in_one_sentence(
    copied: Path, spoil: Callable[[Path], object], reason: str
) -> None:
    spoil(copied)

    with pytest.raises(InvalidInput, match=reason) as caught:
        described_model(str(copied))
    assert "\n" not in str(caught.value)
    assert str(copied) in str(caught.value)


def test_what_has_no_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF")

    with pytest.raises(InvalidInput, match="a.gguf' is a GGUF file, which only backend='local' reads"):
        described_model(str(tmp_path / "a.gguf"))
    with pytest.raises(InvalidInput, match="'./not-here' is neither a folder, a GGUF file nor a Hub id"):
        described_model("./not-here")
    with pytest.raises(InvalidInput, match="revision='v1' means nothing"):
        described_model("demo", "v1")  # before half a minute is spent on unpacking it


# The Hub


@pytest.fixture
def hub(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A local Hub that has the model, and a client whose cache is empty."""
    cache = tmp_path / "hub-cache"
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("transformers.utils.hub._hf_api", None)  # it keeps the address that it was made with
    with HubServer(tmp_path / "hub") as server, online_client(server):
        server.add("org/tiny", saved, repo_type="model")
        yield server


def fetched(hub: HubServer) -> set[str]:
    return {request.path.rpartition("/")[2] for request in hub.requests}


def test_of_a_hub_model_only_small_files_are_fetched(hub: HubServer, saved: Path) -> None:
    found = described_model("org/tiny")

    assert (found.n_layers, found.hidden, found.reference.commit) == (3, 32, hub.commits("org/tiny", "model")[0].id)
    assert "config.json" in fetched(hub)
    assert not [name for name in fetched(hub) if name.endswith((".safetensors", ".bin"))]
    assert hub.bytes_out() < 100_000 < (saved / "model.safetensors").stat().st_size


def test_the_second_time_no_file_is_fetched(hub: HubServer) -> None:
    first = described_model("org/tiny")
    hub.reset_counts()

    assert described_model("org/tiny").tokenizer_print == first.tokenizer_print
    assert [request.path for request in hub.requests if request.method == "GET" and "/resolve/" in request.path] == []


@pytest.mark.parametrize("revision", [None, "main"])
def test_a_reference_to_what_is_not_here_is_fetched_too(hub: HubServer, revision: str | None) -> None:
    """Whoever found what a name means may have found that it is not on this machine yet."""
    reference = find_model("org/tiny", revision, settings=Settings.from_environment())
    assert reference.folder is None

    found = described_model("org/tiny", revision, reference=reference)

    assert found.reference.folder is not None
    assert found.reference.commit == hub.commits("org/tiny", "model")[0].id


def test_it_has_the_identity_of_the_model_that_is_loaded_later(hub: HubServer) -> None:
    found = described_model("org/tiny")
    before = found.tokenizer_print

    engine = TransformersEngine.load("org/tiny")

    assert_same_model(found, engine)
    assert before == engine.provenance.tokenizer


def test_a_model_that_the_hub_lacks_is_named(hub: HubServer, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="the Hub has no model 'org/other' with revision 'main'"):
        described_model("org/other")
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "README.md").write_text("nothing here")
    hub.add("org/bare", bare, repo_type="model")
    with pytest.raises(InvalidInput, match="'org/bare' has no config.json on the Hub"):
        described_model("org/bare")


# config.json


def config_in(folder: Path, config: object) -> Any:
    (folder / "config.json").write_text(json.dumps(config))
    return text_config(folder)


def test_the_part_about_text_lies_on_top(tmp_path: Path) -> None:
    inner = {"num_hidden_layers": 3, "vocab_size": None}
    for name in ("text_config", "llm_config", "language_config"):
        config = config_in(tmp_path, {"num_hidden_layers": 9, "vocab_size": 97, "dtype": "bfloat16", name: inner})

        assert (config["num_hidden_layers"], config["vocab_size"], dtype_in(config)) == (3, 97, "bfloat16")
    assert config_in(tmp_path, {"n_layer": 2, "text_config": "none of it"})["n_layer"] == 2


@pytest.mark.parametrize(("fact", "name"), [(fact, name) for fact, names in NAMES.items() for name in names])
def test_every_name_of_a_fact_is_known(fact: str, name: str) -> None:
    assert number_in({name: 7}, fact) == 7


@pytest.mark.parametrize("value", [None, 0, -1, True, "12", 12.0, [12]])
def test_what_is_no_number_of_things_is_passed_over(value: object) -> None:
    assert number_in({"num_hidden_layers": value}, "n_layers") is None
    assert number_in({"num_hidden_layers": value, "n_layer": 4}, "n_layers") == 4


def test_the_newer_name_of_the_dtype_goes_first() -> None:
    assert dtype_in({"dtype": "bfloat16", "torch_dtype": "float32"}) == "bfloat16"
    assert dtype_in({"dtype": None, "torch_dtype": "float16"}) == "float16"
    assert dtype_in({"torch_dtype": 5}) is None
    assert dtype_in({}) is None


# The tokenizer


def test_where_a_tokenizer_is_read_from(tmp_path: Path) -> None:
    assert source_of(ModelReference("a", tmp_path, "m.gguf", "sha256:x")) == (str(tmp_path), {"gguf_file": "m.gguf"})
    assert source_of(ModelReference("a", tmp_path, None, "sha256:x")) == (str(tmp_path), {})
    assert source_of(ModelReference("org/a", tmp_path, None, "c" * 40)) == ("org/a", {"revision": "c" * 40})
    assert source_of(ModelReference("org/a", None, None, None, "v2")) == ("org/a", {"revision": "v2"})
    assert source_of(ModelReference("org/a", None)) == ("org/a", {"revision": "main"})


def test_a_tokenizer_that_cannot_be_reached_is_named() -> None:
    with pytest.raises(InvalidInput, match="the tokenizer of 'org/far' could not be read") as caught:
        load_tokenizer(ModelReference("org/far", None))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("bars", [True, False])
def test_progress_bars_come_back_as_they_were(bars: bool) -> None:
    log: Any = transformers.utils.logging
    was = log.is_progress_bar_enabled()
    (log.enable_progress_bar if bars else log.disable_progress_bar)()
    try:
        with quiet_transformers():
            assert not log.is_progress_bar_enabled()
        assert log.is_progress_bar_enabled() == bars
        with pytest.raises(KeyError), quiet_transformers():
            raise KeyError
        assert log.is_progress_bar_enabled() == bars
    finally:
        (log.enable_progress_bar if was else log.disable_progress_bar)()


def test_of_a_long_message_the_first_line_is_shown() -> None:
    assert first_line(ValueError("\n  what went wrong  \nand on\n")) == "what went wrong  "
    assert first_line(ValueError()) == "ValueError"
