"""Every argument of every call of a kernel against the signatures of the packages that are
published.

`compat/signatures.json` has them, as they were read from the packages. Stand-ins of flash-attn 2, 3
and 4 bind what they are given to those signatures, so the tests that use them (`test_flash.py`, the
cells of flash in the version matrix) check the arguments that transformers makes of what autopack
hands it; here are torch's."""

import inspect

import pytest
import torch

import autopack
from autopack import tiny
from autopack.inspection import torches
from compat import signatures, standins
from tests.conftest import positions

FLASH = {name: signatures.signature(signatures.FLASH_2, name) for name in signatures.OF_FLASH}


@pytest.mark.skipif(
    torches.without_flex_attention() is not None, reason="this torch has no flex_attention"
)
@pytest.mark.parametrize("release", signatures.TORCHES)
def test_block_masks_are_asked_for_with_what_their_signature_takes(monkeypatch, release):
    """By autopack and by transformers, which alone calls `flex_attention`."""
    from torch.nn.attention import flex_attention as flex
    from transformers import masking_utils

    called, makes_mask = [], flex.create_block_mask

    def create_block_mask(*args, **kwargs):
        # it calls itself, compiled
        if not inspect.getmodule(inspect.stack()[1].frame).__name__.startswith("torch."):
            called.append(
                signatures.signature(f"torch {release}", "create_block_mask").bind(*args, **kwargs)
            )
        return makes_mask(*args, **kwargs)

    for site in (flex, masking_utils):
        monkeypatch.setattr(site, "create_block_mask", create_block_mask, raising=False)
    model = tiny.build("llama")
    standins.set_implementation(model, "flex_attention")
    with standins.flex_standin():
        autopack.enable(model, verify=False)
        model(input_ids=tiny.tokens(model.config, 1, 15), position_ids=positions((5, 1, 9)))
        monkeypatch.undo()
    assert called


def test_the_installed_torch_has_the_recorded_signatures():
    if torches.varlen_attn is None:
        pytest.skip("this torch has no varlen_attn")
    release = torch.__version__.partition("+")[0]
    if release not in signatures.TORCHES:
        pytest.skip(f"{release} is none of those that are recorded")
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    for function in (torches.varlen_attn, create_block_mask, flex_attention):
        recorded = signatures.signature(f"torch {release}", function.__name__)
        found = inspect.signature(function)
        one, other = (
            [(p.name, p.kind) for p in each.parameters.values()] for each in (found, recorded)
        )
        assert one == other


@pytest.mark.parametrize("name", FLASH)
def test_a_call_that_does_not_fit_is_noticed(name):
    """The control."""
    stand_in = vars(standins._FLASH["flash_attention_2"]()["flash_attn"])[name]
    with pytest.raises(TypeError, match="argument"):
        stand_in(*[torch.zeros(3, 2, 8)] * 3, cu_seq_lens_q=None)
    assert inspect.signature(stand_in) == FLASH[name]
