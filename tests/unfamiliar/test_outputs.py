"""Outputs beside logits: the router loss of experts on rows with padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.engine import (
    IGNORED,
    IN_FLOAT32,
    WHEN,
    Call,
    Calls,
    Property,
    Result,
    ids,
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
