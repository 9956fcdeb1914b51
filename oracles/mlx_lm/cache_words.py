"""What kind of cache each layer ended with, in the words of a trace, and whether a KV option was obeyed.

Guarantees: a case that asked for quantised KV, and held enough tokens for it, passes only if every cache of keys and values
was converted as asked. mlx-lm ignores the option silently for some cache kinds; here that is an error, never a golden.
"""

from collections.abc import Sequence
from typing import Final

from parity.case import KV, Case

PLAIN: Final = "plain"
STATE_ONLY: Final = frozenset({"ArraysCache"})  # recurrent state: no keys and values to quantise


class KVOptionIgnoredError(Exception):
    """The oracle did not quantise a cache that the case asked it to quantise."""


def cache_words(caches: Sequence[object]) -> tuple[str, ...]:
    """One word a cache: `plain`, `quantized-b8-g64`, `rotating-w16-k0`, `arrays-2`, `list[plain,plain]`, or the class name."""
    return tuple(_word(cache) for cache in caches)


def check_kv_obeyed(case: Case, caches: Sequence[object]) -> None:
    """Compare the caches after the last recorded step with what the case asked for.

    Args:
        case: The question.
        caches: The oracle's caches as they stood when the last recorded step had ended.

    Raises:
        KVOptionIgnoredError: A cache that held `kv.start` tokens was not converted, or one was that nobody asked for.
    """
    words = cache_words(caches)
    if not conversion_due(case):
        converted = [word for word in words if word.startswith("quantized")]
        if converted:
            raise KVOptionIgnoredError(f"{case.kv.name} asks for no conversion yet, found {', '.join(converted)}")
        return
    wanted = _quantized(case.kv)
    of_keys = [word for cache, word in zip(caches, words, strict=True) if type(cache).__name__ not in STATE_ONLY]
    if not of_keys or any(word != wanted for word in of_keys):
        found = ", ".join(dict.fromkeys(words)) or "no cache"
        raise KVOptionIgnoredError(
            f"a KV option was silently ignored: asked for {wanted}, caches after the run: {found}"
        )


def conversion_due(case: Case) -> bool:
    """Whether the caches held `kv.start` tokens when the last recorded step ended: the prompt and all its followers but one."""
    return case.kv.bits is not None and len(case.prompt_ids) + case.num_steps - 1 >= case.kv.start


def _word(cache: object) -> str:
    kind = type(cache).__name__
    if kind == "KVCache":
        return PLAIN
    if kind == "RotatingKVCache":
        return f"rotating-w{cache.max_size}-k{cache.keep}"  # type: ignore[attr-defined]
    if kind == "ArraysCache":
        return f"arrays-{len(cache.cache)}"  # type: ignore[attr-defined]
    if kind == "CacheList":
        return f"list[{','.join(_word(member) for member in cache.caches)}]"  # type: ignore[attr-defined]
    if kind == "QuantizedKVCache":
        return f"quantized-b{cache.bits}-g{cache.group_size}"  # type: ignore[attr-defined]
    return kind.lower()


def _quantized(kv: KV) -> str:
    return f"quantized-b{kv.bits}-g{kv.group_size}"
