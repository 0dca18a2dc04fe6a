"""The command line as its users meet it: flags, faults, pipes, a real terminal, streaming."""

import io
import json
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from checkpoints import MINI, quantize, write_checkpoint
from terminal import (
    FRAMING,
    MINI_CONFIG,
    POOL,
    REAL,
    ROOT,
    SCRIPT,
    START,
    Result,
    assert_one_complaint,
    copy_random_model,  # noqa: F401
    environment,
    make_random_model,  # noqa: F401
    mini,
    needs_real_tokenizer,
    open_terminals,  # noqa: F401
    run,
    table,
)
from tokenizers import Tokenizer

import llm_inference
from examples import check
from examples.common import model_name

# ---- A run, its framing, where it runs


@pytest.fixture(scope="module")
def plain_run():
    """One plain run of the miniature, for several tests."""
    return mini("--max-tokens", 12)


def test_a_run_prints_the_prompt_and_its_continuation_to_stdout(plain_run):
    """Without a prompt the default one is continued; stdout holds it, the greedy continuation and
    a newline, nothing else."""
    weights, config, tokenizer = llm_inference.load(MINI)
    ids = tokenizer.encode(START, add_special_tokens=False).ids
    stop = config["eos_token_id"]
    answer = list(llm_inference.generate(ids, weights, config, stop, max_tokens=12))
    text = tokenizer.decode(answer, skip_special_tokens=False)
    assert plain_run.code == 0, plain_run
    assert plain_run.out == START + text + "\n", plain_run
    assert "Paris" in plain_run.out


def test_a_run_frames_its_answer_on_stderr(plain_run):
    """Model, prompt, a line of 60 dashes, Output and the times stand on stderr, in this order."""
    kept = [line for line in plain_run.lines if line and "--max-tokens" not in line]
    model, prompt, dashes, output, times = kept
    assert re.match(r"Model: \S*tests/Qwen3-mini \(", model)
    assert f"{MINI_CONFIG['num_hidden_layers']} layers" in model
    assert f"{MINI_CONFIG['hidden_size']} dim" in model
    assert prompt == f"Prompt: {START}" and dashes == "-" * 60 and output == "Output: "
    number = r"[\d.]+(e[-+]?\d+)?"
    wanted = rf"Time: {number}s \(5 tokens read, 12 written, peak memory {number} GB\)"
    assert re.fullmatch(wanted, times), times


def test_the_cut_at_the_token_limit_is_announced(plain_run):
    """An answer cut by --max-tokens is said on stderr, an answer that ended by itself is not."""
    assert any("--max-tokens" in line for line in plain_run.lines), plain_run
    question = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    whole = mini(question, "--max-tokens", 60)
    assert whole.code == 0 and "Paris" in whole.out and "--max-tokens" not in whole.err, whole


def test_an_answer_that_stops_exactly_at_the_limit_counts_the_tokens():
    """--max-tokens 1 gives one token, and the times hold no division by zero."""
    one = mini("--max-tokens", 1)
    assert one.code == 0 and one.out.strip() == f"{START} Paris" and "Time: " in one.err, one


def test_another_prompt_is_continued():
    """A prompt on the command line replaces the default one."""
    result = mini("The capital of Japan is", "--max-tokens", 3)
    assert result.out.startswith("The capital of Japan is Tokyo"), result
    assert "Prompt: The capital of Japan is\n" in result.err, result


def test_words_without_quotes_are_the_prompt():
    """Words with flags among them are one prompt, spaces between."""
    rows = [
        ["The", "capital", "--seed", 1, "of", "France", "is", "--max-tokens", 6],
        ["--max-tokens", 6, "The", "capital", "of", "France", "is"],
        ["The capital of", "--max-tokens", 6, "France is"],
    ]
    wanted = mini(START, "--max-tokens", 6).out
    for args, result in zip(rows, POOL.map(lambda args: mini(*args), rows), strict=True):
        assert result.code == 0 and result.out == wanted, (args, result)
    dashes = mini("--max-tokens", 2, "--", "--seed is")
    assert dashes.code == 0 and dashes.out.startswith("--seed is"), dashes


def test_a_bare_run_finds_its_model_from_any_directory(tmp_path):
    """From another working directory, in the repository as it is, the script finds its model and
    knows Paris."""
    if list((ROOT / "Qwen3-0.6B").glob("*.safetensors")):
        pytest.skip("Qwen3-0.6B holds real weights: nothing to fall back from, and slow to load")
    result = run("--max-tokens", 4, cwd=tmp_path)
    assert result.code == 0 and result.out.startswith(f"{START} Paris"), result
    assert not list(tmp_path.iterdir())


# ---- Without a network: the file never asks for one


@pytest.fixture
def silent_hub():
    """Settings for a hub that takes connections and never answers; at the end nobody called."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.setblocking(False)
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        yield {"HF_HUB_OFFLINE": None, "HF_ENDPOINT": address, "HTTPS_PROXY": address}
        with pytest.raises(BlockingIOError):
            listener.accept()


@pytest.fixture
def copied(tmp_path):
    """The script and the miniature, copied to where nothing else is; the script's path."""
    shutil.copytree(MINI, tmp_path / "copy" / "tests" / "Qwen3-mini")
    return Path(shutil.copy(SCRIPT, tmp_path / "copy"))


