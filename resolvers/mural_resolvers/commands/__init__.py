"""The subcommands that need no server; the command ``mural`` finds them by entry points."""
