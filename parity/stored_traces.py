"""Traces that another engine has left on disk, as a runner: what `assay check --from DIR` judges.

`DIR/<case>/` is a trace folder (`trace.json`, `trace.safetensors`; `parity.trace` describes both) for every case, and
`DIR/provenance.json` says what all of them rest on: `platform`, `device`, and in `packages` the versions of mlx; `digests`,
`libc`, `python` and `switches` may be left out. Guarantees: nothing is run; a trace that is not there, or not a trace, is an
error of its case and never a pass; a provenance that does not say what a golden is compared by is refused before any case.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from parity.case import Case
from parity.errors import UsageError
from parity.provenance import Provenance
from parity.snapshot import Snapshot
from parity.trace import Trace

PROVENANCE: Final = "provenance.json"
NEEDED: Final = ("platform", "device", "packages")
UNSAID: Final = "not said"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTraces:
    """A folder of traces; the runner and its factory at once, since it holds no state.

    Attributes:
        folder: Where the traces lie.
        name: What reports call the engine.
    """

    folder: Path
    name: str = "stored traces"

    def __call__(self) -> "StoredTraces":
        """Itself: a gate asks each worker process for a runner of its own."""
        return self

    def run(self, case: Case, snapshot: Snapshot) -> Trace:
        """The trace that the engine left of a case.

        Raises:
            UsageError: There is none.
            AssayError: It cannot be read.
        """
        del snapshot  # the engine ran it; the gate has compared its digests with the golden's
        folder = self.folder / case.name
        if not (folder / "trace.json").is_file():
            raise UsageError(
                f"there is no trace of {case.name}",
                looked_at=f"{case.name}/trace.json",
                next_step="make the engine write one for every case that the pattern chooses",
            )
        return Trace.load(folder)

    def provenance(self) -> Provenance:
        """What the engine says its bits rest on.

        Raises:
            UsageError: It does not say, or not enough.
        """
        try:
            said = json.loads((self.folder / PROVENANCE).read_text(encoding="utf-8"))
        except OSError as error:
            raise _refused(f"it cannot be read ({error.strerror})") from error
        except ValueError as error:
            raise _refused(f"not JSON: {error}") from error
        if not isinstance(said, dict):
            raise _refused(f"a {type(said).__name__} where an object belongs")
        optional = {"digests": {}, "libc": UNSAID, "python": UNSAID, "switches": {}}
        lacking = [name for name in NEEDED if name not in said]
        unknown = [name for name in said if name not in (*NEEDED, *optional)]
        if lacking or unknown:
            raise _refused(f"lacking: {', '.join(lacking) or 'nothing'}; unknown: {', '.join(unknown) or 'nothing'}")
        return Provenance.from_json({**optional, **said})


def _refused(reason: str) -> UsageError:
    return UsageError(
        f"the traces do not say what they rest on: {PROVENANCE}",
        reason=reason,
        example='{"platform": "linux-x86_64-cpu", "device": "cpu", "packages": {"mlx": "0.32.4", "mlx-cpu": "0.32.4"}}',
        next_step=f"write {PROVENANCE} beside the traces, with what the engine ran on",
    )
