"""Packed rows of which two ranks have a part each, against documents alone."""

import dataclasses

import torch
import torch.distributed as dist

import autopack
from autopack import tiny
from tests.integration.documents import Run, documents, run_alone

LENGTHS = ((7, 12, 5), (9, 11, 4))
"""Of two rows of 24 columns; no document ends where a part does."""


def model_of(kind, attention="sdpa", **options):
    """A tiny model whose heads two ranks can share, in training mode without dropout."""
    name, _, task = kind.partition(":")
    model = tiny.build(
        name, task=task or "causal-lm", attn_implementation=attention, seed=0, **options
    ).train()
    model.config.use_cache = False
    return model


def rows_of(config, lengths=LENGTHS, seed=0):
    """The documents, and rows of them as collators make them."""
    texts = documents(config, [n for row in lengths for n in row], seed)
    rest = iter(texts)
    rows = [[next(rest) for _ in row] for row in lengths]
    ids = torch.cat([torch.cat(row, dim=1) for row in rows])
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    return texts, {"input_ids": ids, "position_ids": positions, "labels": ids.clone()}


def shared(model, batch, group=None, shifts=True):
    """Forward and backward over this rank's part; logits, loss and gradients of all parts
    together."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    part = autopack.packing.shard_rows(batch, rank, ranks, shift_labels=shifts)
    model.zero_grad()
    output = model(**part)
    loss = output.loss
    if not shifts:  # a mean over the tokens of this part
        loss = loss * int((part["labels"] != -100).sum()) / int((batch["labels"] != -100).sum())
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total, group=group)
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    for gradient in gradients.values():
        dist.all_reduce(gradient, group=group)
    logits = [torch.empty_like(output.logits) for _ in range(ranks)]
    dist.all_gather(logits, output.logits.detach().contiguous(), group=group)
    model.zero_grad()
    whole = torch.cat(logits, dim=1)[:, : batch["input_ids"].shape[1]]
    return Run(whole.flatten(0, 1), float(total), gradients)


def error(
    kind,
    batch_of=rows_of,
    change=None,
    make=model_of,
    group=None,
    **options,
):
    """The error of rows that ranks share against each document alone on one process.

    `make` makes both models, and `change` changes the one that is shared once it is enabled.
    """
    shifts = not kind.endswith("masked-lm")
    model, plain = make(kind, **options), make(kind, **options)
    handle = autopack.enable(model, sequence_parallel=group or dist.group.WORLD)
    assert handle.enabled.proof.source in ("recorded", "twin", "part"), handle.enabled.proof
    if change is not None:
        model = change(model)
    texts, batch = batch_of(model.config)
    alone = run_alone(plain, texts, shifts)
    found = shared(model, batch, group, shifts=shifts)
    mask = batch.get("attention_mask")
    if mask is not None:
        found = dataclasses.replace(found, logits=found.logits[mask.flatten() != 0])
    return found.error(alone)
