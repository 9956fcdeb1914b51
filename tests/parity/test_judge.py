import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from parity.case import KV, Case
from parity.compare import Match
from parity.golden import Golden
from parity.judge import judge
from parity.provenance import Provenance
from parity.sketch import strided_ids, top_ids
from parity.snapshot import Snapshot
from parity.tensor import Tensor
from parity.trace import TOKEN_IDS, Trace
from parity.verdict import Status, Verdict

MODULES = ("model.layers.0", "model.layers.1", "model.norm")


@pytest.fixture
def ask(
    make_case: Callable[..., Case],
    make_trace: Callable[..., Trace],
    make_snapshot: Callable[..., Snapshot],
    make_golden: Callable[..., Golden],
    make_provenance: Callable[..., Provenance],
) -> Callable[..., Verdict]:
    """Judge a trace that is equal to the golden but for the given changes."""

    def ask(
        changes: Mapping[str, Tensor] | None = None,
        *,
        vocabulary: int = 16,
        modules: tuple[str, ...] = MODULES,
        case: Case | None = None,
        snapshot: Snapshot | None = None,
        cache: tuple[str, ...] | None = None,
        drop: str | None = None,
        golden: Callable[[Golden], Golden] = lambda made: made,
        running: Mapping[str, Any] | None = None,
        stored_rows: Callable[[], Mapping[str, Tensor] | None] | None = None,
    ) -> Verdict:
        trace = make_trace(make_case(), vocabulary=vocabulary, modules=modules)
        made = golden(make_golden(make_case(), trace, make_snapshot()))
        tensors = {**trace.tensors, **(changes or {})}
        if drop:
            del tensors[drop]
        return judge(
            case or make_case(),
            made,
            Trace(tensors=tensors, cache=trace.cache if cache is None else cache),
            snapshot=snapshot or make_snapshot(),
            provenance=make_provenance(**(running or {})),
            stored_rows=stored_rows,
        )

    return ask


@pytest.fixture
def trace(make_case: Callable[..., Case], make_trace: Callable[..., Trace]) -> Trace:
    return make_trace(make_case(), modules=MODULES)


@pytest.fixture
def large(make_case: Callable[..., Case], make_trace: Callable[..., Trace]) -> Trace:
    return make_trace(make_case(), vocabulary=2000)


def test_equal_bits_are_identical(ask: Callable[..., Verdict]) -> None:
    verdict = ask()

    assert (verdict.status, verdict.differing, verdict.first_step) == (Status.IDENTICAL, (), None)
    assert verdict.message().splitlines() == [
        "toy/f32/fp/greedy/p3-whole is bit-identical to mlx-lm 0.32.2",
        "  steps    3",
        "  tensors  13",
    ]
    assert verdict.model_type == "llama"


@pytest.mark.parametrize("step", [0, 1, 2])
@pytest.mark.parametrize("element", [0, 7, 15])
@pytest.mark.parametrize("bit", [0, 12, 31])
def test_one_flipped_bit_of_one_logit_is_different(  # noqa: PLR0917 - fixtures and parameters
    ask: Callable[..., Verdict], trace: Trace, flip: Callable[..., Tensor], step: int, element: int, bit: int
) -> None:
    name = f"logits/{step}"

    verdict = ask({name: flip(trace.tensors[name], element, bit)})

    assert (verdict.status, verdict.differing, verdict.first_step) == (Status.DIFFERENT, (name,), step)
    assert verdict.diffs[name].first == (0, element)
    assert verdict.diffs[name].num_different == 1


def test_the_sign_of_zero_is_a_difference(ask: Callable[..., Verdict]) -> None:
    zero = np.zeros((1, 16), dtype="<f4")
    replaced = {"logits/0": Tensor.of(zero)}

    def with_zero(golden: Golden) -> Golden:
        tensors = {**golden.tensors, **replaced}
        entries = tuple(replace(e, digest=tensors[e.name].digest) for e in golden.entries)
        return replace(golden, tensors=tensors, entries=entries)

    assert ask(replaced, golden=with_zero).status is Status.IDENTICAL
    assert ask({"logits/0": Tensor.of(-zero)}, golden=with_zero).status is Status.DIFFERENT


