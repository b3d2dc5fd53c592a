"""An evaluation gets its batches from a collator that was made for something else.

evaluation: axolotl#1076, axolotl#3478

Training packs its rows and an evaluation does not mean to, but both go through parts of the same
way. The rows of the evaluation are several documents that nothing tells apart, and its loss is that
of other text.
"""

from transformers import Trainer

from compat.museum.data import _trainer


def flattened(features):
    batch = _trainer.packed(features)
    return {name: value for name, value in batch.items() if name != "position_ids"}


class Evaluating(Trainer):
    def get_eval_dataloader(self, eval_dataset=None):
        before, self.data_collator = self.data_collator, flattened
        try:
            return super().get_eval_dataloader(eval_dataset)
        finally:
            self.data_collator = before


mistaken = {"kind": Evaluating, "evaluated": _trainer.examples}
sound = {"evaluated": _trainer.examples}
