import json
import math
from importlib.resources import files
from typing import Any

import pytest

from parity.errors import SnapshotError
from parity.models.tiny_shapes import shapes

SMALL = {
    "model_type": "llama",
    "hidden_size": 8,
    "vocab_size": 10,
    "intermediate_size": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "num_hidden_layers": 1,
    "tie_word_embeddings": True,
}
TIED = {
    "model.embed_tokens.weight": (10, 8),
    "model.layers.0.input_layernorm.weight": (8,),
    "model.layers.0.self_attn.q_proj.weight": (24, 8),
    "model.layers.0.self_attn.k_proj.weight": (12, 8),
    "model.layers.0.self_attn.v_proj.weight": (12, 8),
    "model.layers.0.self_attn.o_proj.weight": (8, 24),
    "model.layers.0.post_attention_layernorm.weight": (8,),
    "model.layers.0.mlp.gate_proj.weight": (12, 8),
    "model.layers.0.mlp.up_proj.weight": (12, 8),
    "model.layers.0.mlp.down_proj.weight": (8, 12),
    "model.norm.weight": (8,),
}


def test_a_tied_llama_has_exactly_these_tensors() -> None:
    assert shapes(SMALL) == TIED


def test_an_untied_llama_has_a_head_as_well() -> None:
    assert shapes(SMALL | {"tie_word_embeddings": False}) == TIED | {"lm_head.weight": (10, 8)}


def test_biases_are_as_long_as_their_outputs() -> None:
    biased = shapes(SMALL | {"attention_bias": True, "mlp_bias": True})
    extra = {name: shape for name, shape in biased.items() if name not in TIED}
    assert set(extra) == {
        f"model.layers.0.{path}.bias"
        for path in [f"self_attn.{p}_proj" for p in "qkvo"] + [f"mlp.{p}_proj" for p in ("gate", "up", "down")]
    }
    assert all(shape == biased[name.replace(".bias", ".weight")][:1] for name, shape in extra.items())


def test_head_width_and_key_heads_have_the_hubs_defaults() -> None:
    plain = shapes({k: v for k, v in SMALL.items() if k not in {"head_dim", "num_key_value_heads"}})
    assert plain["model.layers.0.self_attn.k_proj.weight"] == (8, 8)


def test_an_unknown_family_names_the_known_ones() -> None:
    with pytest.raises(SnapshotError) as caught:
        shapes({"model_type": "alpaca"})
    assert str(caught.value) == (
        "no tiny snapshot of model_type 'alpaca' can be made\n"
        "  known  llama\n"
        "  next   use one of these, or add the family to parity/models/tiny_shapes.py"
    )


def test_a_missing_key_is_named() -> None:
    with pytest.raises(SnapshotError, match=r"lacks a key\n  key   tie_word_embeddings"):
        shapes({k: v for k, v in SMALL.items() if k != "tie_word_embeddings"})


def test_forty_tokens_see_every_band_of_llama_tinys_rope() -> None:
    """Scaling that a 40-token prompt could not see would leave a wrong scaling unseen too."""
    config: dict[str, Any] = json.loads((files("parity.models") / "configs" / "llama.json").read_text())
    scaling = config["rope_scaling"]
    original = scaling["original_max_position_embeddings"]
    waves = [2 * math.pi * config["rope_theta"] ** (2 * i / config["head_dim"]) for i in range(config["head_dim"] // 2)]
    kept = [w for w in waves if w < original / scaling["high_freq_factor"]]
    scaled = [w for w in waves if w > original / scaling["low_freq_factor"]]
    between = [w for w in waves if w not in kept and w not in scaled]
    assert min(len(kept), len(between), len(scaled)) >= 3
    turn = 2 * math.pi * 39
    assert turn / min(between) > 1
    seen = [turn / w * (1 - 1 / scaling["factor"]) for w in scaled]
    assert max(seen) > 1  # a radian at the last of 40 positions
