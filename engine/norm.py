"""Normalisation layers."""

from dataclasses import dataclass

import mlx.core as mx

from engine.activation import swiglu
from engine.checkpoint import Checkpoint
from engine.taps import tap


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RMSNorm:
    """Root-mean-square norm.

    Attributes:
        path: Module path in the checkpoint.
        weight: [D], or None for a norm without one.
        eps: Added to the mean square.
    """

    path: str
    weight: mx.array | None
    eps: float

    @classmethod
    def take(
        cls,
        checkpoint: Checkpoint,
        path: str,
        *,
        width: int,
        eps: float,
        plus_one: bool = False,
        stored_less_one: bool = False,
    ) -> "RMSNorm":
        """Take the weight from the checkpoint.

        Args:
            checkpoint: Where from.
            path: Module path.
            width: Elements normalised.
            eps: Added to the mean square.
            plus_one: The checkpoint stores w and the norm multiplies by 1 + w, rounded to the weight's dtype.
            stored_less_one: The checkpoint, being as on the hub, stores w - 1; one is added in the dtype of the file, before
                the weight is cast, as when a snapshot is converted.
        """
        name = f"{path}.weight"
        if stored_less_one and name in checkpoint:
            checkpoint.replace([name], [name], lambda offset: [offset + 1.0])
        weight = checkpoint.take(name, (width,))
        return cls(path=path, weight=1.0 + weight if plus_one else weight, eps=eps)

    def __call__(self, x: mx.array) -> mx.array:
        """Normalise the last axis of x [..., D]; same shape and dtype.

        Numerics: the mean square and x / rms are float32 whatever x is, rounded to x's dtype before the weight is applied.
        Source: spec/cpu.md section 1; Zhang and Sennrich 2019.
        """
        return tap(self.path, mx.fast.rms_norm(x, self.weight, self.eps))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerNorm:
    """Mean and variance norm.

    Attributes:
        path: Module path in the checkpoint.
        weight: [D], or None.
        bias: [D], or None.
        eps: Added to the variance.
    """

    path: str
    weight: mx.array | None
    bias: mx.array | None
    eps: float

    @classmethod
    def take(cls, checkpoint: Checkpoint, path: str, *, width: int, eps: float, bias: bool = True) -> "LayerNorm":
        """Take the weight, and the bias if there is one, from the checkpoint."""
        return cls(
            path=path,
            weight=checkpoint.take(f"{path}.weight", (width,)),
            bias=checkpoint.take(f"{path}.bias", (width,)) if bias else None,
            eps=eps,
        )

    def __call__(self, x: mx.array) -> mx.array:
        """Normalise the last axis of x [..., D]; same shape and dtype.

        Numerics: mlx's fused operation; mean and variance in float32 whatever x is.
        Source: Ba et al. 2016.
        """
        return tap(self.path, mx.fast.layer_norm(x, self.weight, self.bias, self.eps))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GatedRMSNorm:
    """Root-mean-square norm, then silu(gate) times what is normalised.

    Attributes:
        path: Module path in the checkpoint.
        weight: [D].
        eps: Added to the mean square.
    """

    path: str
    weight: mx.array
    eps: float

    @classmethod
    def take(cls, checkpoint: Checkpoint, path: str, *, width: int, eps: float) -> "GatedRMSNorm":
        """Take the weight from the checkpoint."""
        return cls(path=path, weight=checkpoint.take(f"{path}.weight", (width,)), eps=eps)

    def __call__(self, x: mx.array, gate: mx.array) -> mx.array:
        """Normalise the last axis of x [..., D] and gate it; same shape and dtype.

        Numerics: the norm rounds to x's dtype as `RMSNorm` does; the gate is widened to float32, so silu and the product are
            float32 and rounded to x's dtype once.
        Source: spec/models.md section 4.
        """
        normalised = mx.fast.rms_norm(x, self.weight, self.eps)
        gated = swiglu(gate.astype(mx.float32), normalised.astype(mx.float32))
        return tap(self.path, gated.astype(x.dtype))
