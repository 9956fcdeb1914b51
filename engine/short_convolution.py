"""The short convolution: a causal filter of each channel by itself, over the last few positions.

It remembers the K - 1 positions before the ones that it is given, and nothing else; before the first one there are zeros.
What is done with the filtered channels (an activation, a gate) is the layer's business.
"""

from dataclasses import dataclass

import mlx.core as mx

from engine.checkpoint import Checkpoint
from engine.taps import tap


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShortConvolution:
    """A depthwise convolution over positions that sees none to come.

    Attributes:
        path: Module path in the checkpoint.
        weight: [C, K, 1]; the last tap meets the newest position.
        bias: [C], or None.
    """

    path: str
    weight: mx.array
    bias: mx.array | None = None

    @classmethod
    def take(
        cls,
        checkpoint: Checkpoint,
        path: str,
        *,
        channels: int,
        kernel: int,
        bias: bool = False,
        channels_first: bool = False,
    ) -> "ShortConvolution":
        """Take the filters from the checkpoint.

        Args:
            checkpoint: Where from.
            path: Module path.
            channels: C.
            kernel: K, at least 1.
            bias: Whether the checkpoint has one.
            channels_first: The weight is stored [C, 1, K], as on the hub, not [C, K, 1].
        """
        stored = (channels, 1, kernel) if channels_first else (channels, kernel, 1)
        weight = checkpoint.take(f"{path}.weight", stored)
        return cls(
            path=path,
            weight=weight.swapaxes(1, 2) if channels_first else weight,
            bias=checkpoint.take(f"{path}.bias", (channels,)) if bias else None,
        )

    def __call__(
        self, x_BLC: mx.array, state_BPC: mx.array | None, ends: tuple[int, ...] | None = None
    ) -> tuple[mx.array, mx.array]:
        """Filter L positions.

        Args:
            x_BLC: New positions [B, L, C].
            state_BPC: The P = K - 1 positions before them [B, P, C]; None at the beginning, which means zeros.
            ends: Of the L, how many each row has before right padding, which the next call must not see; None for all.

        Returns:
            Filtered channels [B, L, C] in x's dtype, and the last P positions [B, P, C] for the next call.

        Numerics: mlx's grouped convolution accumulates the K products of a channel in float32 and rounds once to x's dtype; a
            bias is added after, rounded again.
        Source: spec/models.md section 4.
        """
        B, _, C = x_BLC.shape
        before = self.weight.shape[1] - 1
        if state_BPC is None:
            state_BPC = mx.zeros((B, before, C), dtype=x_BLC.dtype)
        seen_BTC = mx.concatenate([state_BPC, x_BLC], axis=1)
        y_BLC = mx.conv1d(seen_BTC, self.weight, groups=C)
        if self.bias is not None:
            y_BLC = y_BLC + self.bias
        if ends is None:
            kept_BPC = mx.contiguous(seen_BTC[:, seen_BTC.shape[1] - before :])  # a copy, so that the rest can be freed
        else:
            last_BP = mx.array(ends)[:, None] + mx.arange(before)
            kept_BPC = mx.take_along_axis(seen_BTC, last_BP[..., None], axis=1)
        return tap(self.path, y_BLC), kept_BPC
