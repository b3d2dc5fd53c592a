"""Random models, layouts and forms of calls, against what the stock model gives each document
alone."""
