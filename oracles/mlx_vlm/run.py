"""The recorder of mlx-vlm's TurboQuant: `python -m oracles.mlx_vlm.run FOLDER TABLES MODELS`, from the repository's root.

Runs in its environment. Writes TABLES (the codebooks, `WIDTH.BITS`), and into FOLDER `codes.safetensors` (vectors, their codes,
what these decode to, attention of one query over them), `logits.safetensors` (rows of tiny models of the folder MODELS, a
prompt fed as mlx-lm's loop does, then forced ids) and `provenance.json`. Equal inputs and environment give equal bytes.
"""

import json
import sys
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import numpy as np
from mlx_lm.utils import load_model

from oracles.mlx_vlm.turboquant import install, load, turbo_caches
from parity.atomic_file import write_atomically
from parity.provenance import Provenance
from parity.safetensors_file import dumps
from parity.tensor import Tensor

PACKAGES: Final = ("mlx", "mlx-cpu", "mlx-metal", "mlx-lm", "mlx-vlm", "numpy")
WIDTHS: Final = (32, 64, 128, 256, 512)
SHOWN: Final = (64,)
CODES: Final = (2, 3, 4, 8)
BITS: Final = (2, 3, 3.5, 4, 8)
MODELS: Final = (("llama-tiny", "F32"), ("llama-tiny", "BF16"), ("qwen3-tiny", "F32"))
DTYPES: Final = {"F32": mx.float32, "BF16": mx.bfloat16, "F16": mx.float16, "U32": mx.uint32, "I32": mx.int32}
PROMPT, FORCED = 40, 7
ROWS: Final = FORCED + 1


def tensor(array: mx.array) -> Tensor:
    """An array as it is stored."""
    name = next(name for name, dtype in DTYPES.items() if dtype == array.dtype)
    words = np.array(mx.contiguous(array).view({2: mx.uint16, 4: mx.uint32}[array.dtype.size]))
    return Tensor(dtype=name, shape=tuple(array.shape), data=words.tobytes())


def normal(seed: int, *shape: int) -> mx.array:
    """Normally distributed values of a seed."""
    return mx.array(np.random.default_rng(seed).standard_normal(shape, dtype=np.float32))


def tables() -> dict[str, mx.array]:
    """Every codebook that the engine offers."""
    return {f"{width}.{bits}": load()._codebook(width, bits) for width in WIDTHS for bits in CODES}  # noqa: SLF001


def codes() -> dict[str, mx.array]:
    """Vectors and what mlx-vlm makes of them: 2 heads of 9 positions, four of these unusual; 4 query heads.

    Every code of every width is there; what codes decode to, which is large, for the widths of `SHOWN` alone.
    """
    out: dict[str, mx.array] = {}
    for width in WIDTHS:
        usual = normal(width, 1, 2, 5, width)
        unusual = [
            mx.zeros((1, 2, 1, width)),
            usual[:, :, :1] * 1e-9,
            usual[:, :, 1:2] * 1e4,
            mx.ones((1, 2, 1, width)),
        ]
        keys = mx.concatenate([usual, *unusual], axis=2)
        values = normal(width + 1, *keys.shape)
        queries = normal(width + 2, 1, 4, 1, width)
        out |= {f"{width}.keys": keys, f"{width}.values": values, f"{width}.queries": queries}
        for bits in BITS if width in SHOWN else (2, 3.5, 8):
            for dtype in ("F32", "BF16") if bits == 3.5 else ("F32",):
                cache = load().TurboQuantKVCache(bits=bits)
                k, v, q = (array.astype(DTYPES[dtype]) for array in (keys, values, queries))
                cache.update_and_fetch(k[:, :, :8], v[:, :, :8])
                states = cache.update_and_fetch(k[:, :, 8:], v[:, :, 8:])
                name = f"{width}.{bits}.{dtype}"
                for word, state in zip(("keys", "values"), cache.state, strict=True):
                    out |= {f"{name}.{word}.norms": state.norms, f"{name}.{word}.codes": state.indices}
                if width in SHOWN:
                    for word, dense in zip(("keys", "values"), cache.dequantize(*states), strict=True):
                        out[f"{name}.{word}.decoded"] = dense
                out[f"{name}.one"] = cache.decode_attention(q, *states, scale=0.2, mask=None)
                window = (mx.arange(9) > 2)[None, None, None]
                out[f"{name}.masked"] = cache.decode_attention(q, *states, scale=0.2, mask=window)
    return out


def ids(seed: int, count: int) -> list[int]:
    """Token ids of a seed, below the tiny models' vocabulary."""
    return [int(i) for i in np.random.default_rng(seed).integers(0, 500, count)]


def rows(model: Any, bits: float) -> mx.array:  # noqa: ANN401 - an mlx-lm model
    """Rows [ROWS, V]: all of the prompt but its last token, that token, then forced ones."""
    caches, prompt = turbo_caches(model, bits), ids(40, PROMPT)
    model(mx.array([prompt[:-1]]), cache=caches)
    taken = []
    for token in [prompt[-1], *ids(41, FORCED)]:
        taken.append(model(mx.array([[token]]), cache=caches)[:, -1])
        mx.eval(taken[-1])
    return mx.concatenate(taken)


def logits(models: Path) -> dict[str, mx.array]:
    """Rows of every model, dtype and width, and the ids that were fed."""
    out = {"prompt": mx.array(ids(40, PROMPT)), "forced": mx.array(ids(41, FORCED))}
    for name, dtype in MODELS:
        model, _ = load_model(models / name)
        model.set_dtype(DTYPES[dtype])
        install()
        out |= {f"{name}.{dtype}.{bits}": rows(model, bits) for bits in BITS}
    return out


def main(folder: Path, table: Path, models: Path) -> int:
    """Record everything; provenance comes last, and what is there is complete then."""
    if mx.default_device() != mx.Device(mx.cpu):
        raise RuntimeError("mlx-vlm's Metal kernels are another computation: record on the CPU")
    recorded = {table: tables(), folder / "codes.safetensors": codes(), folder / "logits.safetensors": logits(models)}
    for file, arrays in recorded.items():
        write_atomically(file, dumps({name: tensor(array) for name, array in arrays.items()}))
    provenance = Provenance.capture(PACKAGES, device="cpu").to_json()
    write_atomically(folder / "provenance.json", json.dumps(provenance, indent=1).encode() + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
