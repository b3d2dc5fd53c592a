"""A plain PyTorch training loop on padded batches, and the one line that keeps it from computing
padding.

    python examples/plain_loop.py            with the line
    python examples/plain_loop.py --stock    without it: the same losses, fewer tokens per second

Runs offline in less than a minute on two CPU cores. The text is the documentation that every Python
installation has."""

from __future__ import annotations

import argparse
import time

import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import autopack
from autopack.demo import collect_documents, pad, tokenize, train_tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stock", action="store_true", help="leave autopack out")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, help="CPU threads (as many as torch chooses)")
    options = parser.parse_args()
    if options.threads is not None:
        torch.set_num_threads(options.threads)

    texts = collect_documents()
    examples = tokenize(texts, train_tokenizer(texts, vocabulary=2048), longest=512)
    torch.manual_seed(options.seed)
    # pad() is an ordinary collator: one document per row, a 0/1 attention_mask, labels of -100 at
    # padding.
    loader = DataLoader(examples, batch_size=options.batch_size, shuffle=True, collate_fn=pad)

    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))

    handle = None
    if not options.stock:
        handle = autopack.enable(model)  # the one line

    tokens, start = 0, time.perf_counter()
    for step, batch in zip(range(1, options.steps + 1), loader, strict=False):
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        tokens += int(batch["attention_mask"].sum())
        print(f"step {step:3}  loss {loss.item():.6f}", flush=True)
    seconds = time.perf_counter() - start

    print(
        f"{tokens:,} tokens of text in {seconds:.1f} s: {tokens / seconds:,.0f} tokens per second"
    )
    print("stock, every padding token computed" if handle is None else handle)


if __name__ == "__main__":
    main()
