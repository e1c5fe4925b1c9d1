"""Steering vectors on the wire: the envelope of a capture, and where and how strongly it is added.

==================  =======================  ================================
shape               positions                meaning
==================  =======================  ================================
(layers, hidden)    none                     every position
(layers, hidden)    ``position_spans``       those positions
(layers, P, hidden) ``position_indices``     one vector for each position
(layers, P, hidden) none                     positions 0 to P - 1
==================  =======================  ================================
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field, PrivateAttr, ValidationError, model_validator

from streamtap.codec import WIRE_DTYPES, base64_chunks, decode, decoded_bytes
from streamtap.completion import SteeringVector
from streamtap.errors import InvalidInput
from streamtap.wire.problems import StrictModel, kind_of, refusal

#: Base64 of one vector's envelope, as it is sent.
MOST_DATA_BYTES = 512 * 1024
#: What that may unpack to: a few bytes of zstd can say gigabytes.
MOST_UNPACKED_BYTES = 16 * 1024 * 1024
_MOST_INT = 2**31 - 1

_Index = Annotated[int, Field(ge=0, le=_MOST_INT)]
_Indices = Annotated[list[_Index], Field(min_length=1, fail_fast=True)]
_Span = Annotated[list[_Index], Field(min_length=2, max_length=2, fail_fast=True)]
_Spans = Annotated[list[_Span], Field(min_length=1, fail_fast=True)]
_Lengths = Annotated[list[Annotated[int, Field(ge=1, le=_MOST_INT)]], Field(min_length=2, max_length=3, fail_fast=True)]


class Envelope(StrictModel):
    """An array as text: what ``codec.decode`` takes."""

    data: str = Field(description="base64 of the values", min_length=1)
    dtype: str = Field(description="'int16' (bfloat16 bits), 'float16' or 'float32'")
    original_dtype: str | None = Field(None, description="'torch.bfloat16', 'torch.float16' or 'torch.float32'")
    shape: _Lengths = Field(description="[layers, hidden] or [layers, positions, hidden], whole numbers from 1")
    compression: str | None = Field(None, description="'zstd' or 'none'")


class SteeringItem(StrictModel):
    """One entry of ``apply_steering_vectors``."""

    activations: Envelope = Field(description="an object with data, dtype, original_dtype, shape and compression")
    layer_indices: _Indices = Field(description="a list of layer numbers, 0 or more, at least one")
    scale: Annotated[float, Field(allow_inf_nan=False)] | None = Field(None, description="a finite number")
    norm_match: bool | None = Field(None, description="true or false")
    position_indices: _Indices | None = Field(None, description="a list of positions, 0 or more, at least one")
    position_spans: _Spans | None = Field(None, description="a list of [start, end] pairs of positions, 0 or more")

    _vector: SteeringVector | None = PrivateAttr(None)

    @model_validator(mode="after")
    def _fits_together(self) -> SteeringItem:
        shape = self.activations.shape
        if len(self.layer_indices) != shape[0]:
            raise ValueError(
                f"has {len(self.layer_indices)} layer_indices for a shape of {shape[0]} layers; they must be as many."
            )
        if len(set(self.layer_indices)) != len(self.layer_indices):
            raise ValueError("names a layer twice in layer_indices; send one vector a layer.")
        _check_indices(self.position_indices, shape)
        _check_spans(self.position_spans, shape)
        return self

    def to_vector(self, *, most_data_bytes: int | None = MOST_DATA_BYTES) -> SteeringVector:
        """The vector, unpacked once and kept.

        Raises:
            InvalidInput: the data is too large, broken, of another size, or not finite.
        """
        if self._vector is None:
            self._vector = self._unpacked(most_data_bytes)
        return self._vector

    def _unpacked(self, most_data_bytes: int | None) -> SteeringVector:
        spans = self.position_spans
        return SteeringVector(
            layers=tuple(self.layer_indices),
            vectors=_values(self.activations, most_data_bytes),
            scale=1.0 if self.scale is None else self.scale,
            norm_match=bool(self.norm_match),
            positions=self._positions(),
            spans=None if spans is None else tuple(sorted((start, end) for start, end in spans)),
        )

    def _positions(self) -> tuple[int, ...] | None:
        shape = self.activations.shape
        if self.position_indices is not None:
            return tuple(self.position_indices)
        return tuple(range(shape[1])) if len(shape) == 3 else None


NESTED: dict[str, type[BaseModel]] = {"activations": Envelope}


def read_vector(
    item: Mapping[str, Any], *, n_layers: int | None = None, hidden: int | None = None, at: str = "steering vector"
) -> SteeringVector:
    """One entry of ``apply_steering_vectors``; ``at`` is what errors call it.

    Raises:
        InvalidInput: it is not one, or does not fit a model of ``n_layers`` blocks and width ``hidden``.
    """
    if not isinstance(item, Mapping):
        raise InvalidInput(f"{at} must be an object; got {kind_of(item)}.")
    try:
        checked = SteeringItem.model_validate(dict(item))
    except ValidationError as error:
        raise refusal(error, SteeringItem, NESTED, at) from None
    vector = unpack(checked, at)
    check_fits(vector, n_layers=n_layers, hidden=hidden, at=at)
    return vector


def unpack(item: SteeringItem, at: str, *, most_data_bytes: int | None = MOST_DATA_BYTES) -> SteeringVector:
    """The vector of a checked entry.

    Raises:
        InvalidInput: as ``SteeringItem.to_vector``, with ``at`` before it.
    """
    try:
        return item.to_vector(most_data_bytes=most_data_bytes)
    except InvalidInput as error:
        raise InvalidInput(f"{at}.activations: {error}") from None


def check_fits(
    vector: SteeringVector, *, n_layers: int | None, hidden: int | None, at: str = "steering vector"
) -> None:
    """Refuse a vector for another model.

    Raises:
        InvalidInput: a layer that the model lacks, or another width.
    """
    if n_layers is not None and max(vector.layers) >= n_layers:
        raise InvalidInput(
            f"{at}.layer_indices names layer {max(vector.layers)}; the model has layers 0 to {n_layers - 1}."
        )
    width = vector.vectors.shape[-1]
    if hidden is not None and width != hidden:
        raise InvalidInput(f"{at}.activations is {width} wide; the model's residual stream is {hidden} wide.")


def vector_body(vector: SteeringVector) -> dict[str, Any]:
    """``vector`` as an entry of ``apply_steering_vectors``: bfloat16 where that loses nothing, else float32."""
    body: dict[str, Any] = {
        "activations": envelope_of(_narrowed(np.asarray(vector.vectors, np.float32))),
        "layer_indices": list(vector.layers),
        "scale": vector.scale,
        "norm_match": vector.norm_match,
    }
    if vector.positions is not None:
        body["position_indices"] = list(vector.positions)
    if vector.spans is not None:
        body["position_spans"] = [list(span) for span in vector.spans]
    return body


def envelope_of(values: NDArray[Any]) -> dict[str, Any]:
    """``values`` [any shape], bfloat16 or float32, as one envelope with its data."""
    dtype, original = WIRE_DTYPES[values.dtype.name]
    data = b"".join(base64_chunks(values)).decode("ascii")
    return {
        "data": data,
        "dtype": dtype,
        "original_dtype": original,
        "shape": list(values.shape),
        "compression": "zstd",
    }


def _narrowed(values: NDArray[np.float32]) -> NDArray[Any]:
    narrow = values.astype(ml_dtypes.bfloat16)
    return narrow if np.array_equal(narrow.astype(np.float32), values) else values


def _values(envelope: Envelope, most_data_bytes: int | None) -> NDArray[np.float32]:
    kind = {"dtype": envelope.dtype, "original_dtype": envelope.original_dtype, "shape": envelope.shape}
    if most_data_bytes is not None and len(envelope.data) > most_data_bytes:
        raise InvalidInput(
            f"data is {len(envelope.data)} bytes of base64, at most {most_data_bytes} are taken; "
            "send fewer layers or positions, or bfloat16."
        )
    if (size := decoded_bytes(**kind)) > MOST_UNPACKED_BYTES:  # type: ignore[arg-type]
        raise InvalidInput(f"data unpacks to {size} bytes, at most {MOST_UNPACKED_BYTES} are taken.")
    values = decode(envelope.data, compression=envelope.compression, **kind).astype(np.float32)  # type: ignore[arg-type]
    if not np.isfinite(values).all():
        raise InvalidInput("data holds a value that is not finite (NaN or infinity); every value must be a number.")
    return values


def _check_indices(indices: list[int] | None, shape: list[int]) -> None:
    if indices is None:
        return
    if len(shape) == 2:
        raise ValueError("has position_indices with shape (layers, hidden); send (layers, positions, hidden).")
    if len(indices) != shape[1]:
        raise ValueError(
            f"has {len(indices)} position_indices for a shape of {shape[1]} positions; they must be as many."
        )
    if len(set(indices)) != len(indices):
        raise ValueError("names a position twice in position_indices; send one vector a position.")


def _check_spans(spans: list[list[int]] | None, shape: list[int]) -> None:
    if spans is None:
        return
    if len(shape) == 3:
        raise ValueError("has position_spans with shape (layers, positions, hidden); send (layers, hidden).")
    if any(start >= end for start, end in spans):
        raise ValueError("has a span in position_spans that ends before it holds a position; send start < end.")
    if any(left[1] > right[0] for left, right in pairwise(sorted(spans))):
        raise ValueError("has position_spans that overlap; send spans that share no position.")
