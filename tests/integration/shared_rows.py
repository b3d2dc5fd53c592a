"""Rows that ranks share, for test_sequence_parallel.py: functions of the rank."""

from __future__ import annotations

import copy
import pickle
import random

import pytest
import torch
import torch.distributed as dist
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import autopack
from autopack.inspection import sharding
from tests.integration import alst, own_code
from tests.integration.documents import documents, run_alone, with_mask
from tests.integration.row_parts import error, model_of, rows_of, shared

OURS = "autopack_original"
"""An attribute of functions that autopack has put somewhere."""
KINDS = ("llama", "mistral", "qwen3", "gemma3_text", "mixtral", "deepseek_v3", "gpt2", "olmo2", "bert:masked-lm")


TOGETHER = ("mamba", "jamba", "qwen3_next", "rwkv", "falcon", "gptj", "gpt_oss", "bloom", "mpt")
"""Types of which some layer runs whole rows on every rank: recurrences, attention of their own (and ALiBi), sinks."""
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}


def _share_out(model):
    autopack.enable(model, sequence_parallel=dist.group.WORLD)


def _of_any_length(config):
    """Rows with a document that is longer than the part of a rank."""
    return rows_of(config, ((7, 12, 5), (3, 19, 2)))


def _checkpointed(reentrant):
    def change(model):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        return model

    return change


def _compiled(model):
    for layer in model.model.layers:
        layer.compile(backend="eager")
    return model


def _adapted(kind):
    """A model with LoRA."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    return peft.get_peft_model(
        model_of(kind), peft.LoraConfig(r=4, init_lora_weights=False, target_modules=["q_proj", "v_proj"])
    )


def declared_otherwise(config):
    """23 columns, which two ranks cannot share equally, declared by numbers of documents and without positions."""
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


def _random_layouts():
    """The worst error over layouts drawn at random."""
    draw, worst = random.Random(0), 0.0
    for seed in range(8):
        columns, rows = 2 * draw.randint(3, 16), draw.randint(1, 3)
        cuts = [sorted(draw.sample(range(1, columns), draw.randint(0, 4))) for _ in range(rows)]
        lengths = [[b - a for a, b in zip([0, *cut], [*cut, columns], strict=True)] for cut in cuts]
        worst = max(worst, error("llama", lambda config, lengths=lengths, seed=seed: rows_of(config, lengths, seed)))
    return worst


def _perturbed():
    """How far the logits of other documents move when all tokens of one change."""
    model = model_of("llama")
    _share_out(model)
    _, batch = rows_of(model.config)
    before = shared(model, batch).logits.clone()
    batch["input_ids"] = batch["input_ids"].clone()
    batch["input_ids"][0, 7:19] = (batch["input_ids"][0, 7:19] + 1) % model.config.vocab_size
    moved = (shared(model, batch).logits - before).abs().amax(-1)
    assert moved[7:19].min() > 0
    return float(torch.cat([moved[:7], moved[19:]]).max())


def _by_deepspeed(order, kind="llama"):
    """What comes of rows that DeepSpeed shares out, registered before or after the model is enabled."""
    model, plain = model_of(kind), model_of(kind)
    texts, batch = rows_of(model.config)
    try:
        if order == "stock":
            alst.register(dist.group.WORLD)
            return {"error": shared(model, batch).error(run_alone(plain, texts))}
        if order == "before":
            standing = alst.register(dist.group.WORLD)
            autopack.enable(model)
        else:
            autopack.enable(model)
            standing = alst.register(dist.group.WORLD)
        found = shared(model, batch)
        other = model_of("qwen3")  # of another type, which looks at the same place
        autopack.enable(other)
        after = shared(model, batch)
        model.eval()
        plain.eval()
        whole = run_packed_rows(model, batch)
        autopack.disable(other)
        autopack.disable(model)
        within = sharding.exchange_of(standing).attn
        restored = ALL_ATTENTION_FUNCTIONS["sdpa"] is standing and not hasattr(within, OURS)
        plain.train()
    finally:
        ALL_ATTENTION_FUNCTIONS._local_mapping.clear()
    alone = run_alone(plain, texts)
    evaluated = float((whole - alone.logits).abs().max() / alone.logits.std())
    errors = [found.error(alone), after.error(alone), evaluated]
    return {"error": max(errors), "restored": restored}


def run_packed_rows(model, batch):
    """The logits of whole rows on this process alone: (tokens, vocabulary)."""
    with torch.no_grad():
        found = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
    return found.flatten(0, 1)


def _trained_beside_data_parallel():
    """A model in a group of its own rank's alone shares nothing, and trains as ever."""
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    return error("llama", lambda config: rows_of(config, ((7, 12, 5),)), group=alone)


