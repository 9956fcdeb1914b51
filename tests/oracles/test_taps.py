from typing import Any, Never

import numpy as np
import pytest

from oracles.mlx_lm.taps import Taps, UnwatchableModuleError


class Module:
    """Enough of an mlx.nn.Module: children by name, parameters as a tree."""

    def __init__(self, **children: Any) -> None:
        self.children = children

    def named_modules(self, path: Any = "") -> Any:
        yield path, self
        for name, child in self.children.items():
            yield from child.named_modules(f"{path}.{name}" if path else name)

    def parameters(self) -> Any:
        return {name: child.parameters() for name, child in self.children.items()}


class Linear(Module):
    def __init__(self, factor: Any) -> None:
        super().__init__()
        self.factor = factor

    def parameters(self) -> Any:
        return {"weight": self.factor}

    def __call__(self, x: Any) -> Any:
        return x * self.factor


class Doubled(Linear):
    def __call__(self, x: Any) -> Any:
        return 2 * super().__call__(x)


class Inherited(Linear):
    pass


class Rope(Module):
    def __call__(self, x: Any) -> Any:
        return x


class Pair(Linear):
    def __call__(self, x: Any) -> Any:
        return x, "a second output"


class Model(Module):
    def __call__(self, x: Any) -> Any:
        for child in self.children.values():
            out = child(x)
            x = out[0] if isinstance(out, tuple) else out
        return x


def x(length: int = 3) -> Any:
    return np.arange(2 * length, dtype="<f4").reshape(1, length, 2)


def test_outputs_are_kept_at_the_last_position_in_execution_order() -> None:
    model = Model(second=Linear(2), first=Linear(3))
    taps = Taps(model, ["*"])
    with taps.watching():
        out = model(x())
    seen = taps.take()
    assert list(seen) == ["second", "first"]
    assert seen["second"].tolist() == [[8, 10]]
    assert seen["first"].tolist() == out[:, -1].tolist() == [[24, 30]]
    assert taps.take() == {}


def test_a_new_forward_forgets_the_one_before() -> None:
    model = Model(only=Linear(2))
    taps = Taps(model, ["only"])
    with taps.watching():
        model(x(5))
        model(x(1))
    assert taps.take()["only"].tolist() == [[0, 2]]


def test_globs_choose_and_modules_without_tensors_are_never_chosen() -> None:
    model = Model(rope=Rope(), q_proj=Linear(1), k_proj=Linear(1), norm=Linear(1))
    taps = Taps(model, ["*_proj"])
    with taps.watching():
        model(x())
    assert list(taps.take()) == ["q_proj", "k_proj"]
    everything = Taps(model, ["*"])
    with everything.watching():
        model(x())
    assert list(everything.take()) == ["q_proj", "k_proj", "norm"]


class SwitchLinear(Linear):
    pass


class QuantizedSwitchLinear(Linear):
    pass


class Experts(Model):
    pass


def test_single_experts_are_never_watched_but_their_layer_is() -> None:
    experts = Experts(gate_proj=SwitchLinear(2), down_proj=QuantizedSwitchLinear(3))
    model = Model(router=Linear(1), switch_mlp=experts)
    taps = Taps(model, ["*"])
    with taps.watching():
        model(x(1))
    seen = taps.take()
    assert list(seen) == ["router", "switch_mlp"]
    assert seen["switch_mlp"].tolist() == [[0, 6]]


@pytest.mark.parametrize("expert", [SwitchLinear, QuantizedSwitchLinear])
def test_a_glob_for_single_experts_watches_nothing(expert: Any) -> None:
    with pytest.raises(UnwatchableModuleError, match=r"record '\*gate_proj' matches no module path"):
        Taps(Model(switch_mlp=Experts(gate_proj=expert(2))), ["*gate_proj"])


def test_a_glob_that_watches_nothing_is_an_error() -> None:
    with pytest.raises(UnwatchableModuleError, match=r"record 'rope' matches no module path"):
        Taps(Model(rope=Rope(), q_proj=Linear(1)), ["*", "rope"])


def test_a_subclass_that_calls_its_base_gives_one_output() -> None:
    model = Model(plain=Linear(3), doubled=Doubled(3))
    taps = Taps(model, ["*"])
    with taps.watching():
        model(x(1))
    assert taps.take()["doubled"].tolist() == [[0, 18]]


def test_of_a_tuple_the_first_is_kept() -> None:
    model = Model(pair=Pair(1))
    taps = Taps(model, ["*"])
    with taps.watching():
        model(x(1))
    assert taps.take()["pair"].tolist() == [[0, 1]]


class Router(Linear):
    def __call__(self, x: Any) -> Any:
        return np.argsort(x, axis=-1).astype("<u4"), x


def test_of_a_router_the_chosen_ids_are_kept_in_their_own_dtype() -> None:
    model = Model(gate=Router(1))
    taps = Taps(model, ["*"])
    with taps.watching():
        model(x())
    ids = taps.take()["gate"]
    assert (ids.dtype, ids.tolist()) == (np.dtype("<u4"), [[0, 1]])


class Indexer(Linear):
    """Selects two of the positions for each query, for all heads at once, if there are more."""

    def __call__(self, x: Any) -> Any:
        length = x.shape[1]
        return None if length <= 2 else np.arange(2 * length, dtype="<u4").reshape(1, 1, length, 2)


class Sparse(Model):
    def __call__(self, x: Any) -> Any:
        self.children["indexer"](x)
        return self.children["out"](x)


def test_of_an_indexer_the_last_position_is_kept_which_stands_on_its_third_axis() -> None:
    taps = Taps(model := Sparse(indexer=Indexer(1), out=Linear(1)), ["*"])
    with taps.watching():
        model(x(5))
    assert taps.take()["indexer"].tolist() == [[[8, 9]]]


def test_a_module_that_puts_out_nothing_is_not_kept_and_hides_no_other() -> None:
    taps = Taps(model := Sparse(indexer=Indexer(1), out=Linear(1)), ["*"])
    with taps.watching():
        model(x(2))
    assert list(taps.take()) == ["out"]


def test_classes_are_as_before_also_after_an_exception() -> Never:
    model = Model(plain=Linear(3), inherited=Inherited(2), doubled=Doubled(2))
    before = {cls: dict(cls.__dict__) for cls in (Model, Linear, Inherited, Doubled)}
    with pytest.raises(AttributeError), Taps(model, ["*"]).watching():
        model("text: an output without axes")
    assert {cls: dict(cls.__dict__) for cls in before} == before


def test_an_inherited_call_is_watched_as_well() -> None:
    model = Model(inherited=Inherited(2))
    taps = Taps(model, ["*"])
    with taps.watching():
        model(x(1))
    assert taps.take()["inherited"].tolist() == [[0, 2]]


class Twice(Model):
    def __call__(self, x: Any) -> Any:
        shared = self.children["shared"]
        return shared(shared(x))


def test_a_module_that_runs_twice_a_step_is_an_error() -> None:
    model = Twice(shared=Linear(1))
    taps = Taps(model, ["*"])
    with taps.watching(), pytest.raises(UnwatchableModuleError, match="shared runs more than once in a step"):
        model(x())


@pytest.mark.parametrize("shape", [(3, 2), (4, 3, 2)])
def test_an_output_without_a_position_axis_is_an_error(shape: Any) -> None:
    model = Model(odd=Linear(1))
    taps = Taps(model, ["*"])
    with taps.watching(), pytest.raises(UnwatchableModuleError, match=r"has shape .*, not \[1, L, ...\]"):
        model(np.zeros(shape))
