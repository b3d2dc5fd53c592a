"""Rows that ranks share, for test_processes.py: functions of the rank."""

import contextlib
import copy
import pickle
from functools import partial

import torch
import torch.distributed as dist
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import autopack
from autopack.inspection import sharding
from tests.engine import padded_batch
from tests.integration import alst, own_code
from tests.integration.documents import documents, exact, holds, leaks, run_alone, says, with_labels
from tests.integration.row_parts import LENGTHS, error, model_of, rows_of, shared
from tests.support.trained import checkpointed, with_lora

OURS = "autopack_original"
"""An attribute of functions that autopack has put somewhere."""
KINDS = (
    "llama",
    "mistral",
    "qwen3",
    "gemma3_text",
    "mixtral",
    "deepseek_v3",
    "gpt2",
    "olmo2",
    "bert:masked-lm",
)


TOGETHER = ("mamba", "jamba", "qwen3_next", "rwkv", "falcon", "gptj", "gpt_oss", "mpt")
"""Types of which some layer runs whole rows on every rank: recurrences, attention of their own (and
ALiBi), sinks."""
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}


def _shared_out(made):
    """A model, or one of a kind, whose rows ranks share."""
    model = model_of(made) if isinstance(made, str) else made
    autopack.enable(model, sequence_parallel=dist.group.WORLD)
    return model


def _part(model, lengths=LENGTHS):
    """What this rank has of rows."""
    _, batch = rows_of(model.config, lengths)
    return autopack.packing.shard_rows(batch, dist.get_rank(), dist.get_world_size())


def _of_any_length(config):
    """Rows with a document that is longer than the part of a rank."""
    return rows_of(config, ((7, 12, 5), (3, 19, 2)))


def _compiled(model):
    for layer in model.model.layers:
        layer.compile(backend="eager")
    return model


def declared_otherwise(config):
    """23 columns, which two ranks cannot share equally, declared by numbers of documents and
    without positions."""
    texts, batch = rows_of(config, ((7, 12, 4), (9, 11, 3)))
    starts = batch.pop("position_ids") == 0
    return texts, {**batch, "seq_idx": starts.cumsum(1).int()}


def _segments(config):
    """Segment ids, of rows that say no positions."""
    texts, batch = rows_of(config)
    return texts, {**batch, "attention_mask": (batch.pop("position_ids") == 0).cumsum(1)}


def _whole_rows(config):
    """One document per row, which nothing declares."""
    texts, batch = rows_of(config, ((24,), (24,)))
    del batch["position_ids"]
    return texts, batch


def _by_deepspeed(order, kind="llama", in_eval=False):
    """The error of rows that DeepSpeed shares out, registered before or after the model is enabled.

    Its attention is a stand-in here, after its source.
    """
    model, plain = model_of(kind), model_of(kind)
    texts, batch = rows_of(model.config)
    alone = run_alone(plain, texts)
    try:
        if order == "stock":
            alst.register(dist.group.WORLD)
            return shared(model, batch).error(alone)
        if order == "after":
            autopack.enable(model)
        standing = alst.register(dist.group.WORLD, in_eval=in_eval)
        autopack.enable(model)
        found = shared(model, batch)
        other = model_of("qwen3")  # of another type, which looks at the same place
        autopack.enable(other)
        after = shared(model, batch)
        whole = alone.logits
        if not in_eval:
            with torch.no_grad():  # whole rows, on this process alone
                whole = model.eval()(
                    input_ids=batch["input_ids"], position_ids=batch["position_ids"]
                ).logits
                whole = whole.flatten(0, 1)
        autopack.disable([other, model])
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is standing
        assert not hasattr(sharding.exchange_of(standing).attn, OURS)
    finally:
        ALL_ATTENTION_FUNCTIONS._local_mapping.clear()
    evaluated = float((whole - alone.logits).abs().max() / alone.logits.std())
    return max(found.error(alone), after.error(alone), evaluated)


def _trained_beside_data_parallel():
    """A model in a group of its own rank's alone shares nothing, and trains as ever."""
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    return error("llama", lambda config: rows_of(config, ((7, 12, 5),)), group=alone)


def _called(make, change=lambda part: part, **options):
    """A call of a model, or of one of a kind; `change` changes what this rank hands in."""

    def call(_):
        model = _shared_out(model_of(make, **options) if isinstance(make, str) else make())
        part = _part(model)
        changed = change(part)
        model(**(part if changed is None else changed))

    return call


def _after_a_hooked_one():
    """What a twin has said of a model with hooks is not kept for one without them."""
    with contextlib.suppress(autopack.AutopackError):
        _called(lambda: own_code.hooked(model_of("llama")))(0)
    return error("llama")


def _hooked_later(_):
    """A hook that comes before rows of which no part says that it holds several documents."""
    model = _shared_out("llama")
    part = _part(model, ((24,),))
    model(**part)
    own_code.hooked(model)
    model(**part)


def _pooled(_):
    whole = model_of("bert:masked-lm")
    model = _shared_out(type(whole.bert)(whole.config))
    model(**{name: value for name, value in _part(model).items() if "labels" not in name})


def _pickled(_):
    model = pickle.loads(pickle.dumps(_shared_out("llama")))
    model(**_part(model))


def _otherwise_enabled(_):
    model = model_of("llama")
    autopack.enable(model)
    _shared_out(model)


