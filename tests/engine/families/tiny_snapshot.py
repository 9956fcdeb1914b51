"""A tiny snapshot's config, and its logits on a few fixed ids, at once or in pieces: what tests of a family start from."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from engine.dtype import DTypeName
from engine.model import CausalModel, open_model
from parity.models.fetch import ensure_snapshot

IDS = [3, 17, 299, 0, 511, 64, 5, 5, 41, 88, 2, 130, 7, 7, 401, 12, 256, 33]


def raw_config(name: str) -> dict[str, Any]:
    """config.json of a tiny snapshot."""
    read: dict[str, Any] = json.loads((ensure_snapshot(name).path / "config.json").read_text())
    return read


def logits(folder: Path, *, dtype: DTypeName = "f32") -> mx.array:
    """Logits [1, L, V] of `IDS` in one forward, evaluated: a test may change the folder afterwards."""
    model = open_model(folder, dtype=dtype)
    hidden, _ = model.hidden(mx.array([IDS]), model.make_caches())
    out = model.logits(hidden)
    mx.eval(out)
    return out


def logits_of(name: str) -> mx.array:
    """`logits` of a tiny snapshot."""
    return logits(ensure_snapshot(name).path)


def logits_in_pieces(
    model: CausalModel, ids: Sequence[Sequence[int]] = (IDS,), *, cuts: Sequence[int] = ()
) -> mx.array:
    """Logits [B, L, V] of every position, the sequences fed in pieces that end at `cuts`."""
    caches, rows = model.make_caches(), []
    whole = mx.array(ids)
    for start, end in zip([0, *cuts], [*cuts, whole.shape[1]], strict=True):
        hidden, caches = model.hidden(whole[:, start:end], caches)
        rows.append(model.logits(hidden))
        mx.eval(rows[-1])
    return mx.concatenate(rows, axis=1)
