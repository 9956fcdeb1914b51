"""The engine on sampler cases, judged by the committed goldens; and faults that the judge must see."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.errors import RequestError
from engine.sampling import chain, filters, processors
from parity import sampler_engine
from parity.case import KV, Case, Feed
from parity.engine_runner import EngineRunner
from parity.errors import GoldenError
from parity.golden import GOLDENS, Golden
from parity.judge import judge
from parity.logit_rows import generated_rows, rounded
from parity.platform_key import platform_key
from parity.sampled_trace import UNIFORMS, XTC_UNIFORMS
from parity.sampling import Sampling, read_options
from parity.snapshot import NO_MODEL
from parity.tensor import Tensor
from parity.trace import TOKEN_IDS, Trace
from parity.verdict import Status, Verdict
from tests.engine.families.committed_golden import needs_goldens

FOLDERS = list(GOLDENS.glob(f"mlx-lm-*/{platform_key()}/samplers/mlx-lm"))


def warm_case() -> Any:
    asked = Sampling(
        chain="mlx-lm", options=read_options({"temperature": 1.0}), rows="flat", num_rows=1, batch=1, seed=0
    )
    return Case(
        name="samplers/mlx-lm/warm-flat/f32/b1/s0",
        snapshot=NO_MODEL.name,
        dtype="f32",
        prompt_ids=(1,),
        forced_ids=None,
        feed=Feed(mode="tail-split"),
        kv=KV(),
        num_steps=5,
        sampling=asked,
    )


def golden(name: str) -> Golden:
    return Golden.load(FOLDERS[0] / f"{name}.json")


def verdict(expected: Golden, trace: Trace) -> Verdict:
    return judge(expected.case, expected, trace, snapshot=NO_MODEL, provenance=replace(expected.provenance))


def run(expected: Golden) -> Trace:
    return EngineRunner().run(expected.case, NO_MODEL)


@needs_goldens
@pytest.mark.parametrize(
    "name",
    [
        "t07-ties/f32/b1/s0",
        "penalties-ties/bf16/b3/s42",
        "all-masked/f32/b3/s0",
        "xtc-ties/bf16/b1/s8589934593",
        "top-k3-flat/bf16/b3/s0",
        "min-p005-one-hot/f32/b1/s0",
    ],
)
def test_the_engine_answers_as_the_oracle_did(name: str) -> None:
    expected = golden(name)
    judged = verdict(expected, run(expected))
    assert judged.status is Status.IDENTICAL, judged.message()


def _shifted_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    true = chain.draw
    monkeypatch.setattr(chain, "draw", lambda rows, key: true(rows * 1.01, key))


def _other_rule_of_top_p(monkeypatch: pytest.MonkeyPatch) -> None:
    true = filters.top_p
    monkeypatch.setattr(filters, "top_p", lambda rows, p, **_rule: true(rows, p, rule="mass-below"))


def _xtc_without_specials(monkeypatch: pytest.MonkeyPatch) -> None:
    true = filters.xtc
    monkeypatch.setattr(filters, "xtc", lambda rows, u, **options: true(rows, u, **{**options, "special": ()}))


def _window_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    true = processors.window
    monkeypatch.setattr(processors, "window", lambda history, size: true(history, size + 1 if size else 0))


def _presence_by_occurrence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processors, "presence", processors.frequency)


def _draw_before_xtc(monkeypatch: pytest.MonkeyPatch) -> None:
    class Swapped(sampler_engine.SequentialKeys):
        def take(self, count: int) -> Any:
            keys, after = super().take(count)
            return keys[::-1], Swapped(state=after.state)

    monkeypatch.setattr(sampler_engine, "SequentialKeys", Swapped)


@needs_goldens
@pytest.mark.parametrize(
    ("name", "plant"),
    [
        ("t07-ties/f32/b1/s42", _shifted_temperature),
        ("t07-ties/f32/b3/s42", _shifted_temperature),
        ("top-p09-ties/f32/b1/s0", _other_rule_of_top_p),
        ("xtc-special-ties/f32/b1/s42", _xtc_without_specials),
        ("penalties-ties/f32/b1/s0", _window_off_by_one),
        ("penalties-ties/f32/b1/s0", _presence_by_occurrence),
        ("xtc-ties/f32/b1/s0", _draw_before_xtc),
    ],
)
def test_a_planted_fault_is_seen(
    monkeypatch: pytest.MonkeyPatch, name: str, plant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    expected = golden(name)
    plant(monkeypatch)
    judged = verdict(expected, run(expected))
    assert judged.status is Status.DIFFERENT
    assert judged.what == f"token ids of samplers/mlx-lm/{name} are not bit-identical to mlx-lm 0.32.2"


@needs_goldens
def test_the_message_names_draw_element_ids_and_uniforms() -> None:
    expected = golden("xtc-ties/f32/b3/s0")
    ids = np.array(expected.token_ids, "<i4")
    ids[7] += 1  # draw 2, element 1
    trace = Trace(tensors={**expected.tensors, TOKEN_IDS: Tensor.of(ids)})

    judged = verdict(expected, Trace(tensors={name: trace.tensors[name] for name in expected.digests}))

    uniform = expected.tensors[UNIFORMS].values()[2, 1]
    xtc = expected.tensors[XTC_UNIFORMS].values()[2]
    assert judged.first_step == 2
    assert judged.message().splitlines() == [
        "token ids of samplers/mlx-lm/xtc-ties/f32/b3/s0 are not bit-identical to mlx-lm 0.32.2",
        "  step          2 of 100",
        f"  first         expected {ids[7] - 1}, actual {ids[7]}",
        "  element       1 of a batch of 3",
        f"  uniforms      both {uniform}",
        f"  xtc uniforms  both {xtc}",
        "  next          assay check 'samplers/mlx-lm/xtc-ties/f32/b3/s0' --traces traces, then assay diff",
    ]


@needs_goldens
def test_uniforms_that_differ_alone_are_told_with_their_draw() -> None:
    expected = golden("t07-ties/f32/b3/s0")
    words = expected.tensors[UNIFORMS].bits().copy()
    words[5, 2] ^= 1
    changed = Tensor.of(words, dtype="F32")
    trace = Trace(tensors={n: changed if n == UNIFORMS else expected.tensors[n] for n in expected.digests})

    judged = verdict(expected, trace)

    assert (judged.status, judged.first_step) == (Status.DIFFERENT, 5)
    assert judged.what.startswith("uniforms of samplers/")
    assert "1 of 300 elements, at most 1 ULP" in judged.message()


@needs_goldens
def test_rows_that_differ_are_told_before_the_ids() -> None:
    expected = golden("t07-ties/f32/b1/s0")
    words = expected.tensors["logits/2"].bits().copy()
    words[0, 9] ^= 1
    changed = Tensor.of(words, dtype="F32")
    trace = Trace(tensors={n: changed if n == "logits/2" else expected.tensors[n] for n in expected.digests})
    judged = verdict(expected, trace)
    assert (judged.status, judged.first_step) == (Status.DIFFERENT, 2)
    assert judged.what.startswith("logits of samplers/")


@needs_goldens
def test_a_golden_of_draws_keeps_no_rows_and_is_refused_when_rotten(tmp_path: Path) -> None:
    expected = golden("t07-model/f32/b1/s0")
    assert expected.form == "draws"
    assert set(expected.tensors) == {UNIFORMS, TOKEN_IDS}
    file = tmp_path / "s0.json"
    expected.save(file)
    assert Golden.load(file) == expected
    words = expected.tensors[UNIFORMS].bits().copy()
    words[3, 0] ^= 1
    changed = Tensor.of(words, dtype="F32")
    tensors = {**expected.tensors, UNIFORMS: changed}
    replace(expected, tensors=tensors, side={**expected.side, UNIFORMS: changed.digest}).save(file)
    with pytest.raises(GoldenError, match="the list of entries and the side file's digests disagree"):
        Golden.load(file)


def test_a_row_without_probabilities_is_refused() -> None:
    rows = np.full((1, 8), np.nan, np.float32)
    case = warm_case()
    with pytest.raises(RequestError, match="row 0 of the logits holds NaN"):
        sampler_engine.run_sampler_case(case, case.sampling, rounded(rows, "f32"))


def test_the_rows_stay_as_they_are() -> None:
    rows = rounded(generated_rows("spread", 1), "f32")
    before = rows[0].data
    case = warm_case()
    trace = sampler_engine.run_sampler_case(case, case.sampling, rows)
    assert trace.logits(0).data == before
    assert len(trace.token_ids) == 5
