"""Prompt caches that mlx-lm itself wrote, and what its caches give after one more append: fixtures of the file's readers.

`python -m oracles.mlx_lm.prompt_cache_fixture tests/fixtures/mlx_lm` in mlx-lm's environment, from the repository's root.
`--check FILE` instead loads a prompt cache with mlx-lm's own loader, appends the same to it, and compares bits with the
recorded continuation: the proof that a file written elsewhere is one that mlx-lm reads.

Guarantees: the values follow from a seed; the bits of everything but the packed caches' words are those of the seed's numbers.
"""

import sys
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import numpy as np
from mlx_lm.models import cache as kinds

CACHES: Final = "prompt_cache.safetensors"
CONTINUED: Final = "prompt_cache_continued.safetensors"
TOKENS: Final = 11


def numbers(seed: int, *shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    """Normally distributed values of a seed."""
    return mx.array(np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)).astype(dtype)


def filled(cache: Any, *, heads: int, width: int, seed: int, dtype: mx.Dtype = mx.float32) -> Any:  # noqa: ANN401
    """The cache after pieces of 7, 1, 1 and 2 positions: a ring of 6 has wrapped then."""
    for piece, length in enumerate((7, 1, 1, 2)):
        new = numbers(seed + piece, 1, heads, length, width, dtype=dtype)
        cache.update_and_fetch(new, new * 2)
    return cache


def made() -> list[Any]:
    """One cache of every class that goes over."""
    plain = filled(kinds.KVCache(), heads=2, width=4, seed=1)
    arrays = kinds.ArraysCache(3)
    arrays[0], arrays[2] = numbers(20, 1, 3, 8, dtype=mx.bfloat16), numbers(21, 1, 2, 4, 4)
    chunked = filled(kinds.ChunkedKVCache(8), heads=1, width=4, seed=80)
    chunked.maybe_trim_front()
    member = kinds.ArraysCache(1)
    member[0] = numbers(22, 1, 5)
    return [
        plain,
        filled(kinds.RotatingKVCache(max_size=6), heads=1, width=4, seed=30, dtype=mx.bfloat16),
        filled(kinds.RotatingKVCache(max_size=8, keep=2), heads=1, width=4, seed=40),
        filled(kinds.KVCache(), heads=1, width=32, seed=50, dtype=mx.float16).to_quantized(group_size=32, bits=4),
        arrays,
        kinds.CacheList(member, filled(kinds.KVCache(), heads=1, width=2, seed=60)),
        kinds.CacheList(filled(kinds.KVCache(), heads=1, width=2, seed=70), kinds.KVCache()),
        chunked,
        kinds.QuantizedKVCache(group_size=32, bits=8),
    ]


def continued(caches: list[Any]) -> dict[str, mx.array]:
    """What one more position gives, a cache of keys and values each: the new one (`N.new`) and all that is fetched."""
    out: dict[str, mx.array] = {}
    for place, cache in enumerate(caches):
        for number, member in enumerate(cache.caches if isinstance(cache, kinds.CacheList) else [cache]):
            if isinstance(member, kinds.ArraysCache) or member.empty():
                continue
            quantized = isinstance(member, kinds.QuantizedKVCache)
            width = member.keys[1].shape[-1] * member.group_size if quantized else member.keys.shape[-1]
            dtype = member.keys[1].dtype if quantized else member.keys.dtype
            heads = (member.keys[0] if quantized else member.keys).shape[1]
            new = numbers(90 + place, 1, heads, 1, width, dtype=dtype)
            out[f"{place}.{number}.new"] = new
            for word, fetched in zip(("keys", "values"), member.update_and_fetch(new, new * 3), strict=True):
                parts = fetched if quantized else [fetched]
                out |= {f"{place}.{number}.{word}.{part}": mx.contiguous(array) for part, array in enumerate(parts)}
    return out


def bits(array: mx.array) -> tuple[str, list[int], bytes]:
    """Dtype, shape and words."""
    word = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32}[array.dtype.size]
    return str(array.dtype), list(array.shape), np.array(array.view(word)).tobytes()


def recording(file: Path) -> dict[str, mx.array]:
    """Tensors of a file, by name."""
    loaded = mx.load(str(file))
    if not isinstance(loaded, dict):
        raise TypeError(f"{file.name} holds no named tensors")
    return loaded


def check(file: Path, folder: Path) -> int:
    """Load `file` with mlx-lm and compare its continuation with the recorded one; the number of tensors that differ."""
    caches, metadata = kinds.load_prompt_cache(str(file), return_metadata=True)
    recorded, found = recording(folder / CONTINUED), continued(caches)
    differing = sorted(set(recorded) ^ set(found))
    differing += [name for name in set(recorded) & set(found) if bits(recorded[name]) != bits(found[name])]
    classes = ", ".join(type(cache).__name__ for cache in caches)
    print(f"{len(recorded)} tensors, {len(differing)} differ {differing[:5]}; metadata {metadata}; {classes}")  # noqa: T201
    return len(differing)


def main(arguments: list[str]) -> int:
    """Write the fixtures, or check a file against them."""
    if arguments[0] == "--check":
        return 1 if check(Path(arguments[1]), Path(arguments[2])) else 0
    folder = Path(arguments[0])
    caches = made()
    kinds.save_prompt_cache(str(folder / CACHES), caches, {"model": "none", "tokens": str(TOKENS)})
    mx.save_safetensors(str(folder / CONTINUED), continued(caches))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
