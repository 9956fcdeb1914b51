"""A minimal reproducer: a snapshot cut down while the difference persists, ids, options, a script that needs the oracle alone.

What is cut: the prompt (to the shortest that differs), the steps after the first that differs, the layers after the one where
the difference begins, the rows of embedding and head that no id names. Guarantees: every cut was run on both sides, and kept
only where the same module is still the first to differ; weights that stay are the snapshot's own, bit for bit.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from parity import safetensors_file
from parity.atomic_file import write_atomically
from parity.case import Case
from parity.explaining.explain import Explanation
from parity.localize import LOGITS, Place, localize
from parity.models.tiny import write_snapshot
from parity.snapshot import Snapshot
from parity.tensor import Tensor
from parity.trace import TOKEN_IDS, Runner, Trace, activation_name, logits_name

LAYER: Final = re.compile(r"(?:^|\.)layers\.(\d+)\.")
VOCABULARY: Final = re.compile(r"(?:^|\.)(?:embed_tokens|embeddings|lm_head)\.(?:weight|scales|biases|bias)$")
PIECE: Final = 2048  # tokens a forward, where nothing else is asked

Model = tuple[dict[str, Any], dict[str, Tensor]]
Both = Callable[[Case, Snapshot], tuple[Trace, Trace]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reproducer:
    """What was written.

    Attributes:
        folder: Holds `model/`, `reproduce.json`, `reproduce.py`.
        cuts: What could be cut, in words.
    """

    folder: Path
    cuts: tuple[str, ...]


def write_reproducer(
    explanation: Explanation,
    snapshot: Snapshot,
    expected: Runner,
    actual: Runner,
    *,
    folder: Path,
    script: Path,
    recorded_with: str,
) -> Reproducer | None:
    """Cut a differing case down and write it.

    Args:
        explanation: Of the case.
        snapshot: What it ran on.
        expected: The oracle.
        actual: The engine.
        folder: Where to; what lies there is replaced.
        script: What runs the reproducer, copied as it is.
        recorded_with: The oracle and the versions that its recorded bits rest on.

    Returns:
        What was written; None where the difference is one of ids, or of outputs that one side alone has.
    """
    origin = explanation.origin
    if origin is None or origin.module == TOKEN_IDS or origin.only_on is not None:
        return None

    def both(case: Case, cut: Snapshot) -> tuple[Trace, Trace]:
        return expected.run(case, cut), actual.run(case, cut)

    case = _short(explanation, origin, snapshot, expected)
    model: Model = (dict(snapshot.config), _tensors(snapshot.path))
    best = _written(folder / "model", model)
    traces = both(case, best)
    cuts = [_of_prompt(explanation.case, case)]
    for what, cut in (("layers", _fewer_layers), ("ids", _fewer_ids)):
        attempt = cut(case, model, origin.module)
        if attempt is None:
            continue
        smaller_case, smaller, words = attempt
        found = _tried(both, smaller_case, _written(folder / f"try-{what}", smaller), origin.module)
        if found is not None:
            case, model, traces = smaller_case, smaller, found
            cuts.append(words)
        _remove(folder / f"try-{what}")
    _written(folder / "model", model)
    place = localize(*traces)
    module, step = (origin.module, case.num_steps - 1) if place is None else (place.module, place.step)
    described = _described(case, module, step, traces, recorded_with)
    write_atomically(folder / "reproduce.json", (json.dumps(described) + "\n").encode())
    write_atomically(folder / "reproduce.py", script.read_bytes())
    return Reproducer(folder=folder, cuts=tuple(cuts))


def forwards(case: Case, ids: Sequence[int]) -> list[list[int]]:
    """What is fed in each forward up to the row of the last step.

    Args:
        case: Prompt and feed.
        ids: The ids that follow the rows before the last one.
    """
    prompt = list(case.prompt_ids)
    if case.feed.mode == "whole" or len(prompt) == 1:
        pieces = [prompt]
    else:
        size = case.feed.chunk or PIECE
        pieces = [prompt[:-1][i : i + size] for i in range(0, len(prompt) - 1, size)] + [prompt[-1:]]
    return pieces + [[token] for token in ids]


def _short(explanation: Explanation, origin: Place, snapshot: Snapshot, expected: Runner) -> Case:
    """The shortest prompt that differs, or the case up to its first differing step, along the oracle's ids."""
    if explanation.shortest is not None:
        return replace(explanation.shortest.case, forced_ids=(0,), kv=explanation.shortest.case.kv)
    steps = origin.step + 1
    ids = explanation.case.forced_ids or expected.run(explanation.case, snapshot).token_ids
    return replace(explanation.case, num_steps=steps, record=explanation.record, forced_ids=tuple(ids[:steps]))


