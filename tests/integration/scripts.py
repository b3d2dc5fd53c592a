"""Training scripts that know nothing of autopack, for test_run.py."""

DATA = """
import json, os, sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
torch.set_num_threads(1)
config = LlamaConfig(vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                     num_key_value_heads=2, pad_token_id=0, eos_token_id=None)
generator = torch.Generator().manual_seed(1)
texts = [torch.randint(1, 97, (int(n),), generator=generator) for n in torch.randint(3, 40, (16,), generator=generator)]
seen = {"batches": 0, "padding": 0, "columns": 0, "rows": 0}
def collate(rows):
    ids = torch.nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    mask = (ids != 0).long()
    seen["batches"] += 1; seen["padding"] += int((mask == 0).sum()); seen["columns"] += mask.numel()
    seen["rows"] += len(rows)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
def make():
    torch.manual_seed(0)
    return LlamaForCausalLM(config)
rows = [{"input_ids": text} for text in texts]
batches = [rows[i:i + 4] for i in range(0, 16, 4)]
def tell(**what):
    # In one piece: torchrun's processes are unbuffered and share one stdout.
    sys.stdout.write(json.dumps({"rank": os.environ.get("RANK", ""), **seen, **what}) + "\\n")
    sys.stdout.flush()
"""
LOOP = """
from data import *
model, reference = make(), make()
with torch.no_grad():
    model.eval().generate(texts[0][None], max_new_tokens=2)
    model(**collate(batches[0])), reference.eval()(**collate(batches[0]))
for name in seen: seen[name] = 0
optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-3)
losses = []
for batch in map(collate, batches):
    loss = model(**batch).loss
    with torch.no_grad(): reference(**batch)
    loss.backward(); optimizer.step(); optimizer.zero_grad()
    losses.append(loss.item())
    if len(losses) == 1: first = "_autopack_enabled" in vars(model)
import inspect
tell(losses=losses, first=first, reference=[n for n, m in reference.named_modules() if "_autopack" in vars(m)],
     argv=sys.argv, path=sys.path, file=__file__, name=__name__, site="sitecustomize" in sys.modules,
     signature=str(inspect.signature(LlamaForCausalLM.__init__)))
"""
TRAINER = """
from data import *
import tempfile
from transformers import Trainer, TrainingArguments
with tempfile.TemporaryDirectory() as directory:
    arguments = TrainingArguments(directory, num_train_epochs=1, per_device_train_batch_size=2, logging_steps=1,
        learning_rate=1e-3, use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no",
        dataloader_pin_memory=False, ddp_find_unused_parameters=False)
    trainer = Trainer(make(), arguments, train_dataset=rows, eval_dataset=rows[:4], data_collator=collate)
    trainer.evaluate()
    for name in seen: seen[name] = 0
    trainer.train()
tell(losses=[entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
if torch.distributed.is_initialized():
    # Left to the interpreter's end, gloo's threads abort a process now and then (pytorch/pytorch#179291).
    torch.distributed.destroy_process_group()
"""
UNSUPPORTED = """
from data import *
from transformers import NllbMoeConfig, NllbMoeForConditionalGeneration
torch.manual_seed(0)
sizes = {name + of: size for name in ("encoder_", "decoder_")
         for of, size in {"layers": 2, "attention_heads": 4, "ffn_dim": 64, "sparse_step": 2, "layerdrop": 0.0}.items()}
config = NllbMoeConfig(vocab_size=97, d_model=32, num_experts=4, second_expert_policy="random", **sizes)
model = NllbMoeForConditionalGeneration(config).train()
tell(losses=[model(**collate(batch)).loss.item() for batch in batches])
"""
CHANGED = """
from data import *
class Mine(LlamaForCausalLM):
    def forward(self, *arguments, **options):
        return super().forward(*arguments, **options)
model = Mine(config).train()
losses = [model(**collate(batch)).loss.item() for batch in batches]
tell(losses=losses, verified=model._autopack_enabled.proof.how if "_autopack_enabled" in vars(model) else "")
"""
PARENT = """
import subprocess, sys
subprocess.run([sys.executable, "loop.py"], check=True)
"""
FORKED = """
from data import *
import torch.multiprocessing
def work(rank):
    make().train()(**collate(batches[0])).loss.backward()
if __name__ == "__main__":
    torch.multiprocessing.start_processes(work, nprocs=1, start_method="fork")
"""
SEVERAL = """
import os, subprocess, sys
given = [("trains", "0"), ("trains and is killed", "1"), ("unsupported", "2"), ("unsupported", "3")]
code = {"trains": "import loop", "trains and is killed": "import loop, os; os.kill(os.getpid(), 9)",
        "unsupported": "import unsupported"}
for what, rank in given:
    subprocess.run([sys.executable, "-c", code[what]], env={**os.environ, "RANK": rank})
"""
VIEW = """
import json, os, subprocess, sys
def view():
    return {"argv": sys.argv, "path": sys.path, "name": __name__, "file": __file__, "flags": list(sys.flags),
            "site": getattr(sys.modules.get("sitecustomize"), "__file__", None), "mine": getattr(sys, "mine", None)}
child = "import json, os; print(json.dumps({n: os.environ.get(n) for n in ('PYTHONPATH', 'AUTOPACK_RUN')}))"
print(json.dumps([view(), {n: os.environ.get(n) for n in ("PYTHONPATH", "AUTOPACK_RUN")},
      json.loads(subprocess.run([sys.executable, "-c", child], capture_output=True).stdout)]))
"""
CRASH = """
import sys
def fail():
    raise RuntimeError("the script's own")
sys.exit(int(sys.argv[1])) if len(sys.argv) > 1 else fail()
"""
SCRIPTS = {
    "data": DATA,
    "loop": LOOP,
    "trainer": TRAINER,
    "unsupported": UNSUPPORTED,
    "parent": PARENT,
}
SCRIPTS |= {"changed": CHANGED, "several": SEVERAL}
SCRIPTS |= {"forked": FORKED, "view": VIEW, "crash": CRASH}
