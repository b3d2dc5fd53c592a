"""Mini-batch packing: a list of examples becomes packed rows for any Trainer or DataLoader.

The method is *MiniBatchPacking + PosID* of "Enhancing Training Efficiency Using Packing with Flash Attention"
(arXiv 2407.09105): examples are concatenated instead of padded; `position_ids` that restart say where each begins.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from autopack.errors import InvalidPacking
from autopack.inspection.heads import row_head
from autopack.packing.values import is_int, is_text, numbers
from autopack.packing.weights import DOCUMENT_WEIGHT, LOSS_WEIGHTS, Weighing, check_weighing, token_weights

__all__ = ["PackingCollator"]

IGNORED = -100
LABEL_KEYS = ("labels", "label", "label_ids")
DOCUMENT_KEYS = ("start_positions", "end_positions", "next_sentence_label")
COMPLETION_KEYS = ("completion_mask", "assistant_masks")
DECLARATIONS = ("attention_mask", "position_ids", "seq_idx", "seq_lengths")
PADDING = {"labels": IGNORED, "shift_labels": IGNORED, "special_tokens_mask": 1}
TENSORS = ("pt", "np")
LABELS = ("auto", "given", "required", "none")

# Heads whose loss compares a label with the logits of the same column: a first label is a real target there.
UNSHIFTED_HEADS = ("ForMaskedLM", "ForTokenClassification", "ForPreTraining", "WithLMHeadModel")


@dataclass(frozen=True, kw_only=True, repr=False)
class PackingCollator:
    """Concatenates the examples of a mini-batch into packed rows.

    Use it as `data_collator` of a `Trainer` or `collate_fn` of a `DataLoader`. An example is a mapping of lists,
    tuples, numpy arrays or torch tensors; `(1, T)`, as tokenizers give with `return_tensors`, counts as `(T,)`. The
    result is a dict, with `B` rows of `T` columns:

    * `input_ids` (B, T) int64. B is 1 unless `max_tokens` is set.
    * `position_ids` (B, T) int64, restarting at `first_position` in every document. Those of an example are kept.
    * `labels` (B, T) int64 for labels per token, with the first of every document set to -100: no token of that
      document predicts it. Or (documents,) int64 for one integer or bool (a class) per document, (documents,) float32
      for one float (a regression target), (documents, K) float32 for K floats (several targets), in the order of the
      documents. Integer vectors are labels per token, float vectors are targets of the document. `label` and
      `label_ids` mean `labels`; one batch holds one sort of label.
    * `start_positions`, `end_positions`, `next_sentence_label` (documents,) int64, from one int per document.
    * `attention_mask` (B, T) int64, 0 at padding, only for batches that have padding.
    * `loss_weights` (B, T) float32, on request: what each token's loss counts, 0 where it is not a target.
    * Every other key with a value, or K values, per token: (B, T) or (B, T, K), as int64, float32 or bool. Text and
      dictionaries are left out; whatever else is not per token is refused.

    Padding inside the examples (zeros of their `attention_mask` at either end) is removed. An example may itself be a
    packed row: declared by `position_ids` that restart, `seq_idx`, an `attention_mask` of segment ids (`1 1 2 2 0`)
    or `seq_lengths` (as TRL's packed datasets have).

    Args:
        labels: `"auto"` makes labels from `input_ids` where no example has any (-100 where `completion_mask` or
            `assistant_masks` is 0); `"given"` makes none; `"required"` refuses such a batch; `"none"` gives no labels.
        mask_first_label: `False` keeps the first label of each document, for losses that do not shift (masked
            language models, token classification). Labels must then be given.
        first_position: where the positions of a document start: 0, or `padding_idx + 1` for RoBERTa-like models.
        max_tokens: split the batch into rows of at most this many tokens, filled in order (next-fit, so documents
            keep their order), padded to the longest. By default there is one row.
        overlong: what to do with an example of more than `max_tokens` tokens: `"error"`, or `"truncate"` its end.
        pad_to_multiple_of: pad the rows to a multiple of this.
        pad_token_id: the padding token; nothing sees it, so any valid id serves. Padding has labels of -100 and is
            declared as documents of its own, none longer than the longest real one, so that positions stay in range.
        return_attention_mask: `False` leaves the padding declared by `position_ids` alone.
        return_flash_kwargs: add `cu_seq_lens_q` and `cu_seq_lens_k` (int32, documents and padding over the flattened
            rows, so the last is `B * T`), and `max_length_q` and `max_length_k` (Python ints).
        return_seq_idx: add `seq_idx` (B, T) int32: the number of the document in its row, padding included.
        loss_weights: `"document"` adds weights by which all documents count alike, however long; `"token"` weights by
            which all targets do. Either is multiplied by a float `document_weight` of each example (a list of them, one
            per document, in packed rows). For `autopack.weigh_documents` and `autopack.weighted_loss`; needs labels per
            token.
        drop_keys: keys of the examples to ignore.
        return_tensors: `"pt"` or `"np"`.

    Raises:
        InvalidPacking: for a batch that cannot be packed exactly; the message names the example and the key.
        ValueError: for options that are out of range or contradict each other.
    """

    labels: Literal["auto", "given", "required", "none"] = "auto"
    mask_first_label: bool = True
    first_position: int = 0
    max_tokens: int | None = None
    overlong: Literal["error", "truncate"] = "error"
    pad_to_multiple_of: int | None = None
    pad_token_id: int = 0
    return_attention_mask: bool = True
    return_flash_kwargs: bool = False
    return_seq_idx: bool = False
    loss_weights: Weighing | None = None
    drop_keys: Collection[str] = ()
    return_tensors: Literal["pt", "np"] = "pt"

    def __post_init__(self) -> None:
        choices = {"labels": LABELS, "overlong": ("error", "truncate"), "return_tensors": TENSORS}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r}: wanted one of {allowed}")
        for name, least in {"max_tokens": 1, "pad_to_multiple_of": 1, "first_position": 0, "pad_token_id": 0}.items():
            value = getattr(self, name)
            if not (is_int(value) and value >= least) and not (value is None and least == 1):
                raise ValueError(f"{name}={value!r}: wanted an int of at least {least}{' or None' * least}")
        check_weighing(self.loss_weights)
        if self.max_tokens and self.pad_to_multiple_of and self.max_tokens % self.pad_to_multiple_of:
            raise ValueError(f"max_tokens={self.max_tokens}: wanted a multiple of {self.pad_to_multiple_of=}")
        if isinstance(self.drop_keys, str):
            raise ValueError(f"drop_keys={self.drop_keys!r}: wanted several keys, such as ({self.drop_keys!r},)")

    def __repr__(self) -> str:
        changed = (f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != f.default)
        return f"{type(self).__name__}({', '.join(changed)})"

    @classmethod
    def for_model(cls, model: Any, **options: Any) -> PackingCollator:
        """Returns a collator with what `model`, a model or its config, needs.

        Sets `first_position` (RoBERTa-like models do not start at 0) and `pad_token_id` from the config, and from the
        class of the model, which a config alone does not tell, `mask_first_label=False` for masked language models and
        token classification, `labels="given"` for heads with one result per document. `options` are those of the class
        and win. Raises `ValueError` where there is no config, or a RoBERTa-like one without the `pad_token_id` to start
        after, and for encoder-decoders, whose padded batches run without padding as they are.
        """
        for wrapper in ("_orig_mod", "module"):
            model = getattr(model, wrapper, model)
        model = model.get_base_model() if hasattr(model, "get_base_model") else model
        forward = getattr(type(model), "forward", None)
        if forward is not None and "decoder_input_ids" in inspect.signature(forward).parameters:
            raise ValueError(
                f"{type(model).__name__} takes tokens for an encoder and a decoder, and this collator packs one row of "
                f"tokens. Keep transformers.DataCollatorForSeq2Seq: enabled, the model runs its padded batches without "
                f"the padding"
            )
        config = getattr(model, "config", model)
        config = config.get_text_config() if hasattr(config, "get_text_config") else config
        model_type = getattr(config, "model_type", None)
        if model_type is None:
            raise ValueError(f"wanted a transformers model or config, found {type(model).__name__}")
        found: dict[str, Any] = {}
        if "first_position" not in options:
            from autopack.registry import first_position  # needs torch, which this module does not

            found["first_position"] = first_position(config)
        pad_token_id: Any = getattr(config, "pad_token_id", None)
        if is_int(pad_token_id) and pad_token_id >= 0:
            found["pad_token_id"] = pad_token_id
        if type(model).__name__.endswith(UNSHIFTED_HEADS):
            found["mask_first_label"] = False
        if row_head(model) is not None:
            found["labels"] = "given"
        return cls(**(found | options))

    def __call__(self, examples: Iterable[Mapping[str, Any]], return_tensors: str | None = None) -> dict[str, Any]:
        """Returns the packed batch of `examples`; `return_tensors` overrides the option of that name."""
        if (return_tensors := return_tensors or self.return_tensors) not in TENSORS:
            raise ValueError(f"return_tensors={return_tensors!r}: wanted one of {TENSORS}")
        if isinstance(examples, (Mapping, str)) or not isinstance(examples, Iterable):
            raise InvalidPacking(f"wanted a list of examples, found {type(examples).__name__}; pass a list of dicts")
        documents = [self._read(index, example) for index, example in enumerate(examples)]
        if not documents:
            raise InvalidPacking("wanted at least one example, found an empty batch; leave empty batches out")
        self._settle_labels(documents)
        _check_same_columns(documents)
        batch = self._assemble(documents)
        for key in documents[0].targets:
            targets = np.concatenate([d.targets[key] for d in documents])
            batch[key] = targets.astype(np.float32 if targets.dtype.kind == "f" else np.int64)
        if return_tensors == "pt":
            import torch

            batch = {k: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in batch.items()}
        return batch

    def _read(self, index: int, example: Mapping[str, Any]) -> _Example:
        """One example as arrays, without its padding and with its inner starts."""
        if not isinstance(example, Mapping):
            raise InvalidPacking(f"example {index}: wanted a mapping with 'input_ids', found {type(example).__name__}")
        unwanted = {*self.drop_keys, *(LABEL_KEYS if self.labels == "none" else ())}
        given = {k: v for k, v in example.items() if v is not None and k not in unwanted}
        if "input_ids" not in given:
            found = f"found the keys {sorted(map(str, given))}; tokenize first (inputs_embeds are not packed)"
            raise InvalidPacking(f"example {index}: wanted 'input_ids', {found}")
        ids = _read_numbers(index, "input_ids", given.pop("input_ids"))
        is_row = ids.ndim == 2 and len(ids) == 1
        ids = ids[0] if is_row else ids
        if not ids.size:
            raise _invalid(index, "input_ids", "found no tokens; leave empty documents out")
        if ids.ndim != 1 or ids.dtype.kind != "i" or ids.min() < 0:
            found = f"{ids.dtype} of shape {ids.shape} from {ids.min()}"
            raise _invalid(index, "input_ids", f"wanted token ids, ints of at least 0 of shape (T,), found {found}")
        if len(label_keys := [k for k in LABEL_KEYS if k in given]) > 1:
            raise _invalid(index, label_keys[1], f"found beside {label_keys[0]!r}; name one of them in drop_keys")
        columns, per_document = {"input_ids": ids}, {}
        for key, value in given.items():
            if key not in (*LABEL_KEYS, *DECLARATIONS) and is_text(value):
                continue
            values = _read_numbers(index, key, value)
            values = values[0] if is_row and values.ndim and len(values) == 1 else values
            if key == "seq_lengths" or (key == DOCUMENT_WEIGHT and self.loss_weights):
                per_document[key] = np.atleast_1d(values)
            elif key == LOSS_WEIGHTS and self.loss_weights:
                raise _invalid(index, key, f"found beside {self.loss_weights=}; give one of them, or drop it")
            elif key in LABEL_KEYS and values.shape == ids.shape and values.dtype.kind != "f":
                columns["labels"] = values.astype(np.int64)
            elif key in LABEL_KEYS:
                per_document["labels"] = values
            elif key in DOCUMENT_KEYS:
                per_document[key] = values
            elif values.shape[:1] == ids.shape and values.ndim <= (1 if key in DECLARATIONS else 2):
                columns[key] = values
            else:
                found = f"found shape {values.shape} for {len(ids)} tokens, wanted one value per token"
                raise _invalid(index, key, f"{found}; name it in drop_keys (images and scalars are not packed)")
        read = _declared_documents(index, columns, per_document.get("seq_lengths"))
        for key in sorted(per_document.keys() - {"seq_lengths", DOCUMENT_WEIGHT}):
            name = label_keys[0] if key == "labels" else key
            is_packed = "seq_lengths" in per_document
            read.targets[key] = _targets(index, name, per_document[key], len(ids), len(read.starts), is_packed)
        if (weights := per_document.get(DOCUMENT_WEIGHT)) is not None:
            if weights.shape != read.starts.shape or not (np.isfinite(weights) & (weights >= 0)).all():
                found = f"found {weights.tolist()}, wanted a finite number of at least 0 for each of {len(read.starts)}"
                raise _invalid(index, DOCUMENT_WEIGHT, f"{found} document(s)")
            read.weights = weights
        if self.max_tokens and len(read) > self.max_tokens:
            found = f"found {len(read)} tokens for rows of at most max_tokens={self.max_tokens}"
            if self.overlong == "error":
                raise _invalid(index, "input_ids", f"{found}; raise it, or pass overlong='truncate'")
            read.truncate(self.max_tokens)
        return read

    def _settle_labels(self, documents: list[_Example]) -> None:
        """Checks that all examples have the same sort of labels, and makes labels where they are to be made."""
        sort = documents[0].sort
        for index, document in enumerate(documents):
            if document.sort != sort:
                raise _invalid(index, "labels", f"found {document.sort}, but {sort} in example 0; make them the same")
        if sort != "no labels" or self.labels in ("given", "none"):
            return
        if self.labels == "required" or not self.mask_first_label:
            wanted = "wanted with labels='required', and always with mask_first_label=False"
            raise _invalid(0, "labels", f"not found in any example, {wanted}; add them, or pass labels='none'")
        for document in documents:
            kept = np.logical_and.reduce([document.columns[k] for k in COMPLETION_KEYS if k in document.columns])
            document.columns["labels"] = np.where(kept, document.columns["input_ids"], IGNORED)

    def _rows(self, lengths: list[int]) -> list[range]:
        """Which examples share a row: next-fit, in order."""
        cuts, used = [0], 0
        for index, length in enumerate(lengths):
            if self.max_tokens and used + length > self.max_tokens:
                cuts.append(index)
                used = 0
            used += length
        return [range(start, end) for start, end in pairwise([*cuts, len(lengths)])]

    def _assemble(self, documents: list[_Example]) -> dict[str, Any]:
        """The rows as numpy arrays, with everything that declares their documents."""
        lengths = [len(d) for d in documents]
        rows = self._rows(lengths)
        used = [sum(lengths[i] for i in row) for row in rows]
        width = max(used) + -max(used) % (self.pad_to_multiple_of or 1)
        longest = max(int(np.diff(d.starts, append=len(d)).max()) for d in documents)
        positions, seq_idx = np.empty((len(rows), width), np.int64), np.empty((len(rows), width), np.int32)
        batch: dict[str, Any] = {"input_ids": None, "position_ids": positions}
        for key, first in documents[0].columns.items():
            if key != "position_ids":
                kinds = {d.columns[key].dtype.kind for d in documents}
                dtype = np.float32 if "f" in kinds else np.int64 if "i" in kinds else np.bool_
                padding = self.pad_token_id if key == "input_ids" else PADDING.get(key, 0)
                batch[key] = np.full((len(rows), width, *first.shape[1:]), padding, dtype)
        if self.loss_weights:
            if "labels" not in batch:
                raise _invalid(0, "labels", "found none per token, which loss_weights= is for; leave it out")
            batch[LOSS_WEIGHTS] = weights = np.empty((len(rows), width), np.float32)
        bounds = []
        for number, row in enumerate(rows):
            for key in documents[0].columns.keys() - {"position_ids"}:
                np.concatenate([documents[i].columns[key] for i in row], out=batch[key][number, : used[number]])
            offsets = np.cumsum([0, *(lengths[i] for i in row)])
            real = [documents[i].starts + offsets[i - row[0]] for i in row]
            starts = np.concatenate([*real, np.arange(used[number], width, longest)])
            document_lengths = np.diff(starts, append=width)
            seq_idx[number] = np.repeat(np.arange(len(starts)), document_lengths)
            positions[number] = np.arange(width) - np.repeat(starts, document_lengths) + self.first_position
            for i, end in zip(row, offsets[1:], strict=True):
                if "position_ids" in documents[i].columns:
                    positions[number, end - lengths[i] : end] = documents[i].columns["position_ids"]
            for i, end in zip(row, offsets[1:], strict=True):
                if end < width and positions[number, end] == (last := positions[number, end - 1]) + 1:
                    found = f"end at {last}, and the next document of the row starts at {last + 1}: no boundary is left"
                    raise _invalid(i, "position_ids", f"{found}; drop them by drop_keys=('position_ids',)")
            if self.mask_first_label and "labels" in batch:
                batch["labels"][number, starts] = IGNORED
            if self.loss_weights:
                given = [
                    np.ones(len(d.starts)) if d.weights is None else d.weights for d in documents[row.start : row.stop]
                ]
                given.append(np.zeros(len(starts) - sum(map(len, given))))  # padding
                targets = batch["labels"][number] != IGNORED
                weights[number] = token_weights(targets, document_lengths, self.loss_weights, np.concatenate(given))
            bounds.append(starts + number * width)
        if self.return_attention_mask and min(used) < width:
            batch["attention_mask"] = (np.arange(width) < np.array(used)[:, None]).astype(np.int64)
        if self.return_seq_idx:
            batch["seq_idx"] = seq_idx
        if self.return_flash_kwargs:
            cu_seq_lens = np.concatenate([*bounds, [len(rows) * width]]).astype(np.int32)
            batch |= {"cu_seq_lens_q": cu_seq_lens, "cu_seq_lens_k": cu_seq_lens.copy()}
            batch["max_length_q"] = batch["max_length_k"] = int(np.diff(cu_seq_lens).max())
        return batch


@dataclass
class _Example:
    """Values per token, where the documents start (the first at 0), and their labels if not per token."""

    columns: dict[str, np.ndarray]
    starts: np.ndarray
    targets: dict[str, np.ndarray] = field(default_factory=dict)
    weights: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.columns["input_ids"])

    @property
    def sort(self) -> str:
        per_token = "labels per token" if "labels" in self.columns else "no labels"
        return "labels per document" if "labels" in self.targets else per_token

    def truncate(self, length: int) -> None:
        self.columns = {k: v[:length] for k, v in self.columns.items()}
        self.starts = self.starts[self.starts < length]
        self.targets = {k: v[: len(self.starts)] for k, v in self.targets.items()}
        self.weights = None if self.weights is None else self.weights[: len(self.starts)]


def _declared_documents(index: int, columns: dict[str, np.ndarray], lengths: np.ndarray | None) -> _Example:
    """The example without padding and declarations, apart from its own positions, and where its documents start."""
    declared = {}
    if (mask := columns.pop("attention_mask", None)) is not None:
        real = np.flatnonzero(mask)
        if not (mask >= 0).all() or not real.size:
            found = f"found values from {mask.min()} to {mask.max()}"
            raise _invalid(index, "attention_mask", f"{found}; wanted 0 at padding and 1 at one token or more")
        low, high = int(real[0]), int(real[-1]) + 1
        if high - low != real.size:
            hole = low + int(np.argmin(mask[low:high]))
            raise _invalid(index, "attention_mask", f"found a zero between ones, at token {hole}; take such tokens out")
        columns = {k: v[low:high] for k, v in columns.items()}
        if mask.max() > 1:
            declared["attention_mask"] = np.flatnonzero(np.diff(mask[low:high])) + 1
    if "seq_idx" in columns:
        declared["seq_idx"] = np.flatnonzero(np.diff(columns.pop("seq_idx"))) + 1
    if lengths is not None:
        tokens = len(columns["input_ids"])
        if lengths.ndim != 1 or lengths.dtype.kind != "i" or (lengths < 1).any() or lengths.sum() != tokens:
            raise _invalid(index, "seq_lengths", f"found {lengths.tolist()}; wanted lengths that sum to {tokens}")
        declared["seq_lengths"] = np.cumsum(lengths)[:-1]
    if (positions := columns.get("position_ids")) is not None:
        if positions.dtype.kind != "i" or positions.min() < 0:
            raise _invalid(index, "position_ids", f"wanted ints >= 0, found {positions.dtype} from {positions.min()}")
        step = np.diff(positions)
        if not declared and (step > 1).any():
            at = int(np.argmax(step > 1))
            found = f"jump from {positions[at]} to {positions[at + 1]}, where a packed row starts a new document"
            raise _invalid(index, "position_ids", f"{found}; name them in drop_keys, or add seq_idx if it is one")
        declared["position_ids"] = np.flatnonzero(step != 1) + 1
    name, inner = next(iter(declared.items()), ("", np.empty(0, np.int64)))
    for other, starts in declared.items():
        if not np.array_equal(starts, inner):
            found = f"starts documents at {[0, *starts.tolist()]}, but {name!r} at {[0, *inner.tolist()]}"
            raise _invalid(index, other, f"{found}; name the wrong one in drop_keys")
    return _Example(columns, np.concatenate([[0], inner]))


def _targets(index: int, key: str, values: np.ndarray, tokens: int, documents: int, is_packed: bool) -> np.ndarray:
    """Labels that are not per token, as (documents of the example, ...); `is_packed` says that they come as a list."""
    if documents == 1 and values.shape[:1] == (1,) and (is_packed or (values.ndim == 1 and values.dtype.kind != "f")):
        return values
    if documents == 1 and (values.ndim == 0 or (values.ndim == 1 and values.dtype.kind == "f")):
        return values[None]
    if documents > 1 and values.ndim in (1, 2) and len(values) == documents:
        return values
    found = f"found {values.dtype} of shape {values.shape} for {tokens} tokens in {documents} document(s)"
    wanted = "wanted an int per token, or per document an int (a class), a float or a vector of floats"
    raise _invalid(index, key, f"{found}; {wanted}")


def _check_same_columns(documents: list[_Example]) -> None:
    """All examples have the same keys, with values of the same shape; own positions are optional."""
    first = documents[0]
    for index, document in enumerate(documents):
        if (document.weights is None) != (first.weights is None):
            lacking, other = (index, 0) if document.weights is None else (0, index)
            raise _invalid(lacking, DOCUMENT_WEIGHT, f"not found, but example {other} has it; add it, or drop it")
        present, here = ({*d.columns, *d.targets} - {"position_ids"} for d in (first, document))
        for key in sorted(present ^ here):
            lacking, other = (index, 0) if key in present else (0, index)
            raise _invalid(lacking, key, f"not found, but example {other} has it; add it, or name it in drop_keys")
        shapes = [{k: v.shape[1:] for k, v in d.columns.items()} for d in (first, document)]
        for shape, d in zip(shapes, (first, document), strict=True):
            shape |= {k: v.shape[1:] for k, v in d.targets.items()}
        for key in shapes[0].keys() & shapes[1].keys():
            if shapes[0][key] != shapes[1][key]:
                found = f"found values of shape {shapes[1][key]}, but {shapes[0][key]} in example 0; make them equal"
                raise _invalid(index, key, f"{found} (vectors of floats as labels are targets of a whole document)")


def _read_numbers(index: int, key: str, value: Any) -> np.ndarray:
    try:
        return numbers(value)
    except ValueError as error:
        raise _invalid(index, key, str(error)) from error


def _invalid(index: int, key: str, found: str) -> InvalidPacking:
    return InvalidPacking(f"example {index}, {key!r}: {found}")
