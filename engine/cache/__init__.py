"""What a layer remembers, one kind a file.

A cache is a value: `append` returns a new cache and leaves the old one as it was, so keeping the old one is a fork.
`protocol` says what every kind offers; `plain` keeps keys and values as computed and `rotating` in a ring; `quantized` and
`rotating_quantized` keep them packed; `convert` makes the caches of a KV mode and turns one kind into another at the moment
that it names; `per_layer` reads widths by layer; `memory` counts bytes. `chunked` may drop its front, `paged` keeps blocks of a
pool. `batch` puts several sequences side by side, in a batch cache of each kind (`batch_plain` and so on); `trim` forgets the
last tokens of all layers or of none.
"""
