"""Cases of two processes, each a function of the rank: losses and gradient norms with and without
`max_tokens`."""

import time

import torch
import torch.distributed as dist
from transformers import Trainer, TrainerCallback

import autopack
from tests.integration.ranks import fsdp2
from tests.steps.steps_of import DOCUMENTS, MOST, classes, texts, trained, trainer


def _both(*args, **settings):
    wanted = trained(trainer(*args, **settings))[0]
    made = trainer(*args, **settings)
    found = trained(made, MOST)[0]
    cut = made.training_step.__self__
    return {"wanted": wanted, "found": found, "tokens": cut.tokens, "slowest": cut.slowest}


def ddp(rank):
    return _both("llama", texts)


def one_batch_a_step(rank):
    return _both("llama", texts, accumulate=1)


def each_rank_counts_its_own(rank):
    return _both("llama", texts, average_tokens_across_devices=False)


def classes_of_documents(rank):
    return _both("bert", classes, task="sequence-classification")


def the_end_of_an_epoch(rank):
    return _both("llama", texts, batch=7, accumulate=3, steps=6)


def fully_sharded(rank):
    """A loop of its own over a model that FSDP2 has sharded, beside all batches on a whole
    model."""
    batches = [
        [texts(DOCUMENTS[first : first + 4]) for first in range(start, start + 16, 4)]
        for start in (0, 16)
    ]
    items = sum(int((each["labels"][:, 1:] != -100).sum()) for part in batches for each in part)
    whole, sharded = (trainer("llama", texts).model for _ in range(2))
    for each in (*batches[0], *batches[1]):
        whole(**each, num_items_in_batch=items).loss.backward()
    wrapped = fsdp2(sharded)
    autopack.enable(wrapped)
    parts = list(autopack.micro_batches(batches[rank], MOST, model=sharded))
    for part in parts:
        (wrapped(**part, num_items_in_batch=items).loss * dist.get_world_size()).backward()
    gradients = {name: each.grad.full_tensor() for name, each in wrapped.named_parameters()}
    wanted = {name: each.grad for name, each in whole.named_parameters()}
    worst = max(float((gradients[name] - wanted[name]).abs().max()) for name in wanted)
    return {
        "worst": worst,
        "largest": max(float(each.abs().max()) for each in wanted.values()),
        "count": len(parts),
    }


def a_rank_with_one_long_document(rank):
    """One rank begins with a document longer than the budget, the other with many short ones."""
    from autopack.steps.step import micro_batches

    lengths = [90] if rank == 0 else [5, 6, 7, 8, 9, 10]
    rows = [{"input_ids": list(range(5, 5 + length))} for length in lengths]
    cut = list(micro_batches([texts(rows)], 30))
    held = [part["input_ids"][part["labels"] != -100].tolist() for part in cut]
    return {"micro-batches": len(cut), "tokens": sum(map(len, held)), "most": max(map(len, held))}


def one_rank_that_cannot(rank):
    """A batch of one rank has a column of no unit: both ranks are refused, and none waits for the
    other."""

    def collate(examples):
        return {**texts(examples), "more": torch.zeros(9, 2)} if rank else texts(examples)

    try:
        trained(trainer("llama", collate), MOST)
    except autopack.AutopackError as error:
        return error.code
    return "served"


class _Raises(Trainer):
    """Cannot compute a loss on the second rank."""

    def compute_loss(self, *args, **kwargs):
        if dist.get_rank():
            raise RuntimeError("no loss on this rank")
        return super().compute_loss(*args, **kwargs)


def one_rank_whose_loss_raises(rank):
    try:
        trained(trainer("llama", texts, kind=_Raises), MOST)
    except autopack.AutopackError as error:
        return error.code
    return "served"


class _Written(TrainerCallback):
    """Writes how many steps there were."""

    def __init__(self, file):
        self.file = file

    def on_step_end(self, _, state, *__, **___):
        self.file.write_text(str(state.global_step))


def fails_in_the_middle(rank, folder):
    """The second rank raises in its second step, when it has gradients of a part of it."""
    made = trainer("llama", texts)
    if rank == 0:
        made.add_callback(_Written(folder / "steps"))
    autopack.enable(made, max_tokens=MOST)
    cut = made.training_step.__self__

    def fail(model, _):
        if (
            rank == 1
            and cut.steps == 1
            and any(each.grad is not None for each in model.parameters())
        ):
            while not (folder / "steps").exists():
                time.sleep(0.05)
            raise RuntimeError("in the middle")

    made.model.register_forward_pre_hook(fail)
    made.train()


CASES = {
    case.__name__: (case, None)
    for case in (
        ddp,
        one_batch_a_step,
        each_rank_counts_its_own,
        classes_of_documents,
        the_end_of_an_epoch,
        fully_sharded,
        a_rank_with_one_long_document,
        one_rank_that_cannot,
        one_rank_whose_loss_raises,
    )
}
