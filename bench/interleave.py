"""One interleaved run: every measurement of the engine has a neighbour of the peer, in alternating order.

Guarantees: the pairs of a figure come from the same minutes of the same machine; which side goes first alternates, so that
neither profits from a warm file cache or a cooling processor; one unmeasured run precedes. Bits are compared pair by pair.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np

from bench.statistics import Spread, paired_ratio, spread
from bench.worker import Worker

MIB: Final = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is measured.

    Attributes:
        snapshot: Name in the catalogue.
        folder: Where it lies.
        vocabulary: Prompts are drawn below it.
        dtype: What both sides compute in.
        prompts: Prompt lengths; each gives a prefill and a decode figure.
        num_tokens: Tokens generated after each prompt.
        repeats: Pairs a figure.
    """

    snapshot: str
    folder: str
    vocabulary: int
    dtype: str
    prompts: tuple[int, ...]
    num_tokens: int
    repeats: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One line of the table.

    Attributes:
        name: Such as `decode/smollm2-135m/f32/p32`.
        peer: Whose value stands beside the engine's.
        unit: `tok/s`, `s` or `MiB`.
        engine: Spread of the engine's values.
        peer_value: Spread of the peer's values.
        ratio: Spread of engine / peer within pairs.
        bits_identical: Whether every pair's logits were the same bits; None where no logits are made or compared.
        note: What a reader must know about how the two sides differ.
    """

    name: str
    peer: str
    unit: str
    engine: Spread
    peer_value: Spread
    ratio: Spread
    bits_identical: bool | None
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        """The keys of design section 7, and the spreads behind them."""
        return {
            "name": self.name,
            "peer": self.peer,
            "engine": self.engine.median,
            "peer_value": self.peer_value.median,
            "unit": self.unit,
            "ratio": self.ratio.median,
            "low": self.ratio.low,
            "high": self.ratio.high,
            "pairs": self.ratio.count,
            "engine_range": [self.engine.low, self.engine.high],
            "peer_range": [self.peer_value.low, self.peer_value.high],
            "bits_identical": self.bits_identical,
            "note": self.note,
        }


def measure(work: Workload, engine: Worker, peer: Worker, *, on_progress: Callable[[str], None]) -> list[Figure]:
    """Measure load, prefill, decode and peak memory of a workload on both sides.

    Args:
        work: What to measure.
        engine: A running engine worker.
        peer: A running oracle worker.
        on_progress: Told in a line each what has been done.
    """
    loads = asked_in_turn(work.repeats, engine, peer, op="load", snapshot=work.folder, dtype=work.dtype)
    where = f"{work.snapshot}/{work.dtype}"
    on_progress(f"load {where}")
    figures = [_figure(f"load/{where}", "s", peer.name, loads, _seconds, bits=False)]
    for length in work.prompts:
        prompt_ids = prompt(length, work.vocabulary)
        for worker in (engine, peer):  # warms up, unmeasured
            worker.ask(op="run", prompt_ids=prompt_ids[:4], num_tokens=2)
        runs = asked_in_turn(work.repeats, engine, peer, op="run", prompt_ids=prompt_ids, num_tokens=work.num_tokens)
        on_progress(f"run {where} prompt {length}")
        figures += [
            _figure(f"prefill/{where}/{length}", "tok/s", peer.name, runs, partial(prefill_rate, length)),
            _figure(f"decode/{where}/p{length}", "tok/s", peer.name, runs, decode_rate),
            _figure(f"memory/{where}/p{length}", "MiB", peer.name, runs, _peak_mib),
        ]
    return figures


def prompt(length: int, vocabulary: int) -> list[int]:
    """Ids of a prompt, the same on every machine."""
    ids: list[int] = np.random.Generator(np.random.PCG64(length)).integers(0, vocabulary, length).tolist()
    return ids


def prefill_rate(length: int, answer: dict[str, Any]) -> float:
    """Prompt tokens a second on the prompt clock."""
    return length / float(answer["prompt_seconds"])


def decode_rate(answer: dict[str, Any]) -> float:
    """Tokens a second on the decode clock, the first token counted as mlx-lm counts it."""
    return len(answer["token_ids"]) / float(answer["decode_seconds"])


def _seconds(answer: dict[str, Any]) -> float:
    return float(answer["seconds"])


def _peak_mib(answer: dict[str, Any]) -> float:
    return float(answer["peak_bytes"]) / MIB


def asked_in_turn(
    repeats: int,
    engine: Worker,
    peer: Worker,
    **request: Any,  # noqa: ANN401 - JSON values
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Answers of both sides, (engine, peer) a pair, asked in alternating order."""
    pairs = []
    for i in range(repeats):
        first, second = (engine, peer) if i % 2 == 0 else (peer, engine)
        answers = {first.name: first.ask(**request), second.name: second.ask(**request)}
        pairs.append((answers[engine.name], answers[peer.name]))
    return pairs


def _figure(
    name: str,
    unit: str,
    peer: str,
    pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]],
    value: Callable[[dict[str, Any]], float],
    *,
    bits: bool = True,
) -> Figure:
    ours, theirs = [value(e) for e, _ in pairs], [value(p) for _, p in pairs]
    return Figure(
        name=name,
        peer=peer,
        unit=unit,
        engine=spread(ours),
        peer_value=spread(theirs),
        ratio=paired_ratio(ours, theirs),
        bits_identical=all(e["logits"] == p["logits"] for e, p in pairs) if bits else None,
    )
