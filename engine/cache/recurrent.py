"""The recurrent cache: a fixed number of arrays that a layer rewrites at every forward.

Convolution windows, states of a scan, the state matrix of a delta rule: what the arrays mean is the layer's business.
There are no positions to pack, to trim or to share.

One class serves a sequence and a batch, as the arrays have a row a sequence anyway. A batch's rows may be padded: at the left
while prompts of different lengths are fed as one block, at the right during one piece of prompts that end at different columns.
A layer must keep padding out of its state, for which it asks `mask` and `ends`. Source: spec/kv.md section 8.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from engine.cache.batch_columns import check_alike, check_lengths, check_rows
from engine.cache.protocol import Cache, check_trim


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecurrentCache:
    """A layer's state.

    Attributes:
        state: One array or None (before the first forward) a slot.
        offset: Tokens ever seen; of a batch, columns.
        padding: Columns of each row, from the next one on, that hold nothing; None where all do.
        lengths: Columns of each row, from the next one on, that hold tokens before right padding begins; None without any.
        rows: B.
    """

    state: tuple[mx.array | None, ...]
    offset: int = 0
    padding: tuple[int, ...] | None = None
    lengths: tuple[int, ...] | None = None
    rows: int = 1

    @classmethod
    def empty(cls, slots: int) -> "RecurrentCache":
        """A cache of `slots` arrays that are not there yet."""
        return cls(state=(None,) * slots)

    @classmethod
    def padded(cls, slots: int, padding: Sequence[int]) -> "RecurrentCache":
        """As `empty`, with a row for each number, which is that row's left padding in the columns to come."""
        return cls(state=(None,) * slots, padding=tuple(padding) if any(padding) else None, rows=len(padding))

    @classmethod
    def merged(cls, rows: Sequence["RecurrentCache"]) -> "RecurrentCache":
        """Single sequences side by side; one that has seen nothing is zeros beside others.

        Raises:
            RequestError: They are of different kinds.
        """
        for row in rows[1:]:
            check_alike(rows[0], row)
        state = tuple(_stacked([(array, 1) for array in slot]) for slot in zip(*(r.state for r in rows), strict=True))
        return cls(state=state, offset=max(row.offset for row in rows), rows=len(rows))

    @property
    def kind(self) -> str:
        """Such as `arrays-2`."""
        return f"arrays-{len(self.state)}"

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """The arrays that are there."""
        return tuple(array for array in self.state if array is not None)

    @property
    def trimmable(self) -> bool:
        """Never: a state does not tell what it was made of."""
        return False

    def trim(self, n: int) -> "RecurrentCache":
        """Itself, for no token at all.

        Raises:
            RequestError: `n` is not 0.
        """
        check_trim(self, n)
        return self

    def advanced(self, *state: mx.array | None, by: int) -> "RecurrentCache":
        """The cache after `by` more tokens, with a new array (or None) in every slot."""
        if len(state) != len(self.state):
            raise ValueError(f"{len(state)} arrays for {len(self.state)} slots")
        return replace(
            self,
            state=state,
            offset=self.offset + by,
            padding=None if self.padding is None or max(self.padding) <= by else _less(self.padding, by),
            lengths=None if self.lengths is None else _less(self.lengths, by),
        )

    def mask(self, L: int) -> mx.array | None:
        """Boolean [B, L], True where a column holds a token; None where all do."""
        if self.padding is None and self.lengths is None:
            return None
        column = mx.arange(L)[None]
        holds = mx.ones((self.rows, L), dtype=mx.bool_)
        if self.padding is not None:
            holds = holds & (column >= mx.array(self.padding)[:, None])
        if self.lengths is not None:
            holds = holds & (column < mx.array(self.lengths)[:, None])
        return holds

    def ends(self, L: int) -> tuple[int, ...] | None:
        """Of the next L columns, how many each row has before its right padding; None without right padding."""
        return None if self.lengths is None else tuple(min(max(length, 0), L) for length in self.lengths)

    def prepare(self, lengths: Sequence[int]) -> "RecurrentCache":
        """Announce right padding: of the next columns, row b's first `lengths[b]` alone are tokens."""
        check_lengths(lengths, rows=self.rows)
        return replace(self, lengths=tuple(lengths))

    def finalize(self) -> "RecurrentCache":
        """After the padded columns: all that follow are tokens."""
        return replace(self, lengths=None, padding=None)

    def filter(self, keep: Sequence[int]) -> "RecurrentCache":
        """The chosen rows.

        Raises:
            RequestError: There is no such row.
        """
        check_rows(keep, rows=self.rows)
        chosen = mx.array(tuple(keep))
        return replace(
            self,
            state=tuple(None if array is None else array[chosen] for array in self.state),
            padding=None if self.padding is None else tuple(self.padding[row] for row in keep),
            lengths=None if self.lengths is None else tuple(self.lengths[row] for row in keep),
            rows=len(keep),
        )

    def extend(self, other: "RecurrentCache") -> "RecurrentCache":
        """The rows of both, this one's first; a batch that has seen nothing is zeros beside the other.

        Raises:
            RequestError: `other` is of another kind.
            ValueError: One is in the middle of padded columns.
        """
        check_alike(self, other)
        if any(batch.padding or batch.lengths for batch in (self, other)):
            raise ValueError("a batch cannot be extended before its padded columns are over")
        state = tuple(
            _stacked([(one, self.rows), (two, other.rows)]) for one, two in zip(self.state, other.state, strict=True)
        )
        return replace(self, state=state, offset=max(self.offset, other.offset), rows=self.rows + other.rows)

    def extract(self, row: int) -> "RecurrentCache":
        """One row as a cache of its own, in memory of its own.

        Raises:
            RequestError: There is no such row.
        """
        check_rows([row], rows=self.rows)
        state = tuple(None if array is None else mx.contiguous(array[row : row + 1]) for array in self.state)
        return RecurrentCache(state=state, offset=self.offset)


def _less(numbers: tuple[int, ...], by: int) -> tuple[int, ...]:
    return tuple(number - by for number in numbers)


def _stacked(parts: Sequence[tuple[mx.array | None, int]]) -> mx.array | None:
    """Arrays row after row, each with its number of rows; None is zeros, unless all are None."""
    some = next((array for array, _ in parts if array is not None), None)
    if some is None:
        return None
    return mx.concatenate(
        [mx.zeros((rows, *some.shape[1:]), dtype=some.dtype) if array is None else array for array, rows in parts]
    )


def without_padding(x_BLC: mx.array, mask_BL: mx.array | None) -> mx.array:
    """`x` with zeros in the columns that hold no token; as it is without a mask."""
    return x_BLC if mask_BL is None else mx.where(mask_BL[..., None], x_BLC, 0)


def as_recurrent(cache: Cache) -> RecurrentCache:
    """The same cache, known to hold a layer's state.

    Raises:
        TypeError: It does not; the family handed a layer the wrong kind.
    """
    if not isinstance(cache, RecurrentCache):
        raise TypeError(f"a recurrent layer was handed a cache of kind {cache.kind}")
    return cache
