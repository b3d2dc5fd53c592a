"""Documents that begin alike share rows, in which their beginning counts once; and such rows train
as documents do."""

from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import autopack
from autopack import PackingCollator
from autopack.packing import CostModel, pack, plan
from tests.packing.batches import KINDS, documents_of, of_kind, rows_of
from tests.prefixes.test_packed_rows import agree
from tests.support.padded import build, twins
from tests.support.refusals import refused

WHOLE = ("best_fit", "sequential")


def grouped(count=120, seed=0):
    """Lengths of documents in groups of many sizes, some in none, and how much each group begins
    with in common."""
    draw = np.random.default_rng(seed)
    groups = draw.integers(-1, 12, count)
    common = draw.integers(16, 90, 13)
    prefixes = np.where(groups < 0, 0, common[groups])
    return {
        "lengths": prefixes + draw.integers(1, 60, count),
        "groups": groups,
        "prefixes": prefixes,
    }


class TestPlans:
    @pytest.mark.parametrize("strategy", WHOLE)
    @given(
        st.integers(0, 99),
        st.integers(1, 60),
        st.sampled_from([150, 400, 2000]),
        st.sampled_from([1, 3]),
    )
    @settings(max_examples=25, deadline=None)
    def test_every_document_once_and_beginnings_once(
        self, strategy, seed, count, max_length, ranks
    ):
        given = grouped(count, seed)
        made = plan(**given, max_length=max_length, strategy=strategy, ranks=ranks, seed=seed)
        assert sorted(made.documents.tolist()) == list(range(count))
        assert (made.lengths == given["lengths"][made.documents]).all()
        assert (made.columns_per_row <= max_length).all()
        groups, prefixes = given["groups"], given["prefixes"]
        for row in range(len(made)):
            pieces = made.pieces(row)
            documents, lengths = made.documents[pieces], made.lengths[pieces]
            total = int(lengths.sum())  # with what a group begins with counted once
            for group in set(groups[documents]) - {-1}:
                of_group = groups[documents] == group
                common = min(prefixes[documents[of_group]][0], lengths[of_group].min())
                total -= (of_group.sum() - 1) * common
            # A group that needs several rows may have two parts in one: those could share more than
            # was planned for.
            assert total <= made.columns_per_row[row]
        if max_length == 2000 and ranks == 1:  # room for any group
            rows_of = [set(given["groups"][row]) - {-1} for row in made]
            assert sum(map(len, rows_of)) == len(set(given["groups"].tolist()) - {-1})

    def test_fewer_rows_and_costs_count_once(self):
        given = grouped()
        apart, together = plan(given["lengths"], 400), plan(**given, max_length=400)
        assert len(together) < 0.8 * len(apart)
        cost = CostModel(1, 0)
        assert together.costs(cost).sum() == together.columns_per_row.sum()
        assert together.costs(cost).sum() + together.shared.sum() == apart.costs(cost).sum()
        squares = given["lengths"][together.documents] ** 2 - together.shared**2
        assert together.costs(CostModel(0, 1)).sum() == squares.sum()
        assert together.fill > 0.9
        assert together.padding == len(together) * 400 - together.columns_per_row.sum()
        assert "that others begin with as well" in repr(together)

    def test_too_long(self):
        groups = {"groups": [0, 0, 0], "prefixes": [40, 40, 40]}
        with refused("does-not-fit", match="is 120, over the 100 tokens of a row"):
            plan([50, 120, 60], 100, **groups)
        for overflow, left in (("drop", [50, 60]), ("truncate", [50, 60, 100])):
            assert (
                sorted(plan([50, 120, 60], 100, **groups, overflow=overflow).lengths.tolist())
                == left
            )
        # the prefix is all there is
        equal = plan([100, 100, 100], 100, groups=[0] * 3, prefixes=[100] * 3)
        assert len(equal) == 1 or (equal.columns_per_row <= 100).all()


def completions(prompts=6):
    """Completions of prompts, in random order, and documents by themselves."""
    draw = np.random.default_rng(0)

    def tokens(least, most):
        return draw.integers(2, 100, int(draw.integers(least, most))).tolist()

    found = []
    for number in range(prompts):
        prompt = tokens(20, 60)
        for _ in range(int(draw.integers(1, 7))):
            rest = tokens(1, 30)
            labels = [-100] * len(prompt) + rest
            found.append({"input_ids": prompt + rest, "labels": labels, "prompt": f"p{number}"})
    for ids in (tokens(9, 10), tokens(40, 41)):
        found.append({"input_ids": ids, "labels": ids, "prompt": None})
    return [found[index] for index in draw.permutation(len(found))]


@pytest.mark.parametrize("kind", KINDS)
class TestRows:
    @pytest.mark.parametrize("groups", [True, "prompt"])
    def test_they_hold_more_than_they_compute(self, groups, kind):
        given = completions(12)
        drop = () if groups == "prompt" else ("prompt",)
        rows, apart = (
            list(pack(of_kind(given, kind), 200, groups=g, drop_columns=drop))
            for g in (groups, False)
        )
        assert sorted(documents_of(rows)) == sorted(each["input_ids"] for each in given)
        assert len(rows) < len(apart)
        assert max(len(row["input_ids"]) for row in rows) > 200
        assert not any("prompt" in row for row in rows), "the column of groups is left out"


class TestPackedData:
    def test_a_model_computes_as_many_as_planned(self):
        stock, model = twins(build("llama").eval())
        rows = pack(completions(12), 200, groups="prompt", drop_columns=())
        collator = PackingCollator()
        with autopack.enable(model) as handle:
            for row in rows:
                before = handle.tally.training.columns
                agree(stock, model, collator([row]))
                assert handle.tally.training.columns - before <= 200
            assert handle.tally.training.shared > 300


GROUP = {"prompt_ids": [3, 4], "completion_ids": [[9], [2, 2]], "advantages": [0.1, 0.2]}
OF_GROUP = [([3, 4, 9], [9], 0.1), ([3, 4, 2, 2], [2, 2], 0.2)]
PAIR = {"prompt_ids": [3, 4], "chosen_ids": np.array([11]), "rejected_ids": torch.tensor([12, 13])}


class TestCollator:
    @pytest.mark.parametrize(
        ("example", "advantages", "wanted"),
        [
            *rows_of("completions"),
            (PAIR, [1, 2], [([3, 4, 11], [11], 1), ([3, 4, 12, 13], [12, 13], 2)]),
        ],
    )
    def test_any_batch_of_completions_and_plain_examples(self, example, advantages, wanted):
        """Documents, the targets of each, and its advantage."""
        for order in (1, -1):
            batch = PackingCollator(labels="completions")(
                [{**example, "advantages": advantages}, GROUP][::order]
            )
            documents, targets, numbers = zip(
                *(wanted + OF_GROUP if order == 1 else OF_GROUP + wanted), strict=True
            )
            assert batch["input_ids"][0].tolist() == [*chain(*documents)]
            assert batch["position_ids"][0].tolist() == [*chain(*map(range, map(len, documents)))]
            assert [label for label in batch["labels"][0].tolist() if label != -100] == [
                *chain(*targets)
            ]
            assert batch["completion_mask"].shape == batch["input_ids"].shape
            assert batch["advantages"].tolist() == pytest.approx(numbers)

    @pytest.mark.parametrize(("example", "message"), rows_of("refused completions"))
    def test_what_is_refused(self, example, message):
        with refused("unusable-data", match=message):
            PackingCollator(labels="completions")([example])
