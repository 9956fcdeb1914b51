"""The table of families: what is judged of each model_type, and with which verdicts; Markdown, as in README.

Guarantees: every cell is read from cases, goldens and verdicts; nothing is written by hand. `replace_block` changes the
lines between two markers and nothing else.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from parity.case import Case
from parity.errors import UsageError
from parity.models.catalogue import entries
from parity.models.tiny_catalogue import DRAWN, TinySource, read

BEGIN: Final = "<!-- families: written by `assay check --families README.md` -->"
END: Final = "<!-- families end -->"
FIRST_ORACLE: Final = "mlx-lm"
COLUMNS: Final = ("model_type", "caches", "weights", "dtypes", "KV modes", "feeds", "verdict")


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What the table needs of one judged case.

    Attributes:
        case: The question.
        cache: The oracle's cache words, from the golden.
        status: The verdict's word.
    """

    case: Case
    cache: tuple[str, ...]
    status: str


def family_table(judged: Iterable[Judged]) -> str:
    """One Markdown row a model_type, in alphabetical order."""
    families: dict[str, list[Judged]] = {}
    for one in judged:
        families.setdefault(model_type(one.case.snapshot), []).append(one)
    rows = [COLUMNS, tuple("---" for _ in COLUMNS), *(_row(name, families[name]) for name in sorted(families))]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def belongs(case: Case) -> bool:
    """Whether the table counts a case: a model's logits, held to the first oracle."""
    return case.sampling is None and case.oracle == FIRST_ORACLE


def model_type(snapshot: str) -> str:
    """The family of a known snapshot, from the catalogue alone."""
    source = entries()[snapshot].source
    return str(read(source.config)["model_type"]) if isinstance(source, TinySource) else source.model_type


def replace_block(text: str, table: str) -> str:
    """`text` with the lines between the two markers replaced by `table`.

    Raises:
        UsageError: The markers are not there, once each and in order.
    """
    pattern = re.compile(re.escape(BEGIN) + r"\n.*?" + re.escape(END), flags=re.DOTALL)
    changed, count = pattern.subn(lambda _: f"{BEGIN}\n{table}\n{END}", text)
    if count != 1:
        raise UsageError(
            "the file has no place for the table of families",
            expected=f"{BEGIN}\n{END}",
            found=f"{count} such places",
            next_step="put the two lines where the table belongs",
        )
    return changed


def _row(name: str, members: Sequence[Judged]) -> tuple[str, ...]:
    cases = [member.case for member in members]
    counts: dict[str, int] = {}
    for member in members:
        counts[member.status] = counts.get(member.status, 0) + 1
    return (
        name,
        _listed(_cache_word(word) for member in members for word in member.cache),
        _listed(_weights(case.snapshot) for case in cases),
        _listed(case.dtype for case in cases),
        _listed(case.kv.name for case in cases),
        _listed(case.feed.mode for case in cases),
        ", ".join(f"{count} {status}" for status, count in counts.items()),
    )


def _weights(snapshot: str) -> str:
    entry = entries()[snapshot]
    if not isinstance(entry.source, TinySource):
        return f"**{snapshot}**"
    return "tiny" if entry.source.form == DRAWN else entry.source.form


def _cache_word(word: str) -> str:
    """A cache word without its sizes: `rotating-w16-k0` is `rotating`, `arrays-2` is `recurrent`."""
    words: Mapping[str, str] = {"arrays": "recurrent"}
    bare = re.sub(r"-[a-z]?\d+", "", word)
    return re.sub(r"[a-z]+", lambda match: words.get(match[0], match[0]), bare)


def _listed(values: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(values))
