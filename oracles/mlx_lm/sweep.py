"""Sweep mlx-lm: `python -m oracles.mlx_lm.sweep REQUEST.json` in its environment, from the repository root.

The request holds `models` (name to config), `functions` (a config), `dtypes`, `kvs`, `patterns` and `answered` (names of rows).
For each row two lines come back, `{"asking": name}` and `{"row": {...}}`, and at the end `{"done": n}`: the parent knows what
an oracle died of and starts another process with what was answered. A model that cannot be built is answered as raised, never
left out. What is asked and how it is judged is in `parity.sweeping`; nothing here knows a right answer.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from parity.sweeping.outcome import Outcome, Pair, outcome_of
from parity.sweeping.plan import ask, ask_functions, functions, names
from parity.sweeping.row import FUNCTIONS, OPENS, Row, wanted
from parity.sweeping.rows import token_ids
from parity.sweeping.subject import Subject

Open = Callable[[Mapping[str, Any], str], Subject]


class Asked:
    """What a request wants, name by name, each announced before it is asked."""

    def __init__(self, request: Mapping[str, Any], open_subject: Open, announce: Callable[[str], None]) -> None:
        self._patterns, self._answered = request["patterns"], set(request["answered"])
        self._announce, self.open, self.kvs = announce, open_subject, request["kvs"]

    def wants(self, model: str, dtype: str, kv: str, invariance: str) -> bool:
        """Whether a row is wanted and was not answered before."""
        name = f"{model}/{dtype}/{kv}/{invariance}"
        return name not in self._answered and wanted(self._patterns, name)

    def row(self, model: str, dtype: str, kv: str, invariance: str, ask_it: Callable[[], Outcome]) -> Row:
        """Announce a row, then answer it."""
        self._announce(f"{model}/{dtype}/{kv}/{invariance}")
        return Row(model=model, dtype=dtype, kv=kv, invariance=invariance, outcome=ask_it())


def rows(request: Mapping[str, Any], open_subject: Open, announce: Callable[[str], None]) -> Iterator[Row]:
    """Every row that the request asks for.

    Args:
        request: As the module says.
        open_subject: From a config and a dtype to a subject.
        announce: Told the name of each row before it is asked.
    """
    asked = Asked(request, open_subject, announce)
    for dtype in request["dtypes"]:
        yield from _of_functions(asked, request["functions"], dtype)
        for model, config in request["models"].items():
            yield from _of_model(asked, model, config, dtype)


def _of_model(asked: Asked, model: str, config: Mapping[str, Any], dtype: str) -> Iterator[Row]:
    todo = [(kv, name) for kv in asked.kvs for name in names(kv) if asked.wants(model, dtype, kv, name)]
    if not todo:
        return
    opened: list[Subject] = []

    def open_it() -> Iterator[Pair]:
        opened.append(asked.open(config, dtype))
        same = token_ids([0])
        yield Pair(label="opened", expected=same, actual=same)

    row = asked.row(model, dtype, "fp", OPENS, lambda: outcome_of(open_it()))
    if not opened:
        yield row
        return
    for kv, name in todo:
        yield asked.row(model, dtype, kv, name, partial(ask, opened[0], name, kv))


def _of_functions(asked: Asked, config: Mapping[str, Any], dtype: str) -> Iterator[Row]:
    todo = [name for name in functions() if asked.wants(FUNCTIONS, dtype, "fp", name)]
    if todo:
        subject = asked.open(config, dtype)
        for name in todo:
            yield asked.row(FUNCTIONS, dtype, "fp", name, partial(ask_functions, subject, name, dtype))


def serve(file: str, open_subject: Open) -> int:
    """Answer a request on standard output."""
    answers, count = sys.stdout, 0
    sys.stdout = sys.stderr  # an oracle may print

    def say(what: Mapping[str, Any]) -> None:
        print(json.dumps(what), file=answers, flush=True)

    request = json.loads(Path(file).read_text(encoding="utf-8"))
    for row in rows(request, open_subject, lambda name: say({"asking": name})):
        count += 1
        say({"row": row.to_json()})
    say({"done": count})
    return 0


def main(file: str) -> int:
    """Import mlx-lm and answer."""
    from oracles.mlx_lm.sweep_subject import MlxLmSubject  # noqa: PLC0415 - takes seconds and may print

    return serve(file, MlxLmSubject)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
