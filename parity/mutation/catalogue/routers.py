"""Faults of routers: which experts are chosen, in which order, and how much each counts."""

from collections.abc import Callable
from typing import Any, Final

import mlx.core as mx

from engine.taps import tap
from parity.mutation.changes import fields, rolled, times, to
from parity.mutation.fault import Fault, fault, taps
from parity.mutation.planting import edit, swap

Layer = Callable[..., mx.array]


def weights_reversed(right: Layer) -> Layer:
    """Each chosen expert has another one's weight."""
    return lambda outputs, weights: right(outputs, weights[..., ::-1])


def shares_of_the_chosen(self: Any, x_BLD: mx.array) -> mx.array:  # noqa: ANN401 - a method of a layer
    """qwen3_moe's layer with a softmax over the chosen experts alone, equal on paper."""
    scores = self.router(x_BLD)
    chosen = mx.argpartition(scores, kth=-self.chosen, axis=-1)[..., -self.chosen :]
    shares = mx.softmax(mx.take_along_axis(scores, chosen, axis=-1), axis=-1, precise=True)
    return tap(self.path, (self.experts(x_BLD, chosen) * shares[..., None]).sum(axis=-2))


def least_probable(self: Any, x_BLD: mx.array) -> mx.array:  # noqa: ANN401 - a method of a layer
    """qwen3_moe's layer with the least probable experts."""
    shares = mx.softmax(self.router(x_BLD), axis=-1, precise=True)
    chosen = mx.argpartition(shares, kth=self.chosen - 1, axis=-1)[..., : self.chosen]
    weights = mx.take_along_axis(shares, chosen, axis=-1)
    weights = weights / weights.sum(axis=-1, keepdims=True)
    return tap(self.path, (self.experts(x_BLD, chosen) * weights[..., None]).sum(axis=-2))


def first_by_id(self: Any, x_BLD: mx.array) -> mx.array:  # noqa: ANN401 - a method of a layer
    """qwen3_moe's layer with the right experts in the order of their ids, equal on paper but for the taps."""
    shares = mx.softmax(self.router(x_BLD), axis=-1, precise=True)
    chosen = mx.sort(mx.argpartition(shares, kth=-self.chosen, axis=-1)[..., -self.chosen :], axis=-1)
    weights = mx.take_along_axis(shares, chosen, axis=-1)
    weights = weights / weights.sum(axis=-1, keepdims=True)
    return tap(self.path, (self.experts(x_BLD, chosen) * weights[..., None]).sum(axis=-2))


def only(path: str, wrong: Layer) -> Callable[[Layer], Layer]:
    """The layer at one path computes wrongly, the others rightly."""
    return lambda right: lambda self, x: wrong(self, x) if self.path == path else right(self, x)


def biased_weights(right: Layer) -> Layer:
    """The correction of the choice counts in the weights too."""
    return lambda scores, bias, choice: right(scores + bias, bias * 0, choice)


def not_sorted_back(right: Callable[..., Any]) -> Callable[..., Any]:
    """Outputs of sorted experts stay in the experts' order."""

    def wrong(y: mx.array, back: mx.array | None, experts: mx.array) -> Any:  # noqa: ANN401 - an mx.array
        return right(y, back if back is None else mx.arange(back.size), experts)

    return wrong


QWEN3_MOE, MIXTRAL, GPT_OSS, DEEPSEEK, GLM4_MOE = map(
    taps, ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "glm4_moe")
)

SAME_CHOICE: Final = "the last position's choice is the same in layer 1: it learns of the others' a layer later"

ORDER: Final = tuple(
    fault(
        "router order",
        model,
        what,
        says=says,
        at=at,
        cases=cases,
        plant=plant,
        hidden=SAME_CHOICE if what == "groups-by-one-expert" else "",
    )
    for model, what, says, at, cases, plant in (
        *(
            (
                model,
                "weights-reversed",
                "each chosen expert counts as much as another one should",
                at,
                taps(model),
                swap(f"{module}:weighted_sum", weights_reversed),
            )
            for model, module, at in (
                ("qwen3_moe", "engine.families.qwen3_moe", "model.layers.1.mlp"),
                ("mixtral", "engine.families.mixtral", "model.layers.0.block_sparse_moe"),
                ("gpt_oss", "engine.families.gpt_oss", "model.layers.0.mlp"),
                ("deepseek_v3", "engine.router", "model.layers.1.mlp"),
                ("nemotron_h", "engine.ungated_moe", "backbone.layers.4.mixer"),
                ("qwen3_next", "engine.shared_expert_moe", "model.layers.0.mlp"),
            )
        ),
        (
            "qwen3_moe",
            "least-probable",
            "the least probable experts are chosen",
            "model.layers.1.mlp.switch_mlp",
            QWEN3_MOE,
            swap("engine.families.qwen3_moe:ExpertMLP.__call__", to(least_probable)),
        ),
        (
            "qwen3_moe",
            "by-id",
            "the chosen experts are put in the order of their ids",
            "model.layers.2.mlp.switch_mlp",
            QWEN3_MOE,
            swap("engine.families.qwen3_moe:ExpertMLP.__call__", only("model.layers.2.mlp", first_by_id)),
        ),
        (
            "moe",
            "not-sorted-back",
            "outputs of experts that were sorted are not put back in the tokens' order",
            "model.layers.1.mlp.switch_mlp",
            taps("qwen3_moe", feed="whole"),
            swap("engine.moe:_by_token", not_sorted_back),
        ),
        (
            "deepseek_v3",
            "groups-by-one-expert",
            "a group is judged by its best expert alone",
            "model.layers.1.mlp.gate",
            DEEPSEEK,
            swap("engine.router:JUDGED", to(1)),
        ),
        (
            "deepseek_v3",
            "all-groups-kept",
            "no group of experts is left out",
            "model.layers.2.mlp.gate",
            DEEPSEEK,
            edit("blocks.2.mlp.router.choice", fields(kept=to(2))),
        ),
    )
)

