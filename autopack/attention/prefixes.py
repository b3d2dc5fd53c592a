"""Attention in a row that holds common beginnings of documents once: each stretch attends to its
document.

Shapes: S tokens of the row that runs, else as in `autopack.attention.call`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from autopack.attention.call import AttentionCall, Backend, Output
from autopack.errors import UnsupportedModel
from autopack.layout.prefixes import Prefixes


def attend(call: AttentionCall, prefixes: Prefixes, backend: Backend) -> Tensor:
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
    of_tokens = any(isinstance(option, Tensor) and option.dim() > 1 for option in given)
    found = (
        None
        if backend.over_prefixes is None or of_tokens
        else backend.over_prefixes(call, prefixes)
    )
    return _as_documents(call, prefixes, backend) if found is None else found


def by_kernel(
    attend: Callable[[AttentionCall], Output], call: AttentionCall, prefixes: Prefixes
) -> Tensor | None:
    """Attend from each stretch to its document up to its end, or return None for chunks.

    Keys and values of each stretch are laid end to end. Kernels align queries with the last keys.
    """
    if call.pattern is None or call.pattern.chunk is not None:
        return None
    columns = prefixes.key_columns.to(call.key.device)
    key, value = (states.index_select(2, columns) for states in (call.key, call.value))
    call = replace(call, key=key, value=value, layout=prefixes.queries, memory=prefixes.keys)
    return attend(call)[0]


def _as_documents(call: AttentionCall, prefixes: Prefixes, backend: Backend) -> Tensor:
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
    shape = option.shape if isinstance(option, Tensor) else ()
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
