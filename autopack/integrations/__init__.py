"""Ways into programs that do not call autopack themselves."""
