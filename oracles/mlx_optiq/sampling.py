"""Sampler cases through the sampling of mlx-optiq's own engine, and the uniform behind each draw.

Its engine draws in two places: what its draft head proposes through `_sample_with_dist` (temperature, top-k, top-p, min-p, a
floor under every share), and what the model itself says through `_logits_to_token` (temperature alone, no floor). A case is
answered by the first. Where temperature is its only option the second answers it too, and must give the same ids.

Guarantees: both are called as the engine calls them, with a vector [V], after one `mx.random.seed`. mlx 0.32.4 draws from a
vector by adding Gumbel noise to it, where from a matrix [1, V] it walks the cumulative sum: the shape decides the id. The
uniforms are computed beside the draws, from the key that the global stream was about to use, and do not advance it.
"""

import importlib
from collections.abc import Sequence
from typing import Any, Final

import mlx.core as mx
import numpy as np

from parity.case import Case
from parity.sampled_trace import sampled_trace
from parity.sampling import Sampling
from parity.tensor import Tensor
from parity.trace import Trace

_ENGINE: Final[Any] = importlib.import_module("optiq.runtime.engine")
_DRAFT: Final = _ENGINE._sample_with_dist  # noqa: SLF001 - it offers no public way to draw
_DECODE: Final = _ENGINE._logits_to_token  # noqa: SLF001 - likewise
FILTERS: Final = ("top_p", "top_k", "min_p")  # the names are mlx-optiq's too
DTYPES: Final = {"F32": mx.float32, "BF16": mx.bfloat16, "F16": mx.float16}


def sample(case: Case, sampling: Sampling, rows: Sequence[Tensor]) -> Trace:
    """Draw what a sampler case asks for.

    Args:
        case: The question.
        sampling: Its part on drawing.
        rows: [1, V] each, in the case's dtype.

    Raises:
        ValueError: mlx-optiq's engine has no such option or batch, or its two ways to draw disagree.
    """
    options = sampling.named
    temperature = options.pop("temperature", 0.0)
    if outside := sorted(set(options) - set(FILTERS)):
        raise ValueError(f"mlx-optiq's engine has no option {', '.join(outside)}")
    if sampling.batch != 1:
        raise ValueError(f"mlx-optiq's engine draws one row at a time, not {sampling.batch}")
    arrays = [mx.array(row.bits()).view(DTYPES[row.dtype])[0] for row in rows]
    ids, uniforms = [], []
    mx.random.seed(sampling.seed)
    for step in range(case.num_steps):
        row = arrays[step % len(arrays)]
        key = _next_key()
        token, _ = _DRAFT(row, temperature, **options)
        ids.append(token)
        if not sampling.greedy:
            uniforms.append(np.array(mx.random.uniform(shape=row.shape, key=key))[token])
    if not options:
        mx.random.seed(sampling.seed)
        check_agree(ids, [_DECODE(arrays[step % len(arrays)], temperature) for step in range(case.num_steps)])
    return sampled_trace(
        rows,
        np.array(ids)[:, None],
        uniforms=np.array(uniforms)[:, None] if uniforms else None,
        xtc_uniforms=None,
    )


def check_agree(drafted: Sequence[int], decoded: Sequence[int]) -> None:
    """Refuse to let one chain stand for two.

    Raises:
        ValueError: A draw of temperature alone depends on which of the engine's functions makes it.
    """
    if differing := [step for step, pair in enumerate(zip(drafted, decoded, strict=True)) if pair[0] != pair[1]]:
        at = differing[0]
        raise ValueError(
            f"mlx-optiq's two ways to draw disagree {len(differing)} times, first at draw {at}: "
            f"{drafted[at]} with a floor under every share, {decoded[at]} without"
        )


def _next_key() -> mx.array:
    """The key that the global stream gives next, without taking it."""
    stream: Any = mx.random.state
    return mx.random.split(mx.array(stream[0]))[1]
