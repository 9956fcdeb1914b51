"""Float64 truth: an independent implementation of some families in numpy alone, to measure how far off a run is.

It imports neither the engine nor mlx and shares no code with them; it knows no caches and no steps: one forward over all ids,
every output of every position. It judges nothing: bits do. What it is for: an oracle and an engine that differ can both be held
against it, and so can an oracle alone.

| file | holds |
| --- | --- |
| `weights.py` | a snapshot's tensors in float64, packed ones unpacked |
| `rounding.py` | exact arithmetic, and the same with the rounding of a dtype put in at random |
| `packing.py` | packed keys and values |
| `rotation.py` | rotary positions and their scalings |
| `forward.py` | the layers that families share, and the outputs that they leave behind |
| `dense.py`, `gemma.py`, `experts.py`, `delta.py` | the families |
| `model.py` | `open_truth`, `Truth` and the rounding bound |
"""
