"""The scripts are no package: their folder is put on the path, as Python does for a script that it runs."""

from __future__ import annotations

import sys

from tests.harness import REPOSITORY

SCRIPTS = REPOSITORY / "scripts"
for folder in (SCRIPTS, SCRIPTS / "lib"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
