"""All that is to be known of autopack on a GPU, in one command: `python -m benchmarks.gpu --out
DIR`."""
