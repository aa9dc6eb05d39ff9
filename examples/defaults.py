"""Help of a program that names the defaults of its options, where there are any to name."""

from __future__ import annotations

import argparse


class ShowDefaults(argparse.ArgumentDefaultsHelpFormatter):
    def _get_help_string(self, action: argparse.Action) -> str | None:
        nothing = action.default is None or isinstance(action.default, bool)
        return action.help if nothing else super()._get_help_string(action)
