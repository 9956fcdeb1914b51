"""Planted faults of every kind: `explain` names the module in which each begins, where, and why."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any
from unittest import mock

import mlx.core as mx
import numpy as np
import pytest

import engine.grouped_attention
from engine.checkpoint import Checkpoint
from engine.families import llama, qwen3, qwen3_moe
from engine.linear import Embedding, Linear
from engine.norm import RMSNorm
from engine.rope import Rope
from parity.case import KV, Case, Feed
from parity.errors import CaseError
from parity.explaining import Explanation, explain
from parity.models import tiny_catalogue
from parity.sampling import Sampling
from parity.snapshot import Snapshot
from parity.trace import Trace
from tests.parity.explaining.runners import Plant, PlantedRunner

ATTENTION = "model.layers.0.self_attn.o_proj"  # the first projection after attention
PROMPT = (3, 17, 299, 0, 511, 64, 5, 41, 88, 2, 130, 7, 401, 12, 256, 33, 9, 77, 310, 18, 100, 4, 250, 61)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Snapshot]:
    home = tmp_path_factory.mktemp("tiny")

    @cache
    def of(name: str) -> Snapshot:
        source, _ = tiny_catalogue.digests()[name]
        tiny_catalogue.write(source, home / name)
        return Snapshot.read(home / name)

    return of


def case_of(snapshot: str, **fields: Any) -> Case:
    given: dict[str, Any] = {
        "prompt_ids": PROMPT,
        "forced_ids": (11, 402),
        "feed": Feed(mode="tail-split"),
        "kv": KV(),
        "num_steps": 2,
        "dtype": "f32",
    }
    return Case(name=f"{snapshot}/x", snapshot=snapshot, **{**given, **fields})


def found(tiny: Callable[[str], Snapshot], case: Case, plant: Plant) -> Explanation:
    return explain(case, tiny(case.snapshot), PlantedRunner(name="mlx-lm 0.32.2"), PlantedRunner(plant=plant))


def swap(target: Any, name: str, make: Callable[[Any], Any]) -> Plant:
    """Put `make(right)` in the place of what is right."""
    return lambda: mock.patch.object(target, name, make(getattr(target, name)))


def rope_base(module: Any) -> Plant:
    return swap(module, "make_rope", lambda right: lambda width, *, base, **k: right(width, base=base * 1.001, **k))


def norm_eps(ending: str) -> Plant:
    def make(right: Any) -> Any:
        return lambda self, x: right(replace(self, eps=1e-4) if self.path.endswith(ending) else self, x)

    return swap(RMSNorm, "__call__", make)


def scores_scale() -> Plant:
    def make(right: Any) -> Any:
        return lambda *a, scale, **k: right(*a, scale=scale * 1.02, **k)

    return swap(engine.grouped_attention, "attend", make)


def query_positions_shifted() -> Plant:
    def make(right: Any) -> Any:
        return lambda self, x, offset: right(self, x, offset + (x.shape[1] == 4))  # four query heads, two of keys

    return swap(Rope, "__call__", make)


def weight(path: str, change: Callable[[mx.array], mx.array]) -> Plant:
    """Another weight of one tensor."""

    def make(right: Any) -> Any:
        def take(self: Checkpoint, name: str, *a: Any, **k: Any) -> mx.array:
            array: mx.array = right(self, name, *a, **k)
            return change(array) if name == path else array

        return take

    return swap(Checkpoint, "take", make)


def one_row_larger(array: mx.array) -> mx.array:
    """One row of the embedding off."""
    return mx.where((mx.arange(array.shape[0]) == 41)[:, None], array * 1.5, array)


def window_too_wide() -> Plant:
    return swap(llama.Config, "window", lambda right: lambda self, layer: (w := right(self, layer)) and w + 1)


def heads_grouped_wrongly() -> Plant:
    def make(right: Any) -> Any:
        def attend(q: mx.array, keys: mx.array, values: mx.array, **k: Any) -> mx.array:
            out: mx.array = right(q, keys[:, ::-1], values[:, ::-1], **k)
            return out

        return attend

    return swap(engine.grouped_attention, "attend", make)


def swapped_gate_and_up() -> Plant:
    return swap(
        qwen3.GatedMLP, "__call__", lambda right: lambda self, x: right(replace(self, gate=self.up, up=self.gate), x)
    )


def one_expert_too_few() -> Plant:
    return swap(qwen3_moe.ExpertMLP, "__call__", lambda right: lambda self, x: right(replace(self, chosen=1), x))


def dropped_bias() -> Plant:
    def make(right: Any) -> Any:
        return lambda self, x: right(
            replace(self, bias=None) if self.path.endswith("layers.2.self_attn.k_proj") else self, x
        )

    return swap(Linear, "__call__", make)


def nudged(array: mx.array) -> mx.array:
    """The weights of one output, one unit in the last place each."""
    words = np.array(array.view(mx.uint32))
    words[3] += 1
    return mx.array(words).view(mx.float32)


@dataclass(frozen=True)
class Fault:
    """What is planted where, and what must be found."""

    what: str
    snapshot: str
    plant: Plant
    module: str
    position: int
    cause: str = "logic"


FAULTS = (
    Fault("rope base", "qwen3-tiny", rope_base(qwen3), ATTENTION, 1),
    Fault("eps of a norm", "qwen3-tiny", norm_eps("layers.1.self_attn.q_norm"), "model.layers.1.self_attn.q_norm", 0),
    Fault("scale of scores", "qwen3-tiny", scores_scale(), ATTENTION, 1),
    Fault("positions", "qwen3-tiny", query_positions_shifted(), ATTENTION, 1),
    Fault(
        "one row of the embedding",
        "llama-tiny",
        weight("model.embed_tokens.weight", one_row_larger),
        "model.embed_tokens",
        7,
    ),
    Fault("window", "llama_sliding-tiny", window_too_wide(), ATTENTION, 16),
    Fault("grouping of heads", "llama-tiny", heads_grouped_wrongly(), ATTENTION, 0),
    Fault("gate and up", "qwen3-tiny", swapped_gate_and_up(), "model.layers.0.mlp.down_proj", 0),
    Fault("number of experts", "qwen3_moe-tiny", one_expert_too_few(), "model.layers.1.mlp.switch_mlp", 0),
    Fault("a bias", "qwen2-tiny", dropped_bias(), "model.layers.2.self_attn.k_proj", 0),
    Fault(
        "one unit in the last place",
        "qwen3-tiny",
        weight("model.layers.2.mlp.down_proj.weight", nudged),
        "model.layers.2.mlp.down_proj",
        0,
        "rounding",
    ),
    Fault(
        "tied head",
        "qwen3-tiny",
        swap(Embedding, "as_head", lambda right: lambda self, x: right(self, x) * 1.001),
        "logits",
        0,
    ),
)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what)
def test_a_planted_fault_is_found_where_it_begins(tiny: Callable[[str], Snapshot], fault: Fault) -> None:
    explanation = found(tiny, case_of(fault.snapshot), fault.plant)
    assert explanation.cause is not None
    assert (explanation.module, explanation.position) == (fault.module, fault.position)
    assert explanation.cause.kind == fault.cause
    if explanation.cause.rescore is not None:
        assert explanation.cause.side == ("engine" if fault.cause == "logic" else None)
    assert explanation.inputs_identical == (fault.module != "model.embed_tokens")


def test_two_equal_runs_have_nothing_to_explain(tiny: Callable[[str], Snapshot]) -> None:
    explanation = found(tiny, case_of("qwen3-tiny"), contextlib.nullcontext)
    assert explanation.identical
    assert (explanation.module, explanation.cause, explanation.position) == (None, None, None)


def test_the_side_that_is_wrong_is_named_whichever_it_is(tiny: Callable[[str], Snapshot]) -> None:
    case = case_of("qwen3-tiny")
    wrong = PlantedRunner(name="oracle", plant=rope_base(qwen3))
    explanation = explain(case, tiny("qwen3-tiny"), wrong, PlantedRunner())
    assert explanation.cause is not None
    assert (explanation.cause.kind, explanation.cause.side) == ("logic", "oracle")


def test_two_wrong_sides_are_unknown(tiny: Callable[[str], Snapshot]) -> None:
    case = case_of("qwen3-tiny")
    sides = (PlantedRunner(plant=norm_eps("input_layernorm")), PlantedRunner(plant=swapped_gate_and_up()))
    explanation = explain(case, tiny("qwen3-tiny"), *sides)
    assert explanation.cause is not None
    assert explanation.module == "model.layers.0.input_layernorm"
    assert explanation.cause.kind == "logic"  # at the norm one side is right
    both = (PlantedRunner(plant=norm_eps("q_norm")), PlantedRunner(plant=rope_of_q_norms()))
    cause = explain(case, tiny("qwen3-tiny"), *both).cause
    assert cause is not None
    assert cause.kind == "unknown"
    assert cause.evidence.endswith("the truth computes this in neither way")


def rope_of_q_norms() -> Plant:
    def make(right: Any) -> Any:
        return lambda self, x: right(replace(self, eps=1e-3) if self.path.endswith("q_norm") else self, x)

    return swap(RMSNorm, "__call__", make)


def packed_products_scaled() -> Plant:
    """A fault of packed keys and values alone: no weight of these snapshots is packed."""
    return swap(mx, "quantized_matmul", lambda right: lambda *a, **k: right(*a, **k) * 1.01)


@pytest.mark.parametrize(
    ("plant", "conversion", "cause"),
    [(rope_base(qwen3), "before", "logic"), (packed_products_scaled(), "after", "logic")],
)
def test_whether_a_difference_predates_the_conversion_is_told(
    tiny: Callable[[str], Snapshot], plant: Plant, conversion: str, cause: str
) -> None:
    explanation = found(tiny, case_of("qwen3-tiny", kv=KV(bits=8, group_size=64)), plant)
    assert explanation.cause is not None
    assert (explanation.conversion, explanation.cause.kind) == (conversion, cause)
    assert explanation.module == "model.layers.0.self_attn.o_proj"
    assert explanation.position == (1 if conversion == "before" else 23)


def test_a_fault_of_later_steps_is_found_at_its_step(tiny: Callable[[str], Snapshot]) -> None:
    def make(right: Any) -> Any:
        return lambda self, x, offset: right(self, x, offset + (offset >= len(PROMPT)))

    explanation = found(tiny, case_of("qwen3-tiny"), swap(Rope, "__call__", make))
    assert explanation.place is not None
    assert (explanation.place.step, explanation.position) == (1, len(PROMPT))
    assert explanation.module == "model.layers.0.self_attn.o_proj"


def test_a_near_tie_that_rounding_flips_is_a_tie(tiny: Callable[[str], Snapshot]) -> None:
    """Two rows of the embedding, hence of the tied head, are made equal but for rounding."""
    case = case_of("qwen3-tiny", forced_ids=None, num_steps=1)
    row = PlantedRunner().run(case, tiny("qwen3-tiny")).logits(0).values()[0]
    first, second = np.argsort(-row)[:2].tolist()

    def level(factor: float) -> Plant:
        def make(right: Any) -> Any:
            def as_head(self: Embedding, x: mx.array) -> mx.array:
                logits: mx.array = right(self, x)
                logits[..., second] = logits[..., first] * factor
                return logits

            return as_head

        return swap(Embedding, "as_head", make)

    expected, actual = PlantedRunner(plant=level(1 - 2**-22)), PlantedRunner(plant=level(1 + 2**-22))
    snapshot = tiny("qwen3-tiny")
    explanation = explain(case, snapshot, expected, actual, truth="none for this test")
    assert explanation.cause is not None
    assert explanation.cause.kind == "tie"
    assert explanation.cause.evidence.startswith("top-2 margin ")
    assert explanation.cause.margin is not None
    assert 0 < explanation.cause.margin < 1e-5


def test_an_id_that_is_not_the_most_probable_is_logic(tiny: Callable[[str], Snapshot]) -> None:
    def make(_right: Any) -> Any:
        return lambda logits, _index: int(np.array(mx.argmin(logits, axis=-1))[0])

    import parity.engine_runner as runner  # noqa: PLC0415

    explanation = found(tiny, case_of("qwen3-tiny", forced_ids=None), swap(runner, "greedy", make))
    assert explanation.cause is not None
    assert (explanation.module, explanation.cause.kind, explanation.cause.side) == ("token_ids", "logic", "engine")


def test_a_module_that_one_side_alone_has_is_logic(tiny: Callable[[str], Snapshot]) -> None:
    def skipped(right: Any) -> Any:
        return lambda self, x: x if self.path.endswith("k_norm") else right(self, x)

    explanation = found(tiny, case_of("qwen3-tiny"), swap(RMSNorm, "__call__", skipped))
    assert explanation.cause is not None
    assert explanation.module == "model.layers.0.self_attn.k_norm"
    assert str(explanation.cause) == (
        "logic (outputs of model.layers.0.self_attn.k_norm cannot be compared: expected side alone has it)"
    )


def test_without_a_truth_the_reason_is_the_evidence(tiny: Callable[[str], Snapshot]) -> None:
    def make(right: Any) -> Any:
        return lambda self, x: right(self, x) * 2 if self.path.endswith("mixer.out_proj") else right(self, x)

    explanation = found(tiny, case_of("mamba2-tiny"), swap(Linear, "__call__", make))
    assert explanation.module is not None
    assert str(explanation.cause) == "unknown (mamba2 has no float64 truth)"


def test_steps_after_the_first_that_differs_are_not_run(tiny: Callable[[str], Snapshot]) -> None:
    asked: list[int] = []

    class Counted(PlantedRunner):
        def run(self, case: Case, snapshot: Snapshot) -> Trace:
            asked.append(case.num_steps)
            return super().run(case, snapshot)

    sides = (Counted(), PlantedRunner(plant=rope_base(qwen3)))
    explanation = explain(case_of("qwen3-tiny"), tiny("qwen3-tiny"), *sides, first_step=0)
    assert explanation.module == "model.layers.0.self_attn.o_proj"
    assert set(asked) == {1}


def test_a_sampler_case_is_refused(tiny: Callable[[str], Snapshot]) -> None:
    case = case_of("qwen3-tiny", forced_ids=None, sampling=mock.Mock(spec=Sampling))
    with pytest.raises(CaseError) as caught:
        found(tiny, case, contextlib.nullcontext)
    assert str(caught.value) == (
        "qwen3-tiny/x has no model to look into\n"
        "  kind  a sampler case: its rows are given, its uniforms are in the golden\n"
        "  next  assay check 'qwen3-tiny/x', which names the draw and says whether the randomness agreed"
    )
