"""The tree of branches behind handles: parents and children, and how many tokens there is room for. It runs no model.

Guarantees: a handle of a branch that is gone finds nothing, ever again. A branch with children is never pruned alone. Every
operation either succeeds whole or leaves every branch as it was. Memory of a pruned branch is free as soon as no relative
shares it.
Source: spec/kv.md section 14 (semantics of liblloyal's branch store and of llama.cpp's sequences).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.branch.branch import Branch
from engine.branch.slots import MOST, Slots
from engine.errors import RequestError
from engine.prompt_cache import common_prefix

Handle = int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pressure:
    """Room for tokens.

    Attributes:
        context: Tokens that all branches together may hold; None is no limit.
        cells_used: Tokens fed and not yet given back; what forks share counts once.
        remaining: Tokens that can still be fed; None where there is no limit.
    """

    context: int | None
    cells_used: int
    remaining: int | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Node:
    branch: Branch
    parent: Handle | None = None
    children: tuple[Handle, ...] = ()


class BranchTree:
    """Branches behind handles.

    Args:
        slots: Branches at most, plus one.
        context: Tokens that all branches together may hold; no limit by default.

    Raises:
        RequestError: The number of slots is out of range.
    """

    def __init__(self, *, slots: int = MOST, context: int | None = None) -> None:
        self._nodes: Slots[_Node] = Slots(slots)
        self._context = context
        self._used = 0

    def __contains__(self, handle: object) -> bool:
        return handle in self._nodes

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def available(self) -> int:
        """Branches that can still be made."""
        return self._nodes.available

    @property
    def pressure(self) -> Pressure:
        """Room for tokens, each counted in the branch that it was fed to, and given back with it or by it."""
        left = None if self._context is None else self._context - self._used
        return Pressure(context=self._context, cells_used=self._used, remaining=left)

    def adopt(self, branch: Branch) -> Handle:
        """A new branch without a parent from a snapshot; its tokens count as fed.

        Raises:
            RequestError: No slot or no room is left.
        """
        self._check_room(branch.size)
        handle = self._nodes.add(_Node(branch=replace(branch, fork_head=0)))
        self._used += branch.size
        return handle

    def fork(self, handle: Handle, *, clone_logits: bool = True) -> Handle:
        """A child that owns all that its parent owns: no array is copied, however many tokens there are.

        Args:
            handle: The parent.
            clone_logits: False leaves the child without logits until it is fed.

        Raises:
            RequestError: The parent is gone, or no slot is left.
        """
        node = self._nodes.get(handle)
        child = self._nodes.add(_Node(branch=node.branch.forked(with_logits=clone_logits), parent=handle))
        self._nodes.put(handle, replace(node, children=(*node.children, child)))
        return child

    def prune(self, handle: Handle) -> None:
        """Remove a branch that has no children.

        Raises:
            RequestError: It is gone, or has children.
        """
        node = self._nodes.get(handle)
        if node.children:
            raise RequestError(
                "the branch has children",
                children=len(node.children),
                next_step="prune them first, or the whole subtree at once",
            )
        self._release(handle)

    def prune_subtree(self, handle: Handle) -> int:
        """Remove a branch and all that descend from it, children before parents; how many went.

        Raises:
            RequestError: It is gone.
        """
        order = [handle]
        for parent in order:
            order += self._nodes.get(parent).children
        for gone in reversed(order):
            self._release(gone)
        return len(order)

    def retain_only(self, handle: Handle) -> None:
        """Remove every other branch; the one that stays has neither parent nor children.

        Raises:
            RequestError: It is gone.
        """
        winner = self._nodes.get(handle).branch
        for other in list(self._nodes.handles()):
            if other != handle:
                self._nodes.release(other)
        self._nodes.put(handle, _Node(branch=replace(winner, fork_head=0)))
        self._used = winner.size

    def clear(self) -> None:
        """Remove every branch."""
        for handle in list(self._nodes.handles()):
            self._nodes.release(handle)
        self._used = 0

    def parent(self, handle: Handle) -> Handle | None:
        """The branch that it was forked from; None for one that was not, or whose parent went by `retain_only`."""
        return self._nodes.get(handle).parent

    def children(self, handle: Handle) -> tuple[Handle, ...]:
        """Its forks that are still there, oldest first."""
        return self._nodes.get(handle).children

    def size(self, handle: Handle) -> int:
        """Tokens in the branch's caches."""
        return self._nodes.get(handle).branch.size

    def snapshot(self, handle: Handle) -> Branch:
        """All that the branch owns, as a value that nothing changes any more."""
        return self._nodes.get(handle).branch

    def restore(self, handle: Handle, branch: Branch) -> None:
        """Make the branch what a snapshot says; its place in the tree stays.

        Raises:
            RequestError: It is gone, or there is no room for the snapshot's tokens.
        """
        now = self._nodes.get(handle).branch
        self._become(handle, branch, shared=common_prefix(now.tokens[: now.fork_head], branch.tokens))

    def copy(self, source: Handle, target: Handle) -> None:
        """Make another branch hold the tokens and caches of `source`, sharing all arrays; it keeps sampler and metrics.

        Raises:
            RequestError: Either is gone, or there is no room.
        """
        given, held = self._nodes.get(source).branch, self._nodes.get(target).branch
        copied = replace(given, sampler=held.sampler, metrics=held.metrics, drawn=None)
        self._become(target, copied, shared=copied.size)

    def remove(self, handle: Handle, start: int, end: int = -1) -> None:
        """Remove the positions from `start` to the end.

        Raises:
            RequestError: The branch is gone, the range does not reach its end, or a cache cannot give tokens back.
        """
        shorter = self._nodes.get(handle).branch.removed(start, end)
        self._become(handle, shorter, shared=min(shorter.fork_head, shorter.size))

    def _become(self, handle: Handle, branch: Branch, *, shared: int) -> None:
        """Put a branch in the place of another; its first `shared` tokens are those of a relative, and cost nothing."""
        now = self._nodes.get(handle).branch
        more = (branch.size - shared) - (now.size - now.fork_head)
        self._check_room(more)
        self._used += more
        self._nodes.put(handle, replace(self._nodes.get(handle), branch=replace(branch, fork_head=shared)))

    def _grow(self, longer: Sequence[tuple[Handle, Branch]]) -> None:
        """Put branches that were fed in the places of their former selves; room was checked before."""
        for handle, branch in longer:
            node = self._nodes.get(handle)
            self._used += branch.size - node.branch.size
            self._nodes.put(handle, replace(node, branch=branch))

    def _release(self, handle: Handle) -> None:
        node = self._nodes.release(handle)
        if node.parent is not None and node.parent in self._nodes:
            parent = self._nodes.get(node.parent)
            left = tuple(child for child in parent.children if child != handle)
            self._nodes.put(node.parent, replace(parent, children=left))
        self._used -= node.branch.size - node.branch.fork_head
        if not len(self._nodes):
            self._used = 0

    def _check_room(self, cells: int) -> None:
        if self._context is not None and cells > self._context - self._used:
            raise RequestError(
                "the context is full",
                context=self._context,
                used=self._used,
                wanted=cells,
                next_step="prune branches, or reseed from the first and the last tokens",
            )
