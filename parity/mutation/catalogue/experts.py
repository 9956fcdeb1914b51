"""Faults of experts: another one is asked than was chosen, or has another one's weights."""

from collections.abc import Callable
from typing import Any, Final

import mlx.core as mx

from parity.mutation.changes import rolled
from parity.mutation.fault import Fault, fault, taps
from parity.mutation.planting import edit, swap

Layer = Callable[..., mx.array]
QWEN3_MOE, MIXTRAL, GPT_OSS, DEEPSEEK, GLM4_MOE = map(
    taps, ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "glm4_moe")
)


def outputs_of(change: Callable[[mx.array, int], mx.array]) -> Callable[[Layer], Layer]:
    """Experts that are asked for other ids than those chosen."""

    def by(right: Layer) -> Layer:
        def wrong(self: Any, x: mx.array, experts: mx.array) -> mx.array:  # noqa: ANN401 - a method of a layer
            weight = self.gate.weight
            return right(self, x, change(experts, (weight if isinstance(weight, mx.array) else weight.weight).shape[0]))

        return wrong

    return by


FAULTS: Final[tuple[Fault, ...]] = tuple(
    fault("expert index", model, what, says=says, at=at, cases=cases, plant=plant)
    for model, what, says, at, cases, plant in (
        *(
            (
                model,
                "one-off",
                "the expert after the chosen one is asked",
                at,
                taps(model),
                swap("engine.moe:GatedExperts.__call__", outputs_of(lambda ids, count: (ids + 1) % count)),
            )
            for model, at in (
                ("qwen3_moe", "model.layers.1.mlp.switch_mlp"),
                ("mixtral", "model.layers.0.block_sparse_moe.switch_mlp"),
                ("gpt_oss", "model.layers.0.mlp.experts"),
                ("deepseek_v3", "model.layers.1.mlp.switch_mlp"),
            )
        ),
        (
            "glm4_moe",
            "second-is-the-first",
            "the first chosen expert is asked twice",
            "model.layers.1.mlp.switch_mlp",
            GLM4_MOE,
            swap(
                "engine.moe:GatedExperts.__call__",
                outputs_of(lambda ids, _: mx.broadcast_to(ids[..., :1], ids.shape)),
            ),
        ),
        (
            "qwen3_moe",
            "up-of-the-next",
            "layer 2's experts have the next one's up projection",
            "model.layers.2.mlp.switch_mlp",
            QWEN3_MOE,
            edit("blocks.2.mlp.experts.up.weight", rolled(1)),
        ),
        (
            "mixtral",
            "w1-for-w3",
            "half of layer 1's experts have each other's gates",
            "model.layers.1.block_sparse_moe.switch_mlp",
            MIXTRAL,
            edit("blocks.1.mlp.experts.gate.weight", rolled(4)),
        ),
        (
            "deepseek_v3",
            "down-reversed",
            "layer 3's experts have each other's down projection",
            "model.layers.3.mlp.switch_mlp",
            DEEPSEEK,
            edit("blocks.3.mlp.experts.down.weight", lambda weight: weight[::-1]),
        ),
        (
            "qwen3_moe-q4g64",
            "packed-scales-of-the-next",
            "layer 1's packed experts have the next one's scales",
            "model.layers.1.mlp.switch_mlp",
            taps("qwen3_moe-q4g64"),
            edit("blocks.1.mlp.experts.gate.weight.scales", rolled(1)),
        ),
        (
            "nemotron_h",
            "up-of-the-next",
            "layer 4's experts have the next one's up projection",
            "backbone.layers.4.mixer.switch_mlp",
            taps("nemotron_h"),
            edit("blocks.4.mixer.experts.up.weight", rolled(1)),
        ),
        (
            "gpt_oss",
            "biases-of-the-next",
            "layer 3's experts have the next one's biases",
            "model.layers.3.mlp.experts",
            GPT_OSS,
            edit("blocks.3.mlp.experts.down.bias", rolled(1)),
        ),
    )
)
