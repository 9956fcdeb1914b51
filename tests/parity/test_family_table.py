"""The table of families is read from cases and verdicts, and README holds the one that they give."""

from pathlib import Path

import pytest

from parity.case import KV, Case, Feed
from parity.errors import UsageError
from parity.family_table import BEGIN, END, Judged, belongs, family_table, model_type, replace_block
from parity.golden import GOLDENS, Golden, golden_path
from parity.golden_folder import golden_version
from parity.matrix import load_cases
from parity.opt_in import choose

ROOT = Path(__file__).resolve().parent.parent.parent
PLATFORM = "linux-x86_64-cpu"  # the README's table is that of the committed goldens


def judged(snapshot: str, *, cache: tuple[str, ...] = ("plain",), status: str = "IDENTICAL", kv: str = "fp") -> Judged:
    case = Case(
        name=f"{snapshot}/f32/{kv}",
        snapshot=snapshot,
        dtype="f32",
        prompt_ids=(1,),
        forced_ids=None,
        feed=Feed.parse("chunk7"),
        kv=KV.parse(kv),
        num_steps=1,
    )
    return Judged(case=case, cache=cache, status=status)


def test_a_row_collects_what_its_cases_have() -> None:
    table = family_table(
        [
            judged("llama-tiny", kv="kv8-g64", cache=("quantized-b8-g64", "rotating-w16-k0")),
            judged("llama-q4g32-tiny", cache=("list[plain,plain]", "arrays-2")),
            judged("smollm2-135m", status="DIFFERENT"),
        ]
    )

    (row,) = table.splitlines()[2:]
    assert row.strip("| ").split(" | ") == [
        "llama",
        "quantized, rotating, list[plain,plain], recurrent, plain",
        "tiny, q4g32, **smollm2-135m**",
        "f32",
        "kv8-g64, fp",
        "chunked",
        "2 IDENTICAL, 1 DIFFERENT",
    ]


def test_families_are_told_by_the_config_not_by_the_name() -> None:
    assert model_type("llama_sliding-tiny") == "llama"
    assert model_type("smollm2-135m-q4") == "llama"


def test_only_the_block_between_the_markers_changes() -> None:
    assert replace_block(f"a\n{BEGIN}\nold\n{END}\nb", "new") == f"a\n{BEGIN}\nnew\n{END}\nb"


@pytest.mark.parametrize("text", ["", BEGIN, f"{END}\n{BEGIN}", f"{BEGIN}\n{END}\n{BEGIN}\n{END}"])
def test_a_file_without_one_place_for_it_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="no place for the table of families"):
        replace_block(text, "new")


def test_the_readme_holds_the_table_that_cases_and_goldens_give() -> None:
    version = golden_version("mlx-lm", GOLDENS, PLATFORM)
    assert version is not None
    every = [
        Judged(
            case=case,
            cache=Golden.load(golden_path(case, version=version, platform=PLATFORM)).cache,
            status="IDENTICAL",
        )
        for case in choose(load_cases(), None).cases
        if belongs(case)
    ]

    assert f"{BEGIN}\n{family_table(every)}\n{END}" in (ROOT / "README.md").read_text(encoding="utf-8")
