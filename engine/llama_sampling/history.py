"""The token history: the last n accepted tokens, which penalties and DRY look at.

Guarantees: holds at most its capacity, oldest first; only accepted tokens are in it, so a prompt counts when the caller
accepts it and not otherwise.
"""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Self

from engine.errors import RequestError
from engine.llama_sampling.options import check_whole


class TokenHistoryTracker:
    """A ring of accepted tokens.

    Args:
        capacity: Tokens kept; 0 keeps none.
        tokens: Accepted at once, in order.

    Raises:
        RequestError: The capacity is negative, or a token is not an id.
    """

    def __init__(self, capacity: int, tokens: Iterable[int] = ()) -> None:
        check_whole("history capacity", capacity, low=0)
        self._ring: deque[int] = deque(maxlen=capacity)
        for token in tokens:
            self.accept(token)

    @property
    def capacity(self) -> int:
        """Tokens kept at most."""
        return self._ring.maxlen or 0

    @property
    def tokens(self) -> tuple[int, ...]:
        """What is kept, oldest first."""
        return tuple(self._ring)

    def accept(self, token_id: int) -> None:
        """Append a token; the oldest one goes when the ring is full.

        Raises:
            RequestError: It is negative.
        """
        if token_id < 0:
            raise RequestError("a token id is negative", given=token_id, next_step="accept ids of the vocabulary")
        self._ring.append(int(token_id))

    def counts(self) -> Counter[int]:
        """Occurrences of each kept token."""
        return Counter(self._ring)

    def reset(self) -> None:
        """Forget all tokens."""
        self._ring.clear()

    def clone(self) -> Self:
        """An equal tracker that moves by itself from here."""
        return type(self)(self.capacity, self._ring)


def last_tokens(tokens: Sequence[int], count: int) -> Sequence[int]:
    """The last `count` tokens; all of them where `count` is -1."""
    if count < 0:
        return tokens
    return tokens[max(len(tokens) - count, 0) :]
