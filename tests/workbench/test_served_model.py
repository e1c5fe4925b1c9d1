"""A service's model behind a cache: asked once, remembered, and not asked where everything is there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamtap.engines.api_told import Told
from streamtap.engines.references import find_model, tokenizer_fingerprint
from streamtap.errors import InvalidInput, TransferFailed
from streamtap.settings import Settings
from streamtap.testing.fake_engine import FakeEngine
from streamtap.testing.tokenizers import tiny_tokenizer
from streamtap.workbench import served_model as module
from streamtap.workbench.unified_cache import UnifiedCache

PROMPTS = ["The sky", "is blue", "or grey"]
BASE = "http://127.0.0.1:9/v1"
OpenCache = Callable[..., UnifiedCache]


class Service:
    """What is there at the address: engines by the names of models, or nothing."""

    def __init__(self) -> None:
        self.engine = FakeEngine(dtype="bfloat16", named={"engine": "api", "commit": f"api:{BASE}#m"})
        self.is_away = False
        self.asked: list[dict[str, Any]] = []

    def has(self, commit: str, tokenizer: str = "characters", **named: str) -> FakeEngine:
        """Have another model, or another tokenizer, from now on."""
        names = {"engine": "api", "commit": commit, "tokenizer": tokenizer, **named}
        self.engine = FakeEngine(dtype="bfloat16", named=names)
        return self.engine

    def load(self, model: str, **options: Any) -> FakeEngine:
        self.asked.append({"model": model, **options})
        if self.is_away:
            raise TransferFailed(f"{BASE} does not answer.")
        return self.engine


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Service:
    made = Service()
    monkeypatch.setattr(module, "load_engine", made.load)
    return made


@pytest.fixture
def open_cache(tmp_path: Path) -> OpenCache:
    def opened(model: str = "m", **options: Any) -> UnifiedCache:
        named = {"backend": "api", "api_base": BASE, "api_key": "secret", "cache_dir": tmp_path, "progress": False}
        return UnifiedCache(model, **{**named, **options})

    return opened


def test_its_rows_are_kept_like_any(service: Service, open_cache: OpenCache) -> None:
    cache = open_cache(layers=[1, 3])
    assert service.asked == []

    stats = cache.warmup(PROMPTS)
    rows = cache.activations(PROMPTS, 3)

    assert stats.activations_extracted == 3
    ids = [service.engine.tokenizer.read(prompt, 0) for prompt in PROMPTS]
    np.testing.assert_array_equal(rows, np.stack([service.engine.rows(each, 3)[-1] for each in ids]))
    assert service.asked == [
        {**{"model": "m", "backend": "api", "revision": None, "dtype": "auto", "api_base": BASE, "api_key": "secret"}}
    ]


def test_what_is_cached_needs_no_service(service: Service, open_cache: OpenCache) -> None:
    ids = [[5, 6, 7], [8, 9]]
    first = open_cache().activations(ids, 2)
    service.is_away = True

    again = open_cache().activations(ids, 2)

    np.testing.assert_array_equal(first, again)
    assert len(service.asked) == 1
    with pytest.raises(TransferFailed):
        open_cache().activations([[5, 5]], 2)


def test_two_services_are_two_models(service: Service, open_cache: OpenCache) -> None:
    open_cache().warmup([[5, 6]])
    service.engine = FakeEngine(dtype="bfloat16", named={"engine": "api", "commit": "api:http://other/v1#m"})

    stats = open_cache(api_base="http://127.0.0.1:8/v1").warmup([[5, 6]])

    assert stats.activations_extracted == 1
    assert len(service.asked) == 2


def test_the_key_is_kept_nowhere(service: Service, open_cache: OpenCache, tmp_path: Path) -> None:
    open_cache().warmup(PROMPTS)

    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert files
    assert all(b"secret" not in file.read_bytes() for file in files)


class Numbers:
    """A tokenizer of its own: every word is the same id."""

    all_special_ids = ()

    def __init__(self, number: int) -> None:
        self.number = number

    def get_vocab(self) -> dict[str, int]:
        return {"word": self.number}


def test_another_tokenizer_is_another_model(service: Service, open_cache: OpenCache) -> None:
    for number in (5, 6):
        engine = service.has(f"api:{BASE}#m", f"the {number}")
        options = {"engine_options": {"tokenizer": Numbers(number)}}
        assert open_cache(**options).provenance == engine.provenance
        # The same once more, in an object of its own.
        assert (
            open_cache(engine_options={"tokenizer": Numbers(number), "harvest_from": 9})
            .warmup([])
            .activations_extracted
            == 0
        )

    assert open_cache(engine_options={"tokenizer": Numbers(5)}).provenance.tokenizer == "the 5"
    assert len(service.asked) == 2


def test_a_tokenizer_by_its_path_is_told_by_its_files(service: Service, open_cache: OpenCache, tmp_path: Path) -> None:
    folder = _saved(tmp_path / "tokenizer", adds_bos=True)
    asked = {"engine_options": {"tokenizer": str(folder)}}

    assert open_cache(**asked).provenance == service.engine.provenance
    assert open_cache(**asked).provenance == service.engine.provenance
    assert len(service.asked) == 1
    _saved(folder, adds_bos=False)
    changed = service.has(f"api:{BASE}#m", "without BOS")
    assert open_cache(**asked).provenance == changed.provenance


def test_what_the_service_told_holds_for_the_caches_life(service: Service, open_cache: OpenCache) -> None:
    first = open_cache(layers=[1], compute_perplexity=False)
    old = service.engine
    first.warmup([[5, 6]])
    new = service.has("api:other")
    second = open_cache(layers=[1], compute_perplexity=False)
    second.warmup([[7, 8]])

    np.testing.assert_array_equal(first.activations([[7, 9]], 1), [old.rows([7, 9], 1)[-1]])
    assert first.provenance == old.provenance
    assert second.provenance == new.provenance


def test_a_model_that_changed_there_makes_all_rows_of_a_call(service: Service, open_cache: OpenCache) -> None:
    open_cache().warmup([[5, 6], "The sky"])
    new = service.has("api:other", "another")

    rows = open_cache().activations([[5, 6], "The sky", [7, 8]], 1)

    ids = [[5, 6], new.tokenizer.read("The sky", 0), [7, 8]]
    np.testing.assert_array_equal(rows, np.stack([new.rows(each, 1)[-1] for each in ids]))


def _saved(folder: Path, **options: Any) -> Path:
    """Config and tokenizer of a model."""
    tiny_tokenizer(**options).save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[bool, str]:
    """Commits of org/tiny on this machine: True's tokenizer adds BOS, False's, which is main, does not."""
    repo, commits = tmp_path / "hub" / "models--org--tiny", {True: "1" * 40, False: "2" * 40}
    for adds_bos, commit in commits.items():
        _saved(repo / "snapshots" / commit, adds_bos=adds_bos)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commits[False])
    monkeypatch.setenv("HF_HUB_CACHE", str(repo.parent))
    return commits


def _with_revision(service: Service, commit: str) -> FakeEngine:
    """A service that tells which commit it has, and an engine that read the tokenizer of that one."""
    settings = Settings.from_environment()
    fingerprint = tokenizer_fingerprint(find_model("org/tiny", commit, settings=settings))
    engine = service.has(commit, fingerprint, model="org/tiny")
    told = {"id": "m", "checkpoint": "org/tiny", "revision": commit, "n_layers": 4, "hidden": 8, "context": 64}
    told |= {"dtype": "bfloat16", "at_once": 4, "capture_positions": None, "chooses_rows": True}
    told |= {"runs_prompts_alone": True, "row_dtypes": (), "has_logprobs": True, "harvests": False}
    told |= {"engine": "transformers", "own_arguments": False}
    engine.told = Told(**told)  # type: ignore[attr-defined]
    return engine


def test_texts_become_tokens_as_at_the_commit_that_is_served(
    service: Service, open_cache: OpenCache, hub: dict[bool, str]
) -> None:
    engine = _with_revision(service, hub[True])
    ids = tiny_tokenizer()(PROMPTS[0])["input_ids"]
    first = open_cache().activations([ids], 2)
    service.is_away = True

    cache = open_cache()

    np.testing.assert_array_equal(cache.activations(PROMPTS[:1], 2), first)
    np.testing.assert_array_equal(first[0], engine.rows(ids, 2)[-1])


def test_files_that_changed_are_not_taken_for_those_that_were_read(
    service: Service, open_cache: OpenCache, hub: dict[bool, str], tmp_path: Path
) -> None:
    _with_revision(service, hub[True])
    cache = open_cache()
    cache.warmup([[5, 6]])
    _saved(tmp_path / "hub" / "models--org--tiny" / "snapshots" / hub[True], adds_bos=False)
    engine = _with_revision(service, hub[True])

    again = open_cache()
    with pytest.raises(InvalidInput, match="the tokenizer of org/tiny is another than the cache remembers"):
        again.activations(PROMPTS[:1], 2)

    ids = engine.tokenizer.read(PROMPTS[0], 0)
    np.testing.assert_array_equal(again.activations(PROMPTS[:1], 2), [engine.rows(ids, 2)[-1]])


def test_a_closed_cache_closes_the_engine_that_it_opened(service: Service, open_cache: OpenCache) -> None:
    with open_cache() as cache:
        cache.warmup(PROMPTS)
        assert not service.engine.closed
    with open_cache() as another:
        another.warmup(PROMPTS)
    cache.close()

    assert service.engine.closed
    assert len(service.asked) == 1


def test_caches_of_one_service_close_each_its_own(service: Service, open_cache: OpenCache) -> None:
    first, second = open_cache(), open_cache()
    mine = service.engine
    first.warmup([[5, 6]])
    yours = service.has(f"api:{BASE}#m")
    second.warmup([[7, 8]])
    first.close()

    assert (mine.closed, yours.closed) == (True, False)
    assert second.warmup([[9, 9]]).activations_extracted == 1
