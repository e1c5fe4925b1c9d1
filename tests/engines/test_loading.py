"""Loading: folders, GGUF files, Hub ids and quantised or off-loaded models; each fault is one sentence."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from streamtap.activations import Activations, in_asked_order
from streamtap.engines import loading
from streamtap.engines.loading import load_model, provenance_of
from streamtap.engines.references import ModelReference
from streamtap.engines.transformers import TransformersEngine
from streamtap.errors import InvalidInput, MissingExtra, StreamtapError, Unsupported, UnsupportedModel
from streamtap.spec import CaptureSpec
from streamtap.testing.models import tiny_model
from streamtap.testing.reference import plain_rows, worst_row_error
from streamtap.testing.tokenizers import tiny_tokenizer

PROMPTS = [[5, 6, 7], [(7 * i) % 80 + 4 for i in range(60)]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama in a folder of its own."""
    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may spoil."""
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def capture(engine: TransformersEngine, prompts: Any = PROMPTS, **spec: Any) -> Activations:
    return in_asked_order(list(engine.capture(prompts, CaptureSpec(**spec))))


def assert_bit_equal(a: Activations, b: Activations) -> None:
    assert a.layers == b.layers
    assert all(np.array_equal(a.acts[k], b.acts[k]) for k in a.layers)


def test_a_folder_gives_the_saved_models_rows(saved: Path) -> None:
    engine = TransformersEngine.load(str(saved))

    assert_bit_equal(capture(engine), capture(TransformersEngine(tiny_model("llama"))))
    made_by = engine.provenance
    assert made_by.model == str(saved)
    assert made_by.commit.startswith("sha256:")
    assert made_by.tokenizer.startswith("sha256:")
    assert (made_by.dtype, made_by.quantization, made_by.engine) == ("float32", None, "transformers")
    assert made_by.engine_version == transformers.__version__
    assert (made_by.n_layers, made_by.hidden) == (3, 32)
    assert engine.tokenizer.context_length == 256


@pytest.mark.parametrize(("asked", "dtype"), [("auto", "float16"), ("bfloat16", "bfloat16"), ("float64", "float64")])
def test_auto_keeps_the_checkpoints_dtype(tmp_path: Path, asked: str, dtype: str) -> None:
    tiny_model("llama", dtype=torch.float16).save_pretrained(tmp_path)

    engine = TransformersEngine.load(str(tmp_path), dtype=asked)

    assert engine.provenance.dtype == dtype
    assert capture(engine).acts[0].dtype.name == dtype


def test_the_attention_kernel_can_be_chosen_and_is_recorded(saved: Path) -> None:
    assert TransformersEngine.load(str(saved), attention="eager").provenance.attention == "eager"


def test_a_multimodal_folder_gives_its_text_blocks(tmp_path: Path) -> None:
    model = tiny_model("gemma3_multimodal")
    model.save_pretrained(tmp_path)

    engine = TransformersEngine.load(str(tmp_path))

    assert engine.forward.blocks.path == "model.language_model.layers"
    assert_bit_equal(capture(engine), capture(TransformersEngine(model)))


@pytest.mark.parametrize(
    ("option", "kind", "reason"),
    [
        ({"dtype": "float8"}, InvalidInput, "dtype must be one of auto, float32.*got 'float8'"),
        ({"device": "cuda:99"}, InvalidInput, "device 'cuda:99' is not on this machine"),
        ({"device": "gpu"}, InvalidInput, "device 'gpu' is not on this machine"),
        ({"device": ""}, InvalidInput, "device '' is not on this machine"),
        ({"device": "meta"}, InvalidInput, "device 'meta' is not on this machine.*holds no values"),
        ({"device_map": "everywhere"}, InvalidInput, "device_map"),
        ({"device_map": {"": "cuda:99"}}, InvalidInput, "could not be loaded"),
        ({"quantization": "2bit"}, InvalidInput, "'8bit', '4bit' or a transformers config; got '2bit'"),
        ({"attention": "telepathy"}, InvalidInput, "telepathy"),
        ({"revision": "main"}, InvalidInput, "only Hub ids have revisions"),
    ],
    ids=str,
)
def test_an_option_that_cannot_be_is_one_sentence(
    saved: Path, option: dict[str, Any], kind: type[Exception], reason: str
) -> None:
    with pytest.raises(kind, match=reason) as caught:
        TransformersEngine.load(str(saved), **option)
    assert "\n" not in str(caught.value)


def test_a_device_that_is_not_there_is_refused_before_the_weights_are_read(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "_from_pretrained", lambda *_: pytest.fail("weights were read"))

    with pytest.raises(InvalidInput, match="device"):
        TransformersEngine.load(str(saved), device="cuda:99")


def rewrite(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    """A change to the weights of a folder."""

    def apply(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    return apply


def halve(name: str) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: len(content) // 2])

    return apply


def reconfigure(**fields: Any) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | fields))

    return apply


UP = "model.layers.1.mlp.up_proj.weight"
BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "a weight missing": (rewrite(lambda w: w.pop(UP)), rf"lack 1 of its weights, first {UP}"),
    "a weight of another shape": (rewrite(lambda w: w.update({UP: torch.zeros(3, 3)})), "weights have other shapes"),
    "more layers in the config": (reconfigure(num_hidden_layers=4), r"lack 9 of its weights, first model.layers.3\."),
    "weights cut short": (halve("model.safetensors"), "weights are damaged"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "no file named model.safetensors"),
    "config cut short": (halve("config.json"), "not a valid JSON file"),
    "tokenizer config cut short": (halve("tokenizer_config.json"), "tokenizer of .* could not be read"),
    "unknown model type": (reconfigure(model_type="strange"), "`strange`"),
    "code of its own": (
        reconfigure(model_type="strange", auto_map={"AutoConfig": "its.Config", "AutoModelForCausalLM": "its.Model"}),
        "custom code",
    ),
}


@pytest.mark.parametrize(("spoil", "reason"), BROKEN.values(), ids=BROKEN.keys())
def test_a_folder_that_is_not_whole_is_refused_in_one_sentence(
    copied: Path, spoil: Callable[[Path], object], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(copied)
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question was asked"))

    with pytest.raises(InvalidInput, match=reason) as caught:
        TransformersEngine.load(str(copied))
    assert "\n" not in str(caught.value)
    assert str(copied) in str(caught.value)


def test_weights_beyond_the_models_are_of_no_matter(copied: Path, saved: Path) -> None:
    rewrite(lambda w: w.update({"visual.extra": torch.zeros(3)}))(copied)

    assert_bit_equal(capture(TransformersEngine.load(str(copied))), capture(TransformersEngine.load(str(saved))))


def test_a_checkpoint_without_head_gives_rows_and_refuses_perplexity(tmp_path: Path, saved: Path) -> None:
    tiny_model("llama").base_model.save_pretrained(tmp_path)

    engine = TransformersEngine.load(str(tmp_path))

    assert_bit_equal(capture(engine), capture(TransformersEngine.load(str(saved))))
    with pytest.raises(Unsupported, match="no language-model head"):
        engine.capture(PROMPTS, CaptureSpec(perplexity=True))


def test_a_folder_without_tokenizer_takes_token_ids(copied: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (copied / name).unlink(missing_ok=True)

    engine = TransformersEngine.load(str(copied))

    assert engine.tokenizer.tokenizer is None
    assert len(capture(engine)) == 2
    with pytest.raises(InvalidInput, match="prompt 0 is text, but this engine has no tokenizer"):
        capture(engine, ["hi"])


def test_an_encoder_decoder_is_refused(tmp_path: Path) -> None:
    tiny_model("t5").save_pretrained(tmp_path)

    with pytest.raises(UnsupportedModel, match="not a decoder-only language model.*T5Config"):
        TransformersEngine.load(str(tmp_path))


# Off-loaded


@pytest.mark.parametrize("away", ["cpu", "disk"])
def test_an_offloaded_model_gives_the_same_bits_and_stays_as_it_is(copied: Path, saved: Path, away: str) -> None:
    places = dict.fromkeys(("model.embed_tokens", "model.rotary_emb", "model.norm", "model.layers.0"), "cpu")
    places |= {"model.layers.1": away, "model.layers.2": away, "lm_head": away}
    engine = TransformersEngine.load(str(copied), device_map=places)
    plain = TransformersEngine.load(str(saved))
    asks: list[dict[str, Any]] = [{}, {"layers": [1]}, {"perplexity": True, "logits": "last"}, {"pooling": "mean"}]

    for ask in [*asks, {}]:
        found, expected = capture(engine, **ask), capture(plain, **ask)
        assert_bit_equal(found, expected)
        for name in ("perplexity", "logits"):
            assert np.array_equal(getattr(found, name), getattr(expected, name))
    with torch.no_grad():
        ids = torch.tensor([PROMPTS[1]])
        assert torch.equal(engine.model(ids).logits, plain.model(ids).logits)
    engine.close()


# Closed


def test_a_closed_engine_holds_no_weights_and_says_so(copied: Path) -> None:
    engine = TransformersEngine.load(str(copied))
    weights = list(engine.model.parameters())

    engine.close()
    engine.close()

    assert sum(weight.numel() for weight in weights) == 0
    with pytest.raises(InvalidInput, match="this engine is closed"):
        engine.capture(PROMPTS, CaptureSpec())


# Quantised


def test_a_quantised_checkpoint_is_captured_as_it_runs(copied: Path, saved: Path) -> None:
    bits = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "online"}
    reconfigure(quantization_config=bits | {"modules_to_not_convert": ["lm_head"]})(copied)
    torch.compiler.set_stance("force_eager")  # its kernels would be compiled for minutes
    try:
        engine = TransformersEngine.load(str(copied), device="cpu")
        acts = capture(engine)
        plain = [plain_rows(engine.model, prompt) for prompt in PROMPTS]
    finally:
        torch.compiler.set_stance("default")

    assert (engine.provenance.quantization or "").startswith("bitnet:")
    for i, rows in enumerate(plain):
        assert all(worst_row_error(acts.prompt(i)[k], rows[k]) <= 1e-3 for k in rows)
    whole = capture(TransformersEngine.load(str(saved)))
    assert worst_row_error(acts.acts[0], torch.from_numpy(whole.acts[0])) > 0.1


@pytest.mark.parametrize(("asked", "four"), [("8bit", False), ("4bit", True)])
def test_quantization_is_turned_into_the_librarys_config(
    saved: Path, monkeypatch: pytest.MonkeyPatch, asked: str, four: bool
) -> None:
    passed: dict[str, Any] = {}
    model = tiny_model("llama")

    def from_pretrained(_source: str, options: dict[str, Any]) -> Any:
        passed.update(options)
        return model, {"missing_keys": set()}

    monkeypatch.setattr(loading, "_from_pretrained", from_pretrained)
    TransformersEngine.load(str(saved), quantization=asked)
    assert (passed["quantization_config"].load_in_4bit, passed["quantization_config"].load_in_8bit) == (four, not four)

    own = transformers.BitsAndBytesConfig(load_in_8bit=True)
    TransformersEngine.load(str(saved), quantization=own)
    assert passed["quantization_config"] is own


def test_without_its_library_a_quantisation_is_a_missing_extra(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)

    with pytest.raises(MissingExtra, match="bitsandbytes"):
        TransformersEngine.load(str(saved), quantization="8bit")


def test_two_quantisations_have_two_names() -> None:
    model: Any = tiny_model("llama")
    names = set()
    for config in (
        {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8"}}},
        {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int4"}}},
        {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int4"}}, "skip": ["lm_head"]},
        transformers.BitsAndBytesConfig(load_in_8bit=True),
    ):
        model.config.quantization_config = config
        names.add(provenance_of(model, None).quantization)

    assert len(names) == 4
    assert sorted(str(name).split(":")[0] for name in names) == ["bitsandbytes", "torchao", "torchao", "torchao"]


# The Hub


@pytest.fixture
def hub_model(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The folder as the Hub's client would have stored it, with no network."""
    hub = tmp_path / "hub"
    repo = hub / "models--org--tiny"
    shutil.copytree(saved, repo / "snapshots" / ("a" * 40))
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("a" * 40)
    monkeypatch.setenv("HF_HUB_CACHE", str(hub))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(hub))
    return "org/tiny"


@pytest.mark.parametrize("revision", [None, "main", "a" * 40])
def test_a_hub_id_is_loaded_from_the_hubs_cache(hub_model: str, saved: Path, revision: str | None) -> None:
    engine = TransformersEngine.load(hub_model, revision=revision)

    assert (engine.provenance.model, engine.provenance.commit) == (hub_model, "a" * 40)
    assert_bit_equal(capture(engine), capture(TransformersEngine.load(str(saved))))


def test_a_model_has_the_same_identity_in_the_run_that_downloads_it(hub_model: str) -> None:
    known = load_model(hub_model).provenance

    downloaded = load_model(hub_model, reference=ModelReference(hub_model, None)).provenance

    assert downloaded == known


def test_a_hub_id_that_cannot_be_reached_is_one_sentence(hub_model: str) -> None:
    for name in ("org/other", hub_model):
        with pytest.raises(StreamtapError, match=name) as caught:
            TransformersEngine.load(name, revision="v9")
        assert "\n" not in str(caught.value)
