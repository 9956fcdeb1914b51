"""What a layer remembers, one kind a file.

A cache is a value: `append` returns a new cache and leaves the old one as it was, so keeping the old one is a fork.
`protocol` says what every kind offers; `plain` keeps keys and values as computed; `quantized` keeps them packed; `convert`
turns one into the other at the moment that the KV mode names.
"""
