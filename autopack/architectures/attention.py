"""Decoders (and encoders with a language-modelling head) that mix tokens only by attention through the interface.

They leak because transformers splits masks by documents only where `position_ids` reach the mask function and neither
a mask nor a cache comes along; 24 of these types never pass positions on. Here every attention call is made within
documents, so nothing depends on what the mask code saw. The list holds the types that a run of the leak test has
covered (`python -m compat.exactness`); any other model of this structure is served after an audit.
"""

from autopack.family import Family

__all__ = ["FAMILY"]

_COVERED = """
afmoe apertus arcee aria_text axk1 axk2 beam bert bert-generation biogpt bitnet camembert cohere cohere2
cohere2_moe cohere_compass_text ctrl cwm data2vec-text dbrx deepseek_v2 deepseek_v3 deepseek_v32 diffllama
dots1 dots3_note_text electra emu3_text_model ernie ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo flint
fuyu gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text gemma4 gemma4_text gemma4_unified
gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa got_ocr2 gpt2 gpt_bigcode gpt_neox gpt_oss
granite granite_swa granitemoe granitemoe_swa granitemoeshared helium hrm_text hunyuan_v1_dense hunyuan_v1_moe
hy_v3 hy_v4 hyperclovax internlm3 iquestcoder jais2 jetmoe kolibri1 laguna llama longcat_flash mellum
mimo_v2_flash minicpm3 minimax_m2 ministral ministral3 mistral mixtral mllama_text_model modernbert-decoder
moonshine moshi moss_transcribe_diarize nanochat nemotron olmo olmo2 olmo3 olmoe opt persimmon phi phi3 phi4_multimodal
phimoe qwen2 qwen2_moe qwen3 qwen3_moe roberta roberta-prelayernorm roc_bert seed_oss smollm3 solar_open
stablelm starcoder2 t5gemma vaultgemma whisper xlm-roberta xlm-roberta-xl xmod youtu
"""

_ENCODERS = """
albert distilbert esm esmc eurobert gte jina_embeddings_v3 layoutlm modernbert modernvbert neomme nomic_bert
ultrabert ultravbert
"""

FAMILY = Family(
    name="attention",
    model_types=frozenset((_COVERED + _ENCODERS).split()),
    path="attention site, document by document",
    media_types={"sound": frozenset({"moonshine", "whisper"})},
    dense_types=frozenset({"axk2", "deepseek_v32", "dots3_note_text", "glm_moe_dsa", "hy_v4"}),
)
