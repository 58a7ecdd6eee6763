"""The files that a reader enters to follow a death: those of which a function runs, on two of the roads.

    python benchmarks/roads.py

step     on a worker of a whole replica: from the call of Megatron's schedule to the committed step, in which a worker
         of another replica dies
orphan   on a mate of a worker that dies: from the news until it has its new place

Two deaths in one run of three replicas of two workers; all threads of a worker are looked at.  Left out: what stands in
for a GPU and for the user's script, and what injects the faults.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

PACKAGE = f"{REPOSITORY / 'recover_megatron'}/"
OTHERS = ("hostdevice/", "chaos/", "megatron_hooks/entry/gpt_script", "megatron_hooks/fault_injection")

ROADS = {
    "step": (("megatron_hooks/training", "_step"), ("instep/step", "_rerun"), ("megatron_hooks/training", "_step")),
    "orphan": (("instep/orphan", "leave"), ("instep/orphan", "come_back"), ("megatron_hooks/rejoin", "come_back")),
}
"""Road -> the function with whose call it begins, one that must run in it, and the one with whose return it ends."""


def worker(folder: Path) -> None:
    """Train, and write down the first of each road: ``FOLDER/ROAD-WORKER``, a JSON list."""
    import pretrain_gpt_recover

    under_way: dict[str, set[tuple[str, str]]] = {}

    def note(frame: Any, event: str, argument: Any) -> None:
        if event not in ("call", "return") or not frame.f_code.co_filename.startswith(PACKAGE):
            return
        here = frame.f_code.co_filename[len(PACKAGE) : -len(".py")], frame.f_code.co_name
        for road, (first, wanted, last) in ROADS.items():
            out = folder / f"{road}-{os.environ['RANK']}"
            if event == "call" and here == first and road not in under_way and not out.exists():
                under_way[road] = set()
            if event == "return" and here == last and road in under_way:
                entered = under_way.pop(road)
                if wanted in entered:
                    out.write_text(json.dumps(sorted({file for file, _ in entered})))
        for entered in list(under_way.values()):
            entered.add(here)

    threading.setprofile(note)
    sys.setprofile(note)
    pretrain_gpt_recover.main()


def main() -> None:
    from tests.harness.forkserver import ForkServer
    from tests.instep.runs import LAYOUTS, Case, Strike

    layout = next(layout for layout in LAYOUTS if layout.name == "tp2-dp3")
    deaths = Strike(1, 1, 3, "reduce-scatter"), Strike(2, 0, 3, "forward")
    with tempfile.TemporaryDirectory() as name, ForkServer() as server:
        folder = Path(name)
        script = (str(Path(__file__)), str(folder))
        result = Case(layout, deaths, train_with=script).run(server, folder / "run")
        for road, survivor in (("step", 0), ("orphan", layout.grid.replicas[1][0])):
            found = folder / f"{road}-{survivor}"
            if not found.exists():
                sys.exit(f"no worker came to the end of the road {road}\n{result.told()}")
            files = [file for file in json.loads(found.read_text()) if not file.startswith(OTHERS)]
            by_package: defaultdict[str, list[str]] = defaultdict(list)
            for file in files:
                package, _, module = file.rpartition("/")
                by_package[package].append(module)
            print(f"{road}: {len(files)} files")
            for package, modules in by_package.items():
                print(f"  {package or '.'} ({len(modules)}): {', '.join(modules)}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        worker(Path(sys.argv.pop(1)))
    else:
        main()
