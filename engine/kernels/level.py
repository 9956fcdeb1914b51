"""Which kernels a model runs on: `plain` mlx operations, `linear` or `fused`.

`linear` has compiled products in linear and expert layers; `fused` has besides, where the family has one, a whole forward as
one compiled call a thread (`engine.kernels.fuse`).

Guarantees: kernels go into a model only where each of them, and the model as a whole, gave mlx's bits on this machine;
otherwise the model stays on plain operations, one message says why, and `Kernels.used` tells it from then on. On a GPU nothing
is ever replaced. Compiled code and proofs are kept in the folder given; deleting it costs a few seconds.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeVar

import mlx.core as mx
from numba.core.errors import NumbaError

from engine.generate import steps
from engine.kernels.driver import Driver, Form, compiled
from engine.kernels.experts import FastExperts
from engine.kernels.fuse import Fuser
from engine.kernels.fused import FusedModel
from engine.kernels.layout import NAMES, supported
from engine.kernels.matrix import FastMatrix
from engine.kernels.plan import NotFusedError
from engine.kernels.step import StepCode, step_code
from engine.kernels.team import Team
from engine.kernels.verify import KernelError, once, proven, words
from engine.linear import Embedding, Linear, Packed
from engine.model import CausalModel
from engine.moe import ExpertLinear

Layer = Linear | Embedding | ExpertLinear
Compile = Callable[[Form, Path], Driver]
AnyModel = TypeVar("AnyModel", bound=CausalModel)

LEVELS: Final = ("linear", "fused")  # above `plain`, the most last
CANARY_TOKENS: Final = 5
CANARY_STEPS: Final = 2


@dataclass(slots=True, kw_only=True, eq=False)
class Kernels:
    """Compiled products, and what became of them.

    Attributes:
        folder: Where compiled code and proofs are kept.
        say: Takes the one message when kernels are refused.
        level: Of `LEVELS`, the most that is used.
        threads: Of one product, at most.
        compile: From a form and the folder to its compiled product.
        compile_step: From the folder to the compiled fused step.
        refusal: Why models stay on plain operations; None while nothing spoke against kernels.
        fused_refusal: Why they stay on fast products; None while nothing spoke against the fused step.
        not_fused: Why the last model has no fused step, where that is because of what it is; else None.
    """

    folder: Path
    say: Callable[[str], None]
    level: str = LEVELS[-1]
    threads: int = field(default_factory=lambda: cores())  # noqa: PLW0108 - it stands below
    compile: Compile = compiled
    refusal: str | None = None
    fused_refusal: str | None = None
    not_fused: str | None = None
    compile_step: Callable[[Path], StepCode] = step_code
    _drivers: dict[Form, Driver] = field(default_factory=dict)
    _fuser: Fuser | None = None

    @property
    def used(self) -> str:
        """The level that the last model is on, with the reason where it is a lower one than asked for."""
        if self.refusal is not None:
            return f"plain ({self.refusal})"
        reason = self.fused_refusal or self.not_fused
        return self.level if self.level != "fused" or reason is None else f"linear ({reason})"

    def put_into(self, model: AnyModel, *, name: str | None) -> AnyModel | FusedModel:
        """The model on kernels, or the model as it was where one of them does not give mlx's bits.

        Args:
            model: On plain operations.
            name: What the model's weights are known by, such as their digest; the proof of the whole model is kept under it,
                and done anew each time where it is None.
        """
        if self.refusal is not None:
            return model
        if mx.default_device() != mx.Device(mx.cpu):
            self.refusal = "the default device is a GPU"
            self.say("kernels are for the CPU; the default device is a GPU\n  instead  plain mlx operations")
            return model
        try:
            for form in sorted(forms(model), key=lambda f: f.name):
                self._prove(form)
            fast = self._swapped(model)
            if name is None:
                check_model(model, fast)
            else:
                once(self.folder, f"model-{name}", lambda: check_model(model, fast))
        except KernelError as error:
            self.refusal = error.what
            self.say(str(error))
            return model
        return self._fused(fast, name) if self.level == "fused" and self.fused_refusal is None else fast

    def _fused(self, fast: AnyModel, name: str | None) -> AnyModel | FusedModel:
        self.not_fused = None
        if self._fuser is None:
            self._fuser = Fuser(folder=self.folder, threads=self.threads, compile=self.compile_step)
        try:
            return self._fuser.fused(fast, self._drivers.get, name=name)
        except NotFusedError as error:
            self.not_fused = f"no fused step: {error}"
        except KernelError as error:
            self.fused_refusal = error.what
            self.say(str(error))
        return fast

    def _prove(self, form: Form) -> None:
        if form not in self._drivers:
            try:
                driver = self.compile(form, self.folder)
                proven(form, driver, self.folder)
            except (NumbaError, RuntimeError, OSError) as error:
                raise KernelError(
                    f"kernel {form.name} cannot be used here",
                    reason=str(error) or type(error).__name__,
                    instead="plain mlx operations",
                    next_step=KernelError.silence,
                ) from error
            self._drivers[form] = driver

    def _swapped(self, model: AnyModel) -> AnyModel:
        team, made = Team(threads=self.threads), dict[int, FastMatrix]()

        def fast(weight: mx.array | Packed) -> FastMatrix:
            """One matrix for each weight: a head may share the embedding's."""
            if id(weight) not in made:
                made[id(weight)] = FastMatrix(driver=self._drivers.get, team=team, plain=weight)
            return made[id(weight)]

        def swap(layer: Layer) -> Layer:
            weight = weight_of(layer)
            if weight is None:
                return layer
            if isinstance(layer, ExpertLinear):
                return replace(layer, weight=FastExperts.of(weight, driver=self._drivers.get, team=team))
            return (
                replace(layer, weight=fast(weight)) if isinstance(layer, Linear) else replace(layer, head=fast(weight))
            )

        swapped: AnyModel = mapped(model, swap)
        return swapped


