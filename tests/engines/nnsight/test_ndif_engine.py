"""NDIF, as its stand-in shows it: what crosses the wire, what is opened here, retries, and every refusal."""

from __future__ import annotations

import builtins
import io
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nnsight.modeling import huggingface
from nnsight.schema.config import CONFIG

from streamtap.activations import Activations, join
from streamtap.engines.described import DescribedModel, described_model
from streamtap.engines.nnsight import remote_model
from streamtap.engines.nnsight.engine import NnsightEngine
from streamtap.engines.nnsight.ndif_jobs import model_key
from streamtap.engines.nnsight.wrapping import tree_without_weights
from streamtap.engines.references import ModelReference
from streamtap.errors import (
    Unsupported,
)
from streamtap.spec import CaptureSpec
from streamtap.testing.models import tiny_model
from streamtap.testing.ndif_server import NdifServer, Served
from streamtap.testing.reference import plain_logits, plain_rows, worst_row_error
from streamtap.testing.tokenizers import tiny_tokenizer

# What nnsight deprecates is not used.
pytestmark = pytest.mark.filterwarnings("error::FutureWarning")

NAME, KEY = "org/tiny", "11111111-2222-3333-4444-555555555555"
RAGGED = [np.random.default_rng(n).integers(3, 90, n).tolist() for n in (3, 40, 1, 17, 8)]
LAYERS, HIDDEN = 3, 32
#: What a result is beside its values: the zip and the names that nnsight writes tensors in, and a frame.
FRAMING = 4096

Open = Callable[..., NnsightEngine]


def capture(engine: NnsightEngine, prompts: list[Any], **spec: Any) -> Activations:
    return join(list(engine.capture(prompts, CaptureSpec(**spec))))


def test_provenance_is_ndifs(open_remote: Open) -> None:
    engine = open_remote()
    about = engine.provenance

    assert (about.engine, about.model, about.commit) == ("ndif", NAME, "sha256:of-files")
    assert (about.dtype, about.quantization, about.n_layers, about.hidden) == ("bfloat16", None, LAYERS, HIDDEN)
    assert about.device.startswith("127.0.0.1:")
    assert open_remote(dtype="float32").provenance.dtype == "float32"
    with pytest.raises(Unsupported, match="not on this machine"):
        engine.weights_hash()


COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("revision", "filed_under"),
    [(None, f"ndif:{NAME}@main"), ("main", f"ndif:{NAME}@main"), ("v1", f"ndif:{NAME}@v1"), (COMMIT, COMMIT)],
)
def test_rows_are_of_a_commit_only_where_the_server_was_asked_for_it(
    open_remote: Open,
    ndif: NdifServer,
    bare_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    revision: str | None,
    filed_under: str,
) -> None:
    def of_the_hub(*given: Any, **named: Any) -> DescribedModel:
        return replace(
            described_model(*given, **named), reference=ModelReference(NAME, bare_folder, None, COMMIT, revision)
        )

    monkeypatch.setattr(remote_model, "described_model", of_the_hub)
    sent: list[Any] = []
    take = ndif.take
    monkeypatch.setattr(ndif, "take", lambda request, *more: sent.append(request.model_key) or take(request, *more))

    engine = open_remote(revision=revision)
    acts = capture(engine, RAGGED[:1], layers=[0])

    assert acts.provenance.commit == engine.provenance.commit == filed_under
    assert sent == [model_key(NAME, revision)]


@pytest.mark.parametrize("pooling", ["last_token", "first_token", "mean", "max"])
def test_v28_one_row_a_prompt_crosses_the_wire(open_remote: Open, ndif: NdifServer, pooling: str) -> None:
    before = len(ndif.jobs)

    capture(open_remote(), RAGGED, pooling=pooling)

    (job,) = ndif.jobs[before:]
    values = len(RAGGED) * LAYERS * HIDDEN * 2
    assert values * 0.5 <= job.result_bytes <= values + FRAMING
    assert job.sent_bytes <= values + FRAMING
    assert job.sent_bytes < sum(map(len, RAGGED)) * LAYERS * HIDDEN * 2


def test_v28_bytes_grow_with_the_rows_that_are_asked_for(open_remote: Open, ndif: NdifServer) -> None:
    engine, prompts = open_remote(dtype="float32"), [list(range(3, 83))] * 1
    sizes = {}
    for positions, layers in (("last", "all"), ("-20:", "all"), ("all", "all"), ("all", [1])):
        before = len(ndif.jobs)
        capture(engine, prompts, positions=positions, layers=layers)
        sizes[positions, str(layers)] = ndif.jobs[before].sent_bytes
    row = HIDDEN * 4

    assert sizes["last", "all"] <= LAYERS * row + FRAMING
    assert 20 * LAYERS * row * 0.5 <= sizes["-20:", "all"] <= 20 * LAYERS * row + FRAMING
    assert sizes["all", "all"] > 3 * sizes["-20:", "all"] * 0.8
    assert sizes["all", "[1]"] < sizes["all", "all"] / 2


