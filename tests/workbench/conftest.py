"""What the tests of datasets stand on: caches filled by an engine of arithmetic, and folders to publish to."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from streamtap.harvest.asked import HarvestAsk
from streamtap.harvest.plan import read_prompts
from streamtap.harvest.run import run_harvest
from streamtap.harvested.folder_place import FolderPlace
from streamtap.harvested.reader import HarvestedRun
from streamtap.testing.fake_engine import FakeEngine
from streamtap.workbench.publish import push_dataset
from streamtap.workbench.pull import pull_dataset
from streamtap.workbench.statements import Statements, load_statements
from streamtap.workbench.sweep import Sweep, sweep_layers
from streamtap.workbench.unified_cache import UnifiedCache

MODEL = "org/fake"
SAMPLES = Path(__file__).parents[1] / "dataset" / "samples"


@dataclass
class Bench:
    """A folder with caches, datasets and an engine, each by its name."""

    root: Path

    def engine(self, **options: Any) -> FakeEngine:
        """An engine of the model ``org/fake``."""
        named = {"model": MODEL, **options.pop("named", {})}
        return FakeEngine(named=named, **options)

    def cache(self, engine: Any = None, folder: str = "cache", **options: Any) -> UnifiedCache:
        """A cache in ``folder``, by default of a new engine."""
        model = self.engine() if engine is None else engine
        return UnifiedCache(model, **{"cache_dir": self.root / folder, "progress": False, **options})

    def fill(self, prompts: Sequence[Any], engine: Any = None, folder: str = "cache", **options: Any) -> UnifiedCache:
        """A cache that has ``prompts``."""
        cache = self.cache(engine, folder, **options)
        cache.warmup(prompts)
        return cache

    def push(self, prompts: Sequence[Any], where: str = "set", folder: str = "cache", **options: Any) -> Path:
        """Publish to the folder ``where``."""
        model = options.pop("model", MODEL)
        push_dataset(self.root / where, model, prompts, cache_dir=self.root / folder, progress=False, **options)
        return self.root / where

    def pull(self, where: str | Path = "set", folder: str = "pulled", **options: Any) -> int:
        """Pull into the cache ``folder``."""
        return pull_dataset(self.root / where, cache_dir=self.root / folder, show_progress=False, **options)

    def harvest(self, prompts: Sequence[Any], engine: Any = None, where: str = "run", **asked: Any) -> HarvestedRun:
        """A harvest of ``prompts`` in the folder ``where``."""
        model, ask = self.engine() if engine is None else engine, HarvestAsk(**{"layers": "all", **asked})
        tokens = read_prompts(prompts, model.tokenizer, add_special_tokens=ask.add_special_tokens)
        run_harvest(model, tokens, FolderPlace(self.root / where), ask, spool=self.root / "spool" / where)
        return HarvestedRun.open(self.root / where)

    def sample(self, name: str) -> Path:
        """A copy of a dataset that another library wrote."""
        where = self.root / name
        return where if where.exists() else Path(shutil.copytree(SAMPLES / name, where))


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """An empty one."""
    return Bench(tmp_path)


@pytest.fixture(scope="session")
def new_bench() -> Callable[[Path], Bench]:
    """Makes one in a folder, for a fixture that lasts longer than a test."""
    return Bench


@pytest.fixture(scope="session")
def expected() -> dict[str, NDArray[Any]]:
    """What must be read from the samples, by sample and name."""
    with np.load(SAMPLES / "expected.npz", allow_pickle=False) as values:
        return dict(values)


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every way to load a model or a tokenizer fail the test."""
    for name in ("transformers", "loading"):
        monkeypatch.setitem(sys.modules, f"streamtap.engines.{name}", None)


@pytest.fixture
def files_of() -> Callable[[Path], dict[str, tuple[int, bytes]]]:
    """Every file under a folder, with the time of its last change and what is in it."""
    return lambda folder: {
        file.relative_to(folder).as_posix(): (file.stat().st_mtime_ns, file.read_bytes())
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


@pytest.fixture(scope="session")
def statements() -> Statements:
    """The labelled set of the demo."""
    return load_statements()


@pytest.fixture(scope="session")
def telling_rows(statements: Statements) -> dict[int, NDArray[np.float32]]:
    """Layer 1 shows the label through noise, layers 0 and 2 are noise only; [statements, 6] each."""
    rows = {k: np.random.default_rng(k).normal(size=(len(statements), 6)).astype(np.float32) for k in range(3)}
    rows[1][:, 2] += 2.5 * statements.labels
    return rows


@pytest.fixture(scope="session")
def telling_sweep(statements: Statements, telling_rows: dict[int, NDArray[np.float32]]) -> Sweep:
    """The sweep of those rows."""
    return sweep_layers(telling_rows, statements.labels, statements.groups, statements.texts)


@pytest.fixture(scope="session")
def noise_sweep(statements: Statements, telling_rows: dict[int, NDArray[np.float32]]) -> Sweep:
    """A sweep of layers that show nothing."""
    return sweep_layers({k: telling_rows[k] for k in (0, 2)}, statements.labels, statements.groups)
