"""llm_inference.py stays short, and the top level of the repository holds only what a newcomer looks for."""
import ast
import io
import subprocess
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOP_LEVEL = {"llm_inference.py", "README.md", "README.zh-CN.md", "requirements.txt", "tests", "Qwen3-0.6B", "LICENSE"}


def count(source):
    """(all lines, lines of code): blank lines, comments and docstrings are not code."""
    skip = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER}
    code = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in skip:
            code |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node) is not None:
            code -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    lines = source.splitlines()
    return len(lines), sum(1 for number in code if lines[number - 1].strip())


def test_counting():
    assert count('"""Two\nlines."""\n# comment\n\nx = 1  # code\ndef f():\n    """Doc."""\n    return """a\n\nb"""\n') == (10, 4)


def test_budget():
    total, code = count((ROOT / "llm_inference.py").read_text("utf-8"))
    assert total <= 300 and code <= 200, f"llm_inference.py has {total} lines, {code} of code; at most 300 and 200"


def test_top_level():
    try:
        listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):  # an unpacked archive
        listed = [path.name for path in ROOT.iterdir() if path.name != "__pycache__"]
    found = {path.split("/")[0] for path in listed}
    assert {name for name in found if not name.startswith(".")} <= TOP_LEVEL
