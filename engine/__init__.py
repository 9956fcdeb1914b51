"""The reference engine on mlx.core; imports nothing else of this repository."""
