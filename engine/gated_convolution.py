"""The gated convolution: a layer that mixes a few neighbouring positions, gated before and after.

It takes the place of attention in most layers of lfm2; all that it remembers is the convolution's window.

Source: Liquid AI 2025 (LFM2).
"""

from dataclasses import dataclass
from typing import Final

import mlx.core as mx

from engine.cache.recurrent import RecurrentCache, without_padding
from engine.checkpoint import Checkpoint
from engine.linear import Linear
from engine.short_convolution import ShortConvolution
from engine.taps import tap

STATE_SLOTS: Final = 1  # of a layer's cache: the window


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GatedConvolution:
    """out(second gate * convolution(first gate * x)), all three made of the input in one projection.

    Attributes:
        path: Module path in the checkpoint.
        into: [3 * D, D], whose outputs are the first gate, the second and x.
        convolution: Over the D channels.
        out: [D, D].
    """

    path: str
    into: Linear
    convolution: ShortConvolution
    out: Linear

    @classmethod
    def take(cls, checkpoint: Checkpoint, path: str, *, width: int, kernel: int, bias: bool) -> "GatedConvolution":
        """Take the layer from the checkpoint, the filters as converted, [C, K, 1], or as on the hub, [C, 1, K]."""
        filters = checkpoint.shape(f"{path}.conv.weight")
        return cls(
            path=path,
            into=Linear.take(checkpoint, f"{path}.in_proj", inputs=width, outputs=3 * width, bias=bias),
            convolution=ShortConvolution.take(
                checkpoint,
                f"{path}.conv",
                channels=width,
                kernel=kernel,
                bias=bias,
                channels_first=filters is not None and filters[-1] != 1,
            ),
            out=Linear.take(checkpoint, f"{path}.out_proj", inputs=width, outputs=width, bias=bias),
        )

    def __call__(self, x_BLD: mx.array, cache: RecurrentCache) -> tuple[mx.array, RecurrentCache]:
        """Mix L positions [B, L, D] with the few before; returns [B, L, D] and the cache after them.

        Numerics: both gates are products rounded to x's dtype.
        """
        L = x_BLD.shape[1]
        before, after, x = mx.split(self.into(x_BLD), 3, axis=-1)
        (window,) = cache.state
        filtered, window = self.convolution(without_padding(before * x, cache.mask(L)), window, cache.ends(L))
        return tap(self.path, self.out(after * filtered)), cache.advanced(window, by=L)
