"""One trial: what it calls caught, localised, a hole, void and a false alarm; each of them produced."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from engine.errors import RequestError
from engine.norm import RMSNorm
from engine.taps import tap
from parity.errors import GoldenError, UsageError
from parity.mutation import trial
from parity.mutation.catalogue import by_name
from parity.mutation.fault import Fault, drawn, fault, taps
from parity.mutation.planting import Acted, Plant, edit, swap
from parity.mutation.trial import Fate, ask, try_fault
from tests.engine.families.committed_golden import needs_goldens

pytestmark = needs_goldens
LLAMA = taps("llama_default")
Q_PROJ = "model.layers.0.self_attn.q_proj"


def planted(plant: Plant, **changes: Any) -> Fault:
    declared: dict[str, Any] = {
        "says": "a test",
        "at": "model.layers.2.input_layernorm",
        "cases": LLAMA,
        "plant": plant,
    }
    return fault("eps", "test", "a", **{**declared, **changes})


EPS = edit("blocks.2.input_norm.eps", lambda eps: eps * 10)


def test_a_fault_that_a_case_sees_where_it_is_is_caught_and_localised() -> None:
    outcome = try_fault(planted(EPS))

    assert outcome.fate is Fate.CAUGHT
    assert outcome.localised
    assert not outcome.misplaced
    assert not outcome.false_alarm
    assert outcome.seen is not None
    assert (outcome.seen.case, outcome.seen.steps, outcome.seen.status) == (LLAMA, 1, "DIFFERENT")
    assert outcome.control.case == LLAMA


def test_a_fault_that_is_seen_elsewhere_is_misplaced() -> None:
    outcome = try_fault(planted(EPS, at="model.layers.3.input_layernorm"))

    assert outcome.fate is Fate.CAUGHT
    assert not outcome.localised
    assert outcome.misplaced
    assert outcome.seen is not None
    assert outcome.seen.found == "model.layers.2.input_layernorm"


def test_hidden_is_strict() -> None:
    elsewhere = planted(EPS, at="model.layers.1.input_layernorm", hidden="nobody looks there")

    assert not try_fault(elsewhere).misplaced
    assert try_fault(replace(elsewhere, at="model.layers.2.input_layernorm")).misplaced


def test_a_fault_that_acts_and_that_nobody_sees_is_a_hole() -> None:
    outcome = try_fault(planted(swap("engine.norm:RMSNorm.__call__", lambda right: right)))

    assert outcome.fate is Fate.HOLE
    assert outcome.seen is None
    assert not outcome.localised


def test_every_case_is_asked_before_a_fault_is_a_hole_and_none_after_it_was_seen() -> None:
    mamba = taps("mamba2")
    in_llama = planted(
        swap("engine.grouped_attention:attend", lambda right: lambda *given, **options: right(*given, **options) * 2)
    )

    assert try_fault(replace(in_llama, cases=(mamba, LLAMA, mamba))).asked == 2
    assert try_fault(replace(in_llama, cases=(LLAMA, mamba))).asked == 1


@pytest.mark.parametrize(
    ("plant", "why"),
    [
        (swap("engine.gated_delta:gated_delta", lambda right: right), "nothing that the cases compute reaches it"),
        (edit("blocks.2.input_norm.eps", lambda eps: eps), "blocks.2.input_norm.eps is changed to what it is"),
        (edit("blocks.7.input_norm.eps", lambda eps: eps), "no 7 at blocks.7.input_norm"),
        (swap("engine.norm:nothing", lambda right: right), "engine.norm:nothing does not exist"),
        (
            edit("blocks.2.input_norm.weight", lambda weight: weight[:5]),
            "the engine breaks down: ValueError: [rms_norm]",
        ),
    ],
)
def test_a_fault_that_computes_nothing_wrong_is_void(plant: Plant, why: str) -> None:
    outcome = try_fault(planted(plant))

    assert outcome.fate is Fate.VOID
    assert outcome.why.startswith(why)
    assert not outcome.false_alarm


def test_an_engine_that_refuses_has_not_given_the_bits() -> None:
    def refusing(_: Callable[..., Any]) -> Callable[..., Any]:
        def refuse(*_: object) -> None:
            raise RequestError("not today", next_step="come back")

        return refuse

    outcome = try_fault(planted(swap("engine.norm:RMSNorm.__call__", refusing)))

    assert outcome.fate is Fate.CAUGHT
    assert outcome.seen is not None
    assert (outcome.seen.status, outcome.seen.steps) == ("REFUSED", None)
    assert not outcome.localised


def test_a_case_that_differs_without_the_fault_is_a_false_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        RMSNorm, "__call__", lambda self, x: tap(self.path, mx.fast.rms_norm(x, self.weight, 2 * self.eps))
    )

    outcome = try_fault(planted(EPS))

    assert outcome.fate is Fate.CAUGHT
    assert outcome.false_alarm


def test_a_fault_that_stays_behind_is_a_false_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    class Leaking:
        @contextmanager
        def planted(self) -> Iterator[Acted]:
            monkeypatch.setattr("engine.norm.RMSNorm.__call__", lambda self, x: tap(self.path, x * self.weight))
            yield Acted(times=1)

    assert try_fault(planted(Leaking(), at="model.layers.0.input_layernorm")).false_alarm


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("swapped-layers/llama/0-and-1", "model.layers.0.input_layernorm"),
        ("tied-head/qwen2/rows-one-off", "logits"),
        ("KV-conversion/order/never", "cache"),
        ("sampler-seed/seed/one-more", "uniforms"),
        ("sampler-order/chain/top-k-lost", "token_ids"),
    ],
)
def test_what_is_no_module_has_a_word_too(name: str, found: str) -> None:
    outcome = try_fault(by_name(name))

    assert outcome.localised
    assert outcome.seen is not None
    assert outcome.seen.found == found


def test_draws_are_counted_until_the_first_difference() -> None:
    outcome = try_fault(by_name("sampler-window/processors/default-for-all"))

    assert outcome.seen is not None
    assert outcome.seen.steps is not None
    assert 1 < outcome.seen.steps < 100


def test_a_case_that_does_not_exist_is_told() -> None:
    with pytest.raises(UsageError, match=r"a seeded fault names a case that does not exist\n  case  toy/none\n"):
        ask("toy/none")


def test_a_platform_without_goldens_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "platform_key", lambda: "plan9-mips-cpu")

    with pytest.raises(
        GoldenError, match=r"there are no goldens for plan9-mips-cpu\n  looked at  goldens/mlx-lm-\*/plan9"
    ):
        ask(drawn("t07"))


def test_a_stale_golden_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    provenance = trial._provenance()
    packages = {**provenance.packages, "mlx": "9.9"}
    monkeypatch.setattr(trial, "_provenance", lambda: replace(provenance, packages=packages))
    monkeypatch.setattr(trial._provenance, "cache_clear", lambda: None, raising=False)

    with pytest.raises(GoldenError, match=r"golden of samplers/mlx-lm/t07-ties/f32/b1/s0 is stale\n  mlx   golden"):
        ask(drawn("t07"))
