"""What pip builds; everything is in pyproject.toml."""

from setuptools import setup

setup()
