"""The command line: one file a command, and the one place where errors turn into exit codes."""
