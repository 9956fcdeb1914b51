"""Runs one small case on mlx-lm and shows what it computes where an engine computed something else.

Stands alone, and is copied into reproducers: it needs mlx-lm, numpy and the folder that it lies in, nothing else.
`python reproduce.py` exits 0 where mlx-lm computes the recorded bits again and the recorded engine had others, 1 otherwise.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import numpy as np
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

DTYPES: Final = {"f32": mx.float32, "bf16": mx.bfloat16, "f16": mx.float16}
WORDS: Final = {2: mx.uint16, 4: mx.uint32}
SHOWN: Final = 5  # elements


def main(folder: Path) -> int:
    """Run, compare, tell."""
    case = json.loads((folder / "reproduce.json").read_text(encoding="utf-8"))
    model, _ = load_model(folder / "model")
    model.set_dtype(DTYPES[case["dtype"]])
    now = output_of(model, case)
    oracle, engine = (np.array(case[side], dtype=now.dtype) for side in ("oracle", "engine"))
    lines = [
        f"{case['module']} of step {case['step']}, last position, on mlx-lm {version('mlx-lm')}, mlx {version('mlx')}",
        f"  recorded with  {case['recorded_with']}",
        f"  mlx-lm now     {_against(now, oracle)}",
        f"  engine         {_against(engine, oracle)}",
    ]
    if engine.shape == oracle.shape:
        where = np.flatnonzero(engine != oracle)[:SHOWN]
        lines += [f"  element {i}: mlx-lm 0x{oracle[i]:x}, engine 0x{engine[i]:x}" for i in where]
    print("\n".join(lines))  # noqa: T201
    return 0 if np.array_equal(now, oracle) and not np.array_equal(engine, oracle) else 1


def output_of(model: Any, case: dict[str, Any]) -> Any:  # noqa: ANN401 - mlx-lm has no types
    """Bits of the module's output at the last position of the last forward, or of its row of logits, in a row."""
    seen: list[Any] = []
    if case["module"] != "logits":
        _watch(dict(model.named_modules())[case["module"]], seen)
    caches = make_prompt_cache(model)
    row: Any = None
    for ids in case["forwards"]:
        seen.clear()
        row = model(mx.array([ids]), cache=caches)[:, -1]
        mx.eval(row)
        maybe_quantize_kv_cache(caches, **case["kv"])
    out = row if case["module"] == "logits" else seen[-1][:, -1]
    return np.array(out.view(WORDS[out.dtype.size])).reshape(-1)


def _watch(module: Any, seen: list[Any]) -> None:  # noqa: ANN401 - an mlx-lm module
    """Keep what one module puts out; Python looks `__call__` up on the class."""
    kind = type(module)
    right = kind.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - whatever the module takes and gives
        out = right(self, *args, **kwargs)
        if self is module:
            seen.append(out[0] if isinstance(out, tuple | list) else out)
        return out

    kind.__call__ = call


def _against(bits: Any, oracle: Any) -> str:  # noqa: ANN401 - numpy words
    if bits.shape != oracle.shape:
        return f"{bits.size} elements where the recorded oracle has {oracle.size}"
    differ = int((bits != oracle).sum())
    return "the recorded bits of mlx-lm" if not differ else f"other bits in {differ} of {oracle.size} elements"


if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parent))
