"""The whole mlx path from logits to ids with numpy alone, for checking sampler goldens where there is no MLX.

Processors, log-probabilities, filters, temperature, keys and both kinds of draw, written a second time and independently of
the mlx code beside it: two implementations that agree with the oracle are two witnesses.

Guarantees: float32 and bfloat16 rows; every operation rounds as mlx rounds it. Only logarithms can be off by one ULP
(`numpy_floats.log`): one in the log-sum-exp of a row, two in a token's Gumbel noise. A draw whose winner leads by more than
that has the id for certain; `Drawn.lead` says by how much it leads.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from engine.sampling.numpy_floats import DType, Floats, cumulative, exp, logsumexp, rounded, softmax
from engine.sampling.numpy_random import Key, gumbel, key_of, split, uniforms

RULED_OUT: Final = np.float32(-np.inf)
Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of a draw, as `engine.sampling.chain.Chain` and `engine.sampling.processors.Processing` have them."""

    temperature: float = 0.0
    top_p: float = 0.0
    min_p: float = 0.0
    min_tokens_to_keep: int = 1
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    xtc_special: tuple[int, ...] = ()
    top_k: int = 0
    logit_bias: dict[int, float] = field(default_factory=dict)
    repetition_penalty: float = 0.0
    repetition_window: int = 20
    presence_penalty: float = 0.0
    presence_window: int = 20
    frequency_penalty: float = 0.0
    frequency_window: int = 20

    @property
    def num_keys(self) -> int:
        """Keys that a token needs."""
        return 0 if self.temperature == 0 else 1 + (self.xtc_probability > 0)

    @property
    def looks_back(self) -> bool:
        """Whether what was drawn changes the logits that follow."""
        return any((self.repetition_penalty, self.presence_penalty, self.frequency_penalty))


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """What a draw gave.

    Attributes:
        ids: One a row.
        uniforms: float32, one a row, as `engine.sampling.categorical.uniforms_behind`; empty when greedy.
        xtc_uniform: Of XTC, where it is active.
        lead: For each row, how far the winner is ahead in units of float32 rounding: of Gumbel sums over the second best, or
            of the uniform over the nearer edge of the token's share; infinite when greedy.
    """

    ids: Ids
    uniforms: Floats
    xtc_uniform: np.float32 | None
    lead: npt.NDArray[np.float64]


def run(
    rows: Floats, options: Options, dtype: DType, *, seed: int, batch: int, num_draws: int, history: Sequence[int]
) -> list[Drawn]:
    """Answer a sampler case: draw `i` of batch element `b` uses row `(i + b) % len(rows)` and that element's own history.

    Args:
        rows: [R, V], logits, rounded to the dtype.
        options: Processors, filters and temperature.
        dtype: Of the rows.
        seed: Of the sequential stream.
        batch: Rows a draw.
        num_draws: How many.
        history: What every element has seen before its first draw.
    """
    seen = [list(history) for _ in range(batch)]
    state, draws = key_of(seed), []
    known: dict[tuple[int, bool], Floats] = {}  # rows that no history changes are filtered once
    for index in range(num_draws):
        keys: list[Key] = []
        for _ in range(options.num_keys):
            state, key = split(state)
            keys.append(key)
        xtc_uniform = uniforms(keys[0], 1)[0] if len(keys) > 1 else None
        excluding = xtc_uniform is not None and bool(xtc_uniform <= np.float32(options.xtc_probability))
        chosen = []
        for element in range(batch):
            at = (index + element) % len(rows)
            row = None if options.looks_back else known.get((at, excluding))
            if row is None:
                lp = log_probabilities(process(rows[at], seen[element], options, dtype)[None], dtype)
                row = lp if not keys else tempered(filtered(lp, options, dtype, xtc_uniform), options, dtype)
                known[at, excluding] = row
            chosen.append(row)
        draws.append(draw(np.concatenate(chosen), keys[-1], xtc_uniform) if keys else greedy(np.concatenate(chosen)))
        for past, token in zip(seen, draws[-1].ids.tolist(), strict=True):
            past.append(token)
    return draws


def process(row: Floats, history: Sequence[int], options: Options, dtype: DType) -> Floats:
    """Logit bias and penalties on one row [V]; a new array."""
    row = row.copy()
    for token, bias in options.logit_bias.items():
        row[token] = _at(row[token] + _at(bias, dtype), dtype)
    if not history:
        return row
    if options.repetition_penalty != 0:
        r = _at(options.repetition_penalty, dtype)
        for token in set(_window(history, options.repetition_window)):
            row[token] = _at(row[token] * r if row[token] < 0 else row[token] / r, dtype)
    if options.presence_penalty != 0:
        for token in set(_window(history, options.presence_window)):
            row[token] = _at(row[token] - _at(options.presence_penalty, dtype), dtype)
    if options.frequency_penalty != 0:
        for token in _window(history, options.frequency_window):
            row[token] = _at(row[token] - _at(options.frequency_penalty, dtype), dtype)
    return row


def log_probabilities(rows: Floats, dtype: DType) -> Floats:
    """Rows [B, V] minus their log-sum-exp."""
    return rounded(rows - logsumexp(rows, dtype), dtype)


