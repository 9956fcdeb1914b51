"""A fingerprint follows content: another weight, tokenizer or config is another model; another folder or layout is not."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx

from engine.persistence.fingerprints import Fingerprints


def test_equal_snapshots_have_equal_fingerprints_wherever_they_lie(
    write_llama: Callable[..., Path], tmp_path: Path
) -> None:
    one = write_llama()
    two = tmp_path / "elsewhere"
    shutil.copytree(one, two)
    (two / "config.json").write_text((one / "config.json").read_text().replace(", ", ",\n"))  # layout is not content
    assert Fingerprints.of(one, dtype="f32") == Fingerprints.of(two, dtype="f32")


def test_one_changed_weight_is_another_model(
    write_llama: Callable[..., Path], edit_weights: Callable[..., None], edit_json: Callable[..., None]
) -> None:
    folder = write_llama()
    before = Fingerprints.of(folder, dtype="f32")
    edit_weights(folder, {"model.norm.weight": mx.full((64,), 1.5)})
    after = Fingerprints.of(folder, dtype="f32")
    assert before.differing(after) == ("weights",)

    edit_json(folder / "config.json", rope_theta=5000.0)
    assert after.differing(Fingerprints.of(folder, dtype="f32")) == ("config",)

    (folder / "tokenizer.json").write_text("{}")
    known = Fingerprints.of(folder, dtype="bf16", namespace="french")
    assert known.tokenizer
    assert Fingerprints.of(folder, dtype="f32").differing(known) == ("dtype", "namespace")


def test_unknown_parts_do_not_differ() -> None:
    empty: dict[str, Any] = {}
    assert Fingerprints(config="a", weights="b").differing(Fingerprints(**empty)) == ()
