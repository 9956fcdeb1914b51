"""Sampler cases of mlx-optiq's chain: who answers them, what they may not ask, and what their goldens rest on."""

from pathlib import Path
from typing import Any

import pytest

from parity.errors import CaseError
from parity.golden import GOLDENS, Golden
from parity.matrix import load_cases
from parity.sampling import Sampling

FILE = """
[prompt.p1]
ids = [0]

[[matrix]]
snapshot = ["toy"]
dtype = ["f32"]
kv = ["fp"]
drive = ["greedy"]
prompt = ["p1"]
feed = ["whole"]
num_steps = 2

[options.cut]
temperature = 1.0
top_p = 0.9

[[sampler]]
chain = "optiq"
options = ["cut"]
rows = ["ties"]
dtype = ["f32"]
batch = [1]
seed = [0]
prompt = "p1"
num_rows = 4
num_steps = 100
"""
JSON: dict[str, Any] = {
    "chain": "optiq",
    "options": {"temperature": 1.0},
    "rows": "ties",
    "num_rows": 4,
    "batch": 1,
    "seed": 0,
}
CASES = [case for case in load_cases() if case.oracle == "mlx-optiq" and case.sampling is not None]
PLATFORM = "linux-x86_64-cpu"
(FOLDER,) = GOLDENS.glob(f"mlx-optiq-*/{PLATFORM}")
(MLX_LM,) = GOLDENS.glob(f"mlx-lm-*/{PLATFORM}")


def test_the_chain_names_its_oracle_and_its_tier(tmp_path: Path) -> None:
    (tmp_path / "toy.toml").write_text(FILE)
    _, case = load_cases(tmp_path)
    assert (case.name, case.oracle, case.tier) == ("samplers/optiq/cut-ties/f32/b1/s0", "mlx-optiq", "L2")
    (tmp_path / "toy.toml").write_text(FILE.replace('"optiq"', '"mlx-lm"'))
    _, case = load_cases(tmp_path)
    assert (case.name, case.oracle, case.tier) == ("samplers/mlx-lm/cut-ties/f32/b1/s0", "mlx-lm", "L1")


@pytest.mark.parametrize(
    ("was", "now", "key", "reason"),
    [
        ("batch = [1]", "batch = [1, 3]", "batch", "the chain optiq draws one row at a time, not 3"),
        (
            "top_p = 0.9",
            "xtc_probability = 0.5",
            "options",
            "the chain optiq has no xtc_probability; it has min_p, temperature, top_k, top_p",
        ),
    ],
)
def test_what_the_chain_lacks_is_refused_with_file_table_and_key(
    tmp_path: Path, was: str, now: str, key: str, reason: str
) -> None:
    (tmp_path / "toy.toml").write_text(FILE.replace(was, now))
    with pytest.raises(CaseError) as refused:
        load_cases(tmp_path)
    facts = refused.value.facts
    assert (facts["file"], facts["table"], facts["key"]) == ("toy.toml", "[[sampler]] at line 18", key)
    assert facts["reason"] == reason
    (tmp_path / "toy.toml").write_text(FILE.replace(was, now).replace('"optiq"', '"mlx-lm"'))
    assert len(load_cases(tmp_path)) == (3 if key == "batch" else 2), "mlx-lm's chain can do it"


@pytest.mark.parametrize("change", [{"batch": 2}, {"options": {"temperature": 1.0, "logit_bias": {"3": 1.0}}}])
def test_a_manifest_that_asks_what_the_chain_lacks_is_refused(change: dict[str, Any]) -> None:
    assert Sampling.from_json(JSON).to_json() == JSON
    with pytest.raises(CaseError, match="the chain optiq") as refused:
        Sampling.from_json({**JSON, **change})
    assert refused.value.what == "unknown draw of a chain 'optiq'"


def test_the_committed_cases_cover_options_rows_dtypes_and_seeds() -> None:
    asked = [(case, case.sampling) for case in CASES if case.sampling is not None]
    assert len(asked) >= 40
    assert all(case.num_steps == 100 and case.tier == "L2" for case, _ in asked)
    assert {case.dtype for case, _ in asked} == {"f32", "bf16"}
    assert {one.seed for _, one in asked} == {0, 42, 2**33 + 1}
    assert {one.rows for _, one in asked} == {"model", "ties", "flat", "masked", "one-hot", "spread"}
    assert {name for _, one in asked for name in one.named} == {"temperature", "top_k", "top_p", "min_p"}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_golden_names_its_patch_set_and_versions(case: Any) -> None:
    golden = Golden.load(FOLDER / f"{case.name}.json")
    assert golden.case == case
    assert golden.provenance.switches == {"MLX_DISABLE_COMPILE": "1", "patches": "import optiq"}
    assert golden.provenance.packages == {
        "mlx": "0.32.4",
        "mlx-cpu": "0.32.4",
        "mlx-lm": "0.32.2",
        "mlx-optiq": "0.7.7",
    }


def test_the_rows_that_it_draws_from_are_those_that_mlx_lm_alone_computes() -> None:
    theirs = Golden.load(FOLDER / "smollm2-135m/f32/fp/greedy/harbour-optiq-tail-split.json")
    alone = Golden.load(MLX_LM / "smollm2-135m/f32/fp/greedy/harbour-tail-split.json")
    drawn = Golden.load(FOLDER / "samplers/optiq/all-model/f32/b1/s0.json")
    assert theirs.digests == alone.digests
    rows = [name for name in alone.digests if name.startswith("logits/")]
    assert len(rows) == 4
    assert [drawn.digests[name] for name in rows] == [alone.digests[name] for name in rows]


def test_it_is_another_function_than_mlx_lms_chain() -> None:
    optiq = Golden.load(FOLDER / "samplers/optiq/t07-ties/f32/b1/s0.json")
    mlx_lm = Golden.load(MLX_LM / "samplers/mlx-lm/t07-ties/f32/b1/s0.json")
    assert optiq.digests["logits/0"] == mlx_lm.digests["logits/0"]
    assert optiq.token_ids != mlx_lm.token_ids
