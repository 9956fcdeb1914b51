"""Proof that a refusal is deserved: every refused cell of `parity/cases/KV_MODES.md` is put to the oracles themselves.

Run as `python -m oracles.refused_modes`, beside the environments of both oracles. Each tiny snapshot of a row is asked for the
row's refused modes; an oracle must break off, or leave the option out, which its runner notices and reports. Prints what each
said and how often; exit code 1 where an oracle ran what the engine refuses. Nothing is recorded.

Guarantees: the cells are those of the committed table, snapshots are told apart by the cache words of their committed goldens,
and the engine takes no part.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from oracles.environment import ensure_environment
from oracles.process import Event, Task, events
from oracles.registry import Oracle, find_oracle
from parity.case import Case, Feed
from parity.errors import OracleError
from parity.golden import GOLDENS, Golden
from parity.kv import KV
from parity.matrix import CASES, random_ids
from parity.models.fetch import ensure_snapshot
from parity.models.tiny_catalogue import config_names, read
from parity.platform_key import platform_key

TABLE: Final = CASES / "KV_MODES.md"
NUM_STEPS: Final = 4
WORDS: Final = {  # the word that stands for a column; {all} becomes the places of all caches
    "kv": "kv8-g32",
    "kv after-prompt": "kv8-g32-after-prompt",
    "kv from-empty": "kv8-g32-from-empty",
    "config": "config-8g32_{all}",
    "max": "max16-k4",
    "max kv": "max16-k4-kv8-g32",
    "kv tiled": "kv8-g32-tiled16-lifted",
}
Run = Callable[[Oracle, Sequence[Task]], Iterator[Event]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A cell that says refused.

    Attributes:
        model_type: The family of its row.
        caches: Kinds of the row's caches.
        mode: Its column.
    """

    model_type: str
    caches: tuple[str, ...]
    mode: str


def refusals(table: str) -> tuple[Refusal, ...]:
    """The refused cells of the table's Markdown, row by row.

    Raises:
        OracleError: There is no such table in the text, or a refused column that no word is known for.
    """
    lines = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    head = next((cells for cells in lines if cells[:2] == ["family", "caches"]), None)
    rows = [] if head is None else lines[lines.index(head) + 1 :]
    found = tuple(
        Refusal(model_type=cells[0], caches=tuple(cells[1].split(", ")), mode=mode)
        for cells in rows
        for mode, cell in zip((head or [])[2:], cells[2:], strict=False)
        if cell.startswith("refused ")
    )
    unknown = sorted({refusal.mode for refusal in found} - set(WORDS))
    if not found or unknown:
        raise OracleError(
            "the table of KV modes cannot be read",
            refused=len(found),
            unknown=", ".join(unknown) or "none",
            next_step="python -m parity.kv_mode_table, and compare its columns with oracles/refused_modes.py",
        )
    return found


def questions(
    refused: Sequence[Refusal], oracle: Oracle, caches_of: Callable[[str], tuple[str, ...]]
) -> Iterator[Case]:
    """The cases that put refused cells to an oracle, one a cell and config of its row.

    Args:
        refused: Cells.
        oracle: Whom to ask; mlx-lm alone is not asked for what it does not have at all.
        caches_of: Cache words of a config's tiny snapshot.
    """
    for config in config_names():
        words = caches_of(config)
        row = (str(read(config)["model_type"]), tuple(dict.fromkeys(words)))
        for cell in refused:
            if (cell.model_type, cell.caches) != row:
                continue
            kv = KV.parse(WORDS[cell.mode].replace("{all}", "_".join(map(str, range(len(words))))))
            if oracle.name == "mlx-lm" and (kv.layers or kv.tile is not None):
                continue
            yield Case(
                name=f"{config}-tiny/f32/{kv.name}/refused/{oracle.name}",
                snapshot=f"{config}-tiny",
                dtype="f32",
                prompt_ids=random_ids("prompt/p40", 40, 512),
                forced_ids=random_ids("forced/p40", NUM_STEPS, 512),
                feed=Feed.parse("chunk7"),
                kv=kv,
                num_steps=NUM_STEPS,
                oracle=oracle.name,
                tier="L1" if oracle.name == "mlx-lm" else "L2",
            )


def ask(cases: Sequence[Case], oracle: Oracle, run: Run) -> tuple[Counter[str], list[str]]:
    """What an oracle said to each case, counted, and the names of the cases that it ran, or never answered."""
    said: Counter[str] = Counter()
    left = {case.name for case in cases}
    with TemporaryDirectory(prefix="assay-refused-") as folder:
        tasks = [
            Task(
                case=case.to_json(),
                snapshot={"name": case.snapshot, "path": str(ensure_snapshot(case.snapshot).path)},
                out=Path(folder) / str(number),
            )
            for number, case in enumerate(cases)
        ]
        for event in run(oracle, tasks):
            if event.kind == "failed" and event.case is not None:
                left.discard(event.case)
                said[f"{event.facts.get('kind')}: {str(event.facts.get('message')).splitlines()[0][:100]}"] += 1
    return said, sorted(left)


def main() -> int:
    """Ask both oracles; 1 where one of them ran a refused mode."""
    refused, ran = refusals(TABLE.read_text(encoding="utf-8")), list[str]()
    for oracle in map(find_oracle, ("mlx-lm", "mlx-optiq")):
        said, more = ask(list(questions(refused, oracle, _caches_of)), oracle, _run)
        ran += more
        sys.stdout.write(f"{oracle.name} {oracle.version}: {sum(said.values())} refused\n")
        sys.stdout.writelines(f"  {count:4} {words}\n" for words, count in said.most_common())
    sys.stdout.writelines(f"RAN, or no answer: {name}\n" for name in ran)
    return 1 if ran else 0


def _run(oracle: Oracle, tasks: Sequence[Task]) -> Iterator[Event]:
    yield from events(oracle, ensure_environment(oracle), {0: tasks})


def _caches_of(config: str) -> tuple[str, ...]:
    """Cache words after a run without a KV mode, from any committed golden of the tiny snapshot."""
    folder = GOLDENS / f"mlx-lm-{find_oracle('mlx-lm').version}" / platform_key() / f"{config}-tiny/f32/fp/forced"
    return Golden.load(min(folder.glob("p40-*.json"))).cache


if __name__ == "__main__":
    sys.exit(main())
