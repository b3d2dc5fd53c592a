"""transformers.Trainer, unmodified: mini-batch packing takes the optimizer steps that padding
takes."""

import pytest
import torch

import autopack
from autopack import tiny
from tests.integration.documents import FLOAT32
from tests.integration.test_trainer_logs import pad
from tests.integration.test_trainer_logs import trainer as trainer_of
from tests.support.trained import losses_of, with_lora

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

STEPS = 5

ACCUMULATION = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
SETTINGS = {
    "plain": {},
    "accumulation": ACCUMULATION,
    "checkpointing": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
    },
    "reentrant checkpointing and accumulation": {
        **ACCUMULATION,
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
}


def _pad(examples):
    """A padded batch. First labels are masked because up to 4.x Trainer counts them among the
    targets."""
    batch = pad(examples)
    batch["labels"][:, 0] = -100
    return batch


def _build(model_type):
    return tiny.build(model_type, attn_implementation="sdpa" if model_type == "llama" else "eager")


def _accuracy(predictions):
    logits, labels = predictions
    return {
        "accuracy": float(
            (logits.argmax(-1)[:, :-1] == labels[:, 1:])[labels[:, 1:] != -100].mean()
        )
    }


def _train(model, collate, directory, **settings):
    """Logged losses, losses (and accuracies) of evaluations before and after, and the parameters at
    the end."""
    given = {"compute_metrics": settings.pop("compute_metrics", None)}
    batches = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 1,
        "logging_steps": 1,
    }
    trainer = trainer_of(
        directory,
        None,
        model,
        collate=collate,
        given=given,
        max_steps=STEPS,
        **{**batches, **settings},
    )
    before = trainer.evaluate()
    trainer.train()
    evaluated = [
        each[name]
        for each in (before, trainer.evaluate())
        for name in ("eval_loss", "eval_accuracy")
        if name in each
    ]
    return losses_of(trainer), evaluated, {name: p.detach() for name, p in model.named_parameters()}


def _adapted(model_type):
    return with_lora(_build(model_type), "all-linear", init_lora_weights=True)


def _flattening(**options):
    try:
        return transformers.DataCollatorWithFlattening(**options)
    except TypeError:
        pytest.skip("this transformers has no such option")


PADDED = {
    **SETTINGS,
    "label smoothing": {"label_smoothing_factor": 0.1},
    "metrics of predictions": {"compute_metrics": _accuracy},
}
COLLATORS = {
    "packed": autopack.PackingCollator,
    "flattened": _flattening,
    "flattened, flash kwargs": lambda: _flattening(return_flash_attn_kwargs=True),
    "flattened, seq_idx": lambda: _flattening(return_seq_idx=True),
    "padded": lambda: _pad,
}
CASES = [
    *(
        (kind, "packed", name, SETTINGS[name], _build)
        for kind in ("llama", "gpt_oss")
        for name in SETTINGS
    ),
    *(("gpt_oss", name, "plain", {}, _build) for name in COLLATORS if name.startswith("flattened")),
    *(("llama", "padded", name, settings, _build) for name, settings in PADDED.items()),
    (
        "llama",
        "packed",
        "compiled",
        {"torch_compile": True, "torch_compile_backend": "eager"},
        _build,
    ),
    ("llama", "packed", "LoRA", {"learning_rate": 1.0, **ACCUMULATION}, _adapted),
]


@pytest.mark.parametrize(
    ("model_type", "rows", "settings", "build"),
    [(kind, rows, settings, build) for kind, rows, _, settings, build in CASES],
    ids=[", ".join(case[:3]) for case in CASES],
)
def test_mini_batches_train_and_evaluate_as_padded_ones_on_stock_do(
    model_type, rows, settings, build, tmp_path
):
    collate, wanted = COLLATORS[rows](), _train(build(model_type), _pad, tmp_path, **settings)
    model = build(model_type)
    handle = autopack.enable(model)
    found = _train(model, collate, tmp_path, **settings)
    assert len(found[0]) == len(wanted[0]) == STEPS
    assert found[0] == pytest.approx(wanted[0], rel=1e-4)  # Trainer may log four digits only
    assert found[1] == pytest.approx(wanted[1], rel=FLOAT32)
    middle = len(wanted[1]) // 2
    assert abs(wanted[1][middle] - wanted[1][0]) > 10 * FLOAT32 * wanted[1][0], (
        "the steps must move the model"
    )
    for name, parameter in wanted[2].items():
        # Five steps of rate 0.1 on gradients of order 1, in float32.
        torch.testing.assert_close(found[2][name], parameter, atol=2e-5, rtol=1e-4)
    assert (handle.tally.padding > 0) == (rows == "padded")


def test_without_autopack_the_losses_of_packed_mini_batches_are_others(tmp_path):
    # Not llama: Trainer turns the cache off, and then 5.x keeps llama's documents apart by itself.
    wanted = _train(_build("gpt_oss"), _pad, tmp_path)
    found = _train(_build("gpt_oss"), autopack.PackingCollator(), tmp_path)
    assert (
        max(abs(a - b) for a, b in zip(found[0] + found[1], wanted[0] + wanted[1], strict=True))
        > 0.02
    )
