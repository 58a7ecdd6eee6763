"""Run pretrain_gpt_recover.py, then print which functions of Megatron are no longer its own.

Looks at every function in every module and class of megatron.* that was loaded before the run.
"""

import sys
from types import FunctionType

import pretrain_gpt_recover


def functions() -> dict[str, object]:
    found = {}
    for module_name, module in list(sys.modules.items()):
        if not module_name.startswith("megatron."):
            continue
        for name, value in list(vars(module).items()):
            found[f"{module_name}.{name}"] = value
            if isinstance(value, type) and value.__module__ == module_name:
                found |= {f"{module_name}.{name}.{part}": member for part, member in vars(value).items()}
    return {name: value for name, value in found.items() if isinstance(value, FunctionType)}


before = functions()
assert len(before) > 1000, "Megatron was not loaded"
pretrain_gpt_recover.main()
after = functions()
for name in sorted(before):
    if after.get(name) is not before[name]:
        print(f"changed: {name}")
print("seams reported")
