"""A window that a mask switches off.

windows and chunks: axolotl#2449

A sliding window held only in calls without an attention mask. Packed batches that brought one
attended over whole documents.
"""

from compat.museum.models._plain import Plain


class KeepsWindow(Plain):
    def mask(self, call):
        return super().mask(call).triu(-3)


class LosesWindow(KeepsWindow):
    def mask(self, call):
        return super().mask(call) if call.attention_mask is None else Plain.mask(self, call)


mistaken = LosesWindow
sound = KeepsWindow
