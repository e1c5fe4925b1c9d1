from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import torch

from streamtap.engines import transformers as engine_module
from streamtap.engines.transformers import TransformersEngine
from streamtap.errors import InvalidInput
from streamtap.testing.fake_engine import FakeEngine
from streamtap.testing.models import tiny_model
from streamtap.testing.tokenizers import CHAT_TEMPLATE, tiny_tokenizer
from streamtap.workbench.identity import identity_of
from streamtap.workbench.model_source import GivenEngine
from streamtap.workbench.unified_cache import UnifiedCache

PROMPTS = ["The sky", "is", [5, 6, 7], [{"role": "user", "content": "Why?"}]]
OpenCache = Callable[..., UnifiedCache]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model("llama").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "model"))


@pytest.fixture
def open_cache(tmp_path: Path) -> OpenCache:
    def opened(model: Any, **options: Any) -> UnifiedCache:
        return UnifiedCache(model, **{"cache_dir": tmp_path / "cache", "progress": False, **options})

    return opened


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the models that were loaded."""
    found: list[str] = []
    load = TransformersEngine.load

    @wraps(load)
    def counted(model: str, **options: Any) -> TransformersEngine:
        found.append(model)
        return load(model, **options)

    monkeypatch.setattr(engine_module.TransformersEngine, "load", counted)
    return found


def python(code: str, *arguments: object, **environ: str) -> list[str]:
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environ, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


READ = """
    import sys

    class NotInstalled:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] in ("torch", "transformers"):
                raise ImportError(f"{name} is not installed")

    if sys.argv[3] == "without":
        sys.meta_path.insert(0, NotInstalled())

    from streamtap import UnifiedCache
    from streamtap.errors import NotCached

    prompts = ["The sky", "is", [5, 6, 7], [{"role": "user", "content": "Why?"}]]
    with UnifiedCache(sys.argv[1], cache_dir=sys.argv[2]) as cache:
        print(cache.warmup(prompts).activations_cached)
        print(cache.activations(prompts, 1).tobytes().hex())
        print(cache.get_perplexity(prompts).tobytes().hex())
        print(cache.rows(prompts, "all").layers)
        print(sorted(name for name in ("torch", "transformers", "rich", "sklearn") if name in sys.modules))
        if sys.argv[3] == "without":
            for ask in (["a new text"], [[9, 9]], prompts + [[9]]):
                try:
                    cache.warmup(ask)
                except NotCached as error:
                    print(error)
