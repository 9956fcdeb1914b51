from collections.abc import Callable
from pathlib import Path

import pytest

from parity.deviations import Deviation, OracleFact, apply, load_deviations, load_oracle_facts, unmatched
from parity.errors import CaseError
from parity.verdict import Status, Verdict

ENTRY = Deviation(
    pattern="toy/bf16/*", side="oracle", reason="rounds twice", evidence="a test shows it", link="issue 7"
)
TEXT = """
[[deviation]]
pattern = "toy/bf16/*"
side = "oracle"
reason = "rounds twice"
evidence = "a test shows it"
link = "issue 7"
"""


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        file = tmp_path / "deviations.toml"
        file.write_text(text)
        return file

    return write


def verdict(status: Status, name: str = "toy/bf16/x") -> Verdict:
    return Verdict(name=name, status=status, what="said", facts={"step": "1 of 3"}, next_step="look")


def test_a_listed_difference_is_a_known_deviation_with_its_reason() -> None:
    known = apply([ENTRY], verdict(Status.DIFFERENT))

    assert known.passes
    assert known.message().splitlines() == [
        "toy/bf16/x differs as known",
        "  step      1 of 3",
        "  pattern   toy/bf16/*",
        "  side      oracle",
        "  reason    rounds twice",
        "  evidence  a test shows it",
        "  link      issue 7",
    ]


def test_a_listed_case_that_is_identical_fails_as_fixed() -> None:
    fixed = apply([ENTRY], verdict(Status.IDENTICAL))

    assert (fixed.status, fixed.passes) == (Status.FIXED, False)
    assert fixed.message().splitlines()[0] == "toy/bf16/x is listed as a known deviation and is bit-identical"
    assert fixed.next_step == "remove the entry from parity/deviations.toml, or narrow its pattern"


@pytest.mark.parametrize("status", sorted(set(Status) - {Status.DIFFERENT, Status.IDENTICAL}, key=str))
def test_no_other_verdict_is_excused(status: Status) -> None:
    assert apply([ENTRY], verdict(status)) == verdict(status)


@pytest.mark.parametrize("status", [Status.DIFFERENT, Status.IDENTICAL])
def test_a_case_that_no_entry_matches_keeps_its_verdict(status: Status) -> None:
    assert apply([ENTRY], verdict(status, "toy/f32/x")) == verdict(status, "toy/f32/x")


def test_an_entry_that_no_case_matches_fails() -> None:
    (stray,) = unmatched([ENTRY], ["toy/f32/x"])

    assert not stray.passes
    assert stray.what == "the known deviation 'toy/bf16/*' matches no case"
    assert unmatched([ENTRY], ["toy/f32/x", "toy/bf16/x"]) == ()


def test_an_entry_is_read_as_it_is_written(write: Callable[[str], Path]) -> None:
    assert load_deviations(write(TEXT)) == (ENTRY,)
    assert load_deviations(write("# none\n")) == ()


def test_the_committed_list_is_valid() -> None:
    assert all(entry.evidence for entry in load_deviations())


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        pytest.param(TEXT.replace('link = "issue 7"', ""), "where", id="missing"),
        pytest.param(TEXT + 'ulp = "4"\n', "where", id="no-tolerance-can-be-written"),
        pytest.param(TEXT.replace('"rounds twice"', '" "'), "reason must be a sentence", id="empty"),
        pytest.param(TEXT.replace('"issue 7"', "7"), "link must be a sentence", id="number"),
        pytest.param(TEXT.replace('"oracle"', '"engine"'), "faults of the engine are mended", id="engine"),
        pytest.param("deviation = 3\n", "write [[deviation]] and [[oracle_fact]] tables", id="no-table"),
        pytest.param("other = 3\n", "unknown other", id="unknown"),
        pytest.param("[[deviation]\n", "cannot be read", id="no-toml"),
    ],
)
def test_a_malformed_list_is_refused_with_the_reason(write: Callable[[str], Path], text: str, fault: str) -> None:
    with pytest.raises(CaseError, match=r"deviations\.toml") as error:
        load_deviations(write(text))

    assert fault in str(error.value)


def test_a_missing_list_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CaseError, match="cannot be read"):
        load_deviations(tmp_path / "deviations.toml")


FACT = OracleFact(
    name="window_ignored",
    oracle="mlx-lm",
    version="0.32.2",
    side="oracle",
    what="it is not read",
    right="a window",
    link="not reported",
)
FACT_TEXT = """
[[oracle_fact]]
name = "window_ignored"
oracle = "mlx-lm"
version = "0.32.2"
side = "oracle"
what = "it is not read"
right = "a window"
link = "not reported"
"""


def test_a_fact_is_read_as_it_is_written_and_is_no_deviation(write: Callable[[str], Path]) -> None:
    file = write(TEXT + FACT_TEXT)
    assert load_oracle_facts(file) == (FACT,)
    assert load_deviations(file) == (ENTRY,)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        pytest.param(FACT_TEXT.replace('right = "a window"', ""), "where", id="missing"),
        pytest.param(FACT_TEXT + 'pattern = "*"\n', "where", id="no-pattern-can-be-written"),
        pytest.param(FACT_TEXT.replace('"a window"', '""'), "right must be a sentence", id="empty"),
        pytest.param(
            FACT_TEXT.replace('"oracle"\nwhat', '"engine"\nwhat'), "faults of the engine are mended", id="engine"
        ),
        pytest.param(FACT_TEXT * 2, "mlx-lm has two facts named window_ignored", id="twice"),
    ],
)
def test_a_malformed_fact_is_refused_with_the_reason(write: Callable[[str], Path], text: str, fault: str) -> None:
    with pytest.raises(CaseError, match=r"deviations\.toml") as error:
        load_oracle_facts(write(text))

    assert fault in str(error.value)
