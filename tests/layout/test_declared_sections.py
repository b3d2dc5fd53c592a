"""Positions with three or four sections, (sections, rows, columns), as M-RoPE has them: where
documents begin."""

import torch

from autopack.layout.declarations import read
from tests.layout.test_declarations import CPU, ELSEWHERE, ONE_ROW, _bounds, _read, _tensor
from tests.support.refusals import refused


def test_the_first_of_four_sections_holds_the_text_positions():
    vision = torch.tensor([0, 0, 3, 3, 0, 1, 2, 5]).expand(3, 1, 8)
    text = ONE_ROW["position_ids"][None]
    assert _bounds((1, 8), position_ids=torch.cat([text, vision])) == [0, 3, 5, 8]


IMAGES = torch.tensor([
    [0, 1, 2, 2, 2, 2, 4, 5, 0, 1, 0, 0, 0, 0, 2],
    [0, 1, 2, 2, 3, 3, 4, 5, 0, 1, 0, 0, 1, 1, 2],
    [0, 1, 2, 3, 2, 3, 4, 5, 0, 1, 0, 1, 0, 1, 2],
])[:, None]  # fmt: skip
"""Documents of 8, 2 and 5 tokens; the first has an image in it, the last begins with one."""


def test_a_document_starts_with_zero_in_all_of_three_sections_which_agree_with_the_rest():
    three = ONE_ROW["position_ids"].expand(3, 1, 8)
    assert _bounds((1, 15), position_ids=IMAGES) == [0, 8, 10, 15]
    assert _bounds((1, 8), position_ids=three) == [0, 3, 5, 8]
    for name in ("cu_seq_lens_q", "seq_idx", "attention_mask"):
        assert _bounds((1, 8), position_ids=three, **{name: ONE_ROW[name]}) == [0, 3, 5, 8]
        with refused("documents-unclear"):
            _read((1, 8), position_ids=three, **{name: ELSEWHERE[name]})
    with refused("declaration-invalid"):
        _read((1, 8), position_ids=three - 1)


def test_one_document_with_images_packs_nothing():
    assert _read((1, 8), position_ids=IMAGES[..., :8]) is None
    assert _read((1, 5), position_ids=IMAGES[..., 10:]) is None
    assert _read((1, 6), position_ids=IMAGES[..., 2:8] + 40) is None  # a later part
    assert _read((2, 8), position_ids=IMAGES[..., :8].expand(3, 2, 8)) is None


def test_times_of_videos_may_be_fractions():
    """Qwen3-Omni numbers all tokens by floats, and frames by seconds."""
    assert _bounds((1, 15), position_ids=IMAGES.float()) == [0, 8, 10, 15]
    video = IMAGES.float()
    video[0, 0, 12:14] += 0.5
    assert _bounds((1, 15), position_ids=video) == [0, 8, 10, 15]
    first = IMAGES[..., 10:].float()
    first[:, 0, :4] += 0.5  # no document begins between two whole numbers
    assert _read((1, 5), position_ids=first) is None
    for wrong in (float("nan"), float("inf"), -0.5):
        with refused("declaration-invalid"):
            _read((1, 8), position_ids=torch.full((3, 1, 8), wrong))
    with refused("declaration-invalid"):
        _read((1, 8), position_ids=torch.zeros(4, 1, 8))


def test_padding_is_no_document_of_three_sections():
    padded = torch.tensor([[1, 1, 0, 1, 2], [0, 1, 2, 1, 1], [0, 1, 1, 2, 3]]).expand(3, 3, 5)
    mask = _tensor([0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 0, 1, 1])
    found = read({"position_ids": padded, "attention_mask": mask}, (3, 5), CPU)
    assert found.layout is None
    assert found.real is not None
    row = torch.tensor([[0, 1, 2, 0, 1, 1, 1, 0, 1, 1]]).expand(3, 1, 10)
    mask = _tensor([1, 1, 1, 1, 1, 0, 0, 1, 1, 0])
    assert _bounds((1, 10), position_ids=row, attention_mask=mask) == [0, 3, 5, 7, 9, 10]


def test_what_three_sections_leave_open_is_refused():
    gap, back = _tensor([0, 1, 2, 7, 8]), _tensor([0, 1, 2, 1, 2])
    sound = IMAGES[..., :8].clone()
    sound[:, 0, 6:] -= 3  # of a video, numbered from the video's beginning
    # by a marker at 0, or a document of one
    opened = torch.tensor([[0, 0, 0, 2], [0, 0, 0, 2], [0, 0, 1, 2]])[:, None]
    for positions_, columns in (
        (gap.expand(3, 1, 5), 5),
        (back.expand(3, 1, 5), 5),
        (sound, 8),
        (opened, 4),
    ):
        with refused("documents-unclear"):
            _read((1, columns), position_ids=positions_)
        one = torch.zeros(1, columns, dtype=torch.long)
        assert _read((1, columns), position_ids=positions_, seq_idx=one) is None
    assert _bounds((1, 5), position_ids=gap.expand(3, 1, 5), seq_idx=_tensor([0, 0, 0, 1, 1])) == [
        0,
        3,
        5,
    ]
