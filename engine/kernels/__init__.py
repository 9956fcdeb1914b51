"""Fast CPU kernels, each bit-identical to the mlx operation that it replaces, and off unless it proves so here and now.

mlx's Linux wheel computes matrix products with scalar code in strict order of the input index. Computing many outputs side
by side, each in that same order, gives the same bits several times faster. `level` chooses how much of a model is replaced:

- `linear`: the products. `verify` holds them to mlx, `matrix` and `experts` put them into layers, `layout` lays weights out,
  `driver` and the tiles compile them, `team` spreads them over threads.
- `fused`: besides, a whole forward as one compiled call a thread, where the family has one. `plan` says what a model computes
  or why it has none, `program` and `part_words` give the plan addresses, `step` runs it out of `parts`, `packing` and
  `attending`, `history` keeps keys and values, `packer` and `codes` keep them packed, `fused` is the model, `verify_step` and
  `fuse` hold it to mlx.

The wheels for x86-64 and for aarch64 round differently (`contraction`); `python -m engine.kernels.prove` holds all of them to
the mlx of the machine that it is run on.

Plain mlx operations stay the definition: whatever the kernels do not cover, refuse or fail to prove is computed by them.
Source: spec/cpu.md.
"""
