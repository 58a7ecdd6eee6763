"""Check tests/formal/membership.pml exhaustively with spin, in the configurations listed here.

    python tests/formal/check.py [--quick] [--mutants]

Needs ``spin`` and ``gcc`` (Debian: apt-get install spin gcc). Exit code 0: all configurations hold and, with
``--mutants``, every mutant (a deliberate protocol bug) is caught.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

MODEL = Path(__file__).with_name("membership.pml")
SECONDS = 300 * float(os.environ.get("RECOVER_TEST_PATIENCE", "1"))
"""See tests/harness/patience.py, which this program does without."""


@dataclass(frozen=True)
class Configuration:
    """One bounded world; ``quick``: a few seconds at most."""

    what: str
    defines: str
    quick: bool = False


CUT = "-DCRASHES=0 -DSUSPICIONS=0 -DPARTITION"
HALVES = "-DLEASE -DN=4 -DABANDONS=2 -DLEAVERS=12"

CONFIGURATIONS = (
    Configuration("3 workers, 2 deaths, coordinator death", "-DDEATHS=2 -DSUSPICIONS=0 -DABANDONS=0", quick=True),
    Configuration("3 workers, 2 deaths, coordinator death, wrong suspicion", "-DDEATHS=2 -DABANDONS=0"),
    Configuration("4 workers, 1 death, coordinator death", "-DN=4 -DDEATHS=1 -DSUSPICIONS=0 -DABANDONS=0"),
    Configuration("3 workers, 1 against 2, 2 deaths", f"{CUT} -DDEATHS=2 -DABANDONS=2 -DLEAVERS=6"),
    Configuration("4 workers, 2 against 2", f"{CUT} -DN=4 -DDEATHS=0 -DABANDONS=2 -DLEAVERS=12"),
    Configuration(
        "4 workers, 2 against 2, 1 death on the old side, its witness changes sides",
        f"{CUT} -DN=4 -DW=1 -DDEATHS=1 -DABANDONS=3 -DLEAVERS=28 -DMORTALS=1 -DLASTS=0 -DSTEPS=0",
    ),
    Configuration("lease, 4 workers, 2 against 2", f"{CUT} {HALVES} -DDEATHS=0"),
    Configuration("lease, 4 workers, 2 against 2, 1 death", f"{CUT} {HALVES} -DDEATHS=1 -DSTEPS=0"),
    Configuration("lease, 2 against 2, the old side dies", f"{CUT} {HALVES} -DDEATHS=2 -DSTEPS=0 -DMORTALS=3"),
    Configuration("lease, 2 against 2, the new side dies", f"{CUT} {HALVES} -DDEATHS=2 -DSTEPS=0 -DMORTALS=12"),
    Configuration(
        "lease, 3 workers, 2 deaths, coordinator death", "-DLEASE -DDEATHS=2 -DSUSPICIONS=0 -DABANDONS=0", quick=True
    ),
    Configuration("lease, 3 workers, coordinator death, 1 death, wrong suspicion", "-DLEASE -DDEATHS=1 -DABANDONS=0"),
    Configuration(
        "3 workers, coordinator death, 1 death that a launcher tells",
        "-DW=1 -DDEATHS=1 -DMORTALS=1 -DSUSPICIONS=0 -DABANDONS=0",
    ),
    Configuration(
        "3 workers, 1 against 2, 2 deaths, a launcher that tells one changes sides",
        f"{CUT} -DW=1 -DDEATHS=2 -DMORTALS=3 -DABANDONS=2 -DLEAVERS=12 -DSTEPS=0",
    ),
)

MUTANTS = (
    Configuration("NOQUORUM: a candidate leads without a majority", f"{CUT} -DDEATHS=0 -DNOQUORUM", quick=True),
    Configuration("TIE: half is enough for a new coordinator", f"{CUT} -DDEATHS=1 -DTIE"),
    Configuration(
        "SAMENUMBER: a new coordinator takes the next number after the last formed epoch",
        "-DSUSPICIONS=0 -DDEATHS=1 -DABANDONS=0 -DSAMENUMBER",
    ),
    Configuration(
        "NOINFERENCE: a decision is not inferred from the reports",
        "-DSUSPICIONS=0 -DDEATHS=1 -DABANDONS=0 -DNOINFERENCE",
        quick=True,
    ),
    Configuration(
        "MAJORITYCOMMIT: a majority's reports commit",
        "-DSUSPICIONS=0 -DDEATHS=1 -DABANDONS=0 -DMAJORITYCOMMIT",
    ),
    Configuration(
        "NOOPENED: rendezvous that were opened and perhaps formed are not counted",
        f"{CUT} -DDEATHS=0 -DABANDONS=2 -DLEAVERS=6 -DNOOPENED",
    ),
    Configuration(
        "NOACK: witnesses do not acknowledge before somebody is left out",
        f"{CUT} -DN=4 -DW=1 -DDEATHS=1 -DABANDONS=3 -DLEAVERS=28 -DMORTALS=1 -DLASTS=0 -DSTEPS=0 -DNOACK",
    ),
    Configuration("DEAF: whoever is told is taken to have heard", f"{CUT} -DDEATHS=0 -DDEAF", quick=True),
    Configuration(
        "ALIVE: a launcher's word is believed though the worker lives and goes on",
        f"{CUT} -DW=1 -DDEATHS=1 -DMORTALS=2 -DABANDONS=2 -DLEAVERS=12 -DSTEPS=0 -DALIVE",
    ),
    Configuration("lease, HALF: half goes on without asking for it", f"{CUT} {HALVES} -DDEATHS=0 -DHALF"),
    Configuration("lease, UNASKED: half goes on where it should ask", f"{CUT} {HALVES} -DDEATHS=0 -DUNASKED"),
    Configuration("lease, NOHEIRS: others than members of the holder take it", f"{CUT} {HALVES} -DDEATHS=0 -DNOHEIRS"),
)


@dataclass(frozen=True)
class Result:
    """What ``pan`` found. ``complete``: every reachable state was visited."""

    errors: int
    states: int
    complete: bool


def missing_tools() -> list[str]:
    """The programs this needs and does not find."""
    return [name for name in ("spin", "gcc") if shutil.which(name) is None]


def check(configuration: Configuration) -> Result:
    """Generate, compile and run the verifier of one configuration."""
    with tempfile.TemporaryDirectory(prefix="membership-model-") as folder:

        def run(*command: str) -> str:
            done = subprocess.run(
                command, cwd=folder, capture_output=True, text=True, timeout=SECONDS, check=False, shell=False
            )
            if done.returncode != 0:
                raise RuntimeError(f"{command[0]} failed: {(done.stdout + done.stderr)[-2000:]}")
            return done.stdout

        run("spin", "-a", *configuration.defines.split(), str(MODEL))
        run("gcc", "-O2", "-DSAFETY", "-DCOLLAPSE", "-DMEMLIM=6000", "-o", "pan", "pan.c")
        output = run("./pan", "-m200000")
    errors = re.search(r"errors: (\d+)", output)
    states = re.search(r"(\d+) states, stored", output)
    if errors is None or states is None:
        raise RuntimeError(f"the verifier did not finish: {output[-2000:]}")
    truncated = "max search depth too small" in output or "Search not completed" in output
    return Result(int(errors.group(1)), int(states.group(1)), not truncated)


def main() -> int:
    """Run the configurations, print a line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="only the configurations of a few seconds")
    parser.add_argument("--mutants", action="store_true", help="also check that deliberate protocol bugs are caught")
    args = parser.parse_args()
    if missing := missing_tools():
        parser.error(f"not found: {', '.join(missing)} (Debian: apt-get install spin gcc)")
    good = True
    for configuration in [*CONFIGURATIONS, *(MUTANTS if args.mutants else ())]:
        if configuration.quick or not args.quick:
            result = check(configuration)
            if configuration in MUTANTS:
                good, told = good and result.errors > 0, "caught" if result.errors else "MISSED"
            else:
                holds = result.errors == 0 and result.complete
                good, told = good and holds, "holds" if holds else "FAILS"
            print(f"{told:<6} {result.states:>10,} states  {configuration.what}", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
