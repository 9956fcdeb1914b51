"""Proof that the gate can fail: seeded faults, planted in the running engine one at a time, and what the goldens say of each.

`fault` says what a fault is, `planting` puts one in and takes it out again, `changes` holds the small wrong values; the
`catalogue` lists them by kind. `trial` runs one fault, `run` all or a sample of them, `report` tells it.
"""
