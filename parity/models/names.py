"""What the name of a snapshot on the command line means: a known one, a local folder, or a hub repository.

Guarantees: the three can never be confused, because a folder is written with a slash (or `.` or `~` first) and a hub
repository with `hub:`. A bare word is always a known name, whatever lies in the current folder.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from parity.errors import UsageError
from parity.models.catalogue import Entry, find

HUB_PREFIX: Final = "hub:"
HUB_NAME: Final = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+?)(@(?P<revision>[\w./-]+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalFolder:
    """A model folder on this machine, used as it is.

    Attributes:
        path: The folder, absolute.
    """

    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class HubRepo:
    """A repository of the hub.

    Attributes:
        repo_id: `org/name`.
        revision: Branch, tag or commit; the default branch without one.
    """

    repo_id: str
    revision: str | None = None


def parse_name(name: str) -> Entry | LocalFolder | HubRepo:
    """Tell what a name means.

    Raises:
        UsageError: It is no known snapshot, or `hub:` is not followed by `org/name` or `org/name@revision`.
    """
    if name.startswith(HUB_PREFIX):
        match = HUB_NAME.fullmatch(name.removeprefix(HUB_PREFIX))
        if match is None:
            raise UsageError(
                f"{name!r} does not name a hub repository",
                form="hub:org/name or hub:org/name@revision",
                next_step="write it in this form",
            )
        return HubRepo(repo_id=match["repo"], revision=match["revision"])
    if "/" in name or name.startswith((".", "~")):
        return LocalFolder(path=Path(name).expanduser().absolute())
    return find(name)
