"""Declarations that appear behind the outermost entry, or that a hook of the user's changes on the
way.

Hooks that a user adds before `enable` run before autopack's, those added later run after it: both
are everyday."""

import pytest
import torch

from tests.engine import IGNORED, LENGTHS, WHEN, Call, Result, counted, ids, numbered
from tests.subjects import ATTENDING, alternating, build, crossed, subclass
from tests.unfamiliar.properties import Property, table

HOOKED = [("before", False), ("after", True), ("after", False), ("before", True), ("after", True)]
"""When a hook is added, and whether to the backbone or to the whole."""
CALL, WITHOUT_LABELS = Call(), Call(labels=None)
SILENT = ((CALL.undeclared, CALL.alone),)
"""Calls that declare nothing by themselves."""


def is_row(tokens):
    """Whether a call is one of the packed row, and not of a document alone or of a padded batch."""
    return isinstance(tokens, torch.Tensor) and tokens.shape[:2] == ids().shape


def _adds(**added):
    def hook(module, args, kwargs):
        tokens = kwargs.get("input_ids", args[0] if args else kwargs.get("inputs_embeds"))
        return (args, {**kwargs, **added}) if is_row(tokens) else None

    return hook


def hook_on(model, hook, inner):
    """Add a hook of the user's to the model, or to its backbone."""
    # OPT's head calls the decoder of its base model, and never that model.
    module = getattr(model.base_model, "decoder", model.base_model) if inner else model
    module.register_forward_pre_hook(hook, with_kwargs=True)


adds_positions = _adds(position_ids=counted())
adds_positions_and_no_cache = _adds(position_ids=counted(), use_cache=False)
adds_segments = _adds(attention_mask=numbered())
OTHER = (3, 6, 7)
declares_others = _adds(position_ids=counted(OTHER))


def by_other_lengths(model):
    """What the documents that the hook declares get alone, in the form of those that the call
    declares."""
    states = torch.cat([model(input_ids=part).logits[0] for part in ids().split(OTHER, 1)])
    return Result(list(states.split(LENGTHS)))


def changes_labels(module, args, kwargs):
    """A pre-hook that leaves some labels out, and puts one where there was none."""
    labels = kwargs["labels"].clone()
    labels[labels % 3 == 0] = -100
    return args, {**kwargs, "labels": labels}


class FewerLabels(Call):
    """Counts what the hook leaves."""

    def labelled(self, tokens):
        return {"labels": tokens.where(tokens % 3 != 0, IGNORED)}


def masks_the_inside(self, input_ids=None, attention_mask=None, **kwargs):
    """An unpadded batch whose backbone is given another mask: a token in the middle is hidden."""
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask.clone()
    mask[:, 1] = 0
    states = self.base_model(input_ids=input_ids, attention_mask=mask).last_hidden_state
    output = super(type(self), self).forward(
        input_ids=input_ids, attention_mask=attention_mask, **kwargs
    )
    output.logits = output.logits + self.get_output_embeddings()(states)
    return output


def pools_inside(self, input_ids=None, attention_mask=None, **kwargs):
    """A pooling head: the mean over the real tokens of each row is added to each of them."""
    output = super(type(self), self).forward(
        input_ids=input_ids, attention_mask=attention_mask, **kwargs
    )
    mask = torch.ones_like(input_ids) if attention_mask is None else (attention_mask > 0).long()
    mean = (output.logits * mask[..., None]).sum(1, keepdim=True) / mask.sum(1)[:, None, None]
    output.logits = output.logits + mean
    return output


INSIDE = (masks_the_inside, pools_inside)


def does_more(model, forward):
    subclass(model, forward)


def on_the_whole(types, hook):
    return [(t, hook, False, when) for t, when in crossed(types, WHEN, 1)]


def anywhere(types, hook, each):
    """On the whole and on its backbone, before and after it is enabled."""
    return [(t, hook, inner, when) for t, (when, inner) in crossed(types, HOOKED[:4], each)]


MORE = [*ATTENDING, "bloom", "mamba"]
POSITIONS = alternating(crossed(ATTENDING, [adds_positions, adds_positions_and_no_cache]), HOOKED)


@table([
    Property("a pre-hook that adds positions", [(t, hook, inner, when) for t, hook, (when, inner) in POSITIONS],
             hook_on, SILENT),
    Property("a pre-hook of the backbone", [("llama", adds_positions, True, "after")], hook_on, SILENT, WHEN),
    Property("a pre-hook that adds segments",
             anywhere(["llama", "gpt2", "opt", "bloom", "mamba"], adds_segments, 2), hook_on, SILENT, usual=2),
    # The code that runs is told of other documents than the call: theirs is the result, or none.
    Property("a pre-hook that declares other documents", anywhere(ATTENDING, declares_others, 2), hook_on,
             ((WITHOUT_LABELS.packed, by_other_lengths),), usual=1),
    Property("a pre-hook that changes labels", on_the_whole([*MORE, "falcon"], changes_labels), hook_on,
             FewerLabels().both, usual=2),
    Property("a forward that does more inside", alternating(crossed(MORE, INSIDE), WHEN), does_more,
             usual=6),
])  # fmt: skip
def test_what_is_done_inside(subject, case):
    subject.hold(*case)


@pytest.mark.parametrize("forward", INSIDE)
@pytest.mark.parametrize("model_type", ["llama", "gpt2", "bloom"])
def test_what_is_done_inside_changes_the_result(model_type, forward):
    """The control: each of these forwards gives something else than the stock one."""
    model, plain = build(model_type), CALL.padded(build(model_type))
    does_more(model, forward)
    found = CALL.padded(model)
    pairs = zip(found.documents, plain.documents, strict=True)
    moved = max(float((f - p).abs().max()) for f, p in pairs)
    assert moved > 1e-3 or abs(found.loss - plain.loss) > 1e-3
