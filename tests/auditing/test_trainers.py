"""`autopack.audit(trainer)` finds mistakes of data and losses unaided, gives no alarm without one,
changes nothing."""

import copy
import math
import random
import tempfile

import datasets
import pytest
import torch
from transformers import LlamaForSequenceClassification, set_seed

import autopack
from autopack import tiny
from autopack.inspection.randomness import state_of
from compat.museum import exhibit
from compat.museum.data import _trainer
from tests.packing.batches import tokenizer
from tests.steps import steps_of
from tests.support.dpo import preferences

FOUND = {
    "answers_of_others": ("handed: documents", "no example has"),
    "balance_over_padding": ("loss: of a step", "by an added loss"),
    "boundary_labels": ("handed: labels", "first tokens, which others predict"),
    "collator_of_the_training": ("evaluation: documents", "come as one with others"),
    "columns_of_packed_rows": ("handed: columns", "drops seq_lengths"),
    "cut_by_the_collator": ("handed: documents", "come cut"),
    "divided_twice": ("loss: of a step", "1/2 of what it should be"),
    "documents_alike": ("loss: of a step", "the mean of documents' means"),
    "end_as_padding": ("handed: labels", "token 2"),
    "filled_up_by_repeating": ("handed: documents", "1 come again"),
    "heads_that_drop_the_count": ("loss: of a step", "the sum of micro-batches' means"),
    "labels_never_shifted": ("loss: of a step", "shifted by 0"),
    "labels_shifted_already": ("handed: labels", "they differ"),
    "long_ones_left_out": ("handed: documents", "never come"),
    "long_ones_masked": ("handed: labels", "none counts"),
    "means_of_means": ("loss: of a step", "the mean of micro-batches' means"),
    "padding_in_the_mean": ("loss: of a step", "a mean over all columns"),
    "padding_is_a_target": ("handed: labels", "at padding"),
    "positions_go_on": ("handed: documents", "come as one with others"),
    "positions_of_padding": ("loss: of a step", "change one another"),
    "resumed_by_chance": ("handed: after resuming", "come again"),
    "wrapped_rows": ("given: documents", "several documents"),
}
"""What is said of each exhibit of data and losses, and by which measure."""


def audited(make):
    set_seed(0)
    return autopack.audit(make())


def test_every_exhibit_of_data_is_here():
    assert {f"data.{name}" for name in FOUND} == {
        name for name in exhibit.names() if name.startswith("data.")
    }


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", FOUND)
def test_a_mistake_is_found_and_named_and_its_sound_twin_is_exact(name):
    shown = exhibit.load(f"data.{name}")
    sound, mistaken = audited(shown.sound), audited(shown.mistaken)
    assert sound.exact, sound
    assert not mistaken.exact
    measure, words = FOUND[name]
    said = {f"{row.measure}: {row.part}": row.says for row in mistaken.rows}
    assert all(row.wrong is not None for row in mistaken.rows), mistaken
    assert any(words in each for each in said[measure]), mistaken


def of_trl(kind, columns, net=None, **settings):
    """Return a trainer of TRL on texts, which are in both of its `columns` where it has two."""
    trl = pytest.importorskip("trl")
    draw, words = random.Random(0), [f"w{number}" for number in range(60)]
    texts = [" ".join(draw.choices(words, k=draw.randint(4, 20))) for _ in range(24)]
    data = datasets.Dataset.from_dict(dict(zip(columns, (texts, texts[::-1]), strict=False)))
    options = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "report_to": []}
    options |= {"use_cpu": True, "bf16": False, "disable_tqdm": True, **settings}
    args = getattr(trl, f"{kind}Config")(tempfile.mkdtemp(), **options)
    given = {"train_dataset": data, "eval_dataset": data, "processing_class": tokenizer()}
    return getattr(trl, f"{kind}Trainer")(net or _trainer.model(), args=args, **given)


def sft(columns=("text",), **settings):
    return of_trl("SFT", columns, **settings)


def rewards():
    config = _trainer.model().config
    config.num_labels = 1
    return of_trl("Reward", ("chosen", "rejected"), LlamaForSequenceClassification(config))


def classes_of_tokens():
    data = _trainer.examples(labels=lambda row: [token % 3 for token in row])
    net = tiny.build("bert", task="token-classification", num_labels=3)
    return _trainer.trainer(data=data, net=net, gradient_accumulation_steps=1)


def packed_by_autopack():
    data = autopack.pack(_trainer.examples(), max_length=40)
    collator = autopack.PackingCollator()
    return _trainer.trainer(collator=collator, data=data, per_device_train_batch_size=1)


