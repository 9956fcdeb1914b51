"""A model of mlx-lm as the subject of a sweep: its own caches, batches, loops, filters and loader, nothing of them rewritten.

Works with mlx-lm 0.31.3 and 0.32.2. Weights are drawn like those of tiny snapshots, by name and shape, so that a config alone
is enough and both versions read the same bits. Where mlx-lm has no such operation the answer is `Refused` with the reason.
"""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Self

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm import sample_utils
from mlx_lm.generate import BatchGenerator, generate_step, maybe_quantize_kv_cache, speculative_generate_step
from mlx_lm.models import base, cache
from mlx_lm.utils import _get_classes

from oracles.mlx_lm.capture import to_tensor
from parity.models.tiny import build_tiny
from parity.sweeping.rows import PAD, PENALTY, REACH, at_positions
from parity.sweeping.subject import Refused, State
from parity.tensor import Tensor

DTYPES: Final = {"f32": mx.float32, "bf16": mx.bfloat16, "f16": mx.float16}
DRAFTED: Final = 3


class MlxLmSubject:
    """One model, its parameters drawn and cast."""

    def __init__(self, config: Mapping[str, Any], dtype: str) -> None:
        self._config, self._dtype = dict(config), dtype
        self._weights = _drawn(self._config)
        self.model = self._loaded(self._weights)

    @property
    def vocabulary(self) -> int:
        """Ids are below it."""
        for place in (self._config, self._config.get("text_config", {})):
            for name in ("vocab_size", "num_vocab"):
                if name in place:
                    return int(place[name])
        return int(self.model.args.vocab_size)

    def fresh(self) -> State:
        """The model's own kinds of cache."""
        return cache.make_prompt_cache(self.model)

    def feed(self, state: State | None, ids_BL: Sequence[Sequence[int]]) -> tuple[Tensor, State]:
        """One call of the model."""
        logits = self.model(mx.array([list(ids) for ids in ids_BL]), cache=state)
        mx.eval(logits, [] if state is None else _arrays(state))
        return to_tensor(logits), state

    def packed(self, state: State, kv: str) -> State:
        """Converted by the function that the loop calls after each forward."""
        bits, group = (int(word[2:] if word.startswith("kv") else word[1:]) for word in kv.split("-"))
        before = [type(c) for c in state]
        maybe_quantize_kv_cache(state, quantized_kv_start=0, kv_group_size=group, kv_bits=bits)
        if [type(c) for c in state] == before:
            raise Refused(f"{before[0].__name__} and the others are left as they are, without a word")
        return state

    def fork(self, state: State) -> State:
        """A deep copy, as its prompt cache makes."""
        return copy.deepcopy(state)

    def stored(self, state: State) -> State:
        """Through `save_prompt_cache` and `load_prompt_cache`."""
        with TemporaryDirectory() as folder:
            file = str(Path(folder) / "state.safetensors")
            cache.save_prompt_cache(file, state)
            read = cache.load_prompt_cache(file)
            mx.eval(_arrays(read))
        return read

    def trimmed(self, state: State, count: int) -> State:
        """Through `trim_prompt_cache`, where `can_trim_prompt_cache` allows it."""
        if not cache.can_trim_prompt_cache(state):
            raise Refused("can_trim_prompt_cache says no")
        removed = cache.trim_prompt_cache(state, count)
        if removed != count:
            raise ValueError(f"trim_prompt_cache removed {removed} of {count} tokens")
        return state

    def merged(self, states: Sequence[State]) -> State:
        """Each layer's `merge`."""
        return [_merge([state[layer] for state in states]) for layer in range(len(states[0]))]

    def prefilled(self, prompts: Sequence[Sequence[int]], side: str) -> tuple[Tensor, State]:
        """One forward over padded prompts, with the caches told of the padding beforehand."""
        lengths = [len(prompt) for prompt in prompts]
        padding = [max(lengths) - length for length in lengths]
        if side == "left":
            ids = [[PAD] * n + list(p) for n, p in zip(padding, prompts, strict=True)]
            logits, state = self.feed([_left_padded(c, padding) for c in self.fresh()], ids)
            return at_positions(logits, [max(lengths) - 1] * len(prompts)), state
        ids = [list(p) + [PAD] * n for n, p in zip(padding, prompts, strict=True)]
        state = self.merged([self.fresh() for _ in prompts])
        for layer in state:
            layer.prepare(lengths=lengths, right_padding=padding)
        logits, state = self.feed(state, ids)
        for layer in state:
            layer.finalize()
        return at_positions(logits, [length - 1 for length in lengths]), state

    def kept(self, state: State, rows: Sequence[int]) -> State:
        """Each layer's `filter`."""
        for layer in state:
            _offered(layer, "filter")(mx.array(list(rows)))
        return state

    def joined(self, first: State, second: State) -> State:
        """Each layer's `extend`."""
        for layer, other in zip(first, second, strict=True):
            _offered(layer, "extend")(other)
        return first

    def extracted(self, state: State, row: int) -> State:
        """Each layer's `extract`."""
        return [_offered(layer, "extract")(row) for layer in state]

    def generated(
        self,
        prompt: Sequence[int],
        count: int,
        *,
        draft: str | None = None,
        piece: int | None = None,
        penalty: bool = False,
    ) -> list[int]:
        """`generate_step`, or `speculative_generate_step` with three drafted tokens."""
        options: dict[str, Any] = {"max_tokens": count, "logits_processors": _processors(penalty)}
        if piece is not None:
            options["prefill_step_size"] = piece
        ids = mx.array(list(prompt))
        if draft is None:
            return [int(token) for token, _ in generate_step(ids, self.model, **options)]
        if not cache.can_trim_prompt_cache(self.fresh()):
            raise Refused("speculation needs a trimmable prompt cache")
        drafter = self.model if draft == "itself" else self._loaded(_drawn(self._config, seed=1))
        steps = speculative_generate_step(ids, self.model, drafter, num_draft_tokens=DRAFTED, **options)
        return [int(step[0]) for step in steps]

    def generated_together(
        self, prompts: Sequence[Sequence[int]], count: int, *, penalty: bool = False
    ) -> list[list[int]]:
        """`BatchGenerator`."""
        for layer in self.fresh():
            _merge([layer])
        loop = BatchGenerator(self.model, max_tokens=count)
        processors = [_processors(penalty) for _ in prompts]
        uids = loop.insert([list(p) for p in prompts], [count] * len(prompts), logits_processors=processors)
        given: dict[int, list[int]] = {uid: [] for uid in uids}
        while any(len(ids) < count for ids in given.values()):
            responses = loop.next_generated()
            if not responses:
                raise RuntimeError("BatchGenerator stopped before its rows were done")
            for response in responses:
                given[response.uid].append(int(response.token))
        loop.close()
        return [given[uid] for uid in uids]

    def through_prompt_cache(self, first: Sequence[int], prompt: Sequence[int], count: int) -> list[int]:
        """`LRUPromptCache`: `first` is run and inserted, then the nearest state is fetched for `prompt`."""
        kept = cache.LRUPromptCache()
        _, state = self.feed(self.fresh(), [first])
        kept.insert_cache("model", list(first), state)
        state, rest = kept.fetch_nearest_cache("model", list(prompt))
        if state is not None and not rest:
            raise Refused("the whole prompt is in the cache: its last row is not")
        state = self.fresh() if state is None else state
        steps = generate_step(mx.array(list(rest)), self.model, max_tokens=count, prompt_cache=state)
        return [int(token) for token, _ in steps]

    def compiled(self, ids_BL: Sequence[Sequence[int]]) -> Tensor:
        """The prompt with `mx.compile` on; elsewhere it is off (`MLX_DISABLE_COMPILE`)."""
        mx.enable_compile()
        try:
            return self.feed(self.fresh(), ids_BL)[0]
        finally:
            mx.disable_compile()

    def filtered(self, name: str, rows_BV: Tensor, options: Mapping[str, float]) -> Tensor:
        """One of `sample_utils`' filters."""
        rows = _array(rows_BV)
        match name:
            case "top_k":
                out = sample_utils.apply_top_k(rows, int(options["k"]))
            case "top_p":
                out = sample_utils.apply_top_p(rows, options["p"])
            case "min_p":
                out = sample_utils.apply_min_p(rows, options["min_p"])
            case "xtc":
                out = sample_utils.apply_xtc(rows, options["probability"], options["threshold"], [])
            case _:
                raise Refused(f"no filter {name}")
        return to_tensor(out)

    def packed_attention(self, heads: Mapping[str, Tensor], mask_B1LT: Tensor) -> Tensor:
        """`quantized_scaled_dot_product_attention` over keys and values of 8 bits in groups of 64."""
        q, k, v = (_array(heads[name]) for name in ("q_BHLE", "k_BKTE", "v_BKTE"))
        keys, values = (tuple(mx.quantize(x, group_size=64, bits=8)) for x in (k, v))
        mask = mx.array(mask_B1LT.bits().astype(bool))
        out = base.quantized_scaled_dot_product_attention(
            q, keys, values, scale=q.shape[-1] ** -0.5, mask=mask, group_size=64, bits=8
        )
        return to_tensor(out)

    def with_weights(self, change: str) -> Self:
        """Another model that reads the drawn weights through `sanitize`, twice or with a spare head."""
        other = copy.copy(self)
        if change == "sanitised-twice":
            if not hasattr(self.model, "sanitize"):
                raise Refused("the family has no sanitize")
            other.model = self._loaded(self.model.sanitize(self.model.sanitize(dict(self._weights))))
            return other
        names = [name for name in self._weights if name.endswith("embed_tokens.weight")]
        if any("lm_head" in name for name in self._weights) or not names:
            raise Refused("the head is not tied")
        head = names[0].removesuffix("model.embed_tokens.weight") + "lm_head.weight"
        stored = {**self._weights, head: self._weights[names[0]]}
        other.model = self._loaded(self.model.sanitize(stored) if hasattr(self.model, "sanitize") else stored)
        return other

    def _loaded(self, weights: Mapping[str, mx.array]) -> Any:  # noqa: ANN401 - an mlx-lm model
        model = _built(self._config)
        model.load_weights(list(weights.items()), strict=True)
        model.set_dtype(DTYPES[self._dtype])
        model.eval()
        mx.eval(model.parameters())
        return model


