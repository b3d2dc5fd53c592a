"""One module for each backend, with its `BACKEND` (`autopack.attention.call.Backend`). Imports
nothing."""
