"""Fast CPU kernels, each bit-identical to the mlx operation that it replaces, and off unless it proves so here and now.

mlx's Linux wheel computes matrix products with scalar code in strict order of the input index. Computing many outputs side
by side, each in that same order, gives the same bits several times faster. `level` chooses how much of a model is replaced:

- `linear`: the products. `layout` lays weights out, `arena` holds them, `driver` and the tiles compile the products, `team`
  spreads them over threads, `matrix` and `experts` put them into layers, `verify` holds them to mlx.
- `fused`: besides, a whole forward as one compiled call a thread, where the family has one. `families` says what a model
  computes (`plan`), or why it has none; `program`, `part_list` and `part_words` make addresses of it. `step` runs the parts:
  `parts`, `row_norm`, `packing`, `attending`, `soft_cap`, `activations`, `routing` and `partition`. `history` keeps keys and
  values, `packer` and `codes` packed ones; `fused` is the model. `verify_step`, `verify_rows`, `verify_experts`, `part_bench`
  hold parts to mlx, `fuse` the whole.

The wheels for x86-64 and for aarch64 round differently (`contraction`); `python -m engine.kernels.prove` holds all of them to
the mlx of the machine that it is run on.

Plain mlx operations stay the definition: whatever the kernels do not cover, refuse or fail to prove is computed by them.
Source: spec/cpu.md.
"""