def _on_one_rank(change):
    return lambda part: change(part) if dist.get_rank() == 1 else None


def _shorter(part):
    for name in ("input_ids", "position_ids", "labels", "shift_labels"):
        part[name] = part[name][:, :-2]


def _counting_boundaries(part):
    part["shift_labels"] = part["shift_labels"].where(part["shift_labels"] != -100, 1)


def _refused_by_one_rank(rank):
    """No rank waits for the one that refuses: whether each says so."""
    try:
        _called("llama", _on_one_rank(lambda part: part.update(use_cache=True)))(rank)
    except autopack.AutopackError as error:
        return ("rank 1 of those that share them refused", "a cache is wanted")[rank] in str(error)
    return False


def _watched(_):
    """Checks made and skipped."""
    model = model_of("llama")
    handle = autopack.enable(model, check_every=1, sequence_parallel=dist.group.WORLD)
    model(**_part(model)).loss.backward()
    return [handle.checked.checks, dict(handle.checked.skipped)]


def _padded_on_the_left(config):
    """Rows of one document each, of which nothing says positions: no label is compared with what
    padding predicts."""
    texts = documents(config, [24, 17], 0)
    return texts, with_labels(padded_batch([text[0] for text in texts], "left"))


EXACT = {
    **{kind: partial(error, kind) for kind in KINDS},
    **{kind: partial(error, kind, _of_any_length, attention="eager") for kind in TOGETHER},
    "dynamic rope": partial(
        error, "llama", _of_any_length, rope_parameters=DYNAMIC, max_position_embeddings=16
    ),
    "heads that ranks cannot share": partial(error, "llama", _of_any_length, num_key_value_heads=1),
    "eager": partial(error, "llama", attention="eager"),
    "declared by seq_idx, padded": partial(error, "llama", declared_otherwise),
    "segments": partial(error, "mistral", _segments),
    "whole rows": partial(error, "llama", _whole_rows),
    "padded on the left": partial(error, "llama", _padded_on_the_left),
    "reentrant": partial(error, "llama", change=partial(checkpointed, reentrant=True)),
    "checkpointing": partial(error, "llama", change=checkpointed),
    "copy": partial(error, "llama", change=copy.deepcopy),
    "compiled": partial(error, "llama", change=_compiled),
    "evaluated": partial(error, "mistral", change=lambda model: model.eval()),
    "adapted": partial(error, "llama", make=lambda kind: with_lora(model_of(kind))),
    **{
        name: partial(error, name, make=lambda _, make=make: make())
        for name, make in own_code.SERVED.items()
    },
    "audited after a hooked one": _after_a_hooked_one,
    "alone": _trained_beside_data_parallel,
    "shared out by deepspeed, registered before": partial(_by_deepspeed, "before"),
    "shared out by deepspeed, registered after": partial(_by_deepspeed, "after"),
    "shared out by deepspeed, windows": partial(_by_deepspeed, "after", "mistral"),
    "shared out by deepspeed, in evaluation too": partial(_by_deepspeed, "before", "mistral", True),
}
REFUSED = {
    "padded inside": (
        _called("longformer:masked-lm", attention="eager"),
        "pads rows before its layers",
    ),
    "masks combined": (_called("qwen4_exp_text", attention="eager"), "combines its masks"),
    "whole model": (_called("reformer", attention="eager"), "documents are run alone"),
    "biases of columns": (_called("bloom", attention="eager"), "was given alibi"),
    "scaled queries": (_called("llama4_text"), "queries are scaled by the columns"),
    "own mask": (
        _called("layoutlm:masked-lm", lambda part: {"input_ids": part["input_ids"]}),
        "a pooler reads",
    ),
    "labels": (
        _called("llama", lambda part: {k: v for k, v in part.items() if k != "shift_labels"}),
        "shift_labels",
    ),
    "boundaries": (_called("llama", _counting_boundaries), "where a document ends"),
    "floats": (
        _called("llama", lambda part: {**part, "position_ids": part["position_ids"].float()}),
        "a tensor of integers of its shape",
    ),
    "columns": (_called("llama", _on_one_rank(_shorter)), "equally many columns"),
    "weights": (
        _called("llama", lambda part: part.update(output_attentions=True), attention="eager"),
        "attention weights",
    ),
    "routers": (_called("mixtral", lambda part: part.update(output_router_logits=True)), "routers"),
    "last logits": (_called("llama", lambda part: part.update(logits_to_keep=1)), "last tokens"),
    **{name: (_called(make), words) for name, (make, words) in own_code.REFUSED.items()},
    "hook later": (_hooked_later, "it has no hook"),
    "pooler": (_pooled, "pooler"),
    "pickled": (_pickled, "process groups cannot be"),
    "otherwise": (_otherwise_enabled, "sequence_parallel=None"),
    "no group": (
        lambda _: autopack.enable(model_of("llama"), sequence_parallel=2),
        "init_process_group",
    ),
}
CASES = {
    **{name: (lambda _, case=case: case(), exact) for name, case in EXACT.items()},
    "shared out by deepspeed, without autopack": (lambda _: _by_deepspeed("stock"), leaks),
    "checked": (_watched, lambda found: found == [1, {}]),
    "one rank": (_refused_by_one_rank, holds),
    **{f"refused, {name}": (call, says(words)) for name, (call, words) in REFUSED.items()},
}
"""With what a rank has to find."""
