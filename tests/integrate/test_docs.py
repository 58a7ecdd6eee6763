"""docs/integrate.md has the roles as they are."""

from __future__ import annotations

from recover_megatron.integrate import INTERFACE, ROLES, Role
from tests.harness import REPOSITORY

PAGE = (REPOSITORY / "docs" / "integrate.md").read_text(encoding="utf-8")


def row(role: Role) -> str:
    call = f"`{role.name}({', '.join([*role.parameters, '...'])})`"
    return f"| {call} | {'yes' if role.required else ''} | {role.when.replace('``', '`')} |"


def test_the_page_has_every_role_in_order() -> None:
    assert "\n".join(row(role) for role in ROLES) in PAGE


def test_the_page_has_the_version() -> None:
    assert f"it is {INTERFACE}." in PAGE
