"""The engine on sampler cases of mlx-optiq's chain, judged by the committed goldens; and faults that the judge must see."""

from collections.abc import Callable
from dataclasses import replace

import mlx.core as mx
import pytest

from engine.sampling import filters, optiq_chain
from parity.engine_runner import EngineRunner
from parity.golden import GOLDENS, Golden
from parity.judge import judge
from parity.platform_key import platform_key
from parity.snapshot import NO_MODEL
from parity.verdict import Status, Verdict
from tests.engine.families.committed_golden import needs_goldens

FOLDERS = list(GOLDENS.glob(f"mlx-optiq-*/{platform_key()}/samplers/optiq"))
pytestmark = needs_goldens


def verdict(name: str) -> Verdict:
    expected = Golden.load(FOLDERS[0] / f"{name}.json")
    trace = EngineRunner().run(expected.case, NO_MODEL)
    return judge(expected.case, expected, trace, snapshot=NO_MODEL, provenance=replace(expected.provenance))


@pytest.mark.parametrize(
    "name",
    [
        "t07-ties/f32/b1/s0",
        "top-p09-ties/bf16/b1/s42",
        "top-p09-spread/f32/b1/s0",
        "top-k3-masked/bf16/b1/s0",
        "min-p005-flat/f32/b1/s0",
        "all-ties/bf16/b1/s8589934593",
    ],
)
def test_the_engine_answers_as_the_oracle_did(name: str) -> None:
    judged = verdict(name)
    assert judged.status is Status.IDENTICAL, judged.message()


def _walk_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    true = optiq_chain.draw
    monkeypatch.setattr(optiq_chain, "draw", lambda row, key: true(row.reshape(1, -1), key)[0])


def _filters_before_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    def filtered(rows: mx.array, chain: optiq_chain.OptiqChain) -> mx.array:
        return filters.top_p(rows, chain.top_p) / chain.temperature

    monkeypatch.setattr(optiq_chain, "filtered", filtered)


def _other_rule_of_top_p(monkeypatch: pytest.MonkeyPatch) -> None:
    true = filters.top_p
    monkeypatch.setattr(filters, "top_p", lambda rows, p: true(rows, p, rule="mass-below"))


def _one_more_of_top_k(monkeypatch: pytest.MonkeyPatch) -> None:
    true = filters.top_k
    monkeypatch.setattr(filters, "top_k", lambda rows, k: true(rows, k + 1))


@pytest.mark.parametrize(
    ("name", "plant"),
    [
        ("t07-ties/f32/b1/s42", _walk_the_sum),
        ("top-p09-ties/f32/b1/s0", _filters_before_temperature),
        ("top-p09-ties/f32/b1/s0", _other_rule_of_top_p),
        ("top-k3-spread/f32/b1/s0", _one_more_of_top_k),
        ("top-k40-ties/bf16/b1/s0", _one_more_of_top_k),
    ],
)
def test_a_planted_fault_is_seen(
    monkeypatch: pytest.MonkeyPatch, name: str, plant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    plant(monkeypatch)
    judged = verdict(name)
    assert judged.status is Status.DIFFERENT
    assert judged.what == f"token ids of samplers/optiq/{name} are not bit-identical to mlx-optiq 0.7.7"
