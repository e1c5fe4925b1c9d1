"""What NDIF does with a request: deserialise it, run it on the model, and serialise what it saved; all with nnsight."""

from __future__ import annotations

import importlib
import linecache
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from nnsight.intervention.serialization import CustomCloudUnpickler
from nnsight.schema.request import RequestModel
from nnsight.schema.response import ResponseModel, Status
from nnsight.tracing.globals import BLOCKS, SOURCES
from nnsight.tracing.tracer import _saves, dec, inc

from streamtap.codec import compress_file
from streamtap.engines.nnsight.wrapping import tree_over

#: What a server has beside Python's own: a request may need nothing else.
_INSTALLED = {"torch", "numpy", "transformers", "tokenizers", "accelerate", "nnsight", "cloudpickle", "pydantic"}


@dataclass(frozen=True, eq=False)
class Served:
    """A model that is served: nnsight's tree over it, with its weights."""

    model: Any

    @classmethod
    def over(cls, module: torch.nn.Module, tokenizer: Any) -> Served:
        """A loaded ``transformers`` model and its tokenizer."""
        return cls(tree_over(module, tokenizer).model)

    def run(self, blob: bytes, *, compress: bool, env: Mapping[str, Any]) -> bytes:
        """Run a serialised trace and give what it saved, as NDIF's client reads it.

        Raises:
            ModuleNotFoundError: it needs what no server has.
        """
        with _left_as_it_was(), torch.no_grad(), self._half():
            self.model._remoteable_set_env(dict(env))
            known = self.model._remoteable_persistent_objects()
            tracer = RequestModel.deserialize(blob, known, compress, _ServerUnpickler)
            saved = _saved(tracer)
        return _written(saved, compress)

    def _half(self) -> torch.autocast:
        """NDIF runs a request where operations are cast to the model's dtype, as a model in half precision trains."""
        module = self.model._module
        half = module.dtype in (torch.bfloat16, torch.float16)
        return torch.autocast(module.device.type, module.dtype if half else None, enabled=half)


class _ServerUnpickler(CustomCloudUnpickler):  # type: ignore[misc]
    """Finds only what is installed where a request runs, as if nothing of Streamtap were on this machine."""

    def find_class(self, module: str, name: str) -> Any:
        """As pickle's."""
        _check_installed(module)
        return (
            _subimport
            if (module, name) == ("cloudpickle.cloudpickle", "subimport")
            else super().find_class(module, name)
        )


def _subimport(name: str) -> Any:
    _check_installed(name)
    return importlib.import_module(name)


def _check_installed(module: str) -> None:
    root = module.split(".")[0]
    if root not in _INSTALLED and root not in sys.stdlib_module_names:
        raise ModuleNotFoundError(f"No module named {root!r}")


def _saved(tracer: Any) -> dict[str, Any]:
    inc()
    try:
        tracer.execute(tracer.info.code)
        marked = _saves()
        return {name: value for name, value in tracer.info.frame.f_locals.items() if id(value) in marked}
    finally:
        dec()


class _Saved(ResponseModel):  # type: ignore[misc]
    """Saved values alone, for nnsight's own way of writing them."""

    def model_dump(self, **_: Any) -> Any:
        """The values."""
        return self.data


def _written(saved: dict[str, Any], compress: bool) -> bytes:
    blob: bytes = _Saved(id="", status=Status.COMPLETED, data=saved).pickle()
    if not compress:
        return blob
    with tempfile.TemporaryDirectory() as folder:
        raw, packed = Path(folder, "raw"), Path(folder, "packed")
        raw.write_bytes(blob)
        compress_file(raw, packed)
        return packed.read_bytes()


@contextmanager
def _left_as_it_was() -> Iterator[None]:
    """Nnsight remembers sources by file and line: a request's must not be taken for those of this process."""
    tables: tuple[Any, ...] = (linecache.cache, SOURCES, BLOCKS)
    before = [dict(table) for table in tables]
    try:
        yield
    finally:
        for table, kept in zip(tables, before, strict=True):
            table.clear()
            table.update(kept)
