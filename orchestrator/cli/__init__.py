"""The command line: one file for a group of commands; the only reader of the environment."""
