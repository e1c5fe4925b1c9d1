"""Opening a service's model: what is asked, what is read here, and what its rows are known by."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from streamtap.engines.api import ApiEngine
from streamtap.engines.api_told import told_of
from streamtap.engines.base import Engine
from streamtap.engines.opening import load_engine
from streamtap.engines.tokenizing import PromptTokenizer
from streamtap.errors import (
    ActivationsUnsupported,
    InvalidInput,
    InvalidPrompt,
    MissingAuthorization,
    ModelNotFound,
    TransferFailed,
    Unsupported,
)
from streamtap.fingerprint import fingerprint
from streamtap.spec import CaptureSpec
from streamtap.testing.characters import CharacterTokenizer
from streamtap.testing.stub_harvests import KEY, MODEL
from streamtap.testing.stub_service import BASE, StubService
from streamtap.testing.tokenizers import tiny_tokenizer

COMMIT = "0123456789abcdef0123456789abcdef01234567"
#: A service of ours that runs the checkpoint as it is.
PLAIN = {"revision": COMMIT, "engine": "transformers", "own_arguments": False}
#: What stands for the service's address.
AT = fingerprint({"address": BASE})[:16]
CONFIG = {"model_type": "llama", "num_hidden_layers": 4, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 97}


@pytest.fixture
def service(tmp_path: Path) -> StubService:
    return StubService(tmp_path / "server")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A model's small files, and weights that would not load."""
    folder = tmp_path / "checkpoint"
    tiny_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({**CONFIG, "bos_token_id": 0, "max_position_embeddings": 4096}))
    (folder / "model.safetensors").write_bytes(b"no weights")
    return folder


def load(service: StubService, model: str = MODEL, **options: Any) -> ApiEngine:
    named = {"api_base": BASE, "client": service.client(), "tokenizer": PromptTokenizer(None)}
    return ApiEngine.load(model, **{**named, **options})


def test_it_is_found_by_its_id_and_by_its_checkpoint(service: StubService) -> None:
    for name in (MODEL, "org/fake"):
        engine = load(service, name)
        about = engine.provenance
        assert isinstance(engine, Engine)
        assert engine.told.id == MODEL
        assert (about.model, about.engine, about.dtype) == ("org/fake", "api", "bfloat16")
        assert (about.n_layers, about.hidden, about.tokenizer) == (4, 8, "none")
    with pytest.raises(ModelNotFound, match="no model 'gpt'; its models are: stub"):
        load(service, "gpt")


def test_two_models_of_one_checkpoint_are_told_apart_by_id() -> None:
    models = [{"id": "a", "served_model_name": "org/m"}, {"id": "b", "served_model_name": "org/m"}]

    with pytest.raises(InvalidInput, match="name one by its id: a or b"):
        told_of(models, "org/m")
    assert told_of(models, "b").id == "b"


def test_a_service_that_tells_little_is_asked_for_little(service: StubService, checkpoint: Path) -> None:
    told = told_of([{"id": "m", "capabilities": "none"}], "m")

    assert (told.checkpoint, told.at_once, told.chooses_rows, told.harvests, told.row_dtypes) == (
        "m",
        4,
        False,
        False,
        (),
    )
    service.can = {"n_layers": None, "hidden_size": None, "max_model_len": None, "output_positions": 1}
    engine = load(service, tokenizer=str(checkpoint))
    assert (engine.provenance.n_layers, engine.provenance.hidden) == (4, 8)
    assert engine.tokenizer.context_length == 4096
    assert not engine.told.chooses_rows
    with pytest.raises(InvalidInput, match="does not tell how deep and wide stub is"):
        load(service)


def test_a_model_without_activations_is_refused(service: StubService) -> None:
    service.can = {"activations": False}

    with pytest.raises(ActivationsUnsupported, match="no engine for activations of stub"):
        load(service)


