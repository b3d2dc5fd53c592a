"""What ranks that gather parameters find, for test_processes.py: functions of the rank."""

import datetime
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import autopack
from autopack import tiny
from autopack.runtime.runs import RankRuns
from tests.encoder_decoder.pairs import GRADIENTS, Pairs, alone
from tests.integration.documents import documents, exact, packed, run_alone, says
from tests.integration.ranks import SHARES, fsdp2, padded
from tests.subjects import layers_of

DOCUMENTS = (7, 12, 5, 9, 11, 8)


def _share(rank, model):
    return documents(model.config, DOCUMENTS)[SHARES[rank]]


def sharded(kind, mesh=None, parts=layers_of, **options):
    """An enabled model of a type, by fully_shard."""
    model = tiny.build(kind, **options)
    autopack.enable(model)
    return fsdp2(model, parts, mesh)


def _linear_layers(model):
    return [
        *(part for part in layers_of(model).modules() if isinstance(part, torch.nn.Linear)),
        *layers_of(model),
    ]


def _without_idle_runs(rank):
    """The errors of ranks where those with fewer documents end their call at once: one waits for
    the other."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=5))
    model = sharded("xlnet", DeviceMesh.from_group(group, "cpu")).train()
    RankRuns.idle = lambda *_: iter(())
    errors = [""] * dist.get_world_size()
    try:
        model(**packed(_share(rank, model))).loss.backward()
    except RuntimeError as error:
        errors[rank] = str(error)
    dist.all_gather_object(errors, errors[rank])
    return "; ".join(errors)


def _evaluated(rank):
    """The error of logits without gradients."""
    model, plain = sharded("xlnet"), tiny.build("xlnet")
    mine = _share(rank, model)
    with torch.no_grad():
        alone = torch.cat([plain(input_ids=each).logits[0] for each in mine])
        found = model(**packed(mine)).logits[0]
    return float((found - alone).abs().max() / alone.std())


def _by_one_half(rank, kind):
    """The error of the gradients of an encoder-decoder of which one half runs on documents
    alone."""
    model, plain = (tiny.build(kind, task="seq2seq").train() for _ in range(2))
    autopack.enable(model)
    fsdp2(model, lambda model: [*layers_of(model.get_encoder()), *layers_of(model.get_decoder())])
    # four lengths on one rank, one on the other
    shares = [Pairs.draw(), Pairs.draw((6, 6), (5, 5), seed=1)]
    model(**shares[rank].one_row()).loss.backward()
    means = [alone(plain, share) for share in shares]
    wanted = {
        name: sum(each.gradients[name] for each in means) / len(means)
        for name in means[0].gradients
    }
    found = {name: p.grad.full_tensor() for name, p in model.named_parameters() if name in wanted}
    least = 1e-3 * max(float(each.abs().max()) for each in wanted.values())
    return max(
        float((found[n] - w).abs().max()) / max(float(w.abs().max()), least)
        for n, w in wanted.items()
    )


def _with_a_cache(rank):
    """One rank brings packed rows, the other a call with a cache."""
    model = sharded("bloom", parts=_linear_layers)
    mine = _share(rank, model)
    with torch.no_grad():
        model(**({"input_ids": mine[0], "use_cache": True} if rank else packed(mine)))


def _padded_beside_packed(rank):
    """One rank brings packed rows, the other a batch with padding; the error of the loss against
    stock's."""
    kind = "minimax_m3_vl_text"  # stock XLNet with causal attention raises on padding
    model, plain = sharded(kind).train(), tiny.build(kind).train()
    mine = _share(rank, model)
    return _error_of_loss(model, plain, mine, padded(mine) if rank else packed(mine))


def _error_of_loss(model, plain, mine, given):
    wanted = run_alone(plain, mine).loss
    loss = model(**given).loss
    loss.backward()
    return abs(float(loss.detach()) - wanted) / wanted


def _hooked_on_one_rank(rank):
    """A hook that looks at a layer of the first rank alone; the error of the loss against stock's.

    It is proven on that rank by itself: a run of the model there would wait for the other one.
    """
    model, plain = sharded("llama").train(), tiny.build("llama").train()
    mine = _share(rank, model)
    model(**packed(mine)).loss.backward()
    if rank == 0:
        model.model.layers[0].mlp.register_forward_hook(_look)
    return _error_of_loss(model, plain, mine, packed(mine))


def _look(module, args, output):
    """What people log on the main process."""


def _within_context_parallel(rank):
    model = tiny.build("llama", attn_implementation="sdpa")
    autopack.enable(model)
    ids, positions = tiny.tokens(model.config, 1, 24), torch.arange(12).repeat(2)[None].clone()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with torch.no_grad(), context_parallel(mesh, buffers=[ids, positions], buffer_seq_dims=[1, 1]):
        model(input_ids=ids, position_ids=positions, use_cache=False)


def _attention_across_ranks(rank):
    """A row that two ranks share: no position of a part begins anew, and yet it is packed."""
    ALL_ATTENTION_FUNCTIONS["across"] = across
    model = tiny.build("llama", attn_implementation="eager")
    model.set_attn_implementation("across")
    autopack.enable(model, verify=False)
    ids = tiny.tokens(model.config, 1, 24)[:, 12 * rank : 12 * rank + 12]
    with torch.no_grad():
        model(input_ids=ids, position_ids=torch.arange(12)[None], use_cache=False)


def across(module, query, key, value, *_, **__):
    """Attention to the keys of all ranks."""
    parts = [torch.empty_like(key) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, key.contiguous())
    raise AssertionError("it has been reached")


PART = says("holds a part of every row")
CASES = {
    "evaluated": (_evaluated, exact),
    "a whole encoder": (partial(_by_one_half, kind="led"), lambda found: found < GRADIENTS),
    "a whole decoder": (partial(_by_one_half, kind="t5gemma2"), lambda found: found < GRADIENTS),
    "cache": (_with_a_cache, says("UnsupportedModel")),
    "context_parallel": (_within_context_parallel, PART),
    "attention across ranks": (_attention_across_ranks, PART),
    "padded beside packed": (_padded_beside_packed, exact),
    "hook on one rank": (_hooked_on_one_rank, exact),
    "without idle runs": (_without_idle_runs, says("Timed out")),
}
"""With what a rank has to find. The last one is the control."""
