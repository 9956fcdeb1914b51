"""Every part of a KV word reaches the engine."""

from dataclasses import fields

import pytest

from engine.cache.convert import KVMode
from engine.cache.per_layer import LayerWidth
from engine.cache.protocol import Tiling
from parity.engine_kv import engine_mode
from parity.kv import KV


@pytest.mark.parametrize(
    ("word", "mode"),
    [
        ("fp", KVMode()),
        ("kv4-g32-s16", KVMode(bits=4, group_size=32, start=16)),
        ("kv8-g64-after-prompt", KVMode(bits=8, order="after-prompt")),
        ("kv8-g128-from-empty", KVMode(bits=8, group_size=128, order="from-empty")),
        ("max16-k3-kv8-g64", KVMode(bits=8, max_size=16, keep=3)),
        ("kv8-g64-tiled512", KVMode(bits=8, tiling=Tiling(size=512))),
        ("kv8-g64-tiled16-lifted", KVMode(bits=8, tiling=Tiling(size=16, lifted=True))),
        (
            "config-8g64_0-4g32_3",
            KVMode(layers=(LayerWidth(cache=0, bits=8), LayerWidth(cache=3, bits=4, group_size=32))),
        ),
    ],
)
def test_a_word_becomes_the_engines_mode(word: str, mode: KVMode) -> None:
    assert engine_mode(KV.parse(word)) == mode


def test_no_part_is_unknown_to_the_other_side() -> None:
    ours, theirs = ({field.name for field in fields(kind)} for kind in (KV, KVMode))
    assert ours - {"tile", "lifted"} == theirs - {"tiling"}
