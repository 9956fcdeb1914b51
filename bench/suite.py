"""The whole table in one interleaved run: configurations, prompt lengths, threads, and all peers.

mlx-lm computes a product by scalar code, so a long prompt takes it minutes. What is done about that, in every figure's `note`:

- prefill is compared in tokens a second, mlx-lm's over the first `rival_tokens` of the prompt; the engine runs those too, and
  their bits are compared;
- decode at a position is compared from the same keys and values: the engine computes them, mlx-lm takes them over, and the
  bits of every decoded row are compared.

llama.cpp computes all by itself; its sums have another order, so only its speed counts.

Guarantees: all sides of a figure are asked in turn within one repeat, in an order that rotates; one unmeasured run precedes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.interleave import MIB, Figure, decode_rate, prompt
from bench.peers import LLAMA_CPP, MLX_LM
from bench.statistics import paired_ratio, spread
from bench.worker import Worker

ENGINE: Final = "engine"
MACHINE: Final = "machine"
HANDED: Final = "resident, at most; mlx-lm took the keys and values over and filled no prompt"
READ_MIB: Final = 384  # beyond any cache

Answer = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """What is measured together: a snapshot in a dtype, beside its peers.

    Attributes:
        snapshot: Name in the catalogue.
        dtype: What engine and mlx-lm compute in.
        rival_tokens: Tokens of a prompt that mlx-lm is timed on, at most.
        num_tokens: Tokens generated after each prompt.
        llama: What llama.cpp runs beside it, in words; None where nothing is like it.
    """

    snapshot: str
    dtype: str
    rival_tokens: int = 32
    num_tokens: int = 8
    llama: str | None = None

    @property
    def where(self) -> str:
        """Such as `smollm2-135m/f32`."""
        return f"{self.snapshot}/{self.dtype}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much of the table is measured.

    Attributes:
        name: `full` or `quick`.
        configurations: Rows.
        prompts: Lengths.
        repeats: Of every figure.
        one_thread: Lengths that are measured on one thread too.
        startup: Whether start-up is measured, cold and warm.
    """

    name: str
    configurations: tuple[Configuration, ...]
    prompts: tuple[int, ...]
    repeats: int
    one_thread: tuple[int, ...]
    startup: bool


