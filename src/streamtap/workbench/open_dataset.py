"""A dataset by name, with the settings and the progress bar of whoever asks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from streamtap.dataset.checked import CheckedFiles
from streamtap.dataset.inspection import DatasetInfo
from streamtap.dataset.names import HIDDEN, LOGITS
from streamtap.dataset.opening import open_source
from streamtap.dataset.places import no_advance
from streamtap.dataset.reader import Dataset
from streamtap.errors import InvalidInput
from streamtap.settings import Settings
from streamtap.workbench.progress import progress_bar


def open_dataset(
    name: str | Path,
    *,
    token: str | None = None,
    revision: str | None = None,
    endpoint: str | None = None,
    refresh: bool = False,
) -> Dataset:
    """The dataset under ``name``; nothing is read yet.

    Raises:
        InvalidInput: no name of a dataset.
    """
    source = open_source(name, revision=revision, token=token, endpoint=endpoint, refresh=refresh)
    return Dataset(source, CheckedFiles(Settings.from_environment().datasets_dir), no_advance)


@contextmanager
def fetching(dataset: Dataset, *, show: bool | None) -> Iterator[Dataset]:
    """The dataset with a bar that counts the bytes fetched."""
    with progress_bar("fetching", None, show=show, is_bytes=True) as advance:
        yield replace(dataset, advance=advance)


def chosen_kinds(dataset: Dataset, tensors: Sequence[str] | None) -> tuple[str, ...]:
    """The kinds of tensors asked for, by default all that are there.

    Raises:
        InvalidInput: a name that is none.
    """
    manifest = dataset.manifest
    there = {HIDDEN: manifest.hidden is not None, LOGITS: manifest.logits is not None and bool(manifest.logits.shards)}
    if tensors is None:
        return tuple(kind for kind, is_there in there.items() if is_there)
    names = (tensors,) if isinstance(tensors, str) else tuple(tensors)
    if not names:
        raise InvalidInput(f"tensors must name some of {HIDDEN!r} and {LOGITS!r}, or be None for all.")
    if unknown := [name for name in names if name not in there]:
        raise InvalidInput(f"tensors are {HIDDEN!r} and {LOGITS!r}; got {', '.join(map(repr, unknown))}.")
    return names


def fetch_dataset_metadata(
    repo_id: str | Path,
    *,
    token: str | None = None,
    revision: str | None = None,
    endpoint: str | None = None,
    refresh: bool = False,
) -> DatasetInfo:
    """What is in a dataset, from the end of its index alone.

    Args:
        repo_id: ``user/name`` on the Hub, a folder (``./name``), or an ``s3://``, ``gs://``, ``az://`` address.
        token: Of the Hub; None takes ``HF_TOKEN`` or the one logged in.
        revision: Branch, tag or commit of the dataset on the Hub.
        endpoint: Address of the Hub; by default ``HF_ENDPOINT``, or the public one.
        refresh: Ask for the newest version, instead of the one that is on this machine.

    Raises:
        DatasetNotFound: no such dataset, or none that this token may see.
        Unsupported: a newer major version of the format.
        DatasetDamaged: an index that means nothing.
    """
    return DatasetInfo(open_dataset(repo_id, token=token, revision=revision, endpoint=endpoint, refresh=refresh))
