from __future__ import annotations

from typing import Any

import pytest

from streamtap.errors import DatasetNotFound, InvalidInput
from streamtap.workbench.open_dataset import fetch_dataset_metadata

Bench = Any
PROMPTS = ["The sky", "is blue at noon", "x"]


def test_what_is_there_is_told_without_reading_rows(bench: Bench) -> None:
    bench.fill(PROMPTS, bench.engine(named={"commit": "c0ffee"}, dtype="bfloat16"), cache_logits=True, logit_top_k=3)
    where = bench.push(PROMPTS, layers=[1, 3], labels=[1, 0, 1], metadata=[{"split": "train"}] * 3, shuffle=False)
    for shard in (where / "tensors").iterdir():
        shard.unlink()
    info = fetch_dataset_metadata(where)

    assert (info.model_name, info.model_commit) == ("org/fake", "c0ffee")
    assert (info.available_layers, info.num_prompts, info.pooling) == ([1, 3], 3, "last_token")
    assert (info.dtype, info.hidden, info.format_version) == ("bfloat16", 8, "2.0")
    assert info.prompts == PROMPTS
    assert info.columns["split"] == "string"
    assert "num_prompts=3" in repr(info)


def test_the_version_of_a_dataset_does_not_matter(bench: Bench) -> None:
    with pytest.warns(UserWarning, match="older format version 1.0.*streamtap dataset upgrade"):
        old = fetch_dataset_metadata(bench.sample("v1-0-colocated"))
    new = fetch_dataset_metadata(bench.sample("v2-pooled"))

    assert (old.format_version, new.format_version) == ("1.0", "2.0")
    assert (old.available_layers, new.available_layers) == ([15, 29], [0, 15, 29])
    assert sorted(old.prompts) == sorted(new.prompts)


def test_a_name_that_means_nothing(bench: Bench) -> None:
    with pytest.raises(InvalidInput, match="a dataset is 'user/name'"):
        fetch_dataset_metadata("one two")
    with pytest.raises(DatasetNotFound):
        fetch_dataset_metadata(bench.root / "none")
    with pytest.raises(InvalidInput, match="has no revisions"):
        fetch_dataset_metadata(bench.sample("v2-pooled"), revision="main")
