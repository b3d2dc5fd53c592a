"""Subjects of benchmarks: random models of any type in a given size, and lengths of documents,
drawn like known data or of given data, whose examples `datasets` reads."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from autopack.errors import InvalidPacking
from autopack.packing.checks import IDS, MASK, bad_file, no_examples, read, reworded, unusable

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from autopack.packing.documents import Documents

BATCH = 1000
"""Examples of a data set that are read at a time, and texts that are tokenized at a time."""
FILES = (".json", ".jsonl", ".npy", ".parquet")
_TEXT = ("string", "large_string")
"""Types of text in arrow."""
TINY = "tiny"
_LATENT = ("num_key_value_heads", "head_dim")
"""Fields that mean something else in multi-head latent attention: see `autopack.tiny`."""


SIZES: dict[str, dict[str, int]] = json.loads(
    Path(__file__).with_name("sizes.json").read_text(encoding="utf-8")
)
"""Fields of a Llama's configuration by size, in the proportions of released ones. Other types have
more or fewer parameters: fields with other names, and others beside these (experts, states of
mixers), are as in `autopack.tiny`."""
NAMES = (TINY, *SIZES)
SHORTEST = 4


class Lengths(NamedTuple):
    """Lognormal distribution of lengths in tokens: mean before clipping, sigma of the logarithm."""

    mean: float
    sigma: float


DISTRIBUTIONS = {"flan": Lengths(471, 1.0), "orcamath": Lengths(500, 0.4)}
"""FLAN_20k has 9.4 million tokens in 19,961 rows (arXiv 2407.09105, Table 2: 2,294 rows of 4096)
and a large variance. OrcaMath is somewhat longer and varies much less, says
huggingface.co/blog/packing-with-FA2, without figures: mean and sigma are assumed, so that
mini-batches of 4 have 1.45 padded tokens per real one, about what a gain of 1.4 needs."""


def draw(
    lengths: Lengths,
    count: int,
    longest: int,
    seed: int | list[int],
    scale: int = 1,
    shortest: int = SHORTEST,
) -> np.ndarray:
    """Return `count` random lengths, divided by `scale` and clipped to bounds, (count,) int64."""
    mean, sigma = lengths
    drawn = np.random.default_rng(seed).lognormal(np.log(mean) - sigma**2 / 2, sigma, count)
    return np.clip(np.round(drawn / scale), min(shortest, longest), longest).astype(np.int64)


def build(
    model_type: str,
    size: str,
    task: str,
    longest: int,
    *,
    attn: Any,
    dtype: torch.dtype,
    device: str = "cpu",
    seed: int = 0,
) -> PreTrainedModel:
    """Return a model of a type and size (of `NAMES`), with random weights, for `longest` tokens.

    The type decides what else it has. Windows and chunks of attention are the type's defaults,
    except in `tiny`, where they are a few tokens. Raises `CannotBuild`, and torch's
    errors for a device without the memory.
    """
    import torch
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from autopack.inspection.configs import text_config
    from autopack.tiny import configs, models, rules

    default = text_config(configs.config(model_type, task=task))
    given: dict[str, Any] = {}
    if longest and hasattr(default, "max_position_embeddings"):
        # RoBERTa's first position is not 0
        given["max_position_embeddings"] = max(longest + 8, rules.POSITIONS)
    if size == TINY:
        return models.build(
            model_type,
            task=task,
            attn_implementation=attn,
            dtype=dtype,
            device=device,
            seed=seed,
            **given,
        )
    own = text_config(CONFIG_MAPPING[model_type]())
    spans = {
        name: getattr(own, name)
        for name in rules.SPANS
        if isinstance(getattr(own, name, None), int)
    }
    fields = SIZES[size]
    if hasattr(default, "kv_lora_rank"):
        fields = {name: value for name, value in fields.items() if name not in _LATENT}
    given |= {name: value for name, value in {**fields, **spans}.items() if hasattr(default, name)}
    try:
        torch.manual_seed(seed)
        with torch.device(device):
            return models.of_config(
                configs.config(model_type, task=task, **given), task, attn, dtype
            )
    except (ValueError, TypeError, AttributeError, ImportError, KeyError) as error:
        raise configs.CannotBuild(model_type, error) from error


def longest_document(model: PreTrainedModel) -> int | None:
    """Return the most tokens that a model's configuration allows a document; None if unbounded."""
    from autopack.inspection.configs import text_config
    from autopack.registry import first_position

    known = getattr(text_config(model.config), "max_position_embeddings", None)
    return known - first_position(model.config) if isinstance(known, int) and known > 0 else None


def lengths_of(
    data: Any, column: str | Sequence[str] | None = None, tokenizer: Any = None
) -> np.ndarray:
    """Return the number of tokens of each document in data or a file, (documents,) int64.

    For the arguments see `autopack.estimate`. Raises `InvalidPacking` for data that holds none.
    """
    if isinstance(tokenizer, (str, PathLike)):
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(tokenizer)
        except (OSError, ValueError) as error:
            raise InvalidPacking(
                f"tokenizer {str(tokenizer)!r}: cannot be loaded: {error}", code="tokenizer"
            ) from error
    named = [column] if isinstance(column, str) else list(column or ())
    return _read(data, partial(_lengths, named=named, tokenizer=tokenizer))


def documents_of(data: Any) -> Documents:
    """Return the `Documents` in column `input_ids` of data or a file; see `autopack.estimate`."""
    return _read(data, _documents)


