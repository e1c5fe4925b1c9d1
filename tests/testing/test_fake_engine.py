from __future__ import annotations

import subprocess
import sys
from itertools import combinations

import numpy as np
import pytest

from streamtap.activations import in_asked_order
from streamtap.engines.base import Engine
from streamtap.errors import InvalidInput
from streamtap.spec import CaptureSpec
from streamtap.testing.fake_engine import FakeEngine, FakeRun

PROMPTS = ["a rule", "is", "a rule of sorts", "is", "so"]


def test_it_is_an_engine() -> None:
    assert isinstance(FakeEngine(), Engine)


def test_it_needs_no_torch() -> None:
    code = "import sys, streamtap.testing.fake_engine; print({'torch', 'transformers'} & set(sys.modules))"

    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_whatever_is_mixed_up_shows() -> None:
    engine, other = FakeEngine(), FakeEngine(named={"commit": "fake-2"})
    rows = [engine.rows([5, 6, 7], layer) for layer in range(4)]
    rows += [engine.rows([5, 6, 7], 0, exact=True), other.rows([5, 6, 7], 0), engine.rows([6, 5, 7], 0)]

    for left, right in combinations(rows, 2):
        assert not (left == right).any()
    assert len(np.unique(rows)) == 7 * 3 * 8
    np.testing.assert_array_equal(engine.rows([5, 6, 9], 0)[:2], rows[0][:2])  # a row knows nothing of what follows


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_two_dtypes_are_one_model_rounded(dtype: str) -> None:
    found = FakeEngine(dtype=dtype).rows([5, 6, 7], 2)

    assert found.dtype.name == dtype
    np.testing.assert_array_equal(found, FakeEngine(dtype="float64").rows([5, 6, 7], 2).astype(found.dtype))


def test_both_orders_hold_the_same() -> None:
    engine = FakeEngine(batch_size=2)
    spec = CaptureSpec(perplexity=True, token_nll=True, logits="all", logit_top_k=3)
    (ordered,) = engine.capture(PROMPTS, spec)
    parts = list(engine.capture(PROMPTS, spec, ordered=False))

    assert [part.index.tolist() for part in parts] == [[2, 0], [1, 3], [4]]
    sorted_again = in_asked_order(parts)
    for layer in range(4):
        np.testing.assert_array_equal(ordered.acts[layer], sorted_again.acts[layer])
    np.testing.assert_array_equal(ordered.perplexity, sorted_again.perplexity)
    np.testing.assert_array_equal(ordered.logit_ids, sorted_again.logit_ids)
    means = [np.exp(each.mean()) for each in ordered.token_nll]
    np.testing.assert_allclose(ordered.perplexity[:, 0], means, rtol=1e-5)


def test_it_counts_what_it_ran() -> None:
    engine = FakeEngine(batch_size=2)
    list(engine.capture([[5, 6], [7]], CaptureSpec(layers=[1, 3], perplexity=True)))

    assert engine.runs == [FakeRun((5, 6), (1, 3), ("perplexity",)), FakeRun((7,), (1, 3), ("perplexity",))]
    assert engine.batches == 1
    with pytest.raises(InvalidInput, match="nothing was asked for"):
        list(engine.capture([[5]], CaptureSpec(layers=())))
