"""examples/download.py against hubs on this machine: whole, slow, silent, half, full."""

import hashlib
import json
import os
import re
import shutil
import socket
import subprocess
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import mlx.core as mx
import pytest
from checkpoints import MINI
from terminal import (
    ROOT,
    SCRIPT,
    START,
    Result,
    assert_one_complaint,
    command_line,
    place,
    run,
    table,
)

MODULE = "examples.download"
NAME = "nobody/Tiny-0.6B"
COMMIT = "c0ffee" + 34 * "0"
DATE = "2025-01-01T00:00:00.000Z"


class Hub(ThreadingHTTPServer):
    """A hub with one model, `folder`, under any name. What was asked for is in `asked`."""

    daemon_threads = True

    def __init__(self, folder):
        super().__init__(("127.0.0.1", 0), Answer)
        self.folder = Path(folder)
        self.asked = []  # (GET or HEAD, file)
        self.broken = set()  # files for which the answer is an error
        self.delay = 0
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def address(self):
        return f"http://127.0.0.1:{self.server_port}"

    def fetched(self):
        """The files whose content was asked for."""
        return [file for method, file in self.asked if method == "GET" and file]


class Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        hub = self.server
        time.sleep(hub.delay)
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/"):
            hub.asked.append((self.command, None))
            if None in hub.broken:
                return self.reply(b"", "text/plain", 404)
            files = sorted(file for file in hub.folder.rglob("*") if file.is_file())
            siblings = [
                {"rfilename": str(file.relative_to(hub.folder)), "size": file.stat().st_size}
                for file in files
            ]
            found = {"_id": "1", "id": NAME, "sha": COMMIT, "siblings": siblings}
            found |= {"private": False, "tags": [], "lastModified": DATE, "createdAt": DATE}
            return self.reply(json.dumps(found).encode(), "application/json")
        name = path.partition("/resolve/")[2].partition("/")[2]
        hub.asked.append((self.command, name))
        if name in hub.broken or not (hub.folder / name).is_file():
            return self.reply(b"", "text/plain", 403 if name in hub.broken else 404)
        self.reply((hub.folder / name).read_bytes(), "application/octet-stream")

    def reply(self, data, kind, status=200):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub():
    """The miniature on a hub of this machine."""
    server = Hub(MINI)
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def silent():
    """The address of a hub that takes a connection and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=50) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def download(*args, home, address, **options):
    """Run the program against a hub, with its cache in `home`."""
    changes = {"HF_HUB_OFFLINE": None, "HF_ENDPOINT": address, "HF_HOME": home} | options
    return run(*args, module=MODULE, **changes)


@pytest.fixture
def root(tmp_path):
    """A copy of the repository without weights: the program writes beside itself."""
    folder = tmp_path / "copy"
    (folder / "Qwen3-0.6B").mkdir(parents=True)
    (folder / "Qwen3-0.6B" / "README.md").write_text("stays as it is")
    shutil.copy(SCRIPT, folder)
    shutil.copytree(ROOT / "examples", folder / "examples")
    return folder


def sharded(folder):
    """The miniature in three files with an index, as large models are published."""
    shutil.copytree(MINI, folder)
    weights = dict(mx.load(str(folder / "model.safetensors")))
    (folder / "model.safetensors").unlink()
    place_of = {}
    for number in range(3):
        file = f"model-{number + 1:05}-of-00003.safetensors"
        names = sorted(weights)[number::3]
        mx.save_safetensors(str(folder / file), {name: weights[name] for name in names})
        place_of |= dict.fromkeys(names, file)
    index = {"metadata": {}, "weight_map": place_of}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


# ---- What comes, and where to


def test_a_name_goes_into_the_cache_and_its_folder_to_stdout(hub, tmp_path):
    """stdout is the folder alone, stderr says first what comes, how large, where to; the second
    run asks nobody, nor does one without a network; the file runs what was got."""
    first = download(NAME, home=tmp_path, address=hub.address)
    assert first.code == 0, first
    folder = Path(first.out.removesuffix("\n"))
    assert folder.is_dir() and tmp_path in folder.parents and "\n" not in str(folder), first
    assert (folder / "model.safetensors").read_bytes() == (MINI / "model.safetensors").read_bytes()
    said = first.lines[0]
    assert NAME in said and "0.0012 GB" in said and str(tmp_path) in said, first
    assert "README.md" not in hub.fetched()  # only what is needed to run it

    hub.asked.clear()
    again = download(NAME, home=tmp_path, address=hub.address)
    offline = download(NAME, home=tmp_path, address="http://127.0.0.1:9", HF_HUB_OFFLINE=1)
    for result in again, offline:
        assert result.code == 0 and result.out == first.out and result.err == "", result
    assert not hub.asked
    answer = run("--model", folder, "--max-tokens", 1)
    assert (
        answer.out == f"{START} Paris\n" and f"/models--{NAME.replace('/', '--')}/" in answer.err
    ), answer


def test_without_a_name_the_usual_model_goes_beside_the_file(hub, root, tmp_path):
    """Qwen3-0.6B into its folder here, whose README stays; afterwards the file runs it."""
    got = download(home=tmp_path / "hub", address=hub.address, cwd=root)
    assert got.code == 0 and got.lines[0].startswith("Qwen/Qwen3-0.6B: "), got
    assert Path(got.out.strip()) == root / "Qwen3-0.6B"
    assert (root / "Qwen3-0.6B" / "README.md").read_text() == "stays as it is"
    assert not list((tmp_path / "hub").rglob("*.safetensors"))
    answer = run("--max-tokens", 1, script=root / "llm_inference.py", cwd=tmp_path)
    assert answer.out == f"{START} Paris\n" and "/Qwen3-0.6B (" in answer.err, answer
    hub.asked.clear()
    again = download(home=tmp_path / "hub", address=hub.address, cwd=root)
    assert again.code == 0 and again.out == got.out and not hub.asked, again


# ---- Half downloads


@pytest.mark.parametrize("shards", [False, True], ids=["one file", "three files"])
@pytest.mark.parametrize("where", ["cache", "folder"])
def test_half_a_download_is_completed(where, shards, root, tmp_path):
    """Where the weights, or one of three files of them, did not come, the next run gets just that;
    until then the file says what is missing."""
    source = sharded(tmp_path / "source") if shards else MINI
    missing = "model-00002-of-00003.safetensors" if shards else "model.safetensors"
    with serving(source) as hub:
        hub.broken.add(missing)
        args = [NAME] if where == "cache" else []
        options = {"home": tmp_path / "hub", "address": hub.address, "cwd": root}
        broken = download(*args, **options)
        assert broken.code == 1 and broken.out == "", broken
        assert broken.lines[-1].startswith("download.py: "), broken
        here = [root / "Qwen3-0.6B", *(tmp_path / "hub").glob("hub/*/snapshots/*")][-1]
        assert (here / "config.json").exists() and not (here / missing).exists()
        assert "python -m examples.check" in assert_one_complaint(run("--model", here))
        assert missing in assert_one_complaint(run(here, module="examples.check"))

        had = set(hub.fetched()) - {missing}
        hub.broken.clear()
        hub.asked.clear()
        whole = download(*args, **options)
        assert whole.code == 0 and Path(whole.out.strip()) == here, whole
        assert missing in hub.fetched() and not had & set(hub.fetched()), hub.fetched()
    assert run("--model", here, "--max-tokens", 1).out == f"{START} Paris\n"


@contextmanager
def serving(folder):
    server = Hub(folder)
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("where", ["cache", "folder"])
def test_a_file_that_was_cut_is_fetched_again(where, hub, root, tmp_path):
    """Weights that lost their end on this disk are not taken for whole."""
    args = [NAME] if where == "cache" else []
    options = {"home": tmp_path / "hub", "address": hub.address, "cwd": root}
    folder = Path(download(*args, **options).out.strip())
    file = (folder / "model.safetensors").resolve()
    os.truncate(file, file.stat().st_size - 5000)
    mended = download(*args, **options)
    assert mended.code == 0 and "model.safetensors" in hub.fetched(), mended
    assert run("--model", folder, "--max-tokens", 1).out == f"{START} Paris\n"


# ---- Hubs that do not give anything


def test_a_hub_that_never_answers_is_given_up_within_10_seconds(silent, root, tmp_path):
    """One line, exit 1; a model that is here needs no hub, and the file itself asks none."""

    def timed(*args):
        start = time.monotonic()
        result = download(*args, home=tmp_path / "hub", address=silent, cwd=root)
        return result, time.monotonic() - start

    rows = {NAME: (timed, NAME), "Qwen/Qwen3-0.6B": (timed,)}
    for name, row in table(rows).items():
        result, seconds = row.result()
        assert seconds < 10, f"{seconds:.1f} s"
        assert name in assert_one_complaint(result) and result.err.count("\n") == 1, result
    with serving(MINI) as hub:
        folder = download(NAME, home=tmp_path / "hub", address=hub.address).out
    whole = download(NAME, home=tmp_path / "hub", address=silent)
    assert whole.code == 0 and whole.out == folder, whole
    start = time.monotonic()
    answer = run("--max-tokens", 1, HF_HUB_OFFLINE=None, HF_ENDPOINT=silent)
    assert answer.code == 0 and time.monotonic() - start < 10, answer


@pytest.mark.parametrize("case", ["offline", "refused", "unknown name", "GGUF", "another kind"])
def test_what_cannot_be_had_is_one_line(case, hub, tmp_path):
    """No network, no such model, a model without config.json: exit 1, the name and the reason."""
    env = {"home": tmp_path / "hub", "address": hub.address}
    reason = {
        "offline": "offline",
        "refused": "refused|connect",
        "unknown name": "404|not found",
        "GGUF": "config.json",
        "another kind": "llama",
    }[case]
    hub.folder = tmp_path / "served"
    hub.folder.mkdir()
    if case == "offline":
        env["HF_HUB_OFFLINE"] = 1
    if case == "refused":
        env["address"] = "http://127.0.0.1:9"
    if case == "unknown name":
        hub.broken.add(None)
    if case == "GGUF":
        (hub.folder / "model.gguf").write_bytes(b"GGUF")
    if case == "another kind":
        shutil.copytree(MINI, hub.folder, dirs_exist_ok=True)
        config = json.loads((MINI / "config.json").read_bytes()) | {"model_type": "llama"}
        (hub.folder / "config.json").write_text(json.dumps(config))
    result = download(NAME, **env)
    complaint = result.lines[-1]
    assert result.code == 1 and result.out == "" and "Traceback" not in result.err, result
    assert complaint.startswith("download.py: "), result
    assert case == "another kind" or NAME in complaint, result
    assert re.search(reason, complaint, re.I), complaint


def test_a_disk_that_takes_nothing_is_one_line_with_the_reason(hub, root, tmp_path):
    """A folder that cannot be written and a disk that is full: exit 1, the reason in the line."""
    unwritable = download(NAME, home="/dev/null/hub", address=hub.address)
    assert unwritable.code == 1 and "Not a directory" in unwritable.lines[-1], unwritable
    env = {"HF_HUB_OFFLINE": None, "HF_ENDPOINT": hub.address, "HF_HOME": tmp_path / "hub"}
    for args in [NAME], []:  # a limit on a file's size stops a write just as a full disk does
        full = subprocess.run(
            ["sh", "-c", 'ulimit -f 600; exec "$@"', "sh", *command_line(module=MODULE), *args],
            capture_output=True,
            timeout=60,
            **place(MODULE, root, env),
        )
        result = Result(full, "download.py")
        assert result.code == 1 and result.out == "" and "Traceback" not in result.err, result
        assert "File too large" in result.lines[-1], result


# ---- Usage


@pytest.mark.parametrize("args", [["no name"], [""], ["a/b/c"], [NAME, NAME], ["--colour"]])
def test_wrong_usage_is_one_line(args):
    """What is no name on the hub: exit 2, one line."""
    result = run(*args, module=MODULE)
    assert result.err.count("\n") == 1 and result.out == "", result
    assert_one_complaint(result, code=2)


def test_help_is_a_page_with_an_example():
    """--help says what it does and shows a command."""
    result = run("--help", module=MODULE)
    assert result.code == 0 and "python -m examples.download" in result.out, result
    assert "Qwen/Qwen3-0.6B" in result.out and max(map(len, result.out.splitlines())) <= 80
