"""The bookkeeping of a batch whose rows are padded at their left, and what is done to arrays of rows by position.

A batch holds columns: column `c` of every row lies at the same place of the buffers, and the newest ones are side by side. A
row that is shorter than the others has padding at its left, which a mask hides. All numbers are known on the host.

Source: spec/kv.md section 10.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from engine.cache.protocol import Cache
from engine.errors import RequestError
from engine.mask import causal_matrix


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Which columns of a batch hold what.

    Attributes:
        padding: Columns at the left of each row that hold nothing.
        used: Columns in use.
        right: Columns at the right of each row that hold nothing, until they are rolled to the left; None where there are none.
    """

    padding: tuple[int, ...]
    used: int = 0
    right: tuple[int, ...] | None = None

    @property
    def rows(self) -> int:
        """B."""
        return len(self.padding)

    @property
    def row_offsets(self) -> tuple[int, ...]:
        """Position of each row's next token."""
        return tuple(self.used - pad for pad in self.padding)

    def longer(self, L: int) -> "Columns":
        """After L more columns.

        Raises:
            ValueError: Right padding was announced for columns that are already there.
        """
        if self.right is not None and any(pad >= L for pad in self.right):
            raise ValueError(f"{L} columns with right padding {self.right}: one append, then finalize")
        return replace(self, used=self.used + L)

    def prepared(self, lengths: Sequence[int]) -> "Columns":
        """Announce that of the next columns row b fills the first `lengths[b]` only."""
        check_lengths(lengths, rows=self.rows)
        return replace(self, right=right_padding(lengths))

    def finalized(self) -> "Columns":
        """Right padding counted as left padding."""
        right = self.right or (0,) * self.rows
        return replace(self, padding=tuple(map(sum, zip(self.padding, right, strict=True))), right=None)

    def filtered(self, keep: Sequence[int]) -> tuple["Columns", int]:
        """The chosen rows, and how many columns at the left none of them needs."""
        padding = tuple(self.padding[row] for row in keep)
        drop = max(min(padding), 0)
        return replace(self, padding=tuple(pad - drop for pad in padding), used=self.used - drop), drop

    def extended(self, other: "Columns") -> "Columns":
        """Both batches' rows, right-justified.

        Raises:
            ValueError: Right padding of one is not rolled to the left yet.
        """
        if self.right or other.right:
            raise ValueError("a batch with right padding: finalize it before others join")
        used = max(self.used, other.used)
        padding = tuple(pad + used - columns.used for columns in (self, other) for pad in columns.padding)
        return Columns(padding=padding, used=used)

    def mask(self, L: int, *, window: int | None) -> mx.array:
        """Boolean [B, 1, L, used + L]: causal, inside the window, and no padding."""
        column = mx.arange(self.used + L)
        started = column >= mx.array(self.padding)[:, None, None, None]
        return causal_matrix(L, before=self.used, window=window) & started


def check_lengths(lengths: Sequence[int], *, rows: int) -> None:
    """Refuse lengths of new tokens that are not one of at least 1 a row."""
    if len(lengths) != rows or min(lengths) < 1:
        raise ValueError(f"lengths {list(lengths)} of new tokens for {rows} rows")


def right_padding(lengths: Sequence[int]) -> tuple[int, ...] | None:
    """What each row lacks to the longest; None where none lacks anything."""
    right = tuple(max(lengths) - length for length in lengths)
    return right if any(right) else None


def check_rows(keep: Sequence[int], *, rows: int) -> None:
    """Refuse a choice of rows that is empty or names one that is not there.

    Raises:
        RequestError: It is, or does.
    """
    if not keep or any(not 0 <= row < rows for row in keep):
        raise RequestError(
            "no such rows in the batch",
            asked_for=", ".join(map(str, keep)) or "none",
            rows=rows,
            next_step=f"name at least one of 0 to {rows - 1}",
        )


def check_alike(one: Cache, other: Cache) -> None:
    """Refuse to put caches of two kinds side by side.

    Raises:
        RequestError: They are.
    """
    if one.kind != other.kind:
        raise RequestError(
            "caches of different kinds cannot share a batch",
            first=one.kind,
            other=other.kind,
            next_step="batch sequences of one model and one KV mode",
        )


def rolled(array_BKTN: mx.array, shifts: Sequence[int]) -> mx.array:
    """Each row's positions moved `shifts[b]` to the right, those that fall off coming in at the left."""
    T = array_BKTN.shape[2]
    source_BT = (mx.arange(T)[None] - mx.array(tuple(shifts))[:, None]) % T
    return mx.take_along_axis(array_BKTN, source_BT[:, None, :, None], axis=2)


def pad_left(array_BKTN: mx.array, count: int) -> mx.array:
    """`count` positions of zeros before the others."""
    if not count:
        return array_BKTN
    B, K, _, N = array_BKTN.shape
    return mx.concatenate([mx.zeros((B, K, count, N), dtype=array_BKTN.dtype), array_BKTN], axis=2)


def side_by_side(rows: Sequence[mx.array | None], *, columns: int) -> mx.array | None:
    """Arrays [1, K, T, N] of any T, right-justified in one [B, K, columns, N]; None is a row that is empty.

    Returns None where all are empty.
    """
    some = next((row for row in rows if row is not None), None)
    if some is None:
        return None
    _, K, _, N = some.shape
    empty = mx.zeros((1, K, 0, N), dtype=some.dtype)
    filled = (empty if row is None else row for row in rows)
    return mx.concatenate([pad_left(row, columns - row.shape[2]) for row in filled], axis=0)
