"""What is said of the packing that a trainer of TRL does by itself."""

import logging

import pytest

import autopack
from autopack import tiny
from tests.packing.batches import tokenizer
from tests.support.trained import QUIET

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


@pytest.fixture
def said(caplog):
    """What autopack has said."""
    caplog.set_level(logging.WARNING, "autopack")
    return lambda: [
        record.getMessage() for record in caplog.records if record.name.startswith("autopack")
    ]


def packing(path, strategy, **settings):
    """TRL's SFTTrainer, which packs texts of uneven length by a strategy of its own."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    texts = [" ".join(f"w{number}" for number in range(count)) for count in range(3, 27)]
    settings = {"packing": True, **settings}
    args = trl.SFTConfig(
        str(path),
        max_steps=4,
        packing_strategy=strategy,
        max_length=32,
        bf16=False,
        **QUIET,
        **settings,
    )
    data = datasets.Dataset.from_dict({"text": texts})
    return trl.SFTTrainer(
        tiny.build("llama"), args=args, train_dataset=data, processing_class=tokenizer()
    )


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(
    ("strategy", "settings", "cut"),
    [
        ("bfd", {}, False),
        ("bfd_split", {}, False),
        ("wrapped", {}, True),
        ("wrapped", {"packing": False}, False),
    ],
)
def test_packing_of_trl(tmp_path, said, strategy, settings, cut, whole):
    """Documents that it cuts are said to be lost, once; others are checked, and nothing is said."""
    run = packing(tmp_path, strategy, **settings)
    with autopack.enable(run if whole else run.model) as handle:
        run.train()
        shown = repr(handle)
    assert ["packing_strategy='wrapped'" in line for line in said()] == [True] * cut
    assert ("packing_strategy='wrapped'" in shown) == (cut and whole)
    assert "skipped" not in shown
    assert strategy == "wrapped" or "checks in 4 calls, worst" in shown
