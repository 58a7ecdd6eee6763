"""pretrain_gpt_recover.py, of which some workers are killed at a point of the start, once each, or their launchers.

STRUCK_AT      the point, see ``POINTS``
STRUCK_RANKS   their ranks: 0,1
STRUCK_NODES   not empty: their launchers are killed instead
STRUCK_FOLDER  where is noted who was killed
"""

import os
import runpy
import signal
import sys
from pathlib import Path

POINTS = {
    "before torch": None,
    "with torch": None,
    "process group": ("init_process_group", "distributed_c10d.py"),
    "groups": ("new_group", "distributed_c10d.py"),
    "dataset": ("build", "blended_megatron_dataset_builder.py"),
    "checkpoint": ("load_checkpoint", "checkpointing.py"),
    "join": ("join", "membership/io/session.py"),
}
"""Where a function is named the worker is killed when it is called first."""


def strike() -> None:
    (Path(os.environ["STRUCK_FOLDER"]) / f"struck-{os.environ['RANK']}").touch()
    os.kill(os.getppid() if os.environ.get("STRUCK_NODES") else os.getpid(), signal.SIGKILL)
    signal.pause()


def main() -> None:
    point, victims = os.environ["STRUCK_AT"], os.environ["STRUCK_RANKS"].split(",")
    rank = os.environ["RANK"]
    if rank in victims and not (Path(os.environ["STRUCK_FOLDER"]) / f"struck-{rank}").exists():
        if point == "before torch":
            strike()
        import torch  # noqa: F401 - what the point means

        if point == "with torch":
            strike()
        target = POINTS[point]
        assert target is not None
        name, file = target

        def profile(frame, event, argument):
            if event == "call" and frame.f_code.co_name == name and frame.f_code.co_filename.endswith(file):
                strike()

        sys.setprofile(profile)
    script = Path(__file__).parents[2] / "pretrain_gpt_recover.py"
    sys.argv[0] = str(script)
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
