"""Throughput, load time and memory of the engine and the oracles, measured in one interleaved run."""
