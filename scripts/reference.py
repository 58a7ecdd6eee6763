#!/usr/bin/env python3
"""Write the generated pages of the documentation, docs/reference, from the code and from the files in docs/data.

    python scripts/reference.py             write the pages that are out of date
    python scripts/reference.py --check     print the pages that are out of date; exit status 1 if there are any

The pages are committed, so that readers of the repository need not run this script.  A test checks that the committed
pages are up to date.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "lib")]

import module_map  # noqa: E402
import recipe_table  # noqa: E402
import results_page  # noqa: E402

from recover_megatron import __version__, arguments, variables  # noqa: E402
from recover_megatron.hostdevice import flags, megatron_fixes, replacements  # noqa: E402
from recover_megatron.integrate import INTERFACE, ROLES  # noqa: E402
from recover_megatron.launch.command_line import spec as launch_spec  # noqa: E402
from recover_megatron.megatron_hooks.entry import refused  # noqa: E402
from recover_megatron.megatron_hooks.fsdp import fsdp_refused  # noqa: E402
from recover_megatron.options import Flag  # noqa: E402
from recover_megatron.rules import Rule  # noqa: E402

FOLDER = ROOT / "docs" / "reference"
DATA = ROOT / "docs" / "data"
COMMANDS = {
    "recover-run": "recover_megatron.launch",
    "recover-status": "recover_megatron.status",
    "recover-report": "recover_megatron.report.full",
    "recover-coordinator": "recover_megatron.membership",
    "recover-tools": "recover_megatron.tools",
}
"""Command -> module with which ``python -m MODULE`` runs the same command."""


def page(title: str, summary: str, *parts: str) -> str:
    """Return a page as Markdown: title, summary, then ``parts``, separated by empty lines."""
    return "\n\n".join((f"# {title}", f"> {summary}", *parts)) + "\n"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table as Markdown."""
    lines = (columns, ["---"] * len(columns), *rows)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def flag_table(flags: Sequence[Flag]) -> str:
    """Return a table with each flag's name and value, default, text of ``--help``, and when to change it."""
    rows = []
    for flag in flags:
        value = "|".join(flag.option.choices) or flag.option.metavar or ""
        name = f"{flag.name} {value}".strip().replace("|", "\\|")
        short = f"`{flag.option.short}`, " if flag.option.short else ""
        default = flag.default_in_words or ("" if flag.default is None else str(flag.default))
        meaning = flag.option.help.replace("<", "&lt;").replace("|", "\\|").replace("*", "\\*")
        rows.append((f"{short}`{name}`", "off" if flag.switch else default, meaning, flag.option.docs))
    return table(("flag", "default", "meaning", "when to change it"), rows).replace("](", "](../")


def command_line() -> str:
    """Return the page of all flags and commands."""
    parts = [
        "## Flags of the training script",
        "Pass these flags after the name of the training script, together with `--recover`.",
        flag_table(arguments.FLAGS),
        "## recover-run",
        flag_table(launch_spec.FLAGS),
    ]
    for command, module in COMMANDS.items():
        if command != "recover-run":
            parts += [f"## {command}", f"```text\n{help_of(module)}\n```"]
    return page("Command lines", "All flags of `--recover` and of the commands, made from the parsers.", *parts)


