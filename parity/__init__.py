"""Vocabulary, judge and gate: what is asked, what came out, and whether it is bit-identical.

The modules `errors`, `tensor`, `safetensors_file`, `case`, `snapshot`, `trace`, `provenance` and `golden` need numpy and
safetensors alone, so that an oracle's own environment can import them. Nothing here imports an oracle or the bench; only
`parity.verbs`, where the command line is put together, does.
"""
