"""Data parallelism: DDP and FSDP, for test_processes.py. Every case is a function of the rank.

Each rank has packed rows of its own, with other layouts; the gradients that come out of the
data-parallel wrapper must be those of all documents of all ranks, each run alone."""

from contextlib import nullcontext

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers.models.llama.modeling_llama import LlamaMLP

import autopack
from autopack import tiny
from autopack.integrations.wrappers import unwrap
from tests.engine import next_token_loss, padded_batch
from tests.integration.documents import (
    documents,
    exact,
    leaks,
    packed,
    run_alone,
    targets,
    with_labels,
)
from tests.subjects import layers_of
from tests.support.trained import checkpointed, with_lora

try:
    from torch.distributed.fsdp import fully_shard
except ImportError:  # before torch 2.6
    fully_shard = None

WORLD = 2
DOCUMENTS = (7, 12, 5, 9, 11, 3)
SHARES = (slice(0, 4), slice(4, 6))
"""Which documents each rank gets: four in a row of 33 tokens, and two in a row of 14."""


def _llama():
    return tiny.build("llama", attn_implementation="sdpa").train()


def _ddp(model):
    return DistributedDataParallel(model)


def fsdp2(model, parts=layers_of, mesh=None):
    mesh = mesh or init_device_mesh("cpu", (WORLD,))
    for part in parts(model):
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _fsdp_attention(model):
    """fully_shard gives what it shards a class of its own, `FSDP...`."""
    return fsdp2(model, lambda model: [layer.self_attn for layer in model.model.layers])


def fsdp1(model):
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


def fsdp1_by_layer(model):
    """Every layer is gathered by itself, as accelerate's plugin has it."""
    policy = ModuleWrapPolicy({type(model.model.layers[0])})
    return FullyShardedDataParallel(
        model, auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=True
    )


def _lora(model):
    return _ddp(with_lora(model))


def _prepared(wrap, order, model=None, **options):
    """A model that is enabled `before` it is wrapped, `after` that or never; its handle, and the
    texts of all ranks."""
    model = model or _llama()
    if order == "before":
        autopack.enable(model, **options)
    wrapped = wrap(model)
    handle = None if order == "never" else autopack.enable(wrapped, **options)
    return wrapped, handle, documents(model.config, DOCUMENTS)


def _case(wrap, order, checkpointing=None, build=_llama):
    """`checkpointing` says whether it is reentrant."""

    def run_case(rank):
        model = build()
        if checkpointing is not None:
            checkpointed(model, checkpointing)
        wrapped, _, texts = _prepared(wrap, order, model)
        return _error_of_gradients(wrapped, texts, [packed(texts[SHARES[rank]])])

    return run_case


def _error_of_gradients(model, texts, rows):
    wanted = _reference(model, texts)
    count = targets(texts)
    for row in rows:
        # Data-parallel wrappers average over the ranks; the loss asked for is the mean over all
        # tokens.
        (WORLD * model(**row, num_items_in_batch=count).loss).backward()
    found = _gradients(model)
    assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
    return _largest_error(found, wanted)


def _largest_error(found, wanted):
    return max(
        ((found[name] - wanted[name]).norm() / wanted[name].norm()).item() for name in wanted
    )


def _reference(model, texts):
    """Gradients of a plain model with the same parameters, all documents alone."""
    base = unwrap(model)
    reference = tiny.build(base.config.model_type, attn_implementation="sdpa").train()
    if hasattr(base, "peft_config"):
        reference = _lora(reference).module
    return {
        _plain(name): gradient for name, gradient in run_alone(reference, texts).gradients.items()
    }


def _gradients(model):
    """The gradients of a wrapped model, gathered from the ranks, under the names of the model
    inside."""
    whole = isinstance(model, FullyShardedDataParallel)
    with (
        FullyShardedDataParallel.summon_full_params(model, with_grads=True)
        if whole
        else nullcontext()
    ):
        return {
            _plain(name): (p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad).clone()
            for name, p in model.named_parameters()
            if p.grad is not None
        }


def _plain(name):
    for part in ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module."):
        name = name.replace(part, "")
    return name.removeprefix("module.")


def _watched(wrap, order, noise=0.0, plain=-1):
    """Every call is checked; the batch of one rank, `plain`, may be one that is neither packed nor
    padded."""

    def run_case(rank):
        wrapped, handle, texts = _prepared(wrap, order, check_every=1)
        mine = texts[SHARES[rank]]
        row = {"input_ids": mine[0], "labels": mine[0]} if rank == plain else packed(mine)
        before = 2 if noise or plain >= 0 else 0
        for rate, calls in ((noise, before), (0.0, 0)):
            for layer in (
                layer
                for layer in wrapped.modules()
                if noise and hasattr(layer, "attention_dropout")
            ):
                layer.attention_dropout = rate
            for _ in range(calls):
                wrapped(**row).loss.backward()
                wrapped.zero_grad()
        error = _error_of_gradients(wrapped, texts, [packed(mine)])
        assert handle.checked.checks == (1 if rank == plain else 1 + before), handle
        assert not handle.checked.skipped, handle
        return max(error, handle.checked.worst)

    return run_case


