"""What `estimate` says about padding and packing, against sums over batches written out by hand."""

import json

import datasets
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import autopack
from autopack.cli import main
from autopack.errors import InvalidPacking
from tests.packing.batches import flan_like
from tests.support.refusals import refused

LENGTHS = [3, 9, 1, 4, 4, 7]


@given(st.lists(st.integers(1, 30), min_size=1, max_size=60), st.integers(1, 9))
@settings(max_examples=40)
def test_padding_and_cost_are_those_of_batches_put_together_one_by_one(lengths, batch_size):
    options = {
        "batch_sizes": (),
        "strategies": ("sequential",),
        "cost": autopack.packing.CostModel(1.0, 0.5),
    }
    found = autopack.estimate(lengths, 30, batch_size=batch_size, **options)
    random, grouped = found.padded
    order = np.random.default_rng(0).permutation(lengths).tolist()
    # as transformers' group_by_length
    megabatch = batch_size * max(1, min(len(order) // (batch_size * 4), 50))
    regrouped = [
        n
        for i in range(0, len(order), megabatch)
        for n in sorted(order[i : i + megabatch], reverse=True)
    ]
    for arm, documents in ((random, order), (grouped, regrouped)):
        batches = [documents[i : i + batch_size] for i in range(0, len(documents), batch_size)]
        assert arm.tokens == sum(len(b) * max(b) for b in batches)
        assert arm.pairs == sum(len(b) * max(b) ** 2 for b in batches)
        assert arm.padding == pytest.approx(1 - sum(lengths) / arm.tokens)
    assert found.baseline == random
    assert (found["mini-batch"].tokens, found["mini-batch"].padding) == (sum(lengths), 0)
    rows = autopack.packing.plan(lengths, 30, "sequential").tokens_per_row
    assert (found["sequential"].rows, found["sequential"].tokens) == (
        len(rows),
        len(rows) * max(rows),
    ), "padded to the longest"
    for arm in found.packed:
        assert arm.pairs == sum(n * n for n in lengths)
        assert arm.speedup == pytest.approx(random.cost / arm.cost)
        assert arm.tokens_saved == pytest.approx(1 - arm.tokens / random.tokens)
        assert arm.attention_saved == pytest.approx(1 - arm.pairs / random.pairs)
    assert all(arm.cost == arm.tokens + 0.5 * arm.pairs for arm in (*found.padded, *found.packed))


def test_grouping_by_length_is_that_of_transformers():
    from transformers.trainer_pt_utils import LengthGroupedSampler

    lengths = flan_like(4000)
    order = list(LengthGroupedSampler(batch_size=8, lengths=lengths.tolist()))
    theirs = lengths[order].reshape(-1, 8).max(1).sum() * 8
    found = autopack.estimate(lengths, batch_size=8, batch_sizes=(), strategies=())
    # Two random orders of the same 4000 documents.
    assert found.padded[1].tokens == pytest.approx(theirs, rel=0.02)


def test_rows_of_groups_count_what_their_documents_begin_with_once():
    prompt = list(range(10, 40))
    data = [{"input_ids": [*prompt, *[number] * 5]} for number in range(50, 56)]
    found = autopack.estimate(data, 64, groups=True)
    apart, together = found["best_fit"], found["best_fit, groups"]
    assert (apart.rows, apart.tokens) == (6, 6 * 35)
    assert (together.rows, together.tokens) == (1, 30 + 6 * 5)
    assert "what documents of one group begin with is computed once" in str(found)


@pytest.mark.parametrize(
    ("overflow", "kept", "said"),
    [
        ("truncate", [5, 3, 5], "2 truncated, 8 truncated tokens"),
        ("drop", [3], "2 dropped, 18 dropped tokens"),
        ("split", [5, 5, 2, 3, 5, 1], "2 split"),
    ],
)
def test_documents_longer_than_a_row_count_as_what_becomes_of_them(overflow, kept, said):
    found = autopack.estimate([12, 3, 6], 5, overflow=overflow)
    assert found.lengths.tolist() == kept
    assert found["mini-batch"].tokens == sum(kept)
    assert said in str(found)


class Words:
    """A tokenizer of words, whose template puts the role before each message."""

    def __call__(self, texts, add_special_tokens=True):
        return {"input_ids": [[1] * add_special_tokens + text.split() for text in texts]}

    def apply_chat_template(self, messages, tokenize):
        return "".join(f"{message['role']} {message['content']} " for message in messages)


def stored(examples, kind, folder):
    """The examples as a list, a dataset, or the path of a file or folder."""
    data, path = datasets.Dataset.from_list(examples), folder / f"examples.{kind}"
    if kind == "saved":
        path = folder / "saved"
        data.save_to_disk(path)
    elif kind == "jsonl":
        data.to_json(path)
    elif kind == "parquet":
        data.to_parquet(path)
    return {"list": examples, "Dataset": data}.get(kind, path)


def chat(count):
    return [{"role": "user", "content": "a " * count}, {"role": "assistant", "content": "c"}]


@pytest.mark.parametrize("kind", ["list", "Dataset", "saved", "jsonl", "parquet"])
@pytest.mark.parametrize(
    ("make", "column", "more"),
    [
        (lambda n: {"length": n}, None, 0),
        (lambda n: {"id": 1, "input_ids": [1] * n}, None, 0),
        (lambda n: {"input_ids": [1] * 9, "attention_mask": [0] * (9 - n) + [1] * n}, None, 0),
        (lambda n: {"text": "a " * n}, None, 1),
        (lambda n: {"messages": chat(n)}, None, 3),
        (lambda n: {"prompt": [4] * n, "completion": 7}, ["prompt", "completion"], 7),
    ],
)
def test_lengths_are_read_from_every_form(kind, make, column, more, tmp_path):
    """Texts have one special token each, and messages their roles."""
    data = stored([make(n) for n in LENGTHS], kind, tmp_path)
    found = autopack.estimate(data, column=column, tokenizer=Words() if more else None)
    assert found.lengths.tolist() == [n + more for n in LENGTHS]
    assert all(arm.tokens_saved >= 0 for arm in found.packed)


def test_bare_lengths_and_a_part_of_a_dataset_are_read(tmp_path):
    np.save(tmp_path / "l.npy", np.array(LENGTHS, np.int32))
    (tmp_path / "l.json").write_text(json.dumps(LENGTHS))
    (tmp_path / "columns.json").write_text(json.dumps({"lengths": LENGTHS}))
    (tmp_path / "l.jsonl").write_text("".join(f"{n}\n" for n in LENGTHS))
    files = [tmp_path / name for name in ("l.npy", "l.json", "columns.json", "l.jsonl")]
    part = datasets.Dataset.from_dict({"input_ids": [[1] * n for n in (99, *LENGTHS)]}).select(
        range(1, 7)
    )
    for data in (*files, part, np.array(LENGTHS)):
        assert autopack.estimate(data, 9, strategies=()).lengths.tolist() == LENGTHS, data


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("l.json", "[1, 0, 3]", "lengths[1] is 0"),
        ("l.json", "[]", "found none"),
        ("l.json", '{"length": 17}', "make no columns"),
        (
            "l.jsonl",
            '{"tokens": 3}',
            "found no column 'input_ids' or 'length' or 'lengths' or 'text' in ['tokens']",
        ),
        ("l.jsonl", '{"length": 3}\n{"n": 4}', "column 'length': values are missing (1)"),
        ("l.jsonl", '{"text": "a b"}', "name a tokenizer"),
        ("l.npy", "PK\x03\x04 no archive", "cannot be read as .npy"),
        ("l.csv", "1", "wanted one of .json, .jsonl, .npy, .parquet"),
        ("none.json", None, "no such file"),
        (
            "l.json",
            '[{"length": ["a", "b"]}]',
            "wanted lengths, lists of token ids, text, or messages",
        ),
        ("l.json", '[{"length": [1, null]}]', "values are missing"),
        ("l.json", '[{"text": [{"role": "user", "content": "a"}]}]', "name a tokenizer"),
        (
            "l.json",
            '[{"text": [{"role": "user", "content": [{"type": "image"}]}]}]',
            "wanted lengths",
        ),
    ],
)
def test_files_without_lengths_are_refused_by_name(name, content, words, tmp_path, capsys):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(InvalidPacking) as error:
        autopack.estimate(tmp_path / name)
    assert name in str(error.value)
    assert words in str(error.value)
    assert main(["estimate", str(tmp_path / name)]) == 2
    assert words in capsys.readouterr().err


