"""Code of transformers that the user patches for all models of a type: classes, functions of
modules, attention.

Every patch is made before a model is enabled, after it has been, or before it but after another
model of the type was: what was concluded from the code then no longer holds."""

import functools
import sys
from types import MethodType

import pytest
import torch
from torch import nn
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

import autopack
from tests.engine import Call, check, must_be_exact
from tests.subjects import ATTENDING, DECODERS, alternating, build, crossed
from tests.support.refusals import refused
from tests.unfamiliar.parts import (
    as_they_are,
    attended,
    averaged,
    changed,
    get,
    place,
    shifted,
)
from tests.unfamiliar.properties import STALE, Property, table

CALL = Call()


def wrapper(change, forward):
    """A forward that changes the states that another one gives; it tells nothing of that other
    one."""

    def inner(self, *args, **kwargs):
        return changed(change, forward(self, *args, **kwargs))

    return inner


def class_of(model_type, where):
    """The class of a part of the models of a type."""
    return type(get(*place(build(model_type), where)))


def of_class(patching, model_type, where, change, wraps):
    """Patch the class of a part of the models of a type."""
    cls = class_of(model_type, where)
    if cls.__module__.startswith("torch."):
        cls = class_of(model_type, "layer")  # torch's own classes are everybody's
    forward = wrapper(change, cls.forward)
    patching.setattr(cls, "forward", functools.wraps(cls.forward)(forward) if wraps else forward)


def of_whole(patching, model_type):
    """A wrapper around the forward of the whole class, without `functools.wraps`: a profiler, or a
    logger."""
    cls = type(build(model_type))
    forward = cls.forward

    def logged(self, *args, **kwargs):
        return forward(self, *args, **kwargs)

    patching.setattr(cls, "forward", logged)


def as_stock_names_it(model_type):
    """Thin code that users have every day; positions are declared as stock names them."""
    return Call(
        form="segments" if model_type in ("bloom", "mamba", "mamba2", "mpt") else "position_ids"
    ).both


def of_module(patching, model_type, name):
    """Patch a name of the module in which the mixer's class is defined."""
    attribute, replacement, _ = FUNCTIONS[name]
    module = sys.modules[class_of(model_type, "mixer").__module__]
    patching.setattr(module, attribute, replacement(getattr(module, attribute)))


def rotates_by_columns(rotate):
    """Positions of the columns, whatever the call brings."""

    def apply(q, k, cos, sin, *args, **kwargs):
        exponents = torch.linspace(0, 1, cos.shape[-1] // 2, dtype=torch.float64)
        angles = torch.arange(q.shape[2])[:, None] / 100**exponents
        angles = torch.cat([angles, angles], -1)[None].to(cos.dtype)
        return rotate(q, k, angles.cos(), angles.sin(), *args, **kwargs)

    return apply


def without_mask(attend):
    """Causal, and nothing else: the mask is taken for that of padding."""

    def forward(module, query, key, value, attention_mask, **kwargs):
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        found = nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=query.shape[2] > 1
        )
        return found.transpose(1, 2).contiguous(), None

    return forward


def repeats(repeat):
    return lambda states, n_rep: states.repeat_interleave(n_rep, 1)


FUNCTIONS = {
    "rotates by columns": ("apply_rotary_pos_emb", rotates_by_columns, "sdpa"),
    "attends without mask": ("eager_attention_forward", without_mask, "eager"),
    "repeats heads": ("repeat_kv", repeats, "eager"),
}
ROTARY = ("llama", "gemma3_text", "qwen2_moe", "phi", "olmo2", "starcoder2", "stablelm")


