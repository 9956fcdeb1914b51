"""Linear layers, dense or with packed weights, and the token embedding that may serve as the head.

Numerics: one product of mlx each; where it rounds is mlx's business (spec/cpu.md section 1), which operation is called is
decided here and must be the oracle's. A dense layer with a bias is one fused addmm; a packed one adds the bias after.
"""

from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from engine.checkpoint import Checkpoint
from engine.errors import CheckpointError
from engine.quantization import Format
from engine.taps import tap


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Packed:
    """A packed matrix [out, in].

    Attributes:
        weight: uint32 words [out, in * bits / 32].
        scales: [out, in / group_size], floats where affine, else bytes.
        biases: [out, in / group_size] where affine, else None.
        format: Width, group and mode.
    """

    weight: mx.array
    scales: mx.array
    biases: mx.array | None
    format: Format

    def product(self, x: mx.array) -> mx.array:
        """x @ W.T for x [..., in]; result [..., out].

        Numerics: affine: s*q, +b, x*w, += each rounded to x's dtype, in order of the input index. The float formats: the sum of
            x*q of a group, without the scale, times the scale, added to the total, each rounded to x's dtype.
        Source: spec/cpu.md section 1 (affine); tests/engine/test_linear.py (the float formats).
        """
        return mx.quantized_matmul(
            x,
            self.weight,
            self.scales,
            self.biases,
            transpose=True,
            group_size=self.format.group_size,
            bits=self.format.bits,
            mode=self.format.mode,
        )

    def rows(self, indices: mx.array) -> mx.array:
        """Dequantised rows [*indices.shape, in]."""
        return mx.dequantize(
            self.weight[indices],
            self.scales[indices],
            None if self.biases is None else self.biases[indices],
            group_size=self.format.group_size,
            bits=self.format.bits,
            mode=self.format.mode,
        )


class FastWeight(Protocol):
    """A matrix [out, in] that brings a product of its own, bit-identical to mlx's; see `engine.kernels`."""

    def product(self, x: mx.array, bias: mx.array | None = None) -> mx.array:
        """x @ W.T + bias for x [..., in]; result [..., out]."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Linear:
    """y = x W^T + b.

    Attributes:
        path: Module path in the checkpoint.
        weight: Dense [out, in], or packed, or with a product of its own.
        bias: [out], or None.
    """

    path: str
    weight: mx.array | Packed | FastWeight
    bias: mx.array | None = None

    @classmethod
    def take(cls, checkpoint: Checkpoint, path: str, *, inputs: int, outputs: int, bias: bool = False) -> "Linear":
        """Take the layer's tensors from the checkpoint, packed where it has `<path>.scales`."""
        return cls(
            path=path,
            weight=take_matrix(checkpoint, path, rows=(outputs,), columns=inputs),
            bias=checkpoint.take(f"{path}.bias", (outputs,)) if bias else None,
        )

    def __call__(self, x: mx.array) -> mx.array:
        """Apply to x [..., in]; returns [..., out] in x's dtype."""
        if isinstance(self.weight, Packed):
            y = self.weight.product(x)
            y = y if self.bias is None else y + self.bias
        elif isinstance(self.weight, mx.array):
            y = x @ self.weight.T if self.bias is None else mx.addmm(self.bias, x, self.weight.T)
        else:
            y = self.weight.product(x, self.bias)
        return tap(self.path, y)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Embedding:
    """Token embedding [V, D], dense or packed, also usable as the head.

    Attributes:
        path: Module path in the checkpoint.
        weight: Dense [V, D], or packed.
        head: The same matrix with a product of its own, or None.
    """

    path: str
    weight: mx.array | Packed
    head: FastWeight | None = None

    @classmethod
    def take(cls, checkpoint: Checkpoint, path: str, *, vocabulary: int, width: int) -> "Embedding":
        """Take the table from the checkpoint, packed where it has `<path>.scales`."""
        return cls(path=path, weight=take_matrix(checkpoint, path, rows=(vocabulary,), columns=width))

    def __call__(self, ids_BL: mx.array) -> mx.array:
        """Look up ids [B, L]; returns [B, L, D]."""
        rows = self.weight.rows(ids_BL) if isinstance(self.weight, Packed) else self.weight[ids_BL]
        return tap(self.path, rows)

    def as_head(self, x_BLD: mx.array) -> mx.array:
        """Logits [B, L, V] of hidden states, for models whose head is tied to the embedding."""
        if self.head is not None:
            return self.head.product(x_BLD)
        return self.weight.product(x_BLD) if isinstance(self.weight, Packed) else x_BLD @ self.weight.T


def take_matrix(checkpoint: Checkpoint, path: str, *, rows: tuple[int, ...], columns: int) -> mx.array | Packed:
    """Take `<path>.weight` [*rows, columns], with its scales and biases where it is packed.

    Raises:
        CheckpointError: A tensor is missing or misshapen, or the config and the checkpoint disagree on whether it is packed.
    """
    if f"{path}.scales" not in checkpoint:
        return checkpoint.take(f"{path}.weight", (*rows, columns))
    form = checkpoint.quantization.format_of(path)
    if form is None:
        raise CheckpointError(
            f"{path} is packed but config.json does not say how",
            found=f"{path}.scales",
            next_step="add a quantization entry to config.json, or take the config that belongs to these weights",
        )
    if columns % form.group_size or columns * form.bits % 32:
        raise CheckpointError(
            f"{path} cannot be packed as config.json says",
            width=columns,
            group_size=form.group_size,
            bits=form.bits,
            next_step="take the config.json that belongs to these weights",
        )
    groups, affine = columns // form.group_size, form.mode == "affine"
    return Packed(
        weight=checkpoint.take(f"{path}.weight", (*rows, columns * form.bits // 32), stored=mx.uint32),
        scales=checkpoint.take(f"{path}.scales", (*rows, groups), stored=None if affine else mx.uint8),
        biases=checkpoint.take(f"{path}.biases", (*rows, groups)) if affine else None,
        format=form,
    )
