"""Attention on packed rows: the sites where autopack stands, the choice of a backend, and one module per backend."""
