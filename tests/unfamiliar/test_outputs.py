"""Outputs beside logits: the router loss of experts on rows with padding, and the poolers of text towers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from autopack.tiny.models import randomize
from tests.unfamiliar.common import (
    IN_FLOAT32,
    LENGTHS,
    Result,
    Way,
    build,
    check,
    errors,
    gradients,
    ids,
    must_be_exact,
    spans,
)

pytestmark = pytest.mark.sampled(2)

ROUTED = ("qwen2_moe", "qwen3_moe", "mixtral", "olmoe", "granitemoe", "phimoe", "dbrx", "jamba", "minimax", "gpt_oss")
PADDING = 6


def padded(model: Any) -> Result:
    """Stock counts the real tokens of a padded batch, so its router loss is that of the documents."""
    return _with_router_loss(model, Way(given={"output_router_logits": True}), "padded")


def packed(model: Any) -> Result:
    return _with_router_loss(model, Way(given={"output_router_logits": True}), "packed")


class PackedAndPadded(Way):
    """The packed row with columns of padding behind the documents."""

    def _call(self, model: Any, arguments: dict[str, Any]) -> Any:
        if arguments["input_ids"].shape != ids().shape:
            return super()._call(model, arguments)
        behind = {"input_ids": 0, "labels": -100, "position_ids": 0}
        given = {name: nn.functional.pad(arguments[name], (0, PADDING), value=v) for name, v in behind.items()}
        mask = nn.functional.pad(torch.ones_like(ids()), (0, PADDING))
        return super()._call(model, {**given, "attention_mask": mask})


def packed_and_padded(model: Any) -> Result:
    return _with_router_loss(model, PackedAndPadded(given={"output_router_logits": True}), "packed")


def _with_router_loss(model: Any, way: Way, how: str) -> Result:
    kept: list[Any] = []

    class Keeping(type(way)):  # type: ignore[misc]
        def _call(self, model: Any, arguments: dict[str, Any]) -> Any:
            kept.append(super()._call(model, arguments))
            return kept[-1]

    result = getattr(Keeping(**{name: getattr(way, name) for name in way.__dataclass_fields__}), how)(model)
    result.documents.append(kept[-1].aux_loss.detach().reshape(1, 1))
    result.within = IN_FLOAT32  # several types compute the router loss in float32
    return result


@pytest.mark.parametrize("run", [packed, packed_and_padded, padded])
@pytest.mark.parametrize("model_type", ROUTED)
def test_router_losses_count_real_tokens(model_type, run):
    must_be_exact(lambda: build(model_type, router_aux_loss_coef=0.5), ((run, padded),))


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
    longest = max(LENGTHS)
    for part in parts:
        part[-1] = EOS
    missing = [(0, longest - len(p)) if side == "right" else (longest - len(p), 0) for p in parts]
    tokens = torch.stack([nn.functional.pad(p, m) for p, m in zip(parts, missing, strict=True)])
    real = [nn.functional.pad(torch.ones_like(p), m) for p, m in zip(parts, missing, strict=True)]
    return {"input_ids": tokens, "attention_mask": torch.stack(real)}


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
    loss.backward()
    return Result([part.detach() for part in results], loss.detach(), gradients(model))


@pytest.mark.parametrize("name", TOWERS)
@pytest.mark.parametrize("mode", ["eval", "train"])
def test_poolers_of_text_towers_give_every_row_its_own(name, mode):
    def make() -> Any:
        return tower(name).train(mode == "train")

    must_be_exact(make, ((pooled, pooled),))


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
    assert len(spans()) == len(LENGTHS)
