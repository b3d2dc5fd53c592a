"""Packed batches in models and in a Trainer, and what `for_model` takes from a model."""

from __future__ import annotations

import pickle
import types
from typing import Any

import pytest
import torch
import transformers

import autopack
from autopack import registry, tiny
from autopack.packing import PackingCollator
from tests.packing.batches import Documents


def tiny_llama(**options: Any) -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        **options,
    )
    return transformers.LlamaForCausalLM(config)


@pytest.mark.skipif(
    tuple(map(int, transformers.__version__.split(".")[:2])) < (4, 53),
    reason="stock Llama is exact on packed rows from 4.53 on, without a cache",
)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("options", [{}, {"max_length": 16, "declare": (), "pad_to_multiple_of": 8}])
def test_the_packed_loss_is_the_token_mean_over_separate_documents(attention, options):
    model = tiny_llama(attn_implementation=attention).eval()
    generator = torch.Generator().manual_seed(1)
    examples = [{"input_ids": torch.randint(1, 97, (n,), generator=generator)} for n in (7, 12, 1, 9, 4)]
    with torch.no_grad():
        packed = model(**PackingCollator(**options)(examples), use_cache=False).loss
        total = count = 0
        for example in examples:
            ids = example["input_ids"][None]
            logits = model(ids, use_cache=False).logits[0, :-1]
            total += torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum")
            count += ids.shape[1] - 1
    torch.testing.assert_close(packed, total / count, rtol=1e-5, atol=1e-5)


def test_data_collator_of_a_trainer(tmp_path):
    pytest.importorskip("accelerate")
    counted = []

    class Counting(transformers.Trainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            counted.append((kwargs.get("num_items_in_batch"), sorted(inputs)))
            return super().compute_loss(model, inputs, *args, **kwargs)

    trainer = Counting(
        model=tiny_llama(),
        args=transformers.TrainingArguments(
            output_dir=str(tmp_path), per_device_train_batch_size=2, max_steps=2, report_to=[], use_cpu=True
        ),
        train_dataset=Documents([3, 2, 4, 1]),
        data_collator=PackingCollator(),
    )
    trainer.train()
    assert sorted(int(items) for items, _ in counted if items is not None) in ([3, 3], [1, 5], [2, 4])
    assert all(keys == ["input_ids", "labels", "position_ids"] for _, keys in counted)


TINY: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 24,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 3,
}
KOSMOS = {"vocab_size": 50, "embed_dim": 16, "layers": 1, "ffn_dim": 16, "attention_heads": 2, "pad_token_id": 3}
EXTRA: dict[str, dict[str, Any]] = {
    "esm": {"position_embedding_type": "absolute", "mask_token_id": 4},
    "layoutlmv3": {"visual_embed": False, "coordinate_size": 4, "shape_size": 4},
    "longformer": {"attention_window": 4},
    "luke": {"entity_vocab_size": 5, "entity_emb_size": 16},
    "mpnet": {"pad_token_id": 1},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
}
TOWERS = {
    "altclip_text_model": ("altclip", "AltCLIPTextConfig", ("AltRobertaModel", "AltCLIPTextModel")),
    "bridgetower_text_model": ("bridgetower", "BridgeTowerTextConfig", ("BridgeTowerTextModel",)),
    "clap_text_model": ("clap", "ClapTextConfig", ("ClapTextModel",)),
    "kosmos_2_text_model": ("kosmos2", "Kosmos2TextConfig", ("Kosmos2TextModel",)),
    "kosmos_2_5_text_model": ("kosmos2_5", "Kosmos2_5TextConfig", ("Kosmos2_5TextModel",)),
}


def tiny_of(model_type: str) -> transformers.PreTrainedModel:
    if model_type not in TOWERS:
        if model_type not in transformers.CONFIG_MAPPING:
            pytest.skip(f"this transformers release has no {model_type}")
        config = transformers.AutoConfig.for_model(model_type, **TINY | EXTRA.get(model_type, {}))
        return transformers.AutoModel.from_config(config)
    folder, config_name, names = TOWERS[model_type]
    configuration = pytest.importorskip(f"transformers.models.{folder}.configuration_{folder}")
    modeling = pytest.importorskip(f"transformers.models.{folder}.modeling_{folder}")
    config = getattr(configuration, config_name)(**KOSMOS if "kosmos" in folder else TINY)
    return next(getattr(modeling, name) for name in names if hasattr(modeling, name))(config)


