"""A started service as a cache's backend: the engines' suite over HTTP, 2 000 prompts, and deaths in the middle."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from streamtap import UnifiedCache
from streamtap.activations import join
from streamtap.client.sync import Client
from streamtap.engines.api import ApiEngine
from streamtap.engines.tokenizing import PromptTokenizer
from streamtap.fingerprint import fingerprint
from streamtap.spec import CaptureSpec
from streamtap.testing import EngineSubject, EngineSuite, FakeEngine, PlainReference
from streamtap.testing.characters import VOCABULARY
from streamtap.testing.models import tiny_model
from streamtap.testing.tokenizers import tiny_tokenizer

pytestmark = pytest.mark.xdist_group("api backend")

CONTEXT = 128
#: Low ones, so that a pass may end early.
LAYERS = [2, 7]
NOUNS = ["cat", "dog", "sea", "sun", "tree", "road", "bird", "ship", "star", "rain", "fire", "wind", "hill", "lake"]
NOUNS += ["snow", "moon"]
PROMPTS = [f"{noun} {number}" for number in range(125) for noun in NOUNS]
#: Rounding to bfloat16 moves no value by more than 2 ** -8 of itself; the rest is for batches of another shape.
BFLOAT16 = 2**-8 * 1.01


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port: int = held.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama", max_position_embeddings=CONTEXT)


@pytest.fixture(scope="module")
def checkpoint(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def service(start_lasting_service: Any, checkpoint: Path) -> Any:
    every = {"dtype": "float32", "device": "cpu", "idle_seconds": 0}
    return start_lasting_service(
        {"id": "tiny", "checkpoint": str(checkpoint), "name": "org/tiny", **every},
        {"id": "demo", "checkpoint": "demo", **every},
        engines="shared",
        port=_free_port(),
        harvest={"lease_seconds": 5.0},
    )


@pytest.fixture
def died(service: Any) -> Callable[[], None]:
    """Kills the service and starts it again, where it was and with what it had."""

    def act() -> None:
        base = service.base_url
        service.kill()
        service.start()
        assert service.base_url == base

    return act


@pytest.fixture(scope="module")
def subject(service: Any, model: Any, checkpoint: Path) -> Iterator[EngineSubject]:
    def opened() -> ApiEngine:
        named = {"api_base": service.base_url, "api_key": service.key, "tokenizer": str(checkpoint)}
        return ApiEngine.load("tiny", dtype="float32", **named)

    engine = opened()
    yield EngineSubject(engine, PlainReference(model), another=opened, logits=False, completes=True, steers=True)
    engine.close()


class TestEngineOverHttp(EngineSuite):
    """Every test of the suite, with a gateway and an engine's process in between."""


def _cache(folder: Path, **options: Any) -> UnifiedCache:
    return UnifiedCache("demo", LAYERS, compute_perplexity=False, cache_dir=folder, progress=False, **options)


def _hold_close(found: UnifiedCache, right: UnifiedCache, prompts: list[str]) -> None:
    for layer in LAYERS:
        rows, exact = (cache.activations(prompts, layer).astype(np.float64) for cache in (found, right))
        away = np.linalg.norm(rows - exact, axis=1) / np.linalg.norm(exact, axis=1)
        assert rows.shape == (len(prompts), 576)
        assert away.max() <= BFLOAT16, f"layer {layer}: {away.max()}"


def test_2000_prompts_through_a_service_that_dies_give_the_rows_of_a_local_model(
    service: Any, died: Callable[[], None], tmp_path: Path, wait_until: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """In bulk: the job goes on in another worker, and the cache waits for it."""
    api = {"backend": "api", "api_base": service.base_url, "api_key": service.key}
    far = _cache(tmp_path / "far", pooling="mean", **api)
    failed: list[BaseException] = []

    def run() -> None:
        try:
            stats.append(far.warmup(PROMPTS))
        except BaseException as error:
            failed.append(error)
            raise

    stats: list[Any] = []
    thread = threading.Thread(target=run)
    with caplog.at_level(logging.INFO, "streamtap"), Client(service.base_url, service.key) as client:
        thread.start()
        assert wait_until(lambda: any(0 < job.prompts_done < len(PROMPTS) for job in client.harvests()), 180)
        died()
        thread.join(300)
        (job,) = client.harvests()

    assert failed == []
    assert not thread.is_alive()
    assert (job.status, job.n_prompts) == ("done", len(PROMPTS))
    assert "rows of demo come harvest: 2000 sequences, 256 or more, as bulk job" in caplog.text
    assert NOUNS[0] not in caplog.text
    assert stats[0].activations_extracted == len(PROMPTS)
    assert far.provenance.engine == "api"
    assert far.provenance.commit == f"api:{fingerprint({'address': service.base_url})[:16]}#demo"
    near = _cache(tmp_path / "near", pooling="mean", device="cpu", batch_size=None)
    _hold_close(far, near, PROMPTS)
    assert far.warmup(PROMPTS).activations_extracted == 0
    far.close()
    near.close()


def test_the_last_tokens_row_comes_inline_and_in_bulk_alike(service: Any, tmp_path: Path) -> None:
    prompts = PROMPTS[:300]
    api = {"backend": "api", "api_base": service.base_url, "api_key": service.key}
    bulk, inline = (
        _cache(tmp_path / str(limit), engine_options={"harvest_from": limit}, **api) for limit in (256, None)
    )
    near = _cache(tmp_path / "near", device="cpu", batch_size=None)

    for far, way in ((bulk, "harvest"), (inline, "inline")):
        far.warmup(prompts)
        engine = far.source.engine()
        assert isinstance(engine, ApiEngine)
        assert engine.last_way.startswith(way)
        _hold_close(far, near, prompts)
        far.close()
    near.close()


def test_single_requests_go_on_where_a_service_dies(start_service: Any, fake: Any) -> None:
    """Whole sequences are asked again: nothing twice, nothing missing, nothing of another prompt."""
    service = start_service(fake("fake", "--token-seconds", "0.02", "--dtype", "float32"), port=_free_port())
    tokenizer = PromptTokenizer(None, context_length=2048, vocabulary=VOCABULARY)
    named = {"api_base": service.base_url, "api_key": service.key, "tokenizer": tokenizer}
    engine = ApiEngine.load("fake", harvest_from=None, **named)
    prompts = [[5 + i % 80, 5 + i // 80, *[7] * (i % 4)] for i in range(700)]
    parts = engine.capture(prompts, CaptureSpec(layers=[1]), ordered=False)

    found = [next(parts)]
    service.kill()
    restarting = threading.Timer(1.0, service.start)
    restarting.start()
    found += list(parts)
    restarting.join()

    whole = join(found).select(np.argsort(join(found).index))
    model = FakeEngine()
    assert whole.index.tolist() == list(range(len(prompts)))
    for place, ids in enumerate(prompts):
        expected = model.rows(ids, 1).astype(ml_dtypes.bfloat16)
        np.testing.assert_array_equal(whole.prompt(place)[1], expected)
    engine.close()
