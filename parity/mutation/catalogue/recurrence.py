"""Faults of layers with a state: the order in which it decays, is corrected and read, and the window of the convolution."""

from collections.abc import Callable
from typing import Any, Final

import mlx.core as mx

from parity.mutation.changes import exchanged, rolled, times, to
from parity.mutation.fault import Fault, fault, taps
from parity.mutation.planting import edit, swap

Rule = Callable[..., tuple[mx.array, mx.array]]
QWEN3_5_NORM: Final = "language_model.model.layers.0.linear_attn.norm"
KIMI_NORM: Final = "model.layers.0.self_attn.o_norm"
MAMBA2_NORM: Final = "backbone.layers.0.mixer.norm"


def delta_rule(
    *, decay_last: bool = False, read_first: bool = False, blind: bool = False, undecayed: bool = False
) -> Callable[[Rule], Rule]:
    """The gated delta rule with one step out of place.

    Args:
        decay_last: The matrix decays after it was corrected.
        read_first: It is read before it is corrected.
        blind: What it recalls is not subtracted from the value.
        undecayed: What it recalls is taken before it decays.
    """

    def wrong(
        q: mx.array,
        k: mx.array,
        v: mx.array,
        *,
        decay: mx.array,
        beta_BLH: mx.array,
        state: mx.array | None,
        **_: object,
    ) -> tuple[mx.array, mx.array]:
        B, L, K, E = q.shape
        H, V = v.shape[2:]
        q, k = (mx.repeat(heads, H // K, axis=2) if H != K else heads for heads in (q, k))
        state = mx.zeros((B, H, V, E)) if state is None else state
        decay = decay[..., None, None] if decay.ndim == 3 else decay[..., None, :]
        rows = []
        for i in range(L):
            query, key = q[:, i, :, None], k[:, i, :, None]
            before = state
            state = state if decay_last else state * decay[:, i]
            recalled = ((before if undecayed else state) * key).sum(axis=-1)
            correction = (v[:, i] - (0 if blind else recalled)) * beta_BLH[:, i, :, None]
            unread = state
            state = state + key * correction[..., None]
            rows.append(((unread if read_first else state) * query).sum(axis=-1).astype(q.dtype))
            state = state * decay[:, i] if decay_last else state
        return mx.stack(rows, axis=1), state

    return lambda _: wrong


def forgetting(right: Rule) -> Rule:
    """Every piece starts with an empty matrix."""
    return lambda *heads, **options: right(*heads, **{**options, "state": None})


def keys_for_queries(right: Rule) -> Rule:
    """Queries and keys in each other's place."""
    return lambda q, k, *rest, **options: right(k, q, *rest, **options)


def scanned(**changes: Callable[[Any], Any]) -> Callable[[Rule], Rule]:
    """A scan one of whose named operands is changed."""

    def by(right: Rule) -> Rule:
        def wrong(x: mx.array, write: mx.array, read: mx.array, *rest: Any, **options: Any) -> Any:  # noqa: ANN401
            given = {"read": read, **options}
            given |= {name: change(given[name]) for name, change in changes.items()}
            return right(x, write, given.pop("read"), *rest, **given)

        return wrong

    return by


def read_for_write(right: Rule) -> Rule:
    """What is written along and what is read along in each other's place."""
    return lambda x, write, read, *rest, **options: right(x, read, write, *rest, **options)


STATE: Final = tuple(
    fault("state order", part, what, says=says, at=at, cases=cases, plant=plant)
    for part, what, says, at, cases, plant in (
        *(
            (
                model,
                what,
                says,
                at,
                taps(model),
                swap(f"{module}:gated_delta", by),
            )
            for model, module, at in (
                ("qwen3_5", "engine.gated_delta", QWEN3_5_NORM),
                ("kimi_linear", "engine.delta_attention", KIMI_NORM),
            )
            for what, says, by in (
                ("decay-last", "the matrix decays after it was corrected", delta_rule(decay_last=True)),
                ("read-first", "the matrix is read before it is corrected", delta_rule(read_first=True)),
                ("forgets", "every piece starts with an empty matrix", forgetting),
            )
        ),
        (
            "qwen3_5",
            "blind",
            "what the matrix recalls is not subtracted",
            QWEN3_5_NORM,
            taps("qwen3_5"),
            swap("engine.gated_delta:gated_delta", delta_rule(blind=True)),
        ),
        (
            "qwen3_5",
            "recalled-before-the-decay",
            "what the matrix recalls is taken before it decays",
            QWEN3_5_NORM,
            taps("qwen3_5"),
            swap("engine.gated_delta:gated_delta", delta_rule(undecayed=True)),
        ),
        (
            "qwen3_next",
            "keys-for-queries",
            "queries and keys of the delta rule are in each other's place",
            "model.layers.0.linear_attn.norm",
            taps("qwen3_next"),
            swap("engine.gated_delta:gated_delta", keys_for_queries),
        ),
        (
            "qwen3_5",
            "decay-without-its-bias",
            "layer 1's decay lacks its bias",
            "language_model.model.layers.1.linear_attn.norm",
            taps("qwen3_5"),
            edit("blocks.1.attention.mixer.dt_bias", times(0.0)),
        ),
        (
            "qwen3_5",
            "forgets-between-pieces",
            "pieces of a prompt do not hand the matrix on",
            QWEN3_5_NORM,
            taps("qwen3_5", feed="chunk7"),
            swap("engine.gated_delta:gated_delta", forgetting),
        ),
        (
            "mamba2",
            "forgets",
            "every piece starts with empty matrices",
            MAMBA2_NORM,
            taps("mamba2"),
            swap("engine.state_space_mixer:scan", scanned(state_BHEN=to(None))),
        ),
        (
            "mamba2",
            "read-for-write",
            "what is written along and what is read along are in each other's place",
            MAMBA2_NORM,
            taps("mamba2"),
            swap("engine.state_space_mixer:scan", read_for_write),
        ),
        (
            "mamba2",
            "groups-exchanged",
            "heads of one group read what is the other's",
            MAMBA2_NORM,
            taps("mamba2"),
            swap("engine.state_space_mixer:scan", scanned(read=exchanged(0, 1, axis=2))),
        ),
        (
            "falcon_h1",
            "no-bypass",
            "layer 0's values do not bypass the scan",
            "model.layers.0.mamba.out_proj",
            taps("falcon_h1"),
            edit("blocks.0.mixer.D", times(0.0)),
        ),
        (
            "falcon_h1",
            "forgets",
            "every piece starts with empty matrices",
            "model.layers.0.mamba.out_proj",
            taps("falcon_h1"),
            swap("engine.state_space_mixer:scan", scanned(state_BHEN=to(None))),
        ),
        (
            "granitemoehybrid",
            "time-steps-without-bias",
            "layer 1's time steps lack their bias",
            "model.layers.1.mamba.norm",
            taps("granitemoehybrid"),
            edit("blocks.1.mixer.dt_bias", times(0.0)),
        ),
        (
            "mamba2",
            "limits-ignored",
            "layer 2's time steps are not kept within their limits",
            "backbone.layers.2.mixer.norm",
            taps("mamba2"),
            edit("blocks.2.mixer.limits", to((0.0, float("inf")))),
        ),
        (
            "nemotron_h",
            "rate-one-off",
            "layer 2 decays at the next head's rate",
            "backbone.layers.2.mixer.norm",
            taps("nemotron_h"),
            edit("blocks.2.mixer.A_log", rolled(1)),
        ),
        (
            "nemotron_h",
            "gate-after-the-norm",
            "layer 0 gates after its norm",
            "backbone.layers.0.mixer.norm",
            taps("nemotron_h"),
            edit("blocks.0.mixer.norm.gate_first", to(False)),
        ),
    )
)

Convolution = Callable[..., tuple[mx.array, mx.array]]


def fresh_window(right: Convolution) -> Convolution:
    """Every piece is filtered as if nothing came before it."""
    return lambda self, x, state, *rest: right(self, x, None, *rest)  # noqa: ARG005


def window_one_early(right: Convolution) -> Convolution:
    """The window that is handed on ends one position too early."""

    def wrong(self: Any, x: mx.array, state: mx.array | None, *rest: Any) -> tuple[mx.array, mx.array]:  # noqa: ANN401
        y, kept = right(self, x, state, *rest)
        return y, mx.concatenate([mx.zeros_like(kept[:, :1]), kept[:, :-1]], axis=1)

    return wrong


CONVOLUTION: Final = (
    *(
        fault(
            "convolution window",
            model,
            what,
            says=says,
            at=at,
            cases=taps(model),
            plant=swap("engine.short_convolution:ShortConvolution.__call__", by),
        )
        for model, at in (
            ("qwen3_5", "language_model.model.layers.0.linear_attn.conv1d"),
            ("lfm2", "model.layers.0.conv.conv"),
            ("falcon_h1", "model.layers.0.mamba.conv1d"),
            ("kimi_linear", "model.layers.0.self_attn.q_conv.conv"),
        )
        for what, says, by in (
            ("forgotten", "the window is not handed from one piece to the next", fresh_window),
            ("one-early", "the window that is handed on ends one position too early", window_one_early),
        )
    ),
    *(
        fault("convolution window", model, what, says=says, at=at, cases=taps(model), plant=edit(path, change))
        for model, what, says, at, path, change in (
            (
                "mamba2",
                "taps-reversed",
                "layer 1's filters run against time",
                "backbone.layers.1.mixer.conv1d",
                "blocks.1.mixer.convolution.weight",
                lambda weight: weight[:, ::-1],
            ),
            (
                "qwen3_5",
                "taps-one-late",
                "layer 2's filters are one position late",
                "language_model.model.layers.2.linear_attn.conv1d",
                "blocks.2.attention.mixer.convolution.weight",
                rolled(1, axis=1),
            ),
            (
                "lfm2",
                "channels-one-off",
                "layer 2's channels have the next one's filters",
                "model.layers.2.conv.conv",
                "blocks.2.operator.convolution.weight",
                rolled(1),
            ),
        )
    ),
)

FAULTS: Final[tuple[Fault, ...]] = (*STATE, *CONVOLUTION)
