# ruff: noqa: ANN001, ANN202 - Numba reads these signatures; what is compiled takes integers only
# mypy: disable-error-code="attr-defined,call-arg,var-annotated,unreachable,import-untyped"
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-any-return,no-untyped-call"
"""A whole forward as one compiled call a thread: the parts of a program in turn, their pieces shared among whoever is there.

Guarantees: nobody waits for a thread that has not come: a part is done when its pieces are, whoever did them, and a thread that
comes late runs past what is done and touches nothing of it. Whoever waits spins for some microseconds, then gives its core away
at every look, then sleeps: a busy machine costs time and nothing else.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numba
from numba import njit, types

from engine.kernels.activations import build_gate
from engine.kernels.attending import build_attention
from engine.kernels.driver import DONE, ROWS_A_PIECE, SLOTS, Form, has_half_precision, shape_of, source_digest
from engine.kernels.fields import BIASES as PACKED_BIASES
from engine.kernels.fields import (
    BLOCKS,
    CODE,
    FIELDS,
    INNER,
    KIND,
    PRODUCT,
    ROWS,
    SCALES,
    SHIFT,
    SYNC,
    THREADS,
    WEIGHT,
    WIDTH,
    X,
    Y,
)
from engine.kernels.memory import call_part, call_product, put_word, seen, take, word_at
from engine.kernels.packing import build_packing
from engine.kernels.parts import build_norm, build_rotation
from engine.kernels.routing import build_expert_product, build_expert_sum, build_routing
from engine.kernels.row_norm import build_row_norm
from engine.kernels.scalar import BF16, F16

PIECES: Final = SLOTS - 1  # control word: pieces of a part
LOOKS: Final = 2000  # before a waiting thread gives its core away
YIELDS: Final = 200  # before it sleeps
NAP: Final = 50  # microseconds

_yield = types.ExternalFunction("sched_yield", types.int32())
_sleep = types.ExternalFunction("usleep", types.int32(types.uint32))

Step = Callable[[int, int, int, int], int]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepCode:
    """Compiled code of a step.

    Attributes:
        run: run(parts, count, context, control): does, with others, all parts; returns how many. `control` is the address of
            int64 [count, SLOTS], zero before the first thread begins.
        norm, row_norm, rotation, packing, attention, gate, routing, expert_product, expert_sum: The parts.
        packed_attention: Attention over what was packed, by the rounding of the activations.
    """

    run: Any
    norm: Any
    row_norm: Any
    rotation: Any
    packing: Any
    attention: Any
    packed_attention: tuple[Any, ...]
    gate: Any
    routing: Any
    expert_product: Any
    expert_sum: Any


def step_code(folder: Path) -> StepCode:
    """Compile the step, or read it from the folder."""
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(folder / source_digest()[:16])
    try:
        shape = shape_of(Form(stored="f32"))
        attention = build_attention(shape)
        rounding = (BF16, F16) if has_half_precision() else (BF16,)
        return StepCode(
            run=_build_step(),
            norm=build_norm(),
            row_norm=build_row_norm(),
            rotation=build_rotation(),
            packing=build_packing(),
            attention=attention,
            packed_attention=(attention, *(build_attention(shape, to) for to in rounding)),
            gate=build_gate(),
            routing=build_routing(),
            expert_product=build_expert_product(),
            expert_sum=build_expert_sum(),
        )
    finally:
        numba.config.CACHE_DIR = before


@njit(nogil=True, error_model="numpy")
def _wait(address, pieces):
    looks = 0
    while seen(address) < pieces:
        looks += 1
        if looks > LOOKS + YIELDS:
            _sleep(NAP)
        elif looks > LOOKS:
            _yield()


def _build_step() -> Any:  # noqa: ANN401 - Numba's dispatcher
    @njit(types.int64(*[types.int64] * 4), cache=True, nogil=True, error_model="numpy")
    def step(parts, count, context, control):
        thread, rows, begun = take(context + 8 * THREADS, 1), word_at(context, ROWS), 0
        for i in range(count):
            part, words = parts + i * FIELDS * 8, control + i * SLOTS * 8
            code = word_at(part, CODE)
            if word_at(part, KIND) == PRODUCT:
                blocks = word_at(part, BLOCKS)
                pieces = blocks * ((rows + ROWS_A_PIECE - 1) // ROWS_A_PIECE)
                call_product(
                    code,
                    word_at(context, word_at(part, X)),
                    rows,
                    word_at(part, INNER),
                    word_at(part, WEIGHT),
                    word_at(part, SCALES),
                    word_at(part, PACKED_BIASES),
                    word_at(part, SHIFT),
                    word_at(context, word_at(part, Y)),
                    word_at(part, WIDTH),
                    blocks,
                    words,
                )
            else:
                pieces = call_part(code, part, context, thread, words)
            put_word(words, PIECES, pieces)
            if word_at(part, SYNC):
                for j in range(begun, i + 1):
                    mine = control + j * SLOTS * 8
                    _wait(mine + 8 * DONE, word_at(mine, PIECES))
                begun = i + 1
        return count

    return step
