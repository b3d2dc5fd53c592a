"""Subcommands that are more than a call of one module, and less than a package of their own."""