def _of_prompt(before: Case, after: Case) -> str:
    return f"{len(after.prompt_ids)} of {len(before.prompt_ids)} prompt tokens, {after.num_steps} of {before.num_steps} steps"


def _fewer_layers(case: Case, model: Model, module: str) -> tuple[Case, Model, str] | None:
    """Only the layers up to that of the module; None where it is in none, or in the last."""
    config, tensors = model
    text = config.get("text_config", config)
    layers, match = text.get("num_hidden_layers"), LAYER.search(f"{module}.")
    if match is None or not isinstance(layers, int) or int(match[1]) + 1 >= layers:
        return None
    keep = int(match[1]) + 1
    cut = {key: _shorter(key, value, layers, keep) for key, value in text.items()} | {"num_hidden_layers": keep}
    left = {n: t for n, t in tensors.items() if (m := LAYER.search(n)) is None or int(m[1]) < keep}
    return case, (_with_text(config, cut), left), f"{keep} of {layers} layers"


def _shorter(key: str, value: object, layers: int, keep: int) -> object:
    """A list with an entry a layer, cut; a list of layers, without those that are gone."""
    if not isinstance(value, list):
        return value
    if key == "mlp_only_layers":
        return [layer for layer in value if layer < keep]
    return value[:keep] if len(value) == layers else value


def _fewer_ids(case: Case, model: Model, module: str) -> tuple[Case, Model, str] | None:
    """Only the rows of embedding and head that the case names, and new ids for them."""
    del module
    config, tensors = model
    text = config.get("text_config", config)
    size = text.get("vocab_size")
    used = sorted({*case.prompt_ids, *(case.forced_ids or ())} | {0, 1})
    tables = [name for name in tensors if VOCABULARY.search(name)]
    if not isinstance(size, int) or len(used) >= size or any(tensors[name].shape[0] != size for name in tables):
        return None
    rows, new = np.array(used), {old: i for i, old in enumerate(used)}
    left = tensors | {n: Tensor.of(tensors[n].bits()[rows], dtype=tensors[n].dtype) for n in tables}
    cut = replace(
        case,
        prompt_ids=tuple(new[i] for i in case.prompt_ids),
        forced_ids=None if case.forced_ids is None else tuple(new[i] for i in case.forced_ids),
    )
    changed = _with_text(config, {**text, "vocab_size": len(used)})
    return cut, (changed, left), f"{len(used)} of {size} ids, renumbered"


def _with_text(config: Mapping[str, Any], text: Mapping[str, Any]) -> dict[str, Any]:
    return {**config, "text_config": dict(text)} if "text_config" in config else dict(text)


def _tried(both: Both, case: Case, snapshot: Snapshot, module: str) -> tuple[Trace, Trace] | None:
    """The traces of a smaller case where it still begins to differ in that module; None where it does not, or is refused."""
    try:
        traces = both(case, snapshot)
    except Exception:  # noqa: BLE001 - a cut that either side refuses is not made; the uncut case is what counts
        return None
    place = localize(*traces)
    return traces if place is not None and place.module == module else None


def _described(case: Case, module: str, step: int, traces: tuple[Trace, Trace], recorded_with: str) -> dict[str, Any]:
    """What the script reads."""
    name = logits_name(step) if module == LOGITS else activation_name(step, module)
    words = [[int(word) for word in trace.tensors[name].bits().reshape(-1)] for trace in traces]
    return {
        "case": case.name,
        "dtype": case.dtype,
        "module": module,
        "step": step,
        "forwards": forwards(case, (case.forced_ids or ())[:step]),
        "kv": {
            "kv_bits": case.kv.bits,
            "kv_group_size": case.kv.group_size,
            "quantized_kv_start": case.kv.start,
        },
        "recorded_with": recorded_with,
        "oracle": words[0],
        "engine": words[1],
    }


def _written(folder: Path, model: Model) -> Snapshot:
    write_snapshot(folder, *model)
    return Snapshot.read(folder, name=folder.name)


def _tensors(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= safetensors_file.loads(file.read_bytes())
    return found


def _remove(folder: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (folder / name).unlink(missing_ok=True)
    if folder.is_dir():
        folder.rmdir()
