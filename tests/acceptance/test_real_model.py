"""The main job on the real small model, end to end, as a user starts it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from streamtap import CaptureSpec, TransformersEngine, UnifiedCache, load_statements, sweep_layers

pytestmark = pytest.mark.xdist_group("demo-model")

PROMPTS = ["The capital of France is", "Water boils at one hundred degrees.", "Two and two make"]


@pytest.fixture(scope="module")
def engine() -> TransformersEngine:
    return TransformersEngine.load("demo", device="cpu")


def test_demo_writes_what_it_promises(tmp_path: Path) -> None:
    done = _streamtap("demo", "--out", str(tmp_path))

    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "layer-sweep.png").read_bytes().startswith(b"\x89PNG")
    assert "</html>" in (tmp_path / "report.html").read_text(encoding="utf-8")
    for layer in range(30):
        assert re.search(rf"^\W*{layer}\b.*0\.\d+", done.stdout, re.MULTILINE), done.stdout
    assert "shuffled" in done.stdout
    assert "bag of words" in done.stdout.lower().replace("-", " ")


def test_best_layer_lies_above_the_control_and_above_chance() -> None:
    statements = load_statements()
    with UnifiedCache(model="demo", compute_perplexity=False) as cache:
        rows = {layer: cache.activations(statements.texts, layer=layer) for layer in cache.layer_indices}
    sweep = sweep_layers(rows, statements.labels, statements.groups, statements.texts)

    low, _ = sweep.best.test.interval
    assert low > 0.5
    assert low > sweep.control.interval[1]
    assert sweep.bag_of_words is not None
    assert low > sweep.bag_of_words.interval[1]


def test_a_second_process_loads_no_model() -> None:
    code = (
        "import sys; from streamtap import UnifiedCache, load_statements\n"
        "texts = load_statements().texts\n"
        "cache = UnifiedCache(model='demo', compute_perplexity=False)\n"
        "assert cache.warmup(texts).activations_extracted == 0\n"
        "assert cache.activations(texts, layer=16).shape == (len(texts), 576)\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    with UnifiedCache(model="demo", compute_perplexity=False) as cache:
        cache.warmup(load_statements().texts)

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr[-2000:]


def test_rows_equal_the_plain_model(engine: TransformersEngine) -> None:
    (acts,) = engine.capture(PROMPTS, CaptureSpec(layers="all"))
    for i, prompt in enumerate(PROMPTS):
        ids = engine.tokenizer.tokenizer(prompt, return_tensors="pt")["input_ids"]
        for layer, plain in _plain(engine.model, ids).items():
            mine = acts.prompt(i)[layer]
            worst = np.linalg.norm(mine - plain, axis=1) / np.linalg.norm(plain, axis=1)
            assert worst.max() <= 5e-5, (prompt, layer)


def test_last_row_through_norm_and_head_gives_the_next_token(engine: TransformersEngine) -> None:
    (acts,) = engine.capture(PROMPTS, CaptureSpec(layers="last", pooling="last_token"))
    model = engine.model
    rows = acts.torch()[engine.n_layers - 1]
    with torch.no_grad():
        logits = model.lm_head(model.model.norm(rows))
        for prompt, mine in zip(PROMPTS, logits, strict=True):
            ids = engine.tokenizer.tokenizer(prompt, return_tensors="pt")["input_ids"]
            assert int(mine.argmax()) == int(model(ids).logits[0, -1].argmax())


def _plain(model: torch.nn.Module, ids: torch.Tensor) -> dict[int, np.ndarray]:
    found: dict[int, np.ndarray] = {}

    def keep(layer: int) -> object:
        return lambda _module, _inputs, output: found.__setitem__(
            layer, (output if isinstance(output, torch.Tensor) else output[0])[0].numpy()
        )

    handles = [block.register_forward_hook(keep(k)) for k, block in enumerate(model.model.layers)]
    with torch.no_grad():
        model(ids)
    for handle in handles:
        handle.remove()
    return found


def _streamtap(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "streamtap", *arguments], capture_output=True, text=True, check=False)
