"""What mlx-lm does otherwise than a config, its own documentation or the published model says: one small run a fact.

Runs in mlx-lm's environment: `python -m oracles.mlx_lm.facts FOLDER`, FOLDER holding the tiny snapshots. A line of JSON a fact:
`name`, `holds`, `observed`. Most facts are config keys that change nothing; each comes with a key that must, so that a fact
cannot hold because nothing is computed. What the facts mean is written in `parity/deviations.toml`.
"""

import importlib
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_repetition_penalty
from mlx_lm.utils import load_model

from oracles.mlx_lm.cache_facts import CACHE_FACTS
from oracles.mlx_lm.observing import Observed, Snapshots, ids_of, logits, raises

nn: Any = importlib.import_module("mlx.nn")  # it has no complete types

LINEAR: Final = {"type": "linear", "factor": 4.0}
OTHER_BASE: Final = {"rope_theta": 777.0}


@dataclass(frozen=True, kw_only=True)
class Ignored:
    """A config key that a family does not read, or reads to no effect.

    Attributes:
        snapshot: Tiny snapshot.
        changes: Keys and the values that ought to change logits.
        control: Keys and values that do.
        tokens: Length of the prompt.
    """

    snapshot: str
    changes: Mapping[str, Any]
    control: Mapping[str, Any] = field(default_factory=lambda: OTHER_BASE)
    tokens: int = 40


IGNORED: Final[Mapping[str, Ignored]] = {
    "falcon_h1_key_multiplier": Ignored(
        snapshot="falcon_h1-hub-tiny", changes={"key_multiplier": 3.0}, control={"attention_in_multiplier": 3.0}
    ),
    "gemma2_sliding_window": Ignored(snapshot="gemma2-tiny", changes={"sliding_window": 4}),
    "gemma3n_rope_scaling": Ignored(
        snapshot="gemma3n-tiny",
        changes={"rope_scaling": LINEAR},
        control={"rope_theta": 777.0, "rope_local_base_freq": 7.0},
    ),
    "glm4_moe_rope_scaling": Ignored(snapshot="glm4_moe-tiny", changes={"rope_scaling": LINEAR}),
    "glm4_rope_scaling": Ignored(snapshot="glm4-tiny", changes={"rope_scaling": LINEAR}),
    "gpt_oss_swiglu_limit": Ignored(snapshot="gpt_oss-tiny", changes={"swiglu_limit": 0.5}),
    "mistral_sliding_window": Ignored(snapshot="mistral-tiny", changes={"sliding_window": 4}),
    "mixtral_rope_scaling": Ignored(snapshot="mixtral-tiny", changes={"rope_scaling": LINEAR}),
    "mixtral_sliding_window": Ignored(snapshot="mixtral-tiny", changes={"sliding_window": 4}),
    "phi3_short_factor": Ignored(
        snapshot="phi3-tiny",
        changes={"rope_scaling": {"type": "longrope", "long_factor": [2.0] * 24, "short_factor": [9.0] * 24}},
        control={"rope_scaling": {"type": "longrope", "long_factor": [3.0] * 24, "short_factor": [9.0] * 24}},
        tokens=8,
    ),
    "phi3_sliding_window": Ignored(snapshot="phi3-tiny", changes={"sliding_window": 4}),
    "qwen2_sliding_window": Ignored(snapshot="qwen2-tiny", changes={"use_sliding_window": True, "sliding_window": 4}),
    "qwen3_moe_rope_scaling": Ignored(snapshot="qwen3_moe-tiny", changes={"rope_scaling": LINEAR}),
    "qwen3_sliding_window": Ignored(snapshot="qwen3-tiny", changes={"use_sliding_window": True, "sliding_window": 4}),
    "starcoder2_hidden_act": Ignored(snapshot="starcoder2-tiny", changes={"hidden_act": "silu"}),
}