@pytest.mark.parametrize(
    "case",
    ["no folder", "the folder's README", "half a download", "no huggingface_hub", "no network"],
)
def test_without_weights_the_miniature_answers_at_once(tmp_path, copied, silent_hub, case):
    """One line on stderr says that the miniature answers and how to get the model; the Model line
    names it. A hub that never answers is not asked."""
    env = dict(silent_hub)
    folder = copied.parent / "Qwen3-0.6B"
    if case != "no folder":
        folder.mkdir()
        shutil.copy(ROOT / "Qwen3-0.6B" / "README.md", folder)
    if case == "half a download":  # as huggingface_hub leaves it
        for name in "config.json", "tokenizer.json":
            shutil.copy(MINI / name, folder)
        waiting = folder / ".cache/huggingface/download/x.incomplete"
        waiting.parent.mkdir(parents=True)
        waiting.write_bytes((MINI / "model.safetensors").read_bytes()[:1000])
    if case == "no huggingface_hub":
        stub = tmp_path / "stub" / "huggingface_hub.py"
        stub.parent.mkdir()
        stub.write_text("raise ImportError('No module named huggingface_hub')")
        env["PYTHONPATH"] = stub.parent
    if case == "no network":
        env = {"HF_ENDPOINT": "http://127.0.0.1:9"}
    start = time.monotonic()
    result = run("--max-tokens", 4, script=copied, cwd="/", HF_HOME=tmp_path / "hub", **env)
    assert time.monotonic() - start < 20  # a hub that drops all packets costs 137 s
    assert result.code == 0 and result.out.startswith(f"{START} Paris"), result
    model = next(n for n, line in enumerate(result.lines) if line.startswith("Model:"))
    assert model == 1 and "mini" in result.lines[1], result
    for word in "miniature", "Qwen3-0.6B", "python -m examples.download":
        assert word in result.lines[0], result
    assert "Model: Qwen3-0.6B" not in result.err and not (tmp_path / "hub").exists(), result


def test_weights_beside_the_file_answer_without_a_word(copied, silent_hub):
    """A complete Qwen3-0.6B folder is used; no line speaks of a miniature or of a download."""
    shutil.copytree(MINI, copied.parent / "Qwen3-0.6B")
    result = run("--max-tokens", 4, script=copied, **silent_hub)
    assert result.code == 0 and re.match(r"Model: \S*/Qwen3-0.6B \(", result.lines[0]), result
    assert not re.search("miniature|download", result.err), result


