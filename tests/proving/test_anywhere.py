"""A proof touches neither weights nor gradients, wherever they are, and runs nothing of the model
itself."""

import pytest
import torch

import autopack
from autopack import tiny
from tests.conftest import FLOAT32, LENGTHS, alone, error, positions, token_ids
from tests.proving.untouched import Doubled, Mine, Touched, built, left_alone
from tests.support.refusals import refused, refused_by_its_first_call


def packed_error(model, expected):
    """Of an enabled model, with the logits of its documents alone."""
    with torch.no_grad():
        return error(model(input_ids=token_ids(), position_ids=positions(LENGTHS)).logits, expected)


def expected_of(model):
    with torch.no_grad():
        return alone(model, token_ids(), LENGTHS)


def _offloaded(model, folder):
    accelerate = pytest.importorskip("accelerate")
    return accelerate.cpu_offload(model, execution_device=torch.device("cpu"))


def _on_disk(model, folder):
    accelerate = pytest.importorskip("accelerate")
    return accelerate.disk_offload(model, str(folder), execution_device=torch.device("cpu"))


def _compiled(model, folder):
    return torch.compile(model, backend="eager")


def _compiled_in_place(model, folder):
    model.compile(backend="eager")
    return model


PLACES = {
    "the CPU": lambda model, folder: model,
    "cpu_offload": _offloaded,
    "disk_offload": _on_disk,
    "torch.compile": _compiled,
    "compile": _compiled_in_place,
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layer", [False, True], ids=["the class", "a layer"])
@pytest.mark.parametrize("name", PLACES)
def test_wherever_the_weights_are(name, layer, tmp_path):
    model = built()
    if layer:
        model.model.layers[3].mlp.down_proj = Doubled(256, 128, bias=False)
    expected = expected_of(model)
    model.lm_head.weight.grad = torch.ones_like(model.lm_head.weight)
    placed = PLACES[name](model, tmp_path)
    with left_alone(model, model.model.layers[3].mlp.down_proj):
        handle = autopack.enable(placed)
    with handle:
        assert handle.enabled.proof.source == ("part" if layer else "twin")
        assert packed_error(placed, expected) < FLOAT32


class Averaging(Mine):
    """One that lets documents see each other."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits + output.logits.mean(dim=1, keepdim=True)
        return output


def test_a_model_on_the_meta_device():
    with refused("not-exact"):
        autopack.enable(built("meta", Averaging))
    model = built("meta")
    with left_alone(model), autopack.enable(model) as handle:
        assert handle.enabled.proof.source == "twin"
    model.model.layers[3].mlp.down_proj = Doubled(256, 128, bias=False, device="meta")
    with left_alone(model), autopack.enable(model) as handle:
        assert handle.enabled.proof.source == "part"


def test_a_model_that_was_built_in_inference_mode():
    with torch.inference_mode():
        model = built()
        with left_alone(model), autopack.enable(model) as handle:
            assert handle.enabled.proof.source == "twin"


class Hook:
    """Somebody's hook for accelerate: `pre_forward` and `post_forward` see what a module is given
    and gives."""

    no_grad = False

    def __init__(self, mixes):
        self.mixes = mixes

    def init_hook(self, module):
        return module

    def pre_forward(self, module, *args, **kwargs):
        return args, kwargs

    def post_forward(self, module, output):
        return output.roll(1, dims=1) if self.mixes else output


@pytest.mark.parametrize("where", ["model.layers.3.mlp.down_proj", "model.layers.3"])
def test_somebodys_hook_of_accelerate_is_no_part_of_what_was_recorded(where, tmp_path):
    hooks = pytest.importorskip("accelerate.hooks")
    model = tiny.build("llama", num_hidden_layers=4)
    hooks.add_hook_to_module(model.get_submodule(where), Hook(mixes=False))
    with autopack.enable(model) as handle:
        assert handle.enabled.is_checked_closely
    for placed in (
        tiny.build("llama", num_hidden_layers=4),
        _offloaded(tiny.build("llama"), tmp_path),
    ):
        hooks.add_hook_to_module(
            placed.get_submodule(where.replace("3", "0")), Hook(mixes=True), append=True
        )
        refused_by_its_first_call(placed)


def test_what_is_touched_is_seen():
    """The control: an audit of the model itself runs it."""
    model = built()
    with pytest.raises(Touched, match="modules ran"), left_alone(model):
        autopack.audit(model)
    with pytest.raises(Touched, match="lm_head.weight"), left_alone(model), torch.no_grad():
        model.lm_head.weight.mul_(1)
    with pytest.raises(Touched, match="random"), left_alone(model):
        torch.rand(1)


@pytest.mark.exhaustive
def test_layers_in_8_bits_look_at_other_tokens(tmp_path):
    """bitsandbytes computes a column in half precision where any token has an outlier in it."""
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    built().save_pretrained(tmp_path)
    config = BitsAndBytesConfig(load_in_8bit=True)
    model = Mine.from_pretrained(tmp_path, quantization_config=config, attn_implementation="sdpa")
    with autopack.enable(model) as handle:
        assert handle.enabled.proof.source == "checks"
        assert (
            "a Linear8bitLt that is not as its class makes it, mixes tokens or may"
            in handle.verified
        )
