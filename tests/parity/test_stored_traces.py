import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from parity.case import Case
from parity.errors import UsageError
from parity.snapshot import Snapshot
from parity.stored_traces import StoredTraces
from parity.trace import Trace

SAID = {"platform": "linux-x86_64-cpu", "device": "cpu", "packages": {"mlx": "0.32.4"}}


def test_a_trace_is_read_by_the_name_of_its_case(
    make_case: Callable[..., Case],
    make_trace: Callable[..., Trace],
    make_snapshot: Callable[..., Snapshot],
    tmp_path: Path,
) -> None:
    case = make_case()
    trace = make_trace(case)
    trace.save(tmp_path / case.name)

    assert StoredTraces(folder=tmp_path).run(case, make_snapshot()) == trace


def test_a_trace_that_is_not_there_is_an_error_of_its_case(
    make_case: Callable[..., Case], make_snapshot: Callable[..., Snapshot], tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as refused:
        StoredTraces(folder=tmp_path).run(make_case(), make_snapshot())

    assert str(refused.value).splitlines()[0] == f"there is no trace of {make_case().name}"


def test_a_provenance_needs_no_more_than_a_golden_is_compared_by(tmp_path: Path) -> None:
    (tmp_path / "provenance.json").write_text(json.dumps(SAID))

    said = StoredTraces(folder=tmp_path).provenance()

    assert (said.platform, said.device, dict(said.packages)) == ("linux-x86_64-cpu", "cpu", {"mlx": "0.32.4"})
    assert (said.libc, dict(said.digests)) == ("not said", {})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "it cannot be read (No such file or directory)"),
        ("{", "not JSON: "),
        ("[]", "a list where an object belongs"),
        (json.dumps({**SAID, "gpu": 1}), "lacking: nothing; unknown: gpu"),
        (json.dumps({"platform": "x"}), "lacking: device, packages; unknown: nothing"),
    ],
)
def test_a_provenance_that_says_too_little_or_something_unknown_is_refused(
    text: str | None, reason: str, tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / "provenance.json").write_text(text)

    with pytest.raises(UsageError) as refused:
        StoredTraces(folder=tmp_path).provenance()

    assert str(refused.value).startswith("the traces do not say what they rest on: provenance.json")
    assert reason in str(refused.value)


def test_it_is_its_own_factory_and_equal_to_itself_in_another_process(tmp_path: Path) -> None:
    stored: Any = StoredTraces(folder=tmp_path)

    assert stored() is stored
    assert hash(stored) == hash(StoredTraces(folder=tmp_path))