def test_the_message_of_a_difference_to_the_letter(
    ask: Callable[..., Verdict], trace: Trace, flip: Callable[..., Tensor]
) -> None:
    row = flip(flip(trace.tensors["logits/1"], 3, 0), 5, 1)

    message = ask({"logits/1": row, "activations/1/model.layers.1": flip(trace.tensors["activations/1/model.norm"])})

    bits = trace.tensors["logits/1"].bits()[0]
    value = trace.tensors["logits/1"].values()[0]
    margin = f"{np.sort(value)[-1] - np.sort(value)[-2]:.2g}"
    old, new = (str(np.array([w], "<u4").view("<f4")[0]) for w in (bits[3], bits[3] ^ 1))
    assert message.message().splitlines() == [
        "logits of toy/f32/fp/greedy/p3-whole are not bit-identical to mlx-lm 0.32.2",
        "  step      1 of 3",
        f"  first     [0, 3]: expected 0x{bits[3]:08x} ({old}), actual 0x{bits[3] ^ 1:08x} ({new}), 1 ULP",
        f"  count     2 of 16 elements, at most 2 ULP; top-1 agrees, margin {margin}",
        "  earliest  model.layers.1",
        "  next      assay explain 'toy/f32/fp/greedy/p3-whole'",
    ]


def test_the_earliest_activation_is_the_first_in_execution_order(
    ask: Callable[..., Verdict], trace: Trace, flip: Callable[..., Tensor]
) -> None:
    names = ("activations/2/model.layers.0", "activations/1/model.norm", "activations/2/model.norm", "logits/2")

    verdict = ask({name: flip(trace.tensors[name]) for name in names})

    assert (verdict.earliest, verdict.first_step) == ("model.norm", 1)
    assert verdict.facts["step"] == "1 of 3"
    assert str(verdict.facts["first"]).startswith("logits/2 [0, 0]: expected")


def test_a_module_path_with_a_slash_is_kept_whole(
    ask: Callable[..., Verdict], make_case: Callable[..., Case], make_trace: Callable[..., Trace], flip: Any
) -> None:
    modules = ("model/odd.path",)
    trace = make_trace(make_case(), modules=modules)
    name = "activations/0/model/odd.path"

    assert ask({name: flip(trace.tensors[name])}, modules=modules).earliest == "model/odd.path"


def test_activations_alone_are_told_as_such(ask: Callable[..., Verdict], trace: Trace, flip: Any) -> None:
    name = "activations/0/model.norm"

    verdict = ask({name: flip(trace.tensors[name])})

    assert verdict.what.startswith("activations of toy/")
    assert (verdict.status, verdict.earliest, verdict.first_step) == (Status.DIFFERENT, "model.norm", 0)


def test_other_token_ids_with_equal_logits_are_different(ask: Callable[..., Verdict], trace: Trace) -> None:
    ids = list(trace.token_ids)
    ids[1] += 1

    verdict = ask({TOKEN_IDS: Tensor.of(np.array(ids, dtype="<i4"))})

    assert (verdict.status, verdict.first_step) == (Status.DIFFERENT, 1)
    assert verdict.message().splitlines()[:3] == [
        "token ids of toy/f32/fp/greedy/p3-whole are not bit-identical to mlx-lm 0.32.2",
        "  step   1 of 3",
        f"  first  expected {ids[1] - 1}, actual {ids[1]}",
    ]


@pytest.mark.parametrize("tier", ["L1", "L2", "L3"])
def test_no_tier_softens_a_difference(
    ask: Callable[..., Verdict], trace: Trace, make_case: Callable[..., Case], flip: Any, tier: str
) -> None:
    case = make_case(tier=tier)

    verdict = ask(
        {"logits/0": flip(trace.tensors["logits/0"])}, case=case, golden=lambda made: replace(made, case=case)
    )

    assert verdict.status is Status.DIFFERENT


