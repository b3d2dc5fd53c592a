"""A model that learns of its token of padding after it was made has a twin all the same."""

import pytest

from tests.proving.test_twins import source
from tests.proving.untouched import built


@pytest.mark.parametrize("made_with", [None, 3])
def test_for_a_model_that_is_told_its_padding_later(made_with):
    """Trainers write the tokenizer's token of padding into the configuration of a model that was
    made without."""
    model = built(pad_token_id=made_with)
    model.config.pad_token_id = 5 if made_with is None else None
    assert (model.model.embed_tokens.padding_idx is None) == (made_with is None)
    assert source(model) == "twin"
