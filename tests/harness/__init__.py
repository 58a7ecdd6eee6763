"""What the tests of several folders share.

forkserver   start many Megatron runs for the price of one import: the client; ``server`` is its other side
recording    what such a run writes down for a comparison
waiting      wait for what gives no event
processes    the process table, and free ports
"""

from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