@pytest.mark.parametrize("name", ["logits/2", "activations/0/model.norm", TOKEN_IDS])
def test_a_missing_tensor_is_incomparable(ask: Callable[..., Verdict], name: str) -> None:
    verdict = ask(drop=name)

    assert (verdict.status, verdict.facts) == (Status.INCOMPARABLE, {"missing": name})
    assert verdict.what == "trace of toy/f32/fp/greedy/p3-whole cannot be compared with mlx-lm 0.32.2"


def test_an_extra_tensor_is_incomparable(ask: Callable[..., Verdict], trace: Trace) -> None:
    extra = {f"activations/0/extra.{n}": trace.tensors["logits/0"] for n in range(7)}

    verdict = ask(extra)

    assert verdict.status is Status.INCOMPARABLE
    assert str(verdict.facts["extra"]).splitlines()[-1] == "and 2 more"


@pytest.mark.parametrize(
    ("tensor", "told"),
    [
        (Tensor.of(np.zeros((1, 17), "<f4")), "logits/0: expected F32[1, 16], actual F32[1, 17]"),
        (Tensor.of(np.zeros((16,), "<f4")), "logits/0: expected F32[1, 16], actual F32[16]"),
        (Tensor.of(np.zeros((1, 16), "<u2"), dtype="BF16"), "logits/0: expected F32[1, 16], actual BF16[1, 16]"),
    ],
)
def test_another_dtype_or_shape_is_incomparable(ask: Callable[..., Verdict], tensor: Tensor, told: str) -> None:
    verdict = ask({"logits/0": tensor})

    assert (verdict.status, verdict.facts) == (Status.INCOMPARABLE, {"wrong": told})


def test_other_caches_are_incomparable_even_with_equal_bits(ask: Callable[..., Verdict]) -> None:
    verdict = ask(cache=("plain", "quantized-b8-g64"))

    assert verdict.status is Status.INCOMPARABLE
    assert verdict.facts == {"cache": "expected plain, plain, actual plain, quantized-b8-g64"}


@pytest.mark.parametrize(
    ("running", "told"),
    [
        ({"packages": {"mlx": "0.33.0", "mlx-cpu": "0.32.4"}}, {"mlx": "golden 0.32.4, running 0.33.0"}),
        ({"packages": {"mlx": "0.32.4"}}, {"mlx-cpu": "golden 0.32.4, running without it"}),
        ({"platform": "darwin-arm64-metal"}, {"platform": "golden linux-x86_64-cpu, running darwin-arm64-metal"}),
        ({"device": "gpu"}, {"device": "golden cpu, running gpu"}),
    ],
)
def test_other_ground_makes_a_golden_stale_even_with_equal_bits(
    ask: Callable[..., Verdict], running: dict[str, Any], told: dict[str, str]
) -> None:
    verdict = ask(running=running)

    assert (verdict.status, verdict.facts) == (Status.STALE_GOLDEN, told)
    assert verdict.what == "golden of toy/f32/fp/greedy/p3-whole is stale"
    assert verdict.next_step == "restore what changed, or assay record 'toy/f32/fp/greedy/p3-whole'"


def test_another_oracle_package_is_no_ground_of_the_engine(ask: Callable[..., Verdict]) -> None:
    assert ask(running={"packages": {"mlx": "0.32.4", "mlx-cpu": "0.32.4"}}).status is Status.IDENTICAL


def test_another_case_makes_a_golden_stale_and_says_what_changed(
    ask: Callable[..., Verdict], make_case: Callable[..., Case]
) -> None:
    verdict = ask(case=make_case(kv=KV(bits=8), prompt_ids=(1, 2, 4)))

    assert verdict.status is Status.STALE_GOLDEN
    assert str(verdict.facts["case"]).splitlines() == [
        "prompt_ids: golden [1, 2, 3], case [1, 2, 4]",
        "kv: golden fp, case kv8-g64",
    ]


