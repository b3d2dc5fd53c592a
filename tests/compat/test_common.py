"""The types that most people train are refused by the default call in no release that is
recorded."""

import pytest

from compat.matrix import load_matrix
from compat.tables import cells_of, load_results

CAUSAL = """
bloom codegen cohere cohere2 dbrx deepseek_v2 deepseek_v3 falcon gemma gemma2 gemma3_text glm glm4 gpt2 gpt_bigcode
gpt_neo gpt_neox gpt_oss gptj granite granitemoe jamba llama mamba mamba2 mistral mixtral mpt nemotron olmo olmo2 olmoe
opt phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe smollm3 stablelm starcoder2
""".split()
ENCODERS = """
albert bert camembert deberta deberta-v2 distilbert electra esm longformer modernbert mpnet roberta xlm xlm-roberta
xlnet
""".split()
PAIRS = "bart blenderbot led longt5 m2m_100 marian mbart mt5 pegasus t5 umt5".split()
COMMON = {*CAUSAL, *ENCODERS, *PAIRS}
RECORDED = load_results(load_matrix())


def test_releases_of_both_major_versions_are_recorded():
    assert {name[0] for name in RECORDED} == {"4", "5"}


@pytest.mark.parametrize("release", RECORDED)
def test_none_of_them_is_refused(release):
    cells = [cell for cell in cells_of(RECORDED[release]) if cell["type"] in COMMON]
    refused = {
        (cell["type"], cell["task"], cell["mode"], cell["reason"])
        for cell in cells
        if cell["status"] not in ("exact", "absent", "unbuildable", "upstream error")
    }
    assert not refused
    assert len({cell["type"] for cell in cells if cell["status"] == "exact"}) >= 50