def test_half_a_download_beside_the_file_is_named(copied, silent_hub):
    """One of two files of weights, or one that was cut: exit 1, one line that names what lacks."""
    folder = copied.parent / "Qwen3-0.6B"
    shutil.copytree(MINI, folder)
    split(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    line = assert_one_complaint(run(script=copied, **silent_hub))
    assert "Qwen3-0.6B cannot be run ('model." in line and "python -m examples.download" in line
    shutil.rmtree(folder)
    shutil.copytree(MINI, folder)
    cut("model.safetensors", -1000)(folder)
    line = assert_one_complaint(run(script=copied, **silent_hub))
    assert "Qwen3-0.6B cannot be run" in line and "python -m examples.download" in line


def test_the_file_alone_says_what_it_lacks(tmp_path, silent_hub):
    """Copied to where nothing else is: exit 1; Qwen3-0.6B is not here, and neither is the bundled
    miniature; the repository has what gets one."""
    script = shutil.copy(SCRIPT, tmp_path)
    result = run(script=script, cwd=tmp_path, **silent_hub)
    line = assert_one_complaint(result)
    assert result.lines[0].startswith("Without Qwen3-0.6B"), result
    assert "tests/Qwen3-mini cannot be run" in line and "in the repository" in line, line
    assert "python -m examples.download" in line and len(line) < 400, line


def test_a_name_on_the_hub_is_one_line_with_the_command(tmp_path, silent_hub):
    """--model org/name is no folder: exit 1 at once, one line with the command that gets a name,
    even where the hub's cache holds it."""
    home = tmp_path / "home"
    for env in {}, silent_hub:
        result = run("--model", "nobody/Nothing-0.6B", HF_HOME=home, cwd=tmp_path, **env)
        line = assert_one_complaint(result)
        assert (
            "python -m examples.download" in line
            and "nobody/Nothing-0.6B" in line
            and result.out == ""
        )
        assert home.exists() or not list(tmp_path.iterdir())
        if not home.exists():
            write_hub(home / "hub/models--nobody--Nothing-0.6B", {"1": (MINI, whole)}, main="1")


@pytest.mark.parametrize("held", [b"", b"A text that nobody asked for"], ids=["silent", "text"])
def test_without_a_dash_stdin_is_never_read(held):
    """A pipe that stays open, as many runners have, does not hang the run; what is in it stays."""
    read, write = os.pipe()
    os.write(write, held)
    command = [sys.executable, SCRIPT, "--model", MINI, "--max-tokens", "4"]
    try:
        process = subprocess.run(
            command, stdin=read, capture_output=True, env=environment(), timeout=20
        )
        os.close(write)
        write = None
        assert process.returncode == 0 and process.stdout.startswith(START.encode()), process
        assert os.read(read, 100) == held
    finally:
        os.close(read)
        if write:
            os.close(write)


# ---- Sampling flags


def test_seed_and_temperature():
    """The same seed gives the same text; without one, or with another, texts differ; temperature 0
    is greedy, the default."""
    hot = ["--temperature", 5, "--max-tokens", 12]
    rows = {
        "seed 1": [*hot, "--seed", 1],
        "seed 1 again": ["--seed", 1, *hot],
        "seed 2": [*hot, "--seed", 2],
        "seed 0": [*hot, "--seed", 0],
        "a second of today": [*hot, "--seed", 1764558000],
        "no seed": hot,
        "no seed again": hot,
        "default": ["--max-tokens", 12],
        "greedy": ["--max-tokens", 12, "--temperature", 0, "--seed", 3],
        "top-k 1": [*hot, "--top-k", 1],
        "top-p 0": [*hot, "--top-p", 0],
    }
    text = dict(zip(rows, POOL.map(lambda args: mini(*args).out, rows.values()), strict=True))
    assert all(text.values()), text
    assert text["seed 1"] == text.pop("seed 1 again")
    assert text["default"] == text.pop("greedy") == text.pop("top-k 1") == text.pop("top-p 0")
    assert len(set(text.values())) == len(text), text


def called(monkeypatch, *args):
    """Run main() here on the miniature; what sample was given, and the ids that were fed."""
    settings = []
    fed = []
    real_sample = llm_inference.sample
    real_forward = llm_inference.forward

    def sample(logits, temperature=0.0, top_p=1.0, top_k=0, key=None):
        settings.append((temperature, top_p, top_k))
        return real_sample(logits, temperature, top_p, top_k, key)

    def forward(token_ids, *others):
        fed.extend(np.array(token_ids).tolist())
        return real_forward(token_ids, *others)

    with monkeypatch.context() as patch:
        patch.setattr(llm_inference, "sample", sample)
        patch.setattr(llm_inference, "forward", forward)
        patch.setattr(sys, "argv", [str(SCRIPT), "--model", str(MINI), *map(str, args)])
        llm_inference.main()
    return settings, fed


DEFAULTS = {
    "": (0, 1, 0),
    "--temperature 1 --top-k 7": (1, 1, 7),
    "--temperature 0.5 --top-p 0.25": (0.5, 0.25, 0),
}


@pytest.mark.parametrize("args", DEFAULTS, ids=lambda args: args or "no flags")
def test_sampling_is_greedy_and_each_value_can_be_given(monkeypatch, args):
    """A run is greedy, and each flag reaches sample."""
    settings, _ = called(monkeypatch, "--max-tokens", 2, *args.split())
    assert set(settings) == {DEFAULTS[args]}


def test_control_tokens_in_the_prompt_are_control_tokens(monkeypatch):
    """A prompt is encoded as the tokenizer does it, and no token is put before it."""
    prompt = "<|im_start|>user\nHi<|im_end|>"
    tokenizer = Tokenizer.from_file(str(MINI / "tokenizer.json"))
    ids = tokenizer.encode("user\nHi").ids
    start, end = map(tokenizer.token_to_id, ("<|im_start|>", "<|im_end|>"))
    probe = [0]  # load_model's, by which it sees that all parts fit
    assert called(monkeypatch, prompt, "--max-tokens", 1)[1] == probe + [start, *ids, end]


def test_a_hundred_tokens_are_the_limit_without_a_flag(random_model):
    """An answer that never ends has 100 tokens."""
    result = run("--model", random_model)
    assert result.code == 0 and "100 written" in result.err, result


# ---- Wrong usage

USAGE = {  # arguments -> what the line must name
    "--temperature -1": "--temperature",
    "--temperature nan": "--temperature",
    "--temperature inf": "--temperature",
    "--temperature abc": "--temperature.*abc",
    "--top-p 1.5": "--top-p",
    "--top-p -0.1": "--top-p",
    "--top-p nan": "--top-p",
    "--top-k -1": "--top-k",
    "--top-k 1.5": "--top-k",
    "--max-tokens 0": "--max-tokens",
    "--max-tokens -3": "--max-tokens",
    "--max-tokens many": "--max-tokens.*many",
    "--seed -1": "--seed",
    "--seed 99999999999999999999999": "--seed",
    "--dtype int8": "--dtype",
    "--model": "--model",
    "--colour": "--colour",
    "one --colour two": "--colour",
    "--chat": "--chat",  # of these, --chat and --explain are programs in examples/ now
    "--think": "--think",
    "--explain": "--explain",
    "--plain": "--plain",
}
BLANK = {  # a name -> arguments, stdin
    "empty": ([""], b""),
    "white": ([" \n\t "], b""),
    "two empty ones": (["", ""], b""),
    "white stdin": (["-", "--max-tokens", "9"], b" \n \n"),
    "empty stdin": (["-"], b""),
    "a mark and a line end": (["-"], b"\xef\xbb\xbf\r\n"),
}


@pytest.fixture(scope="module")
def usage_runs():
    """All rows of wrong usage, and the blank prompts."""
    rows = {line: (lambda args=line.split(): mini(*args),) for line in USAGE}
    for name, (args, stdin) in BLANK.items():
        rows[name] = (lambda args=args, stdin=stdin: mini(*args, stdin=stdin),)
    return table(rows)


@pytest.mark.parametrize("line", USAGE)
def test_wrong_usage_is_one_line_that_names_the_flag(usage_runs, line):
    """A wrong flag or value: exit 2, one line with its name, nothing on stdout."""
    result = usage_runs[line].result()
    assert re.search(USAGE[line], assert_one_complaint(result, code=2)), result
    assert result.err.count("\n") == 1 and result.out == "", result


@pytest.mark.parametrize("name", BLANK)
def test_a_blank_prompt_is_wrong_usage(usage_runs, name):
    """An empty or blank prompt, from the command line or stdin: exit 2, one line about it."""
    result = usage_runs[name].result()
    assert "prompt" in assert_one_complaint(result, code=2) and result.out == "", result


FLAGS = "--model --max-tokens --temperature --top-p --top-k --seed --dtype"


def test_help_is_a_page_that_describes_every_flag():
    """--help exits 0, describes each flag and the prompt, fits 80 columns and a page."""
    result = run("--help", COLUMNS="80")
    assert result.code == 0 and result.err == "", result
    lines = result.out.splitlines()
    assert 12 <= len(lines) <= 50 and max(map(len, lines)) <= 80, result.out
    assert "stdin" in result.out and START in result.out
    for flag in FLAGS.split():
        words = 0
        for number, line in enumerate(lines):
            if re.search(rf"(^|\s){flag}(?![-\w])", line):
                text = " ".join(lines[number : number + 2]).split(flag, 1)[1]
                words = max(words, len(re.findall("[a-z]{2,}", text)))
        assert words >= 3, f"--help does not describe {flag}"


# ---- Pipes and bytes


def test_the_prompt_comes_from_stdin():
    """With -, all of stdin is the prompt, as on the command line."""
    two = "Paris is in\nThe capital of France is"
    args = ["--max-tokens", 6]
    assert mini("-", *args, stdin=START.encode()).out == mini(START, *args).out
    assert mini(*args, "-", stdin=two.encode()).out == mini(two, *args).out


STDIN = {
    "a newline, as echo adds it": b"The capital of France is\n",
    "Windows line ends": b"The capital of France is\r\n",
    "a byte-order mark": b"\xef\xbb\xbfThe capital of France is",
    "both": b"\xef\xbb\xbfThe capital of France is\r\n\r\n",
}


def test_line_ends_and_a_byte_order_mark_are_no_part_of_the_prompt():
    """`echo The capital of France is | llm_inference.py -` answers as the same prompt on the
    command line does, whatever wrote the text."""
    args = ["--max-tokens", 6]
    wanted = mini(START, *args)
    results = POOL.map(lambda stdin: mini("-", *args, stdin=stdin), STDIN.values())
    for name, result in zip(STDIN, results, strict=True):
        assert "Paris" in result.out and result.out == wanted.out, (name, result)
        assert f"Prompt: {START}\n" in result.err, (name, result)
    inside = mini("-", *args, stdin=b"Paris is in\r\nThe capital of France is")
    assert "\r" not in inside.out + inside.err, inside


def test_a_reader_that_leaves_early_is_no_error(random_model):
    """`| head -n 1` ends the run without a word on stderr but the framing, long before the end."""
    command = '"$1" "$2" --model "$3" "$4" --max-tokens 4000 | head -n 1'
    start = time.monotonic()
    process = subprocess.run(
        ["sh", "-c", command, "sh", sys.executable, SCRIPT, random_model, "first\nsecond line"],
        capture_output=True,
        env=environment(),
        timeout=60,
    )
    result = Result(process)
    assert result.out == "first\n" and time.monotonic() - start < 20, result
    assert not re.search("(?i)traceback|broken ?pipe|exception|llm_inference", result.err), result
    shown = [line for line in result.lines if line != "second line"]
    assert all(FRAMING.fullmatch(line) for line in shown), result


NARROW = {
    "ascii": {"PYTHONIOENCODING": "ascii"},
    "C locale": {"LC_ALL": "C", "PYTHONUTF8": 0, "PYTHONCOERCECLOCALE": 0},
}


@pytest.mark.parametrize("prompt", ["法国的首都是", "🦜 is a parrot, the capital of France is"])
@pytest.mark.parametrize("env", NARROW)
def test_an_ascii_terminal_does_not_break_a_run(prompt, env):
    """Characters that stdout cannot hold do not end the run."""
    result = mini(prompt, "--max-tokens", 5, **NARROW[env])
    assert result.code == 0 and result.out.strip() and "Time: " in result.err, result


def test_bytes_that_are_not_utf8_give_no_traceback():
    """A prompt of broken UTF-8, on the command line or from stdin, runs or is refused in one line
    that says so."""
    bad = b"caf\xe9 \xff is"
    from_arguments = mini(os.fsdecode(bad), "--max-tokens", 3)
    from_stdin = mini("-", "--max-tokens", 3, stdin=bad)
    for result in from_arguments, from_stdin:
        if result.code:
            line = assert_one_complaint(result, result.code)
            assert re.search("(?i)utf-?8|prompt", line), result
        assert result.code in (0, 1, 2) and "Traceback" not in result.err, result


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_is_one_line():
    """A stdout that takes nothing: exit 1, one line, no second complaint at exit."""
    with open("/dev/full", "wb") as full:
        assert_one_complaint(mini("--max-tokens", 5, stdout=full))


STUBS = {
    "mlx raises": (
        "mlx/__init__.py",
        "raise ImportError('libmlx.so: cannot open shared object file')",
    ),
    "mlx without core": ("mlx/__init__.py", ""),
    "tokenizers": ("tokenizers.py", "raise ImportError('No module named tokenizers')"),
}


@pytest.mark.parametrize("case", STUBS)
def test_a_package_that_cannot_be_imported_is_one_hint(tmp_path, case):
    """Without mlx or tokenizers: one line with the way out, no traceback."""
    package, text = STUBS[case]
    path = tmp_path / package
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    line = assert_one_complaint(run(PYTHONPATH=tmp_path))
    assert "pip install" in line and re.search("mlx|tokenizers", line)


def test_ctrl_c_ends_a_run_with_130_and_keeps_its_text(terminal, random_model):
    """Ctrl-C during an answer: exit 130, what was printed stays, no traceback."""
    plain = terminal("--model", random_model, "a question", "--max-tokens", 4000)
    plain.expect(b"Output: .{60}")
    plain.send(b"\x03")
    assert plain.close() == 130, plain.all[-300:]
    assert b"Traceback" not in plain.all and b"Time: " not in plain.all, plain.all[-300:]
    assert len(plain.all) > 150, plain.all[-300:]


# ---- Loading


def put(name, data):
    """A change: the file holds these bytes."""
    return lambda folder: (folder / name).write_bytes(data)


def cut(name, keep):
    """A change: the file ends early (a negative number: so many bytes before its end)."""
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:keep])


