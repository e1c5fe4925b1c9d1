"""``HarvestAsk``: what a harvest keeps of its prompts, checked once against the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from streamtap.errors import InvalidInput
from streamtap.layers import LayerSpec, resolve_layers
from streamtap.pooling import Pooling
from streamtap.positions import PositionSpec
from streamtap.spec import CaptureSpec, Projection

Compression = Literal["none", "zstd"]
RowDtype = Literal["bfloat16", "float32"]
MOST_SHARD_PROMPTS = 4096
MOST_BATCH_PROMPTS = 64
MOST_DIRECTIONS = 64


@dataclass(frozen=True)
class HarvestAsk:
    """What to keep; names and bounds are those of CONTRACT section 7.

    Args:
        layers: A layer spec; None is a quarter, a half and three quarters of the depth.
        positions: ``"all"``, ``"last"``, or positions; which tokens have a row.
        pooling: Many rows of a prompt to one, or ``none``.
        projection: Keep each row's products with these directions in float32, instead of the row.
        add_special_tokens: Whether text gets the tokenizer's BOS and the like.
        shard_size: Prompts in a file.
        batch_size: Prompts in a pass at most; None leaves it to the engine.
        compression: ``"zstd"`` packs each file.
        dtype: ``"bfloat16"`` or ``"float32"`` of the rows in the files.

    Raises:
        InvalidInput: a value that cannot be.
    """

    layers: LayerSpec | None = None
    positions: PositionSpec = "all"
    pooling: Pooling = "none"
    projection: Projection | None = None
    add_special_tokens: bool = True
    shard_size: int = 32
    batch_size: int | None = None
    compression: Compression = "none"
    dtype: RowDtype = "bfloat16"

    def __post_init__(self) -> None:
        """Check each value once."""
        self.spec(0)
        _check_whole("shard_size", self.shard_size, MOST_SHARD_PROMPTS)
        if self.batch_size is not None:
            _check_whole("batch_size", self.batch_size, MOST_BATCH_PROMPTS)
        if self.compression not in ("none", "zstd"):
            raise InvalidInput(f"compression must be 'none' or 'zstd'; got {self.compression!r}.")
        if callable(self.positions) or (isinstance(self.positions, str) and self.positions.startswith("role:")):
            raise InvalidInput(
                "positions of a harvest are 'all', 'last', a range or numbers: the same for every prompt."
            )
        if self.projection is not None and len(self.projection.directions) > MOST_DIRECTIONS:
            raise InvalidInput(
                f"a harvest projects onto at most {MOST_DIRECTIONS} directions; got {len(self.projection.directions)}."
            )

    def layer_indices(self, n_layers: int) -> tuple[int, ...]:
        """The layers of a model of that depth, ascending.

        Raises:
            InvalidLayers: they do not fit it.
        """
        if self.layers is None:
            return tuple(sorted({n_layers // 4, n_layers // 2, 3 * n_layers // 4}))
        found = resolve_layers(self.layers, n_layers)
        if not found:
            raise InvalidInput("a harvest needs at least one layer; layers is empty.")
        return found

    def spec(self, n_layers: int) -> CaptureSpec:
        """What the engine is asked for; of ``n_layers`` 0 it names no layers."""
        return CaptureSpec(
            layers=self.layer_indices(n_layers) if n_layers else (),
            positions=self.positions,
            pooling=self.pooling,
            dtype=None if self.projection is not None else self.dtype,
            projection=self.projection,
        )

    @property
    def contents(self) -> str:
        """What the files hold: ``"activations"`` or ``"projections"``."""
        return "activations" if self.projection is None else "projections"

    @property
    def row_dtype(self) -> str:
        """Of the rows in the files."""
        return self.dtype if self.projection is None else "float32"

    def capture(self) -> dict[str, Any]:
        """``capture`` of the manifest."""
        positions = self.positions
        shown = positions if isinstance(positions, str) else _numbers(positions)
        return {"positions": shown, "pooling": self.pooling}


def _numbers(positions: Any) -> Sequence[int]:
    return [int(each) for each in positions] if hasattr(positions, "__iter__") else [int(positions)]


def _check_whole(name: str, value: Any, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise InvalidInput(f"{name} must be a whole number, 1 to {most}; got {value!r}.")
