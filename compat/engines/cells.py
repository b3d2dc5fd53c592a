"""Which cells there are, without importing what runs in them."""

from __future__ import annotations

PROCESSES = {
    "ddp": 2,
    "ddp static_graph": 2,
    "ddp find_unused_parameters": 2,
    "ddp no_sync": 2,
    "ddp, a rank dies": 2,
    "fsdp1": 2,
    "fsdp1 no_sync": 2,
    "fsdp2": 2,
    "fsdp2 on 4": 4,
    "fsdp2 by linear layer": 2,
    "fsdp2 without resharding": 2,
    "fsdp2 accumulating": 2,
    "fsdp2 checkpointing": 2,
    "fsdp2 reentrant checkpointing": 2,
    "fsdp2 bfloat16": 2,
    "fsdp2, a rank dies": 2,
    "hsdp": 4,
    "accelerate ddp": 2,
    "accelerate fsdp2": 2,
    "tensor parallel": 2,
    "zero1": 2,
    "zero2": 2,
    "zero3": 2,
    "shared rows": 2,
    "shared rows on 4": 4,
    "shared rows fsdp2": 2,
    "shared rows fsdp2 checkpointing": 4,
    "shared rows zero1": 2,
    "shared rows zero3": 2,
}
"""On how many processes each engine runs."""
ENGINE_NAMES = tuple(PROCESSES)
DYING = ("ddp, a rank dies", "fsdp2, a rank dies")
ALONE = ("xlnet", "cpmant", "deepseek_v4", "minimax_m3_vl_text", "prophetnet", "reformer", "blt")
"""Types whose documents run alone through the whole model."""
HEAD = "xlnet:sequence-classification"
TYPES: dict[str, tuple[str, ...]] = {
    "all": ("llama", "xlnet", HEAD),
    **dict.fromkeys(DYING, ("llama",)),
    "ddp": ("llama", "mamba", "bloom", "xlnet", HEAD),
    "fsdp1": ("llama", "mamba", "bloom", *ALONE, HEAD),
    "fsdp2": ("llama", "mamba", "bloom", *ALONE, HEAD),
    "fsdp2 by linear layer": ("bloom", "rwkv", "recurrent_gemma", "xlnet"),
    "fsdp2 checkpointing": ("llama", "mamba", "bloom", "deepseek_v4"),
    "fsdp2 reentrant checkpointing": ("llama", "deepseek_v4"),
    "fsdp2 bfloat16": ("llama", "xlnet"),
    "tensor parallel": ("llama", "qwen3", "gemma3_text"),
    "shared rows": (
        "llama",
        "mistral",
        "gemma3_text",
        "mixtral",
        "deepseek_v3",
        "gpt2",
        "bloom",
        "mamba",
    ),
    **dict.fromkeys(
        ("shared rows on 4", "shared rows fsdp2", "shared rows fsdp2 checkpointing"),
        ("llama", "gemma3_text"),
    ),
    **dict.fromkeys(
        ("shared rows zero1", "shared rows zero3"), ("llama", "mistral", "gemma3_text")
    ),
    # Without Reformer, whose reversible layers bring DeepSpeed a gradient for each run, and BLT,
    # which takes minutes.
    "zero3": ("llama", "mamba", "bloom", "rwkv", "recurrent_gemma", *ALONE[:5], HEAD),
}
"""The types that each engine is run with, unless others are asked for."""


def types_of(engine: str) -> tuple[str, ...]:
    """The types that an engine is run with."""
    return TYPES.get(engine, TYPES["all"])
