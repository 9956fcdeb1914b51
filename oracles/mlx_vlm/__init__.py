"""The oracle mlx-vlm: its TurboQuant alone. See README.md."""
