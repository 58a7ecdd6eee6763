"""How much memory of the host a process may still take."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def available(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes: what the kernel has to give, or what a control group that this process is in still may have, if less.

    None: nobody says (another kernel than Linux).
    """
    groups = _groups(proc / "self" / "cgroup", cgroup)
    found = [size for size in (_of_kernel(proc / "meminfo"), *map(_of_group, groups)) if size is not None]
    return min(found, default=None)


def _of_kernel(path: Path) -> int | None:
    if not path.exists():
        return None
    for line in path.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return None


def _groups(told: Path, root: Path) -> Iterator[Path]:
    """Folders of the groups that this process is in, and of those around them, each of which may have a limit.

    A container has its own group at ``root``, whatever ``told`` calls it; a batch job has one far below.
    """
    lines = told.read_text().splitlines() if told.exists() else ["0::/"]
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mount, group = root / "memory" if controllers else root, PurePosixPath(name)
        yield from (mount / str(its).lstrip("/") for its in (group, *group.parents) if ".." not in its.parts)


def _of_group(folder: Path) -> int | None:
    """None: it has no limit, or there is no such folder."""
    for most, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
        if (folder / most).exists() and (folder / used).exists():
            if (limit := (folder / most).read_text().strip()) == "max":
                return None
            return max(0, int(limit) - int((folder / used).read_text()) + _given_back(folder / "memory.stat"))
    return None


def _given_back(path: Path) -> int:
    """Bytes of files that the kernel drops before it refuses memory: a run that reads its data fills its group so."""
    if not path.exists():
        return 0
    fields = (line.split() for line in path.read_text().splitlines())
    sizes = {name: int(value) for name, value in fields}
    return max(sum(sizes.get(f"{whose}{kind}_file", 0) for kind in ("inactive", "active")) for whose in ("total_", ""))
