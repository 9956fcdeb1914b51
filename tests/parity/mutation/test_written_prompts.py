import pytest

from parity.errors import UsageError
from parity.mutation.catalogue import FAULTS
from parity.mutation.trial import try_fault
from parity.mutation.written_prompts import PREFIX, difference

TEXT = [fault for fault in FAULTS if fault.cases[0].startswith(PREFIX)]


@pytest.mark.model
@pytest.mark.parametrize("name", ["ship", "capital", "forest"])
def test_a_written_prompt_is_what_its_text_gives(name: str) -> None:
    assert difference(f"prompts/smollm2/{name}/smollm2-135m") is None


@pytest.mark.model
def test_faults_of_text_are_seen_and_told_apart() -> None:
    outcomes = [try_fault(fault) for fault in TEXT[::3]]

    assert len(outcomes) >= 6
    assert [outcome.fault for outcome in outcomes if not outcome.localised or outcome.false_alarm] == []


def test_a_prompt_that_is_not_written_is_told() -> None:
    with pytest.raises(UsageError, match=r"no written prompt of this name\n  file    smollm2.toml\n  prompt  sheep\n"):
        difference("prompts/smollm2/sheep/smollm2-135m")
