"""Encoder-decoders: packed encoder rows, packed decoder rows, and cross-attention between the halves of a document.

Tolerances: in float32 two orders of matrix products differ by about 1e-6 of the scale of the logits, and every leak
that these tests provoke moves them by more than 1e-2, so 1e-4 tells them apart. Gradients sum over tokens and layers:
1e-3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

import autopack
from autopack import tiny
from autopack.errors import InvalidPacking, UnsupportedModel
from autopack.inspection import releases
from autopack.layout.packed import PackedLayout
from autopack.mixers import RELATIVE, MixerCall
from autopack.runtime.marks import holds_marks
from compat.standins import flash_standin, flex_standin, set_implementation

LOGITS, GRADIENTS, LOSS = 1e-4, 1e-3, 1e-5
SOURCES, TARGETS = (7, 12, 5, 9), (4, 6, 11, 3)

SERVED = [
    "bart", "blenderbot", "blenderbot-small", "encoder-decoder", "m2m_100", "marian", "mbart", "mt5", "mvp", "pegasus",
    "plbart", "seamless_m4t", "seamless_m4t_v2", "switch_transformers", "t5", "t5gemma", "umt5",
]  # fmt: skip
REFUSED = ["bigbird_pegasus", "fsmt", "led", "longt5", "nllb-moe", "pegasus_x", "prophetnet", "t5gemma2"]

pytestmark = pytest.mark.skipif(
    releases.VERSION < releases.MIXERS_COVERED_FROM, reason="encoder-decoders are covered from transformers 5.23"
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
            "attention_mask": _segments(self.sources)[None],
            "labels": torch.cat(self.targets)[None],
            "decoder_attention_mask": _segments(self.targets)[None],
        }

    def two_rows(self) -> dict[str, torch.Tensor]:
        """The first document in a row of its own, padded, the others in a second."""
        parts = Pairs(self.sources[:1], self.targets[:1]), Pairs(self.sources[1:], self.targets[1:])
        rows = [part.one_row() for part in parts]
        return {name: _pad([row[name][0] for row in rows], -100 if name == "labels" else 0) for name in rows[0]}

    def padded(self) -> dict[str, torch.Tensor]:
        """One document per row, as collators for translation give them."""
        return {
            "input_ids": _pad(self.sources, 0),
            "attention_mask": _pad([torch.ones_like(s) for s in self.sources], 0),
            "labels": _pad(self.targets, -100),
        }

    def of(self, form: str, logits: torch.Tensor) -> list[torch.Tensor]:
        """The logits of each document in the output of a call of one of these forms."""
        lengths = [len(target) for target in self.targets]
        if form == "padded":
            return [row[:n] for row, n in zip(logits, lengths, strict=True)]
        if form == "two_rows":
            return [logits[0, : lengths[0]], *logits[1, : sum(lengths[1:])].split(lengths[1:])]
        return list(logits[0].split(lengths))


def _segments(documents: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([torch.full((len(d),), i + 1) for i, d in enumerate(documents)])


def _pad(rows: list[torch.Tensor], value: int) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)


def _gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
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
        return cls([output.logits[0].detach() for output in outputs], loss.detach(), _gradients(model))

    def error(self, logits: list[torch.Tensor]) -> float:
        """The worst difference of a logit, relative to the standard deviation of all."""
        scale = torch.cat([a.flatten() for a in self.logits]).std()
        return max(float((a - p).abs().max() / scale) for a, p in zip(self.logits, logits, strict=True))

    def check(self, pairs: Pairs, form: str, output: Any, model: Any) -> None:
        assert self.error(pairs.of(form, output.logits.detach())) <= LOGITS
        torch.testing.assert_close(output.loss.detach(), self.loss, rtol=LOSS, atol=LOSS)
        output.loss.backward()
        self.check_gradients(_gradients(model))

    def check_gradients(self, found: dict[str, torch.Tensor]) -> None:
        # What a softmax or norm cancels is zero but for rounding: it is held to the largest gradient of all.
        largest = max(float(g.abs().max()) for g in self.gradients.values())
        for name, wanted in self.gradients.items():
            scale = max(float(wanted.abs().max()), 1e-3 * largest)
            assert float((found[name] - wanted).abs().max()) <= GRADIENTS * scale, name


@pytest.mark.parametrize("model_type", SERVED)
def test_every_form_gives_what_documents_give_alone(model_type):
    pairs, model = Pairs.draw(), tiny.build(model_type, task="seq2seq")
    alone = Alone.run(model, pairs)
    autopack.enable(model, verify="never")
    for form in ("one_row", "two_rows", "padded"):
        alone.check(pairs, form, model(**getattr(pairs, form)()), model)


@pytest.mark.parametrize("model_type", ["t5", "bart", "pegasus"])
def test_on_sdpa_in_training(model_type):
    pairs, model = Pairs.draw(), tiny.build(model_type, task="seq2seq", attn_implementation="sdpa").train()
    alone = Alone.run(model, pairs)
    autopack.enable(model, verify="never")
    for form in ("one_row", "padded"):
        alone.check(pairs, form, model(**getattr(pairs, form)()), model)


@pytest.mark.parametrize(
    ("model_type", "standin", "implementation"),
    [
        ("bart", flash_standin, "flash_attention_2"),
        ("bart", flex_standin, "flex_attention"),
        ("t5", flex_standin, "flex_attention"),
        ("umt5", flex_standin, "flex_attention"),
    ],
)
def test_on_kernels(model_type, standin, implementation):
    pairs = Pairs.draw()
    alone = Alone.run(tiny.build(model_type, task="seq2seq"), pairs)
    with standin():
        model = tiny.build(model_type, task="seq2seq")
        set_implementation(model, implementation)
        autopack.enable(model, verify="never")
        alone.check(pairs, "one_row", model(**pairs.one_row()), model)


@pytest.mark.parametrize("model_type", ["t5", "bart"])
def test_without_autopack_the_row_leaks(model_type):
    pairs, model = Pairs.draw(), tiny.build(model_type, task="seq2seq")
    alone = Alone.run(model, pairs)
    row = {name: value for name, value in pairs.one_row().items() if "mask" not in name}
    assert alone.error(pairs.of("one_row", model(**row).logits.detach())) > 100 * LOGITS


@pytest.mark.parametrize("model_type", ["t5", "bart", "switch_transformers"])
@pytest.mark.parametrize("half", ["input_ids", "labels"])
def test_a_document_moves_nothing_but_itself(model_type, half):
    pairs, model = Pairs.draw(), tiny.build(model_type, task="seq2seq")
    autopack.enable(model, verify="never")
    before = pairs.of("one_row", model(**pairs.one_row()).logits.detach())
    changed = pairs.one_row()
    documents = pairs.sources if half == "input_ids" else pairs.targets
    first = sum(len(d) for d in documents[:1])
    changed[half][0, first : first + len(documents[1])] += 1
    after = pairs.of("one_row", model(**changed).logits.detach())
    for number, (one, other) in enumerate(zip(before, after, strict=True)):
        if number == 1:
            assert not torch.equal(one, other)
        else:
            torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=6), st.integers(0, 2**16))
def test_documents_of_any_length(lengths, seed):
    pairs = Pairs.draw(tuple(s for s, _ in lengths), tuple(t for _, t in lengths), seed)
    model = tiny.build("t5", task="seq2seq")
    alone = Alone.run(model, pairs)
    with autopack.enable(model, verify="never"):
        output = model(**pairs.one_row())
        assert alone.error(pairs.of("one_row", output.logits.detach())) <= LOGITS
        output.loss.backward()
        alone.check_gradients(_gradients(model))


@pytest.mark.parametrize("model_type", ["t5", "bart"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_under_gradient_checkpointing(model_type, reentrant):
    pairs, model = Pairs.draw(), tiny.build(model_type, task="seq2seq").train()
    alone = Alone.run(model, pairs)
    autopack.enable(model, verify="never")
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    other = Pairs.draw(SOURCES[::-1], TARGETS[::-1], seed=1)
    output = model(**pairs.one_row())
    model(**other.one_row())  # a second layout between forward and backward
    alone.check(pairs, "one_row", output, model)


def test_documents_declared_by_positions_and_by_seq_idx():
    pairs, model = Pairs.draw(), tiny.build("t5", task="seq2seq")
    alone = Alone.run(model, pairs)
    autopack.enable(model, verify="never")
    row = {name: value for name, value in pairs.one_row().items() if "mask" not in name}
    positions = {
        "position_ids": torch.cat([torch.arange(len(s)) for s in pairs.sources])[None],
        "decoder_position_ids": torch.cat([torch.arange(len(t)) for t in pairs.targets])[None],
    }
    alone.check(pairs, "one_row", model(**row, **positions), model)
    numbers = {"seq_idx": _segments(pairs.sources)[None], "decoder_seq_idx": _segments(pairs.targets)[None]}
    alone.check(pairs, "one_row", model(**row, **numbers), model)


@pytest.mark.parametrize("model_type", ["t5", "mbart"])
def test_decoder_tokens_that_a_collator_made(model_type):
    pairs, model = Pairs.draw(), tiny.build(model_type, task="seq2seq")
    alone = Alone.run(model, pairs)
    handle = autopack.enable(model, verify="never")
    batch = pairs.padded()
    batch["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(batch["labels"])
    alone.check(pairs, "padded", model(**batch), model)
    assert "1 padded batch packed inside" in repr(handle)


def test_decoder_inputs_packed_by_hand_embeddings_and_encoder_states():
    pairs, model = Pairs.draw(), tiny.build("bart", task="seq2seq")
    alone = Alone.run(model, pairs)
    autopack.enable(model, verify="never")
    row = pairs.one_row()
    starts = [model.prepare_decoder_input_ids_from_labels(t[None])[0] for t in pairs.targets]
    row["decoder_input_ids"] = torch.cat(starts)[None]
    alone.check(pairs, "one_row", model(**row), model)

    embeddings = model.get_input_embeddings()
    embedded = {
        "inputs_embeds": embeddings(row["input_ids"]),
        "decoder_inputs_embeds": embeddings(row["decoder_input_ids"]),
    }
    rest = {name: value for name, value in row.items() if not name.endswith("input_ids")}
    alone.check(pairs, "one_row", model(**embedded, **rest), model)

    masks = {"attention_mask": row["attention_mask"]}
    states = model.get_encoder()(input_ids=row["input_ids"], **masks)
    rest = {name: value for name, value in row.items() if name != "input_ids"}
    alone.check(pairs, "one_row", model(encoder_outputs=states, **rest), model)


def test_outputs_have_the_shape_of_the_batch():
    pairs, model = Pairs.draw(), tiny.build("t5", task="seq2seq")
    autopack.enable(model, verify="never")
    batch = pairs.padded()
    output = model(**batch, output_hidden_states=True)
    rows, sources, targets = len(SOURCES), max(SOURCES), max(TARGETS)
    assert output.logits.shape[:2] == (rows, targets)
    assert output.encoder_last_hidden_state.shape[:2] == (rows, sources)
    assert {state.shape[:2] for state in output.decoder_hidden_states} == {(rows, targets)}
    assert {state.shape[:2] for state in output.encoder_hidden_states} == {(rows, sources)}
    assert not output.encoder_last_hidden_state[0, SOURCES[0] :].any()
    as_tuple = model(**batch, return_dict=False)
    assert isinstance(as_tuple, tuple)
    torch.testing.assert_close(as_tuple[1], output.logits)


def test_the_model_without_head_and_the_encoder_alone():
    pairs, model = Pairs.draw(), tiny.build("bart", task="seq2seq")
    autopack.enable(model, verify="never")
    row = pairs.one_row()
    states = model.get_encoder()(input_ids=row["input_ids"], attention_mask=row["attention_mask"]).last_hidden_state
    for source, packed in zip(pairs.sources, states[0].split(list(SOURCES)), strict=True):
        alone = model.get_encoder()(input_ids=source[None]).last_hidden_state[0]
        torch.testing.assert_close(packed, alone, rtol=0, atol=1e-4)
    decoded = model.model(
        input_ids=row["input_ids"],
        attention_mask=row["attention_mask"],
        decoder_input_ids=row["labels"],
        decoder_attention_mask=row["decoder_attention_mask"],
    ).last_hidden_state
    for source, target, packed in zip(pairs.sources, pairs.targets, decoded[0].split(list(TARGETS)), strict=True):
        alone = model.model(input_ids=source[None], decoder_input_ids=target[None]).last_hidden_state[0]
        torch.testing.assert_close(packed, alone, rtol=0, atol=1e-4)


def test_an_encoder_of_t5_is_an_encoder():
    config = tiny.config("t5", task="seq2seq")
    model = transformers.T5EncoderModel(config).eval()
    autopack.enable(model, verify="never")
    pairs = Pairs.draw()
    packed = model(input_ids=torch.cat(pairs.sources)[None], attention_mask=_segments(pairs.sources)[None])
    for source, states in zip(pairs.sources, packed.last_hidden_state[0].split(list(SOURCES)), strict=True):
        torch.testing.assert_close(states, model(input_ids=source[None]).last_hidden_state[0], rtol=0, atol=1e-4)


def test_the_bias_is_that_of_the_longest_document():
    """A bias of the row would be dense, 1000 times as large as that of its documents here."""
    model = tiny.build("t5", task="seq2seq")
    autopack.enable(model, verify="never")
    pairs, seen = Pairs.draw((16,) * 32, (16,) * 32), []
    attention = model.encoder.block[1].layer[0].SelfAttention
    attention.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs["position_bias"]), with_kwargs=True)
    model(**pairs.one_row())
    assert [bias.shape[-2:] for bias in seen] == [(16, 16)]


@pytest.mark.parametrize("model_type", ["t5", "bart"])
def test_compiled(model_type):
    model = tiny.build(model_type, task="seq2seq", attn_implementation="sdpa")
    autopack.enable(model, verify="never")
    compiled = torch.compile(model, backend="aot_eager", dynamic=True)
    for pairs in (Pairs.draw(), Pairs.draw(SOURCES[::-1], TARGETS[::-1], seed=1)):
        expected = model(**pairs.one_row()).logits
        torch.testing.assert_close(compiled(**pairs.one_row()).logits, expected, rtol=0, atol=1e-3)


def test_the_packing_collator_says_what_to_use():
    with pytest.raises(ValueError, match="Keep transformers.DataCollatorForSeq2Seq"):
        autopack.PackingCollator.for_model(tiny.build("t5", task="seq2seq"))


def test_a_bias_that_reaches_no_attention_of_ours_is_refused():
    """Of releases whose T5 computes attention by itself: there a bias of one token would broadcast over the row."""
    layout = PackedLayout.from_lengths([[1, 1, 1]])
    linear, tokens = torch.nn.Linear(4, 4), {"input": torch.zeros(1, 3, 4)}
    call = MixerCall(torch.nn.Linear.forward, linear, "input", tokens, layout, False)
    with pytest.raises(UnsupportedModel, match="does not attend through its attention interface"):
        RELATIVE.run(call)


def test_unpad_never_leaves_padded_batches_and_serves_packed_rows():
    pairs, model = Pairs.draw(), tiny.build("t5", task="seq2seq")
    alone = Alone.run(model, pairs)
    before = model(**pairs.padded()).loss
    handle = autopack.enable(model, unpad="never", verify="never")
    assert torch.equal(model(**pairs.padded()).loss, before)
    assert not handle.tally.left
    alone.check(pairs, "one_row", model(**pairs.one_row()), model)


def test_generation_is_left_as_it_is():
    pairs, model = Pairs.draw(), tiny.build("t5", task="seq2seq")
    model.generation_config.update(max_new_tokens=5, decoder_start_token_id=2, pad_token_id=0, eos_token_id=None)
    batch = {name: value for name, value in pairs.padded().items() if name != "labels"}
    before = model.generate(**batch)
    autopack.enable(model, verify="never")
    assert torch.equal(model.generate(**batch), before)


def test_a_head_that_reads_one_token_per_row_gets_the_padded_form():
    config = tiny.config("bart", task="sequence-classification", num_labels=3)
    model = transformers.BartForSequenceClassification(config).eval()
    rows = [torch.cat([s, torch.tensor([config.eos_token_id])]) for s in Pairs.draw().sources]
    batch = {
        "input_ids": _pad(rows, config.pad_token_id),
        "attention_mask": _pad([torch.ones_like(r) for r in rows], 0),
    }
    before = model(**batch, use_cache=False).logits
    autopack.enable(model, verify="never")
    torch.testing.assert_close(model(**batch, use_cache=False).logits, before, rtol=0, atol=1e-4)


@pytest.mark.parametrize("change", ["masked", "left"])
def test_padded_batches_of_other_forms(change):
    pairs, model = Pairs.draw(), tiny.build("t5", task="seq2seq")
    alone = Alone.run(model, pairs)
    handle = autopack.enable(model, verify="never")
    batch = pairs.padded()
    if change == "masked":
        batch["decoder_attention_mask"] = (batch["labels"] != -100).long()
    else:
        for name in ("input_ids", "attention_mask"):
            rows = [row.roll(max(SOURCES) - n) for row, n in zip(batch[name], SOURCES, strict=True)]
            batch[name] = torch.stack(rows)
    alone.check(pairs, "padded", model(**batch), model)
    assert "1 padded batch packed inside" in repr(handle)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"use_cache": True}, "a cache is wanted"),
        ({"output_attentions": True}, "attention weights are wanted"),
        ({"labels": None}, "evaluation without labels"),
    ],
)
def test_padded_batches_that_stay_as_they_came(change, reason):
    pairs, model = Pairs.draw(), tiny.build("t5", task="seq2seq")
    batch = {**pairs.padded(), "decoder_input_ids": _pad(pairs.targets, 0), **change}
    before = model(**batch).logits
    handle = autopack.enable(model, verify="never")
    assert torch.equal(model(**batch).logits, before)
    assert reason in repr(handle)


def test_counting_columns_keeps_left_padding_as_it_came():
    pairs, model = Pairs.draw(), tiny.build("bart", task="seq2seq")
    batch = pairs.padded()
    for name in ("input_ids", "attention_mask"):
        batch[name] = batch[name].flip(1)
    before = model(**batch).loss
    handle = autopack.enable(model, verify="never")
    assert torch.equal(model(**batch).loss, before)
    assert "counts columns by itself" in repr(handle)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"decoder_attention_mask": None}, InvalidPacking, r"found \[4\] documents .* encoder and \[1\]"),
        ({"attention_mask": None}, InvalidPacking, r"found \[1\] documents .* encoder and \[4\]"),
        ({"labels": None}, InvalidPacking, "decoder's are missing"),
        ({"use_cache": True}, InvalidPacking, "use_cache=True"),
        ({"output_attentions": True}, UnsupportedModel, "attention weights"),
        ({"cu_seq_lens_q": torch.tensor([0, 7])}, InvalidPacking, "which half"),
        ({"head_mask": torch.ones(2, 4)}, UnsupportedModel, "head_mask"),
    ],
)
def test_packed_calls_that_are_refused(change, error, message):
    model = tiny.build("t5", task="seq2seq")
    autopack.enable(model, verify="never")
    with pytest.raises(error, match=message):
        model(**{**Pairs.draw().one_row(), **change})
    model(**Pairs.draw().one_row())  # nothing is left behind


class Derived(transformers.T5ForConditionalGeneration):
    """A class of one's own is what it derives from."""