"""


@pytest.mark.parametrize("torch", ["with", "without"])
def test_a_new_process_reads_without_torch(torch: str, folder: Path, open_cache: OpenCache) -> None:
    cache = open_cache(folder)
    cache.warmup(PROMPTS)
    printed = python(READ, folder, cache.store.root, torch)

    assert printed[:5] == [
        "4",
        cache.activations(PROMPTS, 1).tobytes().hex(),
        cache.get_perplexity(PROMPTS).tobytes().hex(),
        "(0, 1, 2)",
        "[]",
    ]
    hint = "running a model here needs torch and transformers: pip install 'streamtap[local]'."
    assert (
        printed[5:] == []
        if torch == "with"
        else printed[5:]
        == [
            f"prompt 0 and maybe others are not in the cache, and {hint}",
            f"1 of 1 prompts are not in the cache, and {hint}",
            f"1 of 5 prompts are not in the cache, and {hint}",
        ]
    )


def test_a_known_model_is_loaded_only_to_run_it(folder: Path, loads: list[str], open_cache: OpenCache) -> None:
    first = open_cache(folder)
    first.warmup(PROMPTS)
    cache = open_cache(folder)
    assert cache.provenance == first.provenance
    assert cache.layer_indices == (0, 1, 2)
    assert cache.warmup(PROMPTS).activations_cached == 4
    assert loads == [str(folder)]

    cache.warmup(["a new one"])
    cache.warmup(["and another"])
    assert loads == [str(folder)] * 2


def test_threads_load_a_model_once(folder: Path, loads: list[str], open_cache: OpenCache) -> None:
    cache, found = open_cache(folder), []
    threads = [threading.Thread(target=lambda: found.append(cache.activations(PROMPTS, 1))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert loads == [str(folder)]
    assert len(found) == 4
    for rows in found:
        np.testing.assert_array_equal(rows, found[0])


def change_weights(folder: Path) -> None:
    tiny_model("llama", seed=1).save_pretrained(folder)


def change_config(folder: Path) -> None:
    tiny_model("llama", rope_parameters={"rope_type": "default", "rope_theta": 77.0}).save_pretrained(folder)


def change_tokenizer(folder: Path) -> None:
    tiny_tokenizer(adds_bos=False).save_pretrained(folder)


def change_template(folder: Path) -> None:
    tiny_tokenizer(chat_template="Once: " + CHAT_TEMPLATE).save_pretrained(folder)


def change_special_tokens(folder: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = "y"
    tokenizer.save_pretrained(folder)


@pytest.mark.parametrize(
    "change", [change_weights, change_config, change_tokenizer, change_template, change_special_tokens]
)
def test_changed_files_of_the_same_name_are_another_model(
    change: Callable[[Path], None], folder: Path, loads: list[str], open_cache: OpenCache
) -> None:
    options = {"pooling": "mean", "exclude_special_tokens": True, "exact": True}
    before = open_cache(folder, **options)
    before.warmup(PROMPTS)
    old = before.activations(PROMPTS, 1)
    change(folder)
    cache = open_cache(folder, **options)
    stats = cache.warmup(PROMPTS)
    fresh = open_cache(TransformersEngine.load(str(folder)), cache_dir=folder / "other", **options)

    assert stats.activations_extracted == 4
    np.testing.assert_array_equal(cache.activations(PROMPTS, 1), fresh.activations(PROMPTS, 1))
    differs = (cache.activations(PROMPTS, 1) != old).any(axis=1).tolist()
    assert (
        differs
        == {
            change_weights: [True] * 4,
            change_config: [True] * 4,
            change_tokenizer: [True, True, False, False],
            change_template: [False, False, False, True],
            change_special_tokens: [True, False, False, True],
        }[change]
    )


@pytest.mark.parametrize("dtype", ["float16", "torch"])
def test_another_dtype_is_another_model(dtype: str, folder: Path, open_cache: OpenCache) -> None:
    import torch

    asked = torch.float16 if dtype == "torch" else dtype
    open_cache(folder).warmup(PROMPTS)
    cache = open_cache(folder, dtype=asked)

    assert cache.warmup(PROMPTS).activations_extracted == 4
    assert cache.activations(PROMPTS, 1).dtype == np.float16
    assert open_cache(folder).activations(PROMPTS, 1).dtype == np.float32
    with pytest.raises(InvalidInput, match="dtype must be one of"):
        open_cache(folder, dtype="float12").warmup(PROMPTS)


def test_a_given_engine_and_its_name_share_their_rows(folder: Path, open_cache: OpenCache) -> None:
    open_cache(TransformersEngine.load(str(folder))).warmup(PROMPTS)

    assert open_cache(folder).warmup(PROMPTS).activations_cached == 4


def test_another_revision_of_a_hub_id_is_another_model(
    saved: Path, tmp_path: Path, loads: list[str], open_cache: OpenCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo, commits = tmp_path / "hub" / "models--org--tiny", {"main": "1" * 40, "other": "2" * 40}
    (repo / "refs").mkdir(parents=True)
    for seed, (revision, commit) in enumerate(commits.items()):
        (repo / "refs" / revision).write_text(commit)
        shutil.copytree(saved, repo / "snapshots" / commit)
        tiny_model("llama", seed=seed).save_pretrained(repo / "snapshots" / commit)
    monkeypatch.setenv("HF_HUB_CACHE", str(repo.parent))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(repo.parent))
    found = {}
    for revision in ("main", "other", commits["other"], None):
        cache = open_cache("org/tiny", revision=revision)
        stats = cache.warmup(PROMPTS[:2])
        assert cache.provenance.commit == commits["main" if revision in ("main", None) else "other"]
        assert stats.activations_extracted == (2 if revision in commits else 0)
        found[revision] = cache.activations(PROMPTS[:2], 1)

    assert len(loads) == 2
    np.testing.assert_array_equal(found["main"], found[None])
    np.testing.assert_array_equal(found["other"], found[commits["other"]])
    assert not np.allclose(found["main"], found["other"])


def test_a_closed_cache_lets_go_of_the_model_that_it_loaded(folder: Path, open_cache: OpenCache) -> None:
    with open_cache(folder) as cache:
        cache.warmup(PROMPTS)
        loaded = cache.source.engine()
    cache.close()

    with pytest.raises(InvalidInput, match="this engine is closed"):
        loaded.capture([[5, 6]], cache.spec)


def test_what_is_no_model_is_refused(open_cache: OpenCache) -> None:
    with pytest.raises(InvalidInput, match=r"got LlamaForCausalLM\. Wrap a loaded model: TransformersEngine"):
        open_cache(tiny_model("llama"))
    with pytest.raises(InvalidInput, match="neither a folder, a GGUF file nor a Hub id"):
        open_cache("./nowhere").warmup(PROMPTS)


def test_an_engine_takes_no_options_of_loading(open_cache: OpenCache) -> None:
    options = {"dtype": "float16", "revision": "main", "device": "cuda:1", "max_batch_tokens": 9}
    for name, value in options.items():
        with pytest.raises(InvalidInput, match=f"{name} cannot be set for an engine"):
            open_cache(FakeEngine(), **{name: value})
    assert open_cache(FakeEngine(), batch_size=4, dtype="auto").warmup(["The sky"]).activations_extracted == 1


def test_an_engine_from_memory_is_known_by_its_weights() -> None:
    engines = [TransformersEngine(tiny_model("llama", seed=seed), tiny_tokenizer()) for seed in (0, 0, 1)]
    commits = [GivenEngine(engine).provenance.commit for engine in engines]
    with torch.no_grad():
        next(engines[1].model.parameters())[0, 0] += 1.0

    assert commits[0] == commits[1] != commits[2]
    assert GivenEngine(engines[1]).provenance.commit != commits[1]
    assert all(commit.startswith("sha256:") for commit in commits)
    named = FakeEngine()
    assert GivenEngine(named).provenance == named.provenance


def test_the_identity_leaves_out_what_changes_no_value() -> None:
    about = FakeEngine(named={"device": "cuda:3", "engine_version": "7", "model": "a name"}).provenance

    assert identity_of(about) == {
        "values": 1,
        "model": "fake-1",
        "tokenizer": "characters",
        "dtype": "float32",
        "quantization": None,
        "engine": "fake",
    }
