"""Documents with a source and a target each, and what an encoder-decoder gives of them alone and
together.

Tolerances: in float32 two orders of matrix products differ by about 1e-6 of the scale of the
logits, and every leak that these tests provoke moves them by more than 1e-2, so 1e-4 tells them
apart. Gradients sum over tokens and layers: 1e-3."""

from dataclasses import dataclass, replace

import pytest
import torch
from packaging.version import Version

from autopack import tiny
from autopack.architectures import encoder_decoders
from autopack.inspection import releases
from tests.engine import IGNORED, LEAK, Limits, Result, check, errors, mean_loss, numbered

LOGITS, GRADIENTS = 1e-4, 1e-3
LIMITS = Limits(LOGITS, gradients=GRADIENTS, least=1e-3)
SOURCES, TARGETS = (7, 12, 5, 9), (4, 6, 11, 3)
WHOLE_HALVES = sorted({*encoder_decoders.WHOLE_HALF.model_types, "prophetnet"})
"""Types of which one half runs on documents alone."""
covered = pytest.mark.skipif(
    Version("5.23") > releases.VERSION, reason="encoder-decoders are covered from transformers 5.23"
)


@dataclass
class Pairs:
    """Documents with a source and a target each; with the decoder's tokens beside them where calls
    have to give those.

    FSMT takes them so: the last label first.
    """

    sources: list[torch.Tensor]
    targets: list[torch.Tensor]
    gives_starts: bool = False

    @classmethod
    def draw(cls, sources=SOURCES, targets=TARGETS, seed=0):
        generator = torch.Generator().manual_seed(seed)

        def tokens(lengths):
            return [torch.randint(8, 100, (n,), generator=generator) for n in lengths]

        return cls(tokens(sources), tokens(targets))

    @classmethod
    def for_model(cls, model):
        return replace(cls.draw(), gives_starts=model.config.model_type == "fsmt")

    def starts(self):
        return [target.roll(1) for target in self.targets]

    def each(self):
        """The call of each document by itself."""
        for source, target, start in zip(self.sources, self.targets, self.starts(), strict=True):
            own = {"decoder_input_ids": start[None]} if self.gives_starts else {}
            yield {"input_ids": source[None], "labels": target[None], **own}

    def undeclared(self):
        """All documents in a row of each half, of which nothing is said."""
        calls = [*self.each()]
        return {name: torch.cat([call[name] for call in calls], dim=1) for name in calls[0]}

    def one_row(self):
        """The same, told by segment ids."""
        masks = {"attention_mask": self.sources, "decoder_attention_mask": self.targets}
        return self.undeclared() | {
            name: numbered([*map(len, half)]) for name, half in masks.items()
        }

    def two_rows(self):
        """The first document in a row of its own, padded, the others in a second."""
        cuts = (slice(1), slice(1, None))
        rows = [
            replace(self, sources=self.sources[cut], targets=self.targets[cut]).one_row()
            for cut in cuts
        ]
        return _padded(rows)

    def padded(self):
        """One document per row, as collators for translation give them."""
        masks = {"attention_mask": pad([torch.ones_like(s) for s in self.sources], 0)}
        return _padded([*self.each()]) | masks

    def of(self, form, logits):
        """The logits of each document in the output of a call of one of these forms."""
        lengths = [len(target) for target in self.targets]
        if form == "padded":
            return [row[:n] for row, n in zip(logits, lengths, strict=True)]
        if form == "two_rows":
            return [logits[0, : lengths[0]], *logits[1, : sum(lengths[1:])].split(lengths[1:])]
        return list(logits[0].split(lengths))


def _padded(rows):
    fillers = {"labels": IGNORED, "decoder_input_ids": 1}
    return {name: pad([row[name][0] for row in rows], fillers.get(name, 0)) for name in rows[0]}


def pad(rows, value):
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)


def build(model_type, **options):
    return tiny.build(model_type, task="seq2seq", **options)


def forms_of(model_type):
    """The forms in which a type gives what documents give alone.

    ProphetNet's streams of n-grams change with the number of columns, and NLLB-MoE's documents
    share places of experts: their padded batches are left as they came."""
    return (
        ("one_row", "two_rows")
        if model_type in ("prophetnet", "nllb-moe")
        else ("one_row", "two_rows", "padded")
    )


def of_outputs(model, outputs, pairs):
    """What documents give by themselves, put together: logits, the loss over all targets, and its
    gradients."""
    loss = mean_loss([output.loss for output in outputs], [len(target) for target in pairs.targets])
    return Result.of(model, [output.logits[0] for output in outputs], loss, LIMITS)


def alone(model, pairs, **options):
    """What every document gives by itself."""
    options = options or ({} if pairs.gives_starts else {"use_cache": False})
    return of_outputs(model, [model(**call, **options) for call in pairs.each()], pairs)


def result(model, pairs, form, output):
    return Result.of(model, pairs.of(form, output.logits), output.loss, LIMITS)


def hold(model, pairs, expected, *forms, **given):
    """Want what documents give alone of calls in these forms."""
    for form in forms:
        check(
            result(model, pairs, form, model(**{**getattr(pairs, form)(), **given})), expected, form
        )


def worst(found, expected):
    """The largest error of logits or states of documents."""
    return errors(Result([*found]), Result([*expected]))["states"]


def leaks(model, pairs, expected, row):
    """The negative control: whether this row mixes documents."""
    return worst(pairs.of("one_row", model(**row).logits), expected.documents) > LEAK
