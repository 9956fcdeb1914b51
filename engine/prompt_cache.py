"""The prompt cache: caches of prompts that were fed before, so that a later prompt starts from their longest common beginning.

Capped by bytes, never by number; the least recently used entry goes first. Entries are values: what a hit hands out is shared
with the store, and neither can change the other.

Guarantees: a hit holds exactly the first tokens of the prompt, and leaves at least one to feed. What was computed with other
adapters is never found: each namespace is by itself. A run that continues on a hit has the bits of a cold run that was fed in
the same pieces; where bits do not depend on the pieces (plain caches of ordinary attention) that is every cold run.
Source: spec/kv.md section 13.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from engine.cache.protocol import Cache, held_bytes
from engine.cache.trim import trimmed
from engine.errors import RequestError

MAX_BYTES = 2_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Hit:
    """What was found for a prompt.

    Attributes:
        num_tokens: First tokens of the prompt that are in the caches; the others are to be fed.
        caches: To continue on.
    """

    num_tokens: int
    caches: tuple[Cache, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """What has happened.

    Attributes:
        hits: Prompts for which something was found.
        misses: Prompts for which nothing was.
        tokens: Tokens that hits have spared, in all.
        evicted: Entries that went to make room.
        superseded: Entries that went because a longer one replaced them.
        too_large: Caches that were not kept because they alone exceed the cap.
    """

    hits: int = 0
    misses: int = 0
    tokens: int = 0
    evicted: int = 0
    superseded: int = 0
    too_large: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Entry:
    namespace: str
    tokens: tuple[int, ...]
    caches: tuple[Cache, ...]
    num_bytes: int

    @property
    def trimmable(self) -> bool:
        return all(cache.trimmable for cache in self.caches)


@dataclass(slots=True)
class PromptCache:
    """Caches of earlier prompts.

    Attributes:
        max_bytes: What all entries together may hold; 0 keeps none.
        counters: What has happened so far.
    """

    max_bytes: int = MAX_BYTES
    counters: Counters = field(default_factory=Counters)
    _entries: list[_Entry] = field(default_factory=list)  # the least recently used one first

    def __post_init__(self) -> None:
        """Refuse a cap below nothing.

        Raises:
            RequestError: It is negative.
        """
        if self.max_bytes < 0:
            raise RequestError(
                "a prompt cache cannot hold less than nothing",
                max_bytes=self.max_bytes,
                next_step="use 0 to switch it off",
            )

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_bytes(self) -> int:
        """Bytes of all entries' arrays; arrays that two entries share count in both."""
        return sum(entry.num_bytes for entry in self._entries)

    def take(self, prompt_ids: Sequence[int], *, namespace: str = "", keep: bool = True) -> Hit | None:
        """The longest beginning of a prompt that an entry can give; the earlier entry of two that give equally much.

        An entry that goes on otherwise than the prompt, or as far as its end, is cut back, and counts only if all its caches
        can forget their last tokens: a ring that has turned, or a recurrent state, is used whole or not at all.

        Args:
            prompt_ids: The prompt; its last token is always left to feed.
            namespace: As it was stored under.
            keep: False removes the entry: it is handed over.

        Returns:
            None where no entry begins as the prompt does.
        """
        best, length = None, 0
        for entry in self._entries:
            if entry.namespace != namespace:
                continue
            shared = min(common_prefix(entry.tokens, prompt_ids), len(prompt_ids) - 1)
            if shared > length and (shared == len(entry.tokens) or entry.trimmable):
                best, length = entry, shared
        if best is None:
            self._count(misses=1)
            return None
        self._count(hits=1, tokens=length)
        self._entries.remove(best)
        if keep:
            self._entries.append(best)
        return Hit(num_tokens=length, caches=trimmed(best.caches, len(best.tokens) - length))

    def put(self, tokens: Sequence[int], caches: Sequence[Cache], *, namespace: str = "") -> bool:
        """Keep the caches of a sequence.

        Entries of the same tokens go, and entries of their beginnings where the new one can be cut back to them.

        Args:
            tokens: Exactly those whose keys and values are in the caches.
            caches: After a forward.
            namespace: What else went into the keys (`namespace_of`).

        Returns:
            False where they alone exceed the cap, and are not kept.

        Raises:
            RequestError: There are no tokens, or not as many as a cache has seen.
        """
        if not tokens or any(cache.offset != len(tokens) for cache in caches):
            raise RequestError(
                "the tokens are not those in the caches",
                tokens=len(tokens),
                caches=", ".join(sorted({str(cache.offset) for cache in caches})) + " seen",
                next_step="give the prompt and every token that was fed after it, and no other",
            )
        num_bytes = sum(held_bytes(cache) for cache in caches)
        if num_bytes > self.max_bytes:
            self._count(too_large=1)
            return False
        new = _Entry(namespace=namespace, tokens=tuple(tokens), caches=tuple(caches), num_bytes=num_bytes)
        kept = [entry for entry in self._entries if not _replaces(new, entry)]
        self._count(superseded=len(self._entries) - len(kept))
        self._entries = [*kept, new]
        while self.num_bytes > self.max_bytes:
            del self._entries[0]
            self._count(evicted=1)
        return True

    def clear(self) -> None:
        """Forget all entries; counters stay."""
        self._entries.clear()

    def _count(self, **more: int) -> None:
        self.counters = replace(
            self.counters, **{name: getattr(self.counters, name) + count for name, count in more.items()}
        )


def namespace_of(adapter_ids: Sequence[str]) -> str:
    """The namespace of the adapters that are active, in their order; empty for none.

    Raises:
        RequestError: An id is empty or holds a `+`: two sets of adapters would share a name.
    """
    if bad := [name for name in adapter_ids if not name or "+" in name]:
        raise RequestError("not the name of an adapter", given=repr(bad[0]), next_step="use names without +")
    return "+".join(adapter_ids)


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens that both begin with."""
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return place
    return min(len(one), len(other))


def _replaces(new: _Entry, old: _Entry) -> bool:
    if new.namespace != old.namespace or new.tokens[: len(old.tokens)] != old.tokens:
        return False
    return len(new.tokens) == len(old.tokens) or new.trimmable
