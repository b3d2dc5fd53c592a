"""TRL's DPOTrainer on a tiny model and its reference, with the defaults of TRL."""

import copy

import pytest

from tests.support.trained import QUIET


def preferences(path, model, reference=None, **settings):
    """Return a DPOTrainer that takes ten steps on pairs of uneven length.

    The reference is a copy of the model if none is given.
    """
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    tokenizer = tiny_tokenizer()
    words = [f"w{number}" for number in range(60)]
    texts = [
        " ".join(words[first : first + count])
        for first, count in zip(range(0, 40, 2), range(3, 23), strict=True)
    ]
    pairs = {"prompt": texts, "chosen": texts[::-1], "rejected": texts}
    args = trl.DPOConfig(
        str(path), max_steps=10, per_device_train_batch_size=2, bf16=False, **QUIET, **settings
    )
    data = datasets.Dataset.from_dict(pairs)
    reference = copy.deepcopy(model) if reference is None else reference
    return trl.DPOTrainer(
        model=model, ref_model=reference, args=args, train_dataset=data, processing_class=tokenizer
    )


def tiny_tokenizer():
    """Return a tokenizer of the words w0 to w59."""
    tokenizers = pytest.importorskip("tokenizers")
    from transformers import PreTrainedTokenizerFast

    vocabulary = {
        "<pad>": 0,
        "<s>": 1,
        "</s>": 2,
        "<unk>": 3,
        **{f"w{number}": number + 4 for number in range(60)},
    }
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="</s>", bos_token="<s>"
    )
