"""Outputs beside logits: the router loss of experts on rows with padding, and the poolers of text towers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from autopack.tiny.models import randomize
from tests.engine import (
    FLOAT64,
    IGNORED,
    IN_FLOAT32,
    LENGTHS,
    WHEN,
    Call,
    Calls,
    Property,
    Result,
    check,
    errors,
    ids,
    in_rows,
    must_be_exact,
    table,
)
from tests.subjects import build

ROUTED = ("qwen2_moe", "qwen3_moe", "mixtral", "olmoe", "granitemoe", "phimoe", "dbrx", "jamba", "minimax", "gpt_oss")
PADDING = 6


class Routed(Call):
    """Stock counts the real tokens of a padded batch, so its router loss is that of the documents."""

    behind = 0
    """Columns of padding behind the documents of a packed row."""

    def run(self, model: Any, arguments: dict[str, Any]) -> Any:
        if self.behind and self.is_row(arguments["input_ids"]):
            filled = {"input_ids": 0, "labels": IGNORED, "position_ids": 0}
            arguments = {n: nn.functional.pad(arguments[n], (0, self.behind), value=v) for n, v in filled.items()}
            arguments["attention_mask"] = nn.functional.pad(torch.ones_like(ids()), (0, self.behind))
        self.kept.append(model(**arguments, output_router_logits=True))
        return self.kept[-1]

    @property
    def kept(self) -> list[Any]:
        return vars(self).setdefault("_kept", [])

    def with_router_loss(self, result: Result) -> Result:
        result.documents.append(self.kept[-1].aux_loss.detach().reshape(1, 1))
        result.limits = IN_FLOAT32  # several types compute the router loss in float32
        return result

    def packed(self, model: Any) -> Result:
        return self.with_router_loss(super().packed(model))

    def padded(self, model: Any, side: str = "right") -> Result:
        return self.with_router_loss(super().padded(model, side))


class RoutedAndPadded(Routed):
    behind = PADDING


def routed(_: str, call: type[Routed], run: str) -> Calls:
    return ((getattr(call(), run), Routed().padded),)


RUNS = [(Routed, "packed"), (RoutedAndPadded, "packed"), (Routed, "padded")]


@table([
    Property("router losses count real tokens", [(t, *run) for t in ROUTED for run in RUNS], None, routed, WHEN,
             make=lambda model_type, *_: build(model_type, router_aux_loss_coef=0.5)),
])  # fmt: skip
def test_an_output(subject, case):
    subject.hold(*case)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("model_type", ["qwen2_moe", "mixtral", "dbrx"])
def test_the_reference_of_router_losses_counts_no_padding(model_type):
    """The control: more padding changes nothing in stock, and no mask changes the router loss."""
    model = build(model_type, router_aux_loss_coef=0.5)
    row = {"input_ids": nn.functional.pad(ids(), (0, PADDING)), "output_router_logits": True}
    real = nn.functional.pad(torch.ones_like(ids()), (0, PADDING))
    short = model(input_ids=ids(), attention_mask=torch.ones_like(ids()), output_router_logits=True).aux_loss
    assert abs(model(**row, attention_mask=real).aux_loss - short) < 1e-6
    assert abs(model(**row).aux_loss - short) > 1e-3


TOWERS = {
    "CLIPTextModel": "CLIPTextConfig",
    "CLIPTextModelWithProjection": "CLIPTextConfig",
    "SiglipTextModel": "SiglipTextConfig",
    "Siglip2TextModel": "Siglip2TextConfig",
    "XCLIPTextModel": "XCLIPTextConfig",
    "OwlViTTextModel": "OwlViTTextConfig",
    "Owlv2TextModel": "Owlv2TextConfig",
    "CLIPSegTextModel": "CLIPSegTextConfig",
    "ChineseCLIPTextModel": "ChineseCLIPTextConfig",
    "AltCLIPTextModel": "AltCLIPTextConfig",
    "BertModel": "BertConfig",
    "RobertaModel": "RobertaConfig",
    "XLMRobertaModel": "XLMRobertaConfig",
    "ElectraModel": "ElectraConfig",
    "AlbertModel": "AlbertConfig",
    "MPNetModel": "MPNetConfig",
}
EOS = 99


def tower(name: str) -> Any:
    """A tiny text tower whose pooler reads one token of every row."""
    small = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 100,
        "max_position_embeddings": 77,
    }
    config = getattr(transformers, TOWERS[name])(**small)
    for field, value in (("eos_token_id", EOS), ("pad_token_id", 0), ("bos_token_id", 1), ("embedding_size", 32)):
        if hasattr(config, field):
            setattr(config, field, value)
    for field in [field for field in vars(config) if "drop" in field]:
        setattr(config, field, 0.0)
    with torch.random.fork_rng():  # Siglip's biases begin with noise
        torch.manual_seed(0)
        model = getattr(transformers, name)(config).double().eval()
    randomize(model, 0)
    return model


def _rows(side: str) -> dict[str, torch.Tensor]:
    parts = [part.clone() for part in (ids() % 90 + 5)[0].split(LENGTHS)]
    for part in parts:
        part[-1] = EOS
    return {
        "input_ids": in_rows(parts, side),
        "attention_mask": in_rows([torch.ones_like(part) for part in parts], side),
    }


def pooled(model: Any, side: str = "right") -> Result:
    """The states of real tokens and what the pooler makes of each row."""
    given = _rows(side)
    output = model(**given)
    states = output.last_hidden_state
    results = [row[m.bool()] for row, m in zip(states, given["attention_mask"], strict=True)]
    pooler = output.get("pooler_output", output.get("text_embeds"))
    assert pooler is None or len(pooler) == len(LENGTHS), f"the pooler's output has the shape {tuple(pooler.shape)}"
    results += [] if pooler is None else list(pooler[:, None])
    weights = torch.randn(len(results), generator=torch.Generator().manual_seed(0))
    loss = sum((part.square().sum() * weight for part, weight in zip(results, weights, strict=True)), torch.zeros(()))
    return Result.of(model, results, loss, FLOAT64)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", TOWERS)
@pytest.mark.parametrize("mode", ["eval", "train"])
def test_poolers_of_text_towers_give_every_row_its_own(name, mode):
    def make() -> Any:
        return tower(name).train(mode == "train")

    must_be_exact(make, ((pooled, pooled),))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", TOWERS)
def test_the_reference_of_poolers_is_the_same_for_rows_alone(name):
    """The control: what stock gives a row of the batch is what it gives that row by itself, and rows differ."""
    model, given = tower(name), _rows("right")
    batch = pooled(model)
    alone = []
    for row, mask in zip(given["input_ids"], given["attention_mask"], strict=True):
        output = model(input_ids=row[None, : int(mask.sum())])
        pooler = output.get("pooler_output", output.get("text_embeds"))
        alone.append((output.last_hidden_state[0], pooler))
    found = Result(batch.documents[: len(LENGTHS)])
    check(found, Result([states for states, _ in alone]))
    if alone[0][1] is not None and "Siglip" not in name:  # Siglip reads the last column, padded or not
        expected = Result([pooler for _, pooler in alone])
        check(Result([part[None] if part.dim() == 1 else part for part in batch.documents[len(LENGTHS) :]]), expected)
        shuffled = Result(expected.documents[1:] + expected.documents[:1])
        assert errors(shuffled, expected)["states"] > 1e-2