def ignored(snapshots: Snapshots, fact: Ignored) -> Observed:
    """Whether changing the keys leaves every bit as it is while the control does not."""
    base = dict(fact.changes) if fact.snapshot == "phi3-tiny" and "rope_scaling" in fact.changes else {}
    if base:  # of a list of factors only the short ones may change
        short = {**base["rope_scaling"], "short_factor": [1.0] * len(base["rope_scaling"]["short_factor"])}
        base = {"rope_scaling": short}
    right = logits(snapshots.model(fact.snapshot, **base), fact.tokens)
    changed = logits(snapshots.model(fact.snapshot, **fact.changes), fact.tokens)
    control = logits(snapshots.model(fact.snapshot, **fact.control), fact.tokens)
    same, felt = np.array_equal(right, changed), not np.array_equal(right, control)
    keys, other = ", ".join(fact.changes), ", ".join(fact.control)
    return same and felt, (
        f"{keys} {'changes no bit' if same else 'changes logits'}; {other} {'does' if felt else 'changes none either'}"
    )


def gemma3_embedding_scale(snapshots: Snapshots) -> Observed:
    """The factor between the embedding and what enters the first layer."""
    model = snapshots.model("gemma3_text-tiny")
    seen: list[Any] = []
    kind = type(model.model.layers[0])
    right = kind.__call__

    def call(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - an mlx-lm layer
        seen.append(x)
        return right(self, x, *args, **kwargs)

    kind.__call__ = call
    try:
        model(mx.array([ids_of(4)]))
    finally:
        kind.__call__ = right
    rows = model.model.embed_tokens(mx.array([ids_of(4)]))
    factor = float(np.array(seen[0].sum() / rows.sum()))
    exact = 128**0.5
    return abs(factor - 11.3125) < 1e-4 < abs(factor - exact), f"{factor:.5f} where sqrt(128) is {exact:.5f}"


def mamba2_block_norm_eps(snapshots: Snapshots) -> Observed:
    """The norms of the blocks have an eps of their own."""
    model = snapshots.model("mamba2-tiny", layer_norm_epsilon=1e-3)
    block, final = float(model.backbone.layers[0].norm.eps), float(model.backbone.norm_f.eps)
    return (block, final) == (1e-5, 1e-3), f"layer_norm_epsilon 0.001: blocks {block:g}, last norm {final:g}"


def minicpm_tied(snapshots: Snapshots) -> Observed:
    """A tied snapshot is not loaded."""
    folder = snapshots.changed("minicpm-tiny", tie_word_embeddings=True)
    (file,) = folder.glob("*.safetensors")
    weights: Any = mx.load(str(file))
    del weights["lm_head.weight"]
    file.unlink()
    mx.save_safetensors(str(file), weights)
    return raises(ValueError, "not in model", lambda: load_model(folder))


def nemotron_h_patterns(snapshots: Snapshots) -> Observed:
    """A pattern of layers without attention, or without a mixer, fails when it runs."""
    config = json.loads((snapshots.changed("nemotron_h-tiny") / "config.json").read_text(encoding="utf-8"))
    model = snapshots.model("nemotron_h-tiny")

    def run(kinds: str) -> Callable[[], None]:
        def act() -> None:
            pattern = [kind for kind in config["hybrid_override_pattern"] if kind in kinds]
            changed = {**config, "hybrid_override_pattern": pattern, "num_hidden_layers": len(pattern)}
            made = type(model)(type(model.args).from_dict(changed))
            mx.eval(made(mx.array([ids_of(4)]), cache=make_prompt_cache(made)))

        return act

    whole, bare, dry = (raises(IndexError, "", run(kinds)) for kinds in ("M*-E", "M-E", "*-E"))
    told = f"all kinds: {whole[1]}; without attention: {bare[1]}; without a mixer: {dry[1]}"
    return bare[0] and dry[0] and not whole[0], told


def olmo_exits(_: Snapshots) -> Observed:
    """Importing the module ends the process."""

    def act() -> None:
        import mlx_lm.models.olmo  # noqa: F401, PLC0415 - that is the fact

    return raises(SystemExit, "1", act)


def penalty_in_place(_: Snapshots) -> Observed:
    """A penalty writes into the row that it is given."""
    row = mx.array([[1.0, 2.0, 3.0]])
    make_repetition_penalty(2.0)(mx.array([2]), row)
    value = float(np.array(row[0, 2]))
    return value == 1.5, f"the caller's row holds {value:g} where it held 3"


def embeddings_without_prompt(snapshots: Snapshots) -> Observed:
    """With input embeddings and an empty prompt the processors do not see the first row."""
    model = snapshots.model("llama-tiny")
    calls = {}
    for name, prompt, more in (
        ("ids", mx.array(ids_of(6)), {}),
        (
            "embeddings",
            mx.array([], dtype=mx.int32),
            {"input_embeddings": model.model.embed_tokens(mx.array(ids_of(6)))},
        ),
    ):
        seen: list[int] = []

        def processor(_tokens: Any, row: Any, seen: list[int] = seen) -> Any:  # noqa: ANN401 - mlx arrays
            seen.append(1)
            return row

        list(generate_step(prompt, model, max_tokens=3, logits_processors=[processor], **more))
        calls[name] = len(seen)
    return calls["embeddings"] == calls[
        "ids"
    ] - 1, f"{calls['ids']} rows with ids, {calls['embeddings']} with embeddings"


def categorical_by_batch(_: Snapshots) -> Observed:
    """One row is drawn by its cumulative sum, several by added noise: two algorithms behind one call."""
    row = mx.random.normal((64,), key=mx.random.key(1)) * 2
    sums = mx.cumsum(mx.exp(row - row.max()))
    rows = mx.stack([row, row])
    single = batch = 0
    for seed in range(100):
        key = mx.random.key(seed)
        by_sum = (sums <= mx.random.uniform(shape=(1,), key=key) * sums[-1]).sum()
        single += bool(np.array(mx.random.categorical(row[None], key=key)[0]) == np.array(by_sum))
        by_noise = mx.argmax(rows + mx.random.gumbel(rows.shape, key=key), axis=-1)
        batch += np.array_equal(np.array(mx.random.categorical(rows, key=key)), np.array(by_noise))
    return (single, batch) == (
        100,
        100,
    ), f"{single} of 100 single rows by cumulative sum, {batch} of 100 pairs by noise"


def gather_mm_float32_only(_: Snapshots) -> Observed:
    """Unquantised experts run in float32 alone on the CPU."""
    x, w = mx.ones((1, 1, 8), dtype=mx.bfloat16), mx.ones((2, 8, 8), dtype=mx.bfloat16)
    act: Callable[[], object] = lambda: mx.eval(mx.gather_mm(x, w, rhs_indices=mx.array([0])))  # noqa: E731
    return (
        raises(RuntimeError, "GatherMM", act) if mx.default_device() == mx.Device(mx.cpu) else (False, "not on a CPU")
    )


def qq_linear_on_cpu(_: Snapshots) -> Observed:
    """Layers that pack their activations do not run on the CPU."""
    layer = nn.QQLinear.from_linear(nn.Linear(64, 64, bias=False), group_size=32, bits=8, mode="mxfp8")
    layer.eval()
    return raises(RuntimeError, "QQMatmul", lambda: mx.eval(layer(mx.ones((2, 64)))))


SPECIAL: Final[Mapping[str, Callable[[Snapshots], Observed]]] = {
    **CACHE_FACTS,
    "categorical_by_batch": categorical_by_batch,
    "embeddings_without_prompt": embeddings_without_prompt,
    "gather_mm_float32_only": gather_mm_float32_only,
    "gemma3_embedding_scale": gemma3_embedding_scale,
    "mamba2_block_norm_eps": mamba2_block_norm_eps,
    "minicpm_tied": minicpm_tied,
    "nemotron_h_patterns": nemotron_h_patterns,
    "olmo_exits": olmo_exits,
    "penalty_in_place": penalty_in_place,
    "qq_linear_on_cpu": qq_linear_on_cpu,
}


def main(arguments: Sequence[str]) -> int:
    """Try every fact, or those that are named after the folder."""
    folder, *names = arguments
    with tempfile.TemporaryDirectory() as scratch:
        snapshots = Snapshots(Path(folder), Path(scratch))
        for name in names or sorted({*IGNORED, *SPECIAL}):
            try:
                holds, observed = ignored(snapshots, IGNORED[name]) if name in IGNORED else SPECIAL[name](snapshots)
            except Exception as error:  # noqa: BLE001 - a fact that cannot be tried does not hold, and costs no other
                holds, observed = False, f"it cannot be tried: {type(error).__name__}: {error}"
            print(json.dumps({"name": name, "holds": bool(holds), "observed": observed}), flush=True)  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
