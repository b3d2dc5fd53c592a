"""Every causal language model type builds tiny, runs, and lets leaked context show."""

import inspect

import pytest
import torch
import transformers
from packaging.version import Version

from autopack import registry, tiny
from tests.engine import Call, counted, leaks

LENGTH = 33

# Types that do not build, and what the message says.
REFUSED = {
    name: family.refused_types[name]
    for family in registry.families()
    for name in family.tiny.not_alone
}
# Types whose earlier tokens depend on how many come after them: the n-gram stream, buckets sorted
# over the whole row, a prompt that attends both ways.
NOT_CAUSAL = {"cpmant", "prophetnet", "reformer"}
# Types that some older release cannot build or run at all.
BROKEN = {}

if Version(transformers.__version__) < Version("5.23"):
    BROKEN = {
        "qdqbert": "needs the package pytorch-quantization",
        "speech_to_text_2": "reads a weight that it has not made yet",
        "transfo-xl": "calls type_as without an argument",
        "xlstm": "takes the width of all chunks for that of one",
    }
    # moshi sees later tokens; in the last two, states from the second chunk on change with the
    # number of chunks
    NOT_CAUSAL |= {"mega", "moshi", "xlm-prophetnet", "mamba2", "zamba2"}

TYPES = tiny.types_for("causal-lm")


def built(model_type, **options):
    if model_type not in TYPES:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    return tiny.build(model_type, **options)


@torch.no_grad()
def logits(model, ids, **arguments):
    """Run without cache where the forward says that it has one, and with the arguments that it
    names."""
    named = inspect.signature(model.forward).parameters
    arguments = {"use_cache": False, **arguments}
    output = model(
        input_ids=ids, **{name: value for name, value in arguments.items() if name in named}
    )
    return output[0] if not hasattr(output, "logits") else output.logits


def positions(model, length):
    return counted([length], tiny.first_position(model.config))


@pytest.mark.parametrize("model_type", TYPES)
def test_every_type_builds_and_runs(model_type):
    if model_type in BROKEN:
        pytest.skip(BROKEN[model_type])
    if model_type in REFUSED:
        with pytest.raises(tiny.CannotBuild, match=REFUSED[model_type]):
            tiny.build(model_type)
        return
    model = tiny.build(model_type)
    assert not model.training
    assert all(parameter.isfinite().all() and parameter.any() for parameter in model.parameters())
    assert sum(parameter.numel() for parameter in model.parameters()) < 3_000_000
    ids = tiny.tokens(model.config, 1, LENGTH)
    row = logits(model, ids, position_ids=positions(model, LENGTH))
    assert row.isfinite().all()
    assert 0.1 < row.std() < 10
    if "position_ids" in inspect.signature(model.forward).parameters:
        torch.testing.assert_close(
            logits(model, ids), row, msg=lambda said: f"first position: {said}"
        )
    for length in (5, 7, 8, 12):
        alone = logits(model, ids[:, :length], position_ids=positions(model, length))
        assert alone.isfinite().all()
        if model_type not in NOT_CAUSAL:
            torch.testing.assert_close(
                row[:, :length], alone, rtol=1e-4, atol=1e-4 * float(row.std())
            )
    parts = [
        module for module in model.modules() if isinstance(module, transformers.PreTrainedModel)
    ]
    if not all(part._supports_sdpa for part in parts):
        with pytest.raises(tiny.CannotBuild, match="scaled_dot_product_attention"):
            tiny.build(model_type, attn_implementation="sdpa")
        return
    model = tiny.build(model_type, attn_implementation="sdpa")
    assert logits(model, ids, position_ids=positions(model, ids.shape[1])).isfinite().all()


@pytest.mark.parametrize(
    "model_type", ["mistral", "gemma2", "gpt_oss", "deepseek_v3", "qwen3_next"]
)
def test_leaks_show(model_type):
    """Those of others are the controls of all tests of exactness."""
    call = Call(labels=None)
    assert leaks(call.undeclared(built(model_type)), call.alone(built(model_type)))


