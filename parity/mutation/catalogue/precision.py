"""Faults of precision: one intermediate value in a dtype that is not its own."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import mlx.core as mx

from engine.taps import tap
from parity.mutation.changes import rounded
from parity.mutation.fault import Fault, fault, taps
from parity.mutation.planting import edit, swap

QWEN3_5: Final = "language_model.model.layers.0.linear_attn"
BF16, F16 = rounded(mx.bfloat16), rounded(mx.float16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Narrowed:
    """A layer whose input or output goes through a narrower dtype; all else is the layer's own.

    Attributes:
        layer: The right one.
        into: On the first argument.
        out: On what comes out, after its tap.
    """

    layer: Any
    into: Callable[[Any], Any] | None = None
    out: Callable[[Any], Any] | None = None

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - a field of any layer
        """All else is the layer's."""
        return getattr(self.layer, name)

    def __call__(self, x: mx.array, *rest: Any) -> Any:  # noqa: ANN401 - what the layer gives
        """What the layer gives, rounded where it is to be."""
        y = self.layer(x if self.into is None else self.into(x), *rest)
        return y if self.out is None else self.out(y)


def into(change: Callable[[Any], Any]) -> Callable[[Any], Narrowed]:
    """The layer with its input rounded."""
    return lambda layer: Narrowed(layer=layer, into=change)


def out(change: Callable[[Any], Any]) -> Callable[[Any], Narrowed]:
    """The layer with its output rounded, once its tap has seen it."""
    return lambda layer: Narrowed(layer=layer, out=change)


