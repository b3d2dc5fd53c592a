"""TAPAS: positions restart in every cell of a table, and cells of two tables have the same numbers.

Positions that count from 0 only say where a document begins: alone it would have been given none, and number tokens by
their cells. Others are taken as they are.
"""

from __future__ import annotations

from typing import Any

import torch

from autopack.family import Family
from autopack.layout.batches import Batches, DocumentBatch, equally_long, spread_tokens
from autopack.mixers import ALONE, MixerCall, Way


class _ByCells(Way):
    recurs = False
    counts = True
    words = "embeddings of documents alone"
    work = "the embeddings themselves, documents of one length as a batch"

    def run(self, call: MixerCall) -> Any:
        call.check()
        found = Batches.grouped(call.layout, equally_long)
        return found.together([self._embed(call, batch) for batch in found.batches])

    def _embed(self, call: MixerCall, batch: DocumentBatch) -> torch.Tensor:
        given = spread_tokens(call.arguments["position_ids"], call.layout, batch.spread)
        counted = (given == torch.arange(batch.shape[1], device=given.device)).all(1)

        def embed(positions: torch.Tensor | None) -> Any:
            return call.changed(
                lambda name, value: (
                    positions if name == "position_ids" else spread_tokens(value, call.layout, batch.spread)
                )
            )

        if counted.all() or not counted.any():
            return embed(None if counted.all() else given)
        return torch.where(counted[:, None, None], embed(None), embed(given))


FAMILY = Family(
    name="tapas",
    model_types=frozenset({"tapas"}),
    how="the model's own attention, documents alone; positions restart in every cell of a document's table",
    attends=False,
    mixers={"TapasEmbeddings": _ByCells(), "TapasSelfAttention": ALONE},
)
