"""Command ``python -m recover_megatron.report DIR``: print the summary of a run; write no HTML page."""

from __future__ import annotations

import sys

from recover_megatron.report.full import without_page

if __name__ == "__main__":
    sys.exit(without_page())
