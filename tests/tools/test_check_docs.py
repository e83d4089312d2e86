"""The documentation check finds a planted fault of each kind, and none in the documentation as it is."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def checker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_docs", ROOT / "tools" / "check_docs.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_documentation_has_no_dead_link_and_no_broken_code(checker: ModuleType) -> None:
    pages = checker.find_pages(ROOT)
    assert pages
    assert [fault for page in pages for fault in checker.check_page(page, ROOT)] == []


PAGE = """# A title, with `code`

## Twice
## Twice

Good: [itself](#a-title-with-code), [again](#twice-1), [there](other.md#there), [far](https://example.org/none),
[mail](mailto:someone@example.org), `[no](link.md)`, [folder](.), [spaced](with%20blank.md), [up](/page.md).

```python
[this](is-no-link.md)
x = 1
```

```sh
not python (
```
"""


def test_a_sound_page_has_no_fault(checker: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# There\n")
    (tmp_path / "with blank.md").write_text("")
    page = tmp_path / "page.md"
    page.write_text(PAGE.replace("[this](is-no-link.md)", "y = 2"))
    assert list(checker.check_page(page, tmp_path)) == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("\n[gone](gone.md)\n", "page.md:2: gone.md does not exist"),
        ("![picture](gone.png)\n", "page.md:1: gone.png does not exist"),
        ("see [x]\n\n[x]: gone.md\n", "page.md:3: gone.md does not exist"),
        ("[out](../)\n", "page.md:1: ../ is outside the project"),
        ("# One\n[two](#two)\n", "page.md:2: #two names a heading that page.md does not have"),
        ("```python\nx = 1\nx = = 2\n```\n", "page.md:3: this Python does not compile: invalid syntax"),
        ("  ```python\n  x = (\n  ```\n", "page.md:2: this Python does not compile: '(' was never closed"),
    ],
)
def test_a_planted_fault_is_found_in_its_place(checker: ModuleType, tmp_path: Path, text: str, fault: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    assert list(checker.check_page(page, tmp_path)) == [fault]


def test_the_check_fails_when_a_page_does(
    checker: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "README.md").write_text("[gone](gone.md)")
    assert checker.main(tmp_path) == 1
    assert capsys.readouterr().out.splitlines() == ["README.md:1: gone.md does not exist", "pages: 1, faults: 1"]
    (tmp_path / "README.md").write_text("[here](README.md)")
    assert checker.main(tmp_path) == 0
