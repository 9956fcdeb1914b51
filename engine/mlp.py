"""The gated feed-forward layer, with separate or fused projections. Source: Shazeer 2020."""

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from engine.activation import swiglu
from engine.checkpoint import Checkpoint
from engine.linear import Linear
from engine.taps import tap

GatedActivation = Callable[[mx.array, mx.array], mx.array]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GatedMLP:
    """down(activation(gate(x), up(x))).

    Attributes:
        path: Module path in the checkpoint.
        gate: [F, D].
        up: [F, D].
        down: [D, F].
        activation: Of (gate, up), elementwise.
    """

    path: str
    gate: Linear
    up: Linear
    down: Linear
    activation: GatedActivation

    @classmethod
    def take(
        cls,
        checkpoint: Checkpoint,
        path: str,
        *,
        width: int,
        inner: int,
        activation: GatedActivation = swiglu,
        bias: bool = False,
    ) -> "GatedMLP":
        """Take `gate_proj`, `up_proj` and `down_proj` from the checkpoint."""
        return cls(
            path=path,
            gate=Linear.take(checkpoint, f"{path}.gate_proj", inputs=width, outputs=inner, bias=bias),
            up=Linear.take(checkpoint, f"{path}.up_proj", inputs=width, outputs=inner, bias=bias),
            down=Linear.take(checkpoint, f"{path}.down_proj", inputs=inner, outputs=width, bias=bias),
            activation=activation,
        )

    def __call__(self, x_BLD: mx.array) -> mx.array:
        """Apply to [B, L, D]; same shape and dtype."""
        return tap(self.path, self.down(self.activation(self.gate(x_BLD), self.up(x_BLD))))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FusedGatedMLP:
    """down(activation(gate, up)), where gate and up are the halves of one projection, gate first.

    Attributes:
        path: Module path in the checkpoint.
        gate_up: [2F, D].
        down: [D, F].
        activation: Of (gate, up), elementwise.
    """

    path: str
    gate_up: Linear
    down: Linear
    activation: GatedActivation

    @classmethod
    def take(
        cls, checkpoint: Checkpoint, path: str, *, width: int, inner: int, activation: GatedActivation = swiglu
    ) -> "FusedGatedMLP":
        """Take `gate_up_proj` and `down_proj` from the checkpoint."""
        return cls(
            path=path,
            gate_up=Linear.take(checkpoint, f"{path}.gate_up_proj", inputs=width, outputs=2 * inner),
            down=Linear.take(checkpoint, f"{path}.down_proj", inputs=inner, outputs=width),
            activation=activation,
        )

    def __call__(self, x_BLD: mx.array) -> mx.array:
        """Apply to [B, L, D]; same shape and dtype."""
        gate, up = mx.split(self.gate_up(x_BLD), 2, axis=-1)
        return tap(self.path, self.down(self.activation(gate, up)))