def forms(model: object) -> set[Form]:
    """The kernels that a model's linear layers need; float32 ones may turn out to fit in two bytes."""
    found: set[Form] = set()
    small: set[tuple[int, str]] = set()

    def note(layer: Layer) -> Layer:
        weight = weight_of(layer)
        if isinstance(weight, Packed) and weight.format.mode != "affine":
            small.add((weight.format.bits, weight.format.mode))
        elif isinstance(weight, Packed):
            found.add(Form(stored=NAMES[weight.scales.dtype], bits=weight.format.bits))
        elif weight is not None:
            found.add(Form(stored=NAMES[weight.dtype]))
            if weight.dtype == mx.float32:
                found.add(Form(stored="bf16"))
        return layer

    mapped(model, note)
    # small floats do not say what they are multiplied in: the model's dtypes, and bfloat16, in which mlx looks up their rows
    names = {"bf16", *(NAMES[dtype] for dtype in dtypes(model) if dtype in NAMES)} if small else set[str]()
    return found | {Form(stored=name, bits=bits, mode=mode) for name in names for bits, mode in small}


def dtypes(value: object) -> set[mx.Dtype]:
    """The dtypes of all arrays in a tree of dataclasses, tuples, lists and mappings."""
    if isinstance(value, mx.array):
        return {value.dtype}
    if is_dataclass(value) and not isinstance(value, type):
        return set[mx.Dtype]().union(*(dtypes(getattr(value, f.name)) for f in fields(value)))
    if isinstance(value, tuple | list):
        return set[mx.Dtype]().union(*map(dtypes, value))
    return set[mx.Dtype]().union(*map(dtypes, value.values())) if isinstance(value, dict) else set()


def weight_of(layer: Layer) -> mx.array | Packed | None:
    """The weight of a layer where it has a compiled product, else None."""
    if not isinstance(layer, ExpertLinear):
        return supported(layer.weight)
    weight = supported(layer.weight, ndim=3)
    if isinstance(weight, mx.array) and weight.dtype != mx.float32:
        return None  # mlx itself has no dense experts in 16 bits
    return weight


def mapped(value: Any, change: Callable[[Layer], Layer]) -> Any:  # noqa: ANN401 - any tree
    """A tree of dataclasses, tuples, lists and mappings with its layers changed, the rest shared."""
    if isinstance(value, Linear | Embedding | ExpertLinear):
        return change(value)
    if is_dataclass(value) and not isinstance(value, type):
        new = {f.name: mapped(getattr(value, f.name), change) for f in fields(value) if f.init}
        changed = {name: v for name, v in new.items() if v is not getattr(value, name)}
        return replace(value, **changed) if changed else value
    if type(value) in (tuple, list):
        items = [mapped(item, change) for item in value]
        return value if all(a is b for a, b in zip(items, value, strict=True)) else type(value)(items)
    if type(value) is dict:
        pairs = {key: mapped(item, change) for key, item in value.items()}
        return value if all(pairs[key] is value[key] for key in value) else pairs
    return value


def check_model(plain: CausalModel, fast: CausalModel) -> None:
    """Compare a few steps of a model on kernels with the same steps on plain operations.

    Raises:
        KernelError: A row of logits or a picked token differs.
    """
    ids = [(7919 * i + 1) % plain.vocabulary for i in range(CANARY_TOKENS)]
    for expected, actual in zip(
        steps(plain, ids, num_steps=CANARY_STEPS), steps(fast, ids, num_steps=CANARY_STEPS), strict=True
    ):
        if (words(expected.logits_BV) != words(actual.logits_BV)).any() or expected.token_id != actual.token_id:
            raise KernelError(
                "the model on kernels does not give its own bits here",
                step=f"{expected.index} of {CANARY_STEPS}",
                instead="plain mlx operations",
                next_step=KernelError.silence,
            )


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