def test_a_class_derived_from_one_of_transformers():
    pairs, model = Pairs.draw(), Derived(tiny.config("t5", task="seq2seq")).eval()
    alone = Alone.run(model, pairs)
    autopack.enable(model, verify="never")
    for form in ("one_row", "padded"):
        alone.check(pairs, form, model(**getattr(pairs, form)()), model)
    assert autopack.audit(model, modes=("two rows",)).exact


def test_a_classification_head_refuses_packed_rows():
    model = transformers.BartForSequenceClassification(tiny.config("bart", task="sequence-classification")).eval()
    autopack.enable(model, verify="never")
    row = Pairs.draw().one_row()
    row["decoder_input_ids"] = row.pop("labels")
    with pytest.raises(UnsupportedModel, match="one result per row"):
        model(**row)
    with pytest.raises(UnsupportedModel, match="one result per row"):
        autopack.audit(model)


@pytest.mark.parametrize("model_type", REFUSED)
def test_what_is_refused_says_why_and_stays_as_it_was(model_type):
    model = tiny.build(model_type, task="seq2seq")
    with pytest.raises(UnsupportedModel, match="cannot be packed exactly"):
        autopack.enable(model)
    assert not holds_marks(model)


def test_disable_takes_every_mark_back():
    model = tiny.build("t5", task="seq2seq")
    before = [dict(vars(module)) for module in model.modules()]
    autopack.enable(model, verify="never").remove()
    for module, attributes in zip(model.modules(), before, strict=True):
        assert vars(module).keys() == attributes.keys()


