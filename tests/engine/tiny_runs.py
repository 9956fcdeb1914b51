"""Models of every cache kind with ids to force, for tests of what is kept between two forwards."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from engine.cache.chunked import ChunkedCache
from engine.cache.convert import KVMode, started
from engine.cache.paged import paged
from engine.cache.per_layer import LayerWidth
from engine.cache.protocol import Cache, Tiling
from engine.dtype import DTypeName
from engine.generate import Step, forced, steps
from engine.model import CausalModel, open_model
from engine.turboquant.caches import KeyValueTurbo, VlmTurbo, turbo_caches
from parity.models.fetch import ensure_snapshot

AS_COMPUTED: Final = KVMode()
MIXED: Final = (LayerWidth(cache=0, bits=8, group_size=32), LayerWidth(cache=2, bits=4, group_size=64))
Words = npt.NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyRun:
    """A tiny snapshot, a dtype and a KV mode."""

    snapshot: str
    dtype: DTypeName = "f32"
    kv: KVMode = AS_COMPUTED
    begin: Callable[[CausalModel], tuple[Cache, ...]] | None = None

    @property
    def model(self) -> CausalModel:
        return _opened(self.snapshot, self.dtype)

    def make_caches(self) -> tuple[Cache, ...]:
        """Empty ones, as the mode wants them to begin."""
        if self.begin is not None:
            return self.begin(self.model)
        return started(self.model.make_caches(), self.kv)

    def run(self, ids: Sequence[int], *, rows: int, caches: Sequence[Cache] | None = None) -> list[Step]:
        """All but the last `rows - 1` ids are fed as a prompt; the others are forced one by one."""
        caches = self.make_caches() if caches is None else caches
        prompt, later = ids[: len(ids) - rows + 1], [*ids[len(ids) - rows + 1 :], 0]
        return list(steps(self.model, prompt, num_steps=rows, pick=forced(later), kv=self.kv, caches=caches))


def turbo(snapshot: str, mode: KeyValueTurbo | VlmTurbo) -> TinyRun:
    """A tiny snapshot in a form of TurboQuant."""
    return TinyRun(snapshot=snapshot, begin=lambda model: turbo_caches(model, mode))


RUNS: Final = {
    "plain": TinyRun(snapshot="llama-tiny"),
    "plain-bf16": TinyRun(snapshot="llama-tiny", dtype="bf16"),
    "quantized-b4-g32": TinyRun(snapshot="llama-tiny", kv=KVMode(bits=4, group_size=32)),
    "quantized-b3-g64": TinyRun(snapshot="llama-tiny", kv=KVMode(bits=3, group_size=64)),
    "quantized-from-empty": TinyRun(snapshot="llama-tiny", kv=KVMode(bits=8, group_size=32, order="from-empty")),
    "mixed-widths": TinyRun(snapshot="llama-tiny", kv=KVMode(layers=MIXED, tiling=Tiling(size=16, lifted=True))),
    "chunked": TinyRun(snapshot="llama-tiny", begin=lambda _: (ChunkedCache(chunk_size=8192),) * 4),
    "paged": TinyRun(snapshot="llama-tiny", begin=lambda model: paged(model.make_caches(), tokens=96, block_size=16)),
    "turboquant": turbo("llama-tiny", KeyValueTurbo(key_bits=4, value_bits=3)),
    "turboquant-deferred": turbo("qwen3-tiny", KeyValueTurbo(deferred=True)),
    "turboquant-vlm": turbo("llama-tiny", VlmTurbo(bits=3.5)),
    "rotating": TinyRun(snapshot="llama_sliding-tiny"),
    "rotating-kept": TinyRun(snapshot="qwen3-tiny", kv=KVMode(max_size=16, keep=4)),
    "rotating-quantized": TinyRun(snapshot="llama_sliding-tiny", kv=KVMode(bits=8, group_size=32)),
    "recurrent": TinyRun(snapshot="qwen3_5-tiny"),
    "recurrent-quantized": TinyRun(snapshot="qwen3_5-tiny", kv=KVMode(bits=8, group_size=64)),
    "latents-and-index": TinyRun(snapshot="deepseek_v32-tiny"),
    "scan-and-plain": TinyRun(snapshot="falcon_h1-tiny"),
}


def random_ids(seed: int, count: int, vocabulary: int = 500) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(0, vocabulary, count)]


def words(array: mx.array) -> Words:
    """The stored words of an array."""
    return np.array(array.view({1: mx.uint8, 2: mx.uint16, 4: mx.uint32}[array.dtype.size]))


def rows_of(run: Sequence[Step]) -> list[str]:
    """The digest of every row's bits: where two differ, what is shown of them stays short."""
    return [digest(words(step.logits_BV)) for step in run]


def digest(bits: npt.NDArray[np.unsignedinteger]) -> str:
    """SHA-256 of words, in hex."""
    return hashlib.sha256(bits.tobytes()).hexdigest()


@cache
def _opened(snapshot: str, dtype: DTypeName) -> CausalModel:
    return open_model(ensure_snapshot(snapshot).path, dtype=dtype)