def _error_of(call):
    try:
        call()
    except (autopack.AutopackError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def _called(make, part=lambda part: part, **options):
    """A call of a model, or of one of a kind; `part` changes what this rank hands in."""

    def call():
        model = model_of(make, **options) if isinstance(make, str) else make()
        _share_out(model)
        _call(model, part)

    return call


def _call(model, part=lambda part: part):
    _, batch = rows_of(model.config)
    given = autopack.packing.shard_rows(batch, dist.get_rank(), dist.get_world_size())
    found = part(given)
    return model(**(given if found is None else found))


def _after_a_hooked_one():
    """What a twin has said of a model with hooks is not kept for one without them."""
    _error_of(_called(lambda: own_code.hooked(model_of("llama"))))
    return error("llama")


def _hooked_later():
    """A hook that comes before rows of which no part says that it holds several documents."""
    model = model_of("llama")
    _share_out(model)
    _, batch = rows_of(model.config, ((24,),))
    part = autopack.packing.shard_rows(batch, dist.get_rank(), dist.get_world_size())
    model(**part)
    own_code.hooked(model)
    model(**part)


def _pooled():
    model = type(model_of("bert:masked-lm").bert)(model_of("bert:masked-lm").config)
    _share_out(model)
    _, batch = rows_of(model.config)
    del batch["labels"]
    model(**autopack.packing.shard_rows(batch, dist.get_rank(), dist.get_world_size()))


def _pickled():
    model = model_of("llama")
    _share_out(model)
    _call(pickle.loads(pickle.dumps(model)))


def _otherwise_enabled():
    model = model_of("llama")
    autopack.enable(model)
    _share_out(model)


def _on_one_rank(change):
    return lambda part: change(part) if dist.get_rank() == 1 else None


def _shorter(part):
    for name in ("input_ids", "position_ids", "labels", "shift_labels"):
        part[name] = part[name][:, :-2]


def _counting_boundaries(part):
    part["shift_labels"] = part["shift_labels"].where(part["shift_labels"] != -100, 1)


def _watched():
    """Checks made and skipped."""
    model = model_of("llama")
    handle = autopack.enable(model, check_every=1, sequence_parallel=dist.group.WORLD)
    _call(model).loss.backward()
    return handle.checked.checks, dict(handle.checked.skipped)


def _padded_on_the_left(config):
    """Rows of one document each, of which nothing says positions: no label is compared with what padding predicts."""
    texts = documents(config, [24, 17], 0)
    short = torch.nn.functional.pad(texts[1], (7, 0))
    mask = torch.ones(2, 24, dtype=torch.long)
    mask[1, :7] = 0
    ids = torch.cat([texts[0], short])
    return texts, with_mask(ids, mask)


def all_findings(rank, _):
    """Everything that one group of processes can find after another."""
    dist.barrier()
    found = {f"exact {kind}": error(kind) for kind in KINDS}
    found |= {f"exact {kind}": error(kind, _of_any_length, attention="eager") for kind in TOGETHER}
    found["exact dynamic rope"] = error("llama", _of_any_length, rope_parameters=DYNAMIC, max_position_embeddings=16)
    found["exact heads that ranks cannot share"] = error("llama", _of_any_length, num_key_value_heads=1)
    found["exact eager"] = error("llama", attention="eager")
    found["exact declared by seq_idx, padded"] = error("llama", declared_otherwise)
    found["exact segments"] = error("mistral", _segments)
    found["exact whole rows"] = error("llama", _whole_rows)
    found["exact padded on the left"] = error("llama", _padded_on_the_left)
    found["exact reentrant"] = error("llama", change=_checkpointed(True))
    found["exact checkpointing"] = error("llama", change=_checkpointed(False))
    found["exact copy"] = error("llama", change=copy.deepcopy)
    found["exact compiled"] = error("llama", change=_compiled)
    found["exact evaluated"] = error("mistral", change=lambda model: model.eval())
    found["exact adapted"] = error("llama", make=_adapted)
    for name, make in own_code.SERVED.items():
        found[f"exact own code: {name}"] = error(name, make=lambda _, make=make: make())
    found["exact audited after a hooked one"] = _after_a_hooked_one()
    found["exact layouts"] = _random_layouts()
    found["exact alone"] = _trained_beside_data_parallel()
    found |= {f"deepspeed {order}": _by_deepspeed(order) for order in ("before", "after", "stock")}
    found["deepspeed windows"] = _by_deepspeed("after", "mistral")
    found["perturbed"] = _perturbed()
    found["watched"] = _watched()
    return found | {f"refused {name}": _error_of(call) for name, (call, _) in REFUSED.items()}


REFUSED = {
    "padded inside": (_called("longformer:masked-lm", attention="eager"), "pads rows before its layers"),
    "masks combined": (_called("qwen4_exp_text", attention="eager"), "combines its masks"),
    "whole model": (_called("reformer", attention="eager"), "documents are run alone"),
    "scaled queries": (_called("llama4_text"), "queries are scaled by the columns"),
    "own mask": (_called("layoutlm:masked-lm", lambda part: {"input_ids": part["input_ids"]}), "a pooler reads"),
    "labels": (_called("llama", lambda part: {k: v for k, v in part.items() if k != "shift_labels"}), "shift_labels"),
    "boundaries": (_called("llama", _counting_boundaries), "where a document ends"),
    "floats": (
        _called("llama", lambda part: {**part, "position_ids": part["position_ids"].float()}),
        "of integers; found torch.float32",
    ),
    "columns": (_called("llama", _on_one_rank(_shorter)), "equally many columns"),
    "one rank": (_called("llama", _on_one_rank(lambda part: part.update(use_cache=True))), ""),
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
    "no group": (lambda: autopack.enable(model_of("llama"), sequence_parallel=2), "init_process_group"),
}
"""What is not exact, and what its error has to say."""
