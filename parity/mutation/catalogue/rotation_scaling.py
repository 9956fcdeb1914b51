"""Faults of scaled rotary positions: factors that are ignored, periods that are bent wrongly, gains that are left out."""

from collections.abc import Callable
from typing import Final

import mlx.core as mx

from engine.rope import Rope, default_periods
from parity.mutation.catalogue.rotation import seen
from parity.mutation.changes import fields, one_ulp, to
from parity.mutation.fault import Fault, fault, taps
from parity.mutation.planting import edit, swap


def unscaled(base: float) -> Callable[[Rope], Rope]:
    """The rotation as if there were no scaling."""

    def change(rope: Rope) -> Rope:
        return Rope(width=rope.width, traditional=rope.traditional, base=base, gain=rope.gain)

    return change


FAULTS: Final[tuple[Fault, ...]] = (
    fault(
        "rope scaling",
        "llama",
        "llama3-ignored",
        says="rope_scaling of form llama3 is parsed and not used",
        at=seen(0),
        cases=taps("llama"),
        plant=edit("blocks.0.attention.rope", unscaled(500000.0)),
    ),
    fault(
        "rope scaling",
        "llama",
        "llama3-bounds-exchanged",
        says="low_freq_factor and high_freq_factor stand for each other",
        at=seen(0),
        cases=taps("llama"),
        plant=swap(
            "engine.rope:llama3_periods",
            lambda right: (
                lambda width, *, base, scaling: right(
                    width,
                    base=base,
                    scaling={
                        **scaling,
                        "low_freq_factor": scaling["high_freq_factor"],
                        "high_freq_factor": scaling["low_freq_factor"],
                    },
                )
            ),
        ),
    ),
    fault(
        "rope scaling",
        "llama",
        "one-period-one-ulp",
        says="one period of layer 2 is one ULP off, as computed in float64",
        at=seen(2),
        cases=taps("llama"),
        plant=edit("blocks.2.attention.rope", fields(periods=one_ulp(2))),
    ),
    fault(
        "rope scaling",
        "llama_linear",
        "factor-ignored",
        says="positions are not divided by the factor",
        at=seen(0),
        cases=taps("llama_linear"),
        plant=edit("blocks.0.attention.rope", fields(scale=to(1.0))),
    ),
    fault(
        "rope scaling",
        "llama_linear",
        "factor-multiplied",
        says="positions are multiplied by the factor of layer 3, not divided by it",
        at=seen(3),
        cases=taps("llama_linear"),
        plant=edit("blocks.3.attention.rope", fields(scale=to(4.0))),
    ),
    fault(
        "rope scaling",
        "llama_yarn",
        "no-temperature",
        says="yarn's factor on queries and keys is left out",
        at=seen(0),
        cases=taps("llama_yarn"),
        plant=edit("blocks.0.attention.rope", fields(gain=to(1.0))),
    ),
    fault(
        "rope scaling",
        "llama_yarn",
        "mscale-conflated",
        says="mscale_all_dim is not divided by",
        at=seen(0),
        cases=taps("llama_yarn"),
        plant=swap("engine.rope:yarn_gain", lambda right: lambda scaling: right({**scaling, "mscale_all_dim": 0.0})),
    ),
    fault(
        "rope scaling",
        "llama_yarn",
        "beta-fast-doubled",
        says="beta_fast is twice what it should be",
        at=seen(0),
        cases=taps("llama_yarn"),
        plant=swap(
            "engine.rope:yarn_periods",
            lambda right: (
                lambda width, *, base, scaling: right(
                    width, base=base, scaling={**scaling, "beta_fast": 2 * scaling["beta_fast"]}
                )
            ),
        ),
    ),
    fault(
        "rope scaling",
        "gpt_oss",
        "no-temperature",
        says="yarn's factor on queries and keys is left out",
        at=seen(0),
        cases=taps("gpt_oss"),
        plant=edit("blocks.0.attention.rope", fields(gain=to(1.0))),
    ),
    fault(
        "rope scaling",
        "deepseek_v3",
        "yarn-ignored",
        says="the rotated part of layer 0 turns as if there were no scaling",
        at="model.layers.0.self_attn.unembed_out",
        cases=taps("deepseek_v3"),
        plant=edit("blocks.0.attention.rope", unscaled(10000.0)),
    ),
    fault(
        "rope scaling",
        "phi3",
        "short-factors",
        says="the short factors are used where the long ones belong",
        at=seen(0),
        cases=taps("phi3"),
        plant=swap(
            "engine.rope:longrope_periods",
            lambda right: (
                lambda width, *, base, scaling: right(
                    width, base=base, scaling={**scaling, "long_factor": scaling["short_factor"]}
                )
            ),
        ),
    ),
    fault(
        "rope scaling",
        "phi3",
        "gain-of-the-original-context",
        says="longrope's gain is left out",
        at=seen(1),
        cases=taps("phi3"),
        plant=edit("blocks.1.attention.rope", fields(gain=to(1.0))),
    ),
    fault(
        "rope scaling",
        "gemma3_text",
        "full-layer-unscaled",
        says="the full layer's positions are not divided by its factor",
        at=seen(2),
        cases=taps("gemma3_text"),
        plant=edit("blocks.2.attention.rope", fields(scale=to(1.0))),
    ),
    fault(
        "rope scaling",
        "gemma3_text",
        "window-layer-takes-the-global-base",
        says="a layer with a window rotates with rope_theta",
        at=seen(0),
        cases=taps("gemma3_text"),
        plant=edit("blocks.0.attention.rope", fields(base=to(1_000_000.0))),
    ),
    fault(
        "rope scaling",
        "qwen3_next",
        "first-pair-slowed",
        says="the fastest pair turns half as fast",
        at=seen(3),
        cases=taps("qwen3_next"),
        plant=edit("blocks.3.attention.rope.periods", lambda periods: periods * mx.array([2.0] + [1.0] * 7)),
    ),
    fault(
        "rope scaling",
        "gemma4_text",
        "proportional-over-the-turning-part",
        says="periods are spread over the pairs that turn, not over the whole head",
        at=seen(2),
        cases=taps("gemma4_text"),
        plant=swap(
            "engine.rope:proportional_periods",
            lambda _: (
                lambda width, *, base, scaling: mx.concatenate(
                    [
                        default_periods(int(width * scaling["partial_rotary_factor"]), base=base),
                        mx.full(((width - int(width * scaling["partial_rotary_factor"])) // 2,), mx.inf),
                    ]
                )
            ),
        ),
    ),
)
