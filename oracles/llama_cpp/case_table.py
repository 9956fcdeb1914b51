"""The cases of `cases.toml`, one a row of logits and seed; needs nothing of llama.cpp.

Guarantees: a case holds every field, so a recording shows what its table left to the defaults. Names are unique.
"""

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

CASES: Final = Path(__file__).with_name("cases.toml")
DEFAULT_SEED: Final = 42
DEFAULT_DRAWS: Final = 24


def load_cases(file: Path = CASES) -> list[dict[str, Any]]:
    """All cases in the table's order.

    Raises:
        ValueError: A table holds a key that no case has, or two cases have one name.
    """
    return list(expanded(tomllib.loads(file.read_text(encoding="utf-8"))))


def expanded(table: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """One case a row of logits and seed of each table.

    Raises:
        ValueError: A table holds a key that no case has, or two cases have one name.
    """
    known = {"name", "rows", "chain", "pick", "history", "accept", "seeds", "draws"}
    names = set()
    for raw in table["case"]:
        if unknown := set(raw) - known:
            raise ValueError(f"unknown keys {sorted(unknown)} of case {raw.get('name')}")
        for row in raw["rows"]:
            for seed in raw.get("seeds", [DEFAULT_SEED]):
                name = f"{raw['name']}/{row}/s{seed}"
                if name in names:
                    raise ValueError(f"two cases are named {name}")
                names.add(name)
                yield {
                    "name": name,
                    "row": row,
                    "chain": raw["chain"],
                    "pick": raw.get("pick", {"name": "dist"}),
                    "history": raw.get("history", []),
                    "accept": raw.get("accept", False),
                    "seed": seed,
                    "num_draws": raw.get("draws", DEFAULT_DRAWS),
                }
