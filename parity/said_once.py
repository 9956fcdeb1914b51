"""A message that several processes of one run may want to give, given once.

Guarantees: of the processes that share a folder, the first that says a message prints it on standard error; the others do
not. The folder belongs to one run and goes with it.
"""

import hashlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class SaidOnce:
    """Takes messages; a value, so that it can be sent to a worker process.

    Attributes:
        folder: An existing folder of the run, where what was said leaves a mark.
    """

    folder: Path

    def __call__(self, message: str) -> None:
        """Print a message that nobody has printed in this run."""
        mark = self.folder / hashlib.sha256(message.encode()).hexdigest()
        try:
            os.close(os.open(mark, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return
        sys.stderr.write(f"{message}\n")
        sys.stderr.flush()
