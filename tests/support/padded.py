"""Padded batches for tests, tiny models with any head, and comparisons of stock and enabled."""

import copy

import torch
import transformers

import autopack
from autopack import tiny
from autopack.calls.rows import Unpadded
from autopack.tiny.models import randomize
from tests.engine import Limits, Result, check, next_token_loss
from tests.subjects import without_dropout

PADDED = (24, 5, 11, 1)
"""Documents of a padded batch of 24 columns: one fills its row, one is a single token."""
HEADS = {
    "causal LM": "AutoModelForCausalLM",
    "sequence classification": "AutoModelForSequenceClassification",
    "token classification": "AutoModelForTokenClassification",
    "question answering": "AutoModelForQuestionAnswering",
    "masked LM": "AutoModelForMaskedLM",
    "backbone": "AutoModel",
}
PADDING = 0
FLOAT32 = 1e-4
"""Largest error in float32, of the logits' standard deviation, and relative for losses: rounding
leaves about 1e-6."""
GRADIENT = 1e-3
"""The same for gradients of single parameters, in which sums over all tokens cancel."""
LIMITS = Limits(FLOAT32, FLOAT32, GRADIENT)


def mask_of(lengths, side="right", columns=None):
    """Return the attention mask of a batch padded on a side, or with holes between the tokens."""
    columns = columns or max(lengths)
    mask = torch.zeros(len(lengths), columns, dtype=torch.long)
    for row, length in zip(mask, lengths, strict=True):
        if side == "holes":
            row[
                torch.randperm(columns, generator=torch.Generator().manual_seed(length))[:length]
            ] = 1
        else:
            row[slice(length) if side == "right" else slice(columns - length, None)] = 1
    return mask


def batch(task, mask, seed=0, classes=3):
    """Return a padded batch with labels for a task.

    Labels leave out what padding would predict.
    """
    rows, columns = mask.shape
    ids = tiny.tokens(None, rows, columns, seed=seed).masked_fill(mask == 0, PADDING)
    found = {"input_ids": ids, "attention_mask": mask}
    generator = torch.Generator().manual_seed(seed)
    if task in ("causal LM", "masked LM"):
        found["labels"] = ids.masked_fill(
            unpredicted(mask) if task == "causal LM" else mask == 0, -100
        )
    elif task == "sequence classification":
        found["labels"] = torch.randint(classes, (rows,), generator=generator)
    elif task == "token classification":
        found["labels"] = torch.randint(classes, (rows, columns), generator=generator).masked_fill(
            mask == 0, -100
        )
    elif task == "question answering":
        found["start_positions"] = mask.argmax(1)
        found["end_positions"] = columns - 1 - mask.flip(1).argmax(1)
    return found


def unpredicted(mask):
    """Return a mask that is True at padding and at tokens after padding or first in their row."""
    before = torch.nn.functional.pad(mask, (1, 0))[:, :-1]
    return (mask == 0) | (before == 0)


def build(model_type, task="causal LM", attn_implementation=None, **config):
    """Return a tiny model with any head, in train mode and without dropout."""
    tiny_config = tiny.config(model_type, **config)
    tiny_config.pad_token_id = PADDING
    if task not in ("causal LM", "backbone") and hasattr(tiny_config, "is_decoder"):
        tiny_config.is_decoder = False
    implementation = attn_implementation or (
        "eager" if model_type in ("gemma2", "big_bird") else "sdpa"
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        kind = getattr(transformers, HEADS[task])
        if task.endswith("classification"):
            tiny_config.num_labels = 3
        model = kind.from_config(tiny_config, attn_implementation=implementation)
    randomize(model, 0)
    return without_dropout(model).train()


def twins(model):
    """Return the model and a copy of it."""
    return model, copy.deepcopy(model)


def loss_error(found, expected):
    """Return the relative difference of two losses."""
    return abs(found.item() - expected.item()) / abs(expected.item())


def logit_error(found, expected, mask):
    """Return the largest difference at real tokens, or in whole rows, over the deviation."""
    if found.shape[:2] == mask.shape:
        found, expected = found[mask.bool()], expected[mask.bool()]
    return ((found - expected).abs().max() / expected.std()).item()


def model_gradient_error(found, expected):
    """Return the largest difference of a parameter's gradient, relative to its largest entry.

    Some gradients are zero but for rounding (of a key's bias): for these it is relative to a
    hundredth of the largest entry of all gradients.
    """
    pairs = [
        (p.grad, q.grad) for p, q in zip(found.parameters(), expected.parameters(), strict=True)
    ]
    assert all((p is None) == (q is None) for p, q in pairs)
    both = [(p, q) for p, q in pairs if p is not None and q is not None]
    least = 1e-2 * max(q.abs().max().item() for _, q in both)
    return max((p - q).abs().max().item() / max(q.abs().max().item(), least) for p, q in both)


def trained(model, inputs, **options):
    """Return the results of a call at real tokens, or for whole rows, with gradients of its loss.

    Without a loss it is one of the logits; there are no gradients where none are computed.
    """
    output = model(**inputs, **options)
    logits, loss, real = output.logits, output.loss, inputs["attention_mask"].bool()
    parts = [logits[real] if logits.shape[:2] == real.shape else logits]
    if not torch.is_grad_enabled():
        return Result(parts, limits=LIMITS)
    return Result.of(model, parts, loss_of_logits(logits, inputs) if loss is None else loss, LIMITS)


def agree(model, stock, inputs, **options):
    """Raise `AssertionError` if a call of the enabled model differs from the same call of stock."""
    check(trained(model, inputs, **options), trained(stock, inputs, **options))


def loss_of_logits(logits, batch):
    """Return the mean loss of a batch's tokens, as trainers compute it outside of the model."""
    labels = batch["input_ids"].masked_fill(unpredicted(batch["attention_mask"]), -100)
    return next_token_loss(logits.float(), labels)


def tally_of(model):
    """Return the `Tally` of an enabled model."""
    return model.__dict__["_autopack_enabled"].tally


def put_a_fault_into_unpadding(monkeypatch, field):
    """Patch a field of every unpadded batch's output to be off by a hundredth."""
    finish = Unpadded.finish

    def wrong(self, ended, module, output):
        finished = finish(self, ended, module, output)
        if finished[field] is not None:
            finished[field] = finished[field] * 1.01
        return finished

    monkeypatch.setattr(Unpadded, "finish", wrong)


def packs_at_once(model, **options):
    """Enable a model whose first batches are unpadded too, without a look at reads of padding."""
    handle = autopack.enable(model, **options)
    handle.enabled.padding_read = None
    return handle
