"""The facts about oracles, tried: `python -m oracles.facts [ORACLE]`.

`parity/deviations.toml` says what is known; `oracles/<oracle>/facts.py` shows it in the oracle's own environment, in seconds.
Guarantees: strict in both directions. An entry whose run no longer shows it, an entry of another version than the registry's,
an entry without a run and a run without an entry each fail; nothing is skipped.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from oracles.environment import ensure_environment
from oracles.process import LAST_LINES, hermetic
from oracles.registry import REPOSITORY, Oracle, find_oracle
from parity.deviations import OracleFact, load_oracle_facts
from parity.errors import AssayError, OracleError


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """What became of one fact.

    Attributes:
        oracle: Whose.
        name: Its name.
        problem: Why it fails; None where it holds.
        observed: What the oracle did, in words.
    """

    oracle: str
    name: str
    problem: str | None
    observed: str


def try_facts(
    oracle: Oracle, facts: Sequence[OracleFact], observe: Callable[[Oracle], Mapping[str, tuple[bool, str]]]
) -> tuple[Tried, ...]:
    """Hold what an oracle does against what is known of it.

    Args:
        oracle: Which.
        facts: Its entries.
        observe: Runs every fact of the oracle: name to whether it holds, and what was observed.
    """
    seen = observe(oracle)
    tried = [
        Tried(oracle=oracle.name, name=f.name, problem=_problem(oracle, f, seen), observed=_words(f, seen))
        for f in facts
    ]
    known = {fact.name for fact in facts}
    tried += [
        Tried(oracle=oracle.name, name=name, problem="it has no entry in parity/deviations.toml", observed=words)
        for name, (_, words) in seen.items()
        if name not in known
    ]
    return tuple(sorted(tried, key=lambda t: t.name))


def observe(
    oracle: Oracle, snapshots: Path, environment_of: Callable[[Oracle], Path] = ensure_environment
) -> dict[str, tuple[bool, str]]:
    """Run every fact of an oracle in its environment.

    Args:
        oracle: Which.
        snapshots: Folder of the tiny snapshots.
        environment_of: Interpreter of its environment.

    Raises:
        OracleError: The process failed.
    """
    module = oracle.entry.rpartition(".")[0] + ".facts"
    with TemporaryDirectory(prefix="assay-facts-", ignore_cleanup_errors=True) as private:
        done = subprocess.run(
            [environment_of(oracle), "-m", module, str(snapshots)],
            cwd=REPOSITORY,
            env=hermetic(Path(private)),
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode != 0:
        raise OracleError(
            f"the facts of {oracle.name} {oracle.version} cannot be tried",
            code=done.returncode,
            said="\n".join(done.stderr.splitlines()[-LAST_LINES:]) or "nothing",
            next_step=f"assay oracles sync {oracle.name}",
        )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line["name"]: (line["holds"], line["observed"]) for line in lines}


def main(arguments: Sequence[str]) -> int:
    """Try the facts of the oracles that are named, or of all that have some; 1 where any fails."""
    from parity.models.fetch import ensure_snapshot  # noqa: PLC0415 - brings converters that nothing else here needs

    facts = load_oracle_facts()
    failed = 0
    try:
        for name in arguments or sorted({fact.oracle for fact in facts}):
            oracle = find_oracle(name)
            folder = ensure_snapshots(oracle, ensure_snapshot)
            own = [fact for fact in facts if fact.oracle == name]
            for tried in try_facts(oracle, own, lambda o, folder=folder: observe(o, folder)):  # type: ignore[misc]
                failed += tried.problem is not None
                print(told(tried))  # noqa: T201
    except AssayError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 2
    return 1 if failed else 0


def ensure_snapshots(oracle: Oracle, ensure: Callable[[str], object]) -> Path:
    """Draw the tiny snapshots that the facts name, and give the folder in which they lie."""
    package = REPOSITORY / oracle.entry.rpartition(".")[0].replace(".", "/")
    source = "\n".join(file.read_text(encoding="utf-8") for file in sorted(package.glob("*facts.py")))
    names = sorted({word for word in source.split('"') if word.endswith("-tiny")})
    folders = {ensure(name).path.parent for name in names}  # type: ignore[attr-defined]
    (folder,) = folders
    return Path(folder)


def told(tried: Tried) -> str:
    """A line: `holds  mlx-lm  glm4_rope_scaling  what was observed`."""
    state = "holds" if tried.problem is None else f"FAILS ({tried.problem})"
    return " ".join(f"{state}  {tried.oracle}  {tried.name}  {tried.observed}".split("\n"))


def _problem(oracle: Oracle, fact: OracleFact, seen: Mapping[str, tuple[bool, str]]) -> str | None:
    if fact.version != oracle.version:
        return f"it was reproduced in {fact.version}, and the registry has {oracle.version}"
    if fact.name not in seen:
        return "nothing shows it"
    return None if seen[fact.name][0] else "it no longer holds"


def _words(fact: OracleFact, seen: Mapping[str, tuple[bool, str]]) -> str:
    return seen.get(fact.name, (False, "not tried"))[1]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
