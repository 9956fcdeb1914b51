"""Facts about mlx-lm's caches: packed keys and values, rings, trimming, what speculative decoding leaves in them."""

from collections.abc import Callable, Mapping
from typing import Any, Final

import mlx.core as mx
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models.cache import BatchRotatingKVCache, ConcatenateKVCache, QuantizedKVCache, make_prompt_cache

from oracles.mlx_lm.observing import Observed, Snapshots, ids_of, raises


def _kv(model: Any, *, bits: int = 8, group: int = 64) -> list[Any]:  # noqa: ANN401 - mlx-lm's
    caches: list[Any] = make_prompt_cache(model)
    packed = {"kv_bits": bits, "kv_group_size": group, "quantized_kv_start": 0}
    list(generate_step(mx.array(ids_of(12)), model, max_tokens=2, prompt_cache=caches, **packed))
    return caches


def kv_bits_rotating(snapshots: Snapshots) -> Observed:
    """Packed keys and a sliding window do not go together."""
    return raises(NotImplementedError, "", lambda: _kv(snapshots.model("gemma3_text-tiny")))


def kv_bits_latent(snapshots: Snapshots) -> Observed:
    """Packed keys and latent attention do not go together: it fails in the middle of a run."""
    return raises((AttributeError, ValueError), "", lambda: _kv(snapshots.model("deepseek_v3-tiny")))  # type: ignore[arg-type]


def kv_bits_gemma2(snapshots: Snapshots) -> Observed:
    """Packed keys and gemma2's own attention do not go together."""
    return raises(TypeError, "", lambda: _kv(snapshots.model("gemma2-tiny")))


def kv_bits_cache_list(snapshots: Snapshots) -> Observed:
    """Packed keys asked of a model whose caches are lists: nothing is packed, nothing is said."""
    caches = _kv(snapshots.model("falcon_h1-tiny"))
    kinds = {type(cache).__name__ for entry in caches for cache in getattr(entry, "caches", [entry])}
    return not any("Quantized" in kind for kind in kinds), f"kv_bits=8 leaves {', '.join(sorted(kinds))}"


def max_kv_size_ignored(snapshots: Snapshots) -> Observed:
    """A bound on the cache that a model with caches of its own kinds does not hear of."""
    kinds = {type(cache).__name__ for cache in make_prompt_cache(snapshots.model("llama-tiny"), max_kv_size=32)}
    felt = {type(cache).__name__ for cache in make_prompt_cache(snapshots.model("qwen3-tiny"), max_kv_size=32)}
    return kinds == {"KVCache"} and felt == {"RotatingKVCache"}, f"llama {', '.join(kinds)}; qwen3 {', '.join(felt)}"


def quantized_cache_from_empty(_: Snapshots) -> Observed:
    """An empty packed cache of 5 bits allocates too few words for heads of 128."""
    keys = mx.random.normal((1, 2, 4, 128))
    return raises(ValueError, "", lambda: QuantizedKVCache(group_size=64, bits=5).update_and_fetch(keys, keys))


def concatenated_cache_trim(_: Snapshots) -> Observed:
    """Trimming moves the offset and leaves the keys, so that the next call attends to what was trimmed."""
    cache = ConcatenateKVCache()
    keys = mx.random.normal((1, 2, 8, 64))
    cache.update_and_fetch(keys, keys)
    trimmed = cache.trim(3)
    held, _ = cache.update_and_fetch(keys[:, :, :1], keys[:, :, :1])
    return (trimmed, held.shape[2]) == (
        3,
        9,
    ), f"trim(3) of 8 returns {trimmed}; with one more there are {held.shape[2]}"


def batch_rotating_state(_: Snapshots) -> Observed:
    """A batch of rings that was saved does not work when it is loaded."""
    cache = BatchRotatingKVCache(8, [0, 1])
    keys = mx.random.normal((2, 2, 4, 64))
    cache.update_and_fetch(keys, keys)
    loaded = BatchRotatingKVCache.from_state(cache.state)
    return raises(AttributeError, "_lengths", lambda: loaded.update_and_fetch(keys, keys))


def speculative_sliding_window(snapshots: Snapshots) -> Observed:
    """Beyond the window rejected tokens stay in the ring: other ids than those of plain greedy decoding."""
    model, draft = snapshots.model("llama_sliding-tiny"), snapshots.model("llama-tiny", num_hidden_layers=4)

    def differ(length: int, steps: int) -> int:
        prompt = mx.array(ids_of(length))
        plain = [int(token) for token, _ in generate_step(prompt, model, max_tokens=steps)]
        drafted = [int(step[0]) for step in speculative_generate_step(prompt, model, draft, max_tokens=steps)]
        return sum(a != b for a, b in zip(plain, drafted, strict=True))

    short, long = differ(2, 8), differ(40, 24)
    return short == 0 < long, f"{long} of 24 ids after 40 tokens differ, {short} of 8 after 2 (window 16)"


CACHE_FACTS: Final[Mapping[str, Callable[[Snapshots], Observed]]] = {
    "batch_rotating_state": batch_rotating_state,
    "concatenated_cache_trim": concatenated_cache_trim,
    "kv_bits_cache_list": kv_bits_cache_list,
    "kv_bits_gemma2": kv_bits_gemma2,
    "kv_bits_latent": kv_bits_latent,
    "kv_bits_rotating": kv_bits_rotating,
    "max_kv_size_ignored": max_kv_size_ignored,
    "quantized_cache_from_empty": quantized_cache_from_empty,
    "speculative_sliding_window": speculative_sliding_window,
}
