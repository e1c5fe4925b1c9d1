"""How a named model is loaded, and by what."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from streamtap.engines.opening import check_backend
from streamtap.errors import InvalidInput

_LOADING = ("revision", "dtype", "device", "device_map", "quantization", "attention", "batch_size", "max_batch_tokens")
#: What each backend's engine takes of the fields below; a batch is vLLM's own business, and a service's.
_TAKEN = {
    "local": _LOADING,
    "nnsight": (*_LOADING, "remote", "api_key"),
    "vllm": ("revision", "dtype"),
    "api": ("revision", "dtype", "api_base", "api_key"),
}
#: It has a default that is not None, so that it cannot be told whether it was asked for.
_UNTOLD = "batch_size"


@dataclass(frozen=True)
class LoadOptions:
    """How a named model is loaded; see ``load_engine``. ``engine_options`` are more of the backend's own."""

    revision: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    device_map: Any = None
    quantization: Any = None
    attention: str | None = None
    batch_size: int | None = None
    max_batch_tokens: int | None = None
    backend: str = "local"
    remote: bool | str = False
    api_base: str | None = None
    api_key: str | None = field(default=None, repr=False)
    engine_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse what the backend has no use for.

        Raises:
            InvalidInput: no such backend, an option that means nothing to it, or one of these in ``engine_options``.
            Unsupported: ``remote`` with another backend than nnsight's.
        """
        check_backend(self.backend, remote=bool(self.remote))
        own = [name for name in self.engine_options if name in OWN_OPTIONS]
        # There it would be set behind the back of whatever is kept under the option.
        if misplaced := [name for name in own if name in (*_TAKEN[self.backend], "backend")]:
            named = ", ".join(f"{name}=" for name in misplaced)
            raise InvalidInput(f"{', '.join(misplaced)} cannot stand in engine_options: pass {named} beside them.")
        taken = (*_TAKEN[self.backend], "backend", "engine_options", _UNTOLD)
        if idle := [name for name in self.asked() if name not in taken] + own:
            raise InvalidInput(
                f"{', '.join(idle)} mean{'s' * (len(idle) == 1)} nothing to backend={self.backend!r}; it takes "
                f"{', '.join(_TAKEN[self.backend])}, and its engine's own in engine_options."
            )

    def asked(self) -> list[str]:
        """The options that were given."""
        return [each.name for each in fields(self) if each.name != _UNTOLD and not _is_default(self, each.name)]

    def arguments(self) -> dict[str, Any]:
        """What ``load_engine`` is called with, beside the model's name."""
        own = {name: getattr(self, name) for name in _TAKEN[self.backend]}
        return {"backend": self.backend, **own, **self.engine_options}


#: What loading has by itself, so that it cannot stand in ``engine_options``.
OWN_OPTIONS = frozenset(each.name for each in fields(LoadOptions)) - {"engine_options"}


def _is_default(options: LoadOptions, name: str) -> bool:
    value = getattr(options, name)
    if name == "engine_options":
        return not value
    return bool(value is None or value == getattr(LoadOptions, name, None))
