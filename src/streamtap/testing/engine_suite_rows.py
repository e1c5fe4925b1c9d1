"""The part of the engines' suite about ``Engine.capture``: whose rows come, how many, in which order, of what value."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from streamtap.activations import Activations
from streamtap.engines.windows import perplexity_of
from streamtap.errors import InvalidPrompt, Unsupported
from streamtap.pooling import ONE_TOKEN, POOLINGS, pool
from streamtap.spec import CaptureSpec, Projection, Prompt
from streamtap.testing.engine_suite_holding import hold, hold_rows, refused, row_errors
from streamtap.testing.engine_suite_subject import EngineSubject, Floats, Ids

#: What a row may lose by being rounded to its dtype once more, relative to its length.
_ROUNDING = {"float64": 0.0, "float32": 1e-6, "float16": 2e-3, "bfloat16": 1e-2}


class RowSuite:
    """See ``EngineSuite``."""

    def test_provenance_says_what_the_rows_come_from(self, subject: EngineSubject) -> None:
        """Depth, width and dtype are the model's, and whose they are has a name."""
        about, acts = subject.engine.provenance, subject.raw()

        hold(about.n_layers == subject.n_layers, f"provenance says {about.n_layers} layers of {subject.n_layers}")
        hold(about.hidden == subject.hidden, f"provenance says that rows are {about.hidden} wide, not {subject.hidden}")
        for name in ("model", "commit", "tokenizer", "engine"):
            hold(bool(getattr(about, name)), f"provenance.{name} is empty")
        dtypes = {rows.dtype.name for rows in acts.acts.values()}
        hold(dtypes == {about.dtype}, f"rows came in {dtypes}; provenance says {about.dtype}")
        hold(acts.provenance == about, "the rows' provenance is not the engine's")

    def test_every_token_of_prompts_of_other_lengths_has_a_row(self, subject: EngineSubject) -> None:
        """Ragged and never padded: as many rows as tokens, each with its token and its place."""
        acts, lengths = subject.raw(), [len(prompt) for prompt in subject.prompts]

        hold(acts.layers == tuple(range(subject.n_layers)), f"layers {acts.layers} came of {subject.n_layers}")
        counts = np.diff(acts.offsets).tolist()
        hold(counts == lengths, f"prompts of {lengths} tokens have {counts} rows")
        shapes = {rows.shape for rows in acts.acts.values()}
        hold(shapes == {(sum(lengths), subject.hidden)}, f"rows of {sum(lengths)} tokens have shape {shapes}")
        places = [place for length in lengths for place in range(length)]
        hold(acts.positions.tolist() == places, f"the rows stand at {acts.positions.tolist()}, expected {places}")
        ids = [token for prompt in subject.prompts for token in prompt]
        hold(acts.token_ids.tolist() == ids, f"the rows stand on tokens {acts.token_ids.tolist()}, expected {ids}")

    def test_rows_are_the_references(self, subject: EngineSubject) -> None:
        """Every row of every layer, within the tolerance."""
        subject.hold_reference(subject.raw(), subject.prompts, "all rows")

    def test_layer_k_is_what_block_k_puts_out(self, subject: EngineSubject) -> None:
        """No layer is nearer to another block's output than to its own, whatever the tolerance."""
        acts = subject.raw()
        right = np.concatenate([subject.reference.rows(prompt) for prompt in subject.prompts], axis=1)
        hold(acts.layers == tuple(range(len(right))), f"layers {acts.layers} came of {len(right)}")
        for layer, rows in acts.acts.items():
            hold(rows.shape == right[layer].shape, f"layer {layer}: shape {rows.shape}, expected {right[layer].shape}")
            distances = [float(row_errors(rows, block).mean()) for block in right]
            nearest = int(np.argmin(distances))
            hold(nearest == layer, f"layer {layer} holds what block {nearest} puts out")

    def test_the_last_row_leads_to_the_next_token(self, subject: EngineSubject) -> None:
        """Final norm and head make of it the logits of the model: it is not normed already."""
        acts, last = subject.raw(), subject.ends[1]
        for place, prompt in enumerate(subject.prompts):
            right = subject.reference.logits(prompt)[-1]
            found = subject.reference.finish(acts.prompt(place)[last][-1:])[0]
            # A norm's gains and the head may stretch an error.
            hold_rows(found[None], right[None], 10 * subject.tolerance, f"logits of prompt {place}")
            short = float(right.max() - right[np.argmax(found)])
            spread = float(right.max() - right.min())
            hold(
                short <= 4 * subject.tolerance * spread,
                f"prompt {place}: token {np.argmax(found)} would be next; the model says {np.argmax(right)}",
            )

    def test_the_order_of_prompts_is_kept(self, subject: EngineSubject) -> None:
        """Backwards, each prompt still has its own rows."""
        backwards = subject.prompts[::-1]
        acts = subject.capture(backwards, layers=list(subject.ends))

        counts = np.diff(acts.offsets).tolist()
        hold(counts == [len(prompt) for prompt in backwards], f"prompts backwards have {counts} rows")
        subject.hold_reference(acts, backwards, "prompts backwards")

    def test_unordered_parts_say_whose_rows_they_are(self, subject: EngineSubject) -> None:
        """Each prompt once, under its own number."""
        spec = CaptureSpec(layers=list(subject.ends))
        seen: list[int] = []
        for part in subject.engine.capture(subject.prompts, spec, ordered=False):
            whose = part.index.tolist()
            hold(len(whose) == len(part), f"a part of {len(part)} prompts names {len(whose)}")
            hold(set(whose) <= set(range(len(subject.prompts))), f"a part names prompts {whose}, which were not asked")
            subject.hold_reference(part, [subject.prompts[place] for place in whose], "an unordered part")
            seen += whose
        hold(sorted(seen) == list(range(len(subject.prompts))), f"unordered parts name prompts {sorted(seen)}")

    def test_a_prompt_alone_has_the_rows_that_it_has_among_others(self, subject: EngineSubject) -> None:
        """A row depends on its own prompt and on nothing beside it."""
        together = subject.raw()
        for place, prompt in enumerate(subject.prompts[:3]):
            alone = subject.capture([prompt])
            _hold_same(alone.acts, together.prompt(place), subject.between_runs, f"prompt {place} alone")

    def test_some_layers_have_the_rows_that_they_have_among_all(self, subject: EngineSubject) -> None:
        """Whichever are asked for."""
        every, last = subject.raw(), subject.n_layers - 1
        for asked in ([last // 2], [0, last]):
            some = subject.capture(subject.prompts, layers=asked)
            hold(some.layers == tuple(sorted(set(asked))), f"layers {asked} were asked for, {some.layers} came")
            right = {layer: every.acts[layer] for layer in some.layers}
            _hold_same(some.acts, right, subject.between_runs, f"layers {asked} alone")

    def test_pooled_rows_are_the_raw_rows_pooled(self, subject: EngineSubject) -> None:
        """Every pooling there is, over all positions and over some."""
        for pooling in POOLINGS:
            if pooling != "none":
                _hold_pooled(subject, pooling, "all", subject.raw())
        some = subject.capture(subject.prompts, layers=list(subject.ends), positions="-2:")
        _hold_pooled(subject, "mean", "-2:", some)

    def test_some_positions_have_the_rows_that_they_have_among_all(self, subject: EngineSubject) -> None:
        """The last one, the first two, and any that a prompt brings with it."""
        layers = list(subject.ends)
        for positions, picked in (("last", slice(-1, None)), (":2", slice(None, 2))):
            acts = subject.capture(subject.prompts, layers=layers, positions=positions)
            _hold_picked(subject, acts, [np.arange(len(each))[picked] for each in subject.prompts], repr(positions))
        own = [(1, 4), (0,), (2,)]
        asked = [Prompt(token_ids=ids, positions=places) for ids, places in zip(subject.prompts[:3], own, strict=True)]
        _hold_picked(subject, subject.capture(asked, layers=layers), [np.array(each) for each in own], "of the prompt")

    def test_equal_prompts_have_equal_rows(self, subject: EngineSubject) -> None:
        """Each of them has rows of its own, under its own place."""
        prompts = [subject.prompts[0], subject.prompts[1], subject.prompts[0]]
        acts = subject.capture(prompts, layers=list(subject.ends))

        counts = np.diff(acts.offsets).tolist()
        hold(counts == [len(each) for each in prompts], f"two equal prompts and one between them have {counts} rows")
        subject.hold_reference(acts, prompts, "equal prompts")
        _hold_same(acts.prompt(2), acts.prompt(0), subject.between_runs, "the second of two equal prompts")

    def test_a_prefix_that_ran_before_has_its_rows_again(self, subject: EngineSubject) -> None:
        """The same prompt twice, then one that begins alike: every row of each, and equal."""
        prefix = tuple(20 + (7 * place + place * place) % 70 for place in range(subject.prefix_tokens))
        longer = (*prefix, *subject.prompts[0])
        first, again, grown = (
            subject.capture([prompt], layers=list(subject.ends)) for prompt in (prefix, prefix, longer)
        )
        for acts, prompt in ((first, prefix), (again, prefix), (grown, longer)):
            hold(acts.offsets.tolist() == [0, len(prompt)], f"{acts.offsets[-1]} rows came of {len(prompt)} tokens")
            subject.hold_reference(acts, [prompt], "a prefix that ran before")
        _hold_same(again.acts, first.acts, subject.between_runs, "the same prompt again")
        start = {layer: rows[: len(prefix)] for layer, rows in grown.acts.items()}
        _hold_same(start, first.acts, subject.between_runs, "a prompt that begins alike")

    def test_a_text_has_the_rows_of_its_tokens(self, subject: EngineSubject) -> None:
        """Text goes through the engine's own tokenizer; without one it is refused."""
        if subject.text is None:
            refused(InvalidPrompt, lambda: subject.capture(["a text"], layers=[0]))
            return
        ids = tuple(int(token) for token in subject.engine.tokenizer.read(subject.text, 0))
        acts = subject.capture([subject.text], layers=list(subject.ends))

        hold(acts.token_ids.tolist() == list(ids), f"the text ran as {acts.token_ids.tolist()}, its tokens are {ids}")
        subject.hold_reference(acts, [ids], "a text")

    def test_rows_come_in_the_dtype_that_was_asked_for(self, subject: EngineSubject) -> None:
        """In both, rounded once from what the model has."""
        raw = subject.raw()
        for dtype, name in ((np.dtype(ml_dtypes.bfloat16), "bfloat16"), (np.dtype(np.float32), "float32")):
            acts = subject.capture(subject.prompts, layers=list(subject.ends), dtype=name)
            held = {rows.dtype for rows in acts.acts.values()}
            hold(held == {dtype}, f"rows in {name} were asked for, they came in {held}")
            right = {layer: raw.acts[layer] for layer in acts.layers}
            _hold_same(acts.acts, right, subject.between_runs + _ROUNDING[name], f"rows in {name}")

    def test_products_with_directions_are_those_of_the_rows(self, subject: EngineSubject) -> None:
        """In float32, as wide as there are directions."""
        random = np.random.default_rng(0).standard_normal((2, subject.hidden))
        projection, raw = Projection.onto(random), subject.raw()
        acts = subject.capture(subject.prompts, layers=list(subject.ends), projection=projection)
        for layer, products in acts.acts.items():
            rows = raw.acts[layer].astype(np.float32)
            hold(products.dtype == np.float32, f"products came in {products.dtype}, expected float32")
            hold(products.shape == (len(rows), 2), f"products have shape {products.shape}, expected {(len(rows), 2)}")
            # A product may be near zero: its error is one of the row's length.
            allowed = subject.between_runs + _ROUNDING[subject.engine.provenance.dtype]
            away = np.abs(products - rows @ projection.directions.T).max(axis=1) / np.linalg.norm(rows, axis=1)
            hold(bool((away <= allowed).all()), f"products at layer {layer} are {away.max()} of a row's length away")

    def test_exact_rows_are_the_references_or_refused(self, subject: EngineSubject) -> None:
        """Each prompt alone and whole, where the engine can."""
        prompts = subject.prompts[:2]
        try:
            acts = subject.capture(prompts, layers=list(subject.ends), exact=True)
        except Unsupported:
            return
        subject.hold_reference(acts, prompts, "exact rows")

    def test_perplexity_is_the_references_or_refused(self, subject: EngineSubject) -> None:
        """Each token's cost in nats, and what follows of it."""
        if not subject.scores:
            for asked in ({"perplexity": True}, {"token_nll": True}):
                _refused_before_a_row(subject, asked)
            return
        acts = subject.capture(subject.prompts, layers=[0], perplexity=True, token_nll=True)
        hold(acts.token_nll is not None and acts.perplexity is not None, "perplexity was asked for and did not come")
        for place, prompt in enumerate(subject.prompts):
            found, right = (acts.token_nll or ())[place], _costs(subject.reference.logits(prompt), prompt)
            hold(found.shape == right.shape, f"prompt {place}: {found.shape} costs, expected {right.shape}")
            away = float(np.abs(found - right).max(initial=0))
            hold(away <= subject.score_tolerance, f"prompt {place}: a token's cost is {away} nats from the reference's")
            said = np.zeros(0) if acts.perplexity is None else acts.perplexity[place]
            expected = np.array(perplexity_of(found.astype(np.float32)))
            hold(
                np.allclose(said, expected, rtol=1e-4, equal_nan=True),
                f"prompt {place}: perplexity {said}, its tokens' costs make {expected}",
            )

    def test_logits_are_the_references_or_refused(self, subject: EngineSubject) -> None:
        """Whole at the last position, and the largest of every position with their ids."""
        if not subject.logits:
            _refused_before_a_row(subject, {"logits": "last"})
            return
        prompts, allowed = subject.prompts[:3], 10 * subject.tolerance
        whole = subject.capture(prompts, layers=(), logits="last").logits
        right = np.stack([subject.reference.logits(prompt)[-1] for prompt in prompts])
        hold_rows(np.zeros((0, 0)) if whole is None else whole, right, allowed, "logits of the last positions")
        top = subject.capture(prompts, layers=(), logits="all", logit_top_k=3)
        every = np.concatenate([subject.reference.logits(prompt) for prompt in prompts])
        hold(top.logits is not None and top.logit_ids is not None, "a top 3 was asked for and did not come")
        if top.logits is not None and top.logit_ids is not None:
            hold(top.logit_ids.shape == (len(every), 3), f"a top 3 of {len(every)} has shape {top.logit_ids.shape}")
            hold_rows(top.logits, np.take_along_axis(every, top.logit_ids, axis=1), allowed, "the top 3")
            hold_rows(top.logits, -np.sort(-every, axis=1)[:, :3], allowed, "the top 3, against the three largest")

    def test_a_capture_that_is_left_leaves_an_engine_that_works(self, subject: EngineSubject) -> None:
        """Closed after its first part, and closed before it began."""
        prompts = [(20 + place % 70, 20 + place * 3 % 61) for place in range(subject.many)]
        spec = CaptureSpec(layers=[subject.ends[1]], pooling="last_token")
        for started in (True, False):
            parts = subject.engine.capture(prompts, spec, ordered=False)
            if started:
                hold(len(next(parts)) > 0, "the first part holds no prompt")
            close = getattr(parts, "close", None)
            if close is not None:
                close()
            del parts
        acts = subject.capture(subject.prompts, layers=list(subject.ends))
        subject.hold_reference(acts, subject.prompts, "after a capture that was left")

    def test_threads_at_once_get_their_own_rows(self, subject: EngineSubject) -> None:
        """Each method may be called from many."""
        layers = list(subject.ends)

        def run(prompt: Ids) -> Activations:
            return subject.capture([prompt], layers=layers)

        with ThreadPoolExecutor(len(subject.prompts)) as threads:
            found = list(threads.map(run, subject.prompts))
        for prompt, acts in zip(subject.prompts, found, strict=True):
            hold(acts.token_ids.tolist() == list(prompt), "a thread got the rows of another's prompt")
            subject.hold_reference(acts, [prompt], "threads at once")


def _hold_same(found: dict[int, Any], right: dict[int, Any], tolerance: float, what: str) -> None:
    hold(sorted(found) == sorted(right), f"{what}: layers {sorted(found)} came, expected {sorted(right)}")
    for layer, rows in found.items():
        hold_rows(rows, right[layer], tolerance, f"{what}, at layer {layer}")


def _hold_picked(subject: EngineSubject, acts: Activations, picked: Sequence[NDArray[Any]], what: str) -> None:
    """Hold ``acts`` to be the raw rows of the first prompts at ``picked`` positions."""
    raw = subject.raw()
    whole = np.concatenate(picked).tolist()
    hold(acts.positions.tolist() == whole, f"positions {what}: rows stand at {acts.positions.tolist()}, not {whole}")
    for place, positions in enumerate(picked):
        right = {layer: raw.prompt(place)[layer][positions] for layer in acts.layers}
        _hold_same(acts.prompt(place), right, subject.between_runs, f"positions {what} of prompt {place}")


def _hold_pooled(subject: EngineSubject, pooling: str, positions: str, raw: Activations) -> None:
    layers = list(subject.ends)
    acts = subject.capture(subject.prompts, layers=layers, pooling=pooling, positions=positions)
    what = f"pooling {pooling!r} of positions {positions!r}"
    one_each = list(range(len(subject.prompts) + 1))
    hold(acts.offsets.tolist() == one_each, f"{what}: offsets {acts.offsets.tolist()}, expected {one_each}")
    hold(acts.pooling == pooling, f"{what}: the rows say {acts.pooling!r}")
    rounding = _ROUNDING[subject.engine.provenance.dtype]
    right = {layer: pool(raw.acts[layer], raw.offsets, pooling) for layer in layers}
    _hold_same(acts.acts, right, subject.between_runs + rounding, what)
    places = {"last_token": raw.offsets[1:] - 1, "first_token": raw.offsets[:-1]}
    for name in ("positions", "token_ids"):
        own = getattr(raw, name)[places[pooling]] if pooling in ONE_TOKEN else np.full(len(acts), -1)
        said = getattr(acts, name).tolist()
        hold(said == own.tolist(), f"{what}: {name} are {said}, expected {own.tolist()}")


def _costs(logits: Floats, prompt: Ids) -> NDArray[np.float64]:
    """Each token's negative log-likelihood but the first's, float64 [tokens - 1], in nats."""
    wide = logits.astype(np.float64)[:-1]
    shifted = wide - wide.max(axis=1, keepdims=True)
    picked = np.take_along_axis(shifted, np.array(prompt[1:], np.int64).reshape(-1, 1), axis=1)[:, 0]
    costs: NDArray[np.float64] = np.log(np.exp(shifted).sum(axis=1)) - picked
    return costs


def _refused_before_a_row(subject: EngineSubject, asked: dict[str, Any]) -> None:
    spec = CaptureSpec(layers=[0], **asked)
    refused(Unsupported, lambda: next(subject.engine.capture(subject.prompts, spec, ordered=False)))
