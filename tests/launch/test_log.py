"""What autopack logs is written once, by whoever writes logs in the program, and leaves progress bars whole."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

WARNING = "import autopack, logging; logging.getLogger('autopack.enabling').warning('something %s', 'stays')"
INFO = "import autopack, logging; logging.getLogger('autopack.enabling').info('something stays')"


def ran(code: str, level: str | None = None) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "AUTOPACK_LOG"}
    environment |= {} if level is None else {"AUTOPACK_LOG": level}
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert not ended.stdout
    return ended.stderr


def test_warnings_are_lines_on_stderr():
    assert ran(WARNING) == "autopack: something stays\n"


@pytest.mark.parametrize(
    ("level", "said"),
    [(None, ""), ("warning", ""), ("info", "autopack: something stays\n"), ("DEBUG", "autopack: something stays\n")],
)
def test_the_variable_sets_the_level(level, said):
    assert ran(INFO, level) == said


def test_a_level_that_is_none_is_said_and_changes_nothing():
    expected = (
        "autopack: AUTOPACK_LOG must be one of debug, info, warning, error; found 'loud', which changes nothing\n"
    )
    assert ran(INFO, "loud") == expected


def test_a_program_with_logging_of_its_own_gets_each_line_once():
    said = ran("import logging; logging.basicConfig(format='MINE %(message)s');" + WARNING)
    assert said == "MINE something stays\n"


def test_also_where_it_is_set_up_after_the_import():
    said = ran("import autopack, logging; logging.basicConfig(format='MINE %(message)s');" + WARNING)
    assert said == "MINE something stays\n"


def test_a_handler_on_our_logger_is_the_one_that_writes():
    own = "import autopack, logging; logging.getLogger('autopack').addHandler(logging.StreamHandler());"
    assert ran(own + WARNING) == "something stays\n"


def test_a_progress_bar_is_drawn_again_below_the_line():
    bar = "import tqdm; bar = tqdm.tqdm(total=3, desc='training', mininterval=0, miniters=1); bar.update(1);"
    said = ran(bar + WARNING + "; bar.update(1); bar.close()")
    line = next(each for each in said.replace("\r", "\n").split("\n") if "something stays" in each)
    assert line == "autopack: something stays", "the line has nothing of the bar in it"
    after = said.partition("something stays\n")[2]
    assert "training" in after


def test_a_program_without_stderr_goes_on():
    assert ran("import sys; sys.stderr.close(); sys.stderr = None; " + WARNING) == ""
