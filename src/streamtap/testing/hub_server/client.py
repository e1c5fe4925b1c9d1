"""The real client, told in a running process what its environment would have told it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from streamtap.errors import MissingExtra
from streamtap.testing.hub_server.server import HubServer

#: What `datasets` reads once more into its own settings.
_DATASETS = "datasets.config"


@contextmanager
def online_client(hub: HubServer) -> Iterator[None]:
    """Let ``huggingface_hub`` and ``datasets`` of this process talk to ``hub``, and to nothing else.

    Both read their environment when they are imported, so a process that was started with ``HF_HUB_OFFLINE=1`` stays
    offline. Inside this context they are online, ``hub.endpoint`` is used whether or not it is named, and Xet is used
    when ``hub`` has it. These settings are the process's, so one context at a time. ``datasets`` must be imported
    before, or it reads its environment again. The token is not set: hand it over, or set ``HF_TOKEN``, which is read at
    each call. Neither is the cache: hand over ``cache_dir``.

    Raises:
        MissingExtra: ``huggingface_hub`` is not installed.
    """
    try:
        from huggingface_hub import close_session, constants, hf_api
    except ImportError as error:
        raise MissingExtra("talking to a Hub needs huggingface_hub: pip install 'streamtap[hub]'.") from error
    changes: dict[str, Any] = {
        "HF_HUB_OFFLINE": False,
        "HF_HUB_DISABLE_XET": not hub.xet,
        "HF_HUB_DISABLE_TELEMETRY": True,
        "ENDPOINT": hub.endpoint,
        "HUGGINGFACE_CO_URL_TEMPLATE": hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}",
    }
    with ExitStack() as stack:
        stack.callback(close_session)
        stack.enter_context(_changed(constants, changes))
        stack.enter_context(_changed(hf_api.api, {"endpoint": hub.endpoint}))  # behind the functions of the package
        if _DATASETS in sys.modules:
            stack.enter_context(_changed(sys.modules[_DATASETS], _datasets_changes(hub)))
        close_session()
        yield


@contextmanager
def _changed(place: object, values: dict[str, Any]) -> Iterator[None]:
    before = {name: getattr(place, name) for name in values}
    try:
        for name, value in values.items():
            setattr(place, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(place, name, value)


def _datasets_changes(hub: HubServer) -> dict[str, Any]:
    return {
        "HF_HUB_OFFLINE": False,
        "HF_DATASETS_OFFLINE": False,
        "HF_ENDPOINT": hub.endpoint,
        "HUB_DATASETS_URL": hub.endpoint + "/datasets/{repo_id}/resolve/{revision}/{path}",
    }
