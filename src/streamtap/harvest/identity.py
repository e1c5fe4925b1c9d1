"""``run.json``: what a run's files are rows of. Whoever goes on with a run, or finds it finished, is held to it."""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from streamtap.activations import Provenance
from streamtap.engines.base import IN_MEMORY, Engine, HoldsWeights
from streamtap.errors import HarvestDamaged, HarvestMismatch, InvalidInput
from streamtap.harvest.asked import HarvestAsk
from streamtap.harvested.places import WritablePlace
from streamtap.spec import Projection

NAME = "run.json"
#: A run's name is also that of folders, and may come from elsewhere.
_NAME_OF_RUN = re.compile(r"[A-Za-z0-9][\w.-]{0,99}", re.ASCII)
_OF_A_RUN = re.compile(r"(shard|whole)_\d+\.|(manifest\.json|stats\.safetensors)$")
#: What says where a model ran, not which it is.
_ELSEWHERE = ("device", "engine_version")


@dataclass(frozen=True)
class RunIdentity:
    """``run_id``, and all that two runs must share to be one: the model, and what is kept of each prompt.

    ``is_new`` says that this call began it.
    """

    run_id: str
    about: Mapping[str, Any]
    is_new: bool = False


def provenance_of(engine: Engine) -> Provenance:
    """What an engine's rows come from; a model that it was given ready is told by its weights, as they are now.

    Raises:
        Unsupported: they cannot be read, for some are off-loaded.
    """
    about = engine.provenance
    if about.commit == IN_MEMORY and isinstance(engine, HoldsWeights):
        return replace(about, commit=engine.weights_hash())
    return about


def identity_of(provenance: Provenance, ask: HarvestAsk) -> dict[str, Any]:
    """All that a run's rows depend on, but for its prompts, whose digests stand with each shard.

    Raises:
        InvalidInput: layers or directions that the model does not have.
    """
    if ask.projection is not None and ask.projection.directions.shape[1] != provenance.hidden:
        raise InvalidInput(
            f"directions are {ask.projection.directions.shape[1]} wide; rows of {provenance.model} are "
            f"{provenance.hidden}."
        )
    model = {name: value for name, value in asdict(provenance).items() if name not in _ELSEWHERE}
    told: dict[str, Any] = json.loads(
        json.dumps(
            {
                "model": model,
                "layers": ask.layer_indices(provenance.n_layers),
                **ask.capture(),
                "projection": projection_of(ask.projection),
                "add_special_tokens": ask.add_special_tokens,
                "shard_size": ask.shard_size,
                "batch_size": ask.batch_size,
                "compression": ask.compression,
                "dtype": ask.row_dtype,
            },
            default=str,
        )
    )
    return told


def projection_of(projection: Projection | None) -> dict[str, Any] | None:
    """How many directions rows are multiplied with, and the hash of their values."""
    if projection is None:
        return None
    values = projection.directions
    return {"directions": len(values), "sha256": hashlib.sha256(values.astype("<f4").tobytes()).hexdigest()}


def take(place: WritablePlace, about: Mapping[str, Any], run_id: str | None) -> RunIdentity:
    """Begin a run at ``place``, or go on with the one that is there.

    Raises:
        HarvestMismatch: another run is there; the message says what differs. Or files of one that nothing names.
        InvalidInput: a ``run_id`` that is no name.
    """
    if run_id is not None and not _NAME_OF_RUN.fullmatch(run_id):
        raise InvalidInput(f"run_id must be letters, digits, '-', '_' or '.', 100 at most; got {run_id!r}.")
    found = _found(place)
    if found is None:
        _check_free(place)
        begun = RunIdentity(run_id or uuid.uuid4().hex, about, is_new=True)
        place.put(NAME, json.dumps({"run_id": begun.run_id, "about": about}, indent=1).encode())
        return begun
    if run_id not in (None, found.run_id):
        raise HarvestMismatch(f"{place.url} holds run {found.run_id}, not {run_id}; name another folder.")
    if differing := differing_in(about, found.about):
        name = differing[0]
        raise HarvestMismatch(
            f"{place.url} holds a run with {name} {_shown(found.about.get(name))}, and this one has "
            f"{_shown(about.get(name))}; name another folder, or ask for the same."
        )
    return found


def _check_free(place: WritablePlace) -> None:
    """Nothing of a run may lie where one begins: it would be taken for its own."""
    if strays := sorted(name for name in place.names() if _OF_A_RUN.match(name)):
        raise HarvestMismatch(
            f"{place.url} holds {strays[0]} and no {NAME} that says of what run it is; name another folder, or remove "
            "what is there."
        )


def differing_in(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Names of what two identities do not share."""
    return sorted(name for name in {*one, *other} if one.get(name) != other.get(name))


def run_id_at(place: WritablePlace) -> str | None:
    """The run that is there, if any.

    Raises:
        HarvestDamaged: the place does not say which.
    """
    found = _found(place)
    return None if found is None else found.run_id


def _found(place: WritablePlace) -> RunIdentity | None:
    try:
        raw = place.get(NAME)
    except FileNotFoundError:
        return None
    try:
        said = json.loads(raw)
        if not _NAME_OF_RUN.fullmatch(said["run_id"]):
            raise ValueError("no name")
        return RunIdentity(said["run_id"], dict(said["about"]))
    except (ValueError, KeyError, TypeError) as error:
        raise HarvestDamaged(
            f"{place.url}/{NAME} does not say what run it is; remove the folder to begin anew."
        ) from error


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else text[:200] + "…"
