"""A case's KV mode as the engine takes it: every part carried over, none left out."""

from engine.cache.convert import KVMode
from engine.cache.per_layer import LayerWidth
from engine.cache.protocol import Tiling
from parity.kv import KV


def engine_mode(kv: KV) -> KVMode:
    """The engine's mode of a word."""
    return KVMode(
        bits=kv.bits,
        group_size=kv.group_size,
        start=kv.start,
        order=kv.order,
        layers=tuple(LayerWidth(cache=w.cache, bits=w.bits, group_size=w.group_size) for w in kv.layers),
        max_size=kv.max_size,
        keep=kv.keep,
        tiling=None if kv.tile is None else Tiling(size=kv.tile, lifted=kv.lifted),
    )
