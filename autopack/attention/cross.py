"""Cross-attention between packed rows: every document of the decoder reads that document of the encoder."""

from __future__ import annotations

from itertools import pairwise

import torch

from autopack.attention.backends import flash
from autopack.attention.backends.flex import blocks_within_documents
from autopack.attention.call import AttentionCall, Output
from autopack.attention.document_mask import DocumentMask
from autopack.attention.per_document import slice_mask
from autopack.errors import UnsupportedModel
from autopack.inspection import masks, releases, torches
from autopack.layout.packed import PackedLayout


@torch._dynamo.disable  # lengths on the host would be constants of a graph, and every layout a graph of its own
def attend(call: AttentionCall) -> Output:
    """Attend from the documents of `call.layout`, which is one row, to those of `call.memory`, which are as many.

    FlashAttention and FlexAttention are called once, anything else once per document. Gives no attention weights.
    """
    layout, memory, mask = call.layout, call.memory, call.mask
    assert memory is not None
    if isinstance(mask, DocumentMask):
        if mask.pattern != masks.Pattern(causal=False) and not _sees_all(mask, layout, memory):
            raise UnsupportedModel(
                f"{type(call.module).__name__} attends to the encoder by a rule of its own, which autopack cannot "
                f"apply to documents. Run such documents one per row."
            )
        mask = None  # all that a document's encoder has made is seen
    # Left out: positions, which are those of the decoder alone, and a bias of one element for all pairs.
    options = {name: option for name, option in call.options.items() if name != "position_ids"}
    bias = options.get("position_bias")
    if isinstance(bias, torch.Tensor) and bias.shape[-1] == 1:
        del options["position_bias"]
    if releases.is_flash(call.implementation):
        call.refuse_dense_mask("flash attention")
        return flash.attend_between(call, layout, memory, {**options, "is_causal": False})[0], None
    if call.implementation == "flex_attention":
        if not torches.is_block_mask(mask):
            call.refuse_dense_mask("flex_attention")
        blocks = blocks_within_documents(layout, memory, mask)
        return call.original(call.module, call.query, call.key, call.value, blocks, **options)[0], None
    outputs = []
    for ours, theirs in zip(pairwise(layout.bounds), pairwise(memory.bounds), strict=True):
        queries, keys = slice(*ours), slice(*theirs)
        states = call.query[:, :, queries], call.key[:, :, keys], call.value[:, :, keys]
        outputs.append(call.original(call.module, *states, slice_mask(mask, 0, queries, keys), **options)[0])
    return torch.cat(outputs, dim=1), None


def _sees_all(mask: DocumentMask, layout: PackedLayout, memory: PackedLayout) -> bool:
    """Whether a rule of the model's own lets all tokens of every document see all states of its encoder (T5Gemma)."""

    def ask() -> tuple[bool, DocumentMask]:
        zero = torch.zeros((), dtype=torch.long, device=layout.device)
        ours, theirs = (torch.arange(each.columns, device=layout.device) for each in (layout, memory))
        pairs = zip(pairwise(layout.bounds), pairwise(memory.bounds), strict=True)
        answers = [mask.rule(zero, zero, ours[slice(*own), None], theirs[None, slice(*read)]) for own, read in pairs]
        return bool(torch.stack([answer.all() for answer in answers]).all()), mask  # kept: its id is the key

    return layout.derived(("sees all", memory, id(mask)), ask)[0]
