"""Reading what a call declares: all ways of saying the same documents agree, and everything else
raises."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopack.layout.declarations import read
from tests.engine import counted, numbered
from tests.support.refusals import refused

CPU = torch.device("cpu")


def _read(shape, **arguments):
    return read(arguments, shape, CPU).layout


def _bounds(shape, **arguments):
    layout = _read(shape, **arguments)
    return None if layout is None else layout.bounds.tolist()


def _tensor(*rows):
    return torch.tensor(rows)


def _in_every_way(*lengths):
    return {
        "position_ids": counted(lengths),
        "cu_seq_lens_q": torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32),
        "seq_idx": numbered(lengths) - 1,
        "attention_mask": numbered(lengths),
    }


ONE_ROW, ELSEWHERE = _in_every_way(3, 2, 3), _in_every_way(4, 1, 3)


@pytest.mark.parametrize(("one", "other"), itertools.permutations(ONE_ROW, 2))
def test_any_two_that_disagree_are_refused_by_name_and_place(one, other):
    with refused("documents-unclear") as raised:
        _read((1, 8), **{one: ONE_ROW[one], other: ELSEWHERE[other]})
    assert all(part in str(raised.value) for part in (one, other, "row 0, column 3"))


@st.composite
def packed_batches(draw):
    """Rows of (kind, length) runs, kind 1 for a document and 0 for padding; padding runs do not
    touch."""
    columns = draw(st.integers(2, 20))
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        cuts = sorted(draw(st.sets(st.integers(1, columns - 1), max_size=6)))
        lengths = np.diff([0, *cuts, columns]).tolist()
        kinds = draw(
            st.lists(st.sampled_from([1, 1, 1, 0]), min_size=len(lengths), max_size=len(lengths))
        )
        kinds = [k or (i > 0 and not kinds[i - 1]) for i, k in enumerate(kinds)]
        rows.append(list(zip([int(k) for k in kinds], lengths, strict=True)))
    return columns, rows


def _declare(columns, rows, base, garbage):
    """All declarations of the same rows, and the bounds that follow; positions of padding are
    noise.

    Runs of padding that are longer than every document are cut to its length.
    """
    position_ids, segments, seq_idx, bounds = [], [], [], [0]
    for row in rows:
        segment = 0
        places, ids, numbers = [], [], []
        for number, (kind, length) in enumerate(row):
            segment += kind
            places += list(range(base, base + length)) if kind else garbage[:length]
            ids += [segment * kind] * length
            numbers += [number] * length
            bounds.append(bounds[-1] + length)
        position_ids.append(places), segments.append(ids), seq_idx.append(numbers)
    segments = torch.tensor(segments)
    longest = max((length for row in rows for kind, length in row if kind), default=columns)
    starts = (range(a, b, longest) for a, b in itertools.pairwise(bounds))
    return {
        "position_ids": torch.tensor(position_ids),
        "cu_seq_lens_q": torch.tensor(bounds, dtype=torch.int32),
        "cu_seq_lens_k": torch.tensor(bounds, dtype=torch.int32),
        "seq_idx": torch.tensor(seq_idx),
        "mask": (segments > 0).long(),
        "segments": segments,
        "bounds": [*itertools.chain.from_iterable(starts), bounds[-1]],
        "packed": bool((segments > 1).any()),
    }


DECLARING = ("position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")


@given(
    packed_batches(),
    st.sampled_from([0, 2]),
    st.lists(st.integers(-3, 9), min_size=20, max_size=20),
    st.data(),
)
def test_any_declaration_of_any_rows_gives_the_layout_that_was_meant(batch, base, garbage, data):
    columns, rows = batch
    said = _declare(columns, rows, base, garbage)
    chosen = data.draw(st.sets(st.sampled_from(DECLARING)))
    arguments = {name: said[name] for name in chosen}
    masks = [("segments", torch.int64), ("segments", torch.int32)]
    if chosen:
        masks += [("mask", torch.int64), ("mask", torch.bool)] + [None] * bool(said["mask"].all())
    if (mask := data.draw(st.sampled_from(masks))) is not None:
        arguments["attention_mask"] = said[mask[0]].to(mask[1])
    found = _bounds((len(rows), columns), **arguments)
    assert found == (said["bounds"] if said["packed"] else None)


@pytest.mark.parametrize(
    ("row", "bounds"),
    [
        ([5, 6, 7, 0, 1, 2], [0, 3, 6]),  # the row starts in the middle of a document
        # in a row that has documents, what does not go on is another one
        ([0, 1, 4, 5, 0, 1], [0, 2, 4, 6]),
    ],
)
def test_documents_by_positions(row, bounds):
    assert _bounds((1, 6), position_ids=_tensor(row)) == bounds


@pytest.mark.parametrize(
    ("row", "mask"),
    [
        ([0, 1, 2, 4, 5, 6], [1, 1, 1, 1, 1, 1]),  # stretched
        ([0, 1, 0, 0, 1, 2], [1, 1, 0, 0, 1, 1]),  # generation goes on after padding on the right
    ],
)
def test_positions_that_jump_and_nowhere_begin_anew_declare_nothing(row, mask):
    found = read({"position_ids": _tensor(row), "attention_mask": _tensor(mask)}, (1, 6), CPU)
    assert found.layout is None
    assert found.jumps
    if all(mask):
        assert _bounds((1, 6), position_ids=_tensor(row), seq_idx=_tensor([0, 0, 0, 1, 1, 1])) == [
            0,
            3,
            6,
        ]


@pytest.mark.parametrize(
    "arguments",
    [
        {"position_ids": torch.arange(40, 46)[None]},  # a later part of one document
        {"attention_mask": _tensor([2, 2, 2, 2, 0, 0], [1, 1, 1, 1, 1, 0])},
        {"attention_mask": torch.ones(2, 6, 6)},
        {"attention_mask": {"full_attention": None}},
        {"seq_idx": torch.zeros(2, 6, dtype=torch.int32), "max_length_q": 6},
    ],
)
def test_a_row_of_one_document_is_not_packed(arguments):
    assert _read((2, 6), **arguments) is None


def test_all_ones_are_told_from_padding():
    assert read({"attention_mask": torch.ones(1, 6)}, (1, 6), CPU).real is None
    mask = _tensor([1, 1, 1, 1, 1, 0])
    for form in (mask, mask.bool(), mask.float()):
        assert read({"attention_mask": form}, (1, 6), CPU).real.tolist() == [[True] * 5 + [False]]


INVALID = {
    "float positions": {"position_ids": [[0.0] * 8]},
    "positions in a list": {"position_ids": ([0, 1, 0, 1],)},
    "negative positions": {"position_ids": [[0, 1, 2, -1, 0, 1, 2, 3]]},
    "short positions": {"position_ids": [[0, 1, 2]]},
    "positions elsewhere": {"position_ids": torch.zeros(1, 8, dtype=torch.long, device="meta")},
    "mask elsewhere": {"attention_mask": torch.ones(1, 8, device="meta")},
    "flat seq_idx": {"seq_idx": [0] * 8},
    "seq_idx elsewhere": {"seq_idx": torch.zeros(1, 8, device="meta").long()},
    "negative mask": {"attention_mask": [[0.0] * 5 + [-1e9] * 3]},
    "nan mask": {"attention_mask": [[1.0] * 5 + [float("nan")] * 3]},
    "segment that comes back": {"attention_mask": [[1, 1, 2, 2, 1, 1, 3, 3]]},
    **{
        f"padding inside a document{name}": {
            "position_ids": [[0, 1, 2, 0, 1, *last]],
            "attention_mask": [[1, 1, 1, 1, 1, 0, 1, 1]],
        }
        for name, last in {"": (9, 2, 3), " that keeps the column": (2, 3, 4)}.items()
    },
    "bounds that stop early": {"cu_seq_lens_q": [0, 3, 7]},
    "bounds that go too far": {"cu_seq_lens_q": [0, 3, 9]},
    "bounds that start late": {"cu_seq_lens_q": [1, 3, 8]},
    "bounds that fall": {"cu_seq_lens_q": [0, 5, 3, 8]},
    "one bound": {"cu_seq_lens_q": [0]},
    "float bounds": {"cu_seq_lens_q": [0.0, 8.0]},
}
"""Lists stand for tensors."""


@pytest.mark.parametrize("arguments", INVALID.values(), ids=INVALID)
def test_invalid_declarations_are_refused(arguments):
    given = {n: torch.tensor(v) if isinstance(v, list) else v for n, v in arguments.items()}
    with refused("declaration-invalid", "documents-unclear") as raised:
        _read((1, 8), **given)
    assert isinstance(raised.value, ValueError)


def test_bounds_must_begin_every_row():
    with refused("declaration-invalid"):
        _read((2, 4), cu_seq_lens_q=torch.tensor([0, 3, 8]))


SIX = [1, 1, 1, 1, 1, 1, 0, 0]
"""A mask with padding at the end, before which bounds may end."""


@pytest.mark.parametrize(
    ("bounds", "mask", "documents"),
    [
        ([0, 3, 3, 5, 8, 8], None, [0, 3, 5, 8]),  # empty documents count for nothing
        ([0, 4, 6], [SIX], [0, 4, 6, 8]),
        ([0, 4, 7], [SIX], [0, 4, 6, 8]),  # some of the padding is counted
        ([0, 2, 6], [[1, 1, 2, 2, 2, 2, 0, 0]], [0, 2, 6, 8]),
        ([0, 6], [SIX], None),
        ([0, 2, 4, 6], [[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]], [0, 2, 4, 6, 8, 10, 12]),
    ],
)
def test_bounds_may_repeat_themselves_and_end_before_padding_that_the_mask_marks(
    bounds, mask, documents
):
    """The longest document may be stated larger than it is."""
    mask = torch.ones(1, 8) if mask is None else torch.tensor(mask)
    given = {
        "cu_seq_lens_q": torch.tensor(bounds),
        "attention_mask": mask,
        "max_length_q": 64,
        "max_length_k": 8,
    }
    assert _bounds(tuple(mask.shape), **given) == documents


@pytest.mark.parametrize(
    ("row", "documents"),
    [
        ([3, 3, 3, 4, 5, 6], None),  # padding between two turns, by a clamped count
        ([4, 5, 6, 0, 1, 2], [0, 3, 6]),
    ],
)
def test_positions_that_go_on_from_a_cache(row, documents):
    found = read({"position_ids": _tensor(row)}, (1, 6), CPU, continues=True)
    assert (None if found.layout is None else found.layout.bounds.tolist()) == documents
    assert not found.jumps


def test_of_a_mask_that_covers_a_cache_the_end_is_that_of_the_tokens():
    arguments = {
        "position_ids": _tensor([3, 3, 0, 0, 1, 2]),
        "attention_mask": _tensor([1, 1, 1, 1, 0, 0, 0, 1, 1]),
    }
    assert read(arguments, (1, 6), CPU).layout is not None
    assert read(arguments, (1, 6), CPU, continues=True).layout is None


# Positions with three or four sections, (sections, rows, columns), as M-RoPE has them


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
