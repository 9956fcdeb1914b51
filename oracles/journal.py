"""Finished traces of a recording that has not ended yet, so that a killed one resumes where it stopped.

A trace is kept under a key that digests everything its bits rest on: case, weights and config, lock file, sources, platform.
What belongs to another question, or to other sources, is therefore never found.

Guarantees: a trace counts as finished only when its `trace.json`, written last, is there. A recording that ends removes
what it kept: the next one starts from nothing.
"""

import hashlib
import json
import platform
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from oracles.registry import Oracle
from parity.case import Case
from parity.errors import AssayError
from parity.home import assay_home
from parity.platform_key import platform_key
from parity.provenance import Provenance
from parity.snapshot import Snapshot
from parity.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Journal:
    """The kept traces of one goldens folder.

    Attributes:
        folder: `recording/<digest of the goldens folder>` under the home.
    """

    folder: Path

    @classmethod
    def of(cls, goldens: Path) -> "Journal":
        """The journal of a goldens folder."""
        scope = hashlib.sha256(str(goldens.resolve()).encode()).hexdigest()[:12]
        return cls(folder=assay_home() / "recording" / scope)

    def place(self, case: Case, snapshot: Snapshot, oracle: Oracle, source_digest: str) -> Path:
        """Where the trace of this very question is kept."""
        question = {
            "case": case.to_json(),
            "snapshot": snapshot.logit_files,
            "oracle": [oracle.name, oracle.version, oracle.lock_digest, source_digest],
            "machine": [platform_key(), *platform.libc_ver()],
        }
        key = hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()
        return self.folder / key

    @staticmethod
    def read(place: Path) -> tuple[Trace, Provenance] | None:
        """A finished trace and what it rests on, or None."""
        if not (place / "trace.json").is_file():
            return None
        try:
            raw = json.loads((place / "provenance.json").read_text(encoding="utf-8"))
            return Trace.load(place), Provenance.from_json(raw)
        except (OSError, ValueError, TypeError, AssayError):
            shutil.rmtree(place)  # a damaged disk or another version of ours: it is computed again
            return None

    def forget(self, places: Iterable[Path]) -> None:
        """Remove kept traces."""
        for place in places:
            if place.exists():
                (place / "trace.json").unlink(missing_ok=True)
                shutil.rmtree(place)
        if self.folder.is_dir() and not any(self.folder.iterdir()):
            self.folder.rmdir()
