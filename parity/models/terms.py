"""Terms of use that somebody has to accept before a snapshot is fetched, and where that is remembered.

Guarantees: a snapshot with terms is neither downloaded nor built on a machine whose user has not accepted exactly these
terms; acceptance is a file of its own under ASSAY_HOME, so that building the snapshot anew does not ask again. What a
snapshot of such terms consists of never enters the repository or anything that is published from it.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from parity.atomic_file import write_atomically
from parity.errors import SnapshotError


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Terms of use.

    Attributes:
        title: What they are called.
        address: Where they are published.
        restrictions: Where the uses that they forbid are listed.
        version: Date of the version that was read when the snapshot was added.
    """

    title: str
    address: str
    restrictions: str
    version: str

    def notice(self, snapshot: str) -> str:
        """What is printed when they are accepted."""
        return (
            f"{snapshot} is subject to the {self.title} ({self.address}, version of {self.version}), which forbid the uses "
            f"listed at {self.restrictions} and bind whoever the weights are passed on to."
        )


def accept(snapshot: str, terms: Terms, home: Path) -> None:
    """Remember on this machine that the terms were accepted."""
    file = _file(snapshot, home)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, json.dumps(asdict(terms), indent=1).encode() + b"\n")


def is_accepted(snapshot: str, terms: Terms, home: Path) -> bool:
    """Whether exactly these terms were accepted on this machine."""
    try:
        return bool(json.loads(_file(snapshot, home).read_text(encoding="utf-8")) == asdict(terms))
    except (OSError, ValueError):
        return False


def check_accepted(snapshot: str, terms: Terms, home: Path) -> None:
    """Refuse a snapshot whose terms were not accepted.

    Raises:
        SnapshotError: They were not; what they are is said.
    """
    if not is_accepted(snapshot, terms, home):
        raise SnapshotError(
            f"snapshot {snapshot!r} has terms of use that nobody has accepted on this machine",
            terms=f"{terms.title}, version of {terms.version}: {terms.address}",
            forbidden=f"the uses listed at {terms.restrictions}",
            next_step=f"read them, then assay models fetch {snapshot} --accept-terms",
        )


def _file(snapshot: str, home: Path) -> Path:
    return home / "terms" / f"{snapshot}.json"
