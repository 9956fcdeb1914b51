"""The batched loop: sequences of different lengths in shared forwards, joining and leaving while others run.

A run is a value: `insert`, `remove` and `turn` give a new one, and keeping the old one is a fork of all its sequences. A turn
goes as in mlx-lm's batched loop: one step of all running sequences; then sequences whose prompts are fed but for the last token
take their first step, by themselves, and join the running ones; then a piece of every other prompt is fed, padded at the right
where pieces differ in length. A sequence that has its rows is fed no more and leaves when the next turn begins: those that join
in between line up with it, and where a ring of columns stands decides in which order it is summed.

Guarantees: which sequences share a forward never changes what a mask shows one of them. Whether it changes its bits is the
backend's matter: mlx's CPU kernels sum every row by itself.

Source: spec/kv.md section 10; Yu et al. 2022 (iteration-level batching).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import mlx.core as mx

from engine.batch_forward import batch_forward, check_batchable
from engine.cache.batch import check_kinds, extended, filtered, finalized, merged, padded, prepared
from engine.cache.convert import KVMode, check_kv_mode, started
from engine.cache.protocol import Cache
from engine.errors import RequestError
from engine.generate import PIECE, Feed, Picker, greedy
from engine.model import CausalModel, check_ids

PAD: Final = 0  # fed where a row has no token; no mask shows it


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
    """One sequence.

    Attributes:
        prompt_ids: At least one id.
        num_steps: Rows wanted; the last picked token is not fed.
        pick: Chooses the token from a row [1, V] and the sequence's own step.
        caches: Of a single sequence, holding the tokens before the prompt; fresh ones by default.
    """

    prompt_ids: Sequence[int]
    num_steps: int
    pick: Picker = greedy
    caches: Sequence[Cache] | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchRow:
    """One row of logits of one sequence, and the token that follows it.

    Attributes:
        number: Of the sequence, counted from 0 in the order of insertion.
        index: 0 for the row that follows its prompt.
        logits_BV: The row, evaluated, [1, V].
        token_id: What was picked.
        caches: The batch caches after the forward that gave the row, one a layer.
        row: The sequence's row in them, for `engine.cache.batch.extracted`.
    """

    number: int
    index: int
    logits_BV: mx.array
    token_id: int
    caches: tuple[Cache, ...]
    row: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Member:
    """A sequence of a run.

    Attributes:
        number: Which one.
        request: What was asked.
        rest: Tokens that are not fed yet: of the prompt, or the one that was picked.
        taken: Rows so far.
    """

    number: int
    request: Request
    rest: tuple[int, ...]
    taken: int = 0

    @property
    def wants(self) -> int:
        """Rows to come."""
        return self.request.num_steps - self.taken


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Group:
    """Sequences and their batch caches, row by row; no caches where there is no sequence."""

    members: tuple[Member, ...] = ()
    caches: tuple[Cache, ...] = ()

    def only(self, rows: Sequence[int]) -> "Group":
        """The chosen rows."""
        if len(rows) == len(self.members):
            return self
        return Group(
            members=tuple(self.members[row] for row in rows), caches=filtered(self.caches, rows) if rows else ()
        )

    def plus(self, other: "Group") -> "Group":
        """The rows of both."""
        if not (self.members and other.members):
            return self if self.members else other
        return Group(members=self.members + other.members, caches=extended(self.caches, other.caches))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchRun:
    """Sequences on their way. Begin with `begin`.

    Attributes:
        model: From `open_model`.
        kv: How keys and values are kept, from the first token on.
        piece: Tokens of a prompt a turn, at most.
        inserted: Sequences ever inserted.
        waiting: Inserted since the last turn.
        feeding: Prompts that are being fed.
        running: Those that take a row a turn.
    """

    model: CausalModel
    kv: KVMode
    piece: int = PIECE
    inserted: int = 0
    waiting: tuple[Member, ...] = ()
    feeding: Group = Group()
    running: Group = Group()

    @property
    def numbers(self) -> tuple[int, ...]:
        """Sequences that have rows to come."""
        members = (*self.running.members, *self.feeding.members, *self.waiting)
        return tuple(member.number for member in members if member.wants)

    def insert(self, request: Request) -> "BatchRun":
        """The run with one more sequence, whose number is `inserted` of the run before.

        Raises:
            RequestError: The prompt is empty or has ids outside the vocabulary, or no row is wanted.
        """
        member = _member(self.model, request, self.inserted)
        return replace(self, waiting=(*self.waiting, member), inserted=self.inserted + 1)

    def remove(self, number: int) -> "BatchRun":
        """The run without a sequence, wherever it is.

        Raises:
            RequestError: It is not there.
        """
        if number not in self.numbers:
            raise RequestError(
                "no such sequence in the run",
                asked_for=number,
                there=", ".join(map(str, self.numbers)) or "none",
                next_step="name one of these",
            )
        return replace(
            self,
            waiting=tuple(m for m in self.waiting if m.number != number),
            feeding=self.feeding.only([i for i, m in enumerate(self.feeding.members) if m.number != number]),
            running=self.running.only([i for i, m in enumerate(self.running.members) if m.number != number]),
        )

    def turn(self) -> tuple["BatchRun", tuple[BatchRow, ...]]:
        """One turn: the run after it, and the rows that it gave.

        Raises:
            RequestError: A picked id is outside the vocabulary.
        """
        rows: tuple[BatchRow, ...] = ()
        running = self.running.only([row for row, member in enumerate(self.running.members) if member.wants])
        if running.members:
            running, rows = _stepped(self.model, running, _column(running))
        feeding = self.feeding
        if self.waiting:
            caches = merged([self._caches(member.request) for member in self.waiting])
            feeding = feeding.plus(Group(members=self.waiting, caches=caches))
        ready = [row for row, member in enumerate(feeding.members) if len(member.rest) == 1]
        if ready:
            starting, first = feeding.only(ready), feeding.members
            starting, new_rows = _stepped(self.model, starting, _column(starting))
            running, rows = running.plus(starting), (*rows, *new_rows)
            feeding = feeding.only([row for row in range(len(first)) if row not in ready])
        if feeding.members:
            feeding = self._fed(feeding)
        return replace(self, waiting=(), feeding=feeding, running=running), rows

    def _caches(self, request: Request) -> Sequence[Cache]:
        return started(self.model.make_caches(), self.kv) if request.caches is None else request.caches

    def _fed(self, group: Group) -> Group:
        """A piece of every prompt, of which the last token is left for the first step."""
        pieces = [member.rest[: min(self.piece, len(member.rest) - 1)] for member in group.members]
        lengths = [len(piece) for piece in pieces]
        L, caches = max(lengths), group.caches
        if min(lengths) < L:
            caches = prepared(caches, lengths)
        block = mx.array([[*piece, *[PAD] * (L - len(piece))] for piece in pieces])
        _, caches = self.model.hidden(block, caches)
        if min(lengths) < L:
            caches = finalized(caches)
        mx.eval([cache.arrays for cache in caches])
        members = (replace(m, rest=m.rest[n:]) for m, n in zip(group.members, lengths, strict=True))
        return Group(members=tuple(members), caches=caches)


def begin(model: CausalModel, *, kv: KVMode | None = None, piece: int = PIECE) -> BatchRun:
    """A run without sequences.

    Args:
        model: From `open_model`.
        kv: How keys and values are kept. Batch caches are never converted later, so a mode that packs must do so from empty
            caches on.
        piece: Tokens of a prompt a turn, at most.

    Raises:
        RequestError: The model cannot run in batches, the KV mode does not fit, or a piece is empty.
    """
    check_batchable(model)
    kv = kv or KVMode()
    check_kv_mode(kv, model.make_caches(), head_width=model.head_width, no_packed_kv=model.no_packed_kv)
    if kv.packs and kv.order != "from-empty":
        raise RequestError(
            "a batch's keys and values are not converted on the way",
            order=kv.order,
            next_step="choose a KV mode that packs from empty caches on, or fp",
        )
    check_kinds(started(model.make_caches(), kv))
    if piece < 1:
        raise RequestError("a piece of the prompt needs at least one token", piece=piece, next_step="use 1 or more")
    return BatchRun(model=model, kv=kv, piece=piece)


def begin_left(
    model: CausalModel, requests: Sequence[Request], *, feed: Feed | None = None, kv: KVMode | None = None
) -> tuple[BatchRun, tuple[BatchRow, ...]]:
    """A run whose prompts were padded at their left and fed as one block, and the first rows.

    Args:
        model: From `open_model`.
        requests: Sequences that begin together, on fresh caches.
        feed: How the block is cut; whole by default.
        kv: As of `begin`.

    Raises:
        RequestError: As `begin` and `BatchRun.insert`, or a request brings caches, or there is none.
    """
    run = begin(model, kv=kv)
    if not requests or any(request.caches is not None for request in requests):
        raise RequestError(
            "prompts that are padded at their left begin together, on fresh caches",
            requests=len(requests),
            next_step="give at least one request, without caches",
        )
    members = tuple(_member(model, request, number) for number, request in enumerate(requests))
    longest = max(len(member.rest) for member in members)
    padding = [longest - len(member.rest) for member in members]
    caches = padded(started(model.make_caches(), run.kv), padding)
    block = [[*[PAD] * pad, *member.rest] for pad, member in zip(padding, members, strict=True)]
    *first, last = (feed or Feed(whole=True)).cut(range(longest))
    for columns in first:
        _, caches = model.hidden(mx.array([[row[column] for column in columns] for row in block]), caches)
        mx.eval([cache.arrays for cache in caches])
    fed = mx.array([[row[column] for column in last] for row in block])
    running, rows = _stepped(model, Group(members=members, caches=caches), fed)
    return replace(run, inserted=len(members), running=running), rows


def _member(model: CausalModel, request: Request, number: int) -> Member:
    if not request.prompt_ids or request.num_steps < 1:
        raise RequestError(
            "a sequence of a batch asks for nothing",
            prompt=f"{len(request.prompt_ids)} tokens",
            steps=request.num_steps,
            next_step="give at least one token and one step",
        )
    check_ids(model, request.prompt_ids, "the prompt has token ids")
    return Member(number=number, request=request, rest=tuple(request.prompt_ids))


def _column(group: Group) -> mx.array:
    """The one token of each row, [B, 1]."""
    return mx.array([[member.rest[0]] for member in group.members])


def _stepped(model: CausalModel, group: Group, ids_BL: mx.array) -> tuple[Group, tuple[BatchRow, ...]]:
    """One forward: a row and a token each."""
    logits_BV, caches = batch_forward(model, ids_BL, group.caches)
    rows, members = [], []
    for row, member in enumerate(group.members):
        row_BV = logits_BV[row : row + 1]
        token_id = member.request.pick(row_BV, member.taken)
        check_ids(model, [token_id], "the picked token is")
        rows.append(
            BatchRow(
                number=member.number, index=member.taken, logits_BV=row_BV, token_id=token_id, caches=caches, row=row
            )
        )
        members.append(replace(member, rest=(token_id,), taken=member.taken + 1))
    return Group(members=tuple(members), caches=caches), tuple(rows)
