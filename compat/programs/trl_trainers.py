"""TRL: its trainers with their defaults (gradient checkpointing is one of them), and its experimental ones.

All but bf16, which TRL turns on: what it rounds differs by more than 1e-5 between rows of another order. Rewards of
generated texts are functions of their lengths and words. What ORPO, CPO and online DPO log of all columns, padding too,
is not compared, as there is nothing at padding; nor is the share of pairs whose chosen answer has the larger
reward, where both rewards are zero in the first step but for rounding.
"""

from __future__ import annotations

import importlib
import random
import sys
from pathlib import Path
from typing import Any

from compat.programs._drivers import write_logs
from compat.programs._words import save_model, text

NAME = "TRL"
PACKAGE = "trl"
STAND_INS = ()
_ONLINE = {"num_generations": 4, "max_completion_length": 16}
_STUDENT = {"trainer": "experimental.gkd.GKD", "data": "messages", "teacher": True, "max_new_tokens": 8}
RUNS: dict[str, dict[str, Any]] = {
    "SFT": {"trainer": "SFT", "data": "texts"},
    "SFT, packing": {"trainer": "SFT", "data": "texts", "packing": True, "max_length": 64},
    "SFT, packing, wrapped": {
        "trainer": "SFT",
        "data": "texts",
        "packing": True,
        "max_length": 64,
        "packing_strategy": "wrapped",
    },
    "SFT, padding-free": {"trainer": "SFT", "data": "texts", "padding_free": True, "max_length": None},
    "SFT, prompts and completions": {"trainer": "SFT", "data": "completions"},
    "SFT, assistant only": {"trainer": "SFT", "data": "messages", "assistant_only_loss": True},
    "SFT, DFT loss": {"trainer": "SFT", "data": "completions", "loss_type": "dft"},
    "SFT, LoRA": {"trainer": "SFT", "data": "texts", "peft": True, "gradient_accumulation_steps": 2},
    "DPO": {"trainer": "DPO", "data": "pairs"},
    "DPO, IPO and SFT losses": {"trainer": "DPO", "data": "pairs", "loss_type": ["ipo", "sft"]},
    "DPO, reference computed before": {"trainer": "DPO", "data": "pairs", "precompute_ref_log_probs": True},
    "DPO, weighted, LD": {"trainer": "DPO", "data": "pairs", "use_weighting": True, "ld_alpha": 0.5},
    "DPO, LoRA": {"trainer": "DPO", "data": "pairs", "peft": True},
    "KTO": {"trainer": "KTO", "data": "wishes"},
    "KTO, BCO loss, LoRA": {"trainer": "KTO", "data": "wishes", "loss_type": "apo_zero_unpaired", "peft": True},
    "reward": {"trainer": "Reward", "data": "pairs"},
    "reward, LoRA": {"trainer": "Reward", "data": "pairs", "peft": True},
    "GRPO": {"trainer": "GRPO", "data": "prompts", **_ONLINE},
    "GRPO, two iterations, KL": {"trainer": "GRPO", "data": "prompts", **_ONLINE, "num_iterations": 2, "beta": 0.1},
    "RLOO": {"trainer": "RLOO", "data": "prompts", **_ONLINE},
    "distillation": {"trainer": "Distillation", "data": "messages", "teacher": True, "max_completion_length": 16},
    "ORPO": {"trainer": "experimental.orpo.ORPO", "data": "pairs"},
    "CPO": {"trainer": "experimental.cpo.CPO", "data": "pairs"},
    "SimPO": {"trainer": "experimental.cpo.CPO", "data": "pairs", "loss_type": "simpo", "cpo_alpha": 0.0},
    "online DPO": {"trainer": "experimental.online_dpo.OnlineDPO", "data": "prompts", "max_new_tokens": 8},
    "GKD": _STUDENT,
    "TPO": {"trainer": "experimental.tpo.TPO", "data": "triples"},
    "GMPO": {"trainer": "experimental.gmpo.GMPO", "data": "prompts", **_ONLINE},
    "script sft.py": {"script": "sft", "data": "texts"},
    "script dpo.py": {"script": "dpo", "data": "pairs"},
}
"""The trainer of each run, or TRL's own script, its data, and what it says to its configuration."""
APART: frozenset[str] = frozenset()
_OF_ALL_COLUMNS = {
    **dict.fromkeys(("ORPO", "CPO"), ("logits/",)),
    "OnlineDPO": ("objective/kl", "objective/entropy", "objective/non_score_reward", "objective/rlhf_reward"),
}
"""What trainers log of all columns, padding too; their losses do not read it."""
_TEMPLATE = (
    "{% for one in messages %}{% if one['role'] == 'assistant' %}Assistant: "
    "{% generation %}{{ one['content'] }} </s>{% endgeneration %}{% else %}Human: {{ one['content'] }} {% endif %}"
    "{% endfor %}{% if add_generation_prompt %}Assistant: {% endif %}"
)
_ROWS = 32


