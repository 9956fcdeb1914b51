"""TurboQuant, in its two published forms, which share a name and little else.

Key-value-width form (`affine_keys`, `rotated_values`, `engine.cache.turboquant`): keys affine in groups and not rotated, values
rotated and in groups; widths of their own for both. No oracle runs it here: its codec is held to published numbers, its logits
to a declared bound (L3).

mlx-vlm's form (`unit_codec`, `engine.cache.turboquant_vlm`): keys and values alike as a norm and a rotated unit vector, one
table a head width. Its oracle is mlx-vlm 0.6.3's module, bit for bit on the CPU (L1).

`bit_stream` packs the codes of both; `caches` makes a model's caches. Zandieh et al. 2025 is the idea behind both.
"""
