"""Which batches have what their rows begin with computed once, however the model is run."""

from functools import partial

import pytest
import torch
from torch._subclasses import FakeTensorMode

import autopack
from tests.engine import next_token_loss
from tests.support.padded import (
    FLOAT32,
    agree,
    build,
    logit_error,
    loss_error,
    packs_at_once,
    twins,
)
from tests.support.prefixes import group, padded, tree
from tests.support.trained import checkpointed, with_lora


def _scored(model, batch, **options):
    with torch.no_grad():
        return model(**batch, use_cache=False, **options)


def _shared(handle):
    return handle.tally.training.shared + handle.tally.evaluation.shared


def _dropping(model_type, **config):
    """GPT-2 has modules of dropout, where Llama has a number."""
    model = build(model_type, **config)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5
    return model


def _noisy():
    model = build("llama")
    model.get_input_embeddings().neftune_noise_alpha = 5.0
    return model


TREE = padded(tree(), labels=True)
NEVER = {
    "not asked for": (partial(build, "llama"), TREE, "share=False", {"share": False}),
    "too little": (
        partial(build, "llama"),
        padded(group(8, (30, 22, 41, 25)), labels=True),
        "",
        {},
    ),
    "dropout": (partial(build, "llama", attention_dropout=0.5), TREE, "", {}),
    "modules of dropout": (partial(_dropping, "gpt2", resid_pdrop=0.5), TREE, "", {}),
    "noise on embeddings": (_noisy, TREE, "", {}),
    "mamba": (
        partial(build, "mamba", attn_implementation="eager"),
        TREE,
        "hold nearly all of its weights",
        {},
    ),
    "llama4_text": (
        partial(build, "llama4_text", attn_implementation="eager"),
        TREE,
        "scaled by the columns",
        {},
    ),
    "bert": (partial(build, "bert", "masked LM", "eager"), TREE, "see later ones", {}),
}
RANDOM = {"dropout", "modules of dropout", "noise on embeddings"}


class TestWhen:
    @pytest.mark.parametrize("name", NEVER)
    def test_never(self, name):
        make, batch, why, options = NEVER[name]
        model = make().train()
        with autopack.enable(model, **options) as handle:
            model(**batch, **({} if name == "bert" else {"use_cache": False})).loss.backward()
            assert _shared(handle) == 0
            assert why in repr(handle)
            if name in RANDOM:
                _scored(model.eval(), batch)
                assert _shared(handle) > 0

    def test_rows_without_padding(self, pair):
        batch = padded(group(32, (6, 6, 6)))
        batches = [batch, {"input_ids": batch["input_ids"]}]
        for each in batches:
            with autopack.enable(pair[1]) as handle:
                expected, found = (_scored(model, each).logits for model in pair)
                assert torch.allclose(found, expected, atol=1e-5)
                assert _shared(handle) == 64
                assert not handle.tally.left

    def test_something_else_comes_with_the_tokens(self, pair):
        batch = padded(group())
        embeds = pair[1].get_input_embeddings()(batch["input_ids"]).detach()
        with autopack.enable(pair[1]) as handle:
            _scored(pair[1], {"inputs_embeds": embeds, "attention_mask": batch["attention_mask"]})
            assert _shared(handle) == 0
            positions = batch["attention_mask"].cumsum(1) - 1
            _scored(pair[1], {**batch, "position_ids": positions})
            assert _shared(handle) == 96
            positions[1] += 1
            _scored(pair[1], {**batch, "position_ids": positions})
            assert _shared(handle) == 96 + 64

    def test_masks_that_the_caller_has_prepared(self, pair):
        """Such a mask says more than where padding lies: here all tokens see each other."""
        batch = padded(group(32, (6, 6, 6)))
        everything = torch.zeros(3, 1, 38, 38)
        with autopack.enable(pair[1]) as handle:
            given = {"input_ids": batch["input_ids"], "attention_mask": everything}
            expected, found = (_scored(model, given).logits for model in pair)
            assert torch.equal(found, expected)
            assert _shared(handle) == 0

    def test_recorded_calls(self, pair):
        """What has no values, or would be recorded with them, is left as it came."""
        ids = padded(group(32, (6, 6, 6)))["input_ids"]
        with autopack.enable(pair[1]) as handle, torch.no_grad():
            with FakeTensorMode(allow_non_fake_inputs=True) as mode:
                assert pair[1](mode.from_tensor(ids), use_cache=False).logits.shape[:2] == ids.shape
            mapped = torch.func.vmap(lambda row: pair[1](row[None], use_cache=False).logits)(ids)
            assert mapped.shape[:3] == (3, 1, 38)
            assert _shared(handle) == 0

    def test_losses_of_routers_count_tokens(self):
        """Also where no twin is asked, which would give another loss."""
        stock, model = twins(build("mixtral", output_router_logits=True).eval())
        batch = padded(tree(), labels=True)
        with autopack.enable(model, verify=False) as handle:
            expected, found = (_scored(each, batch) for each in (stock, model))
            assert loss_error(found.loss, expected.loss) < FLOAT32
            assert loss_error(found.aux_loss, expected.aux_loss) < FLOAT32
            assert _shared(handle) == 0
            assert (
                "1 batch whose rows begin alike computed one by one: the losses of its routers"
                in repr(handle)
            )


class TestSaid:
    def test_in_words(self, pair):
        batch = padded(group())
        with autopack.enable(pair[1]) as handle:
            with torch.no_grad():
                said = str(handle.explain(**batch, use_cache=False))
            assert (
                "153 real tokens, 96 of them computed with those of another row, in 57 columns"
                in said
            )
            assert _shared(handle) == 0
            _scored(pair[1], batch)
            assert "96 tokens were computed with those of another row" in repr(handle)
            assert handle.tally.evaluation.fill == 1.0


def _with_lora(model):
    return with_lora(model, ["q_proj", "v_proj", "up_proj"], r=2)


def _with_a_loss_of_ones_own(model):
    model.loss_function = lambda logits, labels, vocab_size, **_: next_token_loss(
        logits, labels, label_smoothing=0.1
    )
    return model


CHANGES = {
    "checkpoints": (checkpointed, False),
    "reentrant checkpoints": (partial(checkpointed, reentrant=True), False),
    "LoRA": (_with_lora, False),
    "a loss of one's own": (_with_a_loss_of_ones_own, True),
}


class TestHowever:
    """Checkpointed, adapted, with a loss of one's own, lowered."""

    @pytest.mark.parametrize(("change", "labels"), CHANGES.values(), ids=[*CHANGES])
    def test_training(self, pair, change, labels):
        stock, model = map(change, pair)
        with packs_at_once(model) as handle:
            agree(model, stock, padded(tree(), labels=labels), use_cache=False)
            assert labels or _shared(handle) > 40

    def test_autocast(self, pair):
        with autopack.enable(pair[1]) as handle, torch.autocast("cpu", torch.bfloat16):
            expected, found = (
                _scored(model, batch := padded(tree())).logits.float() for model in pair
            )
            # bfloat16 keeps 8 bits
            assert logit_error(found, expected, batch["attention_mask"]) < 0.1
            assert _shared(handle) > 40
