"""Put the records of benchmarks into docs/measured.md, where it names them.

python -m benchmarks.pages            write it anew
python -m benchmarks.pages --check    exit with 1 if it says something else; write nothing
"""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"(?<=<!-- record: )(\w+)( -->\n```text\n).*?(?=```\n)", re.DOTALL)


def main(root: Path = ROOT, check: bool = False) -> int:
    """Write the page anew, or with `check` return 1 if that would change it."""
    path = root / "docs" / "measured.md"
    text = path.read_text(encoding="utf-8")

    def recorded(found: re.Match[str]) -> str:
        lines = (
            (root / "benchmarks" / "results" / f"{found[1]}.txt")
            .read_text(encoding="utf-8")
            .splitlines()
        )
        # As wide as the page: no table is wider.
        parts = (
            textwrap.wrap(line, 104, subsequent_indent="  ") if len(line) > 104 else [line]
            for line in lines
        )
        return found[1] + found[2] + "".join(f"{part}\n" for each in parts for part in each)

    wanted = BLOCK.sub(recorded, text)
    if not check:
        path.write_text(wanted, encoding="utf-8")
    elif text != wanted:
        print("docs/measured.md is not what the records give; run `python -m benchmarks.pages`.")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(check="--check" in sys.argv))
