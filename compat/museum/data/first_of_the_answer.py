"""The mask of a prompt reaches one token into the answer.

labels: alpaca-lora#306

The prompt is tokenized alone to count its tokens, and gets an end token that it does not have
before the answer. The first token of every answer is masked.
"""

from compat.museum.data import _trainer


def collate(features, more=1):
    prompts = [sum(value == 0 for value in each["completion_mask"]) + more for each in features]
    labels = [
        [-100] * prompt + each["input_ids"][prompt:]
        for each, prompt in zip(features, prompts, strict=True)
    ]
    return _trainer.collate(features, labels)


mistaken = {"collator": collate, "data": _trainer.answers}
sound = {"collator": lambda features: collate(features, 0), "data": _trainer.answers}