def enabled(made):
    autopack.enable(made)
    return made


SOUND = {
    "TRL": lambda: sft(),
    "TRL, answers": lambda: sft(("prompt", "completion")),
    "TRL, packed and enabled": lambda: enabled(sft(packing=True, max_length=64)),
    "rewards": rewards,
    "classes of tokens": classes_of_tokens,
    "pairs": lambda: preferences(tempfile.mkdtemp(), _trainer.model()),
    "packed and enabled": lambda: enabled(packed_by_autopack()),
    "padded and enabled": lambda: enabled(_trainer.trainer()),
    "padded on the left": lambda: steps_of.trainer("llama", steps_of.on_the_left),
    "classes": lambda: steps_of.trainer(
        "bert", steps_of.classes, task="sequence-classification", accumulate=1
    ),
    "encoder-decoder": lambda: steps_of.trainer("t5", steps_of.pairs, task="seq2seq", accumulate=1),
    "smoothed": lambda: _trainer.trainer(label_smoothing_factor=0.1),
    "last ones left out": lambda: _trainer.trainer(
        data=_trainer.examples().select(range(22)), dataloader_drop_last=True
    ),
    "stream": lambda: _trainer.trainer(data=_trainer.examples().to_iterable_dataset(), max_steps=4),
    "dropout": lambda: _trainer.trainer(net=_trainer.model(attention_dropout=0.3)),
    "half precision": lambda: _trainer.trainer(net=_trainer.model().bfloat16()),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", SOUND)
def test_sound_trainers_raise_no_alarm(name):
    report = audited(SOUND[name])
    assert report.exact, report


def test_rows_that_trl_wraps_are_found():
    report = audited(lambda: sft(packing=True, max_length=64, packing_strategy="wrapped"))
    (row,) = [row for row in report.rows if row.wrong]
    assert row[:2] == ("given", "documents")
    assert "packing_strategy='wrapped'" in row.says[0]


def test_a_trainer_is_left_as_it_was():
    def made():
        set_seed(0)
        return _trainer.trainer(logging_steps=1, num_train_epochs=2, evaluated=_trainer.examples())

    def losses(trainer):
        set_seed(1)
        trainer.train()
        return [each["loss"] for each in trainer.state.log_history if "loss" in each]

    wanted, trainer = losses(made()), made()
    trainer.model.lm_head.weight.grad = torch.ones_like(trainer.model.lm_head.weight)
    before = copy.copy(vars(trainer))
    states = state_of(trainer.model)
    assert autopack.audit(trainer).exact
    assert vars(trainer) == before
    assert bool((trainer.model.lm_head.weight.grad == 1).all())
    assert state_of(trainer.model) == states
    assert losses(trainer) == wanted


def test_what_cuts_steps_anew_is_measured_and_left_as_it_was():
    set_seed(0)
    trainer = _trainer.trainer()
    autopack.enable(trainer, max_tokens=40)
    cutter = trainer.training_step.__self__
    before = copy.copy(vars(cutter))
    assert autopack.audit(trainer).exact
    assert vars(cutter) == before
    cutter._factor_of = lambda part: 2.0  # the control: what it makes of a step is what is measured
    report = autopack.audit(trainer)
    assert [row.part for row in report.rows if row.wrong] == ["of a step"]
    del cutter._factor_of
    autopack.disable(trainer)


def test_what_cannot_be_measured_is_not_exact():
    def collate(features):
        raise RuntimeError("no batch today")

    report = audited(lambda: _trainer.trainer(collator=collate))
    unmeasured = [row.part for row in report.rows if row.wrong is None]
    assert unmeasured == ["documents", "labels", "after resuming", "of a step"]
    assert not report.exact
    assert math.isnan(report.worst)
    assert "RuntimeError: no batch today" in str(report)


def test_an_endless_stream_is_refused_and_the_trainer_keeps_it():
    class Endless(torch.utils.data.IterableDataset):
        def __iter__(self):
            while True:
                yield {"input_ids": [1, 5, 2]}

    trainer = _trainer.trainer(data=Endless(), max_steps=1)
    with pytest.raises(autopack.UnsupportedModel, match="found Endless"):
        autopack.audit(trainer)
    assert isinstance(trainer.train_dataset, Endless)


def test_a_long_data_set_is_sampled():
    rows = datasets.Dataset.from_dict({"input_ids": 30 * _trainer.documents()})
    report = audited(lambda: _trainer.trainer(data=rows))
    assert report.exact
    assert ("handed", "documents", "256 of 256", False, []) in report.rows
