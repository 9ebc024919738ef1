"""The command line: one module per command, with `add_parser` and `run`. Heavy imports happen inside `run`."""
