"""Lets the tests import the modules that lie next to them; no time limit per example on a loaded machine."""

import sys
from pathlib import Path

import pytest
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))
pytest.register_assert_rewrite("script")
settings.register_profile("loaded machine", deadline=None)
settings.load_profile("loaded machine")
