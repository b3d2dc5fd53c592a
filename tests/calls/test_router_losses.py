"""The loss that balances experts: over the tokens of the documents, as in the padded batch, whatever padding a row has.

The reference is the stock padded batch with its mask: the loss is no mean over documents. In float32, two orders of
sums differ by about 1e-7 of it; padding that counts changes it by more than 1e-3.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import autopack
from autopack import tiny
from autopack.registry import first_position
from tests.encoder_decoder.pairs import Pairs
from tests.support.padded import model_gradient_error, tally_of
from tests.support.refusals import refused

pytestmark = pytest.mark.usefixtures("nothing_left_behind")
TYPES = [
    "dbrx", "ernie4_5_moe", "flex_olmo", "gpt_oss", "granitemoe", "jamba", "jetmoe", "laguna", "mellum", "minimax",
    "minimax_m2", "mixtral", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe", "qwen3_5_moe_text",
]  # fmt: skip
LENGTHS = (12, 5, 9, 7)
LOSS, COUNTED, GRADIENT = 2e-6, 1e-3, 1e-3
DOCUMENTS = [torch.randint(8, 100, (n,), generator=torch.Generator().manual_seed(i)) for i, n in enumerate(LENGTHS)]
NUMBER = torch.repeat_interleave(torch.arange(1, 5), torch.tensor(LENGTHS))[None]
ROW, WHERE = torch.cat(DOCUMENTS)[None], torch.cat([torch.arange(n) for n in LENGTHS])[None]


def padded() -> dict[str, torch.Tensor]:
    ids = torch.nn.utils.rnn.pad_sequence(DOCUMENTS, batch_first=True)
    mask = (torch.arange(ids.shape[1]) < torch.tensor(LENGTHS)[:, None]).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def wider(tensor: torch.Tensor, value: int = 0) -> torch.Tensor:
    return torch.nn.functional.pad(tensor, (0, 6), value=value)


def two_rows() -> dict[str, torch.Tensor]:
    ids, number = (
        wider(torch.nn.utils.rnn.pad_sequence(each[0].split([sum(LENGTHS[:2]), sum(LENGTHS[2:])]), batch_first=True))
        for each in (ROW, NUMBER)
    )
    return {"input_ids": ids, "attention_mask": number, "labels": ids.masked_fill(number == 0, -100)}


def build(model_type: str, task: str = "causal-lm") -> Any:
    model = tiny.build(model_type, task=task).train()
    for config in (model.config, model.config.get_text_config()):
        config.output_router_logits = True
    for module in model.modules():
        if hasattr(module, "router_aux_loss_coef"):
            module.router_aux_loss_coef = 0.5  # so that it shows in the loss and in gradients
    return model


def calls(base: int = 0) -> dict[str, dict[str, torch.Tensor]]:
    ones = torch.ones_like(ROW)
    return {
        "padded": padded(),
        "packed": {"input_ids": ROW, "position_ids": WHERE + base, "labels": ROW},
        "segments with padding": {
            "input_ids": wider(ROW), "attention_mask": wider(NUMBER), "labels": wider(ROW, -100)
        },
        "positions with padding": {
            "input_ids": wider(ROW), "attention_mask": wider(ones), "position_ids": wider(WHERE + base),
            "labels": wider(ROW, -100),
        },
        "two rows with padding": two_rows(),
    }  # fmt: skip


def run(model: Any, call: dict[str, torch.Tensor]) -> Any:
    torch.manual_seed(0)
    return model(**call)


def difference(found: Any, expected: Any, name: str) -> float:
    one, other = found[name].item(), expected[name].item()
    return abs(one - other) / abs(other)


@pytest.mark.parametrize("model_type", TYPES)
def test_padding_is_not_counted(model_type):
    stock = build(model_type)
    model, expected = copy.deepcopy(stock), run(stock, padded())
    unmasked = run(stock, {"input_ids": wider(ROW), "labels": wider(ROW, -100), "use_cache": False})
    assert difference(unmasked, expected, "aux_loss") > COUNTED  # without a mask, padding is counted
    with autopack.enable(model, verify=False):
        for name, call in calls(first_position(model.config)).items():
            found = run(model, call)
            assert difference(found, expected, "aux_loss") <= LOSS, name
            assert difference(found, expected, "loss") <= LOSS, name
        assert tally_of(model).batches == 1


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


@pytest.mark.parametrize("model_type", ["qwen3_vl_moe", "glm4v_moe", "ernie4_5_vl_moe"])
def test_models_of_images_keep_the_mask_at_their_top(model_type):
    stock = build(model_type, task="image-text-to-text")
    model, expected = copy.deepcopy(stock), run(stock, padded())
    with autopack.enable(model, verify=False):
        for name in ("padded", "segments with padding", "two rows with padding"):
            found = run(model, calls()[name])
            assert difference(found, expected, "aux_loss") <= LOSS, name
            assert difference(found, expected, "loss") <= LOSS, name


@pytest.mark.parametrize("model_type", ["qwen2_moe", "mixtral", "olmoe"])
def test_thin_subclasses(model_type):
    stock = build(model_type)
    model, expected = copy.deepcopy(stock), run(stock, padded())

    class Chat(type(model)):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    model.__class__ = Chat
    with autopack.enable(model, verify=False):
        for name in ("padded", "packed", "segments with padding"):
            assert difference(run(model, calls()[name]), expected, "loss") <= LOSS, name


def test_documents_run_alone_are_refused():
    model = build("deepseek_v4")
    with autopack.enable(model, verify=False):
        with refused("output-asked"):
            model(**calls()["packed"])
        model(**calls()["packed"], output_router_logits=False)


def test_pairs_keep_their_padding_and_refuse_packed_rows():
    """Switch Transformers' losses of routers have no mask, so that the padded batch counts padding."""
    stock = tiny.build("switch_transformers", task="seq2seq").train()
    model, pairs = copy.deepcopy(stock), Pairs.draw()
    with autopack.enable(model, verify=False):
        found, expected = (run(m, {**pairs.padded(), "output_router_logits": True}) for m in (model, stock))
        for name in ("loss", "encoder_aux_loss", "decoder_aux_loss", "encoder_z_loss", "decoder_z_loss"):
            assert difference(found, expected, name) <= LOSS
        with refused("output-asked"):
            model(**pairs.one_row(), output_router_logits=True)
        model(**pairs.one_row())
