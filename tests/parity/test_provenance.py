import json
import os
from importlib.metadata import PackageNotFoundError

import pytest

from parity.platform_key import platform_key
from parity.provenance import Provenance, wheel_digest


def test_provenance_is_equal_after_a_round_trip_through_json() -> None:
    provenance = Provenance.capture(("mlx", "numpy"), device="cpu")

    assert Provenance.from_json(json.loads(json.dumps(provenance.to_json()))) == provenance


def test_the_same_process_gives_the_same_provenance() -> None:
    assert Provenance.capture(("mlx",), device="cpu") == Provenance.capture(("mlx",), device="cpu")


def test_packages_that_are_not_installed_are_left_out() -> None:
    assert set(Provenance.capture(("mlx", "no-such-package-xyz"), device="cpu").packages) == {"mlx"}


def test_only_switches_that_change_results_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_SOMETHING", "1")
    monkeypatch.setenv("SECRET_TOKEN", "x")

    switches = Provenance.capture((), device="cpu").switches

    assert switches["MLX_SOMETHING"] == "1"
    assert "SECRET_TOKEN" not in switches


def test_nothing_that_differs_between_two_checkouts_gets_in() -> None:
    text = json.dumps(Provenance.capture(("mlx", "numpy"), device="cpu").to_json())

    assert os.getcwd() not in text  # noqa: PTH109 - a string is wanted
    assert os.uname().nodename not in text
    assert platform_key() in text


def test_a_wheel_digest_is_stable_and_tells_packages_apart() -> None:
    assert wheel_digest("numpy") == wheel_digest("numpy") != wheel_digest("mlx")
    with pytest.raises(PackageNotFoundError):
        wheel_digest("no-such-package-xyz")


def test_an_unknown_field_is_refused() -> None:
    with pytest.raises(TypeError):
        Provenance.from_json({"when": "today"})