# PaliGemma and ColPali number from 1 too, but their rotation gives the same from any start.
LATER_STARTS = {
    model_type
    for family in registry.families()
    for model_type, numbering in family.numbering.items()
    if numbering.start or numbering.after_pad_token
} - {"colpali", "paligemma"}


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "xlnet", "bart", "whisper", "cpmant", "xlm"])
def test_batches_of_for_model_have_the_loss_of_their_documents(model_type):
    """A decoder's loss shifts labels, or compares each with the logits of its own column."""
    model = tiny.build(model_type)
    documents = [tiny.tokens(model.config, 1, n, seed=n)[0] for n in (7, 12, 9)]
    with torch.no_grad():
        losses = [model(input_ids=each[None], labels=each[None]).loss for each in documents]
        collator = PackingCollator.for_model(model)
        first = 0 if collator.labels == "unshifted" else 1
        counts = [len(each) - first for each in documents]
        expected = sum(loss * n for loss, n in zip(losses, counts, strict=True)) / sum(counts)
        with autopack.enable(model):
            batch = collator([{"input_ids": each.tolist(), "labels": each.tolist()} for each in documents])
            packed = model(**batch).loss
    torch.testing.assert_close(packed, expected, rtol=1e-5, atol=1e-5)  # float32, of one sum instead of three


@pytest.mark.parametrize("model_type", sorted(LATER_STARTS))
def test_for_model_starts_where_the_model_itself_starts(model_type):
    torch.manual_seed(0)
    model = tiny_of(model_type).eval()
    collator = PackingCollator.for_model(model)
    assert collator == PackingCollator.for_model(model.config)
    assert collator.first_position > 0
    batch = collator([{"input_ids": [5, 6, 7, 8, 9, 10]}])
    with torch.no_grad():
        alone = model(batch["input_ids"])[0]
        packed = model(batch["input_ids"], position_ids=batch["position_ids"])[0]
        shifted = model(batch["input_ids"], position_ids=batch["position_ids"] + 1)[0]
    torch.testing.assert_close(packed, alone)
    assert (shifted - alone).abs().max() > 1e-3


def test_for_model_reads_the_head_and_lets_options_win():
    bert = transformers.BertConfig(**TINY)
    assert PackingCollator.for_model(bert) == PackingCollator()
    for head in (transformers.BertForMaskedLM, transformers.BertForTokenClassification):
        model = head(bert)
        assert PackingCollator.for_model(model) == PackingCollator(labels="unshifted")
        assert PackingCollator.for_model(torch.nn.DataParallel(model)).labels == "unshifted"
    assert PackingCollator.for_model(transformers.BertForSequenceClassification(bert)).labels == "given"
    assert PackingCollator.for_model(transformers.AltCLIPConfig()) == PackingCollator(first_position=2)
    llama = tiny_llama()
    assert PackingCollator.for_model(llama, max_length=8) == PackingCollator(max_length=8)
    roberta = transformers.RobertaConfig(**TINY)
    wanted = PackingCollator(first_position=7, labels="none")
    assert PackingCollator.for_model(roberta, first_position=7, labels="none") == wanted
    roberta.pad_token_id = None
    with pytest.raises(ValueError, match=r"roberta: wanted config\.pad_token_id"):
        PackingCollator.for_model(roberta)
    with pytest.raises(ValueError, match="found Linear"):
        PackingCollator.for_model(torch.nn.Linear(1, 1))


def test_for_model_sees_through_peft():
    peft = pytest.importorskip("peft")
    model = transformers.RobertaForMaskedLM(transformers.RobertaConfig(**TINY))
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["query"]))
    wanted = PackingCollator(first_position=4, labels="unshifted")
    assert PackingCollator.for_model(wrapped) == wanted


class Users(torch.nn.Module):
    """A module of the user's around a model."""

    def __init__(self, model):
        super().__init__()
        self.net = model


@pytest.mark.parametrize("wrap", [lambda m: m, Users, torch.nn.DataParallel, lambda m: types.SimpleNamespace(model=m)])
@pytest.mark.parametrize(
    ("order", "said"), [("made, called", 1), ("made, enabled, called", 0), ("enabled, made, called", 0)]
)
def test_for_model_warns_of_a_model_that_is_not_enabled_when_batches_are_made(wrap, order, said, caplog):
    held = wrap(tiny_llama())
    for step in order.split(", "):
        if step == "made":
            collator = PackingCollator.for_model(held)
            assert pickle.loads(pickle.dumps(collator)) == collator
            assert not caplog.messages
        elif step == "enabled":
            autopack.enable(held)
        else:
            for _ in range(3):
                collator([{"input_ids": [5, 6, 7]}] * 2)
    assert ["that is not enabled" in line for line in caplog.messages if "for_model" in line] == [True] * said
    autopack.disable(held)
