"""Packed passes give what the model gives alone, and a model that cannot pack is found out."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from streamtap.capture.forward import Forward
from streamtap.capture.packed import PackedPasses, Piece, States
from streamtap.capture.passes import LonePasses, passes_for
from streamtap.engines.transformers import TransformersEngine
from streamtap.spec import CaptureSpec
from streamtap.testing.models import FAMILIES, MIXTURES, tiny_model
from streamtap.testing.reference import plain_rows

LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 64,
}
#: They attend by other means than an attention function, or keep a state that runs from token to token.
NOT_PACKED = {"bloom", "falcon", "falcon_alibi", "lfm2", "mamba"}


def _ids(n: int, seed: int) -> list[int]:
    return torch.randint(5, 90, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


class _Rows:
    """Keeps what passes over each block's output, by layer and sequence."""

    def __init__(self) -> None:
        self.rows: dict[tuple[int, int], list[torch.Tensor]] = {}

    def __call__(self, layer: int, stream: torch.Tensor, pieces: Sequence[Piece], bounds: Sequence[int]) -> None:
        for number, piece in enumerate(pieces):
            mine = stream[bounds[number] : bounds[number + 1]][piece.fresh - piece.start :]
            self.rows.setdefault((layer, number), []).append(mine.clone())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_trial_tells_which_models_can_be_packed(family: str) -> None:
    passes = passes_for(Forward(tiny_model(family)))

    assert isinstance(passes, LonePasses if family in NOT_PACKED else PackedPasses)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in NOT_PACKED | set(MIXTURES)])
def test_prompts_and_single_tokens_in_one_pass_equal_the_plain_model(family: str) -> None:
    model = tiny_model(family)
    passes = PackedPasses(Forward(model))
    first, second = _ids(41, 1), _ids(23, 2)
    states = [States(4), States(100)]
    rows = _Rows()

    passes.run([Piece(first[:40], 0, states[0])], rows, range(3))
    mixed = [Piece(first[40:], 40, states[0], 40), Piece(second, 0, states[1])]
    later = _Rows()
    passes.run(mixed, later, range(3))

    for layer, whole in plain_rows(model, first).items():
        got = torch.cat([*rows.rows[layer, 0], *later.rows[layer, 0]])
        assert _worst(got, whole) < 3e-5, layer
    for layer, whole in plain_rows(model, second).items():
        assert _worst(later.rows[layer, 1][0], whole) < 3e-5, layer


@pytest.mark.parametrize("family", sorted(NOT_PACKED))
def test_lone_passes_give_only_new_rows_of_a_repeated_sequence(family: str) -> None:
    model = tiny_model(family)
    ids, rows = _ids(17, 3), _Rows()

    LonePasses(Forward(model)).run([Piece(ids, 0, None, 15)], rows, range(3))

    for layer, whole in plain_rows(model, ids).items():
        assert rows.rows[layer, 0][0].shape == (2, 32)
        assert _worst(rows.rows[layer, 0][0], whole[15:]) < 1e-5


def test_the_model_attends_as_before_afterwards_even_when_a_pass_breaks() -> None:
    model = tiny_model("llama")
    passes = PackedPasses(Forward(model))
    before = plain_rows(model, _ids(9, 4))

    def break_it(*_args: object) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        passes.run([Piece(_ids(9, 4))], break_it, [1])

    assert model.config._attn_implementation == "sdpa"
    assert all(torch.equal(rows, before[layer]) for layer, rows in plain_rows(model, _ids(9, 4)).items())
    assert not any(block._forward_hooks for block in passes.forward.blocks.modules)


def test_a_copy_of_states_goes_on_without_touching_the_original() -> None:
    model = tiny_model("llama")
    passes = PackedPasses(Forward(model))
    ids = _ids(12, 5)
    states = States(12)
    passes.run([Piece(ids[:11], 0, states)], lambda *_: None, ())

    twin = states.copy()
    other = passes.run([Piece([7], 11, twin)], lambda *_: None, ())
    mine = passes.run([Piece(ids[11:], 11, states)], lambda *_: None, ())

    alone = LonePasses(passes.forward)
    assert _worst(mine, alone.run([Piece(ids)], lambda *_: None, ())[-1:]) < 1e-5
    assert _worst(other, alone.run([Piece([*ids[:11], 7])], lambda *_: None, ())[-1:]) < 1e-5


def test_a_replaced_stream_goes_on_to_the_next_block() -> None:
    model = tiny_model("llama")
    passes, push = PackedPasses(Forward(model)), torch.linspace(-1, 1, 32)

    def steer(_layer: int, stream: torch.Tensor, _pieces: object, bounds: Sequence[int]) -> torch.Tensor:
        changed = stream.clone()
        changed[bounds[1] :] += push  # the second sequence alone
        return changed

    plain = passes.run([Piece(_ids(9, 6)), Piece(_ids(7, 7))], lambda *_: None, ())
    steered = passes.run([Piece(_ids(9, 6)), Piece(_ids(7, 7))], steer, [1])

    assert torch.equal(steered[:9], plain[:9])
    assert _worst(steered[9:], plain[9:]) > 1e-2


def test_one_set_of_frequencies_for_a_whole_pass_is_not_shared() -> None:
    """Its trial is too short to show it: both sequences fit the original context."""
    forward = Forward(tiny_model("llama", rope_parameters=LONG_ROPE))

    passes = passes_for(forward)
    beside = passes.run([Piece(_ids(100, 8)), Piece(_ids(9, 9))], lambda *_: None, ())[100:]

    assert _worst(beside, LonePasses(forward).run([Piece(_ids(9, 9))], lambda *_: None, ())) < 1e-5


def test_nor_are_they_shared_by_a_padded_batch() -> None:
    engine = TransformersEngine(tiny_model("llama", rope_parameters=LONG_ROPE))
    short, long = _ids(50, 10), _ids(80, 11)

    (alone,) = engine.capture([short], CaptureSpec(layers=(2,)))
    (beside,) = engine.capture([long, short], CaptureSpec(layers=(2,)))

    assert _worst(torch.from_numpy(beside.acts[2][80:]), torch.from_numpy(alone.acts[2])) < 1e-5


def _worst(got: torch.Tensor, wanted: torch.Tensor) -> float:
    assert got.shape == wanted.shape
    return float(((got - wanted).double().norm(dim=-1) / wanted.double().norm(dim=-1)).max())
