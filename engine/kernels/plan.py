"""What a family's model computes, in the terms of the fused step; or why the step cannot compute it.

Guarantees: a plan holds the model's own layers and copies nothing; `engine.kernels.families` makes it. Whether plan and model
give the same bits is not believed: `engine.kernels.level` compares them before the step is used.
"""

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from engine.kernels.experts import FastExperts
from engine.linear import Linear
from engine.norm import LayerNorm, RMSNorm
from engine.rope import Rope

Norm = RMSNorm | LayerNorm


class NotFusedError(Exception):
    """The fused step has no part for something in the model; the message says for what."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outputs:
    """Some outputs of a projection, next to each other: families may have one projection for several things.

    Attributes:
        linear: The projection.
        first: The first of them.
        count: How many; None for all that follow.
    """

    linear: Linear
    first: int = 0
    count: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DensePlan:
    """down(activation(gate(x), up(x))), or down(activation(gate(x))).

    Attributes:
        gate, up: Projections, the gate the first of its own; up is None where there is no gate.
        down: Projection.
        activation: One of those of `engine.kernels.fields`.
    """

    gate: Outputs
    up: Outputs | None
    down: Linear
    activation: int

    @property
    def linears(self) -> tuple[Linear, ...]:
        """All projections, some of them more than once."""
        return (self.gate.linear, *(() if self.up is None else (self.up.linear,)), self.down)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertsPlan:
    """The weighted sum of the chosen experts, each a gated MLP.

    Attributes:
        path: Module path in the checkpoint.
        router: Projection to a score an expert.
        gate, up, down: Matrices of all experts.
        activation: One of those of `engine.kernels.fields`.
        chosen: Experts a row.
        kind: How they are chosen: `PROBABLE` or `HIGHEST` of `engine.kernels.fields`.
        normalised: Whether their shares are divided by their sum.
    """

    path: str
    router: Linear
    gate: FastExperts
    up: FastExperts
    down: FastExperts
    activation: int
    chosen: int
    kind: int
    normalised: bool

    @property
    def linears(self) -> tuple[Linear, ...]:
        """All projections but the experts' own."""
        return (self.router,)

    @property
    def matrices(self) -> tuple[FastExperts, ...]:
        """The experts' own."""
        return (self.gate, self.up, self.down)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerPlan:
    """One block: x + [norm](attention([norm](x))) [* m], then x + [norm](mlp([norm](x))) [* m]; or both at once.

    Attributes:
        input_norm: Before the attention, or None.
        q, k, v: Projections; q is the first of its own.
        o: Projection.
        q_norm, k_norm: Of each head's query and key, or None.
        whole_norms: Whether these go over all heads at once.
        rope: Rotation, or None.
        window: Positions that a query sees, or None for all.
        ring: Whether a window's layer keeps no more positions than those.
        scale: Factor on the scores.
        cap: Soft cap on the scores, or None.
        attention_norm: Of the attention's output, or None.
        mlp_input_norm: Before the MLP, or None.
        mlp: A layer of its own, or experts.
        mlp_norm: Of the MLP's output, or None.
        multiplier: Of what is added to x, or None.
        parallel: The MLP reads what the attention reads, and (attention + mlp) + x is the result.
    """

    input_norm: Norm | None
    q: Outputs
    k: Outputs
    v: Outputs
    o: Linear
    q_norm: RMSNorm | None = None
    k_norm: RMSNorm | None = None
    whole_norms: bool = False
    rope: Rope | None
    window: int | None = None
    ring: bool = True
    scale: float
    cap: float | None = None
    attention_norm: RMSNorm | None = None
    mlp_input_norm: Norm | None
    mlp: DensePlan | ExpertsPlan
    mlp_norm: RMSNorm | None = None
    multiplier: float | None = None
    parallel: bool = False

    @property
    def linears(self) -> tuple[Linear, ...]:
        """All projections, some of them more than once."""
        return (self.q.linear, self.k.linear, self.v.linear, self.o, *self.mlp.linears)

    @property
    def norms(self) -> tuple[Norm, ...]:
        """All norms."""
        some = (
            self.input_norm,
            self.q_norm,
            self.k_norm,
            self.attention_norm,
            self.mlp_input_norm,
            self.mlp_norm,
        )
        return tuple(norm for norm in some if norm is not None)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """A whole model up to its hidden states.

    Attributes:
        layers: In order.
        norm: The last one.
        embed: From ids [B, L] to what the first block is given, [B, L, D].
        width: D.
        head_width: E.
        dtype: Of the activations.
    """

    layers: tuple[LayerPlan, ...]
    norm: Norm
    embed: Callable[[mx.array], mx.array]
    width: int
    head_width: int
    dtype: mx.Dtype
