"""The state of a selective scan.

states: mamba#434

Mamba has two steps in which tokens meet, its convolution and its scan. Neither takes positions, so
that packed sequences flow into each other.
"""

stock = ("mamba2",)
