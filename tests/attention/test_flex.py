"""flex_attention, through transformers' own mask and attention functions, on a stand-in of the
kernel."""

import pytest

import autopack
from autopack import tiny
from autopack.inspection import masks
from compat.standins import flex_standin, set_implementation
from tests.support.refusals import refused

pytestmark = pytest.mark.skipif(
    not masks.has_mask_interface(), reason="this transformers has no mask interface"
)


def is_exact(model, **options):
    """Want an exact model, which leaks in stock."""
    assert not autopack.audit(model, modes=("default",), gradients=False).exact, "negative control"
    autopack.enable(model, **options)
    report = autopack.audit(model, modes=("default", "two rows"), training=(True,))
    assert report.exact, str(report)


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "llama4_text"])
def test_packed_equals_alone(model_type):
    model = tiny.build(model_type)
    set_implementation(model, "flex_attention")
    with flex_standin():
        is_exact(model, backend="flex")


OWN_RULES = {
    "window": lambda batch, head, query, key: (query >= key) & (query - key < 4),
    "first column for all": lambda batch, head, query, key: (
        (query >= key) & ((query - key < 4) | (key == 0))
    ),
}
"""Rules of BlockMasks that somebody makes; the last one depends on where in the row a document lies."""


@pytest.fixture
def own(request, monkeypatch):
    """A model that makes its own mask, one for all layers, as OPT and BART do up to 4.57, and how
    many it has made."""
    from torch.nn.attention.flex_attention import create_block_mask
    from transformers.models.llama import modeling_llama

    made = []

    def own_mask(*, inputs_embeds, **others):
        columns = inputs_embeds.shape[1]
        made.append(
            create_block_mask(
                OWN_RULES[request.param], len(inputs_embeds), None, columns, columns, "cpu"
            )
        )
        return made[-1]

    monkeypatch.setattr(modeling_llama, "create_causal_mask", own_mask)
    model = tiny.build("llama")
    set_implementation(model, "flex_attention")
    with flex_standin():
        yield model, made


@pytest.mark.parametrize("own", ["window"], indirect=True)
def test_a_block_mask_of_the_models_own_is_cut_by_documents(own):
    model, made = own
    is_exact(model)
    assert made


@pytest.mark.parametrize("own", ["first column for all"], indirect=True)
def test_a_block_mask_that_counts_columns_is_refused(own):
    with refused("not-exact"):
        autopack.enable(own[0])