def filtered(rows: Floats, options: Options, dtype: DType, xtc_uniform: np.float32 | None = None) -> Floats:
    """Log-probabilities [B, V] with the tokens at -inf that top-p, min-p, XTC and top-k rule out, in this order."""
    if 0 < options.top_p < 1:
        rows = _top_p(rows, options.top_p)
    if options.min_p > 0:
        rows = _min_p(rows, options.min_p, options.min_tokens_to_keep, dtype)
    if options.xtc_probability > 0 and xtc_uniform is not None and xtc_uniform <= np.float32(options.xtc_probability):
        rows = _xtc(rows, options.xtc_threshold, options.xtc_special, dtype)
    if options.top_k > 0:
        rows = _top_k(rows, options.top_k)
    return rows


def sample(rows: Floats, options: Options, dtype: DType, keys: Sequence[Key]) -> Drawn:
    """Draw an id for each row of log-probabilities.

    Args:
        rows: [B, V].
        options: Filters and temperature.
        dtype: Of the rows.
        keys: `options.num_keys` keys, in the order of their use.
    """
    if options.temperature == 0:
        return greedy(rows)
    xtc_uniform = uniforms(keys[0], 1)[0] if options.xtc_probability > 0 else None
    return draw(tempered(filtered(rows, options, dtype, xtc_uniform), options, dtype), keys[-1], xtc_uniform)


def greedy(rows: Floats) -> Drawn:
    """The most probable id of each row, the lowest on a tie."""
    ids = rows.argmax(axis=-1)
    return Drawn(ids=ids, uniforms=np.empty(0, np.float32), xtc_uniform=None, lead=np.full(len(ids), np.inf))


def tempered(rows: Floats, options: Options, dtype: DType) -> Floats:
    """Rows times the reciprocal of the temperature."""
    return rounded(rows * _at(1 / options.temperature, dtype), dtype)


def draw(rows: Floats, key: Key, xtc_uniform: np.float32 | None = None) -> Drawn:
    """Ids from softmax(rows): the cumulative sum of a single row, the Gumbel noise of several."""
    if len(rows) == 1:
        sums = cumulative(exp(rows[0] - rows[0].max()))
        u = uniforms(key, 1)
        aim = u[0] * sums[-1]
        token = int((sums <= aim).sum())
        below = sums[token - 1] if token else np.float32(0)
        edges = np.array([aim - below if token else np.inf, sums[token] - aim], np.float64)
        return Drawn(
            ids=np.array([token]), uniforms=u, xtc_uniform=xtc_uniform, lead=edges.min(keepdims=True) / np.spacing(aim)
        )
    drawn = uniforms(key, rows.size).reshape(rows.shape)
    noisy = rows + gumbel(drawn)
    ids = noisy.argmax(axis=-1)
    best, second = (np.partition(noisy, -place, axis=-1)[:, -place] for place in (1, 2))
    return Drawn(
        ids=ids,
        uniforms=drawn[np.arange(len(rows)), ids],
        xtc_uniform=xtc_uniform,
        lead=(best.astype(np.float64) - second) / np.spacing(np.abs(best)),
    )


def _top_p(rows: Floats, p: float) -> Floats:
    ascending = np.sort(rows, axis=-1)
    shares = exp(ascending)
    upward = cumulative(shares[:, ::-1])[:, ::-1]  # from the most probable down
    above = np.concatenate([upward[:, 1:], np.zeros((len(rows), 1), np.float32)], axis=-1)
    total = above[:, :1] + shares[:, :1]
    dropped = (above >= np.float32(p) * total).sum(axis=-1, keepdims=True)
    return np.where(rows < np.take_along_axis(ascending, dropped, axis=-1), RULED_OUT, rows)


def _min_p(rows: Floats, p: float, keep: int, dtype: DType) -> Floats:
    least = rounded(rows.max(axis=-1, keepdims=True) + _at(math.log(p), dtype), dtype)
    out = rows < least
    if keep > 1:  # of those that tie the higher ids stay
        order = np.argsort(rows, axis=-1, kind="stable")
        np.put_along_axis(out, order[:, -keep:], np.False_, axis=-1)
    return np.where(out, RULED_OUT, rows)


def _xtc(rows: Floats, threshold: float, special: tuple[int, ...], dtype: DType) -> Floats:
    shares = softmax(rows, dtype)
    likely = np.where(shares > _at(threshold, dtype), shares, np.float32(np.inf))
    out = shares > likely.min(axis=-1, keepdims=True)
    out[:, list(special)] = False
    return np.where(out, RULED_OUT, rows)


def _top_k(rows: Floats, k: int) -> Floats:
    order = np.argsort(-rows, axis=-1, kind="stable")  # of those that tie, the lower ids come first
    kept = rows.copy()
    np.put_along_axis(kept, order[:, k:], RULED_OUT, axis=-1)
    return kept


def _window(history: Sequence[int], size: int) -> Sequence[int]:
    return history[-size:] if size else history


def _at(value: float | np.float32, dtype: DType) -> np.float32:
    """One number in the dtype."""
    return np.float32(rounded(np.array([value], np.float32), dtype)[0])
