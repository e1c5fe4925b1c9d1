"""``upgrade_dataset_format`` and ``verify_dataset``: look after datasets that are published already."""

from __future__ import annotations

import warnings
from pathlib import Path

from streamtap.dataset.opening import open_target
from streamtap.dataset.upgrade import upgrade
from streamtap.dataset.verify import VerifiedDataset, verify
from streamtap.workbench.open_dataset import fetching, open_dataset


def upgrade_dataset_format(
    repo_id: str | Path,
    token: str | None = None,
    remove_json: bool = True,
    dry_run: bool = False,
    *,
    endpoint: str | None = None,
) -> str:
    """Bring a dataset of format 1.x to 2.0 and return its address; the index alone is written, no tensor moves.

    A dataset of version 2 is left as it is.

    Args:
        repo_id: ``user/name`` on the Hub, a folder (``./name``), or an ``s3://``, ``gs://``, ``az://`` address.
        token: Of the Hub; None takes ``HF_TOKEN`` or the one logged in.
        remove_json: Delete the old metadata file in the same step.
        dry_run: Read everything and change nothing.
        endpoint: Address of the Hub; by default ``HF_ENDPOINT``, or the public one.

    Raises:
        DatasetNotFound: no dataset there, or none that this token may see.
        TransferFailed: the server failed for too long; nothing was changed.
    """
    with warnings.catch_warnings():
        # The hint to upgrade, which is being done.
        warnings.filterwarnings("ignore", message=".*streamtap dataset upgrade.*")
        return upgrade(open_target(repo_id, token=token, endpoint=endpoint), remove_json=remove_json, dry_run=dry_run)


def verify_dataset(
    repo_id: str | Path,
    token: str | None = None,
    *,
    show_progress: bool | None = None,
    revision: str | None = None,
    endpoint: str | None = None,
    refresh: bool = False,
) -> VerifiedDataset:
    """Fetch a whole dataset and compare every file with its manifest and index; nothing is changed.

    The arguments are those of ``load_activations``.

    Raises:
        DatasetNotFound: no dataset there, or none that this token may see.
        TransferFailed: the server failed for too long.
    """
    opened = open_dataset(repo_id, token=token, revision=revision, endpoint=endpoint, refresh=refresh)
    with fetching(opened, show=show_progress) as dataset:
        return verify(dataset)