SCALE: Final = tuple(
    fault("router scale", model, what, says=says, at=at, cases=taps(model), plant=plant)
    for model, what, says, at, plant in (
        (
            "qwen3_moe",
            "not-normalised",
            "layer 1 does not divide the chosen shares by their sum",
            "model.layers.1.mlp",
            edit("blocks.1.mlp.normalised", to(False)),
        ),
        (
            "qwen3_moe",
            "softmax-over-the-chosen",
            "shares are a softmax over the chosen alone",
            "model.layers.3.mlp",
            swap("engine.families.qwen3_moe:ExpertMLP.__call__", only("model.layers.3.mlp", shares_of_the_chosen)),
        ),
        (
            "deepseek_v3",
            "factor-ignored",
            "routed_scaling_factor is ignored",
            "model.layers.1.mlp",
            edit("blocks.1.mlp.router.choice", fields(factor=to(1.0))),
        ),
        (
            "deepseek_v3",
            "not-normalised",
            "layer 3 does not divide the chosen scores by their sum",
            "model.layers.3.mlp",
            edit("blocks.3.mlp.router.choice", fields(normalised=to(False))),
        ),
        (
            "glm4_moe",
            "factor-a-thousandth-off",
            "the factor on the weights is 0.1 % too large",
            "model.layers.2.mlp",
            edit("blocks.2.mlp.router.choice", fields(factor=times(1.001))),
        ),
        (
            "nemotron_h",
            "factor-ignored",
            "routed_scaling_factor is ignored",
            "backbone.layers.7.mixer",
            edit("blocks.7.mixer.router.choice", fields(factor=to(1.0))),
        ),
        (
            "qwen3_next",
            "shared-expert-half",
            "the shared expert counts half, whatever its gate says",
            "model.layers.0.mlp.shared_expert_gate",
            edit("blocks.0.mlp.shared_gate.weight", times(0.0)),
        ),
        (
            "deepseek_v3",
            "shared-experts-lost",
            "layer 2's shared experts put out nothing",
            "model.layers.2.mlp.shared_experts.down_proj",
            edit("blocks.2.mlp.shared.down.weight", times(0.0)),
        ),
        (
            "qwen3_5_moe",
            "normalised",
            "layer 0 divides the chosen shares by their sum",
            "language_model.model.layers.0.mlp",
            edit("blocks.0.mlp.sizes", fields(normalised=to(True))),
        ),
    )
)

BIAS: Final = tuple(
    fault("router bias", model, what, says=says, at=at, cases=cases, plant=plant)
    for model, what, says, at, cases, plant in (
        (
            "deepseek_v3",
            "in-the-weights",
            "the correction of the choice counts in the weights too",
            "model.layers.1.mlp",
            DEEPSEEK,
            swap("engine.router:choose", biased_weights),
        ),
        (
            "deepseek_v3",
            "ignored",
            "layer 3's correction of the choice is not used",
            "model.layers.3.mlp.gate",
            DEEPSEEK,
            edit("blocks.3.mlp.router.bias", times(0.0)),
        ),
        (
            "glm4_moe",
            "reversed",
            "the correction of layer 1 is subtracted",
            "model.layers.1.mlp.gate",
            GLM4_MOE,
            edit("blocks.1.mlp.router.bias", times(-1.0)),
        ),
        (
            "nemotron_h",
            "of-the-next-expert",
            "each expert of layer 4 has the next one's correction",
            "backbone.layers.4.mixer.gate",
            taps("nemotron_h"),
            edit("blocks.4.mixer.router.bias", rolled(1)),
        ),
        (
            "gpt_oss",
            "lost",
            "layer 1's router has lost its bias",
            "model.layers.1.mlp.router",
            GPT_OSS,
            edit("blocks.1.mlp.router.bias", to(None)),
        ),
        (
            "gpt_oss",
            "of-the-next-expert",
            "each expert of layer 0 has the next one's bias",
            "model.layers.0.mlp.router",
            GPT_OSS,
            edit("blocks.0.mlp.router.bias", rolled(1)),
        ),
        (
            "kimi_linear",
            "of-one-expert",
            "one expert of layer 1 is favoured",
            "model.layers.1.mlp.switch_mlp",
            taps("kimi_linear"),
            edit("blocks.1.mlp.router.bias", lambda bias: bias + 10 * (mx.arange(bias.size) == 3)),
        ),
    )
)

FAULTS: Final[tuple[Fault, ...]] = (*ORDER, *SCALE, *BIAS)
