"""Attention on packed rows: autopack's sites, the choice of a backend, and one module per
backend."""
