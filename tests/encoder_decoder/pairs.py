"""Documents with a source and a target each, and what an encoder-decoder gives of them alone and together.

Tolerances: in float32 two orders of matrix products differ by about 1e-6 of the scale of the logits, and every leak
that these tests provoke moves them by more than 1e-2, so 1e-4 tells them apart. Gradients sum over tokens and layers:
1e-3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from packaging.version import Version

from autopack.inspection import releases

LOGITS, GRADIENTS, LOSS = 1e-4, 1e-3, 1e-5
SOURCES, TARGETS = (7, 12, 5, 9), (4, 6, 11, 3)
covered = pytest.mark.skipif(
    Version("5.23") > releases.VERSION, reason="encoder-decoders are covered from transformers 5.23"
)


@dataclass
class Pairs:
    """Documents with a source and a target each."""

    sources: list[torch.Tensor]
    targets: list[torch.Tensor]

    @classmethod
    def draw(cls, sources: tuple[int, ...] = SOURCES, targets: tuple[int, ...] = TARGETS, seed: int = 0) -> Pairs:
        generator = torch.Generator().manual_seed(seed)

        def tokens(lengths: tuple[int, ...]) -> list[torch.Tensor]:
            return [torch.randint(8, 100, (n,), generator=generator) for n in lengths]

        return cls(tokens(sources), tokens(targets))

    def one_row(self) -> dict[str, torch.Tensor]:
        """All documents in a row of each half, told by segment ids."""
        return {
            "input_ids": torch.cat(self.sources)[None],
            "attention_mask": segments(self.sources)[None],
            "labels": torch.cat(self.targets)[None],
            "decoder_attention_mask": segments(self.targets)[None],
        }

    def two_rows(self) -> dict[str, torch.Tensor]:
        """The first document in a row of its own, padded, the others in a second."""
        parts = Pairs(self.sources[:1], self.targets[:1]), Pairs(self.sources[1:], self.targets[1:])
        rows = [part.one_row() for part in parts]
        return {name: pad([row[name][0] for row in rows], -100 if name == "labels" else 0) for name in rows[0]}

    def padded(self) -> dict[str, torch.Tensor]:
        """One document per row, as collators for translation give them."""
        return {
            "input_ids": pad(self.sources, 0),
            "attention_mask": pad([torch.ones_like(s) for s in self.sources], 0),
            "labels": pad(self.targets, -100),
        }

    def of(self, form: str, logits: torch.Tensor) -> list[torch.Tensor]:
        """The logits of each document in the output of a call of one of these forms."""
        lengths = [len(target) for target in self.targets]
        if form == "padded":
            return [row[:n] for row, n in zip(logits, lengths, strict=True)]
        if form == "two_rows":
            return [logits[0, : lengths[0]], *logits[1, : sum(lengths[1:])].split(lengths[1:])]
        return list(logits[0].split(lengths))


def segments(documents: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([torch.full((len(d),), i + 1) for i, d in enumerate(documents)])


def pad(rows: list[torch.Tensor], value: int) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)


def named_gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


@dataclass
class Alone:
    """What every document gives by itself: logits, the loss over all targets, and its gradients."""

    logits: list[torch.Tensor]
    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]

    @classmethod
    def run(cls, model: Any, pairs: Pairs) -> Alone:
        outputs = [
            model(input_ids=source[None], labels=target[None], use_cache=False)
            for source, target in zip(pairs.sources, pairs.targets, strict=True)
        ]
        counts = [len(target) for target in pairs.targets]
        loss = sum(output.loss * count for output, count in zip(outputs, counts, strict=True)) / sum(counts)
        loss.backward()
        return cls([output.logits[0].detach() for output in outputs], loss.detach(), named_gradients(model))

    def error(self, logits: list[torch.Tensor]) -> float:
        """The worst difference of a logit, relative to the standard deviation of all."""
        scale = torch.cat([a.flatten() for a in self.logits]).std()
        return max(float((a - p).abs().max() / scale) for a, p in zip(self.logits, logits, strict=True))

    def check(self, pairs: Pairs, form: str, output: Any, model: Any) -> None:
        assert self.error(pairs.of(form, output.logits.detach())) <= LOGITS
        torch.testing.assert_close(output.loss.detach(), self.loss, rtol=LOSS, atol=LOSS)
        output.loss.backward()
        self.check_gradients(named_gradients(model))

    def check_gradients(self, found: dict[str, torch.Tensor]) -> None:
        # What a softmax or norm cancels is zero but for rounding: it is held to the largest gradient of all.
        largest = max(float(g.abs().max()) for g in self.gradients.values())
        for name, wanted in self.gradients.items():
            scale = max(float(wanted.abs().max()), 1e-3 * largest)
            assert float((found[name] - wanted).abs().max()) <= GRADIENTS * scale, name
