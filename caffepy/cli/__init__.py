"""The command line: one module per command or group of commands. Heavy imports happen inside the functions that run."""
