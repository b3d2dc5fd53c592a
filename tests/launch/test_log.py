"""What autopack logs is written once, by whoever writes logs in the program, and leaves progress
bars whole."""

import pytest

from tests.support.processes import python

WARNING = (
    "import autopack, logging; logging.getLogger('autopack.enabling').warning('something %s', "
    "'stays')"
)
INFO = "import autopack, logging; logging.getLogger('autopack.enabling').info('something stays')"


def ran(code, level=""):
    ended = python("-c", code, AUTOPACK_LOG=level)
    assert not ended.stdout
    return ended.stderr


SETUP = "import logging; logging.basicConfig(format='MINE %(message)s');"
OWN = "import autopack, logging; logging.getLogger('autopack').addHandler(logging.StreamHandler());"


@pytest.mark.parametrize(
    ("code", "level", "said"),
    [
        (WARNING, "", "autopack: something stays\n"),
        (INFO, "", ""),
        (INFO, "warning", ""),
        (INFO, "info", "autopack: something stays\n"),
        (INFO, "DEBUG", "autopack: something stays\n"),
        (
            INFO,
            "loud",
            (
                "autopack: AUTOPACK_LOG must be one of debug, info, warning, error; found 'loud', "
                "which changes nothing\n"
            ),
        ),
        # A program with logging of its own gets each line once, also where it is set up after the
        # import.
        (SETUP + WARNING, "", "MINE something stays\n"),
        (f"import autopack; {SETUP}{WARNING}", "", "MINE something stays\n"),
        (OWN + WARNING, "", "something stays\n"),
        # A program without stderr goes on.
        ("import sys; sys.stderr.close(); sys.stderr = None; " + WARNING, "", ""),
    ],
)
def test_a_line_is_written_once_by_whoever_writes(code, level, said):
    assert ran(code, level) == said


def test_a_progress_bar_is_drawn_again_below_the_line():
    bar = (
        "import tqdm; bar = tqdm.tqdm(total=3, desc='training', mininterval=0, miniters=1); "
        "bar.update(1);"
    )
    said = ran(bar + WARNING + "; bar.update(1); bar.close()")
    line = next(each for each in said.replace("\r", "\n").split("\n") if "something stays" in each)
    assert line == "autopack: something stays", "the line has nothing of the bar in it"
    after = said.partition("something stays\n")[2]
    assert "training" in after
