"""Writes the ops of PyTorch that are nothing but calls of other ops: a replay of the leaves runs
these instead.

An op is composite where its kernel for every backend is PyTorch's `CompositeImplicitAutograd`.
Names of which another overload has kernels of its own are left out.
"""

from __future__ import annotations

from pathlib import Path

PATH = Path(__file__).parents[1] / "src" / "traceloom" / "workload" / "replay" / "composite_ops.txt"


def composite_ops() -> list[str]:
    """Their names, as `linear` of `aten::linear`, ascending."""
    import torch

    kernels: dict[str, list[bool]] = {}
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        base, _, overload = rest.partition(".")
        if namespace == "aten" and not overload.endswith("out"):
            composite = torch._C._dispatch_has_kernel_for_dispatch_key(
                name, "CompositeImplicitAutograd"
            )
            kernels.setdefault(base, []).append(composite)
    return sorted(name for name, composite in kernels.items() if all(composite))


if __name__ == "__main__":
    PATH.write_text("\n".join(composite_ops()) + "\n", encoding="utf-8")
    print(f"Wrote {PATH}")
