"""The `outrigger` command: one module a subcommand, each with a click command named `command`."""
