"""Full rows of logits that are too large for git, kept beside the snapshots under `ASSAY_HOME`.

A golden of a real model commits digests and a sketch; whoever wants to see a difference in full finds the rows here, where
recording left them. Nothing decides by this store: a tensor is handed out only if it has the digest that the golden lists.

Guarantees: files appear whole or not at all; what does not match its digest is treated as absent and reported.
"""

import warnings
from collections.abc import Mapping
from pathlib import Path

from parity import safetensors_file
from parity.atomic_file import write_atomically
from parity.case import Case
from parity.home import assay_home
from parity.platform_key import platform_key
from parity.tensor import Tensor


class RowStoreWarning(UserWarning):
    """Stored rows exist but are not those of the golden."""


def rows_path(case: Case, version: str) -> Path:
    """Where the rows of a case lie: `rows/<oracle>-<version>/<platform>/<case>.safetensors` under the home."""
    return assay_home() / "rows" / f"{case.oracle}-{version}" / platform_key() / f"{case.name}.safetensors"


def save(case: Case, version: str, tensors: Mapping[str, Tensor]) -> None:
    """Keep the tensors of an oracle's trace, replacing what was there.

    Args:
        case: The question.
        version: The oracle's.
        tensors: Name to tensor, as the trace has them.
    """
    write_atomically(rows_path(case, version), safetensors_file.dumps(tensors))


def load(case: Case, version: str, expected_digests: Mapping[str, str]) -> dict[str, Tensor] | None:
    """The stored tensors of a case, if they are the golden's.

    Args:
        case: The question.
        version: The oracle's.
        expected_digests: Tensor name to SHA-256, as the golden lists them.

    Returns:
        Tensors in the golden's order, all with the expected digest; None where there is no file, or where any tensor is missing
        or differs: a mixture of believed and unbelieved rows would mislead. The second is reported as a `RowStoreWarning`.
    """
    file = rows_path(case, version)
    try:
        tensors = safetensors_file.loads(file.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        _report(case, f"unreadable ({error})")
        return None
    wrong = [name for name, digest in expected_digests.items() if name not in tensors or tensors[name].digest != digest]
    if wrong:
        _report(case, f"{len(wrong)} of {len(expected_digests)} tensors are not the golden's, first {wrong[0]}")
        return None
    return {name: tensors[name] for name in expected_digests}


def _report(case: Case, reason: str) -> None:
    warnings.warn(
        f"stored rows of {case.name} are not used: {reason}; assay record '{case.name}' makes them again",
        RowStoreWarning,
        stacklevel=3,
    )
