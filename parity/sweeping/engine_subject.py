"""The engine as the subject of a sweep: its own caches, batches, loop, filters and checkpoint reader, on plain operations.

What the engine does not have (speculation, compiled functions, a run without caches, a pass that rearranges weights) it refuses
with the reason, so that the table never shows an equality that was not asked.
"""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Self, cast

import mlx.core as mx
import numpy as np

from engine.attention import attend
from engine.batch import Request, begin
from engine.batch_forward import check_batchable
from engine.cache.batch import extended, extracted, filtered, finalized, merged, padded, prepared
from engine.cache.convert import check_kv_mode, converted
from engine.cache.protocol import Cache, PackedHeads
from engine.cache.trim import trimmed
from engine.dtype import DTypeName
from engine.errors import EngineError
from engine.generate import Feed, Picker, greedy, steps
from engine.model import CausalModel, open_model
from engine.persistence.cache_file import load_caches, save_caches
from engine.prompt_cache import PromptCache
from engine.sampling import filters
from engine.sampling.processors import Processing, process
from parity.engine_kv import engine_mode
from parity.engine_runner import to_tensor
from parity.kv import KV
from parity.models.fetch import ensure_snapshot
from parity.sweeping.rows import PAD, PENALTY, REACH, at_positions
from parity.sweeping.subject import Refused, State
from parity.tensor import Tensor

