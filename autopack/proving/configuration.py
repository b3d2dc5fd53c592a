"""A configuration's behaviour as short words, for comparisons of two configurations.

Behaviour is everything but sizes, rates and labels: a window of 4 tokens and one of 4096 are the
same behaviour, a window and none are not. Every field becomes a set of words. A number is `0`, `1`,
`2+`, `+` (a positive float) or `-`; a list of choices is its first and every pair of different
neighbours; a dictionary is fields of its own, with a dot. Fields of a part that is a configuration
stand under its own model type.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

Words = dict[str, dict[str, set[str]]]
"""The words of a configuration's values, by model type and field."""


def _pattern(words: str) -> re.Pattern[str]:
    """Return a compiled regular expression from text, whose whitespace is removed."""
    return re.compile("".join(words.split()))


_LABEL = _pattern(r"""
    architectures|model_type|transformers_version|tokenizer_class|prefix|finetuning_task
    |task_specific_params|auto_map|id2label|label2id|(torch_)?dtype|language|license
    |quantization_config|gradient_checkpointing|return_dict|use_cache
    |output_(attentions|hidden_states|past|scores)|torchscript|use_bfloat16|pruned_heads
    |tie_word_embeddings|pretraining_tp|init_device|rescale_prenorm_residual
    |ignore_keys_at_rope_validation|_is_quantized|_name_or_path|_commit_hash|_post_init_done
    |_output_attentions|_(attn|experts)_implementation(_internal|_autoset)?|_pad_token_id
    |vocabulary_map|vocab_list|langs?|languages|lang2id|id2lang|cache_implementation|max_length
    |min_length|do_sample|early_stopping|num_beams|temperature|top_k|top_p|length_penalty
    |use_return_dict|(encoder_)?no_repeat_ngram_size|forced_\w+_token_id|(begin_)?suppress_tokens
    |num_return_sequences|repetition_penalty|attention_types|aggregation_labels
""")
"""Names and labels, fields for `generate`, and fields on storage or the output's form only.

Layers that quantization puts in are examined as modules. `attention_layers` of GPT-Neo spells out
its `attention_types`.
"""

_RATE = _pattern(r"""
    (\w+_)?(dropout|drop|dropout_prob|dropout_rate|dropout_p|pdrop|layerdrop|drop_rate
    |drop_path_rate|jitter_noise)(_\d)?|(\w+_)?(eps|epsilon|rms_eps)|rms_norm_eps\w*
    |(\w+_)?initializer_(range|factor|std|cutoff_factor)|(\w+_)?init_std|(\w+_)?init_variance_scale
    |initializer_range
    |(\w+_)?(loss_coef|loss_weight|loss_coefficient|loss_alpha|loss_scaling_factor)
    |(?!pad_)(\w+_)?(token_id|token_index|token_ids|tag_pad_id|subs_pad_id|_token)
    |(im|image|slice|newline)_\w*id|newline_id|time_step_(floor|max|min|init_scheme)
    |embedding_initializer_range|(\w+_)?(hidden_act|activation_function|hidden_activation|act_fn
    |hidden_mamba_act|pooler_act|summary_activation)|activation|afn|ff_activation|dense_act_fn
    |mamba_hidden_act|mlp_hidden_act
""")
"""Rates of noise, epsilons of divisions, initialisation, ids of tokens, weights of losses.

Functions of single numbers are among them too: nothing here reaches from one token to another.
"""

_SIZE = _pattern(r"""
    (\w+_)?vocab_size(_\w+)?|(\w+_)?hidden_size(_\w+)?|(\w+_)?intermediate_size(_\w+)?
    |(\w+_)?(hidden_dim|embed_dim|ffn_dim)|d_model|n_embd|emb_dim|embedding_(dim|size)
    |(\w+_)?embedding_size|word_embed_proj_dim|d_ff|d_kv|d_inner|dff|dim|dim_\w+|n_inner|mlp_dim
    |mlp_ratio|expansion_ratio|(encoder_|decoder_|n_)?(layers|layer)|num_(\w+_)?(hidden_)?layers
    |num_blocks|depth|(\w+_)?(num_)?(attention_heads|key_value_heads|kv_heads)|num_(query_)?groups
    |num_heads|n_heads?|kv_n_heads|num_query_groups|(\w+_)?head_dim|d_head|kv_channels
    |attention_head_size|query_pre_attn_scalar|rotary_dim|(\w+_)?rank|(\w+_)?lora_rank|index_n_heads
    |(original_)?max_position_embeddings|n_positions|n_ctx|max_seq_len|max_(target|source)_positions
    |context_length|model_max_length|max_\w+_embeddings|(\w+_)?num_experts|n_(routed|shared)_experts
    |(moe_)?num_(local|shared)_experts|num_experts_per_tok(en)?|moe_(topk|top_k|k)|top_k_experts
    |n_group|topk_group|num_expert_group|first_k_dense_replace|num_dense_layers|mamba_(n_heads
    |d_state|d_head|num_heads|head_dim|headdim|dt_rank|expand|d_ssm|n_groups|ngroups)
    |(ssm_)?state_size|time_step_rank|n_groups|n_mamba_heads|expand
    |linear_(num_key|num_value|num)_heads|lru_width|linear_(key|value)?_?head_dim
    |(\w+_)?(multipliers?|scaling_factor|alpha_factor|beta_factor)|logits_scaling|(\w+_)?rope_theta
    |rope_theta|attn_scale|scale_(emb|depth)|route_scale|logit_scale|softmax_scale|embedding_scale
    |attention_value_scale|(\w*rope_\w+\.(\w+\.)?)(factor|attention_factor|beta_(fast|slow)|(low
    |high)_freq_factor|mscale(_all_dim)?|partial_rotary_factor|(short|long)_(factor|mscale)
    |(original_)?max_position_embeddings|mrope_section|alpha|rope_theta)|partial_rotary_factor
    |rotary_pct|rotary_emb_base|type_vocab_sizes?|(\w+_)?image_size|patch_size|num_channels
    |in_channels|in_chans|out_hidden_size|num_mel_bins|projection_dim|swiglu_(alpha|limits?)
    |image_seq_length|mm_tokens_per_image|pad_token_id
    |_heterogeneity_spec\.(head_dim|num_key_value_heads|num_attention_heads|intermediate_size)
""")
"""Numbers that only count, widen or scale; only their presence is behaviour."""