def prepare(folder: Path) -> None:
    """Write a tiny Llama, a teacher for it, and their tokenizer with a template for messages."""
    from transformers import AutoTokenizer

    save_model(folder / "model", "llama")
    save_model(folder / "teacher", "llama", hidden_size=32)
    for name in ("model", "teacher"):
        tokenizer = AutoTokenizer.from_pretrained(folder / name)
        tokenizer.chat_template = _TEMPLATE
        tokenizer.save_pretrained(folder / name)
    for kind in (told["data"] for told in RUNS.values() if "script" in told):
        (folder / kind).mkdir()
        _data(kind).to_json(folder / kind / "train.jsonl")


def command(run: str, folder: Path, output: Path) -> list[str]:
    """This module, as a script; or a script of TRL's, with its options."""
    told = RUNS[run]
    if "script" not in told:
        return ["-m", "compat.programs.trl_trainers", run, str(folder), str(output)]
    options: dict[str, Any] = {
        "model_name_or_path": folder / "model",
        "dataset_name": folder / told["data"],
        "output_dir": output,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_steps": 8,
        "save_steps": 8,
        "logging_steps": 1,
        "learning_rate": 1e-3,
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "dtype": "float32",
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return ["-m", f"trl.scripts.{told['script']}", *words]


def train(run: str, folder: Path, output: Path) -> None:
    """Train one of the runs, and write what its trainer logged."""
    told = dict(RUNS[run])
    place, data = told.pop("trainer"), _data(told.pop("data"))
    adapted, taught = told.pop("peft", False), told.pop("teacher", False)
    module, _, name = place.rpartition(".")
    at = importlib.import_module(f"trl.{module}" if module else "trl")
    arguments = getattr(at, f"{name}Config")(
        output_dir=str(output),
        per_device_train_batch_size=4,
        max_steps=8,
        logging_steps=1,
        learning_rate=1e-3,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        **told,
    )
    if hasattr(arguments, "model_init_kwargs"):  # as it is saved: TRL makes float32 of it where nothing is said
        arguments.model_init_kwargs = {**(arguments.model_init_kwargs or {}), "dtype": "auto"}
    more: dict[str, Any] = {"reward_funcs": _reward} if "prompt" in data.column_names and len(data[0]) == 1 else {}
    if adapted:
        import peft

        kind = "SEQ_CLS" if name == "Reward" else "CAUSAL_LM"
        more["peft_config"] = peft.LoraConfig(task_type=kind, lora_dropout=0.0)
    if taught:
        more["teacher_model"] = str(folder / "teacher")
    if name in ("ORPO", "CPO", "OnlineDPO", "GKD", "GMPO"):
        from transformers import AutoTokenizer

        more["processing_class"] = AutoTokenizer.from_pretrained(folder / "model")
    model: Any = str(folder / "model")
    if name in ("ORPO", "CPO", "OnlineDPO"):
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(model)
    trainer = getattr(at, f"{name}Trainer")(model=model, args=arguments, train_dataset=data, **more)
    trainer.train()
    left_out = () if name == "Reward" else ("accuracies", *_OF_ALL_COLUMNS.get(name, ()))
    write_logs(output, trainer.state.log_history, left_out)


def _data(kind: str) -> Any:
    from datasets import Dataset

    draw = random.Random(0)

    def prompt() -> str:
        return text(draw, 12) + " "

    rows: list[dict[str, Any]] = []
    for number in range(_ROWS):
        asked, good, bad, other = prompt(), text(draw, 24), text(draw, 24), text(draw, 24)
        said = [{"role": "user", "content": asked}, {"role": "assistant", "content": good}]
        made: dict[str, dict[str, Any]] = {
            "texts": {"text": asked + good},
            "completions": {"prompt": asked, "completion": good},
            "messages": {"messages": said},
            "pairs": {"prompt": asked, "chosen": good, "rejected": bad},
            "triples": {"prompt": asked, "chosen": good, "rejected": bad, "reference": other},
            "wishes": {"prompt": asked, "completion": good, "label": number % 2 == 0},
            "prompts": {"prompt": asked},
        }
        rows.append(made[kind])
    return Dataset.from_list(rows)


def _reward(completions: list[str], **_: Any) -> list[float]:
    """How many words of a text have an even number, and a little for its length."""
    words = [[word for word in one.split() if word.startswith("w")] for one in completions]
    return [sum(int(word[1:]) % 2 == 0 for word in each) + 0.01 * len(each) for each in words]


if __name__ == "__main__":
    train(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
