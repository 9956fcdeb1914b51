"""Float64 truth: every golden lies within its rounding bound, and a planted fault of logic does not."""

import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parity.case import Case
from parity.golden import Golden, golden_path
from parity.matrix import load_cases
from parity.models import tiny_catalogue
from parity.platform_key import platform_key
from parity.snapshot import Snapshot
from parity.trace import activation_name, logits_name
from parity.truth.forward import Forward, erf
from parity.truth.model import FAMILIES, LOGITS, Truth, open_truth
from parity.truth.packing import packing_of
from parity.truth.rotation import Rotation
from parity.truth.weights import Array, NoTruthError

needs_goldens = pytest.mark.skipif(
    platform_key() != "linux-x86_64-cpu", reason="goldens are committed for linux-x86_64-cpu only"
)
VERSION = "0.32.2"
TAPS = "f32/fp/forced/p40-taps-tail-split"
CONFIGS = (
    *("gemma", "gemma2", "gemma3_text", "glm4", "granite", "llama", "llama_linear", "llama_sliding", "llama_yarn"),
    *("minicpm", "mistral", "mixtral", "olmo2", "olmo3", "phi3", "qwen2", "qwen3", "qwen3_5", "qwen3_5_moe"),
    *("qwen3_moe", "qwen3_next", "smollm3", "starcoder2"),
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Snapshot]:
    """A tiny snapshot by name, drawn once."""
    home = tmp_path_factory.mktemp("tiny")

    @cache
    def of(name: str) -> Snapshot:
        source, _ = tiny_catalogue.digests()[name]
        tiny_catalogue.write(source, home / name)
        return Snapshot.read(home / name)

    return of


@cache
def golden_of(name: str) -> Golden:
    (case,) = (case for case in cases() if case.name == name)
    return Golden.load(golden_path(case, version=VERSION))


@cache
def cases() -> tuple[Case, ...]:
    return load_cases()


def outputs_beyond(golden: Golden, truth: Truth, step: int) -> list[str]:
    """Modules whose recorded output lies beyond the rounding bound, and that the truth has."""
    case = golden.case
    ids = (*case.prompt_ids, *golden.token_ids[:step])
    start = activation_name(step, "")
    found, compared = [], 0
    for name, tensor in golden.tensors.items():
        module = LOGITS if name == logits_name(step) else name.removeprefix(start)
        if module == name or (at := truth.at(ids, module)) is None or at[0].shape != tensor.shape[1:]:
            continue
        compared += 1
        if not float(np.abs(tensor.values()[0] - at[0]).max()) <= at[1]:
            found.append(module)
    assert compared > 25
    return found


def test_a_truth_imports_neither_the_engine_nor_mlx() -> None:
    code = "import sys, parity.truth.model; print(sorted({'mlx', 'engine'} & {n.split('.')[0] for n in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


ROOT = Path(__file__).resolve().parents[3]


def test_every_family_is_held_against_a_golden() -> None:
    assert {tiny_catalogue.read(name)["model_type"] for name in CONFIGS} == set(FAMILIES)


@needs_goldens
@pytest.mark.parametrize("config", CONFIGS)
def test_every_output_of_a_golden_lies_within_the_rounding_bound(tiny: Callable[[str], Snapshot], config: str) -> None:
    golden = golden_of(f"{config}-tiny/{TAPS}")
    truth = open_truth(tiny(f"{config}-tiny"), "f32")
    assert outputs_beyond(golden, truth, step=0) == []


@needs_goldens
@pytest.mark.parametrize("config", ["qwen3_5", "gemma3_text"])
def test_so_do_those_of_later_steps(tiny: Callable[[str], Snapshot], config: str) -> None:
    assert outputs_beyond(golden_of(f"{config}-tiny/{TAPS}"), open_truth(tiny(f"{config}-tiny"), "f32"), step=1) == []


@needs_goldens
def test_so_do_those_of_a_run_in_bfloat16(tiny: Callable[[str], Snapshot]) -> None:
    golden = golden_of("llama-tiny/bf16/fp/forced/p40-taps-tail-split")
    assert outputs_beyond(golden, open_truth(tiny("llama-tiny"), "bf16"), step=0) == []


def row_off(tiny: Callable[[str], Snapshot], snapshot: str, truth: Truth | None = None) -> float:
    """How many rounding bounds the first row of a golden is off."""
    golden = golden_of(f"{snapshot}/f32/fp/forced/p40-tail-split")
    at = (truth or open_truth(tiny(snapshot), "f32")).at(golden.case.prompt_ids, LOGITS)
    assert at is not None
    value, bound = at
    return float(np.abs(golden.tensors[logits_name(0)].values()[0] - value).max()) / bound


@needs_goldens
@pytest.mark.parametrize("form", ["q4g32", "q4g64", "q8g64", "mixed", "mxfp4", "nvfp4", "mxfp8"])
def test_packed_weights_are_unpacked_as_the_oracle_does(tiny: Callable[[str], Snapshot], form: str) -> None:
    snapshot = f"qwen3-{form}-tiny"
    assert row_off(tiny, snapshot) <= 1
    truth = open_truth(tiny(snapshot), "f32")
    path = next(p for p in ("model.layers.1.mlp.up_proj", "model.layers.1.mlp.down_proj") if truth.weights.is_packed(p))
    right = truth.weights.matrix(path).copy()
    truth.weights._kept[f"{path}.weight, unpacked"] = np.roll(right, 1, axis=-1)  # one code off
    assert row_off(tiny, snapshot, truth) > 100


def base(truth: Truth, plant: pytest.MonkeyPatch) -> None:
    right = Rotation.of
    plant.setattr(Rotation, "of", lambda width, base, *a, **k: right(width, base * 1.001, *a, **k))
    del truth


