"""Settings from the environment, read once at the edge.

Library classes take plain arguments; this is where their defaults come from, and the only
module that looks at the environment:

=========================  ========================================================
``STREAMTAP_CACHE_DIR``    folder of the cache (else ``$XDG_CACHE_HOME/streamtap``, else ``~/.cache/streamtap``)
``STREAMTAP_PROGRESS``     progress bars: ``auto`` (only on a terminal), ``on`` or ``off``
``STREAMTAP_WORKER_KEY``   key that an engine process asks of its gateway (else it asks for none)
``AWS_ENDPOINT_URL``       address of an S3 server, which its client reads itself; here it tells buckets apart, as do
                           the variables that name an Azure account or another server for Azure or Google
``HF_ENDPOINT``            address of the Hub (else the public one)
``HF_HUB_CACHE``           folder of what was downloaded from the Hub (else ``$HF_HOME/hub``, else its default)
``STREAMTAP_API_BASE``     address of the server that a client asks; it ends in ``/v1`` (else ``ACS_API_BASE``)
``STREAMTAP_API_KEY``      key for it (else ``ACS_API_KEY``, unless that one's address is another server's)
``NDIF_API_KEY``           key for NDIF, which runs models that do not fit here
=========================  ========================================================
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Literal, get_args

from streamtap.errors import SettingsError

Progress = Literal["auto", "on", "off"]

#: What leads the client of object stores to one server or another, by scheme. A bucket's name is unique on one S3 or
#: Google server, a container's within one account of Azure.
_SERVER_VARIABLES = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": (
        *("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT", "AZURE_USE_FABRIC_ENDPOINT"),
        *("AZURE_STORAGE_USE_EMULATOR", "AZURITE_BLOB_STORAGE_URL"),
    ),
}


@dataclass(frozen=True)
class Settings:
    """What the environment decides; absolute paths, which need not exist yet.

    ``store_servers`` tells servers and accounts of object stores apart, by scheme; it is no address to connect to.
    """

    cache_dir: Path
    hub_cache_dir: Path
    progress: Progress = "auto"
    hub_endpoint: str | None = None
    store_servers: Mapping[str, str] = field(default_factory=dict, hash=False, repr=False)
    worker_key: str | None = field(default=None, repr=False)
    api_base: str | None = field(default=None, repr=False)
    api_key: str | None = field(default=None, repr=False)
    ndif_api_key: str | None = field(default=None, repr=False)

    @property
    def activations_dir(self) -> Path:
        """Folder of the store of activations."""
        return self.cache_dir / "activations"

    @property
    def models_dir(self) -> Path:
        """Folder of the models that Streamtap makes itself."""
        return self.cache_dir / "models"

    @property
    def datasets_dir(self) -> Path:
        """Folder of what was fetched of datasets that the Hub's own cache cannot hold: single rows, other stores."""
        return self.cache_dir / "datasets"

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Read ``environ``, by default the process's own; an empty value counts as unset.

        Raises:
            SettingsError: a value that means nothing; the message names its variable.
        """
        env = os.environ if environ is None else environ
        return cls(
            cache_dir=_folder(env, "STREAMTAP_CACHE_DIR") or _user_cache(env) / "streamtap",
            hub_cache_dir=_hub_cache(env),
            progress=_progress(env),
            hub_endpoint=_address(env, "HF_ENDPOINT") or None,
            store_servers=_store_servers(env),
            worker_key=env.get("STREAMTAP_WORKER_KEY", "").strip() or None,
            api_base=_api_base(env) or None,
            api_key=_api_key(env) or None,
            ndif_api_key=env.get("NDIF_API_KEY", "").strip() or None,
        )


#: For a process whose model runs beside other work. A pass ends with its slowest thread, for which GNU's OpenMP has the
#: others spin for milliseconds: time in which rows could be written. After this many turns they sleep.
BESIDE_OTHER_WORK: Mapping[str, str] = MappingProxyType({"GOMP_SPINCOUNT": "20000"})


def child_environment(usual: Mapping[str, str], **added: str) -> dict[str, str]:
    """For a process that this one starts: its own environment, ``added``, and ``usual`` where neither has a value."""
    return {**usual, **os.environ, **added}


@contextmanager
def defaults(**values: str) -> Iterator[None]:
    """For the length of a block, give variables values where they have none, for a library that reads them itself."""
    lacking = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(lacking)
    try:
        yield
    finally:
        for name in lacking:
            os.environ.pop(name, None)


def _address(env: Mapping[str, str], variable: str) -> str:
    return env.get(variable, "").strip().rstrip("/")


def _api_base(env: Mapping[str, str]) -> str:
    return _address(env, "STREAMTAP_API_BASE") or _address(env, "ACS_API_BASE")


def _api_key(env: Mapping[str, str]) -> str:
    if own := env.get("STREAMTAP_API_KEY", "").strip():
        return own
    # A key goes only to the server that it was set beside.
    elsewhere = _address(env, "ACS_API_BASE") not in ("", _api_base(env))
    return "" if elsewhere else env.get("ACS_API_KEY", "").strip()


def _store_servers(env: Mapping[str, str]) -> dict[str, str]:
    # All that is set, for which of two the client takes depends on their order in the environment.
    told = {
        scheme: [f"{variable}={value}" for variable in variables if (value := _address(env, variable))]
        for scheme, variables in _SERVER_VARIABLES.items()
    }
    return {scheme: " ".join(values) for scheme, values in told.items() if values}


def _hub_cache(env: Mapping[str, str]) -> Path:
    if explicit := _folder(env, "HF_HUB_CACHE"):
        return explicit
    return (_folder(env, "HF_HOME") or _user_cache(env) / "huggingface") / "hub"


def _user_cache(env: Mapping[str, str]) -> Path:
    # The XDG specification says that a relative path is to be ignored.
    xdg = env.get("XDG_CACHE_HOME", "")
    return Path(xdg) if os.path.isabs(xdg) else _home(env) / ".cache"


def _folder(env: Mapping[str, str], variable: str) -> Path | None:
    value = env.get(variable, "").strip()
    if not value:
        return None
    path = _home(env) / value[2:] if value == "~" or value.startswith("~/") else Path(os.path.abspath(value))
    if path.exists() and not path.is_dir():
        raise SettingsError(f"{variable} must name a folder; {path} is a file. Set it to another path.")
    return path


def _home(env: Mapping[str, str]) -> Path:
    if home := env.get("HOME", ""):
        return Path(home)
    try:
        return Path.home()
    except RuntimeError as error:
        raise SettingsError(
            "STREAMTAP_CACHE_DIR is not set and this user has no home folder; set it to the folder to cache in."
        ) from error


def _progress(env: Mapping[str, str]) -> Progress:
    value = env.get("STREAMTAP_PROGRESS", "").strip().lower() or "auto"
    for known in get_args(Progress):
        if value == known:
            return known  # type: ignore[no-any-return]
    raise SettingsError(f"STREAMTAP_PROGRESS must be auto, on or off; got {value!r}.")
