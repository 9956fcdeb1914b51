"""Normalisation layers."""

from dataclasses import dataclass

import mlx.core as mx

from engine.checkpoint import Checkpoint
from engine.taps import tap


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RMSNorm:
    """Root-mean-square norm with a learned weight.

    Attributes:
        path: Module path in the checkpoint.
        weight: [D].
        eps: Added to the mean square.
    """

    path: str
    weight: mx.array
    eps: float

    @classmethod
    def take(cls, checkpoint: Checkpoint, path: str, *, width: int, eps: float) -> "RMSNorm":
        """Take the weight from the checkpoint."""
        return cls(path=path, weight=checkpoint.take(f"{path}.weight", (width,)), eps=eps)

    def __call__(self, x: mx.array) -> mx.array:
        """Normalise the last axis of x [..., D]; same shape and dtype.

        Numerics: the mean square and x / rms are float32 whatever x is, rounded to x's dtype before the weight is applied.
        Source: spec/cpu.md section 1; Zhang and Sennrich 2019.
        """
        return tap(self.path, mx.fast.rms_norm(x, self.weight, self.eps))
