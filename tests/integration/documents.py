"""Documents for the integration tests: run packed into one row, and run alone, with everything that
must agree."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from autopack import tiny
from compat.neighbours.measure import measure

LENGTHS = (7, 12, 5, 9)

FLOAT32 = 1e-5
"""Two orders of float32 sums differ by 1e-7 of their scale, and by 1e-6 after a few layers; leaks
start at 1e-2."""
LEAK = 0.1
"""What a leak exceeds in these models, whose parameters are large."""


def exact(found):
    """Whether what a rank found is an error of rounding alone; a text is what was raised."""
    return isinstance(found, float) and found < FLOAT32


def measured_exact(scenario, order, padded=("exact",)):
    """Want packed rows and padded batches of a neighbour to be exact, where stock leaks."""
    found = measure(scenario, order)
    assert found["packed"]["status"] == "exact", found
    assert found["padded"]["status"] in padded, found
    assert found["stock"] > LEAK


def holds(found):
    return found is True


def leaks(found):
    return isinstance(found, float) and found > LEAK


def says(words):
    return lambda found: words in str(found)


@dataclass
class Run:
    """What a model computes: logits (tokens, vocabulary), loss, gradients by parameter name."""

    logits: torch.Tensor
    loss: float
    gradients: dict[str, torch.Tensor]

    def error(self, wanted):
        """The largest of the relative errors of logits, loss and gradients."""
        assert self.gradients.keys() == wanted.gradients.keys()
        errors = [
            ((self.logits - wanted.logits).abs().max() / wanted.logits.std()).item(),
            abs(self.loss - wanted.loss) / abs(wanted.loss),
        ]
        scale = max((float(gradient.norm()) for gradient in wanted.gradients.values()), default=0.0)
        for name, gradient in wanted.gradients.items():
            # One that is zero but for rounding (of a key's bias, or of a fresh LoRA's A) has no
            # scale of its own.
            least, found = 1e-6 * scale, self.gradients[name]
            if float(gradient.norm()) < least:
                assert float(found.norm()) < least, name
            else:
                errors.append(float((found - gradient).norm() / gradient.norm()))
        return max(errors)


def documents(config, lengths=LENGTHS, seed=0):
    """Random documents, each of shape (1, tokens)."""
    lengths = list(lengths)
    return list(tiny.tokens(config, 1, sum(lengths), seed=seed).split(lengths, dim=1))


def packed(documents):
    """One packed row, as collators make it: positions restart, labels are the tokens."""
    ids = torch.cat(documents, dim=1)
    positions = torch.cat([torch.arange(document.shape[1]) for document in documents])[None]
    return {"input_ids": ids, "position_ids": positions, "labels": ids.clone()}


def targets(documents):
    """How many tokens are predicted: all but the first of each document."""
    return sum(document.shape[1] - 1 for document in documents)


def run_alone(model, documents, shifts=True):
    """Forward and backward over every document by itself; the loss is the mean over the tokens of
    all.

    `shifts` says whether the model's loss compares with the next token.
    """
    calls = [{"input_ids": document, "labels": document} for document in documents]
    return _run(
        model, calls, targets(documents) if shifts else sum(d.shape[1] for d in documents), shifts
    )


def with_labels(batch):
    """A padded batch whose labels are its real tokens."""
    return batch | {"labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


def _run(model, calls, count, shifts=True):
    model.zero_grad()
    logits, loss = [], 0.0
    for call in calls:
        output = model(**call, **({"num_items_in_batch": count} if shifts else {}))
        part = output.loss * (1 if shifts else call["labels"].shape[1] / count)
        part.backward()
        logits.append(output.logits[0].detach())
        loss += part.item()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return Run(torch.cat(logits), loss, gradients)
