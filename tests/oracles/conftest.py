from pathlib import Path

import pytest

from oracles.registry import Oracle
from tests.oracles.shop import Shop, fake_oracle


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "home"
    monkeypatch.setenv("ASSAY_HOME", str(folder))
    return folder


@pytest.fixture
def oracle(tmp_path: Path) -> Oracle:
    return fake_oracle(tmp_path)


@pytest.fixture
def shop(tmp_path: Path, oracle: Oracle) -> Shop:
    return Shop(tmp_path, oracle)