def help_of(module: str) -> str:
    """Return the output of ``python -m MODULE --help`` on a terminal of 100 columns without colours."""
    environment = {"PATH": "/usr/bin:/bin", "COLUMNS": "100", "NO_COLOR": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", module, "--help"]
    shown = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    return "\n".join(line.rstrip() for line in shown.strip().replace(str(ROOT), "DIR").splitlines())


def environment_variables() -> str:
    """Return the page of the environment variables."""
    rows = []
    for variable in variables.TABLE:
        to = f" to {variable.value}" if variable.value and variable.rule is variables.Rule.DEFAULT else ""
        if variable.rule is variables.Rule.OVERRULED:
            to = f": {variable.value}" if variable.value else ": unset"
        fine = [value for value in variable.fine if value not in ("", variable.value)]
        strict = variable.rule in (variables.Rule.OVERRULED, variables.Rule.REFUSED)
        but = f" ({' and '.join(fine)} is fine)" if fine and strict else ""
        names = ", ".join(f"`{name}`" for name in variable.names)
        rows.append((names, f"{variable.rule.value}{to}{but}", variable.why))
    return page(
        "Environment variables",
        "Environment variables of torch, NCCL and Megatron that a run sets, overrules or refuses; made from the code.",
        table(("variable", "yours is", "why"), rows),
    )


def attributes(path: str) -> dict[str, tuple[object, str]]:
    """Return name -> (value, docstring) of the constants with a docstring in the Python file ``path``.

    The file is parsed, and not imported.
    """
    found = {}
    body = ast.parse((ROOT / path).read_text(encoding="utf-8")).body
    for assigned, said in pairwise(body):
        match assigned, said:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=value)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                found[name] = value, " ".join(text.split())
    return found


def exit_codes() -> str:
    """Return the page of the exit codes."""
    modules = ("errors.py", "membership/records.py", "launch/workers/states.py")
    rows = [(0, "The training has ended as its flags request.")]
    for module in modules:
        for name, (value, text) in attributes(f"recover_megatron/{module}").items():
            if isinstance(value, int) and (name.startswith("EXIT_") or name == "LEFT_OUT"):
                rows.append((value, re.sub("^Exit code(?: of|:) (.)", lambda its: its[1].upper(), text)))
    return page(
        "Exit codes",
        "Exit codes of workers and of `recover-run`, made from the code. What to do after each code: "
        "[operations](../operations.md#exit-codes).",
        table(
            ("code", "meaning"),
            [*((str(code), text) for code, text in sorted(rows)), ("128 + S", "Signal S stopped the launcher.")],
        ),
    )


def refusals(rules: Iterable[Rule]) -> str:
    """Return the reasons of ``rules`` as a list in Markdown; ``{args.NAME}`` in a reason becomes ``VALUE``."""
    return "\n".join(f"* {prose(re.sub(r'{args[.]\w+}', 'VALUE', rule.reason))}" for rule in rules)


def prose(text: str) -> str:
    """Return a message as Markdown, with flags and identifiers in backticks."""
    return re.sub(r"(?<![\w`-])(--[\w-]+(?:[ =]VALUE)?|\w+_\w+)(?![\w`])", r"`\1`", text).replace("<", "&lt;")


def refused_page() -> str:
    """Return the page of the flags that ``--recover`` refuses, or handles differently from Megatron."""
    settled = [
        (prose(its.flag), "switched off" if its.off else "done in another way", prose(its.words).replace("|", "\\|"))
        for its in refused.ADJUSTED
    ]
    return page(
        "What --recover refuses, and what it does differently",
        "Made from the rules in the code. A refused run prints all reasons at its start and exits with code 2.",
        "## Refused",
        refusals(refused.RULES),
        "## Refused without --recover-untested",
        refusals(refused.UNTESTED),
        "## Refused with --use-distributed-optimizer",
        refusals(refused.SHARDED_RULES),
        "## Refused with --use-megatron-fsdp",
        refusals([*fsdp_refused.FSDP_RULES, *fsdp_refused.SECOND_RULES, *fsdp_refused.OUTER_RULES]),
        "On the CPU: [host device](hostdevice.md#what-cannot-run-without-a-gpu).",
        "## Taken, and done differently",
        table(("flag", "what happens to it", "why"), settled),
    )


def from_data(path: Path) -> str:
    """Return the page for a TOML file of docs/data, which contains title, introduction and tables."""
    data = tomllib.loads(path.read_text(encoding="utf-8"))
    parts = []
    for its in data["table"]:
        parts += [f"## {its['heading']}"] if its.get("heading") else []
        parts += [its["text"].strip()] if its.get("text") else []
        parts.append(table(its["columns"], its["rows"]))
    return page(data["title"], data["intro"].strip().replace("\n", "\n> "), *parts)


