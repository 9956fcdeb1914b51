"""The recorder of llama.cpp's samplers: `python -m oracles.llama_cpp.run FOLDER` in its environment, from the repository root.

Reads `cases.toml` beside this file and FOLDER/rows.safetensors, applies llama.cpp's samplers, and writes into FOLDER
`provenance.json`, `long_draws.safetensors` (cases with more than `LONG` draws) and, last, `samplers.json`: what is there is
complete. Equal inputs and environment give equal bytes. What is recorded of a case:

    ids, logits    the candidate array before the pick, of the first step; null for -inf
    left_probs     the probabilities in that array: of the last sampler that computed any, or 0; later samplers leave them stale
    probs          what the pick left in the array, of the first step, for the ids `picked_from`; null if it computes none
    draws          the picked id of every step

Arrays longer than `SHOWN` keep that many leading entries beside their length and the SHA-256 of all ids (little-endian int32).
"""

import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from oracles.llama_cpp.case_table import load_cases
from oracles.llama_cpp.sampler_chain import After, SamplerChain
from parity.atomic_file import write_atomically
from parity.provenance import Provenance
from parity.safetensors_file import dumps, loads
from parity.tensor import Tensor

SHOWN: Final = 64
LONG: Final = 100
WITHOUT_PROBS: Final = ("greedy",)


def main(folder: str) -> int:
    """Record every case."""
    root = Path(folder)
    rows = {
        name: np.frombuffer(tensor.data, dtype="<f4")
        for name, tensor in loads((root / "rows.safetensors").read_bytes()).items()
    }
    recorded = {}
    long_draws = {}
    for case in load_cases():
        result = record(case, rows[case["row"]])
        draws = result.pop("draws")
        if len(draws) > LONG:
            data = np.array(draws, dtype="<u2").tobytes()
            long_draws[case["name"]] = Tensor(dtype="U16", shape=(len(draws),), data=data)
        else:
            result["draws"] = draws
        recorded[case["name"]] = {**{k: v for k, v in case.items() if k != "name"}, **result}
    provenance = Provenance.capture(("llama-cpp-python",), device="cpu").to_json()
    provenance["digests"] = {}  # a wheel built here differs from build to build; the sdist's digest is in the lock
    write_atomically(root / "provenance.json", json.dumps(provenance, indent=1).encode() + b"\n")
    write_atomically(root / "long_draws.safetensors", dumps(long_draws))
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(result)}" for name, result in recorded.items())
    write_atomically(root / "samplers.json", f"{{\n{lines}\n}}\n".encode())
    return 0


def record(case: Mapping[str, Any], logits_V: npt.NDArray[np.float32]) -> dict[str, Any]:
    """Run one case.

    Raises:
        ValueError: The pick picked nothing.
    """
    before = _first_step(case, case["chain"], logits_V)
    after = _first_step(case, [*case["chain"], case["pick"]], logits_V)
    shown = None if case["pick"]["name"] in WITHOUT_PROBS else _floats(after.probs)
    return {
        "ids": _ids(before.ids),
        "logits": _floats(before.logits),
        "left_probs": _floats(before.probs),
        "picked_from": _ids(after.ids),
        "probs": shown,
        "draws": draw(case, logits_V),
    }


def draw(case: Mapping[str, Any], logits_V: npt.NDArray[np.float32]) -> list[int]:
    """The ids of all steps, each on the same row; a picked id is accepted where the case says so.

    Raises:
        ValueError: The pick picked nothing.
    """
    ids = []
    with SamplerChain([*case["chain"], case["pick"]], seed=case["seed"], vocabulary=len(logits_V)) as chain:
        for token in case["history"]:
            chain.accept(token)
        for _ in range(case["num_draws"]):
            selected = chain.apply(logits_V).selected
            if selected is None:
                raise ValueError(f"{case['name']}: the pick {case['pick']['name']} picked nothing")
            ids.append(selected)
            if case["accept"]:
                chain.accept(selected)
    return ids


def _first_step(case: Mapping[str, Any], steps: list[Any], logits_V: npt.NDArray[np.float32]) -> After:
    with SamplerChain(steps, seed=case["seed"], vocabulary=len(logits_V)) as chain:
        for token in case["history"]:
            chain.accept(token)
        return chain.apply(logits_V)


def _ids(ids: npt.NDArray[np.int32]) -> dict[str, Any]:
    digest = hashlib.sha256(np.sort(ids).astype("<i4").tobytes()).hexdigest()
    return {"count": len(ids), "sha256_of_sorted": digest, "leading": ids[:SHOWN].tolist()}


def _floats(values: npt.NDArray[np.float32]) -> list[float | None]:
    """Leading values in the fewest digits that give the same float32 back."""
    return [None if np.isneginf(value) else float(str(value)) for value in values[:SHOWN]]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
