"""One module for each backend, with its `BACKEND` (`autopack.attention.backend.Backend`). Imports nothing."""
