"""Expert layers: each token goes through the few experts that a router chose for it.

How a router scores, chooses and weighs is the family's business; here are the experts' products. Many tokens are sorted by
expert first, as the oracle does from 64 choices on: the values are the same on the CPU, but other kernels run on a GPU.
Source: spec/models.md section 0, rule 9.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import mlx.core as mx

from engine.checkpoint import Checkpoint
from engine.linear import Packed, take_matrix
from engine.mlp import GatedActivation
from engine.taps import tap

SORTED_FROM: Final = 64  # choices (tokens x experts a token)
NUMBERED_NAMES: Final = {
    "gate_proj": "w1",
    "down_proj": "w2",
    "up_proj": "w3",
}  # what some hub snapshots call the layers

ExpertPath = Callable[[int, str], str]


class FastExpertWeight(Protocol):
    """Matrices [X, out, in] that bring a product of their own, bit-identical to mlx's; see `engine.kernels`."""

    def product(self, x: mx.array, experts: mx.array, *, sorted_experts: bool) -> mx.array:
        """Product of x [..., 1, in] with the matrix named for it in `experts` [...]; [..., 1, out]."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertLinear:
    """One linear layer an expert.

    Attributes:
        weight: Dense [X, out, in], or packed, or with a product of its own.
        bias: [X, out], or None.
    """

    weight: mx.array | Packed | FastExpertWeight
    bias: mx.array | None = None

    @classmethod
    def take(
        cls, checkpoint: Checkpoint, path: str, *, experts: int, inputs: int, outputs: int, bias: bool = False
    ) -> "ExpertLinear":
        """Take the stacked tensors from the checkpoint, packed where it has `<path>.scales`."""
        return cls(
            weight=take_matrix(checkpoint, path, rows=(experts, outputs), columns=inputs),
            bias=checkpoint.take(f"{path}.bias", (experts, outputs)) if bias else None,
        )

    @classmethod
    def take_apart(cls, checkpoint: Checkpoint, paths: Sequence[str], *, inputs: int, outputs: int) -> "ExpertLinear":
        """Take dense weights that stand in the checkpoint one expert at a time, as on the hub, and stack them."""
        return cls(weight=mx.stack([checkpoint.take(f"{path}.weight", (outputs, inputs)) for path in paths]))

    def __call__(self, x: mx.array, experts: mx.array, *, sorted_experts: bool) -> mx.array:
        """Product of x [..., 1, in] with the weight of the expert named for it in `experts` [...]; [..., 1, out].

        Numerics: dense experts run in float32 only on mlx's CPU backend; packed ones in any float dtype.
        """
        if isinstance(self.weight, mx.array | Packed):
            y = gathered_product(x, self.weight, experts, sorted_experts=sorted_experts)
        else:
            y = self.weight.product(x, experts, sorted_experts=sorted_experts)
        return y if self.bias is None else y + mx.expand_dims(self.bias[experts], -2)


def gathered_product(x: mx.array, weight: mx.array | Packed, experts: mx.array, *, sorted_experts: bool) -> mx.array:
    """Product of x [..., 1, in] with the matrix of `weight` [X, out, in] named for it in `experts` [...]; [..., 1, out].

    Numerics: one gathering product of mlx; see `ExpertLinear`.
    """
    if not isinstance(weight, Packed):
        return mx.gather_mm(x, weight.swapaxes(-1, -2), rhs_indices=experts, sorted_indices=sorted_experts)
    return mx.gather_qmm(
        x,
        weight.weight,
        weight.scales,
        weight.biases,
        rhs_indices=experts,
        transpose=True,
        group_size=weight.format.group_size,
        bits=weight.format.bits,
        mode=weight.format.mode,
        sorted_indices=sorted_experts,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GatedExperts:
    """down(activation(gate(x), up(x))) of every chosen expert.

    Attributes:
        path: Module path in the checkpoint, such as `model.layers.0.mlp.switch_mlp`.
        gate: [X, F, D].
        up: [X, F, D].
        down: [X, D, F].
        activation: Of (gate, up), elementwise.
    """

    path: str
    gate: ExpertLinear
    up: ExpertLinear
    down: ExpertLinear
    activation: GatedActivation

    @classmethod
    def take(
        cls,
        checkpoint: Checkpoint,
        path: str,
        *,
        experts: int,
        width: int,
        inner: int,
        activation: GatedActivation,
        bias: bool = False,
        apart: ExpertPath | None = None,
    ) -> "GatedExperts":
        """Take `gate_proj`, `up_proj` and `down_proj` from the checkpoint.

        Args:
            checkpoint: Where from.
            path: Module path of the stacked tensors.
            experts: How many there are.
            width: Of what goes in and comes out.
            inner: Of what lies between.
            activation: Of (gate, up).
            bias: Whether there are biases.
            apart: Where expert i's own layer of that name stands if the checkpoint does not have the experts stacked.
        """

        def linear(name: str, inputs: int, outputs: int) -> ExpertLinear:
            if apart is not None and f"{apart(0, name)}.weight" in checkpoint:
                paths = [apart(i, name) for i in range(experts)]
                return ExpertLinear.take_apart(checkpoint, paths, inputs=inputs, outputs=outputs)
            return ExpertLinear.take(
                checkpoint, f"{path}.{name}", experts=experts, inputs=inputs, outputs=outputs, bias=bias
            )

        return cls(
            path=path,
            gate=linear("gate_proj", width, inner),
            up=linear("up_proj", width, inner),
            down=linear("down_proj", inner, width),
            activation=activation,
        )

    def __call__(self, x_BLD: mx.array, experts_BLk: mx.array) -> mx.array:
        """Outputs [B, L, k, D] of the k experts chosen for each token, unweighted, in the order of the choice."""
        x, chosen, back = _by_expert(x_BLD, experts_BLk)
        is_sorted = back is not None
        up = self.up(x, chosen, sorted_experts=is_sorted)
        gate = self.gate(x, chosen, sorted_experts=is_sorted)
        y = self.down(self.activation(gate, up), chosen, sorted_experts=is_sorted)
        return tap(self.path, _by_token(y, back, experts_BLk))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UngatedExperts:
    """down(activation(up(x))) of every chosen expert.

    Attributes:
        path: Module path in the checkpoint, such as `backbone.layers.1.mixer.switch_mlp`.
        up: [X, F, D].
        down: [X, D, F].
        activation: Elementwise.
    """

    path: str
    up: ExpertLinear
    down: ExpertLinear
    activation: Callable[[mx.array], mx.array]

    def __call__(self, x_BLD: mx.array, experts_BLk: mx.array) -> mx.array:
        """Outputs [B, L, k, D] of the k experts chosen for each token, unweighted, in the order of the choice."""
        x, chosen, back = _by_expert(x_BLD, experts_BLk)
        is_sorted = back is not None
        up = self.up(x, chosen, sorted_experts=is_sorted)
        y = self.down(self.activation(up), chosen, sorted_experts=is_sorted)
        return tap(self.path, _by_token(y, back, experts_BLk))


def _by_expert(x_BLD: mx.array, experts_BLk: mx.array) -> tuple[mx.array, mx.array, mx.array | None]:
    """Inputs of the experts and, for each, its expert; sorted by expert where there are many, with the way back."""
    x = mx.expand_dims(x_BLD, (-2, -3))
    if experts_BLk.size < SORTED_FROM:
        return x, experts_BLk, None
    flat = experts_BLk.flatten()
    order = mx.argsort(flat)
    return x.flatten(0, -3)[order // experts_BLk.shape[-1]], flat[order], mx.argsort(order)


def _by_token(y: mx.array, back: mx.array | None, experts_BLk: mx.array) -> mx.array:
    """Outputs of the experts [B, L, k, D], in the order of the tokens."""
    return (y if back is None else mx.unflatten(y[back], 0, experts_BLk.shape)).squeeze(-2)


def weighted_sum(outputs_BLkD: mx.array, weights_BLk: mx.array) -> mx.array:
    """The sum over the k chosen experts of weight * output; [B, L, D] in the outputs' dtype.

    Numerics: products and sum in the wider of the two dtypes, in the order of the choice, then rounded to the outputs'.
    """
    return (outputs_BLkD * weights_BLk[..., None]).sum(axis=-2).astype(outputs_BLkD.dtype)