def _watched_leak(wrap):
    """A layer of the user's leaks, which both ranks find in the same call; the error of a rank that
    does not is 1."""

    def run_case(rank):
        model = _llama()
        model.model.layers[0].mlp.register_forward_pre_hook(
            lambda _, args: (
                args[0] + 0.1 * torch.nn.functional.pad(args[0][:, :-1], (0, 0, 1, 0)),
            )
        )
        wrapped, handle, texts = _prepared(wrap, "before", model, check_every=1, verify=False)
        try:
            wrapped(**packed(texts[SHARES[rank]]))
        except autopack.LeakDetected as found:
            # The first document has nobody before it.
            return float(
                (handle.checked.checks, found.report.step) != (1, 1) or found.report.document == 0
            )
        return 1.0

    return run_case


class OwnLayer(LlamaMLP):
    """A layer of the user's, so that calls which go beyond those before are checked."""

    def forward(self, states):
        return super().forward(states)


def _checked(wrap):
    """Ranks have other calls beyond what was checked, packed, padded and plain ones; none waits for
    another."""

    def run_case(rank):
        model = _llama()
        for layer in model.model.layers:
            mine = OwnLayer(model.config)
            mine.load_state_dict(layer.mlp.state_dict())
            layer.mlp = mine
        # FSDP1 leaves no layer of the user's by itself that could be proven.
        order = "before" if wrap in (fsdp1, fsdp1_by_layer) else "after"
        wrapped, handle, texts = _prepared(wrap, order, model)
        one = {"input_ids": texts[0], "labels": texts[0]}
        batches = [
            packed(texts[:2]),
            packed(texts[:4]),
            padded(texts[2:5]),
            packed(texts[:4]),
            packed(texts[1:3]),
        ]
        others = [packed(texts[2:4]), one, packed(texts), padded(texts), packed(texts[4:])]
        for batch in others if rank else batches:
            wrapped(**batch).loss.backward()
            wrapped.zero_grad()
        error = _error_of_gradients(wrapped, texts, [packed(texts[SHARES[rank]])])
        assert handle.checked is not None
        assert handle.checked.checks >= 2, handle
        assert handle.checked.leaks == 0, handle
        return max(error, handle.checked.worst)

    return run_case


def padded(texts):
    return with_labels(padded_batch([text[0] for text in texts]))


def _unpadded(wrap, order, read):
    """Padded batches on both ranks; with `read`, the loss is made of the logits, and the model's
    own is not used.

    Such a batch keeps its padding the first time, which tells that nobody reads it, and the second,
    not the third."""

    def run_case(rank):
        wrapped, handle, texts = _prepared(wrap, order)
        batch = padded(texts[SHARES[rank]])
        labels = batch.pop("labels") if read else None
        for _ in range(3 if read else 0):
            wrapped.zero_grad()
            logits = wrapped(**batch, use_cache=False).logits
            loss = next_token_loss(logits, labels, reduction="sum")
            (WORLD * loss / targets(texts)).backward()
        assert handle.tally.batches == int(read)
        error = _error_of_gradients(wrapped, texts, [] if read else [batch])
        assert handle.tally.batches == 1
        return error

    return run_case


SHARDED = {"FSDP1": fsdp1, "FSDP1 by layer": fsdp1_by_layer}
SHARDED |= {"fully_shard": fsdp2} if fully_shard else {}
WRAPS = {"DDP": _ddp, **SHARDED}
ORDERS = ("before", "after")
CHECKPOINTING = {
    "": None,
    ", reentrant checkpointing": True,
    ", non-reentrant checkpointing": False,
}
EXACT = {
    f"{name}, enabled {order}{label}": _case(wrap, order, reentrant)
    for name, wrap in {**WRAPS, "LoRA in DDP": _lora}.items()
    for order in ORDERS
    for label, reentrant in CHECKPOINTING.items()
    if reentrant is None or name in ("DDP", "fully_shard")
}
EXACT |= {
    f"watched, {name}, {label}": _watched(wrap, order, noise, plain)
    for name, wrap in WRAPS.items()
    for label, order, noise, plain in (
        ("enabled before", "before", 0.0, -1),
        ("enabled after", "after", 0.0, -1),
        ("dropout", "before", 0.3, -1),
        ("one rank packs nothing", "after", 0.0, 1),
        ("dropout, one rank packs nothing", "after", 0.3, 0),
    )
}
EXACT |= {
    f"{what}, {name}": case(wrap)
    for what, case in {"a leak": _watched_leak, "checked": _checked}.items()
    for name, wrap in WRAPS.items()
}
EXACT |= {
    f"padded, {name}, enabled {order}{', logits read' * read}": _unpadded(wrap, order, read)
    for name, wrap in WRAPS.items()
    for order in ORDERS
    for read in (False, True)
    if name != "FSDP1 by layer"
}
if fully_shard:
    EXACT["attention that needs an adjustment, under the name of its class by fully_shard"] = _case(
        _fsdp_attention,
        "before",
        build=lambda: tiny.build("llama4_text", attn_implementation="sdpa").train(),
    )
CASES = {name: (case, exact) for name, case in EXACT.items()} | {
    f"{name}, enabled never": (_case(WRAPS[name], "never"), leaks)
    for name in ("DDP", "fully_shard")
    if name in WRAPS
}
"""With what a rank has to find."""
