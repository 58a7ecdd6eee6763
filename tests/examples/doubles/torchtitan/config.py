"""What of the configuration the trainer reads."""

from __future__ import annotations

from types import SimpleNamespace


class ConfigManager:
    """``parse_args`` takes the number of steps."""

    def parse_args(self) -> SimpleNamespace:
        import sys

        return SimpleNamespace(training=SimpleNamespace(steps=int(sys.argv[1]), max_norm=1.0))
