"""Mini-batch packing: a list of examples becomes packed rows for any Trainer or DataLoader.

The method is *MiniBatchPacking + PosID* of "Enhancing Training Efficiency Using Packing with Flash
Attention" (arXiv 2407.09105): examples are concatenated instead of padded, and `position_ids`
restart at each example.
"""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np

from autopack.inspection.configs import text_config
from autopack.layout import COMPLETION_KEYS, IGNORED_LABEL, LABEL_KEYS
from autopack.packing.checks import (
    DOCUMENT_WEIGHT,
    IDS,
    LOSS_WEIGHTS,
    MASK,
    POSITIONS,
    Weighing,
    bounds_of,
    check_in,
    check_options,
    invalid,
    labels_of,
    no_examples,
    numbered,
    reworded,
    token_weights,
    unusable,
)
from autopack.packing.examples import Example, check_alike, joined, merge, read_example
from autopack.packing.media import join, read_pictures, spread_masks
from autopack.packing.strategies import Places, place

PADDING = {"labels": IGNORED_LABEL, "shift_labels": IGNORED_LABEL, "special_tokens_mask": 1}
Labels = Literal["auto", "given", "unshifted", "completions", "none"]
Declaration = Literal["attention_mask", "cu_seq_lens", "seq_idx"]

_MADE_FOR = "_made_for"
"""Name of the attribute with the model of `for_model`, until a first batch is made."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PackingCollator:
    """Collator that concatenates the examples of a mini-batch into packed rows.

    Use it as `data_collator` of a `Trainer` or `collate_fn` of a `DataLoader`. An example is a
    mapping of lists, tuples, numpy arrays or torch tensors; `(1, T)`, as tokenizers give with
    `return_tensors`, counts as `(T,)`. The result is a dict (of tensors a `packing.HostBatch`,
    which a trainer moves to a device so that an enabled model need not read there where documents
    begin), with `B` rows of `T` columns:

    * `input_ids` (B, T) int64; B is 1 unless `max_length` is set. Padding is token 0, which nothing
      sees: it has labels of -100, and is declared as documents of its own, none longer than the
      longest real one, so that positions stay in range.
    * `position_ids` (B, T) int64, restarting at `first_position` in every document. An example's
      own position ids are kept.
    * `labels` (B, T) int64 for labels per token, with the first of every document set to -100: no
      token of that document predicts it. Or (documents,) int64 for one integer or bool (a class)
      per document, (documents,) float32 for one float (a regression target), (documents, K) float32
      for K floats (several targets), in the order of the documents. Integer vectors are labels per
      token, float vectors are targets of the document. `label` and `label_ids` mean `labels`; one
      batch holds one sort of label.
    * `start_positions`, `end_positions`, `next_sentence_label` (documents,) int64, from one int per
      document.
    * `attention_mask` (B, T) int64, 0 at padding, only for batches that have padding.
    * `loss_weights` (B, T) float32, on request: the weight of each token's loss, 0 at tokens that
      are no targets.
    * Every other key with a value, or K values, per token: (B, T) or (B, T, K), as int64, float32
      or bool. Text and dictionaries are left out; anything else that is not per token is refused.
    * `image_attention_mask`, `cross_attention_mask` (B, T, images, ...) int64: along the diagonal,
      so that each document sees its own images; empty images, which no token sees, are left out.
    * Media, as a processor makes them of one document (`pixel_values`, grids, sizes), end to end in
      the order of the documents; pictures (`images`, `image`) as `image_processor` makes them of
      the batch's pictures.

    Padding inside the examples (zeros of their `attention_mask` at either end) is removed. An
    example may itself be a packed row: declared by `position_ids` that restart, `seq_idx`, an
    `attention_mask` of segment ids (`1 1 2 2 0`) or `seq_lengths` (as TRL's packed datasets have).

    Args:
        labels: `"auto"` makes labels from `input_ids` if no example has any (-100 where
            `completion_mask` or `assistant_masks` is 0); `"given"` makes none; `"none"` gives none.
            `"unshifted"` keeps the first label of each document, for losses that do not shift
            (masked language models, token classification), and refuses a batch without labels.
            `"completions"` is `"auto"`, and an example may be a prompt and its completions, tokens
            of TRL's names: `prompt_ids` with `completion_ids`, a list of completions or one, or
            with `chosen_ids` and `rejected_ids`. Each completion becomes a document that begins
            with the prompt; only the completion's tokens are labels. The model computes the prompt
            once for all (`enable(model, share=...)`). A completion may be empty. Any other key may
            hold one number for each completion (`advantages`), which becomes (documents,). Other
            examples of the batch are documents as ever.
        first_position: the first position of a document: 0, or `padding_idx + 1` for RoBERTa-like
            models.
        max_length: split the batch into rows of at most this many tokens, filled in order
            (next-fit, so documents keep their order), padded to the longest. By default there is
            one row.
        overflow: treatment of an example of more than `max_length` tokens: `"error"`, or
            `"truncate"` its end.
        pad_to_multiple_of: pad the rows to a multiple of this.
        max_documents: the most documents of a row of `max_length`.
        rows: give every batch exactly this many rows of exactly `max_length` columns, so that a
            compiled step sees one shape. With `max_documents` too, `cu_seq_lens_q` and
            `cu_seq_lens_k` have `rows * (max_documents + 1) + 1` elements (the last are repeated:
            empty documents) and `max_length_q` is `max_length`.
        declare: forms that declare documents beside `position_ids`. `"attention_mask"`;
            `"cu_seq_lens"`: `cu_seq_lens_q` and `cu_seq_lens_k` (int32, documents and padding over
            the flattened rows, so the last is `B * T`), and `max_length_q` and `max_length_k`
            (Python ints); `"seq_idx"` (B, T) int32: the number of the document in its row, padding
            included.
        loss_weights: `"document"` adds weights by which all documents count alike, however long;
            `"token"` weights by which all targets do. Either is multiplied by a float
            `document_weight` of each example (a list of them, one per document, in packed rows).
            For `autopack.packing.weighted_loss`; needs labels per token.
        image_processor: makes pixels of pictures: a processor or image processor of transformers.
        drop_keys: keys of the examples to ignore.

    Attributes:
        images_by_row: True if the model takes images as (B, images, ...), the empty ones of a row
            last, as Idefics does; `for_model` knows.

    Raises `InvalidPacking` for a batch that cannot be packed exactly, with the example and the key,
    and `ValueError` for options that are out of range or contradict each other.
    """

    labels: Labels = "auto"
    first_position: int = 0
    max_length: int | None = None
    overflow: Literal["error", "truncate"] = "error"
    pad_to_multiple_of: int | None = None
    max_documents: int | None = None
    rows: int | None = None
    declare: Collection[Declaration] = ("attention_mask",)  # type: ignore[assignment]
    loss_weights: Weighing | None = None
    image_processor: Any = field(default=None, repr=False)
    drop_keys: Collection[str] = ()
    images_by_row: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        check_options(type(self), vars(self))
        for name in ("declare", "drop_keys"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.max_length and self.max_length % (self.pad_to_multiple_of or 1):
            raise ValueError(
                f"max_length={self.max_length}: wanted a multiple of "
                f"pad_to_multiple_of={self.pad_to_multiple_of}"
            )
        for name in ("max_documents", "rows"):
            if getattr(self, name) and not self.max_length:
                raise ValueError(
                    f"{name}={getattr(self, name)}: is of rows of max_length, which is missing"
                )

    @classmethod
    def for_model(cls, model: Any, **options: Any) -> PackingCollator:
        """Return a collator with the options that `model`, a model or its config, needs.

        `model` is anything that `autopack.enable` takes for one model. A warning is given if it is
        not enabled when the first batch is made. Sets `first_position` (RoBERTa-like models do not
        start at 0) and `images_by_row` from the config. From the class of the model, which a config
        alone does not tell, sets `labels="unshifted"` for masked language models, token
        classification and decoders whose loss stays in one column (BART, XLNet), and
        `labels="given"` for heads with one result per document. `options` are arguments of the
        class, and win. Raises `UnsupportedModel` if there is no model or config, and `ValueError`
        for a RoBERTa-like one without the `pad_token_id` to start after, and for encoder-decoders,
        whose padded batches run without padding as they are.
        """
        if not hasattr(model, "model_type"):
            # needs torch, which this module does not
            from autopack.integrations.wrappers import unwrap

            model = unwrap(model)
        forward = getattr(type(model), "forward", lambda: None)  # a config has none
        arguments = inspect.signature(forward).parameters
        if "decoder_input_ids" in arguments:
            raise ValueError(
                f"{type(model).__name__} has an encoder and a decoder, and this collator packs one "
                "row of tokens. Keep transformers.DataCollatorForSeq2Seq: enabled, the model runs "
                "its padded batches without the padding"
            )
        config = getattr(model, "config", model)
        from autopack.inspection.heads import row_head  # need torch, which this module does not
        from autopack.inspection.source import shifts_labels
        from autopack.registry import families, first_position

        if "first_position" not in options:
            options["first_position"] = first_position(text_config(config))
        if row_head(model) is not None:
            options.setdefault("labels", "given")
        elif "labels" in arguments and not shifts_labels(model):
            options.setdefault("labels", "unshifted")  # a label and the logits of its column
        made = cls(**options)
        by_row = any(
            config.model_type in types
            for family in families()
            for form, types in family.tiny.images.items()
            if form.startswith("nested") or form.endswith("by row")
        )
        object.__setattr__(made, "images_by_row", by_row)
        if config is not model:
            vars(made)[_MADE_FOR] = weakref.ref(model)
        return made

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != _MADE_FOR}

    def __call__(
        self, examples: Iterable[Mapping[str, Any]], return_tensors: str = "pt"
    ) -> dict[str, Any]:
        """Return the packed batch of `examples`, of tensors (`"pt"`) or of numpy (`"np"`)."""
        if (model := vars(self).pop(_MADE_FOR, lambda: None)()) is not None:
            _warn_if_not_enabled(model)
        check_in("return_tensors", return_tensors, ("pt", "np"))
        if isinstance(examples, (Mapping, str)) or not isinstance(examples, Iterable):
            raise no_examples(
                f"wanted a list of examples, found {type(examples).__name__}; pass a list of dicts"
            )
        if not (examples := list(examples)):
            raise no_examples(
                "wanted at least one example, found an empty batch; leave empty batches out"
            )
        ignored = {*self.drop_keys, *(LABEL_KEYS if self.labels == "none" else ())}
        merged = None if self.max_length else merge(examples, ignored)
        read = [] if merged is None else [merged]
        for index, example in enumerate(() if read else examples):
            with reworded(partial("example {}, {}".format, index)):
                read.append(self._read(example, ignored))
        self._add_labels(read)
        check_alike(read)
        documents = bounds_of([len(example.starts) for example in read])
        media = [example.media for example in read]
        whole = joined(read, self.first_position)
        placed = place(whole.lengths, documents, self)
        batch = self._assemble(whole, placed)
        if any(media):
            rows, width = placed.real.shape
            of_row = placed.tokens[placed.ends - 1] // width
            where = [np.flatnonzero(of_row == row) for row in range(rows)], self.images_by_row
            pictures = [each.pop("images", []) for each in media]
            spread_masks(media, np.split(placed.tokens % width, placed.ends[:-1]), width)
            batch |= join(media, *where)
            batch |= read_pictures(self.image_processor, pictures, *where, return_tensors)
        if return_tensors == "pt":
            import torch

            from autopack.layout.host import HostBatch  # needs torch, which this module does not

            batch = HostBatch(
                (k, torch.from_numpy(v) if isinstance(v, np.ndarray) else v)
                for k, v in batch.items()
            )
        return batch

    def _read(self, example: Any, ignored: set[str]) -> Example:
        """Return one example as arrays; if too long, truncate it or raise, as `overflow` says."""
        read = read_example(
            example,
            ignored,
            self.loss_weights is not None,
            self.image_processor is not None,
            self.labels == "completions",
        )
        if self.max_length and len(read) > self.max_length:
            if self.overflow == "error":
                raise unusable(
                    f"{IDS!r}: found {len(read)} tokens for rows of at most max_length="
                    f"{self.max_length}; raise it, or pass overflow='truncate'"
                )
            if read.media:
                raise unusable(
                    f"{IDS!r}: found {len(read)} tokens and {[*read.media]}, which are not cut "
                    "with them; raise max_length"
                )
            read.truncate(self.max_length)
        if self.max_documents and len(read.starts) > self.max_documents:
            raise unusable(
                f"{IDS!r}: found {len(read.starts)} documents for rows of at most "
                f"{self.max_documents}; raise max_documents, or pack with it"
            )
        return read

    def _add_labels(self, examples: list[Example]) -> None:
        """Add labels to examples that lack them, in place, as the option `labels` says.

        `"given"` and `"none"` add none. `"completions"` adds them to each that lacks them, and
        makes one mask of completions; the others do only if no example has any.
        """
        if self.labels in ("given", "none"):
            return
        lacking = [each for each in examples if "labels" not in each.columns]
        if len(lacking) < len(examples) and self.labels != "completions":
            return
        if lacking and self.labels == "unshifted":
            raise invalid(0, "labels", "not found in any example; add them, or pass labels='none'")
        for example in lacking:
            example.columns["labels"] = labels_of(example.columns)
        # losses of completions read a mask, which other examples of the batch lack
        if self.labels == "completions":
            for columns in (each.columns for each in examples if "labels" not in each.of_documents):
                for key in COMPLETION_KEYS:
                    columns.pop(key, None)
                columns[COMPLETION_KEYS[0]] = (columns["labels"] != IGNORED_LABEL).astype(np.int64)

    def _assemble(self, whole: Example, placed: Places) -> dict[str, Any]:
        """Return the batch's rows as numpy arrays by key, with all declarations of documents."""
        real, starts, lengths = placed.real, placed.starts, placed.lengths
        shape = real.shape
        positions = (numbered(lengths) + self.first_position).reshape(shape)
        if POSITIONS in whole.columns:
            positions[real] = whole.columns.pop(POSITIONS)
            placed.check_positions(positions.reshape(-1))
        batch: dict[str, Any] = {IDS: None, POSITIONS: positions}
        for key, values in whole.columns.items():
            batch[key] = values
            if key not in whole.of_documents:
                batch[key] = np.full((*shape, *values.shape[1:]), PADDING.get(key, 0), values.dtype)
                batch[key][real] = values
        has_labels = "labels" in batch.keys() - whole.of_documents
        if self.labels != "unshifted" and has_labels:
            batch["labels"].flat[starts] = IGNORED_LABEL
        if self.loss_weights:
            if not has_labels:
                raise invalid(
                    0, "labels", "found none per token, which loss_weights= is for; leave it out"
                )
            given = np.zeros(len(starts))  # what documents of padding keep
            given[real.flat[starts]] = batch.pop(DOCUMENT_WEIGHT, 1)
            targets = batch["labels"].ravel() != IGNORED_LABEL
            batch[LOSS_WEIGHTS] = token_weights(targets, lengths, self.loss_weights, given).reshape(
                shape
            )
        if MASK in self.declare and not real.all():
            batch[MASK] = real.astype(np.int64)
        if "seq_idx" in self.declare:
            numbers = np.repeat(np.arange(len(starts), dtype=np.int32), lengths).reshape(shape)
            batch["seq_idx"] = numbers - numbers[:, :1]
        if "cu_seq_lens" in self.declare:
            cu_seq_lens, longest = placed.flash_bounds(self.max_documents if self.rows else None)
            batch |= {"cu_seq_lens_q": cu_seq_lens, "cu_seq_lens_k": cu_seq_lens.copy()}
            batch["max_length_q"] = batch["max_length_k"] = longest
        return batch


def _warn_if_not_enabled(model: Any) -> None:
    """Log a warning if autopack has not enabled a model for which packed rows are made."""
    # `autopack run` enables at the first call
    hooks = model._forward_pre_hooks.values()
    if not any(type(hook).__module__.startswith("autopack.") for hook in hooks):
        logger.warning(
            "PackingCollator.for_model makes packed rows for a %s that is not enabled, and stock "
            "transformers may let documents of a row see each other. Call autopack.enable(model) "
            "before the model is called.",
            type(model).__name__,
        )
