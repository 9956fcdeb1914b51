"""A subject whose row of logits is a function of the ids so far, so that every equality holds until a test plants a fault."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np

from parity.sweeping.subject import Refused, State
from parity.tensor import Tensor

WIDTH = 32


def row(ids: Sequence[int]) -> np.ndarray:
    seed = int.from_bytes(hashlib.sha256(repr(tuple(ids)).encode()).digest())
    words = np.random.PCG64(seed).random_raw(WIDTH)
    return ((words >> np.uint64(40)).astype("<f4") / 2**23) - np.float32(1)


@dataclass
class ToySubject:
    """A state is a list of id lists, one a row; `faults` name the operations that go wrong."""

    faults: frozenset[str] = frozenset()
    calls: int = 0
    said: list[str] = field(default_factory=list)
    vocabulary: int = 97

    def fresh(self) -> State:
        return [[]]

    def feed(self, state: State | None, ids_BL: Sequence[Sequence[int]]) -> tuple[Tensor, State]:
        self.calls += 1
        before = [[] for _ in ids_BL] if state is None else [list(ids) for ids in state]
        out = []
        for known, new in zip(before, ids_BL, strict=True):
            rows = []
            for position, token_id in enumerate(new):
                known.append(token_id)
                seen = list(known)
                if "pieces" in self.faults and len(new) > 1 and position == len(new) - 1 and len(known) > len(new):
                    seen = seen[1:]
                if "uncached" in self.faults and state is None:
                    seen = seen[:-1]
                if "neighbours" in self.faults and len(ids_BL) > 1:
                    seen = [len(ids_BL), *seen]
                if "memory" in self.faults:
                    seen = [self.calls, *seen]
                rows.append(row(seen))
            out.append(np.stack(rows))
        return Tensor.of(np.stack(out)), before

    def packed(self, state: State, kv: str) -> State:
        return [[int(kv[2]), *ids] for ids in state]

    def fork(self, state: State) -> State:
        return [ids[:-1] for ids in state] if "fork" in self.faults else [list(ids) for ids in state]

    def stored(self, state: State) -> State:
        if "stored" in self.faults:
            raise OSError("disk full\nand more")
        return [list(ids) for ids in state]

    def trimmed(self, state: State, count: int) -> State:
        if "untrimmable" in self.faults:
            raise Refused("a ring that has turned")
        return [ids[: len(ids) - count + ("trim" in self.faults)] for ids in state]

    def merged(self, states: Sequence[State]) -> State:
        rows = [list(ids) for state in states for ids in state]
        return rows[::-1] if "merge" in self.faults else rows

    def prefilled(self, prompts: Sequence[Sequence[int]], side: str) -> tuple[Tensor, State]:
        longest = max(map(len, prompts))
        padded = [[0] * (longest - len(p)) + list(p) for p in prompts] if side in self.faults else prompts
        return Tensor.of(np.stack([row(p) for p in padded])), [list(p) for p in padded]

    def kept(self, state: State, rows: Sequence[int]) -> State:
        return [state[0 if "filter" in self.faults else r] for r in rows]

    def joined(self, first: State, second: State) -> State:
        return [*second, *first] if "join" in self.faults else [*first, *second]

    def extracted(self, state: State, row: int) -> State:
        return [state[row - 1 if "extract" in self.faults else row]]

    def generated(
        self,
        prompt: Sequence[int],
        count: int,
        *,
        draft: str | None = None,
        piece: int | None = None,
        penalty: bool = False,
    ) -> list[int]:
        ids = list(prompt)
        if "draft" in self.faults and draft == "stranger":
            ids = ids[1:]
        if "piece" in self.faults and piece == 7:
            ids = ids[1:]
        if "penalty" in self.faults and penalty:
            ids = [1, *ids]
        for _ in range(count):
            ids.append(int(row(ids).argmax()))
        return ids[-count:]

    def generated_together(
        self, prompts: Sequence[Sequence[int]], count: int, *, penalty: bool = False
    ) -> list[list[int]]:
        del penalty
        return [self.generated(prompts[0 if "together" in self.faults else n], count) for n in range(len(prompts))]

    def through_prompt_cache(self, first: Sequence[int], prompt: Sequence[int], count: int) -> list[int]:
        return self.generated([*first, *prompt] if "prompt-cache" in self.faults else prompt, count)

    def compiled(self, ids_BL: Sequence[Sequence[int]]) -> Tensor:
        logits = self.feed(None, ids_BL)[0]
        if "compiled" not in self.faults:
            return logits
        words = logits.bits().copy()
        words[0, 0, 0] ^= 1
        return Tensor(dtype=logits.dtype, shape=logits.shape, data=words.tobytes())

    def filtered(self, name: str, rows_BV: Tensor, options: Mapping[str, float]) -> Tensor:
        del name, options
        values = rows_BV.values().astype("<f4")
        if "filter-rows" in self.faults:
            return Tensor.of(np.where(values < values.mean(), -np.inf, values).astype("<f4"))
        if "filter-order" in self.faults:
            values[:, 0] = -np.inf
            return Tensor.of(values)
        return Tensor.of(np.where(values < np.median(values, axis=-1, keepdims=True), -np.inf, values).astype("<f4"))

    def packed_attention(self, heads: Mapping[str, Tensor], mask_B1LT: Tensor) -> Tensor:
        mask = mask_B1LT.bits()[::-1] if "mask" in self.faults else mask_B1LT.bits()
        return Tensor.of(heads["q_BHLE"].values().astype("<f4") * mask.sum(axis=-1, dtype="<f4")[..., None])

    def with_weights(self, change: str) -> Self:
        return type(self)(faults=frozenset({"memory"})) if change in self.faults else type(self)()
