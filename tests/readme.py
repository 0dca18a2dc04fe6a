"""Keeps README.md true: runs its Python sessions and console examples and writes what they really print.

python tests/readme.py          renew the outputs in README.md, the pages in examples/ and tests/,
                                    and copy README.md's blocks to README.zh-CN.md
tests/test_readme.py            fails when an output, an excerpt, a link or a picture is no longer right
"""

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
READMES = ROOT / "README.md", ROOT / "README.zh-CN.md"
PAGES = ROOT / "examples" / "README.md", ROOT / "tests" / "README.md"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)


def blocks(text):
    """[(language, content)] of the fenced blocks, in order."""
    return FENCE.findall(text)


def is_session(language, content):
    return language == "python" and ">>> " in content


def run_session(content, namespace):
    """The session's inputs, each followed by what it prints now, as the interactive interpreter would show it."""
    lines, output, pending = content.splitlines(), [], []

    def flush():
        if pending:
            source = "".join(line[4:] + "\n" for line in pending)
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(source, "<README>", "single"), namespace)
            output.extend([*pending, *printed.getvalue().splitlines()])
            pending.clear()

    for line in lines:
        if line.startswith(">>> "):
            flush()
            pending.append(line)
        elif line.startswith("..."):
            pending.append(line)
        else:
            flush()  # an old output, to be replaced
    flush()
    return "\n".join(output) + "\n"


def run_console(content):
    """The `$ python ...` lines, each followed by what the command prints now (stdout and stderr as they come)."""
    output = []
    for line in content.splitlines():
        if line.startswith("$ python "):
            arguments = [sys.executable, *shlex.split(line)[2:]]
            done = subprocess.run(
                arguments,
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=os.environ | {"PYTHONIOENCODING": "utf-8"},
                text=True,
                encoding="utf-8",
                timeout=120,
            )
            output += [line, *done.stdout.splitlines()]
    return "\n".join(output) + "\n"


def renewed(text):
    """The text with every session and console block as it comes out now."""
    sys.path.insert(0, str(ROOT))
    folder, namespace = os.getcwd(), {}
    os.chdir(ROOT)  # the sessions name tests/Qwen3-mini relative to the repository

    def renew(match):
        language, content = match.groups()
        if is_session(language, content):
            content = run_session(content, namespace)
        elif language == "console":
            content = run_console(content)
        return f"```{language}\n{content}```"

    try:
        return FENCE.sub(renew, text)
    finally:
        os.chdir(folder)


def with_line_counts(text):
    """The table of examples/README.md, with the lines that each program has now."""

    def count(match):
        lines = (ROOT / "examples" / match[2]).read_text(encoding="utf-8").count("\n")
        return f"{match[1]}{lines}{match[3]}"

    return re.sub(r"^(\|.*\]\((\w+\.py)\): .*\| )\d+( \|.*\|)$", count, text, flags=re.M)


def without_timings(text):
    """The text with every number of a `Time:` line masked, for comparing runs."""
    return re.sub(r"^Time: .*$", lambda match: re.sub(r"[\d.]+", "#", match[0]), text, flags=re.M)


if __name__ == "__main__":
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        page.write_text(with_line_counts(renewed(text)), encoding="utf-8")
    english, chinese = READMES
    english.write_text(renewed(english.read_text(encoding="utf-8")), encoding="utf-8")
    fenced = iter([match[0] for match in FENCE.finditer(english.read_text(encoding="utf-8"))])
    chinese.write_text(
        FENCE.sub(lambda _: next(fenced), chinese.read_text(encoding="utf-8")), encoding="utf-8"
    )
