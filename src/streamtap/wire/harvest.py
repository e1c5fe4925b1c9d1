"""The body of a bulk harvest, CONTRACT section 7: every field with its bounds, and what it asks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, cast

import numpy as np
from pydantic import BaseModel, Field, ValidationError

from streamtap.codec import decode
from streamtap.errors import InvalidInput, InvalidLayers
from streamtap.pooling import Pooling
from streamtap.spec import Projection
from streamtap.wire.harvest_fields import HarvestLayersField, HarvestPositionsField, PromptsField
from streamtap.wire.problems import StrictModel, kind_of, refusal
from streamtap.wire.reading import read_json

#: Prompts in a file where the body does not say.
SHARD_SIZE = 32
MOST_SHARD_PROMPTS = 4096
MOST_BATCH_PROMPTS = 64
MOST_DIRECTIONS = 64
_MOST_WIDTH = 2**31 - 1

_Directions = Annotated[int, Field(ge=1, le=MOST_DIRECTIONS)]
_Width = Annotated[int, Field(ge=1, le=_MOST_WIDTH)]


class DirectionsField(StrictModel):
    """``project_onto``: directions that rows are multiplied with."""

    data: str = Field(description="base64 of the values, C order, little-endian", min_length=1)
    dtype: Literal["float32", "float16", "bfloat16"] = Field(description="'float32', 'float16' or 'bfloat16'")
    shape: tuple[_Directions, _Width] = Field(
        description=f"[directions, hidden], 1 to {MOST_DIRECTIONS} directions", strict=False
    )
    compression: Literal["none"] | None = Field(None, description="'none'")

    def projection(self) -> Projection:
        """The directions, each scaled to unit length.

        Raises:
            InvalidInput: the data is broken or of another size, or a direction is zero or not finite.
        """
        values = decode(self.data, dtype=self.dtype, original_dtype=None, shape=self.shape, compression="none")
        return Projection.onto(values.astype(np.float32))


class HarvestBody(StrictModel):
    """POST /v1/harvest. A field that is null is as if it were not there."""

    model: str = Field(description="a model's id as a string; GET /v1/models lists them")
    prompts: PromptsField = Field(description="a list of strings, or of lists of token ids, none of them empty")
    layers: HarvestLayersField = Field(None, description="'all' or a list of layer numbers")
    shard_size: Annotated[int, Field(ge=1, le=MOST_SHARD_PROMPTS)] | None = Field(
        None, description=f"a whole number from 1 to {MOST_SHARD_PROMPTS}"
    )
    batch_size: Annotated[int, Field(ge=1, le=MOST_BATCH_PROMPTS)] | None = Field(
        None, description=f"a whole number from 1 to {MOST_BATCH_PROMPTS}"
    )
    add_special_tokens: bool | None = Field(None, description="true or false")
    positions: HarvestPositionsField = Field(None, description="'all', 'last' or a list of positions")
    pooling: Pooling | None = Field(None, description="'none', 'last_token', 'first_token', 'mean' or 'max'")
    project_onto: DirectionsField | None = Field(
        None, description="an object with data, dtype, shape and compression 'none'"
    )


@dataclass(frozen=True, eq=False)
class HarvestRequest:
    """What a job is asked for, as ``harvest.asked.HarvestAsk`` has it.

    ``prompts`` are all texts or all token ids; ``layers`` is ``"all"``, numbers ascending, or None for a quarter, a
    half and three quarters of the depth; ``positions`` is ``"all"``, ``"last"`` or numbers, of which negative ones
    count from a prompt's end; ``projection`` holds unit directions, float32 [directions, hidden].
    """

    model: str
    prompts: tuple[str | tuple[int, ...], ...] = field(repr=False)
    layers: Literal["all"] | tuple[int, ...] | None = None
    shard_size: int = SHARD_SIZE
    batch_size: int | None = None
    add_special_tokens: bool = True
    positions: Literal["all", "last"] | tuple[int, ...] = "all"
    pooling: Pooling = "none"
    projection: Projection | None = None

    def check_fits(self, *, n_layers: int, hidden: int) -> None:
        """Refuse what a model of that depth and width cannot do.

        Raises:
            InvalidLayers: a layer that it lacks.
            InvalidInput: directions of another width.
        """
        if isinstance(self.layers, tuple) and max(self.layers) >= n_layers:
            raise InvalidLayers(f"layers names layer {max(self.layers)}; the model has layers 0 to {n_layers - 1}.")
        if self.projection is not None and (width := self.projection.directions.shape[1]) != hidden:
            raise InvalidInput(f"project_onto is {width} wide; the model's residual stream is {hidden} wide.")


_NESTED: dict[str, type[BaseModel]] = {"project_onto": DirectionsField}


def read_harvest(raw: bytes) -> HarvestRequest:
    """What a body asks for, checked as far as that needs no model and no settings.

    Raises:
        BadJson: it is not JSON.
        InvalidInput: at most five problems in one message, each naming its field; no text of the caller's.
    """
    return read_harvest_mapping(read_json(raw))


def read_harvest_mapping(body: Any) -> HarvestRequest:
    """As ``read_harvest``, of a body that is parsed.

    Raises:
        InvalidInput: as ``read_harvest``.
    """
    if not isinstance(body, Mapping):
        raise InvalidInput(f"the body must be a JSON object; got {kind_of(body)}.")
    try:
        checked = HarvestBody.model_validate(dict(body))
    except ValidationError as error:
        raise refusal(error, HarvestBody, _NESTED) from None
    return _request(checked)


def _request(body: HarvestBody) -> HarvestRequest:
    given = {
        "shard_size": body.shard_size,
        "batch_size": body.batch_size,
        "add_special_tokens": body.add_special_tokens,
        "positions": tuple(dict.fromkeys(body.positions)) if isinstance(body.positions, list) else body.positions,
        "pooling": body.pooling,
    }
    return HarvestRequest(
        model=body.model,
        prompts=tuple(each if isinstance(each, str) else tuple(each) for each in body.prompts),
        layers=tuple(sorted(set(body.layers))) if isinstance(body.layers, list) else cast(Any, body.layers),
        projection=_projection(body.project_onto),
        **{name: value for name, value in given.items() if value is not None},  # type: ignore[arg-type]
    )


def _projection(told: DirectionsField | None) -> Projection | None:
    if told is None:
        return None
    try:
        return told.projection()
    except InvalidInput as error:
        raise InvalidInput(f"project_onto: {error}") from None
