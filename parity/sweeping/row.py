"""One line of a sweep's table: which model, dtype and KV mode was asked which equality, and the outcome."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final, Self

from parity.sweeping.outcome import Outcome

FUNCTIONS: Final = "functions"  # stands for a model where what was asked needs none
OPENS: Final = "opens"  # the row of a model that cannot be opened


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One equality asked of one model.

    Attributes:
        subject: `engine`, or an oracle with its version, such as `mlx-lm 0.32.2`; empty inside an oracle's process.
        model: Stem of a config, or `functions`.
        dtype: What the model computes in.
        kv: KV mode after the prompt.
        invariance: A name of `parity.sweeping.plan`.
        outcome: What became of it.
    """

    subject: str = ""
    model: str
    dtype: str
    kv: str
    invariance: str
    outcome: Outcome

    @property
    def name(self) -> str:
        """`llama/f32/fp/batch-left-padding`, what patterns are matched with."""
        return f"{self.model}/{self.dtype}/{self.kv}/{self.invariance}"

    def to_json(self) -> dict[str, Any]:
        """Plain values, the outcome's among them."""
        return {
            "subject": self.subject,
            "model": self.model,
            "dtype": self.dtype,
            "kv": self.kv,
            "invariance": self.invariance,
            **self.outcome.to_json(),
        }

    @classmethod
    def from_json(cls, raw: Mapping[str, Any], *, subject: str | None = None) -> Self:
        """Read what `to_json` wrote, under another subject where one is given."""
        return cls(
            subject=raw["subject"] if subject is None else subject,
            model=raw["model"],
            dtype=raw["dtype"],
            kv=raw["kv"],
            invariance=raw["invariance"],
            outcome=Outcome.from_json(dict(raw)),
        )


def wanted(patterns: Sequence[str], name: str) -> bool:
    """Whether a row's name matches one of the shell globs; every row does where there are none."""
    return not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)
