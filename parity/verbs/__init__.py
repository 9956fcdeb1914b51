"""The verbs of the command line, one a file: `add_parser(subparsers)` describes a verb, `run(args)` does it.

A verb prints its result on standard output and its progress on standard error, returns 0 or 1, and raises an error with a
message for what the caller has to mend. Alone in `parity`, verbs may import `oracles` and `bench`.
"""
