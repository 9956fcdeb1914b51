"""Routers whose choice is corrected: a learned bias decides with the scores who is chosen, but never how much they count.

Experts may stand in groups of which the better ones are kept before any expert is chosen. Holds the choice and the weighing,
which glm4_moe, the DeepSeek families and kimi_linear share, and the feed-forward layer that the DeepSeek families put on
them. How logits become scores is said there.

Source: spec/models.md section 7; DeepSeek-AI 2024 (DeepSeek-V3), section 2.1.2.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import mlx.core as mx

from engine.activation import swiglu
from engine.checkpoint import Checkpoint
from engine.errors import ConfigError
from engine.linear import Linear
from engine.mlp import GatedMLP
from engine.moe import GatedExperts, weighted_sum
from engine.taps import tap

Router = Callable[[mx.array], tuple[mx.array, mx.array]]  # from [B, L, D] to ids and weights [B, L, k]

JUDGED: Final = 2  # experts by whose scores a group is judged


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """How many experts are chosen from where, and how their scores become weights.

    Attributes:
        experts: X.
        chosen: k, experts a token.
        groups: Equal groups in which the experts stand.
        kept: Groups from which a token may choose.
        normalised: The chosen scores are divided by their sum (never where one expert is chosen).
        factor: On every weight.
        floor: Added to that sum.
    """

    experts: int
    chosen: int
    groups: int = 1
    kept: int = 1
    normalised: bool = True
    factor: float = 1.0
    floor: float = 0.0

    def check(self, keys: Mapping[str, object]) -> None:
        """Refuse numbers that do not fit together.

        Args:
            keys: Those of config.json that they came from, for the message.

        Raises:
            ConfigError: Less than one of a thing, more chosen than there are, or groups that are unequal or of one expert.
        """
        grouped = self.groups > 1 and (self.experts % self.groups or self.experts // self.groups < JUDGED)
        candidates = self.experts // max(self.groups, 1) * self.kept
        if grouped or not (1 <= self.kept <= self.groups and 1 <= self.chosen <= candidates):
            raise ConfigError(
                "the experts of config.json do not fit together", next_step="mend config.json", **dict(keys)
            )


def choose(scores_BLX: mx.array, bias_X: mx.array, choice: Choice) -> tuple[mx.array, mx.array]:
    """Choose experts and weigh them.

    Args:
        scores_BLX: Scores of all experts, none below 0.
        bias_X: Correction of the scores for the choice.
        choice: Numbers.

    Returns:
        Ids of the chosen experts [B, L, k] in the order in which the partition leaves them, and their weights [B, L, k] in the
        dtype of the scores.

    Numerics: corrected scores in the wider dtype of the two; experts of groups not kept count as 0, not as minus infinity, so
        one of them can be chosen where corrected scores are negative. Equal scores: as mlx's partition leaves them.
    """
    corrected = scores_BLX + bias_X
    worst = choice.groups - choice.kept
    if worst > 0:
        grouped = mx.unflatten(corrected, -1, (choice.groups, -1))
        judged = mx.topk(grouped, JUDGED, axis=-1).sum(axis=-1, keepdims=True)
        left_out = mx.argpartition(judged, kth=worst - 1, axis=-2)[..., :worst, :]
        corrected = mx.flatten(mx.put_along_axis(grouped, left_out, mx.array(0.0, grouped.dtype), axis=-2), -2, -1)
    chosen_BLk = mx.argpartition(-corrected, kth=choice.chosen - 1, axis=-1)[..., : choice.chosen]
    weights_BLk = mx.take_along_axis(scores_BLX, chosen_BLk, axis=-1)
    if choice.chosen > 1 and choice.normalised:
        total = weights_BLk.sum(axis=-1, keepdims=True)
        weights_BLk = weights_BLk / (total + choice.floor if choice.floor else total)
    return chosen_BLk, weights_BLk * choice.factor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SigmoidRouter:
    """A router whose scores are sigmoids of a product.

    Attributes:
        path: Module path in the checkpoint; the ids of the chosen experts are its tap.
        weight: [X, D], never packed.
        bias: [X].
        choice: Numbers.
    """

    path: str
    weight: mx.array
    bias: mx.array
    choice: Choice

    @classmethod
    def take(cls, checkpoint: Checkpoint, path: str, *, width: int, choice: Choice) -> "SigmoidRouter":
        """Take `weight` and `e_score_correction_bias` from the checkpoint."""
        return cls(
            path=path,
            weight=checkpoint.take(f"{path}.weight", (choice.experts, width)),
            bias=checkpoint.take(f"{path}.e_score_correction_bias", (choice.experts,)),
            choice=choice,
        )

    def __call__(self, x_BLD: mx.array) -> tuple[mx.array, mx.array]:
        """Ids and weights [B, L, k] of the chosen experts.

        Numerics: logits in x's dtype; sigmoid and all after it in float32.
        """
        scores_BLX = mx.sigmoid((x_BLD @ self.weight.T).astype(mx.float32))
        chosen_BLk, weights_BLk = choose(scores_BLX, self.bias, self.choice)
        return tap(self.path, chosen_BLk), weights_BLk


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LinearRouter:
    """A router whose scores are sigmoids of a linear layer, which may be packed.

    Attributes:
        linear: [X, D]; its logits are the tap under its path, the choice has none.
        bias: [X].
        choice: Numbers.
    """

    linear: Linear
    bias: mx.array
    choice: Choice

    def __call__(self, x_BLD: mx.array) -> tuple[mx.array, mx.array]:
        """Ids and weights [B, L, k] of the chosen experts.

        Numerics: sigmoid, correction and weights all in x's dtype, unlike `SigmoidRouter`'s.
        """
        return choose(mx.sigmoid(self.linear(x_BLD)), self.bias, self.choice)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoutedMLP:
    """The weighted sum of the chosen experts, plus experts that every token goes through, unweighted.

    Attributes:
        path: Module path in the checkpoint.
        router: Chooses and weighs.
        experts: The experts.
        shared: The common ones, as one wide layer; None where there are none.
    """

    path: str
    router: Router
    experts: GatedExperts
    shared: GatedMLP | None

    @classmethod
    def take(
        cls, checkpoint: Checkpoint, path: str, *, width: int, inner: int, shared_inner: int, choice: Choice
    ) -> "RoutedMLP":
        """Take router and experts, stacked or one by one, from the checkpoint.

        Args:
            checkpoint: Where from.
            path: Module path.
            width: D.
            inner: Width inside an expert.
            shared_inner: Width inside the common layer; 0 for none.
            choice: Numbers of the router.
        """
        return cls(
            path=path,
            router=SigmoidRouter.take(checkpoint, f"{path}.gate", width=width, choice=choice),
            experts=GatedExperts.take(
                checkpoint,
                f"{path}.switch_mlp",
                experts=choice.experts,
                width=width,
                inner=inner,
                activation=swiglu,
                apart=lambda expert, name: f"{path}.experts.{expert}.{name}",
            ),
            shared=GatedMLP.take(checkpoint, f"{path}.shared_experts", width=width, inner=shared_inner)
            if shared_inner
            else None,
        )

    def __call__(self, x_BLD: mx.array) -> mx.array:
        """Apply to [B, L, D]; same shape and dtype."""
        experts_BLk, weights_BLk = self.router(x_BLD)
        y_BLD = weighted_sum(self.experts(x_BLD, experts_BLk), weights_BLk)
        return tap(self.path, y_BLD if self.shared is None else y_BLD + self.shared(x_BLD))
