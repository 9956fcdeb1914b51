"""The pair table: how far our draws are from llama.cpp's, sampler by sampler, over the 10,000 draws recorded of each.

    python -m engine.llama_sampling.pair_table tests/fixtures/llama_cpp reports/samplers.md

Guarantees: llama.cpp's draws are read from files that its oracle wrote (`oracles/llama_cpp/run.py`); nothing of it runs here.
Two comparisons a sampler: with the recorded seed, where ids must be equal one by one, and with an unrelated generator, where
the distance should be about what two samples of one distribution have by chance. The table describes; the tests judge.
"""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file

from engine.errors import RequestError
from engine.llama_sampling.generators import Generator, Mt19937, Xoroshiro128Plus
from engine.llama_sampling.strategy import sample_with_strategy
from engine.llama_sampling.strategy_table import strategy_of

PREFIX: Final = "pair/"
OTHER_SEED: Final = 20260

Draws = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One sampler, ours and llama.cpp's.

    Attributes:
        name: The sampler.
        options: Of the chain and the pick, as text.
        num_draws: Draws of either.
        num_equal: Draws with equal ids, the generator and its seed being the same.
        same_seed: Total variation distance of the two histograms then.
        other_generator: The same with our draws from xoroshiro128+.
        by_chance: Mean distance of two samples of one distribution, estimated from both histograms. Draws that look at earlier
            ones (penalties, DRY, mirostat) are not independent, so for them it is a guide only.
    """

    name: str
    options: str
    num_draws: int
    num_equal: int
    same_seed: float
    other_generator: float
    by_chance: float


def pair_table(recorded: Path, *, num_draws: int | None = None) -> tuple[Pair, ...]:
    """Draw with our samplers what was recorded of llama.cpp's, and compare.

    Args:
        recorded: Folder that `oracles/llama_cpp/run.py` wrote.
        num_draws: Only so many of each; all by default.

    Raises:
        RequestError: The folder holds no such recording.
    """
    try:
        cases = json.loads((recorded / "samplers.json").read_text(encoding="utf-8"))
        long_draws = load_file(recorded / "long_draws.safetensors")
        rows = load_file(recorded / "rows.safetensors")
    except FileNotFoundError as error:
        raise RequestError(
            "the recorded draws of llama.cpp are not there",
            looked_at=error.filename or recorded,
            next_step="name the folder that oracles/llama_cpp/run.py wrote",
        ) from error
    pairs = []
    for name, case in cases.items():
        if name.startswith(PREFIX):
            expected = long_draws[name].astype(np.int64)[:num_draws]
            pairs.append(_pair(name.removeprefix(PREFIX).split("/")[0], case, rows[case["row"]], expected))
    return tuple(pairs)


def draws_of(
    case: Mapping[str, Any], logits_V: npt.NDArray[np.float32], count: int, generators: Sequence[Generator]
) -> Draws:
    """Ids that our samplers draw for a recorded case.

    Args:
        case: As `samplers.json` holds it.
        logits_V: Its row.
        count: Steps.
        generators: Of the pick, and of XTC.
    """
    params = strategy_of(case["chain"], case["pick"])
    history = list(case["history"])
    ids = np.empty(count, dtype=np.int64)
    for step in range(count):
        sampled = sample_with_strategy(
            logits_V, token_history=history, params=params, prng=generators[0], xtc_prng=generators[1]
        )
        params = sampled.params
        ids[step] = sampled.token_id
        if case["accept"]:
            history.append(sampled.token_id)
    return ids


def total_variation(expected: Draws, actual: Draws) -> float:
    """Half the sum of differences between two histograms of ids, each over its own count."""
    size = int(max(expected.max(), actual.max())) + 1
    shares = [np.bincount(ids, minlength=size) / len(ids) for ids in (expected, actual)]
    return float(np.abs(shares[0] - shares[1]).sum() / 2)


def chance_distance(shares: npt.NDArray[np.float64], count: int) -> float:
    """Mean total variation distance between two samples of `count` draws, differences taken as normal."""
    return float(np.sqrt(shares * (1 - shares) / (math.pi * count)).sum())


def as_markdown(pairs: Sequence[Pair]) -> str:
    """The table as a Markdown page."""
    lines = [
        "# Samplers: ours and llama.cpp's",
        "",
        "Total variation distance between the ids drawn by both, on the 64 largest logits of a row of SmolLM2-135M.",
        "*Same seed*: both from mt19937 with one seed, draw by draw. *Other generator*: ours from xoroshiro128+.",
        "*By chance*: what two samples of one distribution differ by on average, a guide where draws look at earlier ones.",
        "",
        "| sampler | options | draws | equal ids | same seed | other generator | by chance |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {p.name} | {p.options} | {p.num_draws} | {p.num_equal} | {p.same_seed:.4f} | {p.other_generator:.4f} "
        f"| {p.by_chance:.4f} |"
        for p in pairs
    ]
    return "\n".join(
        [*lines, "", "`python -m engine.llama_sampling.pair_table tests/fixtures/llama_cpp reports/samplers.md`", ""]
    )


def main(recorded: str, page: str) -> int:
    """Write the page; 0 when every id is equal under the same seed, 1 otherwise."""
    pairs = pair_table(Path(recorded))
    target = Path(page)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(as_markdown(pairs), encoding="utf-8")
    return 0 if all(pair.num_equal == pair.num_draws for pair in pairs) else 1


def _pair(name: str, case: Mapping[str, Any], logits_V: npt.NDArray[np.float32], expected: Draws) -> Pair:
    count = len(expected)
    same = draws_of(case, logits_V, count, (Mt19937(case["seed"]), Mt19937(case["seed"])))
    other = draws_of(case, logits_V, count, (Xoroshiro128Plus(OTHER_SEED), Xoroshiro128Plus(OTHER_SEED + 1)))
    shares = np.bincount(np.concatenate([expected, other])) / (2 * count)
    return Pair(
        name=name,
        options=_options(case),
        num_draws=count,
        num_equal=int((same == expected).sum()),
        same_seed=total_variation(expected, same),
        other_generator=total_variation(expected, other),
        by_chance=chance_distance(shares, count),
    )


def _options(case: Mapping[str, Any]) -> str:
    tables = [*case["chain"], case["pick"]]
    texts = [f"{key} {value}" for table in tables for key, value in table.items() if key != "name"]
    return ", ".join(texts) or "none"


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
