"""Runs the programs as their users do: with arguments, through pipes, in a real terminal."""

import fcntl
import json
import os
import pty
import re
import select
import shutil
import struct
import subprocess
import sys
import termios
import time
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from checkpoints import MINI, make_config, random_weights, write_checkpoint
from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "llm_inference.py"
FRANCE = "What is the capital of France?"
JAPAN = "What is the capital of Japan?"
START = "The capital of France is"
MINI_CONFIG = json.loads((MINI / "config.json").read_bytes())
PLACES = [Path(os.environ.get("QWEN3_TOKENIZER", "nowhere"))]
PLACES += [ROOT / "shared/Qwen3-0.6B", ROOT.parent / "shared/Qwen3-0.6B", ROOT / "Qwen3-0.6B"]
PUBLISHED = next((place for place in PLACES if (place / "tokenizer_config.json").exists()), None)
REAL = PUBLISHED and PUBLISHED / "tokenizer.json"
needs_real_tokenizer = pytest.mark.skipif(
    not REAL, reason="no tokenizer.json of the real Qwen3-0.6B at hand"
)
# The rows of a table run side by side: most of a run is waiting for Python to start.
POOL = ThreadPoolExecutor(3)
FRAMING = re.compile(
    r"Model: .*|Prompt: .*|-{60}|Output: ?|Time: .*|\(.*|Without Qwen3-0.6B .* a miniature answers\.|"
)


def environment(**changes):
    """The tests' environment without anything that would change a run, offline; a change to None
    removes a variable."""
    foreign = ("HF_", "PYTHON", "LC_", "COLUMNS", "XDG_")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(foreign)}
    values = kept | {"HF_HUB_OFFLINE": "1", "LANG": "C.UTF-8"} | changes
    return {key: str(value) for key, value in values.items() if value is not None}


def command_line(script=SCRIPT, module=None, python=(), code=None):
    """How a program starts, without its arguments: a file, with `module` an example, or `code`."""
    program = ["-c", code] if code else ["-m", module] if module else [str(script)]
    return [sys.executable, *map(str, python), *program]


def place(module, cwd, env):
    """Folder and environment of a run: an example starts in the root, or finds it all the same."""
    if module and cwd:
        env = {"PYTHONPATH": ROOT} | env
    return {"cwd": cwd or (ROOT if module else None), "env": environment(**env)}


class Result:
    """What a run left: exit code, stdout and stderr, the stderr's lines with "Output: " on a line
    of its own, and the name that a complaint begins with."""

    def __init__(self, process, name="llm_inference.py"):
        self.code = process.returncode
        self.out = (process.stdout or b"").decode("utf-8", "surrogateescape")
        self.err = (process.stderr or b"").decode("utf-8", "surrogateescape")
        self.lines = self.err.replace("\nOutput: ", "\nOutput: \n", 1).splitlines()
        self.name = name

    def __repr__(self):
        return f"exit {self.code}\nstdout: {self.out!r}\nstderr: {self.err}"


def run(
    *args,
    script=SCRIPT,
    module=None,
    stdin=b"",
    cwd=None,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    python=(),
    timeout=60,
    **env,
):
    """Run a program to its end: the script, or with module="examples.chat" that example.

    stdin is bytes; keyword arguments in capitals change the environment.
    """
    process = subprocess.run(
        command_line(script, module, python) + [os.fsencode(str(arg)) for arg in args],
        input=stdin,
        stdout=stdout,
        stderr=stderr,
        timeout=timeout,
        **place(module, cwd, env),
    )
    return Result(process, f"{module.split('.')[-1]}.py" if module else Path(script).name)


def mini(*args, **options):
    """Run a program with the miniature."""
    return run("--model", MINI, *args, **options)


def assert_one_complaint(result, code=1):
    """Asserts the exit code and one error line, the last, after nothing but framing; returns it."""
    assert result.code == code, result
    assert "Traceback" not in result.err and "Exception ignored" not in result.err, result
    assert result.lines and result.lines[-1].startswith(f"{result.name}:"), result
    assert all(FRAMING.fullmatch(line) for line in result.lines[:-1]), result
    return result.lines[-1]


