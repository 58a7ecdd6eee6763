"""A script whose workers try a road that broke for long: trying.py SCRIPT flags...

So an outage that a test ends is over before they give the road up, however long that takes on this machine.
"""

import runpy
import sys

from recover_megatron.instep import edges
from tests.harness.patience import patient

edges.REACH_SECONDS = edges.AGAIN_SECONDS = patient(30)
script = sys.argv.pop(1)
sys.argv[0] = script
runpy.run_path(script, run_name="__main__")
