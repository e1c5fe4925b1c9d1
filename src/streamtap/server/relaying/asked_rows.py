"""Which rows a client asked for, held against those that a vLLM gives: every position, in the dtype it computes in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from streamtap.completion import CaptureAsk, Usage
from streamtap.engines.worker.whole import expected_positions
from streamtap.errors import CaptureMissed
from streamtap.server.checks import Plan
from streamtap.wire.counted import fed_positions

#: By their names in an envelope, and in a model's config.
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_WANTED: dict[str, np.dtype[Any]] = {"bfloat16": _BFLOAT16, "float32": np.dtype("<f4")}
_STORED: dict[str, np.dtype[Any]] = {"int16": _BFLOAT16, "float16": np.dtype("<f2"), "float32": np.dtype("<f4")}


@dataclass(frozen=True)
class AskedRows:
    """One capture of one prompt.

    ``engine_dtype`` is what the engine is taken to compute in, which tells bfloat16 from float16; ``steered`` whether a
    value that is not finite is the caller's doing.
    """

    capture: CaptureAsk
    hidden: int
    engine_dtype: str | None = None
    steered: bool = False

    @classmethod
    def of(cls, plan: Plan, capture: CaptureAsk) -> AskedRows:
        """Those of ``plan``."""
        facts = plan.served.facts
        return cls(capture, facts.hidden, facts.dtype, bool(plan.request.steering))

    @property
    def wanted(self) -> np.dtype[Any]:
        """The dtype that was asked for."""
        return _WANTED[self.capture.dtype]

    def shape(self, usage: Usage) -> tuple[int, int, int]:
        """What a whole capture of every position has: layers, rows, hidden."""
        return len(self.capture.layers), fed_positions(usage.prompt_tokens, usage.completion_tokens), self.hidden

    def positions(self, usage: Usage) -> NDArray[np.int32]:
        """The positions that are wanted, ascending."""
        return expected_positions(self.capture.positions, usage.prompt_tokens, usage.completion_tokens)

    def dtype_of(self, size: int, usage: Usage) -> np.dtype[Any]:
        """The dtype in which rows of every position come to ``size`` bytes.

        Raises:
            CaptureMissed: in none: a layer or a position lacks, or is too many.
        """
        shape = self.shape(usage)
        count = shape[0] * shape[1] * shape[2]
        if size == count * 4:
            return _STORED["float32"]
        if size != count * 2:
            raise CaptureMissed(
                f"the engine's rows are {size} bytes; {list(shape)} of them are {count * 2} in bfloat16 and "
                f"{count * 4} in float32; nothing of it is passed on as data.",
                layer=self.capture.layers[0],
            )
        return _STORED["float16" if self.engine_dtype == "float16" else "int16"]

    def check_declared(self, declared: Any, usage: Usage, dtype: np.dtype[Any]) -> None:
        """Hold what an envelope says of its data against what that was taken for.

        Raises:
            CaptureMissed: another shape or dtype.
        """
        said = declared if isinstance(declared, dict) else {}
        shape, name = said.get("shape"), said.get("dtype")
        if shape != list(self.shape(usage)) or _STORED.get(str(name)) != dtype:
            raise CaptureMissed(
                f"the engine declared rows of shape {shape} in {name}; expected {list(self.shape(usage))} in "
                f"{dtype.name}. Where the model runs in another dtype than its files say, set dtype in its table.",
                layer=self.capture.layers[0],
            )
