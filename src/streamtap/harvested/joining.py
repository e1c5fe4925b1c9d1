"""Brings several runs, whose prompts follow on each other, to a folder as one: the run that their prompts would be.

::

    part 0: shard_00000 (prompt_0 …) ─► shard_00000
    part 1: shard_00000 (prompt_0 …) ─► shard_00001 (prompt_4096 …)     names alone change, and with them the header
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from streamtap.codec import compress_file, decompressed
from streamtap.errors import HarvestDamaged, InvalidInput
from streamtap.harvested.fetching import OnBytes, Wanted, fetch_files, file_sha256, folder_of, never, nobody
from streamtap.harvested.folder_place import FolderPlace
from streamtap.harvested.joined import JoinedRuns
from streamtap.harvested.manifest import NAME, STATS_NAME, HarvestManifest, ShardEntry, ShardTensor
from streamtap.harvested.places import Place
from streamtap.harvested.reader import HarvestedRun
from streamtap.harvested.shard_reader import file_name
from streamtap.tensor_file import LENGTH_BYTES, header_bytes, tensor_bytes

_NUMBERED = re.compile(r"([a-z]+_)(\d+)")
_PACKED = ".zst"


@dataclass(frozen=True)
class _Renumbered(Wanted):
    """A shard whose prompts get other numbers, ``first`` added to each; what became of it stands beside it."""

    first: int = 0

    def is_at(self, file: Path) -> bool:
        """Whether ``file`` is what became of this shard."""
        told = _told(_note(file))
        return told.get("of") == self.entry.sha256 and file.is_file() and file_sha256(file) == told.get("sha256")

    def take(self, part: Path, target: FolderPlace) -> None:
        """Write it under its new name."""
        made = part.with_suffix(".numbered")
        try:
            _renumber(part, made, self.first, packed=self.name.endswith(_PACKED))
        except BaseException:
            made.unlink(missing_ok=True)
            raise
        sha256, size = file_sha256(made), made.stat().st_size
        target.put_file(self.name, made, sha256=sha256)
        self.note(target, sha256, size)
        part.unlink()

    def note(self, target: FolderPlace, sha256: str, size_bytes: int) -> None:
        """Say what became of it."""
        told = {"of": self.entry.sha256, "sha256": sha256, "bytes": size_bytes}
        _note(target.path(self.name)).write_text(json.dumps(told))

    def entry_of(self, target: FolderPlace) -> ShardEntry:
        """How the manifest of the whole names it."""
        told = _told(_note(target.path(self.name)))
        return ShardEntry(
            key=self.name,
            sha256=str(told["sha256"]),
            bytes=int(told["bytes"]),
            prompt_indices=tuple(index + self.first for index in self.entry.prompt_indices),
            tensors=tuple(ShardTensor(_moved(each.name, self.first), each.shape) for each in self.entry.tensors),
            digest=self.entry.digest,
        )


def fetch_joined(
    places: Sequence[Place],
    folder: str | Path,
    *,
    on_bytes: OnBytes = nobody,
    should_stop: Callable[[], bool] = never,
) -> HarvestManifest:
    """Bring the runs at ``places``, in order, into ``folder`` as one; what is whole there is not fetched again.

    Its name is made of theirs, its statistics are merged from theirs.

    Raises:
        HarvestMismatch: they are not of one model, or do not keep the same of each prompt; or as ``fetch_run``.
        HarvestDamaged, HarvestFailed, NotEnoughSpace, TransferFailed: as ``fetch_run``.
    """
    joined = JoinedRuns([HarvestedRun.open(place) for place in places])
    wanted = list(_wanted(joined))
    run_id = _name_of(joined)
    with folder_of(folder, run_id) as target:
        if target.size(NAME) is not None:
            _noted(wanted, HarvestedRun.open(target).manifest, target)
            target.delete(NAME)
        fetch_files(wanted, target, on_bytes, should_stop)
        manifest = _manifest(joined, run_id, [each.entry_of(target) for each in wanted])
        target.put(STATS_NAME, tensor_bytes(joined.statistics()))
        target.put(NAME, manifest.to_json())
        for each in wanted:
            _note(target.path(each.name)).unlink()
    return manifest


def _noted(wanted: Sequence[_Renumbered], manifest: HarvestManifest, target: FolderPlace) -> None:
    """Write again what the notes said before the manifest took their place."""
    for each, entry in zip(wanted, manifest.shards, strict=True):
        each.note(target, entry.sha256, entry.bytes)


def _wanted(joined: JoinedRuns) -> Iterator[_Renumbered]:
    number = 0
    for run, first in zip(joined.runs, joined.firsts[:-1], strict=True):
        for entry in run.manifest.shards:
            packed = _PACKED if file_name(entry).endswith(_PACKED) else ""
            yield _Renumbered(run.place, entry, f"shard_{number:05d}.safetensors{packed}", first)
            number += 1


def _manifest(joined: JoinedRuns, run_id: str, shards: Sequence[ShardEntry]) -> HarvestManifest:
    counts = [int(each.statistics["count"]) for each in joined.manifests]
    norms = zip(*(each.mean_token_norm for each in joined.manifests), strict=True)
    whole = max(1, sum(counts))
    return replace(
        joined.manifests[0],
        run_id=run_id,
        n_prompts=len(joined),
        statistics={**joined.manifests[0].statistics, "file": STATS_NAME, "count": sum(counts)},
        mean_token_norm=tuple(
            sum(norm * count for norm, count in zip(layer, counts, strict=True)) / whole for layer in norms
        ),
        truncated_prompts=tuple(
            {**each, "index": each["index"] + first}
            for manifest, first in zip(joined.manifests, joined.firsts[:-1], strict=True)
            for each in manifest.truncated_prompts
        ),
        shards=tuple(shards),
    )


def _name_of(joined: JoinedRuns) -> str:
    return hashlib.sha256(" ".join(each.run_id for each in joined.manifests).encode()).hexdigest()[:32]


def _renumber(source: Path, target: Path, first: int, *, packed: bool) -> None:
    """Write ``target``, the file with other numbers in the names of its tensors."""
    if not packed:
        _rewrite(source, target, first)
        return
    plain, numbered = target.with_suffix(".plain"), target.with_suffix(".plain-numbered")
    try:
        plain.write_bytes(decompressed(source.read_bytes(), source.name))
        _rewrite(plain, numbered, first)
        compress_file(numbered, target)
    finally:
        plain.unlink(missing_ok=True)
        numbered.unlink(missing_ok=True)


def _rewrite(source: Path, target: Path, first: int) -> None:
    with source.open("rb") as old, target.open("wb") as new:
        try:
            text = old.read(header_bytes(old.read(LENGTH_BYTES), source.name))
            entries = {_moved(name, first): entry for name, entry in json.loads(text).items()}
        except (InvalidInput, ValueError, AttributeError) as error:
            raise HarvestDamaged(f"{source.name} has a header that means nothing; harvest it again.") from error
        header = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
        header += b" " * (-len(header) % LENGTH_BYTES)  # so that the tensors are aligned
        new.write(len(header).to_bytes(LENGTH_BYTES, "little") + header)
        shutil.copyfileobj(old, new, 1 << 20)


def _moved(name: str, first: int) -> str:
    found = _NUMBERED.fullmatch(name)
    return name if found is None else f"{found[1]}{int(found[2]) + first}"


def _note(file: Path) -> Path:
    return file.with_name(f".{file.name}.json")


def _told(note: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(note.read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
