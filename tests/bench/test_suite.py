"""All sides of a figure are asked in turn, bits are compared where both computed them, and a note says what differs."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

from bench.interleave import Figure
from bench.suite import FULL, QUICK, Configuration, Loaded, Size, measure_configuration

if TYPE_CHECKING:
    from bench.worker import Worker

SIZE = Size(name="toy", configurations=(), prompts=(8, 64), repeats=3, one_thread=(8,), startup=False)
SECONDS = {"engine": 1.0, "mlx-lm": 4.0, "llama.cpp": 2.0}


class Scripted:
    """A worker that answers at once and writes down what it was asked."""

    def __init__(self, name: str, asked: list[tuple[str, dict[str, Any]]], wrong: str) -> None:
        self.name, self._asked, self._wrong = name, asked, wrong

    def ask(self, **request: Any) -> dict[str, Any]:
        self._asked.append((self.name, request))
        if request["op"] == "load":
            return {"seconds": SECONDS[self.name], "weight_bytes": 1_000_000_000}
        if request["op"] == "export":
            Path(request["file"]).write_bytes(b"keys and values")
            return {}
        if request["op"] == "read":
            return {"bytes_per_second": 20e9}
        answer = {"prompt_seconds": SECONDS[self.name], "decode_seconds": SECONDS[self.name], "peak_bytes": 2**20}
        if self.name == "llama.cpp":
            return {**answer, "num_tokens": request["num_tokens"]}
        kind = "decode" if request["num_tokens"] > 2 else "prefill"
        logits = "other" if self.name == "mlx-lm" and kind == self._wrong else "same"
        return {**answer, "token_ids": [0] * request["num_tokens"], "logits": logits}


def measured(
    tmp_path: Path, *, wrong: str = "", llama: bool = True, threads: int = 2
) -> tuple[dict[tuple[str, str], Figure], list[tuple[str, dict[str, Any]]]]:
    asked: list[tuple[str, dict[str, Any]]] = []
    names = ["engine", "mlx-lm", *(["llama.cpp"] if llama else [])]
    workers = {name: cast("Worker", Scripted(name, asked, wrong)) for name in names}
    config = Configuration(snapshot="s", dtype="f32", rival_tokens=16, num_tokens=4, llama="Q4_1" if llama else None)
    at = Loaded(
        configuration=config,
        folder=tmp_path,
        weights_name="w",
        vocabulary=512,
        gguf=tmp_path / "s.gguf" if llama else None,
        scratch=tmp_path,
    )
    figures = measure_configuration(at, SIZE, workers, threads=threads, on_progress=lambda _: None)
    return {(figure.name, figure.peer): figure for figure in figures}, asked


def test_names_and_ratios_are_those_of_the_contract(tmp_path: Path) -> None:
    figures, _ = measured(tmp_path)
    decode = figures["decode/s/f32/p8", "mlx-lm"]
    assert (decode.unit, decode.engine.median, decode.peer_value.median, decode.ratio.median) == ("tok/s", 4, 1, 4)
    assert figures["decode/s/f32/p8", "llama.cpp"].ratio.median == 2
    assert figures["prefill/s/f32/64", "llama.cpp"].ratio.median == 2
    assert figures["load/s/f32", "mlx-lm"].ratio.median == 0.25
    bandwidth = figures["bandwidth/s/f32/p64", "machine"]
    assert (bandwidth.engine.median, bandwidth.peer_value.median, bandwidth.ratio.median) == (4, 20, 0.2)
    assert {name for name, _ in figures} >= {"memory/s/f32/p8", "decode/s/f32/p8/t1", "prefill/s/f32/8/t1"}
    assert ("decode/s/f32/p64/t1", "mlx-lm") not in figures


def test_a_slow_peer_is_timed_on_fewer_tokens_and_that_is_said(tmp_path: Path) -> None:
    figures, asked = measured(tmp_path)
    long, short = figures["prefill/s/f32/64", "mlx-lm"], figures["prefill/s/f32/8", "mlx-lm"]
    assert (long.engine.median, long.peer_value.median) == (64, 4)  # 64 tokens in 1 s, 16 tokens in 4 s
    assert long.note == "mlx-lm on the first 16 tokens, which is where bits are compared"
    assert (short.engine.median, short.peer_value.median, short.note) == (8, 2, "")
    rival = [len(r["prompt_ids"]) for name, r in asked if name == "mlx-lm" and r["op"] == "run" and "cache" not in r]
    assert set(rival) == {8, 16}


def test_decoding_starts_from_the_engines_keys_and_values(tmp_path: Path) -> None:
    _, asked = measured(tmp_path)
    exported = [request for name, request in asked if request["op"] == "export"]
    taken = [request for name, request in asked if name == "mlx-lm" and "cache" in request]
    assert {len(request["prompt_ids"]) for request in exported} == {8, 64}
    assert {request["cache"] for request in taken} == {request["file"] for request in exported}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("wrong", "decode", "prefill"), [("", True, True), ("decode", False, True), ("prefill", True, False)]
)
def test_bits_are_compared_where_both_sides_computed_them(
    wrong: str,
    decode: bool,
    prefill: bool,
    tmp_path: Path,
) -> None:
    figures, _ = measured(tmp_path, wrong=wrong)
    assert figures["decode/s/f32/p64", "mlx-lm"].bits_identical is decode
    assert figures["prefill/s/f32/64", "mlx-lm"].bits_identical is prefill
    assert figures["decode/s/f32/p64", "llama.cpp"].bits_identical is None


def test_every_side_takes_its_turn_in_going_first(tmp_path: Path) -> None:
    _, asked = measured(tmp_path)
    runs = [name for name, r in asked if r["op"] == "run" and r["num_tokens"] == 4]
    assert runs[:9] == [
        "engine",
        "mlx-lm",
        "llama.cpp",
        "mlx-lm",
        "llama.cpp",
        "engine",
        "llama.cpp",
        "engine",
        "mlx-lm",
    ]


def test_one_thread_is_measured_with_one_thread_on_every_side_that_has_several(tmp_path: Path) -> None:
    _, asked = measured(tmp_path)
    loads = [(name, r.get("threads")) for name, r in asked if r["op"] == "load"]
    assert loads[-2:] == [("engine", 1), ("llama.cpp", 1)]
    assert asked[-1][1] == {"op": "read", "threads": 1, "mib": 384}
    figures, _ = measured(tmp_path, threads=1)
    assert not [name for name, _ in figures if name.endswith("/t1")]


def test_without_a_like_llama_cpp_takes_no_part(tmp_path: Path) -> None:
    figures, asked = measured(tmp_path, llama=False)
    assert {peer for _, peer in figures} == {"mlx-lm", "machine"}
    assert {name for name, _ in asked} == {"engine", "mlx-lm"}


def test_the_full_table_is_the_issues(tmp_path: Path) -> None:
    del tmp_path
    assert [c.where for c in FULL.configurations] == [
        "smollm2-135m/f32",
        "smollm2-135m/bf16",
        "smollm2-135m-f32/f32",
        "smollm2-135m-q4/f32",
        "smollm2-135m-q4/bf16",
    ]
    assert (FULL.prompts, QUICK.prompts) == ((32, 256, 1024), (32,))
