"""A golden's facts: what its page prints, as plain values.

Guarantees: read from the golden and from the rows at hand alone (`parity.golden_view`); equal goldens give equal facts.
"""

from collections.abc import Sequence

from parity.golden_view import GoldenView
from parity.judge import oracle_name
from parity.reporting.facts import TextOf
from parity.reporting.results import Json
from parity.row_difference import Scored, finite


def golden_facts(
    view: GoldenView, *, text_of: TextOf = lambda _snapshot, _token: None, prompt_text: str | None = None
) -> Json:
    """Everything that a golden's page shows.

    Args:
        view: The golden, row by row.
        text_of: Snapshot and token id to the token's text; None where there is no tokenizer.
        prompt_text: The prompt as its snapshot's tokenizer decodes it.
    """
    golden = view.golden
    case = golden.case

    def told(scored: Sequence[Scored]) -> list[Json]:
        return [
            {"id": one.token_id, "text": text_of(case.snapshot, one.token_id), "logprob": finite(one.logprob)}
            for one in scored
        ]

    return {
        "case": case.name,
        "oracle": oracle_name(golden),
        "form": golden.form,
        "exact": view.exact,
        "prompt_ids": list(case.prompt_ids),
        "num_prompt_tokens": len(case.prompt_ids),
        "prompt_text": prompt_text,
        "feed": case.feed.name,
        "kv": case.kv.name,
        "cache": list(dict.fromkeys(golden.cache)),
        "sampler": case.sampler,
        "forced": case.forced_ids is not None,
        "num_steps": case.num_steps,
        "token_ids": list(golden.token_ids),
        "perplexity": finite(view.perplexity),
        "steps": [
            {
                **step.to_json(),
                "text": None if step.token_id is None else text_of(case.snapshot, step.token_id),
                "top": told(step.top),
            }
            for step in view.steps
        ],
        "provenance": golden.provenance.to_json(),
        "history": [{"oracle": r.oracle, "mlx": r.mlx, "reason": r.reason} for r in golden.history],
    }