@pytest.mark.parametrize(("dtype", "rows"), [("auto", "bfloat16"), ("bfloat16", "bfloat16"), ("float32", "float32")])
def test_rows_are_bfloat16_unless_float32_is_asked_for(service: StubService, dtype: str, rows: str) -> None:
    assert load(service, dtype=dtype).provenance.dtype == rows


def test_a_dtype_that_cannot_be_sent_is_refused(service: StubService) -> None:
    with pytest.raises(InvalidInput, match="'bfloat16' .* or 'float32'; got dtype='float16'"):
        load(service, dtype="float16")
    service.can = {"output_dtypes": None}
    with pytest.raises(Unsupported, match="bfloat16 alone; leave dtype out, or take backend='local'"):
        load(service, dtype="float32")


@pytest.mark.parametrize(
    ("about", "can", "dtype", "commit"),
    [
        ({}, {}, "auto", f"api:{AT}#stub"),
        (PLAIN, {}, "auto", f"api:{AT}#stub@{COMMIT}"),
        (PLAIN, {"dtype": "bfloat16"}, "auto", COMMIT),
        (PLAIN, {"dtype": "float32"}, "float32", COMMIT),
        (PLAIN, {"dtype": None}, "auto", f"api:{AT}#stub@{COMMIT}"),
        ({**PLAIN, "engine": "vllm"}, {"dtype": "bfloat16"}, "auto", f"api:{AT}#stub@{COMMIT}"),
        ({**PLAIN, "own_arguments": True}, {"dtype": "bfloat16"}, "auto", f"api:{AT}#stub@{COMMIT}"),
        ({"revision": COMMIT}, {"dtype": "bfloat16"}, "auto", f"api:{AT}#stub@{COMMIT}"),
    ],
    ids=["told nothing", "rounded", "as it runs", "in float32", "no dtype", "vllm", "arguments", "who knows"],
)
def test_what_rows_are_known_by(
    service: StubService, about: Mapping[str, Any], can: Mapping[str, Any], dtype: str, commit: str
) -> None:
    """The Hub's commit where rows are those of the checkpoint itself, else the service's, which outlives restarts."""
    service.about, service.can = about, can

    first, again = load(service, dtype=dtype).provenance, load(service, dtype=dtype).provenance

    assert first.commit == commit
    assert first == again
    assert KEY not in repr(first)
    assert "server" not in repr(first), "it is published with datasets, and names no host"


def test_another_revision_than_the_services_is_refused(service: StubService) -> None:
    service.about = {"revision": COMMIT}

    assert load(service, revision=COMMIT).told.revision == COMMIT
    assert load(service, revision="main").told.revision == COMMIT
    with pytest.raises(InvalidInput, match=f"the service has {COMMIT}"):
        load(service, revision=COMMIT[::-1])


def test_the_tokenizer_is_read_from_the_checkpoints_files(service: StubService, checkpoint: Path) -> None:
    service.about = {"served_model_name": str(checkpoint)}
    engine = load(service, tokenizer=None)

    acts = next(engine.capture(["a cat"], CaptureSpec(layers=[0])))

    assert acts.token_ids.tolist() == tiny_tokenizer()("a cat")["input_ids"]
    assert engine.tokenizer.context_length == 2048, "the service's, which may be less than the checkpoint's"
    assert engine.tokenizer.vocabulary == 97
    assert 0 in engine.tokenizer.special_ids.tolist()
    assert engine.provenance.tokenizer == load(service, tokenizer=checkpoint).provenance.tokenizer


