"""Rows longer than the positions that a model has, of documents that are not: tables and buffers
end before the row."""

from functools import partial

import pytest

from autopack import tiny
from autopack.registry import first_position
from tests.engine import Call, must_be_exact

LENGTHS, MOST = (12, 5, 9, 7), 16
"""33 tokens, for models of 16 positions."""
TYPES = [
    "albert", "bert", "big_bird", "camembert", "convbert", "electra", "ernie", "fnet", "ibert", "megatron-bert",
    "mpnet", "nystromformer", "rembert", "roberta", "roformer", "xlm-roberta", "yoso",
]  # fmt: skip


def build(model_type):
    most = MOST + first_position(tiny.config(model_type, task="masked-lm"))
    landmarks = (
        {"segment_means_seq_len": 16, "num_landmarks": 16} if model_type == "nystromformer" else {}
    )
    model = tiny.build(model_type, task="masked-lm", max_position_embeddings=most, **landmarks)
    return model.double()


@pytest.mark.parametrize("form", ["position_ids", "seq_idx", "segments"])
@pytest.mark.parametrize("model_type", TYPES)
def test_documents_that_fit_are_exact_in_rows_that_do_not(model_type, form):
    call = Call(shifts=False, form=form, lengths=LENGTHS)
    must_be_exact(
        partial(build, model_type), ((call.packed, call.alone), *call.batch), verify=False
    )
