"""Tiny configurations with the same behaviour as a given one, in the words of `configuration`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise, product, starmap
from typing import Any, NamedTuple

from transformers import PretrainedConfig

from autopack.inspection.configs import text_config
from autopack.proving import configuration
from autopack.tiny import configs, rules

_OF_EMBEDDINGS = ("word_embed_proj_dim", "embedding_size")
_SHORT = 16
"""Number of positions at which a twin's rotary frequencies change: some documents are longer."""


class _Choice(NamedTuple):
    """Way to choose a few layers of a list."""

    beside_their_like: bool
    """True if layers that stand beside their like in the whole do so among the few; else the few
    have two of their kind anywhere."""
    with_last: bool
    """True to add the last layer: some classes see to it that it is of a certain kind."""


def alike(config: PretrainedConfig) -> Iterator[PretrainedConfig]:
    """Yield tiny configurations of the class of `config`, with its behaviour, the likeliest first.

    Each has fewer layers: of lists with one entry per layer, just enough for all pairs of
    neighbours of the whole, at first without layers beside their like. A class may still change the
    fields that it is given, so compare the words of the results. Raises `tiny.CannotBuild` if the
    class refuses all of them.
    """
    text = vars(text_config(config, decoder=True))
    depth = next((n for name in rules.DEPTH if isinstance(n := text.get(name), int)), 8)
    deeper = [n for n in (4, 6, 8) if n <= depth]
    depths = [0] if _per_layer(config) else [rules.LAYERS, *deeper]
    parts = [
        config,
        *(value for value in vars(config).values() if isinstance(value, PretrainedConfig)),
    ]
    choices: dict[str, _Choice] = {}
    for choice in starmap(_Choice, product((False, True), repeat=2)):
        choices.setdefault(repr([_chosen(part, choice) for part in parts]), choice)
    refused, made = None, 0
    for choice, depth in product(choices.values(), depths):
        try:
            yield _shrunk(config, depth, choice)
            made += 1
        except configs.CannotBuild as error:
            refused = refused or error
    if refused is not None and not made:
        raise refused


def _shrunk(config: PretrainedConfig, depth: int, choice: _Choice) -> PretrainedConfig:
    """Return a tiny configuration with the behaviour of `config`.

    It has `depth` layers where no list lets any be chosen.
    """
    given = _behaviour(config, range(depth), choice)
    parts = {
        name: value.model_type
        for name, value in vars(config).items()
        if getattr(value, "model_type", "")
    }
    found = configs.of_class(type(config), given, parts)
    # What a class derives from other fields, or takes under another name, it may have lost.
    for name, value in given.items():
        if (
            name in vars(found)
            and not isinstance(value, (list, tuple, Mapping))
            and vars(found)[name] != value
        ):
            vars(found)[name] = value
    for name, token in (("pad_token_id", 0), ("decoder_start_token_id", 2)):
        if vars(config).get(name) is not None and vars(found).get(name) is None:
            vars(found)[name] = token
    # of layers that take any number of tokens at a time
    if getattr(config, "chunk_size_feed_forward", 0) > 1:
        vars(found)["chunk_size_feed_forward"] = 1
    _set_missing_sizes(config, found)
    return found


def _set_missing_sizes(config: PretrainedConfig, found: PretrainedConfig) -> None:
    """Set in `found` sizes that `config` has and its type leaves out (a window, a width of heads).

    Sizes of the embeddings are set too if they differ from the layers', which takes a projection.
    """
    of_layers = vars(config).get("hidden_size", vars(config).get("n_embd"))
    for name, value in vars(config).items():
        inner = vars(found).get(name)
        if isinstance(value, PretrainedConfig) and isinstance(inner, PretrainedConfig):
            _set_missing_sizes(value, inner)
        elif isinstance(value, int) and value > 1 and name in rules.FIELDS and inner is None:
            vars(found)[name] = rules.FIELDS[name]
        elif name == "pad_token_id" and value is not None and inner is None:
            # of a part that has no tokens, too
            vars(found)[name] = 0
        elif name in _OF_EMBEDDINGS and value not in (None, of_layers) and inner == rules.HIDDEN:
            vars(found)[name] = rules.HIDDEN // 2
        elif name not in vars(found) and type(found) is type(config):
            # of an older release, or put there by its user: code may read it
            vars(found)[name] = value


