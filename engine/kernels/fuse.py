"""Making a model's fused step, and holding it to the same model on fast products.

Guarantees: a fused model is handed out only where every part of the step gave mlx's bits here and the whole gave those of the
model on fast products, which was held to plain operations before. What has no fused step says why (`NotFusedError`).
"""

from collections.abc import Callable
from pathlib import Path
from typing import Final

from numba.core.errors import NumbaError

from engine.cache.convert import KVMode
from engine.generate import Feed, steps
from engine.kernels.driver import Driver, Form, shape_of
from engine.kernels.families import plan_of
from engine.kernels.fused import FusedModel
from engine.kernels.program import build_program
from engine.kernels.step import StepCode, step_code
from engine.kernels.team import Team
from engine.kernels.verify import KernelError, once, words
from engine.kernels.verify_step import INSTEAD, SILENCE, verify_step
from engine.model import CausalModel

CANARY_TOKENS: Final = 70  # more than one piece of rows and one block of positions
CANARY_STEPS: Final = 3
PACKED_TOKENS: Final = (
    8  # fed in two pieces and a last token: the first one is converted, the others are packed as they come
)


class Fuser:
    """Fused steps of models, their code compiled and proved once.

    Attributes:
        folder: Where compiled code and proofs are kept.
        threads: Of a step.
        compile: From the folder to the compiled step.
    """

    def __init__(
        self,
        *,
        folder: Path,
        threads: int,
        compile: Callable[[Path], StepCode] = step_code,  # noqa: A002 - as in `Kernels`
    ) -> None:
        self.folder = folder
        self.threads = threads
        self.compile = compile
        self._code: StepCode | None = None

    def fused(self, linear: CausalModel, drivers: Callable[[Form], Driver | None], *, name: str | None) -> FusedModel:
        """The fused model.

        Args:
            linear: The model on fast products.
            drivers: Its compiled products.
            name: What its weights are known by; see `Kernels.put_into`.

        Raises:
            NotFusedError: It has no fused step.
            KernelError: The step, or the model on it, does not give the bits that it must, or cannot be compiled.
        """
        plan = plan_of(linear)
        try:
            if self._code is None:
                code = self.compile(self.folder)
                once(self.folder, "step", lambda: verify_step(code))
                self._code = code
            program = build_program(plan, self._code, drivers, columns=shape_of(Form(stored="f32")).columns)
        except (NumbaError, RuntimeError, OSError) as error:
            raise KernelError(
                "the fused step cannot be used here",
                reason=str(error) or type(error).__name__,
                instead=INSTEAD,
                next_step=SILENCE,
            ) from error
        team = Team(threads=self.threads)
        model = FusedModel(linear=linear, plan=plan, program=program, run=self._code.run, team=team)
        if name is None:
            check_fused(linear, model)
        else:
            once(self.folder, f"fused-{name}", lambda: check_fused(linear, model))
        return model


def check_fused(linear: CausalModel, fused: CausalModel) -> None:
    """Compare a prompt and a few steps of a model on the fused step with the same on fast products; packed too, where it packs.

    Raises:
        KernelError: A row of logits or a picked token differs.
    """
    ids = [(7919 * i + 1) % linear.vocabulary for i in range(CANARY_TOKENS)]
    runs: list[tuple[list[int], Feed, KVMode | None]] = [(ids, Feed(whole=True), None)]
    if isinstance(fused, FusedModel) and (group_size := fused.packs_by) is not None:
        runs.append((ids[:PACKED_TOKENS], Feed(piece=PACKED_TOKENS // 2), KVMode(bits=8, group_size=group_size)))
    for prompt, feed, kv in runs:
        _compare(linear, fused, prompt, feed, kv)


def _compare(linear: CausalModel, fused: CausalModel, ids: list[int], feed: Feed, kv: KVMode | None) -> None:
    for expected, actual in zip(
        steps(linear, ids, num_steps=CANARY_STEPS, feed=feed, kv=kv),
        steps(fused, ids, num_steps=CANARY_STEPS, feed=feed, kv=kv),
        strict=True,
    ):
        if (words(expected.logits_BV) != words(actual.logits_BV)).any() or expected.token_id != actual.token_id:
            raise KernelError(
                "the model on the fused step does not give its own bits here",
                step=f"{expected.index} of {CANARY_STEPS}",
                instead=INSTEAD,
                next_step=SILENCE,
            )
