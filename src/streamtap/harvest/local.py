"""``harvest_prompts``: prompts or documents to a run in a folder or a store, by an engine here or many on a cluster.

::

    prompts ─► token ids, cut or in windows (ahead, on a thread) ─► run_harvest | run_on_cluster ─► HarvestedRun
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamtap.engines.base import Engine
from streamtap.engines.opening import load_engine
from streamtap.engines.tokenizing import PromptTokenizer
from streamtap.errors import InvalidInput
from streamtap.harvest.asked import Compression, HarvestAsk, RowDtype
from streamtap.harvest.cutting import Cutting
from streamtap.harvest.engine_source import ModelSource
from streamtap.harvest.node_engine import spool_beside
from streamtap.harvest.reading_ahead import read_ahead
from streamtap.harvest.rows_done import RowsDone, RunProgress
from streamtap.harvest.run import run_harvest
from streamtap.harvest.standing import Progress, never, nobody
from streamtap.harvest.windows import Document
from streamtap.harvested.folder_place import FolderPlace
from streamtap.harvested.opening import open_place
from streamtap.harvested.places import WritablePlace
from streamtap.harvested.reader import HarvestedRun
from streamtap.layers import LayerSpec
from streamtap.pooling import Pooling
from streamtap.positions import PositionSpec
from streamtap.settings import Settings
from streamtap.spec import Projection, PromptLike

#: Prompts that are tokenised ahead of the model.
_AHEAD = 1024


@dataclass(frozen=True)
class OnCluster:
    """Where and how a run spreads over a Ray cluster; as in ``cluster.run_on_cluster``."""

    address: str = "auto"
    cpus_per_engine: float = 1
    gpus_per_engine: float | None = None
    engines: int | None = None


def harvest_prompts(
    prompts: Iterable[PromptLike | Document],
    *,
    out: str | Path,
    model: str = "demo",
    engine: Engine | None = None,
    layers: LayerSpec | None = None,
    positions: PositionSpec = "all",
    pooling: Pooling = "none",
    project_onto: Any = None,
    add_special_tokens: bool = True,
    context: int | None = None,
    chunk: bool = False,
    pack: bool = False,
    max_tokens: int | None = None,
    shard_size: int = 32,
    batch_size: int | None = None,
    compression: Compression = "none",
    dtype: RowDtype = "bfloat16",
    model_dtype: str = "auto",
    cluster: OnCluster | str | None = None,
    run_id: str | None = None,
    on_progress: Callable[[RunProgress], None] = nobody,
    should_stop: Callable[[], bool] = never,
    **loading: Any,
) -> HarvestedRun:
    """Harvest ``prompts`` into a folder or store; the same call goes on with a run that was stopped.

    Args:
        prompts: Text, chats or token ids, in any iterable, which is read as it is needed; the same at every try.
        out: A folder, or ``s3://``, ``gs://`` or ``az://``: the run's own.
        model: Loaded here, where no ``engine`` is given: ``"demo"``, a folder, a GGUF file or a Hub id.
        engine: One that is there already; it is left open.
        layers: A layer spec; None is a quarter, a half and three quarters of the depth.
        positions: ``"all"``, ``"last"``, a range or numbers; which tokens have a row.
        pooling: Many rows of a prompt to one, or ``none``.
        project_onto: [1 to 64, hidden]: keep each row's products with these directions, made unit length, in float32.
        add_special_tokens: Whether text gets the tokenizer's BOS and the like.
        context: As in ``Cutting``.
        chunk: As in ``Cutting``.
        pack: As in ``Cutting``.
        max_tokens: As in ``Cutting``.
        shard_size: Prompts in a file.
        batch_size: Prompts in a pass at most; None leaves it to the engine.
        compression: ``"zstd"`` packs each file.
        dtype: ``"bfloat16"`` or ``"float32"`` of the rows in the files.
        model_dtype: What the model is loaded in; ``"auto"`` is the checkpoint's own.
        cluster: Run on a Ray cluster, whose machines load ``model``; ``"auto"`` or its address.
        run_id: The run's name; None takes that of the run that is there, or a new one.
        on_progress: Told of each shard that is whole, maybe from another thread.
        should_stop: Asked between batches.
        **loading: Options of ``TransformersEngine.load`` for ``model``: ``revision``, ``device``, ….

    Raises:
        InvalidInput: what was asked for cannot be, or there is no prompt.
        StreamtapError: as ``run_harvest`` and ``run_on_cluster``.
    """
    _check_many(prompts)
    cutting = Cutting(context, chunk, pack, max_tokens)
    ask = HarvestAsk(
        layers=layers,
        positions=positions,
        pooling=pooling,
        projection=None if project_onto is None else Projection.onto(project_onto),
        add_special_tokens=add_special_tokens,
        shard_size=shard_size,
        batch_size=batch_size,
        compression=compression,
        dtype=dtype,
    )
    if model_dtype != "auto":
        loading["dtype"] = model_dtype
    run = _Run(prompts, cutting, ask, open_place(out), run_id, on_progress, should_stop)
    run.place.check()
    if cluster is not None:
        if engine is not None:
            raise InvalidInput("machines of a cluster load the model themselves; name it instead of giving an engine.")
        run.on_cluster(OnCluster(cluster) if isinstance(cluster, str) else cluster, ModelSource(model, loading))
    elif engine is not None:
        if loading or model != "demo":
            raise InvalidInput(f"{', '.join(loading) or 'model'} cannot be set for an engine, which is loaded already.")
        run.here(engine)
    else:
        with _loaded(model, loading) as own:
            run.here(own)
    return HarvestedRun.open(run.place)


def spool_of(place: WritablePlace) -> Path:
    """Where shards of a run are put together: in the run's folder, or for a store in the cache."""
    if isinstance(place, FolderPlace):
        return spool_beside(place)
    name = hashlib.sha256(place.url.encode()).hexdigest()[:24]
    return Settings.from_environment().cache_dir / "harvest" / name