def values(name="config.json", **changes):
    """A change: other values in a JSON file, config.json if no other is named."""

    def change(folder):
        content = json.loads((folder / name).read_bytes()) | changes
        (folder / name).write_text(json.dumps(content))

    return change


def save(path, weights):
    """Write tensors to a file, over those it may hold and that are not read yet."""
    mx.eval(weights)
    path.unlink(missing_ok=True)
    mx.save_safetensors(str(path), weights)


def tensors(change):
    """A change: the tensors after `change` saw them."""

    def rewrite(folder):
        path = folder / "model.safetensors"
        save(path, change(dict(mx.load(str(path)))))

    return rewrite


def split(folder):
    """A change: the weights lie in two files with an index."""
    path = folder / "model.safetensors"
    weights = mx.load(str(path))
    names = sorted(weights)
    place = {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-{number:05}-of-00002.safetensors"
        save(folder / file, {name: weights[name] for name in part})
        place |= dict.fromkeys(part, file)
    path.unlink()
    index = {"metadata": {}, "weight_map": place}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def only(name, data=b"GGUF\x03\0\0\0"):
    """A change: the folder holds one file."""

    def fault(folder):
        shutil.rmtree(folder)
        folder.mkdir()
        (folder / name).write_bytes(data)

    return fault


def remove(name):
    """A change: the file is gone."""
    return lambda folder: (folder / name).unlink()


def both(*changes):
    """Several changes, one after the other."""
    return lambda folder: [change(folder) for change in changes]


def rewrite_dtype(new):
    """A change: one tensor claims a type, its bytes doubled where it is a wider one."""

    def change(folder):
        path = folder / "model.safetensors"
        data = path.read_bytes()
        (size,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + size])
        body = data[8 + size :]
        begin, end = header[NORM]["data_offsets"]
        header[NORM] |= {"dtype": new, "data_offsets": [len(body), len(body) + 2 * (end - begin)]}
        body += body[begin:end] * 2
        head = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(head)) + head + body)

    return change