def test_splits_streams_and_unknown_tokenizers_are_refused(tmp_path):
    dataset = datasets.Dataset.from_dict({"input_ids": [[1]]})
    with refused("no-examples", match="pass one split"):
        autopack.estimate(datasets.DatasetDict({"train": dataset}))
    with refused("no-examples", match="a sample of a stream"):
        autopack.estimate(dataset.to_iterable_dataset())
    with refused("tokenizer"):
        autopack.estimate([{"text": "a b"}], tokenizer=str(tmp_path))
    with pytest.raises(ValueError, match="batch_size=0"):
        autopack.estimate([1], batch_size=0)


def test_the_command_gives_json(tmp_path, capsys):
    (tmp_path / "l.json").write_text(json.dumps(LENGTHS))
    asked = f"estimate {tmp_path / 'l.json'} --json --max-length 10 --batch-size 6"
    assert main(asked.split()) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["baseline"]["tokens"] == 54
    assert {arm["name"] for arm in found["packed"]} >= {"mini-batch", "best_fit", "sequential"}


def test_steps_of_ranks_wait_for_the_slowest_one():
    lengths = [9, 1, 1, 1, 5, 3, 2, 2, 4]  # the last one is in no whole step
    order = np.random.default_rng(0).permutation(lengths).tolist()
    found = autopack.estimate(
        lengths,
        30,
        batch_size=2,
        max_tokens=12,
        ranks=2,
        accumulation=2,
        cost=autopack.packing.CostModel(1.0, 0.0),
    )
    batches = [order[start : start + 2] for start in range(0, 8, 2)]
    padded = max(sum(2 * max(each) for each in batches[rank : rank + 2]) for rank in (0, 2))
    packed = [sum(map(sum, batches[rank : rank + 2])) for rank in (0, 2)]
    even = sum(order[:8]) / 2
    names, speedups, slowest = zip(
        *((each.name, each.speedup, each.slowest) for each in found.steps), strict=True
    )
    assert names == ("padded", "mini-batch", "max_tokens")
    assert speedups[:2] == pytest.approx((1.0, padded / max(packed)))
    assert slowest[1] == pytest.approx(max(packed) / even)
    assert speedups[2] == pytest.approx(padded / np.ceil(even))
    assert "max_tokens" in str(found)
    assert not autopack.estimate(lengths, 30, batch_size=2).steps


