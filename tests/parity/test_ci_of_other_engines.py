"""What another engine takes from here, run as it would run: the reusable workflow's steps and the hook's script."""

import json
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/engine-parity.yml").read_text())
HOOKS = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
CASE = "llama-tiny/f32/fp/greedy/p40-whole"
# Stands for another engine: it writes traces, and says what they rest on.
ENGINE = r"""
assay check "$PATTERN" --jobs 1 --traces "$ASSAY_TRACES" --results own > own.txt
python3 -c '
import json, os
case = json.load(open(os.environ["ASSAY_CASES"]))["cases"][0]
assert case["prompt_ids"] and case["num_steps"]
said = json.load(open("own/check.json"))["provenance"][0]
said = {name: said[name] for name in ("platform", "device", "packages")}
json.dump(said, open(os.environ["ASSAY_TRACES"] + "/provenance.json", "w"))'
"""


def steps() -> dict[str, dict[str, Any]]:
    return {step["name"]: step for step in WORKFLOW["jobs"]["judge"]["steps"] if "run" in step}


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """A runner's workspace after both checkouts and the set-up."""
    (tmp_path / "engine").mkdir()
    (tmp_path / "bin").mkdir()
    shim = tmp_path / "bin" / "assay"
    shim.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m parity "$@"\n')
    shim.chmod(shim.stat().st_mode | stat.S_IXUSR)
    return tmp_path


def run(workspace: Path, name: str, command: str = ENGINE) -> subprocess.CompletedProcess[str]:
    step = steps()[name]
    environment = {
        **os.environ,
        "PATH": f"{workspace / 'bin'}:{os.environ['PATH']}",
        "GITHUB_STEP_SUMMARY": str(workspace / "summary.md"),
        "PATTERN": CASE,
        "COMMAND": command,
    }
    for variable, value in WORKFLOW["jobs"]["judge"]["env"].items():
        if "github.workspace" in value:
            environment[variable] = value.replace("${{ github.workspace }}", str(workspace))
    return subprocess.run(
        ["bash", "-e", "-c", step["run"]],  # noqa: S607 - as a runner starts a step
        cwd=workspace / step.get("working-directory", "."),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_steps_judge_the_traces_of_an_engine_and_see_a_bit_that_flips(workspace: Path) -> None:
    for name in ("Cases and snapshots", "Traces of the engine", "Judge", "Report"):
        ended = run(workspace, name)
        assert ended.returncode == 0, f"{name}: {ended.stderr}"
    assert (workspace / "summary.md").read_text().startswith("## ✓ assay check: 1 case: 1 IDENTICAL")
    assert json.loads((workspace / "results/check.json").read_text())["counts"] == {"IDENTICAL": 1}
    assert (workspace / "results/report.html").is_file()

    trace = workspace / "traces" / CASE / "trace.safetensors"
    data = bytearray(trace.read_bytes())
    data[-1] ^= 1
    trace.write_bytes(data)
    ended = run(workspace, "Judge")
    assert ended.returncode == 1
    assert re.search(rf"::error file=parity/cases/llama.toml,line=\d+,title=DIFFERENT {CASE}::", ended.stdout)
    assert ET.parse(workspace / "parity.xml").getroot().get("failures") == "1"  # noqa: S314 - our own output


def test_a_command_that_fails_fails_its_step(workspace: Path) -> None:
    assert run(workspace, "Traces of the engine", "false; true").returncode != 0
    assert run(workspace, "Traces of the engine", "false | true").returncode != 0


def test_what_a_caller_gives_reaches_scripts_through_the_environment_alone() -> None:
    scripts = [step["run"] for step in steps().values()]

    assert all("${{" not in script for script in scripts)
    given = WORKFLOW[True]["workflow_call"]["inputs"]  # YAML reads the key `on` as a truth value
    text = (ROOT / ".github/workflows/engine-parity.yml").read_text()
    assert set(given) == set(re.findall(r"\$\{\{ inputs\.(\w+) \}\}", text))
    assert all(one["required"] for one in given.values())


def test_the_hook_runs_the_gate_of_its_own_checkout_on_the_traces_of_the_caller(tmp_path: Path) -> None:
    (hook,) = HOOKS
    checkout, caller = tmp_path / "assay", tmp_path / "engine"
    (checkout / ".ci").mkdir(parents=True)
    (checkout / ".venv/bin").mkdir(parents=True)
    caller.mkdir()
    shutil.copy(ROOT / hook["entry"], checkout / ".ci")
    (checkout / "Makefile").write_text("setup:\n\t@echo setting up\n")
    (checkout / ".venv/bin/assay").write_text('#!/bin/sh\necho "$PWD" "$@"\nexit 1\n')
    (checkout / ".venv/bin/assay").chmod(0o755)

    ended = subprocess.run(
        [str(checkout / hook["entry"]), *hook["args"]], cwd=caller, capture_output=True, text=True, check=False
    )

    assert hook["language"] == "script"
    assert ended.stdout == f"{caller} check --from traces\n"
    assert ended.stderr.strip() == "setting up"
    assert ended.returncode == 1, "what the gate says is what the hook says"


def test_pre_commit_takes_the_hook() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "pre_commit", "validate-manifest", str(ROOT / ".pre-commit-hooks.yaml")],
        capture_output=True,
        text=True,
        check=False,
    )

    assert (ended.returncode, ended.stdout + ended.stderr) == (0, "")
