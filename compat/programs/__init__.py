"""Other people's training programs, run by their own commands with tiny models: stock, and under
`autopack run`."""
