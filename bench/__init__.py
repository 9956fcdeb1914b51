"""Throughput, load time and memory of the engine and its peers, measured in one interleaved run.

Each peer runs in a process of its own (`engine_worker` here, an oracle's worker in its environment) and answers requests
line by line; `interleave` sends them in turn, so that a noisy minute hits both. Figures are ratios with an interval; the
logits of the timed runs are compared by digest, because a faster engine that computes something else is no faster.
"""
