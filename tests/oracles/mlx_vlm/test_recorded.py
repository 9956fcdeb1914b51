"""What was recorded of mlx-vlm's TurboQuant was recorded in the environment that the registry pins, and whole."""

import json
from pathlib import Path

from oracles.registry import find_oracle
from parity.safetensors_file import dumps, loads

ROOT = Path(__file__).parents[3]
FIXTURES = ROOT / "tests" / "fixtures" / "mlx_vlm"
TABLES = ROOT / "engine" / "turboquant" / "unit_tables.safetensors"


def test_the_recording_holds_the_pins_of_the_registry() -> None:
    provenance = json.loads((FIXTURES / "provenance.json").read_text())
    pins = find_oracle("mlx-vlm").pins
    for name in ("mlx", "mlx-lm", "mlx-vlm"):
        assert provenance["packages"][name] == pins[name]
    assert provenance["device"] == "cpu"


def test_the_lock_holds_the_pins_of_the_registry() -> None:
    oracle = find_oracle("mlx-vlm")
    lock = oracle.lock.read_text()
    assert all(f"\n{name}=={version}" in lock for name, version in oracle.pins.items())
    assert oracle.on_demand


def test_the_codebooks_of_the_engine_are_the_files_that_the_recorder_writes() -> None:
    tables = loads(TABLES.read_bytes())
    assert tables.keys() == {f"{width}.{bits}" for width in (32, 64, 128, 256, 512) for bits in (2, 3, 4, 8)}
    assert all(tensor.shape == (2 ** int(name.split(".")[1]),) for name, tensor in tables.items())
    assert dumps(tables) == TABLES.read_bytes()
