"""Whether an engine's rows are the model's: held against the float32 reference, layer by layer. It needs no torch.

Two numbers tell of a layer. Its cosine is the least between a row and the reference's. Its relative error is
‖difference‖ / ‖reference‖ over its rows, of the first position and of all others apart, whichever is larger: in many
models the first position's row is hundreds of times as long as any other, and would hide them.

What is promised, against the plain model in float32 on a CPU:

============  ================  =======================
computed in   cosine, at least  relative error, at most
============  ================  =======================
float32       0.99999           0.001
float16       0.999             0.02
bfloat16      0.95              0.15
============  ================  =======================

That of bfloat16 holds for the prompt of a self-check, 24 tokens of plain words: of long random prompts a healthy engine
gives single rows at a cosine of 0.9.

In half precision they are wide for the sake of single rows: some models lengthen a row a hundredfold, or do not, over a
difference that is mere rounding. A layer that is its neighbour's does not hide in them: it is found by which of the
two it is nearer to. float64 is held to the promise of float32. Quantised weights are another model, for which nothing
is promised.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from streamtap.activations import join
from streamtap.engines.base import Engine
from streamtap.engines.self_check_reference import Reference
from streamtap.errors import CaptureMissed, InvalidInput, InvalidLayers, Unsupported
from streamtap.spec import CaptureSpec, Prompt

Rows = NDArray[Any]
Wide = NDArray[np.float64]
Verdict = Literal["fits", "differs", "shifted", "zeros", "not finite"]


@dataclass(frozen=True)
class Tolerance:
    """The least cosine of a row, and the largest relative error of a layer, that pass."""

    cosine: float
    relative: float

    def holds(self, cosine: float, relative: float) -> bool:
        """Whether both are within it."""
        return cosine >= self.cosine and relative <= self.relative


#: By the dtype that an engine computes in, the narrowest promise first.
TOLERANCES: dict[str, Tolerance] = {
    "float64": Tolerance(0.99999, 0.001),
    "float32": Tolerance(0.99999, 0.001),
    "float16": Tolerance(0.999, 0.02),
    "bfloat16": Tolerance(0.95, 0.15),
}


@dataclass(frozen=True)
class LayerCheck:
    """One layer against the reference; both numbers are NaN where a value is not finite.

    ``nearest`` is the layer of the reference, this one or a neighbour, whose output it is; None where it is neither's.
    """

    layer: int
    cosine: float
    relative: float
    verdict: Verdict
    nearest: int | None


@dataclass(frozen=True)
class SelfCheck:
    """What came of it: ``fault`` is one sentence that names the engine and the layer, None where all is well.

    ``layers`` is empty where there were no rows that could be compared.
    """

    engine: str
    dtype: str
    tolerance: Tolerance
    layers: tuple[LayerCheck, ...] = field(repr=False)
    fault: str | None

    @property
    def passed(self) -> bool:
        """Whether the engine gives the model's rows."""
        return self.fault is None


def check_engine(engine: Engine, reference: Reference, *, name: str) -> SelfCheck:
    """Run the reference's prompt on ``engine`` and compare; ``name`` is what the engine is called in the fault.

    Raises:
        InvalidInput: nothing is promised for the dtype that the engine computes in.
        Unsupported: its weights are quantised.
        StreamtapError: what else keeps the engine from a capture, such as a network.
    """
    dtype, quantised = engine.provenance.dtype, engine.provenance.quantization
    if quantised is not None:
        raise Unsupported(f"{name} has quantised weights ({quantised}): it is not the model that the reference runs.")
    tolerance_of(dtype)
    try:
        parts = list(engine.capture([Prompt(token_ids=reference.token_ids)], CaptureSpec(layers="all")))
    except (CaptureMissed, InvalidLayers) as error:
        return refused(error, name=name, dtype=dtype)
    whole = join(parts)
    rows = np.stack([whole.acts[layer] for layer in whole.layers])
    # A service may narrow rows on the way, whatever its model computes in.
    return compare(rows, reference.rows, name=name, dtype=_looser(dtype, rows.dtype.name))


def refused(error: CaptureMissed | InvalidLayers, *, name: str, dtype: str = "float32") -> SelfCheck:
    """The outcome of a capture that the engine itself, or whoever read its answer, found not to be whole."""
    return SelfCheck(name, dtype, tolerance_of(dtype), (), f"{name} gives no whole capture: {error}")


def compare(rows: Rows, reference: Rows, *, name: str, dtype: str) -> SelfCheck:
    """Hold ``rows`` [layers, tokens, hidden], computed in ``dtype``, against ``reference`` of that shape.

    Raises:
        InvalidInput: nothing is promised for ``dtype``.
    """
    tolerance = tolerance_of(dtype)
    if (misfit := _misfit(rows, reference, name)) is not None:
        return SelfCheck(name, dtype, tolerance, (), misfit)
    checks = _with_shift([_layer(k, rows, reference, tolerance) for k in range(len(rows))])
    return SelfCheck(name, dtype, tolerance, tuple(checks), _fault(checks, rows, reference, name, dtype))


