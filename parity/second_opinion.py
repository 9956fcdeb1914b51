"""A second opinion in numbers: how far an engine's rows are from those of another implementation, and both from the truth.

Guarantees: it measures and describes; nothing here is judged, since two implementations that sum in other orders share no bits.
`agrees` says that rows lie as near as float32 rounding explains; what does not agree is either a known fact about an oracle,
shown by taking the config key away from the second side alone, or stands as not explained.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from parity.compare import TensorDiff
from parity.distribution import RowDistance
from parity.tensor import Tensor

NEAR: Final = 1e-4  # of the spread of a row: above what float32 rounding does, below what any fault tried so far does

KNOWN: Final[
    Mapping[str, tuple[str, Mapping[str, Any]]]
] = {  # config to the fact, and what takes it from the second side
    "gemma2": ("gemma2_sliding_window", {"sliding_window": 4096}),
    "gemma3_text": ("gemma3_embedding_scale", {}),
    "mistral": ("mistral_sliding_window", {"sliding_window": None}),
    "starcoder2": ("starcoder2_hidden_act", {"hidden_act": "gelu"}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One row on both sides.

    Attributes:
        apart: Largest difference of two logits.
        spread: Standard deviation of the second side's row.
        max_ulp: Largest distance in ULPs.
        kl: KL(second || engine) in nats.
        top1_agrees: Whether greedy decoding takes the same id.
        margin: Largest minus second largest logit of the second side.
    """

    apart: float
    spread: float
    max_ulp: int
    kl: float
    top1_agrees: bool
    margin: float

    @classmethod
    def of(cls, second: Tensor, engine: Tensor) -> "Measured":
        """Compare two rows [1, V] of one dtype."""
        distance = RowDistance.of(second, engine)
        return cls(
            apart=float(np.abs(second.values() - engine.values()).max()),
            spread=float(second.values().std()),
            max_ulp=TensorDiff.of(second, engine).max_ulp or 0,
            kl=distance.kl,
            top1_agrees=distance.top1_agrees,
            margin=distance.margin,
        )

    @property
    def agrees(self) -> bool:
        """Whether rounding explains the difference."""
        return self.apart <= NEAR * self.spread


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRow:
    """A row after a prompt of a real model.

    Attributes:
        prompt: Name.
        step: Of the row.
        measured: Second side against the engine.
        second_off: How far the second side is from the float64 truth.
        engine_off: How far the engine is.
        bound: How far rounding may put either.
    """

    prompt: str
    step: int
    measured: Measured
    second_off: float
    engine_off: float
    bound: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyRow:
    """A tiny snapshot of a family.

    Attributes:
        config: Name of the config.
        measured: None where the second side refuses.
        refused: Why it does.
        neutral: With the known fact taken away from the second side; None where none is known or it does not agree anyway.
    """

    config: str
    measured: Measured | None = None
    refused: str = ""
    neutral: Measured | None = None

    @property
    def verdict(self) -> str:
        """In words, for the table."""
        if self.measured is None:
            return f"not compared: {self.refused}"
        if self.measured.agrees:
            return "agrees"
        name, change = KNOWN.get(self.config, ("", {}))
        if self.neutral is not None and self.neutral.agrees:
            keys = ", ".join(f"{key}={value}" for key, value in change.items())
            return f"differs: {name}; with {keys} on the second side {self.neutral.apart:.1e} apart: agrees"
        if name and not change:
            return f"differs: {name}, which no config key takes away"
        return "differs, not explained"


def markdown(second: str, prompts: Sequence[PromptRow], families: Sequence[FamilyRow]) -> str:
    """The report."""
    lines = [
        "# A second opinion: transformers",
        "",
        f"Written by `python -m parity.verbs.second_opinion`. {second} in float32 with eager attention on the CPU,",
        "against the engine, which is bit-identical to mlx-lm on these snapshots. Not a gate: torch sums in another order.",
        "ULPs are large near 0; `apart` is the largest difference of two logits, `off` the largest departure from the float64",
        "truth, `bound` how far rounding may put either.",
        "",
        "## SmolLM2-135M",
        "",
        "| prompt | step | apart | max ULP | KL | top-1 | margin | second off | engine off | bound |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in prompts:
        m = row.measured
        lines.append(
            f"| {row.prompt} | {row.step} | {m.apart:.1e} | {m.max_ulp} | {m.kl:.1e} | "
            f"{'agrees' if m.top1_agrees else 'flips'} | {m.margin:.2g} | {row.second_off:.1e} | {row.engine_off:.1e} | "
            f"{row.bound:.1e} |"
        )
    lines += [
        "",
        "## Tiny snapshots",
        "",
        f"`agrees`: apart by at most {NEAR:g} of the row's standard deviation. Facts are those of `parity/deviations.toml`.",
        "",
        "| config | apart | spread | KL | verdict |",
        "| --- | --- | --- | --- | --- |",
    ]
    for family in families:
        f = family.measured
        numbers = "- | - | -" if f is None else f"{f.apart:.1e} | {f.spread:.2g} | {f.kl:.1e}"
        lines.append(f"| {family.config} | {numbers} | {family.verdict} |")
    return "\n".join(lines) + "\n"