def loop_roles() -> str:
    """Return the page of the roles of a training loop (``recover_megatron.integrate.ROLES``)."""
    roles = [
        (
            f"`{its.name}({', '.join([*its.parameters, '...'])})`",
            "yes" if its.required else "",
            its.when.replace("``", "`"),
        )
        for its in ROLES
    ]
    return page(
        "Roles of a training loop",
        "Each role of `recover_megatron.integrate`: its first parameters, whether a loop needs it, when the loop calls "
        f"it and what it returns. The interface has version {INTERFACE}. "
        "How to use it: [integrate](../integrate.md#connect-a-loop-on-megatroncore).",
        table(("role", "needed", "when the loop calls it"), roles),
    )


def host_device() -> str:
    """Return the page of the host device: refused flags, replaced names of torch, fixes of Megatron."""
    rules = [
        re.sub(r"(.*?): (.*) \((megatron/[\w/]+\.py)\)", r"\1\0\2\0`\3`", its.reason).split("\0") for its in flags.RULES
    ]
    names: dict[str, str] = {}
    for entry in replacements.table():
        names[entry.why] = f"{names.get(entry.why, '')} `{entry.path}`".strip()
    fixes = [(name, f"`{fix.module_name}`", fix.why) for name, fix in megatron_fixes.FIXES.items()]
    return page(
        "The host device: tables",
        "Flags of Megatron that cannot be used on the [host device](../hostdevice.md), names of torch that the host "
        "device replaces, and functions of Megatron that it fixes.",
        "## What cannot run without a GPU",
        table(("flag", "why, and what to do", "file of Megatron"), rules),
        "## What is replaced in torch",
        table(("names", "because"), [(these, why) for why, these in names.items()]),
        "## What is fixed inside Megatron",
        table(("name", "module", "because"), fixes),
    )


def pages() -> dict[str, Callable[[], str]]:
    """Return file name of each page except the index -> function that returns the page's text."""
    made: dict[str, Callable[[], str]] = {
        "command_line.md": command_line,
        "variables.md": environment_variables,
        "exit_codes.md": exit_codes,
        "refused.md": refused_page,
        "loop_roles.md": loop_roles,
        "hostdevice.md": host_device,
        "modules.md": module_map.modules,
        "hooks.md": module_map.hooks,
        "results.md": results_page.results,
        "mutations.md": results_page.mutations,
        "recipes.md": recipe_table.page,
    }
    for path in sorted(DATA.glob("*.toml")):
        made[f"{path.stem}.md"] = lambda path=path: from_data(path)  # type: ignore[misc]
    return made


def index(texts: Mapping[str, str]) -> str:
    """Return the index page, which lists all other pages; ``texts``: file name -> text of each page."""
    toctree = "\n".join(sorted(name.removesuffix(".md") for name in texts))
    titles = {name: text.partition("\n")[0].removeprefix("# ") for name, text in texts.items()}
    return page(
        "Reference",
        "Pages that `python scripts/reference.py` makes from the code and from `docs/data`.",
        "\n".join(f"* [{title}]({name})" for name, title in sorted(titles.items())),
        f"```{{toctree}}\n:hidden:\n\n{toctree}\n```",
    )


def outdated() -> dict[Path, str]:
    """Return path -> new text of each page whose file does not exist or has another text."""
    texts = {FOLDER / name: make() for name, make in pages().items()}
    texts[FOLDER / "index.md"] = index({path.name: text for path, text in texts.items()})
    return {
        path: text for path, text in texts.items() if not path.is_file() or path.read_text(encoding="utf-8") != text
    }


def main() -> int:
    """Run the command; return the exit status."""
    parser = argparse.ArgumentParser(description="Write the pages of docs/reference.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parser.add_argument("--check", action="store_true", help="print the pages that are out of date, write nothing")
    check = parser.parse_args().check
    found = outdated()
    for path, text in found.items():
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        print(f"{path}: {'out of date' if check else 'written'}")
    return 1 if check and found else 0


if __name__ == "__main__":
    sys.exit(main())
