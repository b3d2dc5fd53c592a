"""Which functions of a class of transformers can be run in a forward, by their names."""

from __future__ import annotations

import re

ALWAYS = frozenset(
    "__init__ forward __call__ __init_subclass__ __new__ __getattr__ __getattribute__ __setattr__".split()
)
"""Functions that are run without being named."""
_MAKING = re.compile(
    r"_?init_weights|_?initialize_weights|_init_\w*|reset_parameters|post_init|_?tie_\w+|_?prune_heads|_?resize_\w+|set_(input|output)_embeddings"
    r"|prepare_inputs_for_generation|_prepare_\w*(for_generation|generat)\w*|_update_model_kwargs\w*|_?reorder_cache|generate|_\w*_generat\w*"
    r"|_expand_inputs_for_generation|can_generate|save_\w+|from_pretrained|_from_config|push_to_hub|load_\w+|dummy_inputs"
    r"|extra_repr|__repr__|_sample|_validate_model\w*|to_(dict|diff_dict|json\w*)|from_dict|from_\w+_configs?"
    r"|__post_init__|validate\w*|update|to|half|float|cuda|cpu|eval|train|get_config_dict|register_for_auto_class|compile"
    r"|_?set_gradient_checkpointing|(gradient|activation)_checkpointing_\w+|enable_input_require_grads"
)
"""Functions that make, load, save, move or resize, or that generate."""
_LARGE = re.compile(
    r"transformers\.(modeling_utils:(PreTrainedModel|ModuleUtilsMixin|EmbeddingAccessMixin)"
    r"|configuration_utils:Pre[Tt]rainedConfig|modeling_rope_utils:RotaryEmbeddingConfigMixin|heterogeneity\S+Mixin)"
)
_CONFIGS = re.compile(r"\.configuration_\w+$")


def is_large(module: str, cls: str) -> bool:
    """Whether a class is one of those that all models or configurations derive from: few of their functions matter."""
    return _LARGE.fullmatch(f"{module}:{cls}") is not None


def is_making(module: str, function: str) -> bool:
    """Whether a function of a class in a module makes, saves or generates; it matters where it is mentioned."""
    return is_making_of_config(function) if _CONFIGS.search(module) else is_making_of_model(function)


def is_making_of_model(function: str) -> bool:
    """The same for any class but a configuration."""
    return _MAKING.fullmatch(function) is not None


def is_making_of_config(function: str) -> bool:
    """The same for a configuration."""
    return function.startswith(("__init", "__post_init__", "validate", "to_", "from_", "_update_hetero"))


def matters(module: str, cls: str, function: str) -> bool:
    """Whether a function that a class has had none of matters: it may stand before one that the class inherits."""
    return (not is_large(module, cls) or function in ALWAYS) and not is_making(module, function)
