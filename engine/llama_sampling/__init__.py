"""The llama.cpp family of samplers, in numpy alone: candidates are narrowed by a chain, then one of them is picked.

A sampler is a frozen value with the options that users know; `apply` gives new candidates and never changes old ones.
`strategy.sample_with_strategy` runs a whole chain. The filters of the mlx family are other functions with the same names:
they mask where these shrink, and they differ at ties and thresholds (spec/samplers.md sections 1.3 and 3.2).
"""