def test_without_its_files_prompts_are_token_ids(service: StubService, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        engine = load(service, tokenizer=None)

    assert "prompts for org/fake can only be token ids here" in caplog.text
    with pytest.raises(InvalidPrompt) as caught:
        next(engine.capture([[5, 6], "a text"], CaptureSpec(layers=[0])))
    assert caught.value.index == 1
    assert "prompt 1 is text, and the tokenizer of org/fake cannot be read here" in str(caught.value)
    assert "pass tokenizer=" in str(caught.value)
    with pytest.raises(InvalidPrompt, match="is chat messages"):
        next(engine.capture([[{"role": "user", "content": "hi"}]], CaptureSpec(layers=[0])))
    assert len(next(engine.capture([[5, 6]], CaptureSpec(layers=[0])))) == 1


def test_a_tokenizer_that_was_named_must_be_there(service: StubService, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="neither a folder"):
        load(service, tokenizer=str(tmp_path / "nowhere"))


def test_a_checkpoint_of_another_shape_is_another_model(service: StubService, checkpoint: Path) -> None:
    service.about, service.can = {"served_model_name": str(checkpoint)}, {"n_layers": 5}

    with pytest.raises(InvalidInput, match=r"another model here than on the service \(layers 4 and 5\)"):
        load(service, tokenizer=None)
    assert load(service, tokenizer=str(checkpoint)).provenance.n_layers == 5


def test_tokenizers_at_hand_are_told_apart(service: StubService) -> None:
    ours, other = (load(service, tokenizer=tiny_tokenizer(adds_bos=bos)) for bos in (True, False))

    assert ours.provenance.tokenizer != other.provenance.tokenizer
    assert ours.provenance.tokenizer == load(service, tokenizer=tiny_tokenizer()).provenance.tokenizer
    assert load(service, tokenizer=CharacterTokenizer()).provenance.tokenizer.startswith("sha256:")


@pytest.mark.parametrize("harvest_from", [0, -1, 1.5, "all"])
def test_a_threshold_that_is_none(service: StubService, harvest_from: Any) -> None:
    with pytest.raises(InvalidInput, match="harvest_from must be a whole number"):
        load(service, harvest_from=harvest_from)


def test_the_address_and_key_are_the_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ACS_API_BASE", raising=False)
    monkeypatch.delenv("ACS_API_KEY", raising=False)
    with pytest.raises(InvalidInput, match="no server was named"):
        load_engine("m", backend="api")
    with pytest.raises(MissingAuthorization):
        load_engine("m", backend="api", api_base="http://127.0.0.1:9")
    with pytest.raises(TransferFailed, match="cannot be reached") as caught:
        load_engine("m", backend="api", api_base="http://127.0.0.1:9", api_key=KEY)
    assert KEY not in str(caught.value)


def test_the_key_is_shown_nowhere(service: StubService, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG"):
        engine = load(service)
        next(engine.capture([[5, 6]], CaptureSpec(layers=[0])))

    assert repr(engine) == f"ApiEngine('stub', Client('{BASE}'))"
    assert KEY not in caplog.text


SCRIPT = """
import sys
opened = []
sys.addaudithook(lambda event, of: opened.append(str(of[0])) if event == "open" else None)
from pathlib import Path
from streamtap.engines.api import ApiEngine
from streamtap.spec import CaptureSpec
from streamtap.testing.stub_service import BASE, StubService
folder, checkpoint = Path(sys.argv[1]), sys.argv[2]
service = StubService(folder, about={"served_model_name": checkpoint})
engine = ApiEngine.load(checkpoint, api_base=BASE, client=service.client(), harvest_from=3)
few = list(engine.capture(["a cat"], CaptureSpec(layers=[0], perplexity=True)))
many = list(engine.capture(["a", "b", "c"], CaptureSpec(layers=[0])))
assert engine.last_way.startswith("harvest"), engine.last_way
engine.complete("a cat", max_tokens=2, capture=[1])
engine.close()
print(*(name for name in ("torch", "nnsight", "vllm") if name in sys.modules))
print(*(path for path in opened if path.startswith(checkpoint) and path.endswith((".safetensors", ".bin", ".gguf"))))
print(sum(path.startswith(checkpoint) for path in opened))
"""


def test_no_torch_is_loaded_and_no_weight_touched(tmp_path: Path, checkpoint: Path) -> None:
    """V28: a remote run loads config and tokenizer alone."""
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "server"), str(checkpoint)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    loaded, weights, read = done.stdout.splitlines()
    assert (loaded, weights) == ("", "")
    assert int(read) > 1, "config and tokenizer"