FULL: Final = Size(
    name="full",
    configurations=(
        Configuration(snapshot="smollm2-135m", dtype="f32", llama="f32"),
        Configuration(snapshot="smollm2-135m", dtype="bf16"),
        Configuration(snapshot="smollm2-135m-f32", dtype="f32", llama="f32"),
        Configuration(snapshot="smollm2-135m-q4", dtype="f32", llama="Q4_1"),
        Configuration(snapshot="smollm2-135m-q4", dtype="bf16", rival_tokens=8, num_tokens=5, llama="Q4_1"),
    ),
    prompts=(32, 256, 1024),
    repeats=4,
    one_thread=(32, 256),
    startup=True,
)
ON_REQUEST: Final = (  # snapshots with terms of use: measured beside the others where they are named
    Configuration(snapshot="gemma3-270m", dtype="f32", rival_tokens=16),
    Configuration(snapshot="gemma3-270m", dtype="bf16", rival_tokens=16),
)
QUICK: Final = Size(
    name="quick",
    configurations=(
        Configuration(snapshot="smollm2-135m", dtype="f32", rival_tokens=8, num_tokens=4, llama="f32"),
        Configuration(snapshot="smollm2-135m-q4", dtype="f32", rival_tokens=8, num_tokens=4, llama="Q4_1"),
    ),
    prompts=(32,),
    repeats=2,
    one_thread=(),
    startup=False,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A configuration with what its workers need to open.

    Attributes:
        configuration: Which.
        folder: Of the snapshot.
        weights_name: What its weights are known by; a kept proof of the model is looked up under it.
        vocabulary: Prompts are drawn below it.
        gguf: File for llama.cpp; None where it takes no part.
        scratch: Existing folder for keys and values.
    """

    configuration: Configuration
    folder: Path
    weights_name: str
    vocabulary: int
    gguf: Path | None
    scratch: Path


def measure_configuration(
    at: Loaded, size: Size, workers: dict[str, Worker], *, threads: int, on_progress: Callable[[str], None]
) -> list[Figure]:
    """Measure one configuration on all sides.

    Args:
        at: What to open.
        size: How much to measure.
        workers: By name: the engine, mlx-lm, and llama.cpp where it takes part.
        threads: Of the engine and of llama.cpp; mlx-lm computes every product on one.
        on_progress: Told in a line each what has been done.

    Raises:
        AssayError: A worker refused or died.
    """
    figures = _loads(at, size, workers, threads)
    on_progress(f"loaded {at.configuration.where}")
    weights = int(workers[ENGINE].ask(**_load(at, ENGINE, threads))["weight_bytes"])
    for length in size.prompts:
        figures += _at_length(at, size, workers, length=length, threads=threads, weights=weights, suffix="")
        on_progress(f"ran {at.configuration.where}, prompt {length}")
    if size.one_thread and threads > 1:
        for name in (ENGINE, LLAMA_CPP):
            if name in workers and (name == ENGINE or at.gguf is not None):
                workers[name].ask(**_load(at, name, 1))
        for length in size.one_thread:
            figures += _at_length(at, size, workers, length=length, threads=1, weights=weights, suffix="/t1")
        on_progress(f"ran {at.configuration.where} on one thread")
    return figures


def _load(at: Loaded, name: str, threads: int) -> dict[str, Any]:
    if name == LLAMA_CPP:
        return {"op": "load", "file": str(at.gguf), "threads": threads, "context": 2048}
    request = {"op": "load", "snapshot": str(at.folder), "dtype": at.configuration.dtype}
    return {**request, "name": at.weights_name, "threads": threads} if name == ENGINE else request


def _loads(at: Loaded, size: Size, workers: dict[str, Worker], threads: int) -> list[Figure]:
    names = [name for name in workers if name != LLAMA_CPP or at.gguf is not None]
    answers = _in_turn(names, workers, min(2, size.repeats), lambda name: _load(at, name, threads))
    return [
        figure(
            f"load/{at.configuration.where}",
            "s",
            peer,
            [float(a[ENGINE]["seconds"]) for a in answers],
            [float(a[peer]["seconds"]) for a in answers],
            bits=None,
            note="open, and one token",
        )
        for peer in names
        if peer != ENGINE
    ]


def _at_length(
    at: Loaded, size: Size, workers: dict[str, Worker], *, length: int, threads: int, weights: int, suffix: str
) -> list[Figure]:
    config = at.configuration
    prompt_ids = prompt(length, at.vocabulary)
    rival_ids = prompt_ids[: config.rival_tokens]
    held = at.scratch / "keys_and_values.safetensors"
    workers[ENGINE].ask(op="export", prompt_ids=prompt_ids, file=str(held))
    run = {"op": "run", "num_tokens": config.num_tokens}
    asked: dict[str, dict[str, Any]] = {
        ENGINE: {**run, "prompt_ids": prompt_ids},
        MLX_LM: {**run, "prompt_ids": prompt_ids, "cache": str(held)},
    }
    if at.gguf is not None:
        asked[LLAMA_CPP] = {**run, "prompt_ids": prompt_ids}
    short = {"op": "run", "num_tokens": 2, "prompt_ids": rival_ids}
    rounds: list[dict[str, Answer]] = []
    for name, request in asked.items():  # warms up, unmeasured
        workers[name].ask(
            **{**request, "prompt_ids": prompt_ids if name == MLX_LM else prompt_ids[:4], "num_tokens": 2}
        )
    for i in range(size.repeats):
        answers = _once(list(asked), workers, asked.__getitem__, turn=i)
        answers |= {f"{n} short": a for n, a in _once([ENGINE, MLX_LM], workers, lambda _: short, turn=i).items()}
        answers[MACHINE] = workers[ENGINE].ask(op="read", threads=threads, mib=READ_MIB)
        rounds.append(answers)
    held.unlink()
    return _figures(at, rounds, length=length, weights=weights, suffix=suffix)


def _figures(
    at: Loaded, rounds: Sequence[dict[str, Answer]], *, length: int, weights: int, suffix: str
) -> list[Figure]:
    config, where = at.configuration, at.configuration.where
    rival = min(length, config.rival_tokens)

    def of(name: str, value: Callable[[Answer], float]) -> list[float]:
        return [value(answers[name]) for answers in rounds]

    def same(one: str, other: str) -> bool:
        return all(answers[one]["logits"] == answers[other]["logits"] for answers in rounds)

    def prefill(tokens: int) -> Callable[[Answer], float]:
        return lambda answer: tokens / float(answer["prompt_seconds"])

    decode = f"decode/{where}/p{length}{suffix}"
    filled = f"prefill/{where}/{length}{suffix}"
    memory = f"memory/{where}/p{length}{suffix}"
    speed = of(ENGINE, decode_rate)
    found = [
        figure(
            decode,
            "tok/s",
            MLX_LM,
            speed,
            of(MLX_LM, decode_rate),
            bits=same(ENGINE, MLX_LM),
            note=f"{config.num_tokens} tokens from the engine's keys and values",
        ),
        figure(
            filled,
            "tok/s",
            MLX_LM,
            of(ENGINE, prefill(length)),
            of(f"{MLX_LM} short", prefill(rival)),
            bits=same(f"{ENGINE} short", f"{MLX_LM} short"),
            note="" if rival == length else f"{MLX_LM} on the first {rival} tokens, which is where bits are compared",
        ),
        figure(memory, "MiB", MLX_LM, of(ENGINE, _mib), of(MLX_LM, _mib), bits=None, note=HANDED),
        figure(
            f"bandwidth/{where}/p{length}{suffix}",
            "GB/s",
            MACHINE,
            [weights * rate / 1e9 for rate in speed],
            of(MACHINE, lambda answer: float(answer["bytes_per_second"]) / 1e9),
            bits=None,
            note=f"{weights / 1e6:.0f} MB of weights a token, beside what the machine reads",
        ),
    ]
    if at.gguf is not None:
        note = f"llama.cpp on {config.llama} weights"
        found += [
            figure(decode, "tok/s", LLAMA_CPP, speed, of(LLAMA_CPP, llama_decode_rate), bits=None, note=note),
            figure(
                filled,
                "tok/s",
                LLAMA_CPP,
                of(ENGINE, prefill(length)),
                of(LLAMA_CPP, prefill(length)),
                bits=None,
                note=note,
            ),
            figure(
                memory, "MiB", LLAMA_CPP, of(ENGINE, _mib), of(LLAMA_CPP, _mib), bits=None, note="resident, at most"
            ),
        ]
    return found


def llama_decode_rate(answer: Answer) -> float:
    """Tokens a second, the first token counted and not timed, as mlx-lm and the engine count."""
    return int(answer["num_tokens"]) / float(answer["decode_seconds"])


def figure(
    name: str, unit: str, peer: str, ours: Sequence[float], theirs: Sequence[float], *, bits: bool | None, note: str
) -> Figure:
    """One line of the table from neighbouring values."""
    return Figure(
        name=name,
        peer=peer,
        unit=unit,
        engine=spread(ours),
        peer_value=spread(theirs),
        ratio=paired_ratio(ours, theirs),
        bits_identical=bits,
        note=note,
    )


def _in_turn(
    names: list[str], workers: dict[str, Worker], repeats: int, request: Callable[[str], dict[str, Any]]
) -> list[dict[str, Answer]]:
    return [_once(names, workers, request, turn=i) for i in range(repeats)]


def _once(
    names: list[str], workers: dict[str, Worker], request: Callable[[str], dict[str, Any]], *, turn: int
) -> dict[str, Answer]:
    """Every side once, beginning with another one in each turn."""
    first = turn % len(names)
    return {name: workers[name].ask(**request(name)) for name in names[first:] + names[:first]}


def _mib(answer: Answer) -> float:
    return float(answer["peak_bytes"]) / MIB