GROUP: Final = 64  # of packed attention


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Held:
    """A state: caches, and the ids that each row has fed to them."""

    caches: tuple[Cache, ...]
    fed: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EngineSubject:
    """One model of the engine, opened from a tiny snapshot.

    Attributes:
        model: From `open_model`.
        folder: Of the snapshot.
        dtype: What it computes in.
    """

    model: CausalModel
    folder: Path
    dtype: DTypeName

    @classmethod
    def opened(cls, named: Mapping[str, Any], dtype: str) -> Self:
        """The subject of `{"config": NAME}`, a config of the tiny snapshots."""
        folder = ensure_snapshot(f"{named['config']}-tiny").path
        known = cast("DTypeName", dtype)
        return cls(model=open_model(folder, dtype=known), folder=folder, dtype=known)

    @property
    def vocabulary(self) -> int:
        """Ids are below it."""
        return self.model.vocabulary

    def fresh(self) -> State:
        """The model's empty caches."""
        return Held(caches=self.model.make_caches(), fed=((),))

    def feed(self, state: State | None, ids_BL: Sequence[Sequence[int]]) -> tuple[Tensor, State]:
        """One forward."""
        if state is None:
            raise Refused("the engine has no run without caches")
        with refusing():
            hidden_BLD, caches = self.model.hidden(mx.array([list(ids) for ids in ids_BL]), state.caches)
            logits_BLV = self.model.logits(hidden_BLD)
            mx.eval(logits_BLV, [cache.arrays for cache in caches])
        fed = tuple((*before, *new) for before, new in zip(state.fed, ids_BL, strict=True))
        return to_tensor(logits_BLV), Held(caches=caches, fed=fed)

    def packed(self, state: State, kv: str) -> State:
        """Converted as the loop does after a forward."""
        mode = engine_mode(KV.parse(kv))
        with refusing():
            empty = self.model.make_caches()
            check_kv_mode(mode, empty, head_width=self.model.head_width, no_packed_kv=self.model.no_packed_kv)
            return replace(state, caches=converted(state.caches, mode))

    def fork(self, state: State) -> State:
        """The same state: caches are values."""
        return state

    def stored(self, state: State) -> State:
        """Through a file of `engine.persistence`."""
        with TemporaryDirectory() as folder, refusing():
            file = Path(folder) / "caches.safetensors"
            if len(state.fed) > 1:
                raise Refused("a batch is not stored: its rows are, one by one")
            save_caches(file, state.caches, tokens=state.fed[0])
            return replace(state, caches=load_caches(file).caches)

    def trimmed(self, state: State, count: int) -> State:
        """Through `engine.cache.trim`."""
        with refusing():
            return Held(caches=trimmed(state.caches, count), fed=tuple(fed[: len(fed) - count] for fed in state.fed))

    def merged(self, states: Sequence[State]) -> State:
        """Through `engine.cache.batch`, for families that run in batches."""
        with refusing():
            check_batchable(self.model)
            caches = merged([state.caches for state in states])
        return Held(caches=caches, fed=tuple(fed for state in states for fed in state.fed))

    def prefilled(self, prompts: Sequence[Sequence[int]], side: str) -> tuple[Tensor, State]:
        """One forward over padded prompts."""
        lengths = [len(prompt) for prompt in prompts]
        longest = max(lengths)
        with refusing():
            check_batchable(self.model)
            if side == "left":
                padding = [longest - length for length in lengths]
                caches = padded(self.model.make_caches(), padding)
                ids = [[PAD] * n + list(p) for n, p in zip(padding, prompts, strict=True)]
                logits, state = self.feed(Held(caches=caches, fed=tuple(() for _ in prompts)), ids)
                return at_positions(logits, [longest - 1] * len(prompts)), state
            caches = prepared(self.merged([self.fresh() for _ in prompts]).caches, lengths)
            ids = [list(p) + [PAD] * (longest - n) for n, p in zip(lengths, prompts, strict=True)]
            logits, state = self.feed(Held(caches=caches, fed=tuple(() for _ in prompts)), ids)
            return at_positions(logits, [n - 1 for n in lengths]), replace(state, caches=finalized(state.caches))

    def kept(self, state: State, rows: Sequence[int]) -> State:
        """Through `engine.cache.batch`."""
        with refusing():
            return Held(caches=filtered(state.caches, rows), fed=tuple(state.fed[row] for row in rows))

    def joined(self, first: State, second: State) -> State:
        """Through `engine.cache.batch`."""
        with refusing():
            return Held(caches=extended(first.caches, second.caches), fed=(*first.fed, *second.fed))

    def extracted(self, state: State, row: int) -> State:
        """Through `engine.cache.batch`."""
        with refusing():
            return Held(caches=extracted(state.caches, row), fed=(state.fed[row],))

    def generated(
        self,
        prompt: Sequence[int],
        count: int,
        *,
        draft: str | None = None,
        piece: int | None = None,
        penalty: bool = False,
    ) -> list[int]:
        """The engine's loop, greedy."""
        if draft is not None:
            raise Refused("the engine does not speculate")
        feed = Feed() if piece is None else Feed(piece=piece)
        with refusing():
            return [
                s.token_id for s in steps(self.model, prompt, num_steps=count, pick=picker(prompt, penalty), feed=feed)
            ]

    def generated_together(
        self, prompts: Sequence[Sequence[int]], count: int, *, penalty: bool = False
    ) -> list[list[int]]:
        """The engine's batched loop, greedy."""
        with refusing():
            run = begin(self.model)
            for prompt in prompts:
                run = run.insert(Request(prompt_ids=prompt, num_steps=count, pick=picker(prompt, penalty)))
            given: list[list[int]] = [[] for _ in prompts]
            while run.numbers:
                run, rows = run.turn()
                for row in rows:
                    given[row.number].append(row.token_id)
        return given

    def through_prompt_cache(self, first: Sequence[int], prompt: Sequence[int], count: int) -> list[int]:
        """Through `engine.prompt_cache`: `first` is fed and put, then the longest beginning is taken for `prompt`."""
        kept = PromptCache()
        _, state = self.feed(self.fresh(), [first])
        with refusing():
            kept.put(first, state.caches)
            hit = kept.take(prompt)
            if hit is None:
                raise Refused("nothing of it can be used: a state that cannot be cut back")
            rest = prompt[hit.num_tokens :]
            return [s.token_id for s in steps(self.model, rest, num_steps=count, caches=hit.caches)]

    def compiled(self, ids_BL: Sequence[Sequence[int]]) -> Tensor:
        """There is nothing to compile."""
        del ids_BL
        raise Refused("the engine compiles nothing")

    def filtered(self, name: str, rows_BV: Tensor, options: Mapping[str, float]) -> Tensor:
        """A filter of `engine.sampling`."""
        rows = as_array(rows_BV)
        match name:
            case "top_k":
                out = filters.top_k(rows, int(options["k"]))
            case "top_p":
                out = filters.top_p(rows, options["p"])
            case "min_p":
                out = filters.min_p(rows, options["min_p"])
            case _:
                raise Refused("the engine's xtc takes its uniform from the caller's generator")
        return to_tensor(out)

    def packed_attention(self, heads: Mapping[str, Tensor], mask_B1LT: Tensor) -> Tensor:
        """`engine.attention` over keys and values of 8 bits in groups of 64."""
        q, k, v = (as_array(heads[name]) for name in ("q_BHLE", "k_BKTE", "v_BKTE"))
        keys, values = (as_packed(x) for x in (k, v))
        mask = mx.array(mask_B1LT.bits().astype(bool))
        return to_tensor(attend(q, keys, values, scale=q.shape[-1] ** -0.5, mask=mask))

    def with_weights(self, change: str) -> "EngineSubject":
        """The same snapshot with a spare head stored beside the tied one."""
        if change != "spare-head":
            raise Refused("the engine reads checkpoint tensors as they are and rearranges none")
        tensors = cast("dict[str, mx.array]", mx.load(str(self.folder / "model.safetensors")))
        names = [name for name in tensors if name.endswith("embed_tokens.weight")]
        if any("lm_head" in name for name in tensors) or not names:
            raise Refused("the head is not tied")
        head = names[0].removesuffix("model.embed_tokens.weight") + "lm_head.weight"
        with TemporaryDirectory() as folder, refusing():
            shutil.copy(self.folder / "config.json", folder)
            mx.save_safetensors(str(Path(folder) / "model.safetensors"), {**tensors, head: tensors[names[0]]})
            return replace(self, model=open_model(Path(folder), dtype=self.dtype))


@contextmanager
def refusing() -> Iterator[None]:
    """What the engine refuses with an error of its own is a refusal here too."""
    try:
        yield
    except EngineError as error:
        reason = error.facts.get("reason") or error.facts.get("family")
        raise Refused(error.what + (f": {reason}" if reason else "")) from error


def picker(prompt: Sequence[int], penalty: bool) -> Picker:
    """Greedy, with a repetition penalty over prompt and output where asked for."""
    if not penalty:
        return greedy
    options, history = Processing(repetition_penalty=PENALTY, repetition_window=REACH), list(prompt)

    def pick(logits_BV: mx.array, index: int) -> int:
        history.append(greedy(process(logits_BV, history, options), index))
        return history[-1]

    return pick


def as_array(tensor: Tensor) -> mx.array:
    """The same bits as an mlx array."""
    if tensor.dtype == "BF16":
        return mx.array(np.array(tensor.bits())).view(mx.bfloat16)
    return mx.array(np.frombuffer(tensor.data, dtype="<f4").reshape(tensor.shape))


def as_packed(heads: mx.array) -> PackedHeads:
    """Heads packed to 8 bits."""
    weight, scales, biases = mx.quantize(heads, group_size=GROUP, bits=8)
    return PackedHeads(weight=weight, scales=scales, biases=biases, bits=8, group_size=GROUP)
