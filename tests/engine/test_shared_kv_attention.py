"""Who reads whose keys and values, and what a layer is given for it."""

import re
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import ConfigError
from engine.model import open_model
from engine.shared_kv_attention import FULL, SLIDING, donors, unread
from parity.models.fetch import ensure_snapshot

kinds = st.lists(st.sampled_from([FULL, SLIDING]), min_size=1, max_size=12)


@given(kinds, st.integers(0, 12))
def test_a_layer_reads_its_own_or_the_last_own_one_of_its_kind(layers: list[str], shared: int) -> None:
    own = len(layers) - shared
    if own < 1 or set(layers) - set(layers[:own]):
        with pytest.raises(ConfigError, match=r"the layers of config\.json do not fit together"):
            donors(layers, shared=shared)
        return
    read = donors(layers, shared=shared)
    assert read[:own] == tuple(range(own))
    for layer, donor in enumerate(read[own:], own):
        assert donor < own
        assert layers[donor] == layers[layer]
        assert layers[layer] not in layers[donor + 1 : own]


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        donors([FULL, "linear_attention"], shared=0)
    assert str(caught.value) == (
        "the layers of config.json do not fit together\n"
        "  layer types           full_attention, linear_attention\n"
        "  num kv shared layers  0\n"
        "  known                 full_attention and sliding_attention; the last layers read the keys and values of an earlier"
        " one of their kind\n"
        "  next                  mend config.json"
    )


def test_only_layers_without_keys_of_their_own_may_carry_some_that_nobody_reads() -> None:
    patterns = unread("model.layers", own=1, total=3)

    def dropped(name: str) -> bool:
        return any(re.fullmatch(pattern, name) for pattern in patterns)

    assert dropped("model.layers.1.self_attn.k_proj.weight")
    assert dropped("model.layers.2.self_attn.v_proj.scales")
    assert dropped("model.layers.2.self_attn.k_norm.weight")
    for used in ("model.layers.0.self_attn.k_proj.weight", "model.layers.1.self_attn.q_proj.weight"):
        assert not dropped(used)
    assert not dropped("modelxlayers.1.self_attn.k_proj.weight")


def test_a_layer_that_is_given_the_wrong_thing_says_so() -> None:
    model: Any = open_model(ensure_snapshot("gemma4_text_ple_kvshared-tiny").path, dtype="f32")
    x = mx.zeros((1, 2, 128))
    cache = model.make_caches()[0]
    own, reader = model.blocks[0].attention, model.blocks[4].attention
    _, _, seen = own(x, cache, None)
    with pytest.raises(TypeError, match=r"model\.layers\.0\.self_attn needs a cache"):
        own(x, None, seen)
    for given_cache, given_kv in ((None, None), (cache, None), (cache, seen)):
        with pytest.raises(TypeError, match=r"model\.layers\.4\.self_attn needs donated keys and values"):
            reader(x, given_cache, given_kv)