def _behaviour(
    config: PretrainedConfig, without_lists: Sequence[int], choice: _Choice
) -> dict[str, Any]:
    """Return the fields that decide a model's behaviour, without sizes, for `configs.of_class`.

    Where no list has an entry per layer, the layers are `without_lists`.
    """
    given: dict[str, Any] = {}
    per_layer, chosen = _per_layer(config), _chosen(config, choice) or without_lists
    for name, value in vars(config).items():
        if name == "loss_type" and value is None:
            continue  # said to be unknown where it is given, and none where it is not
        if hasattr(value, "to_diff_dict"):
            if getattr(value, "model_type", ""):
                given[name] = _behaviour(value, chosen, choice)
            else:
                own = {n: v for n, v in vars(value).items() if n not in vars(PretrainedConfig())}
                given[name] = {
                    n: v for n, v in own.items() if not _is_left_to_the_type(n, v, of_type=False)
                }
        elif name in per_layer:
            # a tiny size for a size
            given[name] = [
                rules.FIELDS.get(name, entry) if type(entry) is int and entry > 1 else entry
                for entry in (value[index] for index in chosen)
            ]
        elif name == "id2label":
            if isinstance(value, Mapping) and len(value) != 2:
                given["num_labels"] = min(len(value), 3)
        elif not _is_left_to_the_type(name, value):
            is_rope = isinstance(value, Mapping) and {"rope_type", "type"} & set(value)
            given[name] = (
                _rope(value, vars(config).get("partial_rotary_factor")) if is_rope else value
            )
    share = vars(config).get("partial_rotary_factor")
    if isinstance(share, float) and int(rules.HEAD_DIM * share) % 2 == 0:
        given["partial_rotary_factor"] = share
    depth = next((name for name in rules.DEPTH if isinstance(vars(config).get(name), int)), None)
    if depth is not None and vars(config)[depth] > 0:
        given[depth] = len(chosen) if per_layer else min(len(chosen), vars(config)[depth])
    # GPT-Neo spells them out and compares
    if "attention_types" in vars(config) and "attention_layers" in given:
        given["attention_types"] = [[given["attention_layers"], 1]]
    if isinstance(vars(config).get("original_max_position_embeddings"), int):
        given["original_max_position_embeddings"] = _SHORT
    return given


def _is_left_to_the_type(name: str, value: Any, of_type: bool = True) -> bool:
    """Return True if a field is not copied to a twin: a tiny model of the type sets its value.

    Parts that have no type of their own are not `of_type`.
    """
    if name.startswith("_") or name in (
        "transformers_version",
        "architectures",
        "model_type",
        "dtype",
        "torch_dtype",
    ):
        return True
    if configuration.is_neutral(name, value):
        # An activation is a module of its own.
        return not isinstance(value, str) or configuration.is_label(name)
    if value is None or isinstance(value, (bool, str)) or value == 0:
        return name == "pad_token_id" and value is not None
    return (name in rules.FIELDS and (of_type or value != 1)) or (
        of_type and configuration.is_size(name)
    )


def _rope(value: Mapping[str, Any], share: float | None) -> dict[str, Any]:
    """Return a rotary embedding's settings, changed for narrow heads and short documents.

    It covers a `share` of the channels of a head.
    """
    share = value.get("partial_rotary_factor", share)
    found = {
        name: _rope(part, share) if isinstance(part, Mapping) else part
        for name, part in value.items()
    }
    for name, factor in (("short_factor", 1.0), ("long_factor", 1.5)):
        if isinstance(found.get(name), (list, tuple)):
            found[name] = [factor] * (int(rules.HEAD_DIM * (1.0 if share is None else share)) // 2)
    if found.get("original_max_position_embeddings"):
        found["original_max_position_embeddings"] = _SHORT
    return found


def _per_layer(config: PretrainedConfig) -> dict[str, Sequence[Any]]:
    """Return fields with one entry per layer, by name, but for lists of all layers' numbers."""
    counts = {n for name in rules.DEPTH if isinstance(n := vars(config).get(name), int) and n > 1}
    return {
        name: value
        for name, value in vars(config).items()
        if isinstance(value, (list, tuple))
        and len(value) in counts
        and not name.startswith("_")
        and not name.endswith("image_size")  # of two sides
        and [*value] != [*range(len(value))]
    }


def _chosen(config: PretrainedConfig, choice: _Choice) -> list[int]:
    """Return numbers of a few layers with the same pairs of neighbours as all; [] without lists.

    They begin with a layer like the first. Where other fields name layers by their numbers, they
    are the first ones.
    """
    lists = _per_layer(config)
    if not lists:
        return []
    depth = max(map(len, lists.values()))
    of_text = [value for value in lists.values() if len(value) == depth]
    layers = [tuple(repr(value[index]) for value in of_text) for index in range(depth)]
    repeated = {a for a, b in pairwise(layers) if a == b}

    def pairs(numbers: Sequence[int]) -> set[tuple[Any, Any]]:
        """Return pairs of neighbours, and of layers of one kind, among these layers."""
        kinds = [layers[number] for number in numbers]
        found = {(a, a) for a in repeated if kinds.count(a) > 1 and not choice.beside_their_like}
        return found.union(pairwise(kinds))

    def is_like_all(numbers: Sequence[int]) -> bool:
        return pairs(numbers) == pairs(range(depth))

    numbered = any(
        isinstance(value, (list, tuple)) and value and all(type(each) is int for each in value)
        for name, value in vars(config).items()
        if name not in lists and "token_id" not in name
    )
    firsts = [0] if numbered else [a for a in range(depth) if layers[a] == layers[0]]
    counts = range(min(rules.LAYERS, depth), depth + 1)
    runs = (range(a, a + count) for count in counts for a in firsts if a + count <= depth)
    found = [*next(filter(is_like_all, runs))]
    for layer in [] if numbered else found[1:]:
        rest = [other for other in found if other != layer]
        if len(rest) >= rules.LAYERS and is_like_all(rest):
            found = rest
    return [*found, depth - 1] if choice.with_last and layers[found[-1]] != layers[-1] else found
