"""Chat templates: messages to the text that a model was trained on.

Guarantees: a template comes from a snapshot and is not trusted; it runs in jinja2's immutable sandbox, with the globals
and filters that templates on the hub rely on and nothing that reaches the system. The date that a template may ask for is
the caller's, so that the same messages give the same text on any day.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.config import load_json
from engine.errors import RequestError

EPOCH = date(2024, 1, 1)
EVALUATION_ERRORS = (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, RecursionError)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTemplate:
    """A snapshot's chat template.

    Attributes:
        source: Jinja text.
        tokens: Names that the template may use for special tokens, such as `bos_token`.
    """

    source: str
    tokens: Mapping[str, str]

    @classmethod
    def open(cls, folder: Path) -> "ChatTemplate":
        """Read chat_template.jinja, or `chat_template` of tokenizer_config.json.

        Raises:
            RequestError: The snapshot has none, or one that is not text.
        """
        config = load_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
        file = folder / "chat_template.jinja"
        try:
            source = file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")
        except (OSError, UnicodeDecodeError) as error:
            raise RequestError(
                "the chat template cannot be read",
                file=f"{folder.name}/{file.name}",
                reason=error,
                next_step="fetch it again",
            ) from error
        if not isinstance(source, str):
            raise RequestError(
                "the snapshot has no chat template",
                folder=folder.name,
                next_step="give the text as it should be tokenised (assay generate --raw)",
            )
        names = {key: _content(value) for key, value in config.items() if key.endswith("_token")}
        return cls(source=source, tokens={key: name for key, name in names.items() if name is not None})

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        today: date = EPOCH,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a conversation.

        Args:
            messages: `{"role": ..., "content": ...}` in order.
            add_generation_prompt: Open the assistant's turn at the end.
            today: What `strftime_now` of the template sees.
            options: Further names that the template reads, such as `tools` or `enable_thinking`.

        Raises:
            RequestError: The template is malformed, refuses the messages, or tries to leave the sandbox.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"], autoescape=False
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = today.strftime
        names = {**self.tokens, **(options or {})}
        try:
            return environment.from_string(self.source).render(
                names, messages=list(messages), add_generation_prompt=add_generation_prompt
            )
        except (jinja2.TemplateError, *EVALUATION_ERRORS) as error:
            raise RequestError(
                "the chat template does not render these messages",
                reason=f"{type(error).__name__}: {error}",
                roles=", ".join(str(message.get("role")) for message in messages),
                next_step="give messages that the model's template takes",
            ) from error


def _content(value: object) -> str | None:
    """A special token's text: tokenizer_config.json holds it plain, or as an object."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _tojson(value: object, *, indent: int | None = None, ensure_ascii: bool = False) -> str:
    """JSON without HTML escapes: the text goes to a tokenizer, not to a page."""
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
