"""The seams: named functions of autopack, how each is broken, and the tests that have to notice.

A function that is renamed changes one word here. `results/mutants_to_seams.tsv` says which seam
stands for which of the breaks of source text that 0.2 was tried with.
"""

from compat.seam_breaks import Seam
from compat.seam_table import attention, calls, layout, proofs

SEAMS: tuple[Seam, ...] = (*attention.SEAMS, *layout.SEAMS, *calls.SEAMS, *proofs.SEAMS)
