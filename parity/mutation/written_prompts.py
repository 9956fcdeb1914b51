"""Written prompts as cases of the tokenizer: the text that stands in `parity/cases` must give the ids that stand beside it.

A name is `prompts/<file>/<prompt>/<snapshot>`. A prompt of a chat is rendered by the snapshot's template first; since the
ids are lossless, they tell what text was rendered, so a template's fault and a tokenizer's are told apart. Nothing here
runs a model.
"""

from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer as Library

from engine.chat_template import ChatTemplate
from engine.tokenizer import Tokenizer
from parity.errors import UsageError
from parity.matrix import CASES, Prompt, read_prompts
from parity.models.fetch import ensure_snapshot

PREFIX: Final = "prompts/"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptDifference:
    """The first difference between what is written and what the engine makes of it.

    Attributes:
        where: `chat_template` where another text was rendered, `tokenizer` where the same text has other ids, or ids
            another text.
        token: Index of the first id that differs.
    """

    where: str
    token: int


def difference(name: str) -> PromptDifference | None:
    """Compare one written prompt with what the engine makes of its text; None where all is as written.

    Raises:
        UsageError: There is no such prompt.
    """
    _, file, prompt_name, snapshot = name.split("/")
    prompt, folder = _prompt(file, prompt_name), _folder(snapshot)
    tokenizer = Tokenizer.open(folder)
    text = _text(prompt, folder)
    ids = tuple(tokenizer.encode(text))
    if ids != prompt.ids:
        at = next(n for n, (want, got) in enumerate(zip_longest(prompt.ids, ids)) if want != got)
        written = _library(folder).decode(list(prompt.ids), skip_special_tokens=False)
        return PromptDifference(where="tokenizer" if text == written else "chat_template", token=at)
    if tokenizer.decode(prompt.ids, special=True) != text:
        return PromptDifference(where="tokenizer", token=0)
    return None


def _text(prompt: Prompt, folder: Path) -> str:
    if prompt.chat is not None:
        return ChatTemplate.open(folder).render([{"role": "user", "content": prompt.chat}])
    return prompt.text or ""


@cache
def _prompt(file: str, name: str) -> Prompt:
    prompts = read_prompts(CASES / f"{file}.toml")
    if name not in prompts or (prompts[name].text is None and prompts[name].chat is None):
        raise UsageError(
            "no written prompt of this name", file=f"{file}.toml", prompt=name, next_step="look into parity/cases"
        )
    return prompts[name]


@cache
def _folder(snapshot: str) -> Path:
    return ensure_snapshot(snapshot).path


@cache
def _library(folder: Path) -> Library:
    return Library.from_file(str(folder / "tokenizer.json"))
