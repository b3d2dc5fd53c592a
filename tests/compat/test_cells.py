"""Cells of the matrix are what the default call of `enable` gives, and say how it was proven and what is left out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

import autopack
from autopack import tiny
from compat import cells
from compat.words import SOURCES, cell_of, source_of, status_of, usual_source, word_of


def of_class(cls: type[LlamaForCausalLM]) -> LlamaForCausalLM:
    plain = tiny.build("llama")
    model = cls(plain.config)
    model.load_state_dict(plain.state_dict())
    return model


class Mixing(LlamaForCausalLM):
    """Adds to every token what stands before it in the row."""

    def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:  # type: ignore[override]
        embedded = self.model.embed_tokens(input_ids)
        return super().forward(inputs_embeds=embedded + embedded.roll(1, 1), **kwargs)


class Failing(LlamaForCausalLM):
    """Cannot run a single document."""

    def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:  # type: ignore[override]
        raise RuntimeError("it never ran")


class Deaf(LlamaForCausalLM):
    """Has a loss that reads no label."""

    def forward(self, input_ids: torch.Tensor, labels: Any = None, **kwargs: Any) -> Any:  # type: ignore[override]
        output = super().forward(input_ids, **kwargs)
        output.loss = None if labels is None else output.logits.sum() * 0 + 1
        return output


class TestMeasuring:
    def test_the_call_has_no_options(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """One call, `autopack.enable(model)`: what is recorded is what users get."""
        asked: list[tuple[Any, ...]] = []
        enable = autopack.enable

        def noted(*args: Any, **options: Any) -> Any:
            asked.append((len(args), options))
            return enable(*args, **options)

        monkeypatch.setattr(autopack, "enable", noted)
        assert cells.measured("causal-lm", "llama", "eager")["status"] == "exact"
        assert asked == [(1, {})]

    def test_an_exact_cell_says_how_it_was_proven(self) -> None:
        found = cells.enabled_and_audited(of_class(LlamaForCausalLM))
        assert found["status"] == "exact"
        assert source_of(found) in SOURCES
        assert source_of(found) != "unproven"
        assert not {"padded", "labels", "reason"} & found.keys()

    def test_what_mixes_tokens_is_refused_with_a_reason(self) -> None:
        found = cells.enabled_and_audited(of_class(Mixing))
        assert found["status"] == "refused"
        assert "of their standard deviation" in found["reason"]

    def test_what_stock_cannot_run_is_no_refusal(self) -> None:
        found = cells.enabled_and_audited(of_class(Failing))
        assert found == {"status": "upstream error", "reason": "RuntimeError: it never ran"}

    def test_padded_batches_that_are_left_are_seen(self) -> None:
        model = of_class(LlamaForCausalLM)
        model.model.layers[0].register_forward_hook(lambda module, args, output: None)
        found = cells.enabled_and_audited(model)
        assert found["status"] == "exact"
        assert "sees the padded form" in found["padded"]

    def test_labels_that_are_refused_are_seen(self) -> None:
        found = cells.enabled_and_audited(of_class(Deaf))
        assert found["status"] == "exact"
        assert "no labels were found" in found["labels"]


class TestWords:
    """A word says all of a cell but the sizes of errors and the time."""

    @pytest.mark.parametrize(
        ("cell", "word"),
        [
            ({"status": "exact", "proof": "recorded"}, "exact"),
            ({"status": "exact", "proof": "twin"}, "exact:twin"),
            ({"status": "exact", "proof": ""}, "exact:unproven"),
            ({"status": "exact", "proof": "recorded", "labels": "why"}, "exact labels="),
            ({"status": "exact", "proof": "audit", "padded": "so", "labels": "why"}, "exact:audit padded="),
            ({"status": "refused", "reason": "a law"}, "refused "),
            ({"status": "LEAK", "proof": "audit", "reason": "off by 2"}, "LEAK:audit "),
            ({"status": "upstream error", "reason": "stock raises"}, "upstream error "),
            ({"status": "absent"}, "-"),
        ],
    )
    def test_and_back(self, cell: dict[str, Any], word: str) -> None:
        reasons: dict[str, str] = {}
        found = word_of(cell, "recorded", reasons)
        assert found.startswith(word)
        assert cell_of(found, "recorded", reasons) == cell
        assert status_of(found) == cell["status"]

    def test_the_usual_source_is_that_of_most(self) -> None:
        proofs = ["audit", "audit", "recorded"]
        assert usual_source([{"status": "exact", "proof": each} for each in proofs]) == "audit"
        assert usual_source([{"status": "exact", "proof": each} for each in proofs[1:]]) == "recorded"

    def test_older_records_do_not_say(self) -> None:
        assert source_of(cell_of("exact", None, {})) is None

    def test_a_typing_error_is_no_word(self) -> None:
        with pytest.raises(ValueError, match=r"'exact!' is no word"):
            status_of("exact!")
