"""Entry points for programs that do not call autopack themselves."""
