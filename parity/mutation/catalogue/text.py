"""Faults of text: what a tokenizer or a chat template may do to a prompt before any number is computed."""

from collections.abc import Callable, Sequence
from typing import Any, Final

from engine.chat_template import ChatTemplate
from parity.mutation.fault import Fault, fault
from parity.mutation.planting import swap

SHIP, CHAT, FOREST = (f"prompts/smollm2/{name}/smollm2-135m" for name in ("ship", "capital", "forest"))
ENCODE, DECODE = "engine.tokenizer:Tokenizer.encode", "engine.tokenizer:Tokenizer.decode"
RENDER, OPEN = "engine.chat_template:ChatTemplate.render", "engine.tokenizer:Tokenizer.encode"
Method = Callable[..., Any]


def told(change: Callable[[str], str]) -> Callable[[Method], Method]:
    """A tokenizer that is given another text."""
    return lambda right: lambda self, text, **options: right(self, change(text), **options)


def given(change: Callable[[list[int]], list[int]]) -> Callable[[Method], Method]:
    """A tokenizer that gives other ids."""
    return lambda right: lambda self, text, **options: change(right(self, text, **options))


def in_pieces(right: Method) -> Method:
    """A tokenizer that cuts a text every hundred characters, and then tokenises."""
    return lambda self, text, **options: [
        token for start in range(0, len(text), 100) for token in right(self, text[start : start + 100], **options)
    ]


def plain_specials(right: Method) -> Method:
    """A tokenizer that does not know special tokens inside a text."""

    def wrong(self: Any, text: str, **options: Any) -> list[int]:  # noqa: ANN401 - a method of a tokenizer
        broken = text.replace("<|", "<\u200b|")
        return [token for token in right(self, broken, **options) if token]

    return wrong


def rendered(change: Callable[[str], str]) -> Callable[[Method], Method]:
    """A template whose text is changed."""
    return lambda right: lambda self, messages, **options: change(right(self, messages, **options))


def asked(change: Callable[[Sequence[Any]], Sequence[Any]]) -> Callable[[Method], Method]:
    """A template that is given other messages."""
    return lambda right: lambda self, messages, **options: right(self, change(messages), **options)


def without_opening(right: Method) -> Method:
    """A template that does not open the assistant's turn."""
    return lambda self, messages, **options: right(self, messages, **{**options, "add_generation_prompt": False})


def source(change: Callable[[str], str]) -> Callable[[Method], Method]:
    """A template with another source."""
    return lambda right: (
        lambda self, messages, **options: right(
            ChatTemplate(source=change(self.source), tokens=self.tokens), messages, **options
        )
    )


TOKENIZER: Final = tuple(
    fault("tokenizer", "smollm2", what, says=says, at="tokenizer", cases=cases, plant=swap(target, by))
    for what, says, cases, target, by in (
        (
            "opened-twice",
            "a begin-of-text token is put before one that is there",
            (CHAT,),
            ENCODE,
            given(lambda ids: [1, *ids]),
        ),
        ("closed", "an end-of-text token is put after the prompt", (SHIP,), ENCODE, given(lambda ids: [*ids, 2])),
        ("leading-space", "a space is put before the text", (SHIP,), ENCODE, told(lambda text: f" {text}")),
        ("lower-case", "the text is put in lower case", (SHIP,), ENCODE, told(str.lower)),
        (
            "white-space",
            "runs of white space become one space",
            (CHAT,),
            ENCODE,
            told(lambda text: " ".join(text.split())),
        ),
        ("stripped", "white space at the end is lost", (CHAT,), ENCODE, told(str.rstrip)),
        ("in-pieces", "a long text is cut before it is tokenised", (FOREST,), ENCODE, in_pieces),
        ("cut", "a long text is cut at 256 tokens", (FOREST,), ENCODE, given(lambda ids: ids[:256])),
        ("specials-as-text", "special tokens inside a text are tokenised as text", (CHAT,), ENCODE, plain_specials),
        ("one-off", "ids count from 1", (SHIP,), ENCODE, given(lambda ids: [token + 1 for token in ids])),
        (
            "decode-loses-specials",
            "special tokens are left out though they are asked for",
            (CHAT,),
            DECODE,
            lambda right: lambda self, ids, **_: right(self, ids, special=False),
        ),
        (
            "decode-strips",
            "decoding strips the text",
            (CHAT,),
            DECODE,
            lambda right: lambda self, ids, **options: right(self, ids, **options).strip(),
        ),
    )
)

TEMPLATE: Final = tuple(
    fault("chat template", "smollm2", what, says=says, at="chat_template", cases=CHAT, plant=swap(RENDER, by))
    for what, says, by in (
        ("no-opening", "the assistant's turn is not opened", without_opening),
        (
            "no-system",
            "the system message that the template adds is lost",
            rendered(lambda text: text[text.index("<|im_end|>\n") + 11 :]),
        ),
        (
            "another-role",
            "the user's message is rendered as the assistant's",
            asked(lambda messages: [{**message, "role": "assistant"} for message in messages]),
        ),
        ("no-line-ends", "line ends are lost", rendered(lambda text: text.replace("\n", ""))),
        ("stripped", "the text is stripped", rendered(str.strip)),
        (
            "white-space-kept",
            "line ends of the template's own source are kept",
            source(lambda text: text.replace("{% endfor %}", "{% endfor %}\n\n", 1) + "\n\n"),
        ),
        (
            "twice",
            "the conversation is rendered twice",
            asked(lambda messages: [*messages, *messages]),
        ),
        (
            "escaped",
            "characters are escaped for a page",
            rendered(lambda text: text.replace("<", "&lt;").replace(">", "&gt;")),
        ),
    )
)

FAULTS: Final[tuple[Fault, ...]] = (*TOKENIZER, *TEMPLATE)