def one_layer_in_mxfp4(folder):
    """A change: all matrices in 4 bits, those of one layer's feed-forward step in another way."""
    config = json.loads((folder / "config.json").read_bytes())
    weights = dict(mx.load(str(folder / "model.safetensors")))
    other = {name for name in weights if "layers.1.mlp" in name}
    packed, config = quantize(weights, config, group_size=32)
    for name in other:
        stem = name.removesuffix(".weight")
        packed[name], packed[f"{stem}.scales"] = mx.quantize(
            weights[name], group_size=32, bits=4, mode="mxfp4"
        )
        packed.pop(f"{stem}.biases", None)
        config["quantization"][stem] = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
    save(folder / "model.safetensors", packed)
    values(**config)(folder)


def unknown_tokenizer(folder):
    """A change: the tokenizer is of a kind that nobody knows."""
    content = json.loads((folder / "tokenizer.json").read_bytes())
    content["model"] = {"type": "Telepathy", "thoughts": {}}
    (folder / "tokenizer.json").write_text(json.dumps(content))


LFS = b"""version https://git-lfs.github.com/spec/v1
oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393
size 1503300328
"""
DOWN = "model.layers.1.mlp.down_proj.weight"
NORM = "model.layers.0.self_attn.q_norm.weight"
SHARD = b'{"weight_map": {"a": "model-2-of-2.safetensors"}}'
NESTED = b'{"model_type": "qwen3_5", "text_config": {"hidden_size": 64}}'
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64}
AWQ = {"quant_method": "awq", "bits": 4}
DAMAGED = "incomplete|damaged|cut|empty"
NO_DOWNLOAD = r"^(?!.*download)"
FAULTS = {  # name -> what is done to a good folder, what the line must say (any case)
    "config.json is gone": (remove("config.json"), ["config.json"]),
    "tokenizer.json is gone": (remove("tokenizer.json"), ["tokenizer.json"]),
    "no weights": (remove("model.safetensors"), ["model.safetensors"]),
    "empty folder": (
        both(only("x"), remove("x")),
        ["broken", "config.json|tokenizer.json|safetensors"],
    ),
    "folder with a GGUF": (only("weights-q4.gguf"), [r"gguf"]),
    "LFS weights": (
        put("model.safetensors", LFS),
        ["model.safetensors", "lfs", "git lfs pull|download"],
    ),
    "LFS tokenizer": (put("tokenizer.json", LFS), ["tokenizer.json", "lfs"]),
    "LFS config": (put("config.json", LFS), ["config.json", "lfs"]),
    "weights cut": (
        cut("model.safetensors", -1000),
        ["model.safetensors", DAMAGED, "download"],
    ),
    "weights of 20 bytes": (
        cut("model.safetensors", 20),
        ["model.safetensors", DAMAGED, "download"],
    ),
    "weights of 0 bytes": (
        cut("model.safetensors", 0),
        ["model.safetensors", DAMAGED, "download"],
    ),
    "tokenizer cut": (cut("tokenizer.json", 3000), ["tokenizer.json", DAMAGED, "download"]),
    "config cut": (cut("config.json", -9), ["config.json", DAMAGED, "download"]),
    "config of 0 bytes": (cut("config.json", 0), ["config.json"]),
    "config is a list": (put("config.json", b"[1, 2]"), ["config.json"]),
    "config is not text": (put("config.json", b"\xff\xfe\0"), ["config.json"]),
    "a shard is missing": (
        both(put("model.safetensors.index.json", SHARD), remove("model.safetensors")),
        ["model-2-of-2"],
    ),
    "one of two shards": (
        both(split, remove("model-00002-of-00002.safetensors")),
        ["broken", "model-00002-of-00002.safetensors", r"\bmissing\b"],
    ),
    "one of two shards, no index": (
        both(
            split,
            remove("model-00001-of-00002.safetensors"),
            remove("model.safetensors.index.json"),
        ),
        ["broken", r"model\.", r"\bmissing\b", r"\b\d+\b"],
    ),
    "a tensor in two files": (
        both(
            split,
            lambda folder: save(
                folder / "model-00002-of-00002.safetensors",
                mx.load(str(folder / "model-00001-of-00002.safetensors")),
            ),
        ),
        ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", r"model\.\w+"],
    ),
    "llama": (values(model_type="llama"), ["config.json", "llama", "qwen3"]),
    "mixture of experts": (
        values(model_type="qwen3_moe", num_experts=8),
        ["config.json", "qwen3_moe"],
    ),
    "nested sizes": (put("config.json", NESTED), ["config.json", "qwen3_5"]),
    "GPTQ": (values(quantization_config=GPTQ), ["config.json", "gptq"]),
    "AWQ": (values(quantization_config=AWQ), ["config.json", "awq"]),
    "linear RoPE scaling": (
        values(rope_scaling={"rope_type": "linear", "factor": 2.0}),
        ["config.json", "linear"],
    ),
    "no rope_theta": (values(rope_theta=None), ["config.json", "rope_theta"]),
    "attention bias": (values(attention_bias=True), ["config.json", "attention_bias"]),
    "sliding window": (values(use_sliding_window=True), ["config.json", "use_sliding_window"]),
    "FP8 tensors": (
        tensors(lambda w: w | {DOWN: w[DOWN].astype(mx.uint8)}),
        ["broken", DOWN[:-7], "uint8|fp8", NO_DOWNLOAD],
    ),
    "a feed-forward step in mxfp4": (
        one_layer_in_mxfp4,
        ["broken", r"layers\.1\.mlp\.\w+_proj", "mxfp4|quantiz|stored", NO_DOWNLOAD],
    ),
    "F64 tensors": (
        rewrite_dtype("F64"),
        [r"model\.safetensors|q_norm", "f64|float64", NO_DOWNLOAD],
    ),
    "tensors of an unknown type": (
        rewrite_dtype("Q99"),
        ["model.safetensors", "cannot be read", "Q99", NO_DOWNLOAD],
    ),
    "a tokenizer of an unknown kind": (
        unknown_tokenizer,
        ["tokenizer.json", "cannot be read", r"\(.+\)", NO_DOWNLOAD],
    ),
    "a tensor is missing": (
        tensors(lambda w: {name: w[name] for name in w if name != DOWN}),
        ["broken", DOWN[:-7], r"\b1\b"],
    ),
    "a tensor has another shape": (
        tensors(lambda w: w | {NORM: mx.ones(7)}),
        ["broken", NORM[:-7], "7"],
    ),
    "an unknown tensor": (
        tensors(lambda w: w | {"model.layers.0.self_attn.q_proj.bias": mx.ones(128)}),
        ["broken", "q_proj.bias"],
    ),
    "a vocabulary of another size": (values(vocab_size=9999), ["broken", "embed_tokens"]),
}


