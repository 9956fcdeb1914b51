"""`[[sampler]]` tables become cases, and malformed ones an error that names file, table and key."""

from collections.abc import Callable
from pathlib import Path

import pytest

from parity.errors import CaseError
from parity.matrix import load_cases, placed_cases
from parity.snapshot import NO_MODEL

HEAD = """
[prompt.p3]
ids = [5, 6, 7]

[[matrix]]
snapshot = ["toy"]
dtype = ["f32"]
kv = ["fp"]
drive = ["greedy"]
prompt = ["p3"]
feed = ["whole"]
num_steps = 2

[options.warm]
temperature = 0.7

[options.cut]
temperature = 1.0
top_p = 0.9
"""
SAMPLER = """
[[sampler]]
chain = "mlx-lm"
options = ["warm", "cut"]
rows = ["ties"]
dtype = ["f32", "bf16"]
batch = [1, 3]
seed = [0, 8589934593]
prompt = "p3"
num_rows = 4
num_steps = 100
"""
MODEL = SAMPLER.replace('["ties"]', '["model"]').replace('chain = "mlx-lm"', 'chain = "mlx-lm"\nsnapshot = "toy"')


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        (tmp_path / "toy.toml").write_text(text)
        return tmp_path

    return write


def test_a_table_multiplies_into_cases(write: Callable[[str], Path]) -> None:
    _, *cases = load_cases(write(HEAD + SAMPLER))

    assert len(cases) == 16
    assert cases[0].name == "samplers/mlx-lm/warm-ties/f32/b1/s0"
    assert cases[-1].name == "samplers/mlx-lm/cut-ties/bf16/b3/s8589934593"
    last = cases[-1]
    assert last.sampling is not None
    assert (last.snapshot, last.sampler, last.dtype) == (NO_MODEL.name, "mlx-lm/cut-ties", "bf16")
    assert (last.num_steps, last.num_rows, last.num_ids, last.prompt_ids) == (100, 4, 300, (5, 6, 7))
    assert (last.sampling.batch, last.sampling.seed) == (3, 8589934593)
    assert last.sampling.named == {"temperature": 1.0, "top_p": 0.9}


def test_rows_of_a_model_name_its_snapshot(write: Callable[[str], Path]) -> None:
    assert {case.snapshot for case in load_cases(write(HEAD + MODEL))} == {"toy"}


def test_a_case_knows_its_line(write: Callable[[str], Path]) -> None:
    _, (_, place), *_ = placed_cases(write(HEAD + SAMPLER))
    assert (place.file, place.line) == ("toy.toml", HEAD.count("\n") + 2)


@pytest.mark.parametrize(
    ("text", "table", "key", "reason"),
    [
        (SAMPLER.replace('"warm"', '"hot"'), "[[sampler]] at line 21", "options", "'hot' is none of warm, cut"),
        (SAMPLER.replace('"mlx-lm"', '"mlx"'), "[[sampler]] at line 21", "chain", "'mlx' is none of mlx-lm"),
        (SAMPLER.replace('"bf16"', '"int8"'), "[[sampler]] at line 21", "dtype", "'int8' is none of f32, bf16, f16"),
        (SAMPLER.replace("[1, 3]", "[0]"), "[[sampler]] at line 21", "batch", "at least 1 belongs here, not [0]"),
        (SAMPLER.replace("[0, 8589934593]", "[]"), "[[sampler]] at line 21", "seed", "at least 0 belongs here, not []"),
        (
            SAMPLER.replace("num_rows = 4", ""),
            "[[sampler]] at line 21",
            "num_rows",
            "at least 1 belongs here, not None",
        ),
        (SAMPLER + "top_p = 1\n", "[[sampler]] at line 21", "top_p", "unknown; known are options"),
        (SAMPLER.replace('"p3"', '"p4"'), "[[sampler]]", "prompt", "'p4' is none of p3"),
        (SAMPLER.replace('["ties"]', '["model"]'), "[[sampler]] at line 21", "snapshot", "where rows has 'model'"),
        (MODEL.replace('["model"]', '["flat"]'), "[[sampler]] at line 21", "snapshot", "and only there"),
        (SAMPLER.replace('["ties"]', '["tied"]'), "[[sampler]] at line 21", "rows", "'tied' is none of model, flat"),
        (SAMPLER.replace(', "cut"', ""), "[options.cut]", "cut", "no [[sampler]] uses these options"),
        (
            SAMPLER + "[options.odd]\ntop_q = 1\n",
            "[options.odd]",
            "odd",
            "unknown option 'top_q'; known: frequency_penalty",
        ),
        ("[sampler]\nchain = 1\n", "top level", "sampler", "[[sampler]] tables belong here"),
    ],
)
def test_a_malformed_table_is_refused_with_file_table_and_key(
    write: Callable[[str], Path], text: str, table: str, key: str, reason: str
) -> None:
    with pytest.raises(CaseError) as refused:
        load_cases(write(HEAD + text))
    assert refused.value.what == "a table of cases is malformed"
    assert refused.value.facts["file"] == "toy.toml"
    assert (refused.value.facts["table"], refused.value.facts["key"]) == (table, key)
    assert reason in str(refused.value.facts["reason"])


def test_full_rows_is_true_or_false(write: Callable[[str], Path]) -> None:
    with pytest.raises(CaseError, match="true or false belongs here, not 1"):
        load_cases(write(HEAD.replace("num_steps = 2", "num_steps = 2\nfull_rows = 1") + SAMPLER))
    first, *_ = load_cases(write(HEAD.replace("num_steps = 2", "num_steps = 2\nfull_rows = true") + SAMPLER))
    assert first.full_rows


def test_the_committed_samplers_cover_chain_option_dtype_batch_and_seed() -> None:
    cases = [case for case in load_cases() if case.sampling is not None]

    assert len(cases) >= 150
    asked = [case.sampling for case in cases if case.sampling is not None]
    assert {(case.dtype, one.batch) for case, one in zip(cases, asked, strict=True)} == {
        (dtype, batch) for dtype in ("f32", "bf16") for batch in (1, 3)
    }
    assert {one.seed for one in asked} == {0, 42, 2**33 + 1}
    assert {one.rows for one in asked} == {"model", "ties", "flat", "masked", "one-hot", "spread"}
    assert all(case.num_steps == 100 for case in cases)
    assert {name for one in asked for name in one.named} >= {
        "top_p",
        "min_p",
        "min_tokens_to_keep",
        "top_k",
        "xtc_probability",
        "xtc_special",
        "logit_bias",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "frequency_window",
    }
