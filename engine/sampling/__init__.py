"""From a row of logits to a token id, bit for bit as the oracles draw it.

- `processors`: logit bias and penalties; `filters`: top-p, min-p, XTC, top-k, each a pure function.
- `chain`: mlx-lm's order of filters, temperature and draw; `optiq_chain`: mlx-optiq's order.
- `keys`: where random keys come from; `categorical`: how mlx turns a key and logits into ids.
- `picker`: all of it as the `pick` of `engine.generate.steps`.
- `curves`: tone and transfer curves in place of a temperature (L3: formulas, no oracle).
- `numpy_reference`: the mlx path with numpy alone, random bits included, for checking goldens without MLX.
"""
