"""The config of a llama: what it refuses, in words, and that nothing is passed over."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ConfigError
from engine.families.llama import Config, Model
from engine.model import open_model

LONGROPE = {"type": "longrope", "original_max_position_embeddings": 16, "long_factor": [1.0 + i / 4 for i in range(16)]}


def config(folder: Path, **changes: Any) -> Config:
    return Config.read(json.loads((folder / "config.json").read_text()) | changes)


def test_an_activation_other_than_silu_is_refused(write_llama: Callable[..., Path]) -> None:
    folder = write_llama()
    assert config(folder, hidden_act="silu") == config(folder)
    with pytest.raises(ConfigError) as caught:
        config(folder, hidden_act="gelu")
    assert str(caught.value) == (
        'llama computes hidden_act "silu" only\n'
        '  found  "gelu"\n'
        "  next   use a snapshot whose config.json says so"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("layer_types", "window", "told"),
    [
        (["sliding_attention", "full_attention"], None, "2 of kind full_attention, sliding_attention"),
        (["sliding_attention", "full_attention"], 0, "2 of kind full_attention, sliding_attention"),
        (["full_attention", "linear_attention"], 16, "2 of kind full_attention, linear_attention"),
        (["full_attention"] * 3, 16, "3 of kind full_attention"),
        ([], 16, "0 of kind none"),
    ],
)
def test_layers_of_no_known_kind_or_number_or_without_their_window_are_refused(
    write_llama: Callable[..., Path], layer_types: list[str], window: int | None, told: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        config(write_llama(), layer_types=layer_types, sliding_window=window)
    assert str(caught.value) == (
        "llama has no such layers\n"
        f"  layer types        {told}\n"
        "  num hidden layers  2\n"
        f"  sliding window     {window}\n"
        "  known              full_attention, or sliding_attention with a sliding_window of at least 1\n"
        "  next               mend config.json"
    )


@pytest.mark.parametrize(
    ("changes", "heads", "kv", "width"),
    [
        ({"num_key_value_heads": 3}, 4, 3, 32),
        ({"num_key_value_heads": 8}, 4, 8, 32),
        ({"head_dim": 33}, 4, 2, 33),
        ({"head_dim": None, "num_attention_heads": 64}, 64, 2, 1),
    ],
)
def test_heads_that_do_not_fit_are_refused(
    write_llama: Callable[..., Path], changes: dict[str, Any], heads: int, kv: int, width: int
) -> None:
    with pytest.raises(ConfigError) as caught:
        config(write_llama(), **changes)
    assert str(caught.value) == (
        "the heads of config.json do not fit together\n"
        f"  num attention heads  {heads}\n"
        f"  num key value heads  {kv}\n"
        f"  head dim             {width}\n"
        f"  rotated              {width}\n"
        "  next                 mend config.json"
    )


def test_an_unknown_key_is_refused(write_llama: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match=r"^config key 'logit_scale' is unknown to model_type 'llama'\n"):
        config(write_llama(), logit_scale=2.0)


@pytest.mark.parametrize("changes", [{"head_dim": None}, {"num_key_value_heads": None}, {"num_key_value_heads": 0}])
def test_no_heads_are_refused(write_llama: Callable[..., Path], changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        config(write_llama(), num_attention_heads=0, **changes)


def test_layer_types_that_are_no_names_are_refused(write_llama: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError):
        config(write_llama(), layer_types=[1, "full_attention"])


def test_a_rotation_stretched_pair_by_pair_knows_the_longest_context(write_llama: Callable[..., Path]) -> None:
    folder = write_llama(rope_scaling=LONGROPE, max_position_embeddings=64)
    model = open_model(folder, dtype="f32")
    assert isinstance(model, Model)
    rope = model.blocks[0].attention.rope
    assert rope is not None
    assert rope.gain == (1 + math.log(4) / math.log(16)) ** 0.5
    with pytest.raises(ConfigError, match=r"^rope scaling 'longrope' does not fit the model\n"):
        open_model(write_llama(rope_scaling=LONGROPE, max_position_embeddings=None), dtype="f32")
