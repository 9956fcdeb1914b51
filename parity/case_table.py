"""Reading one table of a file of cases: keys and values are checked, and what is wrong is named with file, table and key.

Guarantees: each function raises a `CaseError` in one form, or gives a value of the kind that it promises.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parity.errors import CaseError


def count(file: Path, label: str, table: Mapping[str, Any], key: str) -> int:
    """A whole number of at least 1 under `key`."""
    value = table.get(key)
    if type(value) is not int or value < 1:
        raise wrong(file, label, key, f"a whole number of at least 1 belongs here, not {value!r}")
    return value


def strings(file: Path, label: str, table: Mapping[str, Any], key: str) -> list[str]:
    """A list of names under `key`."""
    value = table.get(key)
    if not isinstance(value, list) or not value or not all(isinstance(v, str) and v for v in value):
        raise wrong(file, label, key, f"a list of names belongs here, not {value!r}")
    return value


def only(file: Path, label: str, table: object, known: tuple[str, ...]) -> None:
    """Refuse keys that are not known."""
    if not isinstance(table, dict):
        raise wrong(file, label, label, "a table belongs here")
    for key in table:
        if key not in known:
            raise wrong(file, label, key, f"unknown; known are {', '.join(known)}")


def one_of(file: Path, label: str, key: str, values: list[str], known: tuple[str, ...]) -> None:
    """Refuse names that are not known."""
    for value in values:
        if value not in known:
            raise wrong(file, label, key, f"{value!r} is none of {', '.join(known)}")


def wrong(file: Path, table: str, key: str, reason: str) -> CaseError:
    """The error of a malformed table."""
    return CaseError(
        "a table of cases is malformed", file=file.name, table=table, key=key, reason=reason, next_step=mend(file)
    )


def mend(file: Path) -> str:
    """What mends it."""
    return f"correct it in parity/cases/{file.name}"
