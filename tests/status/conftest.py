"""Lets the tests use the clusters and the simulation of tests/membership."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "membership"))