@dataclass(frozen=True)
class _Run:
    prompts: Iterable[PromptLike | Document]
    cutting: Cutting
    ask: HarvestAsk
    place: WritablePlace
    run_id: str | None
    on_progress: Callable[[RunProgress], None]
    should_stop: Callable[[], bool]

    def here(self, engine: Engine) -> None:
        spool = spool_of(self.place)
        with ExitStack() as held:
            rows = self._rows(engine.tokenizer, held)
            run_harvest(
                engine,
                rows,
                self.place,
                self.ask,
                spool=spool,
                run_id=self.run_id,
                on_progress=lambda progress: self._tell(rows, progress),
                should_stop=self.should_stop,
            )
        shutil.rmtree(spool, ignore_errors=True)  # the run is whole, so whatever is left there is of no use

    def on_cluster(self, how: OnCluster, source: ModelSource) -> None:
        from streamtap.harvest.cluster import run_on_cluster

        passed: list[RowsDone] = []
        with ExitStack() as held:

            def tokenised(tokenizer: PromptTokenizer) -> RowsDone:
                passed.append(self._rows(tokenizer, held))
                return passed[0]

            run_on_cluster(
                tokenised,
                self.place.url,
                self.ask,
                engine=source,
                address=how.address,
                cpus_per_engine=how.cpus_per_engine,
                gpus_per_engine=how.gpus_per_engine,
                engines=how.engines,
                run_id=self.run_id,
                on_progress=lambda progress: self._tell(passed[0], progress),
                should_stop=self.should_stop,
            )

    def _rows(self, tokenizer: PromptTokenizer, held: ExitStack) -> RowsDone:
        special = self.ask.add_special_tokens
        tokenised = self.cutting.tokenised(self.prompts, tokenizer, add_special_tokens=special)
        return RowsDone(held.enter_context(read_ahead(tokenised, _AHEAD)))

    def _tell(self, rows: RowsDone, progress: Progress) -> None:
        self.on_progress(rows.progress(progress))


def _check_many(prompts: Any) -> None:
    if isinstance(prompts, str | Path):
        raise InvalidInput("prompts must be several; got one string. Wrap it: [prompt].")
    if isinstance(prompts, Sequence) and len(prompts) and isinstance(prompts[0], Mapping):
        raise InvalidInput("prompts must be several; got the messages of one chat. Wrap it: [messages].")


@contextmanager
def _loaded(model: str, options: dict[str, Any]) -> Iterator[Engine]:
    engine = load_engine(model, **options)
    try:
        yield engine
    finally:
        engine.close()