def tolerance_of(dtype: str) -> Tolerance:
    """What is promised of an engine that computes in ``dtype``.

    Raises:
        InvalidInput: nothing is.
    """
    if dtype not in TOLERANCES:
        raise InvalidInput(f"nothing is promised for engines that compute in {dtype!r}, only for {_names()}.")
    return TOLERANCES[dtype]


def _names() -> str:
    return ", ".join(TOLERANCES)


def _looser(one: str, other: str) -> str:
    order = list(TOLERANCES)
    return max(one, other, key=order.index) if other in order else one


def _misfit(rows: Rows, reference: Rows, name: str) -> str | None:
    """What is wrong with the shape of the rows, in words."""
    if rows.ndim != 3:
        return f"{name} gives rows of {rows.ndim} axes; expected layers, tokens and hidden"
    for axis, what in ((0, "layers"), (2, "values a row"), (1, "rows a layer")):
        if rows.shape[axis] != reference.shape[axis]:
            return f"{name} gives {rows.shape[axis]} {what}; the reference has {reference.shape[axis]}"
    return None


def _layer(layer: int, rows: Rows, reference: Rows, tolerance: Tolerance) -> LayerCheck:
    mine = rows[layer].astype(np.float64)
    if not np.isfinite(mine).all():
        return LayerCheck(layer, float("nan"), float("nan"), "not finite", None)
    cosine, relative = _measured(mine, reference[layer])
    if _zero_rows(mine, reference[layer]):
        return LayerCheck(layer, cosine, relative, "zeros", None)
    nearest = layer if tolerance.holds(cosine, relative) else None
    least = relative
    for near in (layer - 1, layer + 1):
        if 0 <= near < len(rows):
            of_near = _measured(mine, reference[near])
            if of_near[1] < least and tolerance.holds(*of_near):
                nearest, least = near, of_near[1]
    # Rounding takes rows away from a neighbour as it does from their own layer, so that half as far is no accident.
    if tolerance.holds(cosine, relative) and not (nearest != layer and least <= relative / 2):
        return LayerCheck(layer, cosine, relative, "fits", nearest)
    return LayerCheck(layer, cosine, relative, "differs" if nearest is None else "shifted", nearest)


def _measured(mine: Wide, right: Rows) -> tuple[float, float]:
    """The least cosine of a row [tokens, hidden], and the larger relative error of the first row and of the rest."""
    wide = right.astype(np.float64)
    lengths = np.linalg.norm(mine, axis=1) * np.linalg.norm(wide, axis=1)
    both_zero = np.array(~mine.any(axis=1) & ~wide.any(axis=1), np.float64)
    cosines = np.divide((mine * wide).sum(axis=1), lengths, out=both_zero, where=lengths > 0)
    parts = [part for part in (slice(0, 1), slice(1, None)) if len(wide[part])]
    return float(cosines.min()), max(_relative(mine[part], wide[part]) for part in parts)


def _relative(mine: Wide, right: Wide) -> float:
    length, apart = float(np.linalg.norm(right)), float(np.linalg.norm(mine - right))
    if not length:
        return float("inf") if apart else 0.0
    return apart / length


def _zero_rows(mine: Wide, right: Rows) -> int:
    """How many rows are zero where the reference's are not."""
    return int((~mine.any(axis=1) & right.any(axis=1)).sum())


def _with_shift(checks: list[LayerCheck]) -> list[LayerCheck]:
    """The same, with every layer told that is one off where most are, however near to its own it may be."""
    for step in (-1, 1):
        off = [check for check in checks if check.nearest == check.layer + step]
        if 2 * len(off) > len(checks) - 1:
            return [
                LayerCheck(check.layer, check.cosine, check.relative, "shifted", check.nearest)
                if check in off
                else check
                for check in checks
            ]
    return checks


def _fault(checks: list[LayerCheck], rows: Rows, reference: Rows, name: str, dtype: str) -> str | None:
    """The first layer that does not fit, and what is wrong with it; a shift of all is told before what it causes."""
    wrong = [check for check in checks if check.verdict != "fits"]
    if not wrong:
        return None
    shifted = [check for check in wrong if check.verdict == "shifted"]
    first = shifted[0] if 2 * len(shifted) > len(checks) - 1 else wrong[0]
    alike = sum(check.verdict == first.verdict for check in wrong)
    of_all = f"; so it is with {alike} of {len(checks)} layers" if alike > 1 else ""
    return f"layer {first.layer} of {name} {_told(first, rows, reference, dtype)}{of_all}"


def _told(check: LayerCheck, rows: Rows, reference: Rows, dtype: str) -> str:
    if check.verdict == "not finite":
        return "holds a value that is not finite"
    if check.verdict == "zeros":
        count, of = _zero_rows(rows[check.layer].astype(np.float64), reference[check.layer]), rows.shape[1]
        return "holds only zeros" if count == of else f"is zero at {count} of {of} positions"
    if check.verdict == "shifted":
        return f"is layer {check.nearest}'s output: it is shifted by one"
    promised = TOLERANCES[dtype]
    return (
        f"is not the model's: cosine {check.cosine:.6f} and relative error {check.relative:.2g}, where {dtype} is to "
        f"have {promised.cosine} at least and {promised.relative} at most"
    )
