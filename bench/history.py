"""What was measured before on this machine: one line of JSON a run, in a file a machine.

A machine is its processor's model, its cores and mlx's version, as a digest: runs that share it can be compared, and nothing
in it names anybody. Runs are numbered, not dated; each knows the commit of the checkout that it measured.

Guarantees: lines are only ever appended, whole; a damaged line is an error that names it, never left out in silence.
"""

import hashlib
import json
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from filelock import FileLock

from parity.errors import AssayError, UsageError
from parity.home import assay_home

REPOSITORY: Final = Path(__file__).resolve().parent.parent
MAIN: Final = "main"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One line.

    Attributes:
        number: From 1, in the order in which runs ended.
        commit: What was measured, 12 digits, with `+` where files differed from it; None outside a checkout.
        noisy: What spoke against a quiet machine; empty where nothing did.
        figures: As `Figure.to_json` gives them.
    """

    number: int
    commit: str | None
    noisy: tuple[str, ...]
    figures: tuple[Mapping[str, Any], ...]

    @property
    def label(self) -> str:
        """Such as `run 3 (1a2b3c)`."""
        return f"run {self.number} ({self.commit or 'no commit'})"


def identity(machine: Mapping[str, Any]) -> str:
    """Digest of the processor's model, the cores and mlx's version."""
    stable = [machine["processor"], machine["cores"], machine["packages"]["mlx"]]
    return hashlib.sha256(json.dumps(stable).encode()).hexdigest()[:12]


def history_file(name: str, size: str) -> Path:
    """Where the runs of one size on a machine are kept: sizes measure differently, so they are not compared."""
    return assay_home() / "bench" / "history" / f"{name}-{size}.jsonl"


def append(file: Path, *, figures: Sequence[Mapping[str, Any]], noisy: Sequence[str], commit: str | None) -> Run:
    """Add a run; returns it with its number."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{file}.lock"):
        number = len(load(file)) + 1
        run = Run(number=number, commit=commit, noisy=tuple(noisy), figures=tuple(figures))
        line = {"number": number, "commit": commit, "noisy": list(noisy), "figures": list(figures)}
        with file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")
            stream.flush()
            os.fsync(stream.fileno())
    return run


def load(file: Path) -> list[Run]:
    """All runs of a machine, oldest first; none where there is no file.

    Raises:
        AssayError: A line is damaged.
    """
    if not file.is_file():
        return []
    runs = []
    for index, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            raw = json.loads(line)
            runs.append(
                Run(
                    number=int(raw["number"]),
                    commit=raw["commit"],
                    noisy=tuple(raw["noisy"]),
                    figures=tuple(raw["figures"]),
                )
            )
        except (ValueError, KeyError, TypeError) as error:
            raise AssayError(
                "the bench history is damaged",
                file=file.name,
                line=index,
                reason=f"{type(error).__name__}: {error}",
                next_step="remove that line",
            ) from error
    return runs


def find(runs: Sequence[Run], name: str, *, is_on_main: Callable[[str], bool]) -> Run:
    """The run that a name stands for: a number, `last`, `last~2`, a commit, or `main`, the last run of a clean commit there.

    Raises:
        UsageError: There is none.
    """
    found: list[Run] = []
    before = name.removeprefix("last~")
    if name.isdecimal() and len(name) < 7:
        found = [run for run in runs if run.number == int(name)]
    elif name == "last":
        found = list(runs[-1:])
    elif before != name and before.isdecimal():
        found = list(runs[: max(0, len(runs) - int(before))][-1:])
    elif name == MAIN:
        found = [run for run in runs if run.commit and not run.commit.endswith("+") and is_on_main(run.commit)][-1:]
    elif len(name) >= 7:
        found = [run for run in runs if run.commit and run.commit.rstrip("+").startswith(name[:12])][-1:]
    if not found:
        raise UsageError(
            f"the bench history of this machine has no run {name!r}",
            runs=", ".join(run.label for run in runs[-5:]) or "none",
            known="a number, last, last~1, a commit, main",
            next_step="assay bench --full, or name one of these",
        )
    return found[-1]


def rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The history as rows for a plot or a table, a figure of a run each.

    Returns:
        Rows with `run`, `commit`, `noisy` (whether anything spoke against a quiet machine), `name`, `peer`, `unit`, `engine`,
        `engine_low`, `engine_high`, `peer_value`, `ratio`, `low`, `high`, `bits_identical`.
    """
    return [
        {
            "run": run.number,
            "commit": run.commit,
            "noisy": bool(run.noisy),
            **{key: figure[key] for key in ("name", "peer", "unit", "engine", "peer_value", "ratio", "low", "high")},
            "engine_low": figure["engine_range"][0],
            "engine_high": figure["engine_range"][1],
            "bits_identical": figure["bits_identical"],
        }
        for run in runs
        for figure in run.figures
    ]


def current_commit(repository: Path = REPOSITORY) -> str | None:
    """The checkout's commit, with `+` where tracked files differ from it; None outside a checkout."""
    head = _git(repository, "rev-parse", "--short=12", "HEAD")
    if head is None:
        return None
    return head if _git(repository, "status", "--porcelain", "--untracked-files=no") == "" else f"{head}+"


def is_on_main(commit: str, repository: Path = REPOSITORY) -> bool:
    """Whether a commit is one of the branch `main`."""
    return _git(repository, "merge-base", "--is-ancestor", commit, MAIN) is not None


def _git(repository: Path, *arguments: str) -> str | None:
    """What git says; None where it fails or is not there."""
    try:
        command = ["git", "-C", str(repository), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
