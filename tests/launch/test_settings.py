"""Options of `autopack run` and the variables of the environment that say the same."""

from argparse import ArgumentParser

import pytest

from autopack.commands import run as command
from autopack.launch import settings


def variables(*arguments, **given):
    """The settings that a script would find, for options and for variables of the caller."""
    parser = ArgumentParser()
    command.add_arguments(parser)
    with pytest.MonkeyPatch.context() as patch:
        for option in settings.OPTIONS:
            patch.delenv(option.variable, raising=False)
        for name, value in given.items():
            patch.setenv(name, value)
        return settings.RunSettings.read(
            command._environment(parser.parse_args([*arguments, "script.py"]), "")
        )


def test_options_and_variables_agree_and_options_win():
    for option in settings.OPTIONS:
        assert getattr(variables(), option.name) == option.default
        words = option.words or {"0": 0, "500": 500}
        for text, value in words.items():
            is_switch = not option.choices and not option.metavar
            if option.choices and text not in option.choices:
                continue  # another word for the same
            flags = (
                [f"--{'' if value else 'no-'}{option.flag[2:]}"]
                if is_switch
                else [option.flag, text]
            )
            assert getattr(variables(*flags), option.name) == value
            assert variables(*flags) == variables(**{option.variable: text.upper()})
            for other in words:
                assert getattr(variables(*flags, **{option.variable: other}), option.name) == value
