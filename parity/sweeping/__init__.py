"""Sweeps: equalities that need no golden, asked of the engine and of each oracle alike.

An invariance says that two ways of computing one thing give the same bits: a prompt in pieces and whole, a row in a batch and
alone, a branch and a fresh run. `subject` is what anything must offer to be asked; `sequence`, `batch`, `loop`, `filters` and
`weights` hold the invariances; `outcome` judges; `plan` says which are asked of what; `known` declares differences with their
reason; `report` lays the table out. All but `engine_subject` need numpy alone, because oracles are asked inside their own
processes.
"""