# Not noticed by a run: of two tensors the later counts, and an id past the table is never drawn.
NOTICED_BY_CHECK_ALONE = {"a tensor in two files", "a vocabulary of another size"}


@pytest.fixture(scope="module")
def broken(random_model, tmp_path_factory):
    """All faults, each in its own copy of the random checkpoint, in a folder named broken."""
    folders = {}
    for number, (name, (fault, _)) in enumerate(FAULTS.items()):
        folders[name] = tmp_path_factory.mktemp(f"f{number}") / "broken"
        shutil.copytree(random_model, folders[name])
        fault(folders[name])
    return folders


@pytest.fixture(scope="module")
def faulty_runs(broken):
    calls = {}
    for name in broken.keys() - NOTICED_BY_CHECK_ALONE:
        folder = broken[name]
        calls[name] = (lambda folder=folder: run("--model", folder, "--max-tokens", 3),)
    return table(calls)


@pytest.mark.parametrize("name", FAULTS)
def test_check_says_in_one_sentence_what_is_wrong(broken, name):
    """examples.check names the file and the fault."""
    with pytest.raises(ValueError) as caught:
        check.check(broken[name])
    sentence = str(caught.value)
    for word in FAULTS[name][1]:
        assert re.search(word, sentence, re.I), f"{word!r} is not in: {sentence}"
    assert len(sentence) < 600


@pytest.mark.parametrize("name", sorted(FAULTS.keys() - NOTICED_BY_CHECK_ALONE))
def test_a_faulty_model_is_one_line_that_leads_to_check(faulty_runs, name):
    """A folder that cannot be run: exit 1, one line that names it, why, and the program that says
    more; nothing on stdout."""
    result = faulty_runs[name].result()
    line = assert_one_complaint(result)
    assert re.search(r"broken cannot be run \(.+\)", line), line
    assert "python -m examples.check" in line and "python -m examples.download" in line, line
    assert result.out == "" and len(line) < 700, result


def test_the_command_check(broken):
    """A sound folder: exit 0 and its number of tensors; the usual one without an argument; a fault:
    exit 1 and the sentence."""
    for args in ([MINI], []):
        sound = run(*args, module="examples.check", cwd=ROOT)
        assert sound.code == 0 and re.search(r"Qwen3-mini.* 68 tensors", sound.out), sound
    faulty = run(broken["LFS weights"], module="examples.check")
    assert "git lfs pull" in assert_one_complaint(faulty) and faulty.out == ""


APPLE_DOUBLE = b"\x00\x05\x16\x07\x00\x02\x00\x00Mac OS X        " + bytes(4072)


def foreign_files(folder):
    """A change: beside each file one of macOS (on exFAT), and other files that no model needs."""
    for path in list(folder.iterdir()):
        (folder / f"._{path.name}").write_bytes(APPLE_DOUBLE)
    names = ".DS_Store adapter_model.safetensors consolidated.safetensors merges.txt vocab.json"
    for name in names.split():
        (folder / name).write_bytes(APPLE_DOUBLE)
    (folder / "model.safetensors.index.json.bak").write_bytes(b"{")