def mine(module, query, key, value, attention_mask, **kwargs):
    """An attention function of the user's that reads its mask as SDPA does."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    causal = attention_mask is None and query.shape[2] > 1
    scale = kwargs.get("scaling")
    found = nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, is_causal=causal, scale=scale
    )
    return found.transpose(1, 2).contiguous(), None


def careless(module, query, key, value, attention_mask, **kwargs):
    return without_mask(None)(module, query, key, value, attention_mask)


NAMED = alternating(crossed(ATTENDING, [mine, careless]), [True, True, False])


def by_a_name(patching, model_type, function, masks):
    """A careless one ignores padding in stock, too: its padded batch is what stock gives, right or
    wrong."""
    patching.setitem(AttentionInterface._global_mapping, "mine", function)
    if masks:
        patching.setitem(AttentionMaskInterface._global_mapping, "mine", sdpa_mask)


def of_that_name(model, *_):
    model.set_attn_implementation("mine")


def over_sdpa(patching, model_type, function):
    patching.setitem(AttentionInterface._global_mapping, "sdpa", function)


MIXERS = alternating(crossed(DECODERS, [shifted, averaged, attended]), STALE)
OTHER_PARTS = alternating(crossed(DECODERS, ["feed-forward", "norm", "layer"]), STALE)
SAME = alternating(crossed(DECODERS, [True, False], 1), STALE)
MODULES = [(t, name, when) for name, t in crossed(list(FUNCTIONS), ROTARY) for when in STALE]


@table([
    Property("the class of the mixer mixes more tokens", [(t, "mixer", c, w == "stale", w) for t, c, w in MIXERS],
             patch=of_class, usual=2),
    Property("the class of another part mixes tokens",
             [(t, where, shifted, w == "before", w) for t, where, w in OTHER_PARTS], patch=of_class),
    Property("the class of the mixer is wrapped and does the same",
             [(t, "mixer", as_they_are, wraps, w) for t, wraps, w in SAME], patch=of_class, usual=1),
    Property("the class of the whole is wrapped", crossed(DECODERS, STALE), None, as_stock_names_it, ("before",),
             patch=of_whole),
    Property("a function of the module is replaced", MODULES, patch=of_module,
             make=lambda model_type, name: build(model_type, attn_implementation=FUNCTIONS[name][2])),
    Property("an attention function over sdpa", alternating(crossed(ATTENDING, [careless, mine]), STALE),
             patch=over_sdpa),
    Property("an attention function under a name of its own",
             alternating(NAMED, ["before", "after", "after", "before"]), of_that_name, patch=by_a_name),
])  # fmt: skip
def test_patched_code(subject, case):
    subject.hold(*case)


@pytest.mark.parametrize("model_type", ["mamba", "bloom"])
def test_a_patch_that_is_taken_back_after_all_models_left(model_type):
    """What it puts back is autopack's own forward of a mixer, which keeps documents apart beneath
    the next one."""
    model = build(model_type)
    handle = autopack.enable(model)
    *_, cls = (
        type(module)
        for module in model.modules()
        if hasattr(type(module).forward, "autopack_original")
    )
    ours = cls.forward
    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(cls, "forward", wrapper(as_they_are, ours))
        with refused("site-replaced"):
            handle.remove()
    assert cls.forward is ours, "control"
    must_be_exact(model_type, CALL.both)
    assert cls.forward is ours.autopack_original


def test_a_forward_with_the_attributes_of_autopacks_is_not_one():
    """`functools.wraps` copies them from the class, where autopack stands while another of its
    models is enabled."""
    model, other = build("llama"), build("llama")
    with autopack.enable(other):

        @functools.wraps(type(model).forward)
        def forward(self, input_ids=None, **kwargs):
            output = type(self).forward(self, input_ids=input_ids, **kwargs)
            output.logits = output.logits + output.logits.mean(dim=1, keepdim=True)
            return output

        assert hasattr(forward, "autopack_original"), "control"
        model.forward = MethodType(forward, model)
        with refused("not-exact"):
            autopack.enable(model)


def test_padding_is_left_out_beside_a_norm_that_a_package_puts_in_the_librarys_place(monkeypatch):
    """As Liger does; the model's own class names it where it makes its parts."""
    from transformers.models.llama import modeling_llama

    class Norm(modeling_llama.LlamaRMSNorm):
        def forward(self, states):
            return self.weight * nn.functional.normalize(states, dim=-1)

    monkeypatch.setattr(modeling_llama, "LlamaRMSNorm", Norm)
    model = build("llama")
    expected = CALL.alone(model)
    with autopack.enable(model) as handle:
        check(CALL.padded(model), expected)
        assert handle.tally.unpadded.calls


def test_a_loss_that_a_forward_makes_by_its_class_is_seen_to_be_replaced(monkeypatch):
    from transformers.models.bert import modeling_bert

    with autopack.enable(build("bert", "masked-lm")) as handle:
        assert handle.enabled.fingerprint.changed() is None
        other = type("Loss", (nn.CrossEntropyLoss,), {"forward": lambda self, *_: None})
        monkeypatch.setattr(modeling_bert, "CrossEntropyLoss", other)
        assert handle.enabled.fingerprint.changed()
