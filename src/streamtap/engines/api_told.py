"""What a service tells of a model at ``GET /v1/models``, and what follows of it for an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from streamtap.completion import WireDtype
from streamtap.errors import ActivationsUnsupported, InvalidInput, ModelNotFound, Unsupported
from streamtap.fingerprint import fingerprint

#: Requests at once, where the service does not say how many a key may have, and never more than.
_USUAL_AT_ONCE, _MOST_AT_ONCE = 4, 16
#: What makes a model another one, and what each is called.
_OF_THE_MODEL = {
    "checkpoint": "checkpoint",
    "revision": "revision",
    "dtype": "dtype",
    "n_layers": "number of layers",
    "hidden": "width",
    "engine": "engine",
    "own_arguments": "own_arguments",
}


@dataclass(frozen=True)
class Told:
    """One model of a service; what it does not tell is None, and what it does not name it is not asked for.

    ``chooses_rows`` is whether it knows ``output_positions``, and ``row_dtypes`` are those of ``output_dtype``.
    ``capture_positions`` is what one capture of all layers may have. ``runs_prompts_alone`` is whether its engine takes
    ``max_tokens`` 0; such a one captures no more positions than it sends, and only these count. ``engine`` is the kind
    that runs the model, and ``own_arguments`` whether it was started with some, or by a command, of the service's own.
    """

    id: str
    checkpoint: str
    revision: str | None
    n_layers: int | None
    hidden: int | None
    context: int | None
    dtype: str | None
    at_once: int
    capture_positions: int | None
    chooses_rows: bool
    runs_prompts_alone: bool
    row_dtypes: tuple[str, ...]
    has_logprobs: bool
    harvests: bool
    engine: str | None
    own_arguments: bool | None

    @property
    def longest_prompt(self) -> int | None:
        """Tokens of the longest prompt that can be captured: most engines write a token behind each."""
        if self.context is None:
            return None
        return self.context if self.runs_prompts_alone else self.context - 1

    def max_tokens(self, prompt_tokens: int) -> int:
        """New tokens of a request for rows alone: one, or none where the prompt fills the context."""
        return 0 if self.runs_prompts_alone and self.context == prompt_tokens else 1

    def row_dtype(self, asked: str) -> WireDtype:
        """The dtype that rows come in.

        Raises:
            InvalidInput: a dtype that rows never come in.
            Unsupported: one that this service does not send.
        """
        if asked in ("auto", "bfloat16"):
            return "bfloat16"
        if asked != "float32":
            raise InvalidInput(
                f"backend='api' gives rows in 'bfloat16' (also 'auto') or 'float32'; got dtype={asked!r}."
            )
        if asked not in self.row_dtypes:
            raise Unsupported(
                f"this service sends rows of {self.id} in bfloat16 alone; leave dtype out, or take backend='local' for "
                "float32."
            )
        return "float32"

    def commit(self, base: str, dtype: str) -> str:
        """What tells the model's rows from all others: the Hub's commit, where rows are as the checkpoint's are.

        Else a fingerprint of the address, which is nobody's to read in a dataset, and the id, which stay the same over
        restarts, and the commit if there is one. Rows of a service that runs in another dtype than it sends are
        rounded, and those of an engine that is not transformers, or has arguments of its own, may be of quantised
        weights: they are no other service's.
        """
        is_plain = self.engine == "transformers" and self.own_arguments is False
        if is_plain and self.revision is not None and self.dtype == dtype:
            return self.revision
        at = "" if self.revision is None else f"@{self.revision}"
        return f"api:{fingerprint({'address': base})[:16]}#{self.id}{at}"

    def check_same(self, now: Told) -> None:
        """Hold what the service tells ``now`` against what it told; what was not told then may be told now.

        Raises:
            InvalidInput: it is another model.
        """
        for name, what in _OF_THE_MODEL.items():
            before, after = getattr(self, name), getattr(now, name)
            if before is not None and after != before:
                raise another_model(self.id, what, before, after)


def told_of(models: Sequence[Mapping[str, Any]], name: str) -> Told:
    """What the service's list tells of the model whose id, or ``served_model_name``, is ``name``.

    Raises:
        ModelNotFound: there is none; the message names those there are.
        InvalidInput: several are served under that name; the message names their ids.
        ActivationsUnsupported: it has no engine for activations.
    """
    found = [each for each in models if each.get("id") == name]
    found = found or [each for each in models if each.get("served_model_name") == name]
    if not found:
        live = ", ".join(str(each.get("id")) for each in models) or "none"
        raise ModelNotFound(f"the service has no model {name!r}; its models are: {live}.")
    if len(found) > 1:
        ids = " or ".join(str(each.get("id")) for each in found)
        raise InvalidInput(f"the service has {name!r} more than once; name one by its id: {ids}.")
    capabilities = found[0].get("capabilities")
    return _told(found[0], capabilities if isinstance(capabilities, Mapping) else {})


def _told(model: Mapping[str, Any], can: Mapping[str, Any]) -> Told:
    model_id = str(model.get("id"))
    if can.get("activations") is False:
        raise ActivationsUnsupported(f"the service has no engine for activations of {model_id}; name another model.")
    dtypes = can.get("output_dtypes")
    return Told(
        id=model_id,
        checkpoint=_text(model.get("served_model_name")) or model_id,
        revision=_text(model.get("revision")),
        n_layers=_count(can.get("n_layers")),
        hidden=_count(can.get("hidden_size")),
        context=_count(can.get("max_model_len")),
        dtype=_text(can.get("dtype")),
        at_once=min(_count(can.get("max_inflight_per_key")) or _USUAL_AT_ONCE, _MOST_AT_ONCE),
        capture_positions=_count(can.get("max_activation_prompt_tokens")),
        chooses_rows=can.get("output_positions") is True,
        runs_prompts_alone=can.get("least_max_tokens") == 0,
        row_dtypes=tuple(map(str, dtypes)) if isinstance(dtypes, list) else (),
        has_logprobs=can.get("prompt_logprobs") is not False,
        harvests=can.get("harvest") is True,
        engine=_text(model.get("engine")),
        own_arguments=own if isinstance(own := model.get("own_arguments"), bool) else None,
    )


def another_model(model_id: str, what: str, before: object, after: object) -> InvalidInput:
    """The refusal of rows of another model than was loaded."""
    return InvalidInput(
        f"the service's {model_id} is another model than was loaded: its {what} was {before} and is {after} now; load "
        "the model again, so that rows of both are kept apart."
    )


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _count(value: Any) -> int | None:
    return value if type(value) is int and value > 0 else None