HARMLESS = {  # name -> what is done to a good folder; the run is the same as before
    "nothing": lambda folder: None,
    "files of macOS beside": foreign_files,
    "files of macOS beside two shards": both(split, foreign_files),
    "two shards": split,
    "two shards without an index": both(
        split, remove("model.safetensors.index.json"), foreign_files
    ),
    "an index of files that are not there": put(
        "model.safetensors.index.json", SHARD.replace(b"model-2", b"other-2")
    ),
    "a tokenizer that was trained on 2 tokens": values(
        "tokenizer.json",
        truncation={"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
        padding={
            "strategy": {"Fixed": 16},
            "direction": "Left",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "<|endoftext|>",
        },
    ),
    "no generation_config.json": remove("generation_config.json"),
}


def test_what_does_no_harm_changes_nothing(random_model, tmp_path):
    """Foreign files in the folder, weights in several files and settings of the tokenizer's
    training: the run is that of the same model without them."""

    def continued(row):
        number, change = row
        folder = Path(shutil.copytree(random_model, tmp_path / str(number) / "model"))
        change(folder)
        return run("--model", folder, START, "--max-tokens", 8)

    rows = list(enumerate(HARMLESS.values()))
    results = dict(zip(HARMLESS, POOL.map(continued, rows), strict=True))
    wanted = results["nothing"]
    assert wanted.out.startswith(START) and "5 tokens read" in wanted.err, wanted
    for name, result in results.items():
        assert result.code == 0 and result.out == wanted.out, (name, result)


def test_a_model_that_is_not_there_is_named(tmp_path):
    """A missing folder, a GGUF file, a .safetensors file: exit 1, one line that names it and what a
    program that says what a model is."""
    gguf = tmp_path / "weights-q4.gguf"
    gguf.write_bytes(b"GGUF\x03\0\0\0")
    named = {
        tmp_path / "none" / "here": "none/here",
        gguf: "weights-q4.gguf",
        MINI / "model.safetensors": "model.safetensors",
        tmp_path: "config.json",
        tmp_path / "gone" / "model.safetensors": "gone",
        "./nowhere": "nowhere",
        "~/nowhere": "nowhere",
    }
    results = POOL.map(lambda path: run("--model", path, cwd=tmp_path, HOME=tmp_path), named)
    for (path, word), result in zip(named.items(), results, strict=True):
        line = assert_one_complaint(result)
        assert word in line and "python -m examples.check" in line, (path, line)
    for path in gguf, MINI / "model.safetensors", tmp_path / "none":
        with pytest.raises(ValueError, match=r"missing: a model is a folder with .*GGUF"):
            check.check(path)


# ---- The folder and its name


def write_hub(hub, versions, main=None):
    """A folder of the hub's cache, files as links to blobs, its versions from the oldest to the
    newest: their hash -> a model, or a model and what is done to it. Returns the folder."""
    (hub / "blobs").mkdir(parents=True)
    for age, (version, (model, change)) in enumerate(versions.items()):
        snapshot = Path(shutil.copytree(model, hub / "snapshots" / version))
        change(snapshot)
        for path in list(snapshot.iterdir()):
            blob = hub / "blobs" / f"{version}-{path.name}"
            path.rename(blob)
            path.symlink_to(Path("../../blobs") / blob.name)
            os.utime(blob, (1e9 + age, 1e9 + age))
        os.utime(snapshot, (1e9 + age, 1e9 + age))
    if main:
        (hub / "refs").mkdir()
        (hub / "refs" / "main").write_text(main)
    return hub


def test_a_model_is_found_however_it_is_named(tmp_path):
    """The folder, ~/folder, a relative path, the working directory and a version in the hub's cache
    all give the same run, under a name that the user knows."""
    versions = {"c0ffee": (MINI, lambda folder: None)}
    hub = write_hub(tmp_path / "models--nobody--Qwen3-mini", versions, main="c0ffee")
    snapshot = hub / "snapshots" / "c0ffee"
    (tmp_path / "Qwen3-mini").symlink_to(MINI)
    rows = [
        (MINI, tmp_path),
        ("~/Qwen3-mini", tmp_path),
        ("~/Qwen3-mini/", tmp_path),
        ("Qwen3-mini", tmp_path),
        ("./Qwen3-mini", tmp_path),
        (".", MINI),
        ("./", MINI),
        ("../Qwen3-mini", MINI),
        (snapshot, tmp_path),
        (".", snapshot),
    ]

    def start(row):
        name, cwd = row
        return run("--model", name, "--max-tokens", 3, cwd=cwd, HOME=tmp_path)

    results = list(POOL.map(start, rows))
    for (name, cwd), result in zip(rows, results, strict=True):
        assert result.code == 0 and result.out == results[0].out != "", (name, cwd, result)
        shown = str(Path(name)).replace("~", str(tmp_path))  # what the user typed
        assert result.lines[0].startswith(f"Model: {shown} ("), (name, cwd, result)
        assert model_name(cwd / shown) == (
            "nobody/Qwen3-mini" if hub in (cwd / shown).resolve().parents else "Qwen3-mini"
        )


def whole(folder):
    """A version as it should be."""


half = both(split, remove("model-00002-of-00002.safetensors"))


def test_the_hubs_cache_is_left_to_the_program_that_knows_it(tmp_path, random_model):
    """The cache's folder of a model has versions, not files: one line with the command that prints
    the right one. Half a version: one line that names what is missing."""
    versions = {"1": (MINI, whole), "f": (random_model, half)}
    hub = write_hub(tmp_path / "models--nobody--Nothing", versions, main="1")
    assert "python -m examples.download" in assert_one_complaint(run("--model", hub))
    half_of_it = hub / "snapshots" / "f"
    assert "python -m examples.check" in assert_one_complaint(run("--model", half_of_it))
    with pytest.raises(ValueError, match="missing model-00002-of-00002.safetensors"):
        check.check(half_of_it)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_dtype_and_fused_run(dtype):
    """--dtype, the spelled-out math and the fused kernels change the way, not the answer."""
    code = "import sys; sys.argv[:] = sys.argv[1:]; import llm_inference as llm; llm.FUSED = {}; "
    for fused in False, True:
        start = ("-c", code.format(fused) + "llm.run(llm.main)")
        result = mini("--dtype", dtype, "--max-tokens", 3, python=start, PYTHONPATH=ROOT)
        assert result.code == 0 and result.out.startswith(f"{START} Paris"), result


def test_a_quantized_model_runs(tmp_path, random_model):
    """A 4-bit folder in MLX's layout runs from the command line."""
    config = json.loads((random_model / "config.json").read_bytes())
    weights = dict(mx.load(str(random_model / "model.safetensors")))
    weights, config = quantize(weights, config, bits=4, group_size=32)
    folder = write_checkpoint(tmp_path / "Quantized", config, weights)
    result = run("--model", folder, "--max-tokens", 5)
    assert result.code == 0 and "/Quantized (" in result.err, result
    assert len(result.out) > len(START) + 1, result


# ---- Context, damaged weights


def test_a_prompt_longer_than_the_context_is_refused(endless):
    """A prompt beyond the context: exit 1, one line that names the limit, at the start of a line
    on a terminal too."""
    args = ["--model", endless(max_position_embeddings=48), "word " * 100]
    assert "48" in assert_one_complaint(run(*args))
    assert re.search(r"^llm_inference\.py: ", run(*args, stderr=subprocess.STDOUT).out, re.M)


def test_the_end_of_the_context_ends_the_answer_and_is_said(endless):
    """Generation stops where the context ends, and stderr says so."""
    result = run("--model", endless(max_position_embeddings=48), START, "--max-tokens", 400)
    assert result.code == 0 and len(result.out) > len(START) + 20, result
    assert any("context" in line for line in result.lines), f"its end is not said: {result}"
    weights, config, tokenizer = llm_inference.load(endless(max_position_embeddings=4096))
    ids = tokenizer.encode(START, add_special_tokens=False).ids
    stop = config["eos_token_id"]
    limit = 49 - len(ids)  # 48 fed, one more chosen
    answer = list(llm_inference.generate(ids, weights, config, stop, max_tokens=limit))
    assert result.out == START + tokenizer.decode(answer, skip_special_tokens=False) + "\n"


def nan_after(steps, folder, prompt):
    """Damage a checkpoint so that its greedy answer has `steps` tokens or more before the logits
    are NaN; returns their text."""
    weights, config, tokenizer = llm_inference.load(folder)
    head = weights["model.embed_tokens.weight"]
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    weights["lm_head.weight"] = head
    config["tie_word_embeddings"] = False
    answer = list(llm_inference.generate(ids, weights, config, [], max_tokens=steps + 30))
    at = steps  # until the token before it is a new one
    while at and answer[at - 1] in answer[: at - 1] + ids:
        at += 1
    rows = mx.array(head)
    rows[answer[at - 1] if at else ids[-1]] = mx.nan
    weights["model.embed_tokens.weight"] = rows
    values(tie_word_embeddings=False)(folder)
    save(folder / "model.safetensors", weights)
    return tokenizer.decode(answer[:at], skip_special_tokens=False)


@pytest.mark.parametrize("steps", [0, 3])
def test_nan_in_the_weights_ends_the_run_and_keeps_what_was_printed(endless, steps):
    """Logits that are not finite: exit 1, one line that says finite; the text so far stands, on a
    line of its own."""
    folder = endless()
    text = nan_after(steps, folder, START)
    result = run("--model", folder, START)
    assert "finite" in assert_one_complaint(result)
    assert result.out == START + text + "\n", result
    merged = run("--model", folder, START, stderr=subprocess.STDOUT).out
    assert re.search(r"^llm_inference\.py: ", merged, re.M), f"not at a line's begin: {merged!r}"


# ---- Streaming


class Recorder(io.StringIO):
    """A stdout that keeps what each write() was given, and what had been flushed."""

    encoding = "utf-8"

    def __init__(self):
        super().__init__()
        self.pieces, self.shown = [], ""

    def flush(self):
        self.shown = "".join(self.pieces)

    def write(self, text):
        self.pieces.append(text)
        return super().write(text)


def streamed(monkeypatch, token_ids, tokenizer, answer=None):
    """The pieces that stream() writes; the exception that ended it, if any."""
    recorder, error = Recorder(), None
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", recorder)
        try:
            llm_inference.stream(token_ids, tokenizer, [] if answer is None else answer)
        except BaseException as caught:
            error = caught
    return recorder.pieces, error


@pytest.fixture(
    scope="module", params=["miniature", pytest.param("real", marks=needs_real_tokenizer)]
)
def tokenizer(request):
    """The miniature's tokenizer, and the real one where it is at hand."""
    return Tokenizer.from_file(
        str(MINI / "tokenizer.json" if request.param == "miniature" else REAL)
    )


TEXTS = [
    "The capital of France is Paris.",
    "🦜",
    "龘",
    "🫠 melts",
    "𓀀𓀁𓂀",
    "1️⃣ 2️⃣ #️⃣",
    "🏳 🏳️‍🌈 🏴‍☠️",
    "🇫🇷🇯🇵🇨🇳 flags",
    "👨‍👩‍👧‍👦👩🏽‍🚀 families",
    "مرحبا بالعالم، كيف الحال؟",
    "你好，龘龘龘的世界",
    "Ünï cödé naïve",
    "a🦜b龘c🫠d𓀀e1️⃣f🏳g",
    "नमस्ते ไทย 한국어",
    "  two  spaces\n\n\tand lines \n",
    "<think>\nthought 🦜\n</think>\n\nanswer",
    "𝕬𝖑𝖕𝖍𝖆 ∮ ℵ₀ ￼ \u200d end",
]


@pytest.mark.parametrize("text", TEXTS)
def test_characters_are_streamed_whole_and_as_soon_as_they_are(monkeypatch, tokenizer, text):
    """What is written joins to the decoded text and no piece holds a replacement character."""
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    answer = []
    pieces, error = streamed(monkeypatch, iter(ids), tokenizer, answer)
    assert error is None and answer == ids
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=False) + "\n"
    assert not [piece for piece in pieces if "\ufffd" in piece]