def _built(config: Mapping[str, Any]) -> Any:  # noqa: ANN401 - an mlx-lm model
    model_class, args_class = _get_classes(dict(config))
    return model_class(args_class.from_dict(dict(config)))


def _drawn(config: Mapping[str, Any], *, seed: int = 0) -> dict[str, mx.array]:
    """A tensor for each parameter, drawn as tiny snapshots are."""
    shapes = {name: tuple(array.shape) for name, array in dict(tree_flatten(_built(config).parameters())).items()}
    drawn = build_tiny(shapes, seed=seed, model_type=str(config.get("model_type", "")))
    return {name: _array(tensor) for name, tensor in drawn.items()}


def _array(tensor: Tensor) -> mx.array:
    """The same bits as an mlx array."""
    if tensor.dtype == "BF16":
        return mx.array(np.array(tensor.bits())).view(mx.bfloat16)
    floats = {"F32": "<f4", "F16": "<f2"}[tensor.dtype]
    return mx.array(np.frombuffer(tensor.data, dtype=floats).reshape(tensor.shape))


def _arrays(state: State) -> list[Any]:
    return [a for a in dict(tree_flatten([c.state for c in state])).values() if isinstance(a, mx.array)]


def _offered(layer: Any, name: str) -> Any:  # noqa: ANN401 - an mlx-lm cache
    if not hasattr(layer, name):
        raise Refused(f"{type(layer).__name__} has no {name}")
    return getattr(layer, name)


def _merge(layers: Sequence[Any]) -> Any:  # noqa: ANN401 - mlx-lm caches
    return _offered(layers[0], "merge")(list(layers))


def _left_padded(layer: Any, padding: list[int]) -> Any:  # noqa: ANN401 - mlx-lm caches
    """The batch cache of a kind, told that its rows begin after so many positions."""
    if isinstance(layer, cache.CacheList):
        return cache.CacheList(*(_left_padded(c, padding) for c in layer.caches))
    if isinstance(layer, cache.ArraysCache):
        return cache.ArraysCache(len(layer.cache), left_padding=padding)
    if isinstance(layer, cache.RotatingKVCache) and layer.keep == 0:
        return cache.BatchRotatingKVCache(layer.max_size, padding)
    if type(layer) is cache.KVCache:
        return cache.BatchKVCache(padding)
    raise Refused(f"{type(layer).__name__} does not batch")


def _processors(penalty: bool) -> list[Any] | None:
    if not penalty:
        return None
    made: list[Any] = sample_utils.make_logits_processors(repetition_penalty=PENALTY, repetition_context_size=REACH)
    return made
