"""A step that is cut anew has the loss and the gradient norm of the step as it was, or is
refused."""

from itertools import pairwise

import pytest
import torch
from transformers import Trainer

import autopack
from autopack import tiny
from autopack.errors import InvalidPacking, UnsupportedModel
from tests.steps.steps_of import (
    DOCUMENTS,
    MOST,
    classes,
    on_the_left,
    packed,
    pairs,
    texts,
    trained,
    trainer,
)
from tests.support.dpo import preferences
from tests.support.trained import losses_of

_TOLERANCE = 1e-5
"""Of float32: sums in another order; norms of gradients of a few numbers are rounded more than
losses."""

CASES = {
    "text": ("llama", texts, {}),
    "a recurrence": ("mamba2", texts, {}),
    "routed": ("mixtral", texts, {}),
    "padding on the left": ("llama", on_the_left, {}),
    "packed rows": ("llama", packed, {"batch": 3}),
    "label smoothing": ("llama", texts, {"label_smoothing_factor": 0.1}),
    "one batch a step": ("llama", texts, {"accumulate": 1}),
    "the end of an epoch": ("llama", texts, {"batch": 7, "accumulate": 3, "steps": 8}),
    "classes of documents": ("bert", classes, {"task": "sequence-classification"}),
    "classes at the end of an epoch": (
        "bert",
        classes,
        {"task": "sequence-classification", "batch": 7, "accumulate": 3, "steps": 8},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_are_those_of_the_step_as_it_was(case):
    model_type, collate, settings = CASES[case]
    wanted, tokens = trained(trainer(model_type, collate, **settings))
    made = trainer(model_type, collate, **settings)
    found, counted = trained(made, MOST)
    torch.testing.assert_close(found, wanted, rtol=_TOLERANCE, atol=0)
    assert counted == tokens
    # The control: the forwards are others than those of the batches.
    cut = made.training_step.__self__
    assert cut.steps == len(wanted)
    assert cut.tokens / cut.micro_batches <= MOST


def test_in_float64_gradients_are_the_same_to_twelve_digits():
    made = [trainer("bert", classes, task="sequence-classification") for _ in range(2)]
    for each in made:
        each.model.double()
    (wanted, _), (found, _) = trained(made[0]), trained(made[1], MOST)
    torch.testing.assert_close(found[:, 1], wanted[:, 1], rtol=1e-12, atol=0)
    # the Trainer adds them up in float32
    torch.testing.assert_close(found[:, 0], wanted[:, 0], rtol=2e-7, atol=0)


class _Negatives(Trainer):
    """Compares the documents of a batch with one another."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        states = model(**inputs, output_hidden_states=True).hidden_states[-1].mean(1)
        return torch.nn.functional.cross_entropy(states @ states.T, torch.arange(len(states)))


class _Weighted(Trainer):
    """Weighs classes: a mean over the weights of a batch, which is that of documents where they are
    of one class."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        weights = torch.tensor([1.0, 3.0])
        return torch.nn.functional.cross_entropy(model(**inputs).logits, labels, weight=weights)


def _apart(outputs):
    return outputs.logits[:, :2].flatten(1).std(0, unbiased=False).sum()


class _InTraining(Trainer):
    """Compares documents in training alone."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs, num_items_in_batch=num_items_in_batch)
        return outputs.loss + model.training * _apart(outputs)


class _Later(Trainer):
    """Begins to compare documents after three steps."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs, num_items_in_batch=num_items_in_batch)
        return outputs.loss + (self.state.global_step >= 3) * _apart(outputs)


class _OfTokens(Trainer):
    """Takes a mean over targets of another name."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model(**{**inputs, "labels": inputs["input_ids"]}).loss


class _Pairs(Trainer):
    """Takes an even number of documents alone."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        half = len(inputs["input_ids"]) // 2
        one, other = torch.split(model(**inputs).logits[:, 0, 0], half)
        return -torch.nn.functional.logsigmoid(one - other).mean()


class _Buffered(Trainer):
    def _prepare_inputs(self, inputs):
        return super()._prepare_inputs(inputs)


def _with_pictures(examples):
    return {**texts(examples), "pixel_values": torch.zeros(2 * len(examples), 3, 8, 8)}


def _without_labels(examples):
    return {name: value for name, value in texts(examples).items() if name != "labels"}


REFUSED = {
    "a mean over targets": ("bert", texts, {"task": "masked-lm"}, "step-not-cut"),
    "a mean over targets of pairs": ("t5", pairs, {"task": "seq2seq"}, "step-not-cut"),
    "documents that are compared": ("llama", texts, {"kind": _Negatives}, "step-not-cut"),
    "classes that are weighed": (
        "bert",
        classes,
        {"task": "sequence-classification", "kind": _Weighted},
        "step-not-cut",
    ),
    "documents that are compared in training": (
        "llama",
        texts,
        {"kind": _InTraining},
        "step-not-cut",
    ),
    "a mean over targets of another name": (
        "llama",
        _without_labels,
        {"kind": _OfTokens},
        "step-not-cut",
    ),
    "documents that come in twos": ("llama", texts, {"kind": _Pairs}, "step-not-cut"),
    "batches of the trainer's own": ("llama", texts, {"kind": _Buffered}, "step-not-cut"),
    "columns that are counted": ("gpt2", on_the_left, {}, "step-not-cut"),
    "pictures": ("llama", _with_pictures, {}, "batch-not-cut"),
    "a column of no unit": (
        "llama",
        lambda each: {**texts(each), "more": torch.zeros(9, 2)},
        {},
        "batch-not-cut",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_depends_on_the_batch_is_refused_before_anything_is_learned(case):
    model_type, collate, settings, code = REFUSED[case]
    made = trainer(model_type, collate, **settings)
    before = {name: value.clone() for name, value in made.model.state_dict().items()}
    with pytest.raises((UnsupportedModel, InvalidPacking)) as error:
        trained(made, MOST)
    assert error.value.code == code
    assert all(torch.equal(value, before[name]) for name, value in made.model.state_dict().items())


def test_a_loss_that_begins_to_compare_documents_is_refused_at_the_next_step_that_is_tried():
    made = trainer("llama", texts, kind=_Later, steps=9)
    with pytest.raises(UnsupportedModel) as error:
        trained(made, MOST)
    assert error.value.code == "step-not-cut"
    assert made.state.global_step == 3


@pytest.mark.parametrize(("loss", "served"), [("sigmoid", True), ("aot", False), ("sft", False)])
def test_pairs_of_dpo_stay_together_or_are_refused(tmp_path, loss, served):
    def made(folder):
        torch.manual_seed(0)
        return preferences(
            folder,
            tiny.build("llama"),
            loss_type=[loss],
            logging_steps=1,
            gradient_accumulation_steps=3,
        )

    if not served:
        with pytest.raises(UnsupportedModel) as error:
            autopack.enable(made(tmp_path), max_tokens=MOST)
        assert error.value.code == "step-not-cut"
        return
    wanted, found = trained(made(tmp_path / "1"))[0], trained(made(tmp_path / "2"), MOST)[0]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


def test_training_resumes_in_the_middle_of_an_epoch(tmp_path):
    settings = {"steps": 4, "save_steps": 2, "save_strategy": "steps"}
    made = trainer("llama", texts, **settings)
    wanted, _ = trained(made, MOST)
    again = trainer("llama", texts, **settings)
    autopack.enable(again, max_tokens=MOST)
    again.train(resume_from_checkpoint=f"{made.args.output_dir}/checkpoint-2")
    assert losses_of(again) == pytest.approx(wanted[:, 0].tolist(), rel=_TOLERANCE)


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_an_exception_in_a_micro_batch_leaves_no_gradient(kind):
    made = trainer("llama", texts)
    autopack.enable(made, max_tokens=MOST)
    cut = made.training_step.__self__
    held = []

    def fail(model, _):
        held.append(any(each.grad is not None for each in model.parameters()))
        if cut.steps == 2 and held[-1]:
            raise kind("in the middle")

    hook = made.model.register_forward_pre_hook(fail)
    with pytest.raises(kind, match="in the middle"):
        made.train()
    hook.remove()
    assert held[-1]  # the control: micro-batches before it had left gradients
    assert all(each.grad is None for each in made.model.parameters())
    # Training goes on from the weights of the second step.
    other = trainer("llama", texts)
    other.model.load_state_dict(made.model.state_dict())
    wanted, found = trained(other)[0], trained(made, MOST)[0]
    torch.testing.assert_close(found[-6], wanted[0], rtol=_TOLERANCE, atol=0)


def test_disable_gives_the_trainer_its_step_back():
    made = trainer("llama", texts)
    own = made.training_step
    handle = autopack.enable(made, max_tokens=MOST)
    assert f"max_tokens={MOST}, no step so far" in repr(handle)
    with pytest.raises(ValueError, match="max_tokens=64"):
        autopack.enable(made, max_tokens=2 * MOST)
    assert repr(autopack.enable(made, max_tokens=MOST)) == repr(handle)
    handle.remove()
    assert made.training_step == own
    assert not {"training_step", "get_batch_samples", "compute_loss"} & vars(made).keys()


def _itself(made):
    return made


def _model_of(made):
    return made.model


@pytest.mark.parametrize(
    ("of", "most", "said"),
    [
        *((_itself, most, "max_tokens=") for most in (0, True, "many")),
        (_itself, "auto", "Give a number of tokens"),  # a CPU does not say what fits
        (_model_of, MOST, "Pass the trainer"),
    ],
)
def test_a_budget_is_a_number_of_tokens_for_a_trainer(of, most, said):
    made = trainer("llama", texts)
    with pytest.raises(ValueError, match=said):
        autopack.enable(of(made), max_tokens=most)
    assert not autopack.is_enabled(made)


@pytest.mark.parametrize(
    "collate",
    [texts, packed, autopack.PackingCollator(declare=("seq_idx",))],
    ids=["texts", "packed", "seq_idx"],
)
def test_micro_batches_of_a_loop_of_ones_own(collate):
    model = trainer("llama", texts).model
    # the last one declares a single document
    batches = [collate(DOCUMENTS[a:b]) for a, b in pairwise((0, 4, 8, 15, 16))]
    items = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
    autopack.enable(model)

    def gradients(parts):
        model.zero_grad()
        for part in parts:
            model(**part, num_items_in_batch=items).loss.backward()
        return [each.grad.clone() for each in model.parameters() if each.grad is not None]

    cut = list(autopack.micro_batches(batches, MOST, model=model))
    assert len(cut) > 1
    assert all(int(each["attention_mask"].sum()) <= MOST for each in cut)
    torch.testing.assert_close(gradients(cut), gradients(batches), rtol=1e-4, atol=1e-7)


def test_a_step_without_batches_is_refused():
    with pytest.raises(InvalidPacking) as error:
        list(autopack.micro_batches([], MOST))
    assert error.value.code == "batch-not-cut"


def test_logs_and_the_handle_say_how_steps_were_cut():
    made = trainer("llama", texts)
    handle = autopack.enable(made, max_tokens=MOST)
    trained(made, MOST)
    logged = [each for each in made.state.log_history if "autopack/micro_batches" in each]
    assert len(logged) == 6
    assert all(
        each["autopack/slowest_rank"] == 1.0 < each["autopack/micro_batches"] for each in logged
    )
    assert f"{made.training_step.__self__}" in repr(handle)


class _Counted:
    """Memory of a device that takes so many bytes a token, and holds more from the second step
    on."""

    _OF_A_TOKEN, _OF_STATES = 1000, 50_000
    held, steps = 10_000, 0

    def reset_peak_memory_stats(self, device):
        self.held += self._OF_STATES * (self.steps == 1)
        self.steps += 1
        self.longest = 0

    def memory_allocated(self, device):
        return self.held

    def max_memory_allocated(self, device):
        return self.held + self._OF_A_TOKEN * self.longest

    def mem_get_info(self, device):
        return 100_000, 500_000

    def memory_reserved(self, device):
        return 200_000


def test_what_fits_is_measured_in_the_second_step(monkeypatch):
    memory = _Counted()
    monkeypatch.setattr(torch, "get_device_module", lambda device: memory)
    wanted, _ = trained(trainer("llama", texts))
    sizes = []

    def noting(examples):
        batch = texts(examples)
        sizes.append(batch["input_ids"].numel())
        return batch

    made = trainer("llama", noting)
    autopack.enable(made, max_tokens="auto")
    cut = made.training_step.__self__
    widths, limits = [], []

    def noted(model, args, kwargs):
        if model.training and torch.is_grad_enabled():
            widths.append(int(kwargs["attention_mask"].sum()))
            limits.append(cut.max_tokens)
            memory.longest = max(memory.longest, widths[-1])

    made.model.register_forward_pre_hook(noted, with_kwargs=True)
    found, _ = trained(made, None)
    torch.testing.assert_close(found, wanted, rtol=_TOLERANCE, atol=0)
    assert cut.max_tokens == (0.8 * 300_000 - 60_000) // 1000
    assert limits[0] == max(sizes[:4])
    assert (
        max(width for width, limit in zip(widths, limits, strict=True) if limit == cut.max_tokens)
        > 100
    )
    assert "max_tokens=180 (auto)" in repr(cut)
