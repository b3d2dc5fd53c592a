"""Attention in a row that holds common beginnings of documents once: each stretch attends to its
document.

Shapes: S tokens of the row that runs, else as in `autopack.attention.call`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from autopack.attention.call import AttentionCall, Backend
from autopack.attention.document_mask import DocumentMask
from autopack.errors import UnsupportedModel
from autopack.inspection import releases
from autopack.layout.prefixes import Prefixes


def attend(call: AttentionCall, prefixes: Prefixes, backend: Backend) -> torch.Tensor:
    """Attend from every token of a row of stretches to its document so far: (1, S, H, V).

    The layout of `call` describes the documents. A backend that takes other lengths of keys than
    of queries computes each stretch once; with any other backend, documents attend as if they
    shared nothing. Raises `UnsupportedModel` if later tokens are seen: then common tokens differ
    from document to document.
    """
    if call.pattern is None or not call.pattern.causal:
        raise UnsupportedModel(
            f"{type(call.module).__name__} attends by a mask that is not known to hide later "
            "tokens, so what rows of the batch begin with cannot be computed once for all of them. "
            "Use autopack.enable(model, share=False).",
            code="share-refused",
        )
    given = (option for name, option in call.options.items() if name != "position_ids")
    of_tokens = any(isinstance(option, torch.Tensor) and option.dim() > 1 for option in given)
    found = (
        None
        if backend.over_prefixes is None or of_tokens
        else backend.over_prefixes(call, prefixes)
    )
    return _as_documents(call, prefixes, backend) if found is None else found


# lengths on the host would be constants of a graph, and every layout a graph of its own
@torch._dynamo.disable
def by_stretches(call: AttentionCall, prefixes: Prefixes) -> torch.Tensor | None:
    """Attend once per stretch by the model's own function; return None if masks cannot be made."""
    own = call.mask
    if (
        not isinstance(own, DocumentMask)
        or not releases.is_own(call.original)
        or own.for_last(1, 2) is None
    ):
        return None
    options = {name: option for name, option in call.options.items() if name != "position_ids"}
    call = replace(call, options=options)
    queries, keys, values = (states.split(prefixes.lengths, dim=2) for states in call.states)
    outputs = []
    for stretch, query in zip(prefixes.stretches, queries, strict=True):
        if not stretch.depth:
            key, value, mask = (
                keys[stretch.chain[0]],
                values[stretch.chain[0]],
                own.for_document(0, 0, stretch.length),
            )
        else:
            key, value = (
                torch.cat([parts[number] for number in stretch.chain], dim=2)
                for parts in (keys, values)
            )
            mask = own.for_last(stretch.length, stretch.depth + stretch.length)
        given = call.options_beside(mask)
        outputs.append(call.original(call.module, query, key, value, mask, **given)[0])
    return torch.cat(outputs, dim=1)


def _as_documents(call: AttentionCall, prefixes: Prefixes, backend: Backend) -> torch.Tensor:
    """Attend over whole documents without sharing, and return the row's tokens: (1, S, H, V)."""
    places = prefixes.row.back.to(call.query.device)
    query, key, value = (states.index_select(2, places) for states in call.states)
    options = {
        name: _expanded(call, name, option, prefixes) for name, option in call.options.items()
    }
    call = replace(call, query=query, key=key, value=value, options=options)
    return backend.attend(call)[0].index_select(1, prefixes.row.where[0].to(query.device))


def _expanded(call: AttentionCall, name: str, option: Any, prefixes: Prefixes) -> Any:
    """Return an option with its axis of S tokens, if any, expanded to the documents' tokens."""
    shape = option.shape if isinstance(option, torch.Tensor) else ()
    axes = [axis for axis, size in enumerate(shape) if axis and size == prefixes.tokens]
    if not axes:
        return option
    if len(axes) > 1 or (axes[0] == 1 and option.shape[1] == call.query.shape[1]):
        raise UnsupportedModel(
            f"{type(call.module).__name__} hands {name} of shape {tuple(option.shape)} to its "
            f"attention function, for a row of {prefixes.tokens} tokens that holds once what rows "
            "of the batch begin with; autopack cannot tell what of it is of which document. Use "
            "autopack.enable(model, share=False).",
            code="share-refused",
        )
    return option.index_select(axes[0], prefixes.row.back.to(option.device))


def with_keys_of_documents(call: AttentionCall, prefixes: Prefixes) -> AttentionCall:
    """Return the call with each stretch's keys and values laid end to end as in `prefixes.keys`."""
    columns = prefixes.key_columns.to(call.key.device)
    return replace(
        call, key=call.key.index_select(2, columns), value=call.value.index_select(2, columns)
    )
