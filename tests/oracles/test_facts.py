import ast
from dataclasses import replace
from pathlib import Path

import pytest

from oracles.facts import ensure_snapshots, observe, told, try_facts
from oracles.registry import Oracle, find_oracle
from parity.deviations import OracleFact, load_oracle_facts
from parity.errors import OracleError

ROOT = Path(__file__).resolve().parents[2]
FACT = OracleFact(
    name="a", oracle="fake", version="1", side="oracle", what="it is not read", right="a window", link="not reported"
)


def problems(oracle: Oracle, facts: list[OracleFact], seen: dict[str, tuple[bool, str]]) -> dict[str, str | None]:
    return {tried.name: tried.problem for tried in try_facts(oracle, facts, lambda _: seen)}


def test_a_fact_holds_where_its_run_shows_it(oracle: Oracle) -> None:
    fact = replace(FACT, version=oracle.version)
    assert problems(oracle, [fact], {"a": (True, "seen")}) == {"a": None}


@pytest.mark.parametrize(
    ("version", "seen", "problem"),
    [
        ("", {"a": (False, "mended")}, "it no longer holds"),
        ("", {}, "nothing shows it"),
        ("0.0", {"a": (True, "seen")}, "it was reproduced in 0.0, and the registry has {}"),
    ],
)
def test_a_fact_that_is_not_shown_fails(
    oracle: Oracle, version: str, seen: dict[str, tuple[bool, str]], problem: str
) -> None:
    fact = replace(FACT, version=version or oracle.version)
    assert problems(oracle, [fact], seen) == {"a": problem.format(oracle.version)}


def test_a_run_without_an_entry_fails(oracle: Oracle) -> None:
    assert problems(oracle, [], {"b": (True, "seen")}) == {"b": "it has no entry in parity/deviations.toml"}


def test_a_fact_is_told_in_one_line(oracle: Oracle) -> None:
    (good,) = try_facts(oracle, [replace(FACT, version=oracle.version)], lambda _: {"a": (True, "two\nlines")})
    (bad,) = try_facts(oracle, [replace(FACT, version=oracle.version)], lambda _: {"a": (False, "mended")})
    assert told(good) == f"holds  {oracle.name}  a  two lines"
    assert told(bad) == f"FAILS (it no longer holds)  {oracle.name}  a  mended"


@pytest.mark.parametrize(("name", "package"), [("mlx-lm", "mlx_lm"), ("mlx-optiq", "mlx_optiq")])
def test_every_committed_fact_has_a_run_and_every_run_a_fact(name: str, package: str) -> None:
    """The names in the tables of runs, read from their source: it imports what only an oracle's environment has."""
    sources = [file.read_text() for file in sorted((ROOT / "oracles" / package).glob("*facts.py"))]
    tables = [
        node.value
        for source in sources
        for node in ast.parse(source).body
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Dict) and node.value.values
    ]
    runs = {key.value for table in tables for key in table.keys if isinstance(key, ast.Constant)} - {"type", "factor"}
    runs -= {"rope_theta"}
    facts = {fact.name for fact in load_oracle_facts() if fact.oracle == name}
    assert runs == facts
    assert {fact.version for fact in load_oracle_facts() if fact.oracle == name} == {find_oracle(name).version}


def test_the_snapshots_of_the_facts_are_drawn_first() -> None:
    asked: list[str] = []

    class Drawn:
        path = Path("/models/x")

    def ensure(name: str) -> Drawn:
        asked.append(name)
        return Drawn()

    assert ensure_snapshots(find_oracle("mlx-lm"), ensure) == Path("/models")
    assert {"gemma3_text-tiny", "falcon_h1-hub-tiny", "llama_sliding-tiny"} <= set(asked)


def test_a_process_that_dies_is_an_error_with_its_last_words(oracle: Oracle, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho last words >&2\nexit 3\n")
    python.chmod(0o755)
    with pytest.raises(OracleError) as caught:
        observe(oracle, tmp_path, environment_of=lambda _: python)
    assert str(caught.value) == (
        f"the facts of {oracle.name} {oracle.version} cannot be tried\n"
        "  code  3\n"
        "  said  last words\n"
        f"  next  assay oracles sync {oracle.name}"
    )


def test_what_a_process_says_is_read(oracle: Oracle, tmp_path: Path) -> None:
    python = tmp_path / "python"
    line = '{"name": "a", "holds": true, "observed": "seen"}'
    python.write_text(f"#!/bin/sh\necho a library that prints\necho '{line}'\n")
    python.chmod(0o755)
    assert observe(oracle, tmp_path, environment_of=lambda _: python) == {"a": (True, "seen")}
