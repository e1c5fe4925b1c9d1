"""The manifest as the format's metadata, and what strangers' metadata may do to us."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from streamtap.dataset.described import describe_hidden, describe_logits, from_metadata, from_sidecar, to_metadata
from streamtap.dataset.manifest import FileSum, Hidden, Logits, Manifest, Shard, value_bytes
from streamtap.dataset.names import INDEX, SIDECAR
from streamtap.errors import DatasetDamaged, Unsupported

POOLED = Hidden((0, 30), 5, "bfloat16", "mean", (Shard(4, 4), Shard(2, 2)))
FULL = Hidden((3,), 5, "float32", None, (Shard(4, 4), Shard(4, 9)), last_token_shards=1)
LOGITS = Logits(10, "float32", (Shard(6, 6, "tensors/logits_topk_000.safetensors"),))
MANIFEST = Manifest(
    "user/model",
    "abc",
    6,
    POOLED,
    LOGITS,
    "random",
    provenance={"by": "us"},
    capture={"identity": {"é": 1}},
    files={"tensors/x": FileSum(3, "f" * 64)},
    content="c",
)


def read(**changes: Any) -> Manifest | None:
    """A whole manifest of version 2.0 with some keys changed; None takes one away."""
    metadata = to_metadata(MANIFEST)
    for key, value in changes.items():
        metadata[f"lmprobe:{key}"] = json.dumps(value)
        if value is None:
            del metadata[f"lmprobe:{key}"]
    return from_metadata(metadata, "user/set")


def said(manifest: Manifest) -> dict[str, Any]:
    return {key: json.loads(value) for key, value in to_metadata(manifest).items()}


def hidden(**changes: Any) -> dict[str, Any]:
    return {"hidden_layers": describe_hidden(POOLED) | changes}


@pytest.mark.parametrize("manifest", [
    MANIFEST,
    replace(MANIFEST, hidden=FULL, logits=None),
    replace(MANIFEST, hidden=None, commit=None, ordering="given"),
    Manifest("m", None, 4, FULL, None),
], ids=["pooled", "full sequence", "logits alone", "bare"])  # fmt: skip
def test_a_manifest_comes_back(manifest: Manifest) -> None:
    again = from_metadata(to_metadata(manifest), "user/set")

    assert again is not None
    assert replace(again, described={}) == manifest
    assert said(again) == said(manifest)


def test_the_keys_are_those_of_the_format() -> None:
    metadata = said(MANIFEST)

    assert list(metadata) == [
        *(
            f"lmprobe:{key}"
            for key in ("format_version", "model", "num_prompts", "prompt_ordering", "tensors", "provenance")
        ),
        "streamtap:manifest",
    ]
    assert metadata["lmprobe:format_version"] == "2.0"
    assert metadata["lmprobe:model"] == {"name": "user/model", "revision": "abc"}
    assert metadata["lmprobe:tensors"]["hidden_layers"] == {
        "type": "hidden",
        "layers": [0, 30],
        "dim": 5,
        "dtype": "bfloat16",
        "layout": "per_layer",
        "file_pattern": "tensors/hidden_layer{layer:03d}_shard{shard:03d}.safetensors",
        "key_pattern": "hidden.layer_{layer}",
        "shards": [{"num_prompts": 4}, {"num_prompts": 2}],
        "storage": "pooled",
        "pooling": "mean",
        "row_bytes": 10,
    }
    assert describe_hidden(FULL)["shards"] == [{"num_prompts": 4, "num_tokens": 4}, {"num_prompts": 4, "num_tokens": 9}]
    assert describe_hidden(FULL)["storage"] == "full_sequence"
    assert describe_hidden(FULL)["last_token_shards"] == 1
    assert metadata["streamtap:manifest"]["files"] == {"tensors/x": [3, "f" * 64]}


@pytest.mark.parametrize("name", ["v2-pooled", "v2-full-sequence", "v2-pooled-logits-ppl", "v2-extraction-bf16"])
def test_descriptions_are_those_that_the_library_writes(name: str, samples: Path) -> None:
    metadata = {key.decode(): value.decode() for key, value in pq.read_schema(samples / name / INDEX).metadata.items()}
    manifest = from_metadata(metadata, name)
    assert manifest is not None
    assert manifest.hidden is not None
    theirs = json.loads(metadata["lmprobe:tensors"])

    assert describe_hidden(manifest.hidden) == theirs["hidden_layers"]
    if manifest.logits is not None:
        # It writes 120, counting ids of 8 bytes.
        assert describe_logits(manifest.logits) == theirs["logits_topk"] | {"row_bytes": 80}


def test_an_upgrade_keeps_what_was_said_and_adds_the_patterns(samples: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        old = from_sidecar((samples / "v1-2-pooled-logits" / SIDECAR).read_bytes(), "old")
    upgraded = said(old)
    theirs = pq.read_schema(samples / "v2-upgraded-from-v1-2" / INDEX).metadata

    for key, value in theirs.items():
        assert upgraded[key.decode()] == json.loads(value)
    assert "streamtap:manifest" not in upgraded


def test_an_upgrade_of_1_0_names_its_files_and_no_pattern(samples: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        old = from_sidecar((samples / "v1-0-colocated" / SIDECAR).read_bytes(), "old")
    again = from_metadata(to_metadata(old), "new")

    assert again is not None
    assert again.hidden == old.hidden
    assert again.tensor_files() == ["tensors/hidden_layers_000.safetensors"]
    assert "file_pattern" not in json.loads(to_metadata(old)["lmprobe:tensors"])["hidden_layers"]


def test_metadata_of_other_programs_is_no_manifest() -> None:
    assert from_metadata({"pandas": "{}", "lmprobe:note": '"x"'}, "user/set") is None


def test_tensors_of_unknown_kinds_are_left_alone() -> None:
    manifest = read(tensors={**hidden(), "router_logits": {"type": "router", "anything": [1]}})

    assert manifest is not None
    assert manifest.hidden == POOLED
    assert "router_logits" in json.loads(to_metadata(manifest)["lmprobe:tensors"])


@pytest.mark.parametrize("version", ["1.0", "1.2", "1.99"])
def test_an_older_version_names_the_command_that_upgrades_it(version: str) -> None:
    with pytest.warns(
        UserWarning, match=f"user/set has the older format version {version}.*: streamtap dataset upgrade user/set$"
    ):
        assert read(format_version=version) is not None


@pytest.mark.parametrize("version", ["2.1", "2.10"])
def test_a_newer_minor_version_is_read_with_a_warning(version: str) -> None:
    with pytest.warns(UserWarning, match=f"version {version}, newer than the 2.0"):
        assert read(format_version=version) is not None


@pytest.mark.parametrize("version", ["3.0", "10.2"])
def test_a_newer_major_version_is_refused(version: str) -> None:
    with pytest.raises(Unsupported, match=f"version {version}.* up to 2.x: pip install --upgrade streamtap"):
        read(format_version=version, tensors="something else")


BAD: dict[str, dict[str, Any]] = {
    "version": {"format_version": "two"},
    "half a version": {"format_version": "2"},
    "no model": {"model": {}},
    "a model that is a list": {"model": ["user/model"]},
    "no number": {"num_prompts": None},
    "a number that is a word": {"num_prompts": "many"},
    "a negative number": {"num_prompts": -1},
    "an endless number": {"num_prompts": float("inf")},
    "tensors that are a number": {"tensors": 3},
    "hidden that is a list": {"tensors": {"hidden_layers": []}},
    "no layers": {"tensors": hidden(layers=[])},
    "a negative layer": {"tensors": hidden(layers=[-1])},
    "layers that are a number": {"tensors": hidden(layers=3)},
    "a negative width": {"tensors": hidden(dim=-5)},
    "no width": {"tensors": hidden(dim=None)},
    "shards that are a number": {"tensors": hidden(shards=3)},
    "a shard that is a number": {"tensors": hidden(shards=[3])},
    "a negative shard": {"tensors": hidden(shards=[{"num_prompts": -3}])},
    "full sequence without tokens": {"tensors": hidden(storage="full_sequence")},
    "logits without k": {"tensors": {"logits_topk": {"shards": []}}},
    "provenance": {"provenance": 3},
}


@pytest.mark.parametrize("name", list(BAD))
def test_damaged_metadata_is_one_sentence(name: str) -> None:
    with pytest.raises(DatasetDamaged, match=r"^the (metadata|format version) of user/set .*[^\n]$"):
        read(**BAD[name])


@pytest.mark.parametrize(
    "ours", ["3", "[]", '"x"', '{"files": 3}', '{"files": {"x": 3}}', '{"files": {"x": ["a", "b"]}}', '{"capture": 3}']
)
def test_a_damaged_part_of_ours_is_one_sentence(ours: str) -> None:
    with pytest.raises(DatasetDamaged, match="^the metadata of user/set "):
        from_metadata(to_metadata(MANIFEST) | {"streamtap:manifest": ours}, "user/set")


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000])
@pytest.mark.parametrize("key", ["lmprobe:model", "lmprobe:tensors", "streamtap:manifest"])
def test_what_is_no_json_is_one_sentence(key: str, text: str) -> None:
    with pytest.raises(DatasetDamaged, match=r"^the metadata of user/set is not JSON \(\w+\)\.$"):
        from_metadata(to_metadata(MANIFEST) | {key: text}, "user/set")


@pytest.mark.parametrize("file", ["../x", "/etc/passwd", "tensors/../../x", "a//b", "", ".", "a\\b", "a\nb", "~/../x"])
@pytest.mark.parametrize("kind", ["hidden_layers", "logits_topk"])
def test_a_shard_outside_the_dataset_is_refused(kind: str, file: str) -> None:
    shards = [{"file": file, "num_prompts": 6}]
    described = (
        hidden(shards=shards) if kind == "hidden_layers" else {kind: describe_logits(LOGITS) | {"shards": shards}}
    )
    with pytest.raises(
        DatasetDamaged, match="^user/set names .* as one of its files, which is not a path inside a dataset"
    ):
        read(tensors=described)


def test_a_shard_whose_file_is_not_named_is_one_sentence() -> None:
    manifest = read(tensors=hidden(layout="together"))
    assert manifest is not None
    with pytest.raises(DatasetDamaged, match="names no file for shard 0"):
        manifest.tensor_files()


def test_files_of_a_manifest(make: Callable[..., Any]) -> None:
    assert MANIFEST.tensor_files() == [
        *(f"tensors/hidden_layer{layer:03d}_shard{shard:03d}.safetensors" for layer in (0, 30) for shard in (0, 1)),
        "tensors/logits_topk_000.safetensors",
    ]
    assert POOLED.file_bytes(0) == 4 * 5 * 2
    assert FULL.file_bytes(1) == 9 * 5 * 4
    assert LOGITS.file_bytes(0) == 6 * 10 * 8
    assert [value_bytes(dtype) for dtype in ("float16", "bfloat16", "float32", "float64", "unknown")] == [2, 2, 4, 8, 4]
