"""Runners that record what an oracle computes, each in a process and an environment of its own; never imports engine."""
