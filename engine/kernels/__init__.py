"""Fast CPU kernels, each bit-identical to the mlx operation that it replaces, and off unless it proves so here and now.

mlx's Linux wheel computes matrix products with scalar code in strict order of the input index. Computing many outputs side
by side, each in that same order, gives the same bits several times faster. `level` puts the kernels into a model, `verify`
holds them to mlx, `matrix` lays weights out, `driver` and `tile` compile the products, `team` spreads them over threads.
Plain mlx operations stay the definition: whatever the kernels do not cover, refuse or fail to prove is computed by them.
Source: spec/cpu.md.
"""
