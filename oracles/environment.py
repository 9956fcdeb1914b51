"""An oracle's own environment: a virtual environment built from its lock file, every file checked against its hash.

Wheels alone are installed, but for the distributions that the registry lists under `from_source`: those are built here with the
CMake arguments that stand there. The source is checked against its hash; the tools of the build (CMake, the compiler) are not.

Guarantees: an environment is used only when its build ran to the end and its pinned distributions have the pinned versions
now; anything else in its place is removed and built again. Two builds of one environment are kept apart by a lock. The
folder's name carries the oracle's version, the lock file's digest and Python's version, so a changed lock is another folder.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from filelock import FileLock

from oracles.registry import Oracle
from parity.atomic_file import write_atomically
from parity.errors import OracleError
from parity.home import assay_home

COMPLETE: Final = "complete.json"
LAST_LINES: Final = 12
_ASK_VERSIONS: Final = (
    "import json, sys; from importlib.metadata import distributions; "
    "wanted = set(json.loads(sys.argv[1])); "
    "found = {d.name.lower().replace('_', '-'): d.version for d in distributions()}; "  # some wheels write _ in their name
    "print(json.dumps({name: found[name] for name in wanted & found.keys()}))"
)


def environment_folder(oracle: Oracle) -> Path:
    """Where the environment of an oracle lies, built or not."""
    python = f"py{sys.version_info.major}.{sys.version_info.minor}"
    return assay_home() / "oracles" / f"{oracle.name}-{oracle.version}-{oracle.lock_digest[:12]}-{python}"


def is_ready(oracle: Oracle) -> bool:
    """Whether the environment is complete and its pins hold."""
    folder = environment_folder(oracle)
    try:
        complete = json.loads((folder / COMPLETE).read_bytes())
    except (FileNotFoundError, ValueError):
        return False
    built_alike = complete.get("from_source", {}) == oracle.from_source
    return built_alike and installed_versions(oracle, folder) == oracle.pins


def ensure_environment(oracle: Oracle, *, on_line: Callable[[str], None] | None = None) -> Path:
    """Build the environment where it is missing, unfinished or altered.

    Args:
        oracle: Whose environment.
        on_line: Told in a line each what long work is being done.

    Returns:
        Its Python.

    Raises:
        OracleError: The build failed, or the pins do not hold after it.
    """
    say = on_line or (lambda _line: None)
    folder = environment_folder(oracle)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if is_ready(oracle):
            return python_of(folder)
        if folder.exists():
            say(f"removing an unfinished or altered environment of {oracle.name} {oracle.version}")
            _remove(folder)
        say(f"building the environment of {oracle.name} {oracle.version}")
        _build(oracle, folder)
    return python_of(folder)


def python_of(folder: Path) -> Path:
    """The interpreter of a virtual environment."""
    return folder / "bin" / "python"


def installed_versions(oracle: Oracle, folder: Path) -> dict[str, str]:
    """Versions of the pinned distributions in an environment; none where its interpreter does not run."""
    try:
        answer = subprocess.run(
            [python_of(folder), "-I", "-c", _ASK_VERSIONS, json.dumps(sorted(oracle.pins))],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return {}
    versions: dict[str, str] = json.loads(answer.stdout)
    return versions


def _remove(folder: Path) -> None:
    """Remove an environment, the mark of completeness first, so that a kill in the middle leaves none that looks whole."""
    (folder / COMPLETE).unlink(missing_ok=True)
    shutil.rmtree(folder)


def _build(oracle: Oracle, folder: Path) -> None:
    """Make the environment; the mark of completeness is written last."""
    _step(oracle, [sys.executable, "-m", "venv", str(folder)])
    pip = [str(python_of(folder)), "-m", "pip", "install", "--disable-pip-version-check", "--no-input", "--quiet"]
    source = [option for name in oracle.from_source for option in ("--no-binary", name)]
    _step(oracle, [*pip, "--require-hashes", "--only-binary", ":all:", *source, "-r", str(oracle.lock)])
    found = installed_versions(oracle, folder)
    if found != oracle.pins:
        raise OracleError(
            f"the environment of oracle {oracle.name} {oracle.version} does not hold its pins",
            expected=_lay_out(oracle.pins),
            found=_lay_out(found) or "nothing",
            next_step=f"compile {oracle.lock.name} again from requirements.in (oracles/README.md)",
        )
    complete = {"lock": oracle.lock_digest, "pins": found}
    if oracle.from_source:
        complete["from_source"] = dict(oracle.from_source)
    write_atomically(folder / COMPLETE, json.dumps(complete).encode() + b"\n")


def _step(oracle: Oracle, command: list[str]) -> None:
    environment = {**os.environ, "CMAKE_ARGS": " ".join(oracle.from_source.values())} if oracle.from_source else None
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, env=environment
        )
    except OSError as error:
        raise _failed(oracle, command, str(error)) from error
    if done.returncode != 0:
        raise _failed(oracle, command, done.stdout)


def _failed(oracle: Oracle, command: list[str], output: str) -> OracleError:
    lines = [line for line in output.splitlines() if line.strip() and not line.startswith("WARNING")]
    return OracleError(
        f"the environment of oracle {oracle.name} {oracle.version} could not be built",
        step=" ".join(command[1:4]),
        said="\n".join(lines[-LAST_LINES:]) or "nothing",
        next_step=f"see that PyPI can be reached, then assay oracles sync {oracle.name}",
    )


def _lay_out(versions: object) -> str:
    return "\n".join(f"{name} {version}" for name, version in sorted(dict(versions).items()))  # type: ignore[call-overload]
