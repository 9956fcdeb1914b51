"""Nothing with terms of use is had before somebody accepted exactly those terms on this machine."""

from dataclasses import replace
from pathlib import Path

import pytest

from parity.errors import SnapshotError
from parity.models.terms import Terms, accept, check_accepted, is_accepted

TERMS = Terms(title="Toy Terms", address="toy.example/terms", restrictions="toy.example/not", version="1 May 2020")


def test_terms_that_nobody_accepted_are_named(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError) as caught:
        check_accepted("toy", TERMS, tmp_path)
    assert str(caught.value) == (
        "snapshot 'toy' has terms of use that nobody has accepted on this machine\n"
        "  terms      Toy Terms, version of 1 May 2020: toy.example/terms\n"
        "  forbidden  the uses listed at toy.example/not\n"
        "  next       read them, then assay models fetch toy --accept-terms"
    )


def test_acceptance_is_remembered_for_that_snapshot_and_those_terms(tmp_path: Path) -> None:
    accept("toy", TERMS, tmp_path)
    check_accepted("toy", TERMS, tmp_path)
    assert not is_accepted("other", TERMS, tmp_path)
    assert not is_accepted("toy", replace(TERMS, version="2 May 2020"), tmp_path)


@pytest.mark.parametrize("damage", ["", "{", "null"])
def test_a_damaged_record_accepts_nothing(tmp_path: Path, damage: str) -> None:
    accept("toy", TERMS, tmp_path)
    (tmp_path / "terms" / "toy.json").write_text(damage)
    assert not is_accepted("toy", TERMS, tmp_path)


def test_the_notice_names_terms_and_restrictions() -> None:
    assert TERMS.notice("toy") == (
        "toy is subject to the Toy Terms (toy.example/terms, version of 1 May 2020), which forbid the uses listed at "
        "toy.example/not and bind whoever the weights are passed on to."
    )
