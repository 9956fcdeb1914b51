"""The words of the parts of experts; see `engine.kernels.part_words`."""

from dataclasses import dataclass

from engine.kernels import fields as f
from engine.kernels.layout import Affine, Dense
from engine.kernels.memory import entry
from engine.kernels.part_words import Place
from engine.kernels.routing import RUN_WORDS
from engine.kernels.small_floats import SmallFloats
from engine.kernels.step import StepCode


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How rows find their experts.

    Attributes:
        experts: How many there are.
        chosen: For a row.
        width: Elements of a row.
        kind: `PROBABLE` or `HIGHEST` of `engine.kernels.fields`.
        normalised: Whether shares are divided by their sum.
    """

    experts: int
    chosen: int
    width: int
    kind: int
    normalised: bool

    @property
    def table_floats(self) -> int:
        """Floats a row that CHOSEN takes: a head, runs, a row for each choice, and room to choose."""
        return 2 * (1 + (RUN_WORDS + 1) * self.chosen + self.experts)


def routing_part(code: StepCode, routing: Routing, scores: Place) -> dict[int, int]:
    """The words of choosing."""
    return _words(routing) | {
        f.CODE: entry(code.routing),
        f.R_WIDTH: scores.width,
        f.R_BIAS: scores.bias,
        f.R_KIND: routing.kind,
        f.R_NORMALISED: int(routing.normalised),
    }


def expert_sum_part(code: StepCode, routing: Routing, outputs: Place) -> dict[int, int]:
    """The words of the weighted sum."""
    return _words(routing) | {f.CODE: entry(code.expert_sum), f.S_WIDTH: outputs.width}


def expert_product_part(
    code: StepCode,
    run: int,
    laid: Dense | Affine | SmallFloats,
    routing: Routing,
    *,
    x: int,
    y: int,
    inner: int,
    sync: bool,
) -> dict[int, int]:
    """The words of a product with the matrix of each row's expert.

    Args:
        code: Compiled parts.
        run: Address of the compiled product.
        laid: The matrices of all experts, one after the other.
        routing: Whose choice.
        x: Word of what goes in.
        y: Word of the sums.
        inner: Elements of a row that goes in.
        sync: Whether what follows reads the sums.
    """
    blocks, here, there = laid.blocks // routing.experts, laid.addresses(0), laid.addresses(1)
    return {
        f.KIND: f.OTHER,
        f.CODE: entry(code.expert_product),
        f.SYNC: int(sync),
        f.X: x,
        f.Y: y,
        f.INNER: inner,
        f.SHIFT: laid.shift,
        f.WIDTH: blocks * laid.columns,
        f.BLOCKS: blocks,
        f.RUN: run,
        f.OUT_STEP: 4 * laid.columns,
        f.MANY: routing.experts,
        f.TIMES: routing.chosen,
        **dict(zip((f.WEIGHT, f.SCALES, f.BIASES), here, strict=True)),
        **dict(
            zip(
                (f.WEIGHT_STEP, f.SCALES_STEP, f.BIASES_STEP),
                (b - a for a, b in zip(here, there, strict=True)),
                strict=True,
            )
        ),
    }


def _words(routing: Routing) -> dict[int, int]:
    return {
        f.KIND: f.OTHER,
        f.SYNC: 1,
        f.R_EXPERTS: routing.experts,
        f.R_CHOSEN: routing.chosen,
        f.R_INNER: routing.width,
    }