def eps(truth: Truth, plant: pytest.MonkeyPatch) -> None:
    right = Forward.rms
    plant.setattr(Forward, "rms", lambda self, path, x, eps, **k: right(self, path, x, 2 * eps, **k))
    del truth


def attention_scale(truth: Truth, plant: pytest.MonkeyPatch) -> None:
    right = Forward.attend
    plant.setattr(Forward, "attend", lambda self, *a, scale, **k: right(self, *a, scale=scale * 1.001, **k))
    del truth


def window(truth: Truth, plant: pytest.MonkeyPatch) -> None:
    right = Forward.attend
    plant.setattr(Forward, "attend", lambda self, *a, window=None, **k: right(self, *a, window=window or 39, **k))
    del truth


def one_weight(truth: Truth, plant: pytest.MonkeyPatch) -> None:
    del plant
    truth.weights.matrix("model.layers.2.mlp.down_proj")[5, 7] += 0.01


@needs_goldens
@pytest.mark.parametrize("fault", [base, eps, attention_scale, window, one_weight])
def test_a_fault_of_logic_is_beyond_the_bound(
    tiny: Callable[[str], Snapshot], monkeypatch: pytest.MonkeyPatch, fault: Callable[..., None]
) -> None:
    truth = open_truth(tiny("qwen3-tiny"), "f32")
    fault(truth, monkeypatch)
    assert row_off(tiny, "qwen3-tiny", truth) > 1


@needs_goldens
@pytest.mark.parametrize("config", ["gemma2", "gemma3_text", "mistral", "starcoder2"])
def test_the_oracle_departs_from_what_the_config_says_as_the_facts_tell(
    tiny: Callable[[str], Snapshot], config: str
) -> None:
    """Windows that are not read, an embedding scale rounded to bfloat16, another gelu: each far beyond rounding."""
    snapshot = f"{config}-tiny"
    assert row_off(tiny, snapshot) <= 1
    assert row_off(tiny, snapshot, open_truth(tiny(snapshot), "f32", published=True)) > 5


def rows_off(name: str, truth: Truth) -> list[float]:
    """How many bounds the first and the last row of a golden are off."""
    golden = golden_of(name)
    case = golden.case
    ids = (*case.prompt_ids, *golden.token_ids[: case.num_steps - 1])
    off = []
    for step in (0, case.num_steps - 1):
        at = truth.at(ids, LOGITS, len(case.prompt_ids) - 1 + step)
        assert at is not None
        off.append(float(np.abs(golden.tensors[logits_name(step)].values()[0] - at[0]).max()) / at[1])
    return off


@needs_goldens
@pytest.mark.parametrize(
    "name",
    [
        "qwen3-tiny/f32/kv8-g64/forced/p40-tail-split",
        "qwen3-tiny/f32/kv4-g32-s16/forced/p40-whole",
        "llama-tiny/f32/kv4-g64/forced/p40-chunk7",
        "llama-tiny/f32/kv6-g64/forced/p40-tail-split",
    ],
)
def test_packed_keys_and_values_are_read_back_as_the_oracle_does(tiny: Callable[[str], Snapshot], name: str) -> None:
    case = golden_of(name).case
    packing = packing_of(case)
    assert packing is not None
    assert max(rows_off(name, open_truth(tiny(case.snapshot), "f32", packing=packing))) <= 1
    assert rows_off(name, open_truth(tiny(case.snapshot), "f32"))[1] > 100, "and not as computed"
    if case.feed.mode == "tail-split":
        late = replace(packing, first=packing.first + 1)
        assert max(rows_off(name, open_truth(tiny(case.snapshot), "f32", packing=late))) > 1, "nor from a row later on"


def test_the_bound_is_the_same_every_time(tiny: Callable[[str], Snapshot]) -> None:
    first, second = (open_truth(tiny("qwen3-tiny"), "f32").at([1, 2, 3], LOGITS) for _ in range(2))
    assert first is not None
    assert second is not None
    assert first[1] == second[1] > 0
    assert np.array_equal(first[0], second[0])


def test_an_output_that_a_truth_does_not_keep_is_none(tiny: Callable[[str], Snapshot]) -> None:
    assert open_truth(tiny("qwen3_moe-tiny"), "f32").at([1, 2], "model.layers.3.mlp.switch_mlp") is None


def test_a_family_without_a_truth_is_refused(tiny: Callable[[str], Snapshot]) -> None:
    with pytest.raises(NoTruthError, match=r"^mamba2 has no float64 truth$"):
        open_truth(tiny("mamba2-tiny"), "f32")


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama-tiny", {"rope_scaling": {"type": "dynamic"}}, "rope scaling 'dynamic' has no float64 truth"),
        ("llama-tiny", {"hidden_act": "relu"}, "hidden_act = 'relu' has no float64 truth"),
        ("llama-tiny", {"num_hidden_layers": 5}, "the snapshot has no tensor model.layers.4.input_layernorm.weight"),
        ("qwen3_5-hub-tiny", {}, "the snapshot has the hub's layout"),
    ],
)
def test_what_is_not_written_is_refused(
    tiny: Callable[[str], Snapshot], name: str, changes: dict[str, Any], message: str
) -> None:
    snapshot = tiny(name)
    changed = replace(snapshot, config={**snapshot.config, **changes})
    with pytest.raises(NoTruthError) as caught:
        open_truth(changed, "f32").run([1, 2, 3])
    assert str(caught.value) == message


def test_the_error_function_is_right_everywhere() -> None:
    x: Array = np.concatenate([np.linspace(-7, 7, 2001), [0.0, 2.5, -2.5, 30.0]])
    assert np.abs(erf(x) - [math.erf(v) for v in x]).max() < 2e-15
