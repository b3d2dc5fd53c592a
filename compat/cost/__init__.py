"""What `autopack.enable` costs on models that people have changed: processor time and memory, beside stated bounds."""