def _read(data: Any, function: Callable[[Any], Any]) -> Any:
    """Return `function(opened data)`; its `InvalidPacking` errors name the data's path."""
    where = f"{data or 'an empty path'}: " if isinstance(data, (str, PathLike)) else ""
    try:
        with reworded(partial("{}{}".format, where)):
            return function(_open(data))
    except ImportError as error:
        raise InvalidPacking(
            f'{where}needs {error.name}: pip install "autopack[data]"', code="missing-package"
        ) from error


def _open(data: Any) -> Any:
    """Return the content of a path, a `Dataset` of examples or columns, or other data unchanged."""
    if isinstance(data, (str, PathLike)):
        data = _load(Path(data))
    if hasattr(data, "column_names"):
        if not isinstance(data.column_names, list) or not hasattr(data, "data"):
            raise no_examples(
                f"wanted a Dataset, found {type(data).__name__}; pass one split, or a sample of a "
                "stream as a Dataset"
            )
        return data
    first = data[0] if isinstance(data, (list, tuple)) and data else data
    if not isinstance(first, Mapping):
        return data
    from datasets import Dataset

    try:
        return Dataset.from_dict(dict(data)) if first is data else Dataset.from_list(list(data))
    except (
        ValueError,
        TypeError,
        AttributeError,
        OverflowError,
    ) as error:  # what arrow raises is among them
        raise unusable(
            f"these examples make no columns, each of one kind of values: {error}"
        ) from error


def _load(path: Path) -> Any:
    """Return the content of a file or folder: an array of .npy, JSON's values, or a `Dataset`."""
    if not path.name or not path.exists():
        raise bad_file("no such file or folder; check the path")
    if not path.is_dir() and path.suffix not in FILES:
        raise bad_file(f"wanted one of {', '.join(FILES)}, or a folder of a dataset")
    try:
        if path.suffix == ".npy":
            return np.lib.format.open_memmap(path, mode="r")
        if path.suffix == ".json":
            return json.loads(path.read_text(encoding="utf-8"))
        if path.suffix == ".jsonl":
            lines = path.read_text(encoding="utf-8").splitlines()
            return [json.loads(line) for line in lines if line.strip()]
        import datasets

        read_as = datasets.load_from_disk if path.is_dir() else datasets.Dataset.from_parquet
        return read_as(str(path))
    except (ValueError, OSError, RecursionError) as error:
        raise bad_file(f"cannot be read as {path.suffix or 'a dataset'}: {error}") from error


def _lengths(data: Any, named: list[str], tokenizer: Any) -> np.ndarray:
    """Return each document's number of tokens, in all `named` columns or else a known one."""
    if not hasattr(data, "column_names"):
        return read(data)
    unnamed = ["text", "messages"] if tokenizer is not None else [IDS, "length", "lengths", "text"]
    known = [name for name in named or unnamed if name in data.column_names]
    if not known or len(known) < len(named):
        wanted = [name for name in named if name not in known] or unnamed
        raise unusable(
            f"found no column {' or '.join(map(repr, wanted))} in {data.column_names}; name the "
            "column"
        )
    names = known if named else known[:1]
    if names == [IDS]:
        return _documents(data).lengths
    batches = data.select_columns(names).with_format("arrow").iter(BATCH)
    counted = [
        sum(_token_counts(name, batch.column(name), tokenizer) for name in names)
        for batch in batches
    ]
    return read(np.concatenate(counted) if counted else [])


def _documents(data: Any) -> Documents:
    """Return the `Documents` in `input_ids` of a data set, without what `attention_mask` hides."""
    names = getattr(data, "column_names", ())
    if IDS not in names:
        raise unusable(
            f"groups: wanted examples with a column {IDS!r}, whose tokens say what begins alike"
        )
    from autopack.packing.documents import Documents

    return Documents.of_dataset(data, [name for name in names if name not in (IDS, MASK)])


def _token_counts(name: str, values: Any, tokenizer: Any) -> np.ndarray:
    """Return the number of tokens of each value of an arrow column, as an array of ints.

    An int is their number. Lists of ints are counted; text is tokenized, and so are messages of a
    chat as their template writes them.
    """
    from pyarrow import compute, types

    kind = values.type
    part = getattr(kind, "value_type", kind)
    is_list, fields = part is not kind, part if types.is_struct(part) else ()
    said = {field.name for field in fields if str(field.type) in _TEXT}
    is_chat = is_list and {"role", "content"} <= said
    if absent := values.null_count or (is_list and compute.list_flatten(values).null_count):
        raise unusable(
            f"column {name!r}: values are missing ({absent:,}); fill them, or leave the examples "
            "out"
        )
    if types.is_integer(kind):
        return values.to_numpy()
    if types.is_integer(part):
        return compute.list_value_length(values).to_numpy()
    if not (str(kind) in _TEXT or is_chat):
        raise unusable(
            f"column {name!r}: wanted lengths, lists of token ids, text, or messages with role and "
            f"content, found {kind}"
        )
    if tokenizer is None:
        raise InvalidPacking(
            f"column {name!r} holds text, whose tokens are to be counted; name a tokenizer: "
            "tokenizer=NAME",
            code="tokenizer",
        )
    texts, options = values.to_pylist(), {}
    if is_chat:
        options["add_special_tokens"] = False  # the template has them
        try:
            texts = [tokenizer.apply_chat_template(messages, tokenize=False) for messages in texts]
        except Exception as error:  # templates are programs
            raise InvalidPacking(
                f"column {name!r} holds messages, and the tokenizer has no template for them: "
                f"{error}; use one that has",
                code="tokenizer",
            ) from error
    return np.array([len(ids) for ids in tokenizer(texts, **options)["input_ids"]])