_PICKED = _pattern(r"(\w+_)?(ids|idxs?|index|indexes|indices|layers)")
"""Lists of layers' numbers (but for `no_rope_layers`, which has a flag for every layer)."""


def describe(config: Any) -> Words:
    """Return the words of a configuration and of its parts, by model type and field."""
    found: Words = {}
    _describe(config, found)
    return found


def _describe(config: Any, found: Words) -> None:
    """Add the words of a configuration and its parts to `found`."""
    model_type = str(getattr(config, "model_type", ""))
    for name, value in vars(config).items():
        for field, word, part in _words(name, value):
            if part is not None:
                _describe(part, found)
            found.setdefault(model_type, {}).setdefault(field, set()).add(word)
    labels = getattr(config, "id2label", None)
    if isinstance(labels, dict):
        found.setdefault(model_type, {})["num_labels"] = {number_word(len(labels))}


def is_neutral(field: str, value: Any = None) -> bool:
    """Return True if a field never matters to a document's results in a packed row."""
    # A flag that is named like a rate switches something on (`token_dropout` of ESM).
    rate = not isinstance(value, bool) and _RATE.fullmatch(field) is not None
    return rate or _LABEL.fullmatch(field) is not None


def is_label(field: str) -> bool:
    """Return True if a field is a name, or only `generate` and storage code read it."""
    return _LABEL.fullmatch(field) is not None


def is_size(field: str) -> bool:
    """Return True if a field counts or scales, so that only its presence matters."""
    return _SIZE.fullmatch(field) is not None


def is_covered(word: str, known: set[str] | frozenset[str]) -> bool:
    """Return True if a word is among `known`; `+`, a positive float, covers `1` and `2+` too."""
    return word in known or (word in ("1", "2+") and "+" in known)


def _words(field: str, value: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield (field, word, part) of a value; `part` is the configuration behind a word, or None."""
    if is_neutral(field, value):
        return
    if is_size(field):
        yield field, _presence(value) if field != "pad_token_id" or value is None else "set", None
    elif hasattr(value, "to_diff_dict"):
        own = getattr(value, "model_type", "")
        if own:
            yield field, str(own), value
        else:  # a part without a type of its own is told by its place
            yield field, "{}", None
            for name, inner in vars(value).items():
                if not is_label(name):
                    yield from _words(f"{field}.{name}", inner)
    elif isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
        yield field, "{}", None
        same = value.get("type") == value.get("rope_type")
        for name, inner in value.items():
            if not (same and name == "type"):  # as older files spell it
                yield from _words(f"{field}.{name}", inner)
    elif isinstance(value, (list, tuple)):
        yield from ((field, word, None) for word in _of_list(field, value))
    elif hasattr(value, "per_layer_overrides"):
        for overrides in value.per_layer_overrides.values():
            for name, inner in dict(overrides).items():
                yield from _words(f"{field}.{name}", inner)
    elif field == "chunk_size_feed_forward" and type(value) is int and value > 1:
        # Layers that give the same for all tokens at once and for one at a time give it for any
        # number of them.
        yield field, "1", None
    else:
        yield field, _word(value), None


def _presence(value: Any) -> str:
    """Return the word of a size: `none`, `0`, `[]` or `set`.

    A flag or name is its own word. Token 0 may pad as well as any other.
    """
    if isinstance(value, (list, tuple)):
        return "set" if value else "[]"
    return _word(value) if value in (None, 0) or isinstance(value, (bool, str)) else "set"


def _word(value: Any) -> str:
    """Return the word for one value: the kind of a number, and other values themselves."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return number_word(value)
    return value if isinstance(value, str) else f"{type(value).__name__} {value!r}"


def number_word(value: float) -> str:
    """Return the word for a number: `-`, `0`, `1`, `2+`, or `+` for a positive float."""
    if value != value or value < 0:
        return "-"
    if value == 0:
        return "0"
    return "+" if isinstance(value, float) else "1" if value == 1 else "2+"


def _of_list(field: str, value: Any) -> Iterator[str]:
    """Yield the words of a list: its first entry, its distinct ones, pairs of different neighbours.

    For lists of layers' numbers, yield only that there are some.
    """
    leaves = list(_leaves(value))
    if not leaves:
        yield "[]"
    elif (
        _PICKED.fullmatch(field)
        and field != "no_rope_layers"
        and all(type(leaf) is int for leaf in leaves)
    ):
        yield "[...]"
    else:
        words = [_word(leaf) for leaf in leaves]
        yield f"^{words[0]}"
        yield "|".join(sorted(set(words)))
        yield from (f"{a}>{b}" for a, b in pairwise(words) if a != b)


def _leaves(value: Any) -> Iterator[Any]:
    """Yield the entries of nested lists in order, and a word for each entry of a dict."""
    for entry in value:
        if isinstance(entry, (list, tuple)):
            yield from _leaves(entry)
        elif isinstance(entry, Mapping):
            yield from (f"{name}={_word(inner)}" for name, inner in entry.items())
        else:
            yield entry
