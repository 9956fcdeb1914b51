"""The reference engine on mlx.core; imports nothing else of this repository.

A family file says how a model is put together; the layers that it composes are one file each (`linear`, `norm`, `rope`,
`attention`, `mlp`); `cache` holds what a layer remembers; `generate` is the loop. Layers are frozen dataclasses of arrays,
caches are values, and everything is a function of its arguments: the same call gives the same bits.
"""
