"""The processes of one node: how they are started, watched, replaced and ended, and what becomes of their output."""
