"""The gain of packing: on lengths (`autopack estimate`), and on a model and a machine of one's own
(`autopack bench`).

Nothing is timed before the arms have been shown what they compute, and nothing is said of a ratio
that noise could have made. `benchmarks/` times the project's own goals with the same documents,
batches, clocks and memory."""
