"""Decoders, and encoders with a language-modelling head, that mix tokens only by attention through
the interface.

They leak because transformers splits masks by documents only if `position_ids` reach the mask
function without a mask or a cache, and many of these types never pass positions on. Here every
attention call is made within documents, so nothing depends on the mask code. The list holds the
types that `python -m compat.exactness` has measured; any other model of this structure is served
as well.
"""

from __future__ import annotations

import json
from pathlib import Path

from autopack.family import AFTER_PAD_TOKEN, Family, Numbering, Tiny

_DECODERS = """
afmoe apertus arcee aria_text axk1 axk2 beam bert bert-generation biogpt bitnet camembert cohere
cohere2 cohere2_moe cohere_compass_text ctrl cwm data2vec-text dbrx deepseek_v2 deepseek_v3
deepseek_v32 diffllama dots1 dots3_note_text electra emu3_text_model ernie ernie4_5 ernie4_5_moe
exaone4 exaone_moe flex_olmo flint fuyu gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text gemma4
gemma4_text gemma4_unified gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa got_ocr2
gpt2 gpt_bigcode gpt_neox gpt_oss granite granite_swa granitemoe granitemoe_swa granitemoeshared
helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hy_v4 hyperclovax internlm3 iquestcoder jais2
jetmoe kolibri1 laguna llama longcat_flash mellum mimo_v2_flash minicpm3 minimax_m2 ministral
ministral3 mistral mixtral mllama_text_model modernbert-decoder moonshine moshi
moss_transcribe_diarize nanochat nemotron olmo olmo2 olmo3 olmoe opt persimmon phi phi3
phi4_multimodal phimoe qwen2 qwen2_moe qwen3 qwen3_moe roberta roberta-prelayernorm roc_bert
seed_oss smollm3 solar_open stablelm starcoder2 t5gemma vaultgemma whisper xlm-roberta
xlm-roberta-xl xmod youtu
"""

_ENCODERS = """
albert distilbert esmc eurobert gte jina_embeddings_v3 layoutlm modernbert modernvbert neomme
nomic_bert ultrabert ultravbert
"""

_AFTER_PAD_TOKEN = """
altclip_text_model bridgetower_text_model camembert clap_text_model data2vec-text esm layoutlmv3
lilt markuplm roberta roberta-prelayernorm xlm-roberta xlm-roberta-xl xmod
"""


_TINY = json.loads(Path(__file__).with_name("tiny.json").read_text(encoding="utf-8"))["fields"]
"""Values of the fields of `Tiny` for all types of autopack's own families."""


FAMILY = Family.of(
    "attention",
    _DECODERS + _ENCODERS,
    "attention site, document by document",
    numbering={
        _AFTER_PAD_TOKEN: AFTER_PAD_TOKEN,
        "biogpt": Numbering(changed=True),
        "opt": Numbering(along_mask=True),
    },
    media_types={"video": "gemma4 gemma4_unified", "sound": "moonshine whisper"},
    unpads_images="gemma3 gemma4 gemma4_unified",
    refusal=lambda config: (  # of GPT-2
        "with reorder_and_upcast_attn=True its eager attention is in a method of its own "
        "(GPT2Attention._upcast_and_reordered_attn), where nothing keeps documents apart; load it "
        "with reorder_and_upcast_attn=False, or with attn_implementation='sdpa'"
        if getattr(config, "reorder_and_upcast_attn", False)
        and config._attn_implementation == "eager"
        else None
    ),
    dense_types="axk2 deepseek_v32 dots3_note_text glm_moe_dsa hy_v4",
    tiny=Tiny(**_TINY),
)
