"""The gated feed-forward layer."""

from dataclasses import dataclass

import mlx.core as mx

from engine.checkpoint import Checkpoint
from engine.linear import Linear
from engine.taps import tap


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SwiGLU:
    """down(silu(gate(x)) * up(x)).

    Attributes:
        path: Module path in the checkpoint.
        gate: [F, D].
        up: [F, D].
        down: [D, F].
    """

    path: str
    gate: Linear
    up: Linear
    down: Linear

    @classmethod
    def take(cls, checkpoint: Checkpoint, path: str, *, width: int, inner: int, bias: bool = False) -> "SwiGLU":
        """Take `gate_proj`, `up_proj` and `down_proj` from the checkpoint."""
        return cls(
            path=path,
            gate=Linear.take(checkpoint, f"{path}.gate_proj", inputs=width, outputs=inner, bias=bias),
            up=Linear.take(checkpoint, f"{path}.up_proj", inputs=width, outputs=inner, bias=bias),
            down=Linear.take(checkpoint, f"{path}.down_proj", inputs=inner, outputs=width, bias=bias),
        )

    def __call__(self, x_BLD: mx.array) -> mx.array:
        """Apply to [B, L, D]; same shape and dtype."""
        return tap(self.path, self.down(swiglu(self.gate(x_BLD), self.up(x_BLD))))


def swiglu(gate: mx.array, up: mx.array) -> mx.array:
    """silu(gate) * up, elementwise.

    Numerics: sigmoid, gate * sigmoid and the product with `up` are each rounded to the arrays' dtype, in this order.
    Source: Shazeer 2020; spec/cpu.md section 1.
    """
    return gate * mx.sigmoid(gate) * up
