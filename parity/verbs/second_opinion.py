"""`python -m parity.verbs.second_opinion`: transformers beside the engine, into `reports/transformers.md`.

Not a verb of `assay`: its environment is large and on demand, and nothing is gated by it. Needs the snapshot smollm2-135m.
"""

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from oracles.oracle_runner import OracleRunner
from oracles.registry import REPOSITORY, find_oracle
from parity.atomic_file import write_atomically
from parity.case import Case, Feed
from parity.errors import AssayError, OracleError
from parity.kv import KV
from parity.matrix import load_cases
from parity.models.fetch import ensure_snapshot
from parity.models.tiny_catalogue import HUB, config_names, forms_of
from parity.second_opinion import KNOWN, FamilyRow, Measured, PromptRow, markdown
from parity.snapshot import Snapshot
from parity.trace import Runner
from parity.truth.model import LOGITS, open_truth

PROMPTS: Final[Mapping[str, int]] = {"capital": 37, "ship": 12, "forest": 64}  # and how many of their tokens
STEPS: Final = 4
LENGTH: Final = 40  # tokens of the prompt of a tiny snapshot
SEED: Final = 3


def main(arguments: Sequence[str]) -> int:
    """Run both sides and write the report."""
    from parity.engine_runner import EngineRunner  # noqa: PLC0415 - brings mlx

    out = Path(arguments[0]) if arguments else REPOSITORY / "reports" / "transformers.md"
    second, engine = OracleRunner(oracle=find_oracle("transformers")), EngineRunner(kernels=None)
    try:
        prompts = prompt_rows(second, engine)
        families = family_rows(second, engine)
    except AssayError as error:
        print(error, file=sys.stderr)
        return 2
    torch = second.oracle.pins["torch"]
    write_atomically(out, markdown(f"{second.name}, torch {torch},", prompts, families).encode())
    print(f"{out}: {len(prompts)} rows of SmolLM2, {sum(f.measured is not None for f in families)} tiny snapshots")
    return 0


def prompt_rows(second: OracleRunner, engine: Runner) -> list[PromptRow]:
    """The first and the last row after each prompt, led along the engine's own greedy ids."""
    cases = {case.name: case for case in load_cases()}
    snapshot = ensure_snapshot("smollm2-135m")
    truth = open_truth(snapshot, "f32")
    named = {name: cases[f"smollm2-135m/f32/fp/greedy/{name}-tail-split"] for name in PROMPTS}
    greedy = [
        replace(named[name], prompt_ids=named[name].prompt_ids[:length], num_steps=STEPS)
        for name, length in PROMPTS.items()
    ]
    traces = [engine.run(case, snapshot) for case in greedy]
    led = [replace(case, forced_ids=trace.token_ids) for case, trace in zip(greedy, traces, strict=True)]
    rows = []
    for name, case, mine, other in zip(PROMPTS, led, traces, second.run_all(led, snapshot), strict=True):
        for step in (0, STEPS - 1):
            at = truth.at((*case.prompt_ids, *mine.token_ids[: STEPS - 1]), LOGITS, len(case.prompt_ids) - 1 + step)
            value, bound = at if at is not None else (np.zeros(0), 0.0)
            off = [float(np.abs(trace.logits(step).values()[0] - value).max()) for trace in (other, mine)]
            measured = Measured.of(other.logits(step), mine.logits(step))
            rows.append(
                PromptRow(
                    prompt=f"{name}, {PROMPTS[name]} tokens",
                    step=step,
                    measured=measured,
                    second_off=off[0],
                    engine_off=off[1],
                    bound=bound,
                )
            )
    return rows


def family_rows(second: OracleRunner, engine: Runner) -> list[FamilyRow]:
    """The first row of every tiny snapshot, as on the hub where that differs."""
    names = config_names()
    snapshots = [ensure_snapshot(f"{name}-{HUB}-tiny" if HUB in forms_of(name) else f"{name}-tiny") for name in names]
    asked = [(tiny_case(snapshot), snapshot) for snapshot in snapshots]
    with tempfile.TemporaryDirectory() as scratch:
        known = {
            name: (case, without(snapshot, KNOWN[name][1], Path(scratch) / name))
            for name, (case, snapshot) in zip(names, asked, strict=True)
            if name in KNOWN and KNOWN[name][1]
        }
        answers = second.run_each([*asked, *known.values()])
    neutral = dict(zip(known, answers[len(asked) :], strict=True))
    rows = []
    for name, (case, snapshot), answer in zip(names, asked, answers[: len(asked)], strict=True):
        if isinstance(answer, OracleError):
            rows.append(FamilyRow(config=name, refused=_short(answer)))
            continue
        mine = engine.run(case, snapshot).logits(0)
        other = neutral.get(name)
        rows.append(
            FamilyRow(
                config=name,
                measured=Measured.of(answer.logits(0), mine),
                neutral=None if other is None or isinstance(other, OracleError) else Measured.of(other.logits(0), mine),
            )
        )
    return rows


def tiny_case(snapshot: Snapshot) -> Case:
    """One row after a prompt of random ids, in float32."""
    ids = tuple(int(i) for i in np.random.PCG64(SEED).random_raw(LENGTH) % 512)
    return Case(
        name=f"{snapshot.name}/second-opinion",
        snapshot=snapshot.name,
        dtype="f32",
        prompt_ids=ids,
        forced_ids=(0,),
        feed=Feed(mode="whole"),
        kv=KV(),
        num_steps=1,
    )


def without(snapshot: Snapshot, changes: Mapping[str, Any], folder: Path) -> Snapshot:
    """The same weights under another config."""
    folder.mkdir()
    for file in snapshot.path.glob("*.safetensors"):
        (folder / file.name).symlink_to(file.resolve())
    (folder / "config.json").write_text(json.dumps({**snapshot.config, **changes}), encoding="utf-8")
    return Snapshot.read(folder, name=snapshot.name)


def _short(error: OracleError) -> str:
    """The first words of the oracle's reason, on one line and without a table's strokes."""
    text = " ".join(str(error.facts["reason"]).split()).replace("|", "/")
    return text if len(text) <= 90 else f"{text[:90]}..."


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
