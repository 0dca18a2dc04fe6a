"""README.md and README.zh-CN.md: outputs, excerpts, links and pictures are true, and the two say the same."""

import re
import subprocess
import sys

import pytest
import readme
from readme import PAGES, READMES, ROOT, blocks, is_session

TEXTS = {path.name: path.read_text(encoding="utf-8") for path in READMES if path.exists()}
SOURCE = (ROOT / "llm_inference.py").read_text(encoding="utf-8")
both = pytest.mark.parametrize("name", TEXTS)


def test_both_languages_exist():
    assert set(TEXTS) == {path.name for path in READMES}


@pytest.mark.parametrize("path", [READMES[0], *PAGES], ids=lambda path: str(path.relative_to(ROOT)))
def test_every_output_is_what_the_code_prints(path):
    """`python tests/readme.py` would change nothing, but for timings."""
    text = path.read_text(encoding="utf-8")
    renewed = readme.with_line_counts(readme.renewed(text))
    now, written = (readme.without_timings(t).splitlines() for t in (renewed, text))
    assert now == written


def test_every_program_and_every_test_file_has_its_row():
    examples, tests = (path.read_text(encoding="utf-8") for path in PAGES)
    for path in (ROOT / "examples").glob("[!_]*.py"):
        assert f"({path.name})" in examples, path
    for path in (ROOT / "tests").glob("*.py"):
        example = ROOT / "examples" / path.name.removeprefix("test_")
        assert f"`{path.name}`" in tests or example.exists(), path


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.parent.name)
def test_links_of_the_pages_resolve(path):
    text = path.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s#]+)\)", text):
        assert target.startswith("http") or (path.parent / target).exists(), target


@both
def test_excerpts_stand_in_the_file(name):
    """A Python block without >>> is a run of lines of llm_inference.py."""
    excerpts = [
        content
        for language, content in blocks(TEXTS[name])
        if language == "python" and not is_session(language, content)
    ]
    assert len(excerpts) >= 10
    for excerpt in excerpts:
        assert excerpt in SOURCE, f"not in llm_inference.py:\n{excerpt}"


@both
def test_links_and_pictures_resolve(name):
    """Every relative link names a file of the repository, every #anchor a heading."""
    text = TEXTS[name]
    headings = {
        re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-")
        for h in re.findall(r"^#+ (.*)$", text, re.M)
    }
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    assert any(target.endswith(".svg") for target in targets)
    for target in targets:
        if target.startswith("#"):
            assert target[1:] in headings, target
        elif not target.startswith("http"):
            page, _, anchor = target.partition("#")
            assert (ROOT / page).exists(), target
            there = (ROOT / page).read_text(encoding="utf-8") if anchor else ""
            assert not anchor or anchor in there.lower().replace(" ", "-"), target


def test_pictures_fit_the_model():
    """.github/*.svg were drawn from the miniature that lies here."""
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "figures.py", "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_two_languages_are_in_step():
    """The same blocks, the same pictures, and section by section the same numbers."""
    english, chinese = (TEXTS[path.name] for path in READMES)
    assert blocks(english) == blocks(chinese)
    pictures = lambda text: re.findall(r"\.github/\w+\.(?:svg|png)", text)
    assert pictures(english) == pictures(chinese)
    sections = lambda text: re.split(r"^##+ ", readme.FENCE.sub("", text), flags=re.M)
    assert len(sections(english)) == len(sections(chinese))
    for one, other in zip(sections(english), sections(chinese)):
        numbers = [set(re.findall(r"\d+(?:[.,]\d+)*", part)) for part in (one, other)]
        assert numbers[0] == numbers[1], f"in '{one.splitlines()[0]}': {numbers[0] ^ numbers[1]}"
