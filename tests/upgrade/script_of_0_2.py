"""A training script as it was written for autopack 0.2.

Arguments: where it keeps its plan and the state of its sampler, and whether it makes them ("write")
or takes up what another release has written ("read").

Prints what it found as JSON: losses, the batches that it trained on, and the largest difference to
documents alone."""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import autopack
from autopack.auditing.report import LeakReport

folder, does = Path(sys.argv[1]), sys.argv[2]
torch.manual_seed(0)
torch.set_num_threads(1)
config = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    pad_token_id=0,
)
model = LlamaForCausalLM(config).double()
generator = np.random.default_rng(0)
lengths = generator.integers(3, 30, 64)
documents = [generator.integers(1, 64, length).tolist() for length in lengths]

# A plan and the state of a sampler, kept from one run to the next.
sampler = autopack.PackedBatchSampler(lengths, max_length=64, rows_per_batch=2, seed=1)
if does == "write":
    plan = autopack.packing.plan(lengths, max_length=64)
    plan.save(folder / "plan.npz")
    batches = iter(sampler)
    next(batches), next(batches)
    (folder / "state.json").write_text(json.dumps(sampler.state_dict()))
plan = autopack.packing.Plan.load(folder / "plan.npz")
assert plan.max_length == 64
sampler.load_state_dict(json.loads((folder / "state.json").read_text()))

alone = []
with torch.no_grad():
    for document in documents:
        ids = torch.tensor([document])
        alone.append(float(model(input_ids=ids, labels=ids).loss))

with autopack.enable(model) as handle:
    assert isinstance(handle, autopack.Handle)
    collate = autopack.PackingCollator(max_length=64, rows=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, trained, apart = [], [], 0.0
    for step, chosen in enumerate(sampler):
        batch = collate([{"input_ids": documents[number]} for number in chosen])
        assert isinstance(batch, autopack.packing.HostBatch)
        loss = model(**batch).loss
        if step == 0:  # before the first step of the optimizer, beside what the documents get alone
            weights = [len(documents[number]) - 1 for number in chosen]
            apart = abs(
                float(loss)
                - float(np.average([alone[number] for number in chosen], weights=weights))
            )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
        trained.append([int(number) for number in chosen])

report = autopack.audit(model)
assert isinstance(report, LeakReport)
assert any("llama" in family.model_types for family in autopack.registry.families())
for name in ("InvalidPacking", "LeakDetected", "UnsupportedModel"):
    assert issubclass(getattr(autopack, name), autopack.AutopackError)
print(
    json.dumps(
        {
            "losses": losses,
            "trained": trained,
            "apart": apart,
            "rows": [list(map(int, row)) for row in plan],
        }
    )
)
