import sys
from dataclasses import replace
from pathlib import Path

import pytest

from oracles.oracle_runner import OracleRunner
from parity.errors import OracleError
from parity.snapshot import Snapshot
from tests.oracles.shop import Shop, make_case


@pytest.fixture
def runner(shop: Shop) -> OracleRunner:
    return OracleRunner(oracle=shop.oracle, environment_of=lambda _: Path(sys.executable))


def snapshot_of(shop: Shop) -> Snapshot:
    return Snapshot(name="tiny", path=shop.snapshot, files={}, config={})


def test_cases_of_one_name_come_back_in_their_order(shop: Shop, runner: OracleRunner) -> None:
    cases = [replace(make_case("a"), prompt_ids=(1,) * length) for length in (1, 2, 3)]
    first = runner.run_all(cases, snapshot_of(shop))
    alone = [runner.run(case, snapshot_of(shop)) for case in cases]
    assert [trace.logits(0).digest for trace in first] == [trace.logits(0).digest for trace in alone]
    assert len({trace.logits(0).digest for trace in first}) == 3


def test_it_is_called_by_the_oracles_name_and_version(shop: Shop, runner: OracleRunner) -> None:
    assert runner.name == f"{shop.oracle.name} {shop.oracle.version}"
    with pytest.raises(NotImplementedError, match="comes with its traces"):
        runner.provenance()


def test_a_case_that_the_oracle_refuses_is_an_error_in_its_words(shop: Shop, runner: OracleRunner) -> None:
    (shop.snapshot / "fake.json").write_text('{"raise": ["a/1"]}')
    with pytest.raises(OracleError) as caught:
        runner.run_all([make_case("a"), make_case("a")], snapshot_of(shop))
    assert str(caught.value) == (
        f"{runner.name} does not run a\n"
        "  reason  NotImplementedError: this cache cannot be quantised\n"
        "  next    assay record 'a', which runs the case as it stands"
    )


def test_a_process_that_dies_is_an_error_with_its_last_words(shop: Shop, runner: OracleRunner) -> None:
    (shop.snapshot / "fake.json").write_text('{"die": ["a/0"]}')
    with pytest.raises(OracleError) as caught:
        runner.run(make_case("a"), snapshot_of(shop))
    assert str(caught.value).startswith(f"the process of {runner.name} died\n  code  -9\n  said  ")
    assert "last words" in str(caught.value)
