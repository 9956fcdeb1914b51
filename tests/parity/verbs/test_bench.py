"""`assay bench` with workers that answer at once: what is refused, printed, written, and how it exits."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest

from parity import cli
from parity.verbs import bench

MACHINE = {
    "platform",
    "processor",
    "cores",
    "memory_gib",
    "libc",
    "python",
    "load_before",
    "identity",
    "packages",
    "peer_switches",
}
FIGURE = {"name", "peer", "engine", "peer_value", "unit", "ratio", "low", "high", "bits_identical"}


class FakeWorker:
    """Answers as a worker would; the class remembers what was asked of all of them, and how they were started."""

    asked: list[tuple[str, dict[str, Any]]]
    started: list[tuple[str, list[str], bool]]
    peer_logits = "same"
    peer_ids_from = 0
    open_now = 0

    def __init__(self, name: str, command: list[str], environment: dict[str, str], *, hermetic: bool = False) -> None:
        del environment
        self.name = name
        FakeWorker.started.append((name, list(command), hermetic))

    def ask(self, **request: Any) -> dict[str, Any]:
        FakeWorker.asked.append((self.name, request))
        seconds = 1.0 if self.name == "engine" else 2.0
        if request["op"] == "load":
            return {"seconds": seconds}
        if request["op"] == "sample":
            first = 0 if self.name == "engine" else FakeWorker.peer_ids_from
            return {"seconds": seconds, "ids": list(range(first, first + request["num_draws"])), "rows": "same"}
        return {
            "prompt_seconds": seconds,
            "decode_seconds": seconds,
            "token_ids": [0] * request["num_tokens"],
            "logits": "same" if self.name == "engine" else FakeWorker.peer_logits,
            "peak_bytes": 2**20,
        }

    def __enter__(self) -> Self:
        FakeWorker.open_now += 1
        return self

    def __exit__(self, *_: object) -> None:
        FakeWorker.open_now -= 1


@pytest.fixture(autouse=True)
def _workers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    FakeWorker.asked, FakeWorker.started, FakeWorker.peer_logits, FakeWorker.open_now = [], [], "same", 0
    FakeWorker.peer_ids_from = 0
    monkeypatch.setattr(bench, "Worker", FakeWorker)
    monkeypatch.setattr(bench, "ensure_environment", lambda *_, **__: tmp_path / "python")


def run(*arguments: str) -> int:
    return cli.main(["bench", "llama-tiny", "--prompts", "4,8", "--tokens", "3", "--repeats", "2", *arguments])


@pytest.mark.parametrize(
    ("arguments", "prompts", "tokens", "repeats"),
    [
        (["--prompts", "0"], "0", 16, 5),
        (["--prompts", "32,"], "32,", 16, 5),
        (["--prompts", "many"], "many", 16, 5),
        (["--prompts", "8,-1"], "8,-1", 16, 5),
        (["--tokens", "1"], "32", 1, 5),
        (["--repeats", "0"], "32", 16, 0),
    ],
)
def test_a_run_that_measures_nothing_is_refused_before_anything_is_built(
    *, arguments: list[str], prompts: str, tokens: int, repeats: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err == (
        "nothing to measure\n"
        f"  prompts  {prompts}\n"
        f"  tokens   {tokens}\n"
        f"  repeats  {repeats}\n"
        "  next     give --prompts 32,256 (1 or more each), --tokens 2 or more, --repeats 1 or more\n"
    )
    assert captured.out == ""
    assert FakeWorker.started == []


def test_an_unknown_snapshot_is_refused_before_a_worker_starts(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "lama-tiny"]) == 2
    assert capsys.readouterr().err.startswith("no snapshot is called 'lama-tiny'\n")
    assert FakeWorker.started == []


def test_json_is_one_object_with_the_keys_of_the_contract(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result.keys() == {"machine", "figures"}
    assert result["machine"].keys() >= MACHINE
    assert result["machine"]["mlx-lm"]
    assert [figure["name"] for figure in result["figures"]] == [
        "load/llama-tiny/f32",
        "prefill/llama-tiny/f32/4",
        "decode/llama-tiny/f32/p4",
        "memory/llama-tiny/f32/p4",
        "prefill/llama-tiny/f32/8",
        "decode/llama-tiny/f32/p8",
        "memory/llama-tiny/f32/p8",
    ]
    assert all(figure.keys() >= FIGURE for figure in result["figures"])
    decode = result["figures"][2]
    assert (decode["peer"], decode["unit"], decode["bits_identical"]) == ("mlx-lm", "tok/s", True)
    assert (decode["engine"], decode["peer_value"], decode["ratio"]) == (3.0, 1.5, 2.0)
    assert (decode["low"], decode["high"]) == (2.0, 2.0)


@pytest.mark.parametrize(("peer_logits", "code"), [("same", 0), ("other", 1)])
def test_other_bits_fail_whatever_the_speed(peer_logits: str, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    FakeWorker.peer_logits = peer_logits
    assert run("--json") == code
    figures = json.loads(capsys.readouterr().out)["figures"]
    assert {figure["bits_identical"] for figure in figures} == {None, peer_logits == "same"}


@pytest.mark.parametrize(("peer_logits", "told"), [("same", "identical"), ("other", "DIFFERENT")])
def test_the_table_has_a_line_a_figure_and_says_whether_bits_agree(
    monkeypatch: pytest.MonkeyPatch, peer_logits: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    FakeWorker.peer_logits = peer_logits
    run()
    lines = [line for line in capsys.readouterr().out.splitlines() if "/llama-tiny/" in line and "tok/s" in line]
    assert len(lines) == 4
    assert all(told in line for line in lines)
    assert any("decode/llama-tiny/f32/p8" in line and "2.00-2.00" in line for line in lines)


def test_an_output_file_holds_the_same_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("--json", "--output", str(tmp_path / "bench.json"))
    assert json.loads((tmp_path / "bench.json").read_text()) == json.loads(capsys.readouterr().out)


def test_both_sides_get_the_same_requests_and_the_peer_inherits_nothing(tmp_path: Path) -> None:
    run("--dtype", "bf16", "--json")
    engine, peer = FakeWorker.started
    assert (engine[0], engine[1][-1], engine[2]) == ("engine", "bench.engine_worker", False)
    assert (peer[0], peer[1], peer[2]) == (
        "mlx-lm",
        [str(tmp_path / "python"), "-m", "oracles.mlx_lm.bench_worker"],
        True,
    )
    by_side = {side: [request for name, request in FakeWorker.asked if name == side] for side in ("engine", "mlx-lm")}
    assert by_side["engine"] == by_side["mlx-lm"]
    assert {request["dtype"] for request in by_side["engine"] if request["op"] == "load"} == {"bf16"}
    assert FakeWorker.open_now == 0


def test_workers_are_ended_when_one_of_them_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def die(*_: object, **__: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(bench, "measure", die)
    with pytest.raises(RuntimeError, match="planted"):
        run()
    assert FakeWorker.open_now == 0
    assert len(FakeWorker.started) == 2


def test_without_names_the_default_snapshots_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    named: list[str] = []

    def ensure(name: str) -> SimpleNamespace:
        named.append(name)
        return SimpleNamespace(name=name, path="somewhere", config={"vocab_size": 512})

    monkeypatch.setattr(bench, "ensure_snapshot", ensure)
    assert cli.main(["bench", "--json", "--repeats", "1"]) == 0
    assert named == ["smollm2-135m", "smollm2-135m-f32", "smollm2-135m-q4"]


def samplers(*arguments: str) -> int:
    return cli.main(["bench", "--samplers", "--repeats", "2", *arguments])


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        (["llama-tiny"], "llama-tiny"),
        (["--dtype", "f32"], "--dtype f32"),
        (["--prompts", "32"], "--prompts 32"),
        (["llama-tiny", "--tokens", "4"], "llama-tiny --tokens 4"),
    ],
)
def test_samplers_take_no_option_that_would_change_nothing(
    *, arguments: list[str], given: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert samplers(*arguments) == 2
    assert capsys.readouterr().err == (
        "--samplers draws from generated f32 rows, without a snapshot\n"
        f"  given  {given}\n"
        "  takes  --repeats, --output\n"
        "  next   assay bench --samplers\n"
    )
    assert FakeWorker.started == []


def test_samplers_without_repeats_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert samplers("--repeats", "0") == 2
    assert capsys.readouterr().err == "nothing to measure\n  repeats  0\n  next     give --repeats 1 or more\n"
    assert FakeWorker.started == []


def test_samplers_need_no_snapshot_and_write_the_same_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} was looked up")

    monkeypatch.setattr(bench, "ensure_snapshot", refuse)
    assert samplers("--json", "--output", str(tmp_path / "samplers.json")) == 0
    result = json.loads(capsys.readouterr().out)
    assert json.loads((tmp_path / "samplers.json").read_text()) == result
    assert result["machine"].keys() >= MACHINE
    assert len(result["figures"]) == 22
    top_p = next(figure for figure in result["figures"] if figure["name"] == "sampler/top-p/v49152")
    assert top_p.keys() >= FIGURE
    assert (top_p["unit"], top_p["ratio"], top_p["pairs"], top_p["bits_identical"]) == ("draws/s", 2.0, 2, True)
    assert [request["op"] for _, request in FakeWorker.asked if request["op"] != "sample"] == []
    assert FakeWorker.open_now == 0


def test_other_ids_fail_whatever_the_speed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    FakeWorker.peer_ids_from = 1
    assert samplers() == 1
    out = capsys.readouterr().out
    assert out.count("DIFFERENT") == 22
    assert (
        "ids of sampler/xtc/v151936 are not those of mlx-lm\n"
        "  pair      0 of 2\n  draw      0 of 16\n  expected  1\n  actual    0\n"
    ) in out


def test_a_ratio_says_with_which_switches_the_peer_ran(capsys: pytest.CaptureFixture[str]) -> None:
    samplers()
    assert capsys.readouterr().out.endswith("mlx-lm ran with MLX_DISABLE_COMPILE=1\n")
    samplers("--json")
    assert json.loads(capsys.readouterr().out)["machine"]["peer_switches"] == {"MLX_DISABLE_COMPILE": "1"}
