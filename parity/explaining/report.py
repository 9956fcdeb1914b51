"""An explanation for people and for programs.

Guarantees: the message has the project's one form (what happened, aligned facts, the next command); `as_json` has the keys that
`assay check --json` uses for the same things.
"""

import math
from pathlib import Path

from parity.compare import TensorDiff
from parity.errors import lay_out
from parity.explaining.explain import Explanation
from parity.localize import LOGITS, Place
from parity.trace import TOKEN_IDS

CONVERSION = {
    "before": "the difference predates it: the same case with keys and values as computed differs too",
    "after": "the difference begins with it: the same case with keys and values as computed is bit-identical",
}


def message(explanation: Explanation, reproducer: Path | None = None) -> str:
    """The message of an explanation."""
    case, name = explanation.case, explanation.expected_name
    place, origin, cause = explanation.place, explanation.origin, explanation.cause
    if place is None or origin is None:
        return lay_out(
            f"{case.name} is bit-identical to {name}: there is nothing to explain",
            {"compared": f"{_modules(explanation)} at the last position and the logits of {case.num_steps} steps"},
        )
    facts: dict[str, object] = {"step": f"{place.step} of {case.num_steps}"}
    if explanation.described is not None:
        facts["first"], facts["count"] = explanation.described
    facts["earliest"] = origin.module
    facts["inputs"] = _inputs(explanation, origin)
    facts["operation"] = origin.operation
    if origin.diff is not None and origin.diff.first is not None and origin.module != LOGITS:
        facts["element"] = _element(origin.diff, origin.heads)
    facts["position"] = _position(explanation)
    if explanation.conversion is not None:
        facts["conversion"] = CONVERSION[explanation.conversion]
    facts["cause"] = str(cause)
    if reproducer is not None:
        facts["reproducer"] = reproducer
    facts["next"] = _next(explanation, reproducer)
    return lay_out(f"{_subject(explanation)} of {case.name} are not bit-identical to {name}", facts)


def as_json(explanation: Explanation, reproducer: Path | None = None) -> dict[str, object]:
    """The object that `assay explain --json` prints."""
    origin, cause, place = explanation.origin, explanation.cause, explanation.place
    score = None if cause is None else cause.rescore
    diff = None if origin is None else origin.diff
    return {
        "case": explanation.case.name,
        "status": "IDENTICAL" if explanation.identical else "DIFFERENT",
        "oracle": explanation.expected_name,
        "num_steps": explanation.case.num_steps,
        "first_step": place and place.step,
        "earliest": explanation.module,
        "inputs_identical": explanation.inputs_identical,
        "before": [] if origin is None else list(origin.before),
        "operation": origin and origin.operation,
        "element": None if diff is None or diff.first is None else list(diff.first),
        "heads": [] if origin is None else list(origin.heads),
        "position": explanation.position,
        "conversion": explanation.conversion,
        "cause": cause and cause.kind,
        "side": cause and cause.side,
        "evidence": cause and cause.evidence,
        "rescore": score
        and {
            "module": score.module,
            "oracle": _number(score.oracle),
            "engine": _number(score.engine),
            "bound": _number(score.bound),
        },
        "margin": None if cause is None or cause.margin is None else _number(cause.margin),
        "reproducer": None if reproducer is None else str(reproducer),
    }


def _number(value: float) -> float | str:
    """A number as JSON has it; what it has not, in words."""
    return value if math.isfinite(value) else str(value)


def _modules(explanation: Explanation) -> str:
    if explanation.record == ("*",):
        return "every module's output"
    return f"outputs of {', '.join(explanation.record)}"


def _subject(explanation: Explanation) -> str:
    if explanation.row is not None:
        return "logits"
    return "token ids" if explanation.module == TOKEN_IDS else "activations"


def _inputs(explanation: Explanation, origin: Place) -> str:
    if not origin.before:
        return "the ids alone: no module runs before it"
    shown = ", ".join(origin.before)
    if explanation.shortest is None and explanation.place is not None and explanation.place.step == 0:
        return f"identical at this position: {shown}"
    return f"identical: {shown}, and every earlier position"


def _element(diff: TensorDiff, heads: tuple[int, ...]) -> str:
    text = f"{diff.at_first()}; {diff.counted()}"
    return f"{text}; head{'s' * (len(heads) > 1)} {', '.join(map(str, heads))}" if heads else text


def _position(explanation: Explanation) -> str:
    length = len(explanation.case.prompt_ids)
    if explanation.shortest is not None:
        cut = len(explanation.shortest.case.prompt_ids)
        shorter = f", one of {cut - 1} does not" if cut > 1 else ""
        return f"{explanation.position} of a prompt of {length}: its first {cut} tokens differ{shorter}"
    where = "of a prompt" if (explanation.position or 0) < length else "after a prompt"
    return f"{explanation.position} {where} of {length}"


def _next(explanation: Explanation, reproducer: Path | None) -> str:
    if reproducer is not None:
        return f"python {reproducer / 'reproduce.py'}, in any environment that has the oracle"
    if explanation.cause is not None and explanation.cause.side == "oracle":
        return "report it to the oracle's authors, and enter it in parity/deviations.toml"
    return f"mend {explanation.module}, then assay check '{explanation.case.name}'"
