"""One comparison for padded batches: an enabled model gives what stock gives, in the logits, the
loss and gradients."""

from tests.engine import Limits, Result, check
from tests.support.padded import FLOAT32, GRADIENT

LIMITS = Limits(FLOAT32, FLOAT32, GRADIENT)


def trained(model, inputs, **options):
    """What a call gives at real tokens, or for whole rows, with the gradients of its loss."""
    output = model(**inputs, **options)
    logits, real = output.logits, inputs["attention_mask"].bool()
    return Result.of(
        model, [logits[real] if logits.shape[:2] == real.shape else logits], output.loss, LIMITS
    )


def agree(model, stock, inputs, **options):
    """Raise where a call of the enabled model gives anything else than the same call of stock."""
    check(trained(model, inputs, **options), trained(stock, inputs, **options))
