"""The table of KV modes: for every family and mode the cases that judge it, or the reason why the engine refuses it.

`python -m parity.kv_mode_table` writes it to `parity/cases/KV_MODES.md`; a test holds that file to what this module gives.

Guarantees: a cell is read from the cases, or from the refusal that the engine itself gives before a first forward; nothing
is written by hand. A mode that has neither is `NOT COVERED`, and `uncovered` lists it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from engine.errors import EngineError
from engine.generate import Feed, steps
from engine.model import CausalModel, open_model
from parity.atomic_file import write_atomically
from parity.case import Case
from parity.engine_kv import engine_mode
from parity.kv import KV
from parity.matrix import CASES, load_cases
from parity.models.catalogue import entries
from parity.models.fetch import ensure_snapshot
from parity.models.tiny_catalogue import TinySource, config_names, read

FILE: Final = CASES / "KV_MODES.md"
UNCOVERED: Final = "NOT COVERED"
# A column's name, and words to ask the engine for where no case has it: the first one that fits is enough.
MODES: Final[Mapping[str, tuple[str, ...]]] = {
    "fp": ("fp",),
    "kv": ("kv8-g64", "kv8-g32"),
    "kv after-prompt": ("kv8-g32-after-prompt",),
    "kv from-empty": ("kv8-g32-from-empty",),
    "config": tuple(f"config-8g32_{place}" for place in range(8)),
    "max": ("max16-k4",),
    "max kv": ("max16-k4-kv8-g32",),
    "kv tiled": ("kv8-g32-tiled16-lifted",),
}
HEAD: Final = """# KV modes

Written by `python -m parity.kv_mode_table`; do not edit. One row for the caches that a family's tiny snapshots make. A cell
names the dtypes of its cases and the oracle that they are held to; each of them is gated as bit-identical by `assay check`. A
number is a refusal: the engine says so before the first forward, where the oracle breaks off in the middle or ignores the
option (`python -m oracles.refused_modes` shows that it does).

| mode | word | what it is |
| --- | --- | --- |
| fp | `fp` | keys and values as computed |
| kv | `kv8-g64`, `kv4-g32-s16` | packed after every forward, from a number of tokens on: the order of mlx-lm's loop |
| kv after-prompt | `kv8-g64-after-prompt` | packed once the whole prompt has run on plain keys and values |
| kv from-empty | `kv8-g64-from-empty` | packed from the first token on |
| config | `config-8g64_0_2-4g32_3` | widths by cache, as in a kv_config.json |
| max | `max16-k4` | rings in the place of plain caches, the first four positions kept |
| max kv | `max16-k4-kv8-g64` | packed rings of that kind |
| kv tiled | `kv8-g64-tiled512` | attention over packed keys in tiles; lifted: in float32 too, which no release does |

mlx-lm obeys `max_kv_size` only where a model makes no caches of its own; elsewhere (llama, mistral, ministral3 among others)
the oracle's loop is handed the same rings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table.

    Attributes:
        model_type: The family.
        caches: Kinds of the caches that it makes, each once.
        cells: By column: dtypes and oracles, a reason against the mode, or `NOT COVERED`.
        refused: Columns whose cell is a reason.
    """

    model_type: str
    caches: tuple[str, ...]
    cells: Mapping[str, str]
    refused: frozenset[str]


def mode_of(kv: KV) -> str:
    """The column of a KV mode."""
    if kv.tile is not None:
        return "kv tiled"
    if kv.layers:
        return "config"
    if kv.max_size is not None:
        return "max kv" if kv.packs else "max"
    if not kv.packs:
        return "fp"
    return "kv" if kv.order == "after-forward" else f"kv {kv.order}"


def rows(cases: Iterable[Case]) -> tuple[Row, ...]:
    """The table's rows, by family and caches.

    Args:
        cases: All of them; those of single sequences on tiny snapshots count.
    """
    models = {config: open_model(ensure_snapshot(f"{config}-tiny").path, dtype="f32") for config in config_names()}
    keys = {config: (str(read(config)["model_type"]), _kinds(model)) for config, model in models.items()}
    judged: dict[tuple[tuple[str, tuple[str, ...]], str], list[Case]] = {}
    for case in cases:
        if case.sampling is None and case.batch is None and (config := _config(case.snapshot)) is not None:
            judged.setdefault((keys[config], mode_of(case.kv)), []).append(case)
    table = []
    for key in sorted(set(keys.values())):
        members = [models[config] for config in keys if keys[config] == key]
        cells, refused = {}, set()
        for mode in MODES:
            if found := judged.get((key, mode)):
                cells[mode] = _described(found)
            elif reason := refusal(members, mode):
                cells[mode] = reason
                refused.add(mode)
            else:
                cells[mode] = UNCOVERED
        table.append(Row(model_type=key[0], caches=key[1], cells=cells, refused=frozenset(refused)))
    return tuple(table)


def refusal(models: Sequence[CausalModel], mode: str) -> str | None:
    """Why the engine refuses a column's mode to every one of some models; None where it grants any of its words."""
    reasons: dict[str, None] = {}
    for model in models:
        for word in MODES[mode]:
            try:
                steps(model, [1], num_steps=1, feed=Feed(whole=True), kv=engine_mode(KV.parse(word)))
            except EngineError as error:
                reasons[f"{error.what}: {error.facts.get('reason', '')}"] = None
            else:
                return None
    return next(iter(reasons))


def uncovered(table: Iterable[Row]) -> list[str]:
    """Cells with neither a case nor a refusal, as `family (caches): mode`."""
    return [
        f"{row.model_type} ({', '.join(row.caches)}): {mode}"
        for row in table
        for mode, cell in row.cells.items()
        if cell == UNCOVERED
    ]


def markdown(table: Iterable[Row]) -> str:
    """The file's text: the words, the table, the reasons by number."""
    reasons: dict[str, int] = {}
    lines = ["| family | caches | " + " | ".join(MODES) + " |", "| --- " * (2 + len(MODES)) + "|"]
    for row in table:
        cells = [
            f"refused {reasons.setdefault(cell, len(reasons) + 1)}" if mode in row.refused else cell
            for mode, cell in row.cells.items()
        ]
        lines.append("| " + " | ".join([row.model_type, ", ".join(row.caches), *cells]) + " |")
    numbered = [f"{number}. {reason}" for reason, number in reasons.items()]
    return "\n".join([HEAD, "", *lines, "", "Refusals:", "", *numbered, ""])


def _kinds(model: CausalModel) -> tuple[str, ...]:
    return tuple(dict.fromkeys(cache.kind for cache in model.make_caches()))


def _config(snapshot: str) -> str | None:
    """The config of a tiny snapshot; None for a real model."""
    source = entries()[snapshot].source
    return source.config if isinstance(source, TinySource) else None


def _described(cases: Sequence[Case]) -> str:
    """Such as `f32, bf16 mlx-lm; f32 mlx-optiq`."""
    dtypes: dict[str, dict[str, None]] = {}
    for case in cases:
        dtypes.setdefault(case.oracle, {})[case.dtype + (" lifted" if case.kv.lifted else "")] = None
    return "; ".join(f"{', '.join(of)} {oracle}" for oracle, of in sorted(dtypes.items()))


def main(file: Path = FILE) -> None:
    """Write the table."""
    table = rows(load_cases())
    write_atomically(file, markdown(table).encode())
    print(f"{len(table)} rows; not covered: {', '.join(uncovered(table)) or 'none'}")  # noqa: T201 - a command


if __name__ == "__main__":
    main()
