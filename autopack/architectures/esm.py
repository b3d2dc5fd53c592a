"""ESM, which with `token_dropout` scales the embeddings of a row by the share of mask tokens in it."""

from __future__ import annotations

from typing import Any

from autopack.family import Family, MixerCall, Tiny, Way
from autopack.mixers import ALONE


class _EmbeddedAlone(Way):
    """Embeddings of documents alone, those of one length as a batch, where all tokens of one decide on their scale."""

    recurs = False
    words = "embedded alone"
    work = "the embedding itself, documents of one length as a batch"

    def run(self, call: MixerCall) -> Any:
        if not getattr(call.mixer, "token_dropout", True):
            return call.changed(lambda name, value: value)
        return ALONE.run(call)


FAMILY = Family(
    name="esm",
    model_types=frozenset({"esm"}),
    how="attention site, document by document; embeddings of documents alone",
    mixers={"EsmEmbeddings": _EmbeddedAlone()},
    tiny=Tiny(configs={"esm": {"token_dropout": True, "mask_token_id": 4}}),
)
