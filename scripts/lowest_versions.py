"""Write the oldest versions of dependencies that pyproject.toml allows, as constraints for pip, to
standard output.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"


def main() -> None:
    """Those that installing the package brings along."""
    listed = re.search(
        r"^dependencies = \[(.*?)^\]", PROJECT.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    assert listed is not None
    for name, version in re.findall(r'"([\w-]+)>=([\d.]+)', listed.group(1)):
        sys.stdout.write(f"{name}=={version}\n")


if __name__ == "__main__":
    main()