def table(rows):
    """Start all rows of a table (name -> arguments of a function) and return name -> future."""
    return {name: POOL.submit(*call) for name, call in rows.items()}


def columns(line):
    """The width of a line in a terminal: wide characters are two, combining ones none."""
    width = 0
    for character in line:
        if not unicodedata.combining(character):
            width += 2 if unicodedata.east_asian_width(character) in "WF" else 1
    return width


# ---- Models


def write_endless(folder):
    """A chat-capable checkpoint with random weights whose answers never end: the logits of the
    stop tokens are zero."""
    tokenizer = Tokenizer.from_file(str(MINI / "tokenizer.json"))
    stop = tokenizer.token_to_id("<|im_end|>")
    config = make_config(vocab_size=MINI_CONFIG["vocab_size"], eos_token_id=stop)
    weights = random_weights(config, seed=5)
    for name in "<|im_end|>", "<|endoftext|>":
        weights["model.embed_tokens.weight"][tokenizer.token_to_id(name)] = 0
    return write_checkpoint(folder, config, weights)


# A test module that wants one of these fixtures imports its function: # noqa: F401


@pytest.fixture(scope="module", name="random_model")
def make_random_model(tmp_path_factory):
    """The checkpoint of write_endless, for all tests of a module: none may change it."""
    return write_endless(tmp_path_factory.mktemp("random") / "Endless")


@pytest.fixture(name="endless")
def copy_random_model(random_model, tmp_path):
    """A copy of the random checkpoint whose config the test may change."""
    folder = Path(shutil.copytree(random_model, tmp_path / "Endless"))

    def change(**changes):
        config = json.loads((folder / "config.json").read_bytes()) | changes
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return change


# ---- A real terminal

LAUNCH = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


class Terminal:
    """A program in a pseudo-terminal of 80 columns, in the foreground of a session of its own."""

    def __init__(self, *args, module=None, code=None, cwd=None, stdout=None, stderr=None, **env):
        self.fd, other = pty.openpty()
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                LAUNCH,
                *command_line(module=module, code=code)[1:],
                *map(str, args),
            ],
            stdin=other,
            stdout=stdout or other,
            stderr=stderr or other,
            start_new_session=True,
            **place(module, cwd, {"TERM": "xterm"} | env),
        )
        os.close(other)
        self.all = b""
        self.mark = 0

    def read(self, timeout):
        """Reads what is there, waiting for up to `timeout` seconds; False if nothing came."""
        if not select.select([self.fd], [], [], timeout)[0]:
            return False
        try:
            data = os.read(self.fd, 65536)
        except OSError:  # Linux says so when the other side is closed
            data = b""
        if b"\x1b[6n" in data:  # prompt_toolkit asks where the cursor is, and waits for a while
            self.send(b"\x1b[1;1R")
        self.all += data
        return bool(data)

    def expect(self, pattern, timeout=20):
        """Reads until the pattern is in what came since the last match."""
        end = time.monotonic() + timeout
        while True:
            match = re.search(pattern, self.all[self.mark :], re.S)
            if match:
                self.mark += match.end()
                return
            more = self.read(max(0.0, end - time.monotonic()))
            assert more, f"no {pattern!r} in {self.all[self.mark :]!r} (all: {self.all!r})"

    def quiet(self, pause=0.3, timeout=20):
        """Waits until nothing more comes: the program waits for a person."""
        end = time.monotonic() + timeout
        while self.read(pause):
            assert time.monotonic() < end, self.all[-300:]
        self.mark = len(self.all)

    def send(self, data):
        """Types."""
        os.write(self.fd, data)

    def close(self):
        """Reads to the end; returns the exit code."""
        end = time.monotonic() + 20
        while time.monotonic() < end and self.read(1):
            pass
        try:
            return self.process.wait(10)
        finally:
            self.kill()

    def kill(self):
        """Ends the process if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


@pytest.fixture(name="terminal")
def open_terminals():
    """Starts terminals and ends them after the test, whatever happened."""
    opened = []

    def start(*args, **options):
        opened.append(Terminal(*args, **options))
        return opened[-1]

    yield start
    for one in opened:
        one.kill()