def _whisper() -> tuple[Any, str, list[torch.Tensor]]:
    config = transformers.WhisperConfig(
        vocab_size=128, num_mel_bins=8, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, d_model=64, encoder_ffn_dim=96, decoder_ffn_dim=96, max_source_positions=20,
        max_target_positions=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=3,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    recordings = [torch.randn(1, 8, 40, generator=generator) for _ in TARGETS]
    return transformers.WhisperForConditionalGeneration(config), "input_features", recordings


def _moonshine() -> tuple[Any, str, list[torch.Tensor]]:
    config = transformers.MoonshineConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, encoder_num_hidden_layers=2, decoder_num_hidden_layers=2,
        encoder_num_attention_heads=4, decoder_num_attention_heads=4, pad_token_id=0, decoder_start_token_id=1,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    recordings = [torch.randn(1, 4000, generator=generator) for _ in TARGETS]
    return transformers.MoonshineForConditionalGeneration(config), "input_values", recordings


def _speech_to_text() -> tuple[Any, str, list[torch.Tensor]]:
    config = transformers.Speech2TextConfig(
        vocab_size=128, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        d_model=64, encoder_ffn_dim=96, decoder_ffn_dim=96, input_feat_per_channel=8, conv_channels=32, dropout=0.0,
        max_source_positions=60, max_target_positions=64, pad_token_id=1, decoder_start_token_id=2,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    recordings = [torch.randn(1, 40, 8, generator=generator) for _ in TARGETS]
    return transformers.Speech2TextForConditionalGeneration(config), "input_features", recordings


@pytest.mark.parametrize("build", [_whisper, _moonshine, _speech_to_text])
def test_recordings_with_packed_texts(build):
    """The encoder runs as it is, on one recording per document; only the decoder's documents share rows."""
    torch.manual_seed(0)
    model, name, recordings = build()
    model.eval()
    pairs = Pairs.draw()
    alone = [model(**{name: r}, labels=t[None]) for r, t in zip(recordings, pairs.targets, strict=True)]
    counts = [len(t) for t in pairs.targets]
    loss = sum(o.loss * n for o, n in zip(alone, counts, strict=True)) / sum(counts)
    loss.backward()
    wanted = Alone([o.logits[0].detach() for o in alone], loss.detach(), _gradients(model))
    autopack.enable(model, verify="never")
    batch = torch.cat(recordings)
    for form in ("one_row", "two_rows", "padded"):
        wanted.check(pairs, form, model(**{name: batch}, **_texts(getattr(pairs, form)())), model)
    with pytest.raises(InvalidPacking, match="found 3 recordings and 4 documents"):
        model(**{name: batch[:3]}, **_texts(pairs.one_row()))


def _texts(call: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in call.items() if name in ("labels", "decoder_attention_mask")}


def test_recordings_of_unequal_length():
    """What of a recording is padding is not attended to; the encoder's convolutions read it, as they do in stock."""
    model, name, _ = _speech_to_text()
    model.eval()
    pairs, frames = Pairs.draw(), (40, 24, 33, 16)
    batch = {
        name: _pad([torch.randn(n, 8, generator=torch.Generator().manual_seed(n)) for n in frames], 0),
        "attention_mask": _pad([torch.ones(n, dtype=torch.long) for n in frames], 0),
    }
    padded = model(**batch, labels=pairs.padded()["labels"], use_cache=False)
    stock = Alone(pairs.of("padded", padded.logits.detach()), padded.loss.detach(), {})
    autopack.enable(model, verify="never")
    for form in ("one_row", "padded"):
        output = model(**batch, **_texts(getattr(pairs, form)()))
        assert stock.error(pairs.of(form, output.logits.detach())) <= LOGITS
