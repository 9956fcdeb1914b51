"""Text to ids and back, as tokenizer.json says.

The tokenizers library does the work. What is ours: which file is read, what special tokens are called, and that a prompt
which a chat template already opened with a begin-of-text token does not get a second one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer as Backend

from engine.config import load_json
from engine.errors import RequestError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tokenizer:
    """A snapshot's tokenizer.

    Attributes:
        backend: The library's tokenizer.
        stop_ids: Ids that end a text: `eos_token_id` of generation_config.json, or of config.json without it.
    """

    backend: Backend
    stop_ids: frozenset[int]

    @classmethod
    def open(cls, folder: Path) -> "Tokenizer":
        """Read tokenizer.json and the stop ids.

        Raises:
            RequestError: The snapshot has no tokenizer, or one that the library cannot read.
        """
        file = folder / "tokenizer.json"
        try:
            backend = Backend.from_str(file.read_text(encoding="utf-8"))
        except Exception as error:  # the library raises bare Exception
            raise RequestError(
                "the snapshot has no usable tokenizer",
                file=f"{folder.name}/{file.name}",
                reason=error,
                next_step="give token ids, or use a snapshot with a tokenizer.json",
            ) from error
        return cls(backend=backend, stop_ids=_stop_ids(folder))

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Ids of a text.

        Args:
            text: Plain text, or a rendered chat template.
            special: Add the tokens that the tokenizer puts around a text, such as begin-of-text, unless it opens with one.
        """
        plain: list[int] = self.backend.encode(text, add_special_tokens=False).ids
        if not special:
            return plain
        ids: list[int] = self.backend.encode(text, add_special_tokens=True).ids
        opened_twice = bool(plain) and len(ids) > len(plain) and ids[0] == ids[1] == plain[0]
        return ids[1:] if opened_twice else ids

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Text of ids; special tokens are left out unless asked for."""
        text: str = self.backend.decode(list(ids), skip_special_tokens=not special)
        return text


def _stop_ids(folder: Path) -> frozenset[int]:
    for name in ("generation_config.json", "config.json"):
        file = folder / name
        found = load_json(file).get("eos_token_id") if file.is_file() else None
        if found is not None:
            return frozenset(found if isinstance(found, list) else [found])
    return frozenset()
