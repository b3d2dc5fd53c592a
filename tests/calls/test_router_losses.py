"""The loss that balances experts: over the tokens of the documents, as in the padded batch,
whatever padding a row has.

The reference is the stock padded batch with its mask: the loss is no mean over documents. In
float32, two orders of sums differ by about 1e-7 of it; padding that counts changes it by more than
1e-3."""

import copy
from functools import partial

import pytest
import torch

import autopack
from autopack import tiny
from autopack.registry import first_position
from tests.conftest import positions
from tests.encoder_decoder.pairs import Pairs
from tests.engine import in_rows, padded_batch
from tests.integration.documents import with_labels
from tests.support.padded import model_gradient_error, tally_of
from tests.support.refusals import refused

TYPES = [
    "dbrx", "ernie4_5_moe", "flex_olmo", "gpt_oss", "granitemoe", "jamba", "jetmoe", "laguna", "mellum", "minimax",
    "minimax_m2", "mixtral", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe", "qwen3_5_moe_text",
]  # fmt: skip
LENGTHS = (12, 5, 9, 7)
LOSS, COUNTED, GRADIENT = 2e-6, 1e-3, 1e-3
DOCUMENTS = [
    torch.randint(8, 100, (n,), generator=torch.Generator().manual_seed(i))
    for i, n in enumerate(LENGTHS)
]
NUMBERS = [torch.full((n,), i) for i, n in enumerate(LENGTHS, 1)]
ROW, NUMBER, WHERE = torch.cat(DOCUMENTS)[None], torch.cat(NUMBERS)[None], positions(LENGTHS)
ONES = torch.ones_like(ROW)


def wider(tensor, value=0):
    return torch.nn.functional.pad(tensor, (0, 6), value=value)


def padded():
    return with_labels(padded_batch(DOCUMENTS))


def declared(ids, mask):
    return with_labels({"input_ids": ids, "attention_mask": mask})


def build(model_type, task="causal-lm"):
    model = tiny.build(model_type, task=task).train()
    for config in (model.config, model.config.get_text_config()):
        config.output_router_logits = True
    for module in model.modules():
        if hasattr(module, "router_aux_loss_coef"):
            module.router_aux_loss_coef = 0.5  # so that it shows in the loss and in gradients
    return model


def calls(base=0):
    halves = [
        in_rows(each[0].split([sum(LENGTHS[:2]), sum(LENGTHS[2:])])) for each in (ROW, NUMBER)
    ]
    return {
        "padded": padded(),
        "segments with padding": declared(wider(ROW), wider(NUMBER)),
        "two rows with padding": declared(*map(wider, halves)),
        "packed": {"input_ids": ROW, "position_ids": WHERE + base, "labels": ROW},
        "positions with padding": {
            **declared(wider(ROW), wider(ONES)),
            "position_ids": wider(WHERE + base),
        },
    }


def run(model, call):
    torch.manual_seed(0)
    return model(**call)


def difference(found, expected, name):
    return abs(found[name].item() / expected[name].item() - 1)


CASES = {
    **{name: partial(build, name) for name in TYPES},
    # Models of images keep the mask at their top.
    **{
        name: partial(build, name, "image-text-to-text")
        for name in ("qwen3_vl_moe", "glm4v_moe", "ernie4_5_vl_moe")
    },
}


@pytest.mark.parametrize("name", CASES)
def test_padding_is_not_counted(name):
    stock = CASES[name]()
    model, expected = copy.deepcopy(stock), run(stock, padded())
    unmasked = run(stock, {"input_ids": wider(ROW), "labels": wider(ROW, -100), "use_cache": False})
    # without a mask, padding is counted
    assert difference(unmasked, expected, "aux_loss") > COUNTED
    told = calls(first_position(model.config))
    of_images = model.config is not model.config.get_text_config()
    with autopack.enable(model, verify=False):
        for way in [*told][:3] if of_images else told:
            found = run(model, told[way])
            assert difference(found, expected, "aux_loss") <= LOSS, way
            assert difference(found, expected, "loss") <= LOSS, way
        assert of_images or tally_of(model).batches == 1


@pytest.mark.parametrize("model_type", ["qwen2_moe", "olmoe", "mixtral", "dbrx"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_gradients_are_those_of_the_padded_batch(model_type, checkpointed):
    stock = build(model_type)
    if checkpointed:
        stock.gradient_checkpointing_enable({"use_reentrant": False})
    model = copy.deepcopy(stock)
    run(stock, padded()).loss.backward()
    with autopack.enable(model, verify=False):
        run(model, calls()["segments with padding"]).loss.backward()
    assert model_gradient_error(model, stock) <= GRADIENT


def test_documents_run_alone_are_refused():
    model = build("deepseek_v4")
    with autopack.enable(model, verify=False):
        with refused("output-asked"):
            model(**calls()["packed"])
        model(**calls()["packed"], output_router_logits=False)


def test_pairs_keep_their_padding_and_refuse_packed_rows():
    """Switch Transformers' losses of routers have no mask, so that the padded batch counts
    padding."""
    stock = tiny.build("switch_transformers", task="seq2seq").train()
    model, pairs = copy.deepcopy(stock), Pairs.draw()
    with autopack.enable(model, verify=False):
        found, expected = (
            run(m, {**pairs.padded(), "output_router_logits": True}) for m in (model, stock)
        )
        for name in (
            "loss",
            "encoder_aux_loss",
            "decoder_aux_loss",
            "encoder_z_loss",
            "decoder_z_loss",
        ):
            assert difference(found, expected, name) <= LOSS
        with refused("output-asked"):
            model(**pairs.one_row(), output_router_logits=True)
        model(**pairs.one_row())
