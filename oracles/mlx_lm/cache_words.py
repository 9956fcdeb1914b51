"""What kind of cache each layer ended with, in the words of a trace, and whether a KV option was obeyed.

Guarantees: a case that asked for rings or for quantised KV, and held enough tokens for it, passes only if every cache that
it named is what it asked for, and no other one is. mlx-lm and mlx-optiq ignore such options silently for some cache kinds;
here that is an error, never a golden.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any, Final

from parity.case import Case
from parity.kv import KV

PLAIN: Final = "plain"
STATE_ONLY: Final = frozenset({"ArraysCache"})  # recurrent state: no keys and values to quantise


class KVOptionIgnoredError(Exception):
    """The oracle did not keep keys and values as the case asked it to."""


def cache_words(caches: Sequence[object]) -> tuple[str, ...]:
    """One word a cache: `plain`, `quantized-b8-g64`, `rotating-w16-k0`, `arrays-2`, `list[plain,plain]`, or the class name."""
    return tuple(_word(cache) for cache in caches)


def check_kv_obeyed(case: Case, caches: Sequence[object]) -> None:
    """Compare the caches after the last recorded step with what the case asked for.

    Args:
        case: The question.
        caches: The oracle's caches as they stood when the last recorded step had ended.

    Raises:
        KVOptionIgnoredError: A cache that held `kv.start` tokens was not converted, one was that nobody asked for, or one that
            should be a ring is none.
    """
    words = cache_words(caches)
    if not conversion_due(case):
        converted = [word for word in words if "quantized" in word]
        if converted:
            raise KVOptionIgnoredError(f"{case.kv.name} asks for no conversion yet, found {', '.join(converted)}")
        if case.kv.max_size is None:
            return
    of_keys = {i for i, cache in enumerate(caches) if type(cache).__name__ not in STATE_ONLY}
    wanted = _wanted(case.kv, len(words), packed=conversion_due(case))
    named = {i for i in wanted if case.kv.layers or i in of_keys}
    wrong = [i for i in named if i >= len(words) or not re.fullmatch(wanted[i][1], words[i])]
    strays = [i for i, word in enumerate(words) if i not in wanted and "quantized" in word]
    if wrong or strays or not named:
        asked = ", ".join(dict.fromkeys(wanted[i][0] for i in sorted(wanted)))
        found = ", ".join(dict.fromkeys(words)) if not case.kv.layers else ", ".join(words)
        raise KVOptionIgnoredError(
            f"a KV option was silently ignored: asked for {asked}, caches after the run: {found or 'no cache'}"
        )


def conversion_due(case: Case) -> bool:
    """Whether the caches held `kv.start` tokens when the last recorded step ended: the prompt and all its followers but one."""
    return case.kv.packs and len(case.prompt_ids) + case.num_steps - 1 >= case.kv.start


def _wanted(kv: KV, count: int, *, packed: bool) -> dict[int, tuple[str, str]]:
    """By place of a cache: the word that is asked for, and the pattern of those that will do."""
    if kv.layers:
        return {w.cache: _packed(f"-b{w.bits}-g{w.group_size}", at=f" in cache {w.cache}") for w in kv.layers}
    width = f"-b{kv.bits}-g{kv.group_size}" if packed else ""
    if kv.max_size is not None:
        ring = f"rotating{'-quantized' if packed else ''}-w{kv.max_size}-k{kv.keep}{width}"
        return dict.fromkeys(range(max(count, 1)), (ring, ring))
    return dict.fromkeys(range(max(count, 1)), _packed(width))


def _packed(width: str, *, at: str = "") -> tuple[str, str]:
    return f"quantized{width}{at}", rf"(?:quantized|rotating-quantized-w\d+-k\d+){width}"


def _word(cache: Any) -> str:  # noqa: ANN401 - a cache of mlx-lm or mlx-optiq
    words: dict[str, Callable[[], str]] = {
        "KVCache": lambda: PLAIN,
        "RotatingKVCache": lambda: f"rotating-w{cache.max_size}-k{cache.keep}",
        "ArraysCache": lambda: f"arrays-{len(cache.cache)}",
        "CacheList": lambda: f"list[{','.join(_word(member) for member in cache.caches)}]",
        "QuantizedKVCache": lambda: f"quantized-b{cache.bits}-g{cache.group_size}",
        "RotatingQuantizedKVCache": lambda: (
            f"rotating-quantized-w{cache.max_size}-k{cache.keep}-b{cache.bits}-g{cache.group_size}"
        ),
    }
    kind = type(cache).__name__
    return words.get(kind, kind.lower)()
