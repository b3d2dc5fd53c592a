"""The token of the end is that of padding, and its labels are masked with it.

labels: transformers#23530, trl#976

A tokenizer without padding pads with its end token, and the collator ignores labels by that token.
The end of a document is never a target, so the model never learns to stop.
"""

from compat.museum.data import _trainer


def collate(features):
    batch = _trainer.collate(features)
    batch["input_ids"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, _trainer.EOS)
    batch["labels"] = batch["input_ids"].masked_fill(batch["input_ids"] == _trainer.EOS, -100)
    return batch


mistaken = {"collator": collate}
