"""Cases of two processes under DeepSpeed's ZeRO: losses and gradient norms with and without `max_tokens`."""

from functools import partial

from tests.steps.steps_of import MOST, texts, trained, trainer

ENGINE = {
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}


def _both(rank, stage, accumulate):
    make = partial(
        trainer,
        "llama",
        texts,
        accumulate=accumulate,
        optim="adamw_torch",
        deepspeed={**ENGINE, "zero_optimization": {"stage": stage}},
    )
    held = make()  # in force for ZeRO-3 as long as a Trainer has it; models that are made meanwhile begin otherwise
    wanted, _ = trained(make())
    made = make()
    found, _ = trained(made, MOST)
    cut = made.training_step.__self__
    del held
    return {"wanted": wanted, "found": found, "parts": cut.micro_batches / cut.steps, "slowest": cut.slowest}


CASES = {
    f"ZeRO-{stage}, accumulation {accumulate}": (partial(_both, stage=stage, accumulate=accumulate), None)
    for stage in (1, 2, 3)
    for accumulate in (1, 4)
}
