"""Train on packed rows that several processes share, each with a part of the columns of every row.

    torchrun --standalone --nproc-per-node 2 examples/sequence_parallel.py

A tiny random model on CPUs (gloo); on GPUs take `nccl`, and a model of yours.
"""

import torch
import torch.distributed as dist

import autopack
from autopack import tiny

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()

model = tiny.build("llama", attn_implementation="sdpa").train()
autopack.enable(model, sequence_parallel=dist.group.WORLD)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

documents = [
    {"input_ids": tiny.tokens(model.config, 1, length, seed=length)[0]} for length in range(5, 37)
]
collate = autopack.PackingCollator()
for step in range(8):
    rows = collate(documents[4 * step : 4 * step + 4])  # the same on every rank
    # of this part: those of all ranks add up
    loss = model(**autopack.packing.shard_rows(rows, rank, ranks)).loss
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    optimizer.zero_grad()
    total = loss.detach()
    dist.all_reduce(total)
    if rank == 0:
        print(
            f"step {step}: loss {total:.4f}, {rows['input_ids'].shape[1]} tokens on {ranks} ranks"
        )
dist.destroy_process_group()
