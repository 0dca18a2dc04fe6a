"""llm_inference.py stays short, all Python is as ruff leaves it, and the top level holds only what a newcomer looks for."""

import ast
import io
import re
import subprocess
import sys
import tokenize
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE = (ROOT / "llm_inference.py").read_text("utf-8")
TOP_LEVEL = {
    "llm_inference.py",
    "README.md",
    "README.zh-CN.md",
    "requirements.txt",
    "examples",
    "tests",
}
TOP_LEVEL |= {"Qwen3-0.6B", "LICENSE"}
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
NO_CODE |= {tokenize.ENCODING, tokenize.ENDMARKER}


def code_lines(source):
    """The numbers of the lines of code: blank lines, comments and docstrings are none."""
    code = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            code |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.FunctionDef, ast.ClassDef)):
            if ast.get_docstring(node) is not None:
                code -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    lines = source.splitlines()
    return {number for number in code if lines[number - 1].strip()}


def section_sizes(source):
    """Title -> lines of code, for the part before the first `# ---- N. title` and each one after."""
    code, sizes, title = code_lines(source), {}, "opening"
    for number, line in enumerate(source.splitlines(), 1):
        heading = re.match(r"# ---- (\d+)\. ([\w ]+)", line)
        title = heading[2] if heading else title
        sizes[title] = sizes.get(title, 0) + (number in code)
    return sizes


def test_counting():
    source = '"""Two\nlines."""\n# comment\n\nx = 1  # code\ndef f():\n    """Doc."""\n    return """a\n\nb"""\n'
    assert len(code_lines(source)) == 4
    assert section_sizes("a\n# ---- 1. Head: x\nb\nc\n# ---- 2. Tail\nd\n") == {
        "opening": 1,
        "Head": 2,
        "Tail": 1,
    }


def test_the_engine_is_within_its_budget():
    """Every section but the checkpoint and the command line."""
    sizes = section_sizes(SOURCE)
    assert len(sizes) == 12 and "Checkpoint" in sizes and "Command line" in sizes
    engine = {
        title: size
        for title, size in sizes.items()
        if title not in ("opening", "Checkpoint", "Command line")
    }
    assert sum(engine.values()) <= 150, engine


def test_the_whole_file_is_within_its_budget():
    total, code = len(SOURCE.splitlines()), len(code_lines(SOURCE))
    assert total <= 420 and code <= 300, f"{total} lines, {code} of code"


@pytest.mark.parametrize("command", [["format", "--check"], ["check"]], ids=" ".join)
def test_all_python_is_as_ruff_leaves_it(command):
    places = ["llm_inference.py", "examples", "tests"]
    done = subprocess.run(
        [sys.executable, "-m", "ruff", *command, *places], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def packed_places(source):
    """Where a line holds more than one thing: walrus, comprehension in a comprehension, starred generator, function as default."""
    tree = ast.parse(source)
    loops = ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp
    starts = [node.lineno for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    found = [f"line {line}: two statements" for line in set(starts) if starts.count(line) > 1]
    for node in ast.walk(tree):
        line = f"line {getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.NamedExpr):
            found.append(f"{line}: walrus")
        if isinstance(node, ast.Starred) and isinstance(node.value, loops):
            found.append(f"{line}: starred generator")
        if isinstance(node, loops):
            inner = [part for part in ast.walk(node) if isinstance(part, loops)]
            if len(node.generators) > 1 or len(inner) > 1:
                found.append(f"{line}: nested comprehension")
        if isinstance(node, ast.arguments):
            for default in [*node.defaults, *node.kw_defaults]:
                if isinstance(default, (ast.Lambda, ast.Name, ast.Attribute)):
                    found.append(f"line {default.lineno}: a function as default")
    return found


@pytest.mark.parametrize(
    "path",
    [ROOT / "llm_inference.py", *sorted((ROOT / "examples").glob("*.py"))],
    ids=lambda p: p.name,
)
def test_one_thing_a_line(path):
    assert packed_places(path.read_text("utf-8")) == []


@pytest.mark.parametrize(
    "source",
    [
        "a = 1; b = 2",
        "if a: b = 1",
        "print(a := 1)",
        "f(*(x for x in y))",
        "[x for row in y for x in row]",
        "{k: [x for x in v] for k, v in y}",
        "def f(a=lambda: 1):\n    return a",
        "def f(*, a=len):\n    return a",
        "g = lambda a=mx.sin: a",
    ],
)
def test_packed_lines_are_found(source):
    assert packed_places(source) != []
    assert packed_places("def f(a=1, *, b=None):\n    return [x for x in a]\n") == []


def test_ruff_is_pinned():
    """Each version of it formats a little differently."""
    wanted = (ROOT / "tests" / "requirements.txt").read_text("utf-8")
    assert f"\nruff=={version('ruff')}\n" in wanted


def test_top_level():
    try:
        git = subprocess.run(
            ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        listed = git.stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):  # an unpacked archive
        listed = [path.name for path in ROOT.iterdir() if path.name != "__pycache__"]
    found = {path.split("/")[0] for path in listed}
    assert {name for name in found if not name.startswith(".")} <= TOP_LEVEL
