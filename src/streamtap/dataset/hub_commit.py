"""The one commit that makes a dataset visible, though connections break and others commit too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from streamtap.dataset.hub_calls import HubCalls
from streamtap.dataset.hub_head import BRANCH, Head, look_at
from streamtap.errors import DatasetExists, DatasetNotFound, TransferFailed

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd
    from huggingface_hub.errors import HfHubHTTPError

_STALE_PARENT = 412
#: The server says by these that it did nothing.
_NOT_APPLIED = {429, _STALE_PARENT}
_MOST_STALE = 5


class HubCommit:
    """One commit on top of ``seen``, made at most once.

    The parent goes with it, so the server refuses it where the branch is elsewhere: because somebody
    else was faster, or because an earlier try, whose answer was lost, was applied after all.
    """

    def __init__(
        self,
        calls: HubCalls,
        seen: Head,
        additions: Sequence[CommitOperationAdd],
        stale: Sequence[str],
        message: str,
    ) -> None:
        self._calls = calls
        self._seen = seen
        self._parent = seen
        self._additions = list(additions)
        added = {addition.path_in_repo for addition in additions}
        self._stale = [path for path in dict.fromkeys(stale) if path not in added]
        self._message = message
        self._n_stale = 0
        # Nothing was tried yet, but what was seen may be old: a commit without a change would be no error.
        self._may_be_there = seen.holds(self._additions, self._stale)
        self._result = seen.commit

    def make(self) -> str | None:
        """Make it, unless the branch holds all of it already, and give the commit that holds it, if there is any.

        Raises:
            DatasetExists: somebody else changed the dataset since it was seen.
            TransferFailed: the server failed for too long, or (``AccessDenied``) refuses us.
        """
        self._calls.call(f"publishing to {self._calls.repo_id}", self._make)
        return self._result

    def _make(self) -> None:
        while not (self._may_be_there and self._is_there()):
            if self._try():
                return

    def _try(self) -> bool:
        """Whether the server took the commit; False if its parent is stale."""
        from huggingface_hub.errors import HfHubHTTPError

        self._may_be_there = True
        try:
            self._send()
        except HfHubHTTPError as error:
            self._may_be_there = _status(error) not in _NOT_APPLIED
            if _status(error) != _STALE_PARENT:
                raise
        else:
            return True
        self._n_stale += 1
        if self._n_stale > _MOST_STALE:
            raise TransferFailed(
                f"publishing to {self._calls.repo_id}: others commit to it all the time; run it again later, "
                "what was sent need not be sent again."
            )
        self._may_be_there = True
        return False

    def _send(self) -> None:
        from huggingface_hub import CommitOperationDelete

        removed = [CommitOperationDelete(path, is_folder=False) for path in self._stale if path in self._parent.files]
        made = self._calls.api.create_commit(
            self._calls.repo_id,
            [*self._additions, *removed],
            commit_message=self._message,
            repo_type="dataset",
            revision=BRANCH,
            parent_commit=self._parent.commit,
        )
        self._result = made.oid

    def _is_there(self) -> bool:
        """Look again: whether all is there already; if not, the commit goes on top of what is there now."""
        head = look_at(self._calls)
        if head is None:
            raise DatasetNotFound(f"{self._calls.repo_id} was on the Hub when this began, and is no longer.")
        if head.holds(self._additions, self._stale):
            self._result = head.commit
            return True
        if head.commit != self._parent.commit and head.ours() != self._seen.ours():
            raise DatasetExists(
                f"somebody else published to {self._calls.repo_id} in the meantime (commit {head.commit}); "
                "look at what they did, and run it again to replace it."
            )
        self._parent = head
        self._may_be_there = False
        return False


def _status(error: HfHubHTTPError) -> int:
    return int(error.response.status_code)