def test_another_snapshot_makes_a_golden_stale_and_names_both_digests(
    ask: Callable[..., Verdict], make_snapshot: Callable[..., Snapshot]
) -> None:
    old = make_snapshot().files["model.safetensors"]
    other = make_snapshot(name="other", weights=b"weightt")

    verdict = ask(snapshot=other)

    assert verdict.status is Status.STALE_GOLDEN
    new = other.files["model.safetensors"]
    assert verdict.facts == {"snapshot": f"model.safetensors: golden {old}, on disk {new}"}


def test_another_c_library_is_told_beside_a_difference(ask: Callable[..., Verdict], trace: Trace, flip: Any) -> None:
    verdict = ask({"logits/0": flip(trace.tensors["logits/0"])}, running={"libc": "glibc 2.41"})

    assert verdict.facts["C library"] == ("golden glibc 2.36, running glibc 2.41: tanh, erf and log1p may differ")
    assert ask(running={"libc": "glibc 2.41"}).status is Status.IDENTICAL


def test_a_large_row_is_described_by_its_sketch(ask: Callable[..., Verdict], large: Trace, flip: Any) -> None:
    row = large.tensors["logits/1"]
    best = int(row.values().argmax())

    verdict = ask({"logits/1": flip(row, best, 1)}, vocabulary=2000, modules=())

    assert (verdict.status, verdict.first_step, verdict.diffs) == (Status.DIFFERENT, 1, {})
    sampled = len({*top_ids(row).tolist(), *strided_ids(2000).tolist()})
    told = f"1 of {sampled} sampled elements differ, at most 2 ULP; top-1 agrees, margin"
    assert str(verdict.facts["sketch"]).startswith(told)


def test_a_difference_between_the_samples_is_still_different(
    ask: Callable[..., Verdict], large: Trace, flip: Any
) -> None:
    row = large.tensors["logits/0"]
    sampled = {*top_ids(row).tolist(), *strided_ids(2000).tolist()}
    worst = next(i for i in range(2000) if i not in sampled)

    verdict = ask({"logits/0": flip(row, worst, 0)}, vocabulary=2000, modules=())

    assert verdict.status is Status.DIFFERENT
    assert str(verdict.facts["sketch"]).startswith(f"0 of {len(sampled)} sampled elements differ;")


def test_a_flipped_digest_of_a_sketched_row_is_different(ask: Callable[..., Verdict]) -> None:
    def rot(golden: Golden) -> Golden:
        first, *rest = golden.entries
        flipped = f"{int(first.digest[0], 16) ^ 1:x}{first.digest[1:]}"
        return replace(golden, entries=(replace(first, digest=flipped), *rest))

    verdict = ask(vocabulary=2000, modules=(), golden=rot)

    assert (verdict.status, verdict.differing) == (Status.DIFFERENT, ("logits/0",))
    assert re.match(r"0 of \d+ sampled elements differ; top-1 agrees", str(verdict.facts["sketch"]))


def test_stored_rows_describe_a_large_row_in_full(ask: Callable[..., Verdict], large: Trace, flip: Any) -> None:
    changed = {"logits/2": flip(large.tensors["logits/2"], 1999, 0)}

    verdict = ask(changed, vocabulary=2000, modules=(), stored_rows=lambda: large.tensors)

    assert verdict.diffs["logits/2"].match is Match.DIFFERENT
    assert str(verdict.facts["first"]).startswith("[0, 1999]: expected 0x")
    assert "sketch" not in verdict.facts


def test_stored_rows_are_not_asked_for_while_digests_agree(ask: Callable[..., Verdict]) -> None:
    def never() -> None:
        raise AssertionError("asked")

    assert ask(vocabulary=2000, modules=(), stored_rows=never).status is Status.IDENTICAL
