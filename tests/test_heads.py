"""Packed rows of heads with one result per row: each document gets the result, loss and gradients it gets alone."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import BertModel, GPT2DoubleHeadsModel, LlamaForSequenceClassification
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.models.mamba.modeling_mamba import MambaModel, MambaPreTrainedModel

import autopack
from autopack import InvalidPacking, UnsupportedModel, tiny
from autopack.registry import first_position
from autopack.tiny.weights import randomize
from tests.conftest import FLOAT32, FLOAT64, LEAK, LENGTHS, OTHER_LENGTHS, error, positions, spans, token_ids
from tests.padded import build as build_any
from tests.padded import gradient_error

pytestmark = pytest.mark.usefixtures("nothing_left_behind")
IDS = token_ids()
CLASSES = torch.tensor([0, 2, 1, 1])
STARTS, ENDS = torch.tensor([1, 3, 0, 8]), torch.tensor([2, 11, 4, 8])
TASKS = {
    "sequence-classification": {"labels": CLASSES},
    "question-answering": {"start_positions": STARTS, "end_positions": ENDS},
    "next-sentence-prediction": {"labels": torch.tensor([0, 1, 1, 0])},
}


class MambaForSequenceClassification(MambaPreTrainedModel):
    """Upstream has no such head for Mamba; this is how a user writes one."""

    def __init__(self, config):
        super().__init__(config)
        self.backbone, self.score = MambaModel(config), nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None, inputs_embeds=None, labels=None, **kwargs):
        states = self.backbone(input_ids, inputs_embeds, attention_mask=attention_mask).last_hidden_state
        logits = self.score(self.pool(states, attention_mask))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)

    def pool(self, states, mask):
        return states[:, -1] if mask is None else states[range(len(mask)), mask.sum(1) - 1]


def build(model_type, task="sequence-classification", dtype=torch.float64, **config):
    labels = {"num_labels": 3} if task.endswith("classification") else {}
    return tiny.build(model_type, task=task, dtype=dtype, **labels, **config)


def mamba_classifier():
    model = MambaForSequenceClassification(tiny.config("mamba", num_labels=3)).eval()
    randomize(model, 0)
    return model


def results(output):
    """One tensor per output: logits, or starts and ends side by side."""
    if "start_logits" in output:
        return torch.stack([output.start_logits, output.end_logits], dim=-1)
    return output.logits


def alone(model, documents, labels, **arguments):
    """The results of each document run by itself, and the mean of its losses."""
    outputs = [
        model(input_ids=document[None], **{name: value[i : i + 1] for name, value in labels.items()}, **arguments)
        for i, document in enumerate(documents)
    ]
    return [results(output)[0] for output in outputs], torch.stack([output.loss for output in outputs]).mean()


def packed(model, *rows, ids=IDS, **arguments):
    start = first_position(model.config)
    return model(input_ids=ids, position_ids=positions(*(rows or [LENGTHS]), start=start), **arguments)


def agrees(model, stock, output, documents, labels, tolerance=FLOAT64):
    """Results, loss and gradients of `output` are those of the documents alone, within rounding."""
    expected, loss = alone(stock, documents, labels)
    found = results(output)
    assert len(found) == len(documents)
    for result, wanted in zip(found, expected, strict=True):
        result = result[: len(wanted)] if "start_positions" in labels else result
        assert (result - wanted).abs().max() < tolerance
    assert abs(output.loss - loss) < tolerance
    output.loss.backward()
    loss.backward()
    assert gradient_error(model, stock) < 10 * tolerance  # they sum over all tokens and layers
    model.zero_grad()
    stock.zero_grad()


SERVED = [
    *((name, "sequence-classification") for name in ("llama", "bert", "gpt2", "qwen2", "qwen3", "modernbert")),
    *((name, "sequence-classification") for name in ("roberta", "mamba", "zamba2", "bloom", "deberta-v2")),
    *((name, "sequence-classification") for name in ("albert", "big_bird", "convbert")),
    *((name, "question-answering") for name in ("bert", "llama", "modernbert", "gpt2")),
    ("bert", "next-sentence-prediction"),
    # These run documents alone: one cannot be told of padding, one has no smaller part to serve.
    *((name, "sequence-classification") for name in ("fnet", "xlnet")),
    *((name, "question-answering") for name in ("fnet", "xlnet")),
]


@pytest.mark.parametrize(("model_type", "task"), SERVED)
def test_each_document_of_a_packed_row_gets_what_it_gets_alone(model_type, task):
    single = model_type in ("mamba", "xlnet", "zamba2")  # some of their code is float32 whatever the model's dtype
    stock = mamba_classifier() if model_type == "mamba" else build(model_type, task, *[torch.float32] * single)
    model, labels = copy.deepcopy(stock), TASKS[task]
    with autopack.enable(model, verify="never"):
        output = packed(model, **labels)
        agrees(model, stock, output, IDS[0].split(LENGTHS), labels, FLOAT32 if single else FLOAT64)


@pytest.mark.parametrize("model_type", ["llama", "fnet"])
@pytest.mark.parametrize(
    ("problem_type", "labels"),
    [
        ("regression", torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))),
        ("multi_label_classification", torch.tensor([[1, 0, 1], [0, 0, 1], [1, 1, 0], [0, 0, 0]]).double()),
        ("single_label_classification", torch.tensor([2, 0, -100, 1])),
    ],
)
def test_problem_types(model_type, problem_type, labels):
    stock = build(model_type, problem_type=problem_type)
    model = copy.deepcopy(stock)
    counted = [i for i in range(4) if labels.is_floating_point() or labels[i] != -100]
    with autopack.enable(model, verify="never"):
        output = packed(model, labels=labels)
    documents = IDS[0].split(LENGTHS)
    _, loss = alone(stock, [documents[i] for i in counted], {"labels": labels[counted]})
    assert abs(output.loss - loss) < FLOAT64
    assert model.config.problem_type == problem_type


def test_one_target_per_document():
    stock = tiny.build("qwen2", task="sequence-classification", dtype=torch.float64, num_labels=1)
    model, labels = copy.deepcopy(stock), {"labels": torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)}
    with autopack.enable(model):
        agrees(model, stock, packed(model, **labels), IDS[0].split(LENGTHS), labels)


@pytest.mark.parametrize("model_type", ["llama", "bert"])
def test_stock_has_one_result_for_all_documents_of_a_row(model_type):
    model = build(model_type)
    logits = packed(model, use_cache=False).logits
    assert logits.shape == (1, 3)
    documents = IDS[0].split(LENGTHS)
    reads = documents[-1] if model_type == "llama" else documents[0]
    other = IDS.clone()
    other[:, 7:12] = token_ids(1, 5, seed=5)
    assert error(logits, model(input_ids=reads[None]).logits) > (LEAK if model_type == "bert" else -1)
    changed = packed(model, ids=other, use_cache=False).logits
    assert (error(changed, logits) > LEAK) == (model_type == "bert")  # Llama's mask is split, its result is the last's


def test_calls_that_pack_nothing_go_through_untouched():
    stock = build("llama")
    model, batch = copy.deepcopy(stock), IDS[:, :32].reshape(4, 8)
    with autopack.enable(model):
        for ids in (IDS, batch):
            assert torch.equal(model(input_ids=ids).logits, stock(input_ids=ids).logits)


@pytest.mark.parametrize("model_type", ["llama", "bert", "fnet"])
def test_no_document_changes_another(model_type):
    model = build(model_type)
    changed = IDS.clone()
    changed[:, 7:19] = token_ids(1, 12, seed=7)
    with autopack.enable(model, verify="never"):
        before, after = packed(model).logits, packed(model, ids=changed).logits
    assert torch.equal(before[[0, 2, 3]], after[[0, 2, 3]])
    assert error(after[1], before[1]) > LEAK


@pytest.fixture(scope="module")
def drawn():
    """Models for drawn documents, by task: stock and enabled."""
    found = {}
    for task, model_type in (("sequence-classification", "llama"), ("question-answering", "bert")):
        stock = build(model_type, task, num_hidden_layers=1)
        model = copy.deepcopy(stock)
        autopack.enable(model)
        found[task] = stock, model
    yield found
    for _, model in found.values():
        autopack.disable(model)


@settings(max_examples=12)
@given(
    rows=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=3),
    padding=st.integers(0, 4),
    seed=st.integers(0, 99),
    task=st.sampled_from(["sequence-classification", "question-answering"]),
)
def test_any_lengths_rows_and_padding(drawn, rows, padding, seed, task):
    stock, model = drawn[task]
    assume(max(map(max, rows)) > 1)  # one token has no other to choose, and no gradient
    if all(len(row) == 1 for row in rows):
        rows = [[*row, 1] for row in rows]  # else it is an ordinary batch
    columns = max(map(sum, rows)) + padding
    ids = token_ids(len(rows), columns, seed=seed)
    segments = torch.zeros_like(ids)
    documents = []
    for number, row in enumerate(rows):
        for i, (first, end) in enumerate(spans(row)):
            segments[number, first:end] = i + 1
            documents.append(ids[number, first:end])
    generator = torch.Generator().manual_seed(seed)
    if task == "sequence-classification":
        labels = {"labels": torch.randint(3, (len(documents),), generator=generator)}
    else:
        at = [torch.randint(len(document), (2,), generator=generator) for document in documents]
        labels = dict(zip(("start_positions", "end_positions"), torch.stack(at, dim=1), strict=True))
    output = model(input_ids=ids, attention_mask=segments, **labels)
    agrees(model, stock, output, documents, labels)


def test_two_rows_and_padding_between_documents():
    stock = build("llama")
    model, labels = copy.deepcopy(stock), {"labels": torch.tensor([0, 1, 2, 0, 1])}
    ids, lengths = token_ids(2, 14), ((5, 3, 4), (6, 8))
    mask = torch.ones_like(ids)
    mask[0, 5:7] = 0
    rows = positions((5, 2, 3, 4), (6, 8))
    documents = [*ids[0, [*range(5), *range(7, 14)]].split(lengths[0]), *ids[1].split(lengths[1])]
    with autopack.enable(model):
        output = model(input_ids=ids, attention_mask=mask, position_ids=rows, **labels)
        agrees(model, stock, output, documents, labels)


@pytest.mark.parametrize("model_type", ["llama", "bert", "roberta"])
def test_token_classification_has_labels_per_token(model_type):
    stock = build(model_type, "token-classification")
    model, labels = copy.deepcopy(stock), IDS % 3
    with autopack.enable(model):
        output = packed(model, labels=labels)
    parts = [(a, b, stock(input_ids=IDS[:, a:b], labels=labels[:, a:b])) for a, b in spans(LENGTHS)]
    assert error(output.logits, torch.cat([part.logits for _, _, part in parts], dim=1)) < FLOAT64
    loss = sum(part.loss * (b - a) for a, b, part in parts) / sum(LENGTHS)
    assert abs(output.loss - loss) < 1e-6  # some heads make float32 of their logits
    output.loss.backward()
    loss.backward()
    assert gradient_error(model, stock) < 1e-5


def test_spans_come_back_one_document_per_row_and_padding_cannot_be_chosen():
    model = build("bert", "question-answering")
    with autopack.enable(model):
        output = packed(model)
    assert output.start_logits.shape == output.end_logits.shape == (4, 12)
    for starts, length in zip(output.start_logits, LENGTHS, strict=True):
        assert (starts[length:] == torch.finfo(starts.dtype).min).all()
        assert starts.argmax() < length


def test_an_answer_at_the_end_of_its_document_is_left_out_of_the_loss():
    stock = build("bert", "question-answering")
    model, documents = copy.deepcopy(stock), IDS[0].split(LENGTHS)
    outside = torch.tensor([7, 3, 0, 8])
    with autopack.enable(model):
        loss = packed(model, start_positions=outside, end_positions=ENDS).loss
    starts, ends = zip(*(results(stock(input_ids=document[None]))[0].T for document in documents), strict=True)
    cross_entropy = nn.functional.cross_entropy
    of_starts = [cross_entropy(logits, at) for logits, at in zip(starts[1:], outside[1:], strict=True)]
    of_ends = [cross_entropy(logits, at) for logits, at in zip(ends, ENDS, strict=True)]
    assert abs(loss - (torch.stack(of_starts).mean() + torch.stack(of_ends).mean()) / 2) < FLOAT64


WRONG = {
    "labels per token": ("llama", {"labels": IDS}, r"labels of LlamaForSequenceClassification must have one entry per"),
    "labels per row": ("llama", {"labels": CLASSES[:1]}, r"\(4,\) or \(4, K\); found \(1,\)"),
    "a number": ("llama", {"labels": 1}, r"found int. The 1 x 33 tokens hold 4 documents of 7, 12, 5, 9 tokens"),
    "spans of the row": (
        "bert",
        {"start_positions": torch.tensor([1, 10, 19, 25]), "end_positions": ENDS},
        r"document 2 has 5 tokens, found 19. Subtract the document's first column",
    ),
    "spans before": ("bert", {"start_positions": STARTS - 1, "end_positions": ENDS}, r"document 2 .* found -1"),
    "spans per row": ("bert", {"start_positions": STARTS[:1], "end_positions": ENDS}, r"found \(1,\)"),
}


@pytest.mark.parametrize(("model_type", "arguments", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_labels_are_refused_before_any_token_is_computed(model_type, arguments, message):
    model = build(model_type, "question-answering" if model_type == "bert" else "sequence-classification")
    computed = []
    model.get_input_embeddings().register_forward_pre_hook(lambda *a: computed.append(a))
    with autopack.enable(model), pytest.raises(InvalidPacking, match=message):
        packed(model, **arguments)
    assert not computed


def test_what_belongs_to_no_document_is_refused():
    model = build("bert")
    with autopack.enable(model):
        with pytest.raises(
            UnsupportedModel,
            match="pixel_values was given to BertForSequenceClassification .* documents of 'bert' with images",
        ):
            packed(model, pixel_values=torch.zeros(1, 3, 8, 8))
        with pytest.raises(InvalidPacking, match="use_cache=True"):
            packed(model, use_cache=True)


def test_a_decoder_without_padding_token_is_told_to_set_one():
    model, stock = (build("llama") for _ in range(2))
    model.config.pad_token_id = None
    with autopack.enable(model):
        with pytest.raises(
            UnsupportedModel, match=r"config.pad_token_id, which is None. Set model.config.pad_token_id"
        ):
            packed(model)
        model.config.pad_token_id = 127
        stock.config.pad_token_id = 127
        output = packed(model, **TASKS["sequence-classification"])
        agrees(model, stock, output, IDS[0].split(LENGTHS), TASKS["sequence-classification"])


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "bert"])
def test_documents_that_hold_and_end_with_the_padding_token(model_type):
    stock = build(model_type)
    pad = stock.config.pad_token_id
    model, ids = copy.deepcopy(stock), IDS.clone()
    ids[:, [0, 3, 17, 18]] = pad  # first, inside, the last two of a document
    ids[:, 19:24] = pad  # a whole document
    labels = TASKS["sequence-classification"]
    with autopack.enable(model):
        agrees(model, stock, packed(model, ids=ids, **labels), ids[0].split(LENGTHS), labels)


@pytest.mark.parametrize("model_type", ["llama", "bert"])
def test_embeddings_instead_of_tokens(model_type):
    stock = build(model_type)
    model, embeddings = copy.deepcopy(stock), stock.get_input_embeddings()(IDS).detach()
    expected = [stock(inputs_embeds=embeddings[:, a:b]).logits for a, b in spans(LENGTHS)]
    with autopack.enable(model):
        found = model(inputs_embeds=embeddings, position_ids=positions(LENGTHS)).logits
    assert error(found, torch.cat(expected)) < FLOAT64


@pytest.mark.parametrize("model_type", ["llama", "bert", "fnet"])
def test_states_and_tuples_are_by_documents(model_type):
    stock = build(model_type)
    model, labels = copy.deepcopy(stock), {"labels": CLASSES}
    with autopack.enable(model, verify="never"):
        states = packed(model, output_hidden_states=True).hidden_states
        as_tuple = packed(model, return_dict=False, **labels)
        output = packed(model, **labels)
    assert isinstance(as_tuple, tuple)
    assert torch.equal(as_tuple[0], output.loss)
    assert torch.equal(as_tuple[1], output.logits)
    for i, document in enumerate(IDS[0].split(LENGTHS)):
        expected = stock(input_ids=document[None], output_hidden_states=True).hidden_states
        assert len(states) == len(expected)
        for state, wanted in zip(states, expected, strict=True):
            assert state.shape[:2] == (4, 12)
            assert (state[i, : len(document)] - wanted[0]).abs().max() < FLOAT64
            assert not state[i, len(document) :].any()


def test_attention_weights_are_by_documents():
    stock = build("llama")
    model = copy.deepcopy(stock)
    with autopack.enable(model):
        output = packed(model, output_attentions=True)
    assert output.attentions[0].shape == (4, 4, 12, 12)
    for i, document in enumerate(IDS[0].split(LENGTHS)):
        expected = stock(input_ids=document[None], output_attentions=True)
        weights = output.attentions[1][i]
        assert (weights[:, : len(document), : len(document)] - expected.attentions[1][0]).abs().max() < FLOAT64
        assert abs(weights.sum() - expected.attentions[1].sum()) < FLOAT64
        assert (output.logits[i] - expected.logits[0]).abs().max() < FLOAT64


@pytest.mark.parametrize("kind", ["last", "mean", "first"])
def test_a_summary_that_reads_padding_is_made_of_documents_alone(kind):
    stock = build("xlm", summary_type=kind)
    model, labels = copy.deepcopy(stock), {"labels": CLASSES}
    with autopack.enable(model, verify="never"):
        agrees(model, stock, packed(model, **labels), IDS[0].split(LENGTHS), labels)


@pytest.mark.parametrize(("pooling", "model_type"), [("mean", "modernbert"), ("cls", "modernbert")])
def test_pooling_over_tokens_leaves_padding_out(pooling, model_type):
    stock = build(model_type, classifier_pooling=pooling)
    model, labels = copy.deepcopy(stock), {"labels": CLASSES}
    with autopack.enable(model, verify="never"):
        agrees(model, stock, packed(model, **labels), IDS[0].split(LENGTHS), labels)


def test_token_types_and_positions_inside_a_document_go_along():
    stock = build("bert")
    model, types = copy.deepcopy(stock), (torch.arange(33) % 3 == 0).long()[None]
    at = positions(LENGTHS)
    at[:, :7] += 5
    with autopack.enable(model):
        found = model(input_ids=IDS, position_ids=at, token_type_ids=types).logits
    expected = [
        stock(input_ids=IDS[:, a:b], position_ids=at[:, a:b], token_type_ids=types[:, a:b]).logits
        for a, b in spans(LENGTHS)
    ]
    assert error(found, torch.cat(expected)) < FLOAT64


@pytest.mark.parametrize("model_type", ["llama", "bert"])
def test_checkpointed_layers_know_their_documents(model_type):
    stock = build(model_type)
    model, labels = copy.deepcopy(stock), {"labels": CLASSES}
    model.train()
    model.gradient_checkpointing_enable()
    with autopack.enable(model):
        agrees(model, stock, packed(model, **labels), IDS[0].split(LENGTHS), labels)


def test_it_is_the_same_whatever_becomes_of_padded_batches():
    stock = build("bert")
    model, labels = copy.deepcopy(stock), {"labels": CLASSES}
    with autopack.enable(model, unpad="never") as handle:
        agrees(model, stock, packed(model, **labels), IDS[0].split(LENGTHS), labels)
        assert "no padded batch yet" in str(handle.tally)


def test_only_real_tokens_reach_the_layers():
    model, shapes = build("llama"), []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda module, args: shapes.append(args[0].shape[:2]))
    with autopack.enable(model):
        packed(model)
        model(input_ids=IDS[:, :24], position_ids=positions((6,) * 4))
    assert shapes == [(1, 33), (4, 6)]


def test_compiled():
    stock = build("llama", "question-answering", num_hidden_layers=1)
    model = copy.deepcopy(stock)
    torch._dynamo.reset()
    with autopack.enable(model):
        compiled = torch.compile(model, backend="eager")
        for lengths in (LENGTHS, OTHER_LENGTHS):
            labels = {"start_positions": torch.zeros(len(lengths)).long(), "end_positions": torch.tensor(lengths) - 1}
            output = compiled(input_ids=IDS, position_ids=positions(lengths), use_cache=False, **labels)
            agrees(model, stock, output, IDS[0].split(lengths), labels)


@pytest.mark.parametrize("task", ["sequence-classification", "question-answering"])
@pytest.mark.parametrize("enabled_first", [True, False])
def test_peft_with_a_trained_head(task, enabled_first):
    import peft

    kind = "SEQ_CLS" if task == "sequence-classification" else "QUESTION_ANS"
    lora = peft.LoraConfig(task_type=kind, r=4, target_modules=["query"], init_lora_weights=False)
    base, labels = build("bert", task), TASKS[task]
    torch.manual_seed(0)
    stock = peft.get_peft_model(copy.deepcopy(base), lora).eval()
    if enabled_first:
        autopack.enable(base)
    torch.manual_seed(0)
    model = peft.get_peft_model(base, lora).eval()
    autopack.enable(model)
    agrees(model, stock, packed(model, **labels), IDS[0].split(LENGTHS), labels)
    autopack.disable(model)


def test_distributed_data_parallel(tmp_path):
    stock = build("llama")
    model, labels = copy.deepcopy(stock), {"labels": CLASSES}
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with autopack.enable(model):
            output = packed_through(nn.parallel.DistributedDataParallel(model), labels)
            agrees(model, stock, output, IDS[0].split(LENGTHS), labels)
    finally:
        torch.distributed.destroy_process_group()


def packed_through(wrapper, labels):
    return wrapper(input_ids=IDS, position_ids=positions(LENGTHS), **labels)


def test_choices_are_refused_with_the_reason():
    config = tiny.config("bert", task="multiple-choice")
    for model in (
        transformers.BertForMultipleChoice(config),
        GPT2DoubleHeadsModel(tiny.config("gpt2")),
    ):
        with (
            autopack.enable(model, verify="never"),
            pytest.raises(UnsupportedModel, match="are choices of one question"),
        ):
            packed(model)


class Wrapped(transformers.LlamaPreTrainedModel):
    """A model of no known head around one that has a result per row."""

    def __init__(self, config):
        super().__init__(config)
        self.inner = LlamaForSequenceClassification(config)

    def get_input_embeddings(self):
        return self.inner.get_input_embeddings()

    def forward(self, input_ids=None, position_ids=None, **kwargs):
        return self.inner(input_ids=input_ids, position_ids=position_ids, **kwargs)


def test_a_head_inside_an_unknown_model_is_refused_and_serves_when_it_is_called():
    model = Wrapped(tiny.config("llama", task="sequence-classification")).double().eval()
    with autopack.enable(model, verify="never"):
        with pytest.raises(UnsupportedModel, match="Wrapped holds LlamaForSequenceClassification, which gives one"):
            packed(model)
        found = packed(model.inner).logits
    expected = [model.inner(input_ids=IDS[:, a:b]).logits for a, b in spans(LENGTHS)]
    assert error(found, torch.cat(expected)) < FLOAT64


class T5EncoderForSequenceClassification(transformers.T5PreTrainedModel):
    """Of T5, upstream has such heads on encoder and decoder together alone."""

    def __init__(self, config):
        super().__init__(config)
        self.encoder = transformers.T5EncoderModel(config)
        self.score = nn.Linear(config.d_model, config.num_labels)
        self.post_init()

    def get_input_embeddings(self):
        return self.encoder.get_input_embeddings()

    def forward(self, input_ids=None, attention_mask=None, inputs_embeds=None, labels=None, **kwargs):
        states = self.encoder(input_ids, attention_mask=attention_mask, inputs_embeds=inputs_embeds).last_hidden_state
        mask = torch.ones_like(states[..., 0]) if attention_mask is None else attention_mask.to(states.dtype)
        logits = self.score((states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)


def test_a_head_on_the_encoder_of_t5():
    model = T5EncoderForSequenceClassification(tiny.config("t5", num_labels=3)).eval()
    randomize(model, 0)
    stock, labels = copy.deepcopy(model), {"labels": CLASSES}
    documents = [IDS[0, a:b] for a, b in spans(LENGTHS)]
    row = model(input_ids=IDS, position_ids=positions(LENGTHS))
    assert len(row.logits) == 1  # stock: one result for all
    autopack.enable(model)
    # T5's norms go through float32 whatever the dtype of the model.
    agrees(model, stock, packed(model, **labels), documents, labels, FLOAT32)


@pytest.mark.parametrize(("model_type", "prefix"), [("big_bird", "BigBird"), ("albert", "Albert")])
def test_a_pooler_that_is_handed_single_tokens(model_type, prefix):
    options = {"attention_type": "original_full"} if model_type == "big_bird" else {}
    config = tiny.config(model_type, task="masked-lm", **options)
    model = getattr(transformers, f"{prefix}Model")(config).double().eval()
    expected = torch.cat([model(input_ids=IDS[:, a:b]).pooler_output for a, b in spans(LENGTHS)])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    batch = {"input_ids": torch.tensor([[5, 6, 7, 8], [9, 10, 0, 0]]), "attention_mask": mask}
    of_padded = model(**batch).pooler_output
    autopack.enable(model, verify="never", unpad="always")
    assert error(packed(model).pooler_output, expected) < FLOAT64
    assert error(packed(model, return_dict=False)[1], expected) < FLOAT64
    with_padding = model(
        input_ids=torch.cat([IDS, IDS[:, :3]], dim=1),
        position_ids=positions((*LENGTHS, 3)),
        attention_mask=(torch.arange(36) < 33).long()[None],
    )
    assert error(with_padding.pooler_output, expected) < FLOAT64
    assert error(model(**batch).pooler_output, of_padded) < FLOAT64
    assert model(input_ids=IDS).pooler_output.shape == (1, 64)


@pytest.mark.parametrize(("model_type", "prefix"), [("big_bird", "BigBird"), ("albert", "Albert")])
def test_pretraining_with_such_a_pooler(model_type, prefix):
    options = {"attention_type": "original_full"} if model_type == "big_bird" else {}
    config = tiny.config(model_type, task="masked-lm", **options)
    model = getattr(transformers, f"{prefix}ForPreTraining")(config).double().eval()
    parts = [model(input_ids=IDS[:, a:b]) for a, b in spans(LENGTHS)]
    autopack.enable(model, verify="never")
    found = packed(model)
    for name in ("prediction_logits", "sop_logits" if model_type == "albert" else "seq_relationship_logits"):
        expected = torch.cat([part[name] for part in parts], dim=int(name == "prediction_logits"))
        assert error(found[name], expected) < FLOAT64


class MeanOfRow(MambaForSequenceClassification):
    """Reads padding, and nothing says so."""

    def pool(self, states, mask):
        return states.mean(1)


def test_heads_of_ones_own_are_audited_and_one_that_reads_padding_is_refused():
    with autopack.enable(mamba_classifier()) as handle:
        assert "by an audit of this very model" in handle.verified
    model = MeanOfRow(tiny.config("mamba", num_labels=3)).eval()
    randomize(model, 0)
    with pytest.raises(UnsupportedModel, match="is not exact"):
        autopack.enable(model)


def test_a_head_of_ones_own_on_a_backbone():
    model, head = MambaModel(tiny.config("mamba")).double().eval(), nn.Linear(64, 3).double()
    last = torch.tensor([b - 1 for _, b in spans(LENGTHS)])
    expected = torch.cat([head(model(IDS[:, a:b]).last_hidden_state[:, -1]) for a, b in spans(LENGTHS)])
    with autopack.enable(model):
        found = head(packed(model).last_hidden_state[0, last])
    assert error(found, expected) < FLOAT64


def test_a_pooler_gives_one_vector_per_document():
    model = BertModel(tiny.config("bert", task="masked-lm")).double().eval()
    expected = torch.cat([model(input_ids=IDS[:, a:b]).pooler_output for a, b in spans(LENGTHS)])
    with autopack.enable(model):
        output = packed(model)
    assert output.last_hidden_state.shape[:2] == (1, 33)
    assert error(output.pooler_output, expected) < FLOAT64


def test_pretraining_has_labels_per_token_and_per_document():
    stock = transformers.BertForPreTraining(tiny.config("bert", task="masked-lm")).double().eval()
    model, next_sentence = copy.deepcopy(stock), torch.tensor([0, 1, 1, 0])
    with autopack.enable(model):
        output = packed(model, labels=IDS, next_sentence_label=next_sentence)
    parts = [stock(input_ids=IDS[:, a:b]) for a, b in spans(LENGTHS)]
    logits = torch.cat([part.prediction_logits[0] for part in parts])
    relations = torch.cat([part.seq_relationship_logits for part in parts])
    assert error(output.prediction_logits[0], logits) < FLOAT64
    assert error(output.seq_relationship_logits, relations) < FLOAT64
    cross_entropy = nn.functional.cross_entropy
    assert abs(output.loss - cross_entropy(logits, IDS[0]) - cross_entropy(relations, next_sentence)) < FLOAT64


@pytest.mark.parametrize("task", ["sequence-classification", "question-answering", "token-classification"])
def test_the_auditor_runs_heads(task):
    model = build("bert", task, torch.float32)
    stock = autopack.audit(model, modes=("use_cache=False",), training=(False,))
    assert not stock.exact
    if task == "sequence-classification":
        assert "gave 1 results for 4 documents" in stock.results[0].failure
    with autopack.enable(model, verify="always") as handle:
        assert "by an audit of this very model" in handle.verified
        report = autopack.audit(model)
    assert report.exact, report
    assert all(result.loss is not None and result.gradient is not None for result in report.results)
    assert model.config.problem_type is None


def test_a_trainer_on_packed_rows_learns_what_it_learns_on_padded_batches(tmp_path):
    lengths, ids = (3, 11, 6, 1, 9, 4, 8, 5), token_ids(1, 47)[0]
    examples = [{"input_ids": document.tolist(), "label": i % 3} for i, document in enumerate(ids.split(lengths))]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=4, num_train_epochs=1, learning_rate=0.1, optim="sgd",
        logging_steps=1, report_to=[], save_strategy="no", use_cpu=True, seed=0, disable_tqdm=True,
    )  # fmt: skip
    weights, losses = [], []
    for packs in (False, True):
        model = build_any("llama", "sequence classification")
        collator = autopack.PackingCollator.for_model(model) if packs else _pad
        assert not packs or collator.labels == "given"
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=examples, data_collator=collator)
        if packs:
            autopack.enable(trainer)
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
        weights.append([parameter.detach().clone() for parameter in model.parameters()])
        autopack.disable(model)
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert max(float((a - b).abs().max()) for a, b in zip(*weights, strict=True)) < 1e-5  # float32


def _pad(examples):
    longest = max(len(example["input_ids"]) for example in examples)
    rows = [example["input_ids"] + [0] * (longest - len(example["input_ids"])) for example in examples]
    mask = [[int(i < len(example["input_ids"])) for i in range(longest)] for example in examples]
    labels = torch.tensor([example["label"] for example in examples])
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(mask), "labels": labels}


def test_the_collator_packs_spans():
    stock = build("bert", "question-answering")
    model = copy.deepcopy(stock)
    examples = [
        {"input_ids": document.tolist(), "start_positions": int(start), "end_positions": int(end)}
        for document, start, end in zip(IDS[0].split(LENGTHS), STARTS, ENDS, strict=True)
    ]
    batch = autopack.PackingCollator.for_model(model, pad_to_multiple_of=8)(examples)
    assert batch["input_ids"].shape == (1, 40)
    assert "labels" not in batch
    with autopack.enable(model):
        agrees(model, stock, model(**batch), IDS[0].split(LENGTHS), TASKS["question-answering"])
