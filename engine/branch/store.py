"""The branch store: a tree of branches of one model that are fed, sampled and stepped.

Guarantees: those of `engine.branch.tree`, also where a forward fails: it either gives every branch its new state or none.
Source: spec/kv.md section 14 (semantics of liblloyal's branch store and of llama.cpp's sequences).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from engine.branch.branch import Branch
from engine.branch.forward import feed, fresh_caches, step_each
from engine.branch.samplers import BranchSampler, GreedySampler
from engine.branch.slots import MOST
from engine.branch.tree import BranchTree, Handle
from engine.cache.convert import KVMode, check_kv_mode
from engine.cache.protocol import Cache
from engine.errors import RequestError
from engine.generate import Feed
from engine.model import CausalModel


class BranchStore(BranchTree):
    """Branches of one model.

    Args:
        model: From `open_model`.
        kv: How keys and values are kept; as computed by default.
        make_caches: Empty caches of a new branch, such as `engine.turboquant.caches` makes; the model's and the KV mode's by
            default.
        how: How a prompt is cut; tail split in pieces of 2048 by default.
        slots: Branches at most, plus one.
        context: Tokens that all branches together may hold; no limit by default.
        batched: Step branches with equally many tokens in one forward; False gives the same bits one by one.

    Raises:
        RequestError: The KV mode does not fit the model, or the number of slots is out of range.
    """

    def __init__(
        self,
        model: CausalModel,
        *,
        kv: KVMode | None = None,
        make_caches: Callable[[], tuple[Cache, ...]] | None = None,
        how: Feed | None = None,
        slots: int = MOST,
        context: int | None = None,
        batched: bool = True,
    ) -> None:
        super().__init__(slots=slots, context=context)
        self._model = model
        self._kv = kv or KVMode()
        self._make_caches = make_caches or (lambda: fresh_caches(model, self._kv))
        self._how = how or Feed()
        self._batched = batched
        check_kv_mode(self._kv, model.make_caches(), head_width=model.head_width, no_packed_kv=model.no_packed_kv)

    def open(self, prompt_ids: Sequence[int] = (), *, sampler: BranchSampler | None = None) -> Handle:
        """A new branch without a parent, greedy by default; a prompt is fed at once.

        Raises:
            RequestError: No slot or no room is left, or an id lies outside the vocabulary.
        """
        branch = Branch(caches=self._make_caches(), sampler=sampler or GreedySampler())
        return self.adopt(self._fed(branch, prompt_ids) if prompt_ids else branch)

    def feed(self, handle: Handle, token_ids: Sequence[int]) -> None:
        """Feed tokens that nobody drew.

        Raises:
            RequestError: The branch is gone, there are no tokens or no room for them, or one is outside the vocabulary.
        """
        self.feed_each([(handle, token_ids)])

    def feed_each(self, tokens: Sequence[tuple[Handle, Sequence[int]]]) -> None:
        """Feed any number of tokens each, none of them drawn; every branch has the logits of its own last one.

        Raises:
            RequestError: As `feed`, or a branch is named twice.
        """
        _check_once([handle for handle, _ in tokens])
        self._check_room(sum(len(token_ids) for _, token_ids in tokens))
        self._grow([(handle, self._fed(self.snapshot(handle), token_ids)) for handle, token_ids in tokens])

    def sample(self, handle: Handle) -> int:
        """Draw a token from the branch's row. It is neither accepted nor fed; the generator has moved.

        Raises:
            RequestError: The branch is gone, has no logits, or nothing can be drawn from them.
        """
        token_id, branch = self.snapshot(handle).sampled()
        self._grow([(handle, branch)])
        return token_id

    def accept(self, handle: Handle, token_id: int) -> None:
        """Count a token into metrics and penalties, by the row that it follows: before it is fed.

        Raises:
            RequestError: The branch is gone, has no logits, or the id lies outside their vocabulary.
        """
        self._grow([(handle, self.snapshot(handle).accepted(token_id))])

    def decode_each(self, tokens: Sequence[tuple[Handle, int]]) -> None:
        """Feed one token each, in as few forwards as the bits allow; nothing is accepted.

        Raises:
            RequestError: A branch is gone or named twice, there is no room, or an id lies outside the vocabulary.
        """
        self._step(tokens, [self.snapshot(handle) for handle, _ in tokens])

    def step_each(self, tokens: Sequence[tuple[Handle, int]]) -> None:
        """Accept and feed one token each, in this order.

        Raises:
            RequestError: As `decode_each`, or a branch has no logits.
        """
        self._step(tokens, [self.snapshot(handle).accepted(token_id) for handle, token_id in tokens])

    def clear_and_reseed(self, handle: Handle, sinks: Sequence[int], tail: Sequence[int]) -> None:
        """BlinkKV: forget all keys and values, then feed the sequence's first tokens and its last ones at new positions.

        Afterwards position and logits are those of a fresh branch that was fed `sinks` and `tail`; sampler and metrics go on.

        Args:
            handle: The branch.
            sinks: The ORIGINAL first tokens of the sequence, not those of its current window.
            tail: Tokens to go on from, at positions that follow the sinks.

        Raises:
            RequestError: The branch is gone, both are empty, or the sinks are not the sequence's first tokens.
        """
        old = self.snapshot(handle)
        if not sinks and not tail:
            raise RequestError("nothing to reseed from", sinks=0, tail=0, next_step="give the first or the last tokens")
        if old.tokens[: len(sinks)] != tuple(sinks):
            raise RequestError(
                "the sinks are not the first tokens of the sequence",
                sinks=", ".join(map(str, sinks[:5])),
                first=", ".join(map(str, old.tokens[: len(sinks)][:5])) or "none",
                next_step="keep the first tokens of the prompt, and pass them at every reseed",
            )
        fresh = replace(old, caches=self._make_caches(), tokens=(), logits_BV=None, drawn=None)
        fed = feed(self._model, fresh, [*sinks, *tail], how=self._how, kv=self._kv)
        self._become(handle, replace(fed, sampler=old.sampler), shared=0)

    def _fed(self, branch: Branch, token_ids: Sequence[int]) -> Branch:
        if not token_ids:
            raise RequestError("no tokens to feed", next_step="give at least one token")
        self._check_room(len(token_ids))
        return feed(self._model, branch, token_ids, how=self._how, kv=self._kv)

    def _step(self, tokens: Sequence[tuple[Handle, int]], branches: Sequence[Branch]) -> None:
        handles = [handle for handle, _ in tokens]
        _check_once(handles)
        self._check_room(len(tokens))
        token_ids = [token_id for _, token_id in tokens]
        after = step_each(self._model, branches, token_ids, kv=self._kv, batched=self._batched)
        self._grow(list(zip(handles, after, strict=True)))


def _check_once(handles: Sequence[Handle]) -> None:
    if len(set(handles)) < len(handles):
        raise RequestError("a branch is stepped twice at once", next_step="name each branch once, or fork it")
