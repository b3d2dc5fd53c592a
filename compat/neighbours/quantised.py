"""Weights in few bits: torchao and bitsandbytes, on the CPU."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

from compat.neighbours.measure import AFTER, Scenario, llama, perturb, wrapping


def _torchao(config: str) -> Callable[[Any], Any]:
    def apply(model: Any) -> Any:
        from torchao import quantization

        quantization.quantize_(model, getattr(quantization, config)())
        return model

    return apply


def _bitsandbytes(**options: Any) -> Callable[[], Any]:
    """The tiny Llama, saved and loaded with `quantization_config`."""

    def build() -> Any:
        from transformers import AutoModelForCausalLM, BitsAndBytesConfig

        with tempfile.TemporaryDirectory() as folder:
            # Blocks of 64 weights have to fit into every row.
            llama(hidden_size=64, intermediate_size=128).save_pretrained(folder)
            return AutoModelForCausalLM.from_pretrained(
                folder,
                quantization_config=BitsAndBytesConfig(**options),
                device_map="cpu",
                attn_implementation="sdpa",
            )

    return build


def _qlora(model: Any) -> Any:
    import peft

    config = peft.LoraConfig(r=4, task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"])
    return perturb(peft.get_peft_model(peft.prepare_model_for_kbit_training(model), config))


def scenarios() -> list[Scenario]:
    """Weights alone, activations too, and an adapter on quantised weights."""
    four, eight = _bitsandbytes(load_in_4bit=True), _bitsandbytes(load_in_8bit=True)
    plain = _bitsandbytes(load_in_8bit=True, llm_int8_threshold=0.0)
    return [
        Scenario(
            "torchao",
            "`Int8WeightOnlyConfig`",
            wrapping(_torchao("Int8WeightOnlyConfig")),
            trains=False,
        ),
        Scenario(
            "torchao",
            "`Int8DynamicActivationInt8WeightConfig`",
            wrapping(_torchao("Int8DynamicActivationInt8WeightConfig")),
            trains=False,
            within={"logits": 0.1, "loss": 1e-3},
            note="activations are rounded to 8 bits, which makes of a change by 2e-7 one of 0.05: "
            "stock's padded batch differs as much from its documents alone (0.04); the bounds are "
            "0.1 and, for the loss, 1e-3",
        ),
        Scenario(
            "bitsandbytes",
            "`load_in_4bit`",
            wrapping(lambda model: model, four),
            orders=(AFTER,),
            trains=False,
        ),
        Scenario(
            "bitsandbytes",
            "`load_in_4bit`, and LoRA on it (QLoRA)",
            wrapping(_qlora, four),
            evaluates=False,
            note="on a CPU with AVX512-BF16 bitsandbytes packs the weights at the first "
            "evaluation, and from then on no adapter gets a gradient, with autopack or without: "
            "all is measured in train mode",
        ),
        Scenario(
            "bitsandbytes",
            "`load_in_8bit`",
            wrapping(lambda model: model, eight),
            note="a channel in which any token of the call exceeds `llm_int8_threshold` (6) is "
            "computed in 16 bits, for all tokens: documents change each other, packed or padded. "
            "With a threshold of 0 they do not",
            orders=(AFTER,),
            trains=False,
        ),
        Scenario(
            "bitsandbytes",
            "`load_in_8bit, llm_int8_threshold=0`",
            wrapping(lambda model: model, plain),
            orders=(AFTER,),
            trains=False,
        ),
    ]
