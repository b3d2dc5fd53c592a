"""Packed data sets: every document once and whole, its columns with it; and rows that train as documents do alone."""

from __future__ import annotations

import logging
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import autopack
from autopack.errors import InvalidPacking
from autopack.packing import PackingCollator
from autopack.packing.rows import BLOCK
from tests.conftest import FLOAT64, LEAK, error, gradient_error, gradients, llama
from tests.support.refusals import refused

datasets = pytest.importorskip("datasets")
datasets.disable_progress_bars()

LENGTHS = (3, 9, 1, 4, 4, 7, 8)


def examples(lengths: Any = LENGTHS) -> list[dict[str, Any]]:
    """Documents whose every token is known: number * 100 + place."""
    return [
        {
            "input_ids": [i * 100 + t for t in range(n)],
            "labels": [-100 if t < n // 2 else i * 100 + t for t in range(n)],
            "score": [i + t / 10 for t in range(n)],
            "word": [t == 0 for t in range(n)],
            "pair": [[i, t] for t in range(n)],
            "source": f"s{i}",
            "kind": i % 3,
        }
        for i, n in enumerate(lengths)
    ]


def pieces(row: dict[str, Any], name: str) -> list[Any]:
    """A column of a row, cut into its documents."""
    bounds = np.cumsum([0, *row["seq_lengths"]])
    return [list(row[name][a:b]) for a, b in pairwise(bounds)]


def as_examples(rows: Any) -> list[dict[str, Any]]:
    """The documents of packed rows, each as it was, in the order of the rows; checks what rows add."""
    found = []
    for row in rows:
        assert sum(row["seq_lengths"]) == len(row["input_ids"])
        assert row["position_ids"] == [t for n in row["seq_lengths"] for t in range(n)]
        for number in range(len(row["seq_lengths"])):
            document = {k: pieces(row, k)[number] for k in ("input_ids", "labels", "score", "word", "pair")}
            found.append({**document, "source": row["source"][number], "kind": row["kind"][number]})
    return found


def by_first(documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(documents, key=lambda d: d["input_ids"][0])


def approximately(documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**d, "score": pytest.approx(d["score"])} for d in documents]


@pytest.mark.parametrize("strategy", ["best_fit", "sequential", "sorted", "random"])
@pytest.mark.parametrize("kind", ["list", "Dataset"])
def test_every_document_is_in_one_row_with_all_of_its_columns(kind, strategy):
    made = examples()
    dataset = made if kind == "list" else datasets.Dataset.from_list(made)
    rows = autopack.pack(dataset, 10, strategy, mask_first_label=False)
    assert isinstance(rows, list if kind == "list" else datasets.Dataset)
    assert all(len(row["input_ids"]) <= 10 for row in rows)
    assert by_first(as_examples(rows)) == approximately(made)
    if strategy == "sequential":
        assert as_examples(rows) == approximately(made)
    masked = as_examples(autopack.pack(dataset, 10, strategy))
    assert [each["labels"] for each in masked] == [[-100, *each["labels"][1:]] for each in as_examples(rows)]


@given(
    lengths=st.lists(st.integers(1, 24), min_size=1, max_size=40),
    chunks=st.integers(1, 5),
    seed=st.integers(0, 9),
    overflow=st.sampled_from(["truncate", "split", "drop"]),
    block=st.sampled_from([1, 30, BLOCK]),
    strategy=st.sampled_from(["best_fit", "fixed_length"]),
)
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_rows_hold_what_the_plan_says_however_the_table_is_cut(
    lengths, chunks, seed, overflow, block, strategy, monkeypatch
):
    monkeypatch.setattr("autopack.packing.rows.BLOCK", block)
    documents = [[1000 * i + t for t in range(n)] for i, n in enumerate(lengths)]
    cuts = np.linspace(0, len(documents), chunks + 1).astype(int)
    parts = [documents[a:b] for a, b in pairwise(cuts) if b > a]
    made = [datasets.Dataset.from_dict({"input_ids": part, "labels": part}) for part in parts]
    dataset, options = datasets.concatenate_datasets(made), {"seed": seed, "overflow": overflow}
    if seed % 2:
        chosen = np.random.default_rng(seed).permutation(len(documents))[: max(1, len(documents) // 2)]
        dataset, documents = dataset.select(chosen), [documents[i] for i in chosen]
    plan = autopack.packing.plan([len(d) for d in documents], 16, strategy, **options)
    if not len(plan):
        with refused("does-not-fit", match="no document is left"):
            autopack.pack(dataset, 16, strategy, **options)
        return
    rows = autopack.pack(dataset, 16, strategy, **options)
    assert len(rows) == len(plan)
    for number, row in enumerate(rows):
        piece = plan.pieces(number)
        wanted = zip(plan.documents[piece], plan.offsets[piece], plan.lengths[piece], strict=True)
        assert pieces(row, "input_ids") == [documents[d][o : o + n] for d, o, n in wanted]
        assert row["seq_lengths"] == plan.lengths[piece].tolist()
        assert row["position_ids"] == plan.position_ids(number).tolist()
        assert pieces(row, "labels") == [[-100, *part[1:]] for part in pieces(row, "input_ids")]
    assert dataset["labels"][:] == documents, "what was packed has not been written to"


@pytest.mark.parametrize("kind", ["list", "Dataset"])
def test_padding_of_the_examples_is_removed(kind):
    made = [
        {"input_ids": [9, 9, 1, 2], "labels": [-100, -100, 1, 2], "attention_mask": [0, 0, 1, 1]},
        {"input_ids": [3, 4, 5, 9], "labels": [3, 4, 5, -100], "attention_mask": [1, 1, 1, 0]},
        {"input_ids": [6, 7], "labels": [6, 7], "attention_mask": [1, 1]},
    ]
    (row,) = autopack.pack(made if kind == "list" else datasets.Dataset.from_list(made), 7, "sequential")
    assert row["input_ids"] == [1, 2, 3, 4, 5, 6, 7]
    assert row["labels"] == [-100, 2, -100, 4, 5, -100, 7]
    assert row["seq_lengths"] == [2, 3, 2]
    assert "attention_mask" not in row


def test_columns_are_chosen_and_named_options_are_kept():
    rows = autopack.pack(examples(), 10, drop_columns=("labels", "pair"))
    assert set(rows[0]) == {"input_ids", "score", "word", "source", "kind", "position_ids", "seq_lengths"}
    rows = autopack.pack(examples(), 10, first_position=2)
    assert all(row["position_ids"] == [t + 2 for n in row["seq_lengths"] for t in range(n)] for row in rows)
    assert {len(row["seq_lengths"]) for row in autopack.pack(examples(), 10, max_documents=1)} == {1}
    split = datasets.DatasetDict({n: datasets.Dataset.from_list(examples()) for n in ("train", "test")})
    packed = autopack.pack(split, 10)
    assert isinstance(packed, datasets.DatasetDict)
    assert packed["test"][:] == autopack.pack(split["test"], 10)[:]
    with refused("does-not-fit", match="split 'train': example \\[1\\] is 9, over the 8 tokens of a row"):
        autopack.pack(split, 8)


def test_names_of_classes_and_the_format_stay():
    dataset = datasets.Dataset.from_dict({"input_ids": [[1, 2], [3]], "label": [1, 0], "tags": [[0, 1], [1]]})
    dataset = dataset.cast_column("label", datasets.ClassLabel(names=["no", "yes"]))
    dataset = dataset.cast_column("tags", datasets.Sequence(datasets.ClassLabel(names=["O", "B"])))
    packed = autopack.pack(dataset.with_format("torch"), 4)
    assert packed.features["label"].feature.names == ["no", "yes"]
    assert packed.features["tags"].feature.names == ["O", "B"]
    assert packed[0]["input_ids"].tolist() == [1, 2, 3]
    assert packed[0]["label"].tolist() == [1, 0]


@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_positions_of_small_types_restart_where_their_differences_wrap_around(dtype):
    info = np.iinfo(dtype)
    positions = np.append(np.arange(info.max + 1), [0, 1]).astype(dtype)
    example = {"input_ids": np.ones(len(positions), np.int64), "position_ids": positions}
    with refused("unusable-data", match="example 0, column 'position_ids': found positions that restart"):
        autopack.pack([example], 1 << 17)


@pytest.mark.parametrize(
    ("change", "options", "words"),
    [
        ({"input_ids": None}, {}, "column 'input_ids'"),
        ({"input_ids": []}, {}, "example 1, column 'input_ids': found no tokens"),
        ({"input_ids": [1.5]}, {}, "list of ints"),
        ({"extra": [1]}, {}, "column 'extra': found 1 values for 3 tokens"),
        ({"attention_mask": [1, 0, 1]}, {}, "example 1, column 'attention_mask': found a zero between ones"),
        ({"attention_mask": [1, 2, 2]}, {}, "segment ids"),
        ({"attention_mask": [0, 0, 0]}, {}, "example 1, column 'input_ids': found no tokens"),
        ({"position_ids": [0, 0, 1]}, {}, "example 1, column 'position_ids': found positions that restart"),
        ({"seq_lengths": [1, 2]}, {}, "packed rows"),
        ({"labels": [1, None, 2]}, {}, "example 1, column 'labels': found a token without a value"),
        ({"label": 1, "labels": [1, 2, 3]}, {}, "all are labels"),
        ({"input_ids": [1] * 30}, {}, "example [1] is 30, over the 10 tokens of a row; raise max_length"),
        ({"label": 1}, {"overflow": "split", "max_length": 2}, "'label' is one per document"),
        ({}, {"overflow": "drop", "max_length": 1}, "no document is left of 3"),
        ({}, {"drop_columns": ("none",)}, "found no column 'none'"),
    ],
)
@pytest.mark.parametrize("kind", ["list", "Dataset"])
def test_what_cannot_be_packed_is_refused_by_name(kind, change, options, words):
    plain: dict[str, Any] = {"input_ids": [1, 2, 3]}
    for name, value in change.items():
        if name != "input_ids":
            same = [1, 2, 3] if name in ("labels", "position_ids") else [1, 1, 1]
            plain[name] = value if not isinstance(value, list) else same
    made = [plain, {**plain, **change}, plain]
    with pytest.raises(InvalidPacking) as refusal:
        autopack.pack(made if kind == "list" else datasets.Dataset.from_list(made), **{"max_length": 10, **options})
    assert words in str(refusal.value)


def test_empty_data_and_data_of_other_kinds_are_refused():
    for empty in ([], datasets.Dataset.from_dict({"input_ids": []})):
        with refused("no-examples", match="empty"):
            autopack.pack(empty, 4)
    with refused("unusable-data", match="wanted a column 'input_ids', found \\['text'\\]"):
        autopack.pack(datasets.Dataset.from_dict({"text": ["a"]}), 4)
    with refused("unusable-data", match="example 1, column 'labels': not found, but example 0 has it"):
        autopack.pack([{"input_ids": [1], "labels": [1]}, {"input_ids": [1]}], 4)
    with refused("no-examples", match="found generator"):
        autopack.pack((e for e in examples()), 4)


def test_tensors_and_arrays_are_packed_as_lists_are():
    lists = [{"input_ids": [1, 2, 3], "kind": 1}, {"input_ids": [4, 5], "kind": 2}]
    wanted = autopack.pack(lists, 5)
    for form in (torch.tensor, np.array, lambda ids: torch.tensor([ids])):
        assert autopack.pack([{**e, "input_ids": form(e["input_ids"])} for e in lists], 5) == wanted


def test_what_is_cut_off_is_logged(caplog):
    with caplog.at_level(logging.WARNING, "autopack"):
        autopack.pack(examples(), 8, overflow="truncate")
    assert "truncated 1" in caplog.text


def written(packed: Any) -> set[str]:
    return {file["filename"] for file in packed.cache_files}


@pytest.mark.parametrize("on_disk", [False, True])
def test_rows_lie_in_a_file_that_the_same_arguments_find_again(on_disk, tmp_path, monkeypatch):
    dataset = datasets.Dataset.from_list(examples() * 20)
    if on_disk:
        dataset.save_to_disk(tmp_path / "d")
        dataset = datasets.load_from_disk(tmp_path / "d")
    first = autopack.pack(dataset, 10)
    (path,) = written(first)
    assert (Path(path).parent == tmp_path / "d") is on_disk
    changed = os.stat(path).st_mtime_ns
    assert written(autopack.pack(dataset, 10)) == {path}
    assert os.stat(path).st_mtime_ns == changed
    others = [{"seed": 1}, {"max_length": 12}, {"first_position": 2}, {"drop_columns": ("pair",)}]
    assert all(written(autopack.pack(dataset, **{"max_length": 10, **o})) != {path} for o in others)
    assert written(autopack.pack(dataset.select(range(50)), 10)) != {path}


def test_several_processes_write_the_rows_that_one_writes(tmp_path, monkeypatch):
    monkeypatch.setattr("autopack.packing.rows.BLOCK", 40)
    datasets.Dataset.from_list(examples() * 3).save_to_disk(tmp_path / "d")
    dataset = datasets.load_from_disk(tmp_path / "d")
    alone = autopack.pack(dataset, 10)[:]
    for path in written(autopack.pack(dataset, 10)):
        os.remove(path)
    both = autopack.pack(dataset, 10, num_proc=2)
    assert len(written(both)) == 2
    assert both[:] == alone
    assert written(autopack.pack(dataset, 10, num_proc=2)) == written(both)


def problems(count: int, seed: int = 0) -> list[dict[str, list[int]]]:
    """Text like GSM8K's, as bytes: a question, an answer that is worked out, and labels on the answer alone."""
    rng, made = np.random.default_rng(seed), []
    for _ in range(count):
        name, thing = rng.choice(["Natalia", "Ken", "Weng"]), rng.choice(["clips", "apples", "books"])
        numbers = rng.integers(2, 90, rng.integers(1, 5))
        question = f"{name} sold {' and then '.join(f'{n} {thing}' for n in numbers)}. How many? "
        sums = [f"{'+'.join(map(str, numbers[: i + 1]))}={numbers[: i + 1].sum()}" for i in range(len(numbers))]
        answer = f"{' '.join(f'<<{s}>>' for s in sums)} #### {numbers.sum()}"
        ids = [min(b, 127) % 64 for b in (question + answer).encode()]
        made.append({"input_ids": ids, "labels": [-100] * len(question) + ids[len(question) :]})
    return made


def train(model: Any, batches: Any, count: int) -> tuple[float, list[torch.Tensor]]:
    """The mean loss over all targets of these batches, and its gradients."""
    total = 0.0
    for batch in batches:
        loss = model(**batch, use_cache=False, num_items_in_batch=count).loss
        loss.backward()
        total += loss.item()
    return total, gradients(model)


def test_packed_rows_of_real_text_train_as_the_documents_do_alone():
    made = problems(24)
    rows = autopack.pack(datasets.Dataset.from_list(made), 512)
    assert len(rows) <= 12
    count = sum(label != -100 for document in made for label in document["labels"])
    tensors = [{k: torch.tensor([v]) for k, v in document.items()} for document in made]
    wanted, expected = train(llama(), tensors, count)
    alone = {tuple(d["input_ids"][0].tolist()): llama()(**d, use_cache=False).logits[0] for d in tensors}
    model = llama()
    autopack.enable(model)
    loader = torch.utils.data.DataLoader(rows, batch_size=2, collate_fn=PackingCollator())
    loss, found = train(model, loader, count)
    # The loss of stock is float32, whatever the model is.
    assert loss == pytest.approx(wanted, rel=1e-6)
    assert gradient_error(found, expected) < 1e-5
    for row in rows:
        logits = model(**{k: torch.tensor([row[k]]) for k in ("input_ids", "position_ids")}, use_cache=False).logits[0]
        for ids, part in zip(pieces(row, "input_ids"), logits.split(row["seq_lengths"]), strict=True):
            assert error(part, alone[tuple(ids)]) < FLOAT64
    # As one document, without what tells documents apart, the same row leaks.
    packed = torch.tensor([rows[0]["input_ids"]])
    second = slice(rows[0]["seq_lengths"][0], sum(rows[0]["seq_lengths"][:2]))
    leaked = llama()(input_ids=packed, use_cache=False).logits[0, second]
    assert error(leaked, alone[tuple(packed[0, second].tolist())]) > LEAK


def sft_trainer(**options: Any) -> Any:
    """TRL's trainer, which takes rows that are tokenized and packed as they are."""
    trl = pytest.importorskip("trl")
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {f"t{i}": i for i in range(64)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="t0")), pad_token="t0", eos_token="t1"
    )
    settings = options.pop("args").to_dict()
    names = ("output_dir", "max_steps", "per_device_train_batch_size", "gradient_accumulation_steps", "optim")
    names += ("learning_rate", "lr_scheduler_type", "max_grad_norm", "logging_steps", "report_to", "use_cpu")
    names += ("disable_tqdm", "save_strategy", "dataloader_pin_memory")
    args = trl.SFTConfig(**{n: settings[n] for n in names}, max_length=None, bf16=False)
    return trl.SFTTrainer(args=args, processing_class=tokenizer, **options)


@pytest.mark.parametrize("columns", ["all", "those of the model", "those of TRL"])
def test_trainers_take_packed_rows_and_their_steps_are_those_of_the_documents(columns, tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    made = problems(8)
    rows = autopack.pack(datasets.Dataset.from_list(made), 512)
    count = sum(label != -100 for document in made for label in document["labels"])
    wanted, expected = train(llama(), [{k: torch.tensor([v]) for k, v in d.items()} for d in made], count)
    model = llama()
    before = [p.detach().clone() for p in model.parameters()]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=1,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=len(rows),
        optim="sgd",  # a step of rate 1 is the gradient itself
        learning_rate=1.0,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
        dataloader_pin_memory=False,
        remove_unused_columns=columns != "all",
    )
    make = sft_trainer if columns == "those of TRL" else transformers.Trainer
    trainer = make(model=model, args=arguments, train_dataset=rows, data_collator=PackingCollator())
    autopack.enable(trainer)
    trainer.train()
    found = [b - p.detach() for b, p in zip(before, model.parameters(), strict=True)]
    assert trainer.state.log_history[0]["loss"] == pytest.approx(wanted, rel=1e-4)  # as logged
    assert gradient_error(found, expected) < 1e-5


def test_classes_of_documents_come_out_one_per_document_in_every_row():
    made = [{"input_ids": list(range(1, n + 1)), "label": n % 2, "target": 0} for n in (5, 3, 2, 6)]
    rows = autopack.pack(made, 6, drop_columns=("target",))
    assert {len(row["seq_lengths"]) for row in rows} >= {1}
    for drop in ((), ("seq_lengths",)):  # a trainer keeps only what the model's forward names
        batch = PackingCollator(drop_keys=drop)(rows)
        assert batch["labels"].tolist() == [n % 2 for row in rows for n in row["seq_lengths"]]
    scores = [{"input_ids": e["input_ids"], "labels": float(e["label"])} for e in made]
    batch = PackingCollator()(autopack.pack(scores, 6))
    assert batch["labels"].dtype == torch.float32
    assert batch["labels"].shape == (4,)


def test_weights_of_rows_are_those_of_their_documents():
    made = problems(12)
    for weight in (None, 2.5):
        documents = made if weight is None else [{**d, "document_weight": weight} for d in made]
        batch = PackingCollator(loss_weights="document")(autopack.pack(documents, 512))
        assert batch["loss_weights"].sum().item() == pytest.approx(12 * (weight or 1), rel=1e-6)  # float32
    rows = autopack.pack([{"input_ids": d["input_ids"]} for d in made], 512)
    weights = PackingCollator(loss_weights="token")(rows)["loss_weights"]
    assert weights.sum() == sum(len(d["input_ids"]) - 1 for d in made)


def test_masks_of_targets_become_labels():
    made = [{"input_ids": [5, 6, 7], "completion_mask": [0, 1, 1]}, {"input_ids": [8, 9], "completion_mask": [0, 1]}]
    (row,) = autopack.pack(made, 5, "sequential")
    assert row["labels"] == [-100, 6, 7, -100, 9]
    assert "completion_mask" not in row
    (row,) = autopack.pack([{**each, "labels": each["input_ids"]} for each in made], 5, "sequential")
    assert (row["labels"], row["completion_mask"]) == ([-100, 6, 7, -100, 9], [0, 1, 1, 0, 1])
