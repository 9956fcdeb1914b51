"""A reproducer holds the least that still differs, and nothing is cut without running both sides."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from engine.families import llama
from engine.linear import Linear
from engine.norm import RMSNorm
from parity import reproducer as reproducers
from parity import safetensors_file
from parity.case import KV, Case, Feed
from parity.explaining import Explanation, explain
from parity.models import tiny_catalogue
from parity.reproducer import Reproducer, forwards, write_reproducer
from parity.snapshot import Snapshot
from parity.trace import Trace
from tests.parity.explaining.runners import Plant, PlantedRunner

PROMPT = (3, 17, 299, 0, 511, 64, 5, 41)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Snapshot]:
    home = tmp_path_factory.mktemp("tiny")

    @cache
    def of(name: str) -> Snapshot:
        source, _ = tiny_catalogue.digests()[name]
        tiny_catalogue.write(source, home / name)
        return Snapshot.read(home / name)

    return of


def case_of(snapshot: str, **fields: Any) -> Case:
    given: dict[str, Any] = {
        "prompt_ids": PROMPT,
        "forced_ids": (11, 402),
        "feed": Feed(mode="tail-split"),
        "kv": KV(),
        "num_steps": 2,
        "dtype": "f32",
    }
    return Case(name=f"{snapshot}/x", snapshot=snapshot, **{**given, **fields})


@dataclass(frozen=True, kw_only=True)
class Counted(PlantedRunner):
    """Remembers what it ran."""

    ran: list[tuple[Case, dict[str, Any]]] = field(default_factory=list)

    def run(self, case: Case, snapshot: Snapshot) -> Trace:
        self.ran.append((case, dict(snapshot.config)))
        return super().run(case, snapshot)


def eps_of(ending: str) -> Plant:
    right = RMSNorm.__call__
    return lambda: mock.patch.object(
        RMSNorm, "__call__", lambda self, x: right(replace(self, eps=1e-3) if self.path.endswith(ending) else self, x)
    )


def base_off() -> Plant:
    right = llama.make_rope
    return lambda: mock.patch.object(llama, "make_rope", lambda w, *, base, **k: right(w, base=base * 1.01, **k))


def written(
    case: Case, snapshot: Snapshot, plant: Plant, folder: Path, script: Path
) -> tuple[Reproducer | None, Explanation, Counted]:
    sides = PlantedRunner(name="mlx-lm 0.32.2"), Counted(plant=plant)
    explanation = explain(case, snapshot, *sides, truth="not asked for")
    sides[1].ran.clear()
    made = write_reproducer(
        explanation, snapshot, *sides, folder=folder, script=script, recorded_with="mlx-lm 0.32.2, mlx 0.32.4"
    )
    return made, explanation, sides[1]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "script.py"
    file.write_text("print('reproduced')\n")
    return file


def test_prompt_steps_layers_and_ids_are_cut(tiny: Callable[[str], Snapshot], tmp_path: Path, script: Path) -> None:
    snapshot, folder = tiny("llama-tiny"), tmp_path / "rep"
    made, explanation, engine = written(
        case_of("llama-tiny"), snapshot, eps_of("layers.1.input_layernorm"), folder, script
    )
    assert made is not None
    assert made.cuts == ("1 of 8 prompt tokens, 1 of 2 steps", "2 of 4 layers", "3 of 512 ids, renumbered")
    assert explanation.module == "model.layers.1.input_layernorm"
    assert sorted(path.name for path in folder.iterdir()) == ["model", "reproduce.json", "reproduce.py"]
    assert (folder / "reproduce.py").read_text() == script.read_text()
    config = json.loads((folder / "model" / "config.json").read_text())
    assert (config["num_hidden_layers"], config["vocab_size"]) == (2, 3)
    tensors = safetensors_file.loads((folder / "model" / "model.safetensors").read_bytes())
    whole = safetensors_file.loads((snapshot.path / "model.safetensors").read_bytes())
    assert not any(name.startswith("model.layers.2") for name in tensors)
    kept = {name for name in tensors if tensors[name].digest == whole[name].digest}
    assert set(tensors) - kept == {"model.embed_tokens.weight", "lm_head.weight"}
    rows = whole["model.embed_tokens.weight"].bits()[[0, 1, 3]]
    assert np.array_equal(tensors["model.embed_tokens.weight"].bits(), rows)
    assert {(config["num_hidden_layers"], config["vocab_size"]) for _, config in engine.ran} == {
        (4, 512),
        (2, 512),
        (2, 3),
    }


def test_what_is_written_differs_when_it_is_run_again(
    tiny: Callable[[str], Snapshot], tmp_path: Path, script: Path
) -> None:
    folder = tmp_path / "rep"
    written(case_of("llama-tiny"), tiny("llama-tiny"), base_off(), folder, script)
    told = json.loads((folder / "reproduce.json").read_text())
    assert (told["module"], told["step"], told["dtype"]) == ("model.layers.0.self_attn.o_proj", 0, "f32")
    assert told["forwards"] == [[2], [3]]  # ids 3 and 17, after 0 and 1 that are always kept
    assert told["recorded_with"] == "mlx-lm 0.32.2, mlx 0.32.4"
    assert told["kv"] == {"kv_bits": None, "kv_group_size": 64, "quantized_kv_start": 0}
    ids = tuple(token for piece in told["forwards"] for token in piece)
    case = case_of("model", prompt_ids=ids, forced_ids=(0,), num_steps=1, record=("*",))
    cut = Snapshot.read(folder / "model")
    name = f"activations/0/{told['module']}"
    for side, plant in (("oracle", None), ("engine", base_off())):
        runner = PlantedRunner() if plant is None else PlantedRunner(plant=plant)
        assert runner.run(case, cut).tensors[name].bits().reshape(-1).tolist() == told[side]
    assert told["oracle"] != told["engine"]


def test_a_cut_that_hides_the_difference_is_not_made(
    tiny: Callable[[str], Snapshot], tmp_path: Path, script: Path
) -> None:
    """The fault needs an id that the cut vocabulary would give to another row."""
    right = Linear.__call__

    def only_in_large_models(self: Linear, x: Any) -> Any:
        y = right(self, x)
        large = self.path == "lm_head" and y.shape[-1] > 100
        return y * 2 if large else y

    made, explanation, _ = written(
        case_of("llama-tiny"),
        tiny("llama-tiny"),
        lambda: mock.patch.object(Linear, "__call__", only_in_large_models),
        tmp_path / "rep",
        script,
    )
    assert made is not None
    assert explanation.module == "logits"
    assert made.cuts == ("1 of 8 prompt tokens, 1 of 2 steps",)
    assert not list((tmp_path / "rep").glob("try-*"))


def test_packed_rows_and_a_wrapped_config_are_cut_too(
    tiny: Callable[[str], Snapshot], tmp_path: Path, script: Path
) -> None:
    folder = tmp_path / "rep"
    case = case_of("qwen3_5-q4g64-tiny")
    made, _, _ = written(case, tiny(case.snapshot), eps_of("layers.0.input_layernorm"), folder, script)
    assert made is not None
    assert made.cuts[1:] == ("1 of 4 layers", "3 of 512 ids, renumbered")
    text = json.loads((folder / "model" / "config.json").read_text())["text_config"]
    assert (text["num_hidden_layers"], text["vocab_size"], text["layer_types"]) == (1, 3, ["linear_attention"])


def test_a_difference_of_ids_has_no_reproducer(tiny: Callable[[str], Snapshot], tmp_path: Path, script: Path) -> None:
    case = case_of("llama-tiny", forced_ids=None)
    plant: Plant = lambda: mock.patch("parity.engine_runner.greedy", return_value=5)  # noqa: E731
    made, explanation, _ = written(case, tiny("llama-tiny"), plant, tmp_path / "rep", script)
    assert explanation.module == "token_ids"
    assert made is None


@pytest.mark.parametrize(
    ("feed", "pieces"),
    [
        (Feed(mode="whole"), [[1, 2, 3, 4, 5], [9]]),
        (Feed(mode="tail-split"), [[1, 2, 3, 4], [5], [9]]),
        (Feed(mode="chunked", chunk=3), [[1, 2, 3], [4], [5], [9]]),
    ],
)
def test_forwards_are_those_of_the_feed(feed: Feed, pieces: list[list[int]]) -> None:
    case = case_of("llama-tiny", prompt_ids=(1, 2, 3, 4, 5), feed=feed)
    assert forwards(case, [9]) == pieces


def test_a_prompt_of_one_token_is_one_forward() -> None:
    assert forwards(case_of("llama-tiny", prompt_ids=(7,)), []) == [[7]]


def test_a_list_with_an_entry_a_layer_is_cut_with_the_layers() -> None:
    assert reproducers._shorter("layer_types", ["a", "b", "c"], 3, 2) == ["a", "b"]
    assert reproducers._shorter("mlp_only_layers", [0, 2], 3, 2) == [0]
    assert reproducers._shorter("rope_scaling", {"factor": 2}, 3, 2) == {"factor": 2}
    assert reproducers._shorter("sections", [1, 2], 3, 1) == [1, 2]
