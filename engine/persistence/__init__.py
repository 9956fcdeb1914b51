"""Caches on disk: own files, and the files of two other engines.

`cache_file` saves and loads every kind of cache in a format of its own, whole or not at all; `kinds` is the table that a new
kind joins with one entry; `fingerprints` says which model a file belongs to. `mlx_lm_file` exchanges prompt caches with
mlx-lm, both ways; `mlx_bun_file` reads the structure of mlx-bun's third format. Imported by path, not from here.
"""
