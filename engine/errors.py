"""Errors of the engine that a user can meet: what happened, the facts, the next command.

Guarantees: whatever is wrong with a model folder, a prompt or an option is an `EngineError` before the first forward. The
layout is that of every message of this repository; it stands here too because the engine imports nothing else of ours.
"""

from typing import ClassVar


class EngineError(Exception):
    """Base of the errors that are the caller's to mend.

    Args:
        what: One line that says what happened.
        next_step: What mends it.
        facts: Aligned lines between the two; underscores in names become spaces.
    """

    kind: ClassVar[str] = "engine"

    def __init__(self, what: str, /, *, next_step: str, **facts: object) -> None:
        self.what = what
        self.next_step = next_step
        self.facts = facts
        rows = {name.replace("_", " "): str(value) for name, value in {**facts, "next": next_step}.items()}
        width = max(map(len, rows))
        lines = [what]
        for name, value in rows.items():
            first, *rest = value.splitlines() or [""]
            lines.append(f"  {name:<{width}}  {first}")
            lines += [f"  {'':<{width}}  {line}" for line in rest]
        super().__init__("\n".join(lines))


class ConfigError(EngineError):
    """config.json asks for what the family does not have, or lacks what it needs."""

    kind = "config"


class CheckpointError(EngineError):
    """The weights are missing, damaged, or not those that the config describes."""

    kind = "checkpoint"


class RequestError(EngineError):
    """A prompt or an option does not fit the model."""

    kind = "request"