def after(change: Callable[[Any], Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A function with its result rounded."""
    return lambda right: lambda *rest, **options: change(right(*rest, **options))


def before(change: Callable[[Any], Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A method with its first argument rounded."""
    return lambda right: lambda self, x, *rest, **options: right(self, change(x), *rest, **options)


def norm_in_its_dtype(right: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """A norm whose mean square is taken in x's dtype."""

    def wrong(self: Any, x: mx.array) -> mx.array:  # noqa: ANN401 - a method of a layer
        if not self.path.endswith("layers.0.input_layernorm"):
            return right(self, x)
        return tap(self.path, x * mx.rsqrt(mx.mean(x * x, axis=-1, keepdims=True) + self.eps) * self.weight)

    return wrong


def state_rounded(change: Callable[[Any], Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A recurrent cache whose arrays are kept in a narrower dtype."""
    return lambda right: lambda self, *state, **options: right(self, *map(change, state), **options)


def weights_rounded(right: Callable[..., Any]) -> Callable[..., Any]:
    """A choice of experts whose weights go through bfloat16."""

    def wrong(*given: Any) -> Any:  # noqa: ANN401 - passed on
        ids, weights = right(*given)
        return ids, BF16(weights)

    return wrong


def kept_rounded(right: Callable[..., Any]) -> Callable[..., Any]:
    """A cache that keeps keys and values in float16."""
    return lambda self, keys, values: right(self, F16(keys), F16(values))


def in_float32(right: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """A function of arrays that is computed in float32 and rounded at its end."""

    def wrong(*arrays: mx.array, **options: Any) -> mx.array:  # noqa: ANN401 - passed on
        return right(*(array.astype(mx.float32) for array in arrays), **options).astype(arrays[0].dtype)

    return wrong


FAULTS: Final[tuple[Fault, ...]] = tuple(
    fault("dtype", part, what, says=says, at=at, cases=cases, plant=plant)
    for part, what, says, at, cases, plant in (
        (
            "llama",
            "norm-input",
            "the input of layer 2's second norm goes through bfloat16",
            "model.layers.2.post_attention_layernorm",
            taps("llama"),
            edit("blocks.2.post_norm", into(BF16)),
        ),
        (
            "llama",
            "activation",
            "layer 1's gated activation goes through bfloat16",
            "model.layers.1.mlp.down_proj",
            taps("llama"),
            edit("blocks.1.mlp.activation", after(BF16)),
        ),
        (
            "llama",
            "residual",
            "the residual goes through bfloat16 between layers 0 and 1",
            "model.layers.1.input_layernorm",
            taps("llama"),
            edit("blocks", lambda blocks: (blocks[0], into(BF16)(blocks[1]), *blocks[2:])),
        ),
        (
            "llama",
            "logits",
            "logits go through bfloat16",
            "logits",
            taps("llama"),
            edit("head", out(BF16)),
        ),
        (
            "grouped_attention",
            "weighted-values",
            "attention's output goes through float16",
            "model.layers.0.self_attn.o_proj",
            taps("qwen2"),
            swap("engine.grouped_attention:attend", after(F16)),
        ),
        (
            "rope",
            "rotated",
            "what is to be rotated goes through bfloat16",
            "model.layers.0.self_attn.o_proj",
            taps("qwen3"),
            swap("engine.rope:Rope.__call__", before(BF16)),
        ),
        (
            "cache",
            "keys-and-values",
            "keys and values are kept in float16",
            "model.layers.0.self_attn.o_proj",
            taps("granite"),
            swap("engine.cache.plain:PlainCache.append", kept_rounded),
        ),
        (
            "ring",
            "keys-and-values",
            "a ring's keys and values are kept in float16",
            "model.layers.0.self_attn.o_proj",
            taps("gemma3_text"),
            swap("engine.cache.rotating:RotatingCache.append", kept_rounded),
        ),
        (
            "qwen3_moe",
            "router-logits",
            "layer 1's router logits go through bfloat16",
            "model.layers.1.mlp",
            taps("qwen3_moe"),
            edit("blocks.1.mlp.router", out(BF16)),
        ),
        (
            "deepseek_v3",
            "router-weights",
            "the weights of experts go through bfloat16",
            "model.layers.1.mlp",
            taps("deepseek_v3"),
            swap(
                "engine.router:choose",
                weights_rounded,
            ),
        ),
        (
            "moe",
            "weighted-sum",
            "the weighted sum of experts goes through float16",
            "model.layers.0.block_sparse_moe",
            taps("mixtral"),
            swap("engine.families.mixtral:weighted_sum", after(F16)),
        ),
        (
            "gated_delta",
            "state",
            "window and matrices of the delta rule are kept in bfloat16",
            f"{QWEN3_5}.conv1d",
            taps("qwen3_5"),
            swap("engine.cache.recurrent:RecurrentCache.advanced", state_rounded(BF16)),
        ),
        (
            "gated_delta",
            "decay",
            "the factors of decay go through bfloat16",
            f"{QWEN3_5}.norm",
            taps("qwen3_5"),
            swap("engine.gated_delta:decay_factors", after(BF16)),
        ),
        (
            "gated_delta",
            "gated-norm",
            "the gated norm multiplies in float16",
            f"{QWEN3_5}.norm",
            taps("qwen3_5"),
            swap("engine.norm:swiglu", after(F16)),
        ),
        (
            "state_space",
            "time-steps",
            "time steps go through bfloat16",
            "backbone.layers.0.mixer.norm",
            taps("mamba2"),
            swap("engine.state_space_mixer:time_steps", after(BF16)),
        ),
        (
            "latent",
            "latents",
            "layer 1's latents go through bfloat16 before their norm",
            "model.layers.1.self_attn.kv_a_layernorm",
            taps("deepseek_v3"),
            edit("blocks.1.attention.heads.norm", into(BF16)),
        ),
        (
            "gemma2",
            "capped-scores",
            "capped scores go through float16",
            "model.layers.0.self_attn.o_proj",
            taps("gemma2"),
            swap("engine.families.gemma2:soft_capped", after(F16)),
        ),
        (
            "norm",
            "mean-square-in-bfloat16",
            "in bfloat16 the first norm takes its mean square in bfloat16",
            "model.layers.0.input_layernorm",
            taps("qwen3", dtype="bf16"),
            swap("engine.norm:RMSNorm.__call__", norm_in_its_dtype),
        ),
        (
            "bfloat16",
            "attention-in-float32",
            "in bfloat16 attention is rounded once, at its end",
            "model.layers.0.self_attn.o_proj",
            taps("qwen3", dtype="bf16"),
            swap("engine.grouped_attention:attend", in_float32),
        ),
        (
            "bfloat16",
            "activation-in-float32",
            "in bfloat16 layer 2's activation is rounded once, at its end",
            "model.layers.2.mlp.down_proj",
            taps("qwen3", dtype="bf16"),
            edit("blocks.2.mlp.activation", in_float32),
        ),
        (
            "lfm2",
            "gate",
            "layer 0's gated convolution goes through float16",
            "model.layers.0.conv.out_proj",
            taps("lfm2"),
            edit("blocks.0.operator", lambda operator: replace(operator, out=Narrowed(layer=operator.out, into=F16))),
        ),
    )
)
