"""Checks the documentation: every relative link leads somewhere and every Python block compiles."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

FENCE = re.compile(r"^ {0,3}(```+|~~~+)[ \t]*([\w+-]*)[^\n]*\n(.*?)^ {0,3}\1[ \t]*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[[^\]]*\]\(\s*<?([^)\s>]+)>?[^)]*\)|^ {0,3}\[[^\]]+\]:\s*(\S+)", re.MULTILINE)
HEADING = re.compile(r"^#{1,6}\s+(.+?)\s*#*$", re.MULTILINE)
ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)


def main(root: Path) -> int:
    """Print what is wrong below `root`; the exit code says whether anything is."""
    pages = find_pages(root)
    faults = [fault for page in pages for fault in check_page(page, root)]
    for fault in faults:
        print(fault)
    print(f"pages: {len(pages)}, faults: {len(faults)}")
    return 1 if faults else 0


def find_pages(root: Path) -> list[Path]:
    """README and its neighbours, and all of docs/ and examples/."""
    folders = [root / "docs", root / "examples", root / "benchmarks"]
    return sorted(root.glob("*.md")) + [page for folder in folders for page in sorted(folder.rglob("*.md"))]


def check_page(page: Path, root: Path) -> Iterator[str]:
    """The faults of one page, each with its place."""
    text = page.read_text(encoding="utf-8")
    for fence in FENCE.finditer(text):
        if fence[2] in {"python", "py"}:
            first = text.count("\n", 0, fence.start(3))
            yield from check_python(textwrap.dedent(fence[3]), f"{page.relative_to(root)}", first)
    # Code is blanked, not cut out, so that line numbers stay right.
    prose = FENCE.sub(lambda fence: "\n" * fence[0].count("\n"), text)
    prose = re.sub(r"`[^`\n]*`", lambda code: " " * len(code[0]), prose)
    for link in LINK.finditer(prose):
        fault = check_link(unquote(link[1] or link[2]), page, root)
        if fault:
            yield f"{page.relative_to(root)}:{prose.count(chr(10), 0, link.start()) + 1}: {fault}"


def check_python(source: str, name: str, first: int) -> Iterator[str]:
    """Compile one block, whose lines follow line `first` of its page."""
    try:
        compile(source, name, "exec")
    except SyntaxError as error:
        yield f"{name}:{first + (error.lineno or 1)}: this Python does not compile: {error.msg}"


def check_link(target: str, page: Path, root: Path) -> str | None:
    """Why a link leads nowhere, if it does; links to elsewhere are not followed."""
    if ELSEWHERE.match(target):
        return None
    path, _, anchor = target.partition("#")
    place = (root / path.lstrip("/") if path.startswith("/") else page.parent / path) if path else page
    if not place.exists():
        return f"{target} does not exist"
    if not place.resolve().is_relative_to(root.resolve()):
        return f"{target} is outside the project"
    if anchor and place.suffix == ".md" and anchor not in find_anchors(place.read_text(encoding="utf-8")):
        return f"{target} names a heading that {place.name} does not have"
    return None


def find_anchors(text: str) -> set[str]:
    """The headings' names in links: small letters, without punctuation, blanks as hyphens, repeats numbered."""
    anchors: set[str] = set()
    for heading in HEADING.findall(FENCE.sub("", text)):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        repeat = 0
        while (f"{slug}-{repeat}" if repeat else slug) in anchors:
            repeat += 1
        anchors.add(f"{slug}-{repeat}" if repeat else slug)
    return anchors


if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parent.parent))
