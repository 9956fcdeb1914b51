"""Peers are described by a table and a lock; llama.cpp is believed for nothing and never synchronised by itself."""

import json

from bench.peers import LLAMA_CPP, MLX_LM, llama_cpp, versions
from oracles.registry import load_oracles


def test_llama_cpp_is_described_as_an_oracle_is_and_is_none() -> None:
    described = llama_cpp()
    assert described.entry == "oracles.xllamacpp.bench_worker"
    assert described.pins == {"xllamacpp": described.version}
    assert f"xllamacpp=={described.version}" in described.lock.read_text()
    assert described.name not in load_oracles(on_demand=True)


def test_versions_are_those_of_the_tables() -> None:
    assert versions() == {MLX_LM: "0.32.2", LLAMA_CPP: llama_cpp().version}
    json.dumps(versions())