def test_text_is_written_token_by_token(monkeypatch, tokenizer):
    """Plain text is on the screen before the next token is asked for."""
    ids = tokenizer.encode(
        "The capital of France is Paris, and so on.", add_special_tokens=False
    ).ids
    recorder, seen = Recorder(), []

    def asked():
        for token_id in ids:
            seen.append(recorder.shown)
            yield token_id

    monkeypatch.setattr(sys, "stdout", recorder)
    llm_inference.stream(asked(), tokenizer, [])
    monkeypatch.undo()
    assert seen == [tokenizer.decode(ids[:number]) for number in range(len(ids))]


def test_random_ids_lose_nothing(monkeypatch, tokenizer):
    """Any ids at all, halves of characters and ids without text among them: what is written is their decoded text."""
    rng = np.random.default_rng(7)
    size = tokenizer.get_vocab_size()
    halves = [token for token in range(min(size, 3000)) if "\ufffd" in tokenizer.decode([token])]
    whole = [tokenizer.encode(text, add_special_tokens=False).ids for text in TEXTS]
    lost = []
    for number in range(400):
        length = int(rng.integers(1, 24))
        if number % 4 == 0:  # anything, ids past the last token with a text among them
            ids = rng.integers(0, size + 200, length).tolist()
        elif number % 4 == 1:  # mostly broken characters
            ids = rng.choice(halves, length).tolist()
        elif number % 4 == 2:  # a text cut anywhere
            ids = whole[number % len(whole)]
            ids = ids[: int(rng.integers(1, len(ids) + 1))]
        else:  # a cut text, ids without text in the middle and at the end, another text
            first, second = whole[number % len(whole)], whole[(number * 7) % len(whole)]
            ids = (
                first[: int(rng.integers(1, len(first) + 1))]
                + [size + 3] * int(rng.integers(0, 3))
                + second
                + [size + 1]
            )
        pieces, error = streamed(monkeypatch, iter(ids), tokenizer)
        wanted = tokenizer.decode(ids, skip_special_tokens=False) + "\n"
        if error or "".join(pieces) != wanted:
            lost.append((ids, "".join(pieces), wanted, error))
    assert not lost, (
        f"{len(lost)} of 400, such as ids {lost[0][0]}: {lost[0][1]!r} for {lost[0][2]!r}, {lost[0][3]!r}"
    )


@pytest.mark.parametrize(
    "error", [RuntimeError("the logits are not finite"), KeyboardInterrupt()], ids=repr
)
@pytest.mark.parametrize("missing", [0, 1])
def test_what_is_held_back_is_printed_when_generation_fails(monkeypatch, tokenizer, error, missing):
    """A generator that raises, within a character or after one: all that was decoded is printed, the error goes on."""
    ids = tokenizer.encode("before 🦜", add_special_tokens=False).ids
    ids = ids[: len(ids) - missing]

    def failing():
        yield from ids
        raise error

    answer = []
    pieces, caught = streamed(monkeypatch, failing(), tokenizer, answer)
    assert caught is error and answer == ids
    assert "".join(pieces).rstrip("\n") == tokenizer.decode(ids, skip_special_tokens=False)