def test_v28_no_file_of_weights_is_opened(
    whole_folder: Path, ndif: NdifServer, monkeypatch: pytest.MonkeyPatch, model: Any
) -> None:
    opened: list[str] = []

    def watched(real: Any) -> Any:
        def call(file: Any, *arguments: Any, **named: Any) -> Any:
            opened.append(str(file))
            return real(file, *arguments, **named)

        return call

    for place, name in ((builtins, "open"), (io, "open"), (os, "open")):
        monkeypatch.setattr(place, name, watched(getattr(place, name)))
    known = ModelReference(NAME, whole_folder, None, "sha256:of-files")

    engine = NnsightEngine.load(NAME, remote=ndif.url, api_key=KEY, reference=known)
    acts = capture(engine, RAGGED[:1])

    assert any(file.endswith("config.json") for file in opened)
    assert not [file for file in opened if file.endswith((".safetensors", ".bin"))]
    assert worst_row_error(acts.acts[2], plain_rows(model, RAGGED[0])[2]) <= 4e-3
    weights = list(engine._open_tree().model._module.parameters())
    assert {weight.device.type for weight in weights} == {"meta"}


def test_batch_size_is_the_prompts_of_a_job(open_remote: Open, ndif: NdifServer) -> None:
    before = len(ndif.jobs)
    capture(open_remote(batch_size=2), RAGGED, pooling="last_token")
    assert len(ndif.jobs) - before == 3

    before = len(ndif.jobs)
    capture(open_remote(max_batch_tokens=40), RAGGED, pooling="last_token")
    assert len(ndif.jobs) - before == 3  # 40 tokens; 17 and 8; 3 and 1


def test_a_result_too_large_for_the_socket_is_fetched(
    model: Any, open_remote: Open, ndif: NdifServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ndif, "_inline_bytes", 1000)
    before = len(ndif.jobs)

    acts = capture(open_remote(dtype="float32"), RAGGED)

    assert ndif.jobs[before].sent_bytes == ndif.jobs[before].result_bytes > 1000
    assert worst_row_error(acts.prompt(1)[1], plain_rows(model, RAGGED[1])[1]) <= 5e-5


def test_a_model_in_bfloat16_gives_its_rows_and_float32_scores(
    bare_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = tiny_model("llama", dtype=torch.bfloat16)
    known = ModelReference(NAME, bare_folder, None, "sha256:of-files")
    with NdifServer({NAME: Served.over(half, tiny_tokenizer())}) as server:
        engine = NnsightEngine.load(NAME, remote=server.url, reference=known)
        acts = capture(engine, RAGGED, token_nll=True, logits="last")
        pooled = capture(engine, RAGGED, pooling="mean")

    plain = plain_rows(half, RAGGED[1])
    for layer in range(LAYERS):
        assert worst_row_error(acts.prompt(1)[layer], plain[layer]) <= 2e-2
        assert worst_row_error(pooled.prompt(1)[layer], plain[layer].float().mean(dim=0, keepdim=True)) <= 2e-2
    logits = plain_logits(half, RAGGED[1]).float()
    assert worst_row_error((acts.logits if acts.logits is not None else np.zeros(0))[1:2], logits[-1:]) <= 2e-2
    costs = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(RAGGED[1][1:]), reduction="none")
    assert np.allclose((acts.token_nll or ())[1], costs.numpy(), atol=0.05 * float(logits.std()))


def test_a_job_names_no_folder_of_this_machine(open_remote: Open, ndif: NdifServer, bare_folder: Path) -> None:
    from streamtap.codec import decompressed

    before = len(ndif.jobs)
    capture(open_remote(), RAGGED[:1])
    sent = decompressed(ndif.jobs[before].blob, "the job")

    assert str(bare_folder).encode() not in sent
    assert KEY.encode() not in sent


def test_the_key_of_a_model_is_nnsights_own(bare_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = tree_without_weights(bare_folder, "Org/Tiny", None, None)
    monkeypatch.setitem(huggingface._ID_CACHE, "Org/Tiny", "Org/Tiny")

    assert tree.model.to_model_key() == model_key("Org/Tiny", None)
    tree.model.revision = "abc"
    assert tree.model.to_model_key() == model_key("Org/Tiny", "abc")


def test_remote_true_goes_to_the_address_that_nnsight_is_set_up_for(
    ndif: NdifServer, bare_folder: Path, monkeypatch: pytest.MonkeyPatch, model: Any
) -> None:
    monkeypatch.setattr(CONFIG.API, "HOST", ndif.url)
    monkeypatch.setattr(CONFIG.API, "APIKEY", KEY)  # what `nnsight login` keeps
    known = ModelReference(NAME, bare_folder, None, "sha256:of-files")

    acts = capture(NnsightEngine.load(NAME, remote=True, reference=known), RAGGED[:2])

    assert acts.provenance.engine == "ndif"
    assert worst_row_error(acts.prompt(1)[0], plain_rows(model, RAGGED[1])[0]) <= 4e-3


def test_an_attention_kernel_is_asked_for(open_remote: Open, model: Any) -> None:
    engine = open_remote(attention="eager", dtype="float32")
    try:
        acts = capture(engine, RAGGED)

        assert engine.provenance.attention == "eager"
        assert model.config._attn_implementation == "eager"
        assert worst_row_error(acts.prompt(1)[2], plain_rows(model, RAGGED[1])[2]) <= 5e-5
    finally:
        model.set_attn_implementation("sdpa")