def test_a_gpu_is_predicted_by_its_roofline_and_never_called_measured(tmp_path, capsys):
    hidden, layers = 4096, 32
    lengths = [4000, 96] * 50
    found = autopack.estimate(lengths, batch_size=2, batch_sizes=(), strategies=(), on="a100")
    padded, _, packed = found.predicted
    for arm, predicted in ((found.baseline, padded), (found["mini-batch"], packed)):
        operations = layers * (72 * hidden**2 * arm.tokens + 6 * hidden * arm.pairs)
        assert predicted.seconds == pytest.approx(
            operations / 312e12 + layers * hidden * arm.tokens * 480 / 2.039e12
        )
        assert predicted.bound_by == "arithmetic"
    assert packed.speedup == padded.seconds / packed.seconds > 1.5
    assert packed.tokens_per_second == sum(lengths) / packed.seconds

    short = {"batch_size": 1, "batch_sizes": (), "strategies": (), "on": "h100"}
    few = autopack.estimate([5] * 50, **short)
    assert {arm.bound_by for arm in few.predicted} == {"launches"}, (
        "the host starts 111 operations in each layer"
    )
    assert few.predicted[0].seconds == pytest.approx(50 * layers * 111 * 4e-6)
    wide = autopack.estimate(
        [5] * 50, cost=autopack.packing.CostModel(1, 1 / (12 * 65536)), **short
    )
    assert {arm.bound_by for arm in wide.predicted} == {"memory"}, (
        "five tokens do not repay reading the weights"
    )

    (tmp_path / "l.json").write_text(json.dumps(lengths))
    assert main(["estimate", str(tmp_path / "l.json"), "--on", "mi300x", "--batch-size", "2"]) == 0
    assert (
        "predicted, not measured: a transformer of hidden size 4,096 and 32 layers on one mi300x"
        in " ".join(capsys.readouterr().out.split())
    )
    with pytest.raises(ValueError, match="on='b200': wanted one of None, 'h100'"):
        autopack.estimate(lengths, on="b200")
    with pytest.raises(ValueError, match="wanted a cost model of a hidden size"):
        autopack.estimate(lengths, on="h100", cost=autopack.packing.CostModel(1, 0))