@pytest.mark.parametrize("model_type", ["llama", "gemma4_assistant", "rwkv"])
def test_global_state_is_left_alone(model_type):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    torch.set_default_dtype(torch.float64)
    try:
        tiny.build(model_type, dtype=torch.bfloat16)
    except tiny.CannotBuild:
        pass
    finally:
        default_dtype = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
    assert default_dtype == torch.float64
    assert torch.equal(torch.get_rng_state(), before)


def test_tied_weights_stay_tied():
    for model_type in ("gpt2", "gemma2", "bert"):
        model = tiny.build(model_type)
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_dtype_rounds_the_same_parameters():
    exact, rounded = tiny.build("llama"), tiny.build("llama", dtype=torch.bfloat16)
    for parameter, other in zip(exact.parameters(), rounded.parameters(), strict=True):
        assert other.dtype == torch.bfloat16
        torch.testing.assert_close(parameter.bfloat16(), other, rtol=0.01, atol=0.01)
    assert exact.model.rotary_emb.inv_freq.dtype == rounded.model.rotary_emb.inv_freq.dtype


def test_every_kind_of_layer_occurs():
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    types = "gemma2 gemma3_text llama4_text qwen3_next nemotron_h gpt_oss minimax zamba2"
    for model_type in types.split():
        if model_type not in TYPES:
            continue
        small = tiny.config(model_type)
        assert small.num_hidden_layers <= 4
        for name in ("layer_types", "layers_block_type", "mlp_layer_types", "no_rope_layers"):
            kinds = set(getattr(CONFIG_MAPPING[model_type](), name, None) or ())
            assert kinds <= set(getattr(small, name, None) or ()), (model_type, name)


def test_windows_and_latent_heads_are_small():
    assert tiny.config("mistral").sliding_window == 4
    if "deepseek_v3" not in TYPES:
        return
    latent = tiny.config("deepseek_v3")
    assert latent.v_head_dim != latent.qk_nope_head_dim + latent.qk_rope_head_dim


def test_overrides():
    assert tiny.config("gpt2", hidden_size=32).n_embd == 32
    deep = tiny.config("gemma2", num_hidden_layers=5)
    assert deep.num_hidden_layers == 5
    if hasattr(deep, "layer_types"):
        assert deep.layer_types == [
            *["sliding_attention", "full_attention"] * 2,
            "sliding_attention",
        ]
    if "gemma3" in TYPES:
        assert tiny.config("gemma3", num_key_value_heads=1).text_config.num_key_value_heads == 1
        whole = tiny.config("gemma3", text_config={"vocab_size": 99})
        assert (whole.text_config.vocab_size, whole.text_config.hidden_size) == (99, 64)


def test_refusals_name_the_type_and_the_reason():
    for make in (tiny.build, tiny.config):
        with pytest.raises(
            tiny.CannotBuild,
            match=f"'no_such_model' model: transformers {transformers.__version__} has no",
        ):
            make("no_such_model")
    with pytest.raises(tiny.CannotBuild, match="no model of this type for causal-lm"):
        tiny.build("vit")
    with pytest.raises(
        tiny.CannotBuild, match=r"'bloom' model: \w+: .*scaled_dot_product_attention"
    ):
        tiny.build("bloom", attn_implementation="sdpa")
    with pytest.raises(tiny.CannotBuild, match="'llama'") as caught:
        tiny.build("llama", hidden_size="wide")
    assert isinstance(caught.value, ValueError)
    assert caught.value.model_type == "llama"
    assert caught.value.__cause__ is not None


def test_tokens_are_ordinary():
    for model_type in ("llama", "gemma3", "roberta"):
        if model_type not in TYPES:
            continue
        config = tiny.config(model_type)
        ids = tiny.tokens(config, 2, 200)
        assert ids.shape == (2, 200)
        text = getattr(config, "text_config", config)
        special = {
            text.pad_token_id,
            text.bos_token_id,
            text.eos_token_id,
            getattr(config, "image_token_id", None),
        }
        assert not special & set(ids.flatten().tolist())
        assert int(ids.max()) < text.vocab_size
