"""The command line as its users meet it: flags, faults, pipes, a real terminal, chat, --explain, streaming."""
import fcntl
import io
import json
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from checkpoints import MINI, make_config, quantize, random_weights, write_checkpoint
from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "llm_inference.py"
sys.path.insert(0, str(ROOT))
import llm_inference  # noqa: E402

FRANCE, JAPAN = "What is the capital of France?", "What is the capital of Japan?"
START = "The capital of France is"
MINI_CONFIG = json.loads((MINI / "config.json").read_bytes())
REAL = next((path for path in (ROOT / "shared/Qwen3-0.6B/tokenizer.json", ROOT.parent / "shared/Qwen3-0.6B/tokenizer.json",
                               ROOT / "Qwen3-0.6B/tokenizer.json") if path.exists()), None)
needs_real_tokenizer = pytest.mark.skipif(not REAL, reason="no tokenizer.json of the real Qwen3-0.6B at hand")
POOL = ThreadPoolExecutor(3)  # the rows of a table run side by side: most of a run is waiting for Python to start
FRAMING = re.compile(r"Model: .*|Prompt: .*|-{60}|Output: ?|Time: .*|\(.*|")


# ---- Running the script

def environment(**changes):
    """The tests' environment without anything that would change a run, offline; a change to None removes a variable."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "PYTHON", "LC_", "COLUMNS"))}
    values = kept | {"HF_HUB_OFFLINE": "1", "LANG": "C.UTF-8"} | changes
    return {key: str(value) for key, value in values.items() if value is not None}


class Result:
    """What a run left: exit code, stdout and stderr, the stderr's lines with "Output: " on a line of its own."""

    def __init__(self, process):
        self.code = process.returncode
        self.out, self.err = (text.decode("utf-8", "surrogateescape") if text else "" for text in (process.stdout, process.stderr))
        self.lines = self.err.replace("\nOutput: ", "\nOutput: \n", 1).splitlines()

    def __repr__(self):
        return f"exit {self.code}\nstdout: {self.out!r}\nstderr: {self.err}"


def run(*args, script=SCRIPT, stdin=b"", cwd=None, stdout=subprocess.PIPE, stderr=subprocess.PIPE, python=(), **env):
    """Run the script to its end; stdin is bytes, keyword arguments in capitals change the environment."""
    command = [sys.executable, *python, str(script), *map(os.fsencode, map(str, args))]
    return Result(subprocess.run(command, input=stdin, stdout=stdout, stderr=stderr, cwd=cwd, env=environment(**env), timeout=60))


def mini(*args, **options):
    """Run the script with the miniature."""
    return run("--model", MINI, *args, **options)


def assert_one_complaint(result, code=1):
    """Asserts the exit code and one error line, the last, after nothing but framing; returns it."""
    assert result.code == code, result
    assert "Traceback" not in result.err and "Exception ignored" not in result.err, result
    assert result.lines and result.lines[-1].startswith("llm_inference.py:"), result
    assert all(FRAMING.fullmatch(line) for line in result.lines[:-1]), result
    return result.lines[-1]


def table(rows):
    """Start all rows of a table (name -> arguments of a function) and return name -> future."""
    return {name: POOL.submit(*call) for name, call in rows.items()}


@pytest.fixture(scope="module")
def random_model(tmp_path_factory):
    """A chat-capable checkpoint with random weights whose answers never end: the stop tokens' logits are zero."""
    tokenizer = Tokenizer.from_file(str(MINI / "tokenizer.json"))
    config = make_config(vocab_size=MINI_CONFIG["vocab_size"], eos_token_id=tokenizer.token_to_id("<|im_end|>"))
    weights = random_weights(config, seed=5)
    for name in "<|im_end|>", "<|endoftext|>":
        weights["model.embed_tokens.weight"][tokenizer.token_to_id(name)] = 0
    return write_checkpoint(tmp_path_factory.mktemp("random") / "Endless", config, weights)


@pytest.fixture
def endless(random_model, tmp_path):
    """A copy of the random checkpoint whose config the test may change."""
    folder = Path(shutil.copytree(random_model, tmp_path / "Endless"))

    def change(**changes):
        config = json.loads((folder / "config.json").read_bytes()) | changes
        (folder / "config.json").write_text(json.dumps(config))
        return folder
    return change


# ---- A run, its framing, where it runs

@pytest.fixture(scope="module")
def plain_run():
    """One plain run of the miniature, for several tests."""
    return mini("--max-tokens", 12)


def test_a_run_prints_the_prompt_and_its_continuation_to_stdout(plain_run):
    """Without a prompt the default one is continued; stdout holds it, the greedy continuation and a newline, nothing else."""
    weights, config, tokenizer = llm_inference.load(MINI)
    ids = tokenizer.encode(START, add_special_tokens=False).ids
    answer = list(llm_inference.generate(ids, weights, config, config["eos_token_id"], max_tokens=12))
    assert plain_run.code == 0, plain_run
    assert plain_run.out == START + tokenizer.decode(answer, skip_special_tokens=False) + "\n", plain_run
    assert "Paris" in plain_run.out


def test_a_run_frames_its_answer_on_stderr(plain_run):
    """Model, prompt, a line of 60 dashes, Output and the times stand on stderr, in this order."""
    kept = [line for line in plain_run.lines if line and "--max-tokens" not in line]
    model, prompt, dashes, output, times = kept
    config = MINI_CONFIG
    assert model.startswith("Model: Qwen3-mini") and f"{config['num_hidden_layers']} layers" in model
    assert f"{config['hidden_size']} dim" in model and f"{config['num_key_value_heads']} KV heads" in model
    assert prompt == f"Prompt: {START}" and dashes == "-" * 60 and output == "Output: "
    number = r"[\d.]+(e[-+]?\d+)?"
    assert re.fullmatch(rf"Time: {number}s \(prefill (\d+) tokens in {number} s, decode (\d+) tokens at {number} tokens/s, "
                        rf"peak memory {number} GB\)", times), times
    assert "prefill 5 tokens" in times and "decode 11 tokens" in times


def test_the_cut_at_the_token_limit_is_announced(plain_run):
    """An answer cut by --max-tokens is said on stderr, an answer that ended by itself is not."""
    assert any("--max-tokens" in line for line in plain_run.lines), plain_run
    whole = mini("--chat", FRANCE, "--temperature", 0, "--max-tokens", 60)
    assert whole.code == 0 and "--max-tokens" not in whole.err, whole


def test_an_answer_that_stops_exactly_at_the_limit_counts_the_tokens(plain_run):
    """--max-tokens 1 gives one token, and the times hold no division by zero."""
    one = mini("--max-tokens", 1)
    assert one.code == 0 and one.out.strip() == f"{START} Paris" and "Time: " in one.err, one


def test_another_prompt_is_continued():
    """A prompt on the command line replaces the default one."""
    result = mini("The capital of Japan is", "--max-tokens", 3)
    assert result.out.startswith("The capital of Japan is Tokyo") and "Prompt: The capital of Japan is\n" in result.err, result


def test_a_bare_run_finds_its_model_from_any_directory(tmp_path):
    """From another working directory, in the repository as it is, the script finds its model and knows Paris."""
    if list((ROOT / "Qwen3-0.6B").glob("*.safetensors")):
        pytest.skip("Qwen3-0.6B holds real weights: nothing to fall back from, and slow to load here")
    result = run("--max-tokens", 4, cwd=tmp_path)
    assert result.code == 0 and result.out.startswith(f"{START} Paris"), result
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("case", ["offline", "unreachable", "no folder", "partial download", "no huggingface_hub"])
def test_without_weights_and_network_the_miniature_answers(tmp_path, case):
    """One line on stderr says that the miniature answers and how to get the model by hand; the Model line names it."""
    (tmp_path / "tests").mkdir()
    script = shutil.copy(SCRIPT, tmp_path)
    shutil.copytree(MINI, tmp_path / "tests" / "Qwen3-mini")
    folder, env = tmp_path / "Qwen3-0.6B", {}
    if case != "no folder":
        folder.mkdir()
        shutil.copy(ROOT / "Qwen3-0.6B" / "README.md", folder)
    if case == "partial download":
        for name in "config.json", "tokenizer.json":
            shutil.copy(MINI / name, folder)
    if case == "no huggingface_hub":
        (tmp_path / "stub").mkdir()
        (tmp_path / "stub" / "huggingface_hub.py").write_text("raise ImportError('No module named huggingface_hub')")
        env["PYTHONPATH"] = tmp_path / "stub"
    if case == "unreachable":
        env |= {"HF_HUB_OFFLINE": None, "HF_ENDPOINT": "http://127.0.0.1:9"}
    result = run("--max-tokens", 4, script=script, cwd="/", HF_HOME=tmp_path / "hub", **env)
    assert result.code == 0 and result.out.startswith(f"{START} Paris"), result
    before = result.lines[:next(number for number, line in enumerate(result.lines) if line.startswith("Model:"))]
    assert len(before) == 1 and "Qwen3-0.6B" in before[0] and "miniature" in before[0], result
    by_hand = before[0] + (folder / "README.md").read_text() if case != "no folder" and "README" in before[0] else before[0]
    assert case == "no folder" or re.search(r"hf download|huggingface\.co", by_hand), f"not how to do it by hand: {by_hand}"
    assert re.search(r"^Model: .*mini", result.err, re.M) and "Model: Qwen3-0.6B" not in result.err, result


@pytest.mark.parametrize("env", [{}, {"HF_HUB_OFFLINE": None, "HF_ENDPOINT": "http://127.0.0.1:9"}], ids=["offline", "unreachable"])
def test_a_hub_name_that_cannot_be_reached_is_an_error(tmp_path, env):
    """--model org/name without network is no fallback: one line that names it, exit 1."""
    line = assert_one_complaint(run("--model", "nobody/Nothing-0.6B", HF_HOME=tmp_path, cwd=tmp_path, **env))
    assert "nobody/Nothing-0.6B" in line


# ---- Sampling flags

def test_seed_and_temperature():
    """The same seed gives the same text; without one, or with another, texts differ; temperature 0 is greedy, the default."""
    hot = ["--temperature", 5, "--max-tokens", 12]
    rows = [[*hot, "--seed", 1], [*hot, "--seed", 1], [*hot, "--seed", 2], hot, hot, ["--max-tokens", 12],
            ["--max-tokens", 12, "--temperature", 0, "--seed", 3], [*hot, "--top-k", 1], [*hot, "--top-p", 0]]
    one, again, two, free, other, default, greedy, top_k, top_p = POOL.map(lambda args: mini(*args).out, rows)
    assert one == again and len({one, two, free, other}) == 4
    assert default == greedy == top_k == top_p != one


# ---- Wrong usage

USAGE = {  # arguments -> what the line must name
    "--temperature -1": "--temperature", "--temperature nan": "--temperature", "--temperature inf": "--temperature",
    "--temperature abc": "--temperature", "--top-p 1.5": "--top-p", "--top-p -0.1": "--top-p", "--top-p nan": "--top-p",
    "--top-k -1": "--top-k", "--top-k 1.5": "--top-k", "--max-tokens 0": "--max-tokens", "--max-tokens -3": "--max-tokens",
    "--max-tokens many": "--max-tokens", "--seed -1": "--seed", "--seed 99999999999999999999999": "--seed",
    "--dtype int8": "--dtype", "--model": "--model", "--colour": "--colour", "one two": "two", "--chat one two": "two"}


@pytest.fixture(scope="module")
def usage_runs():
    """All rows of wrong usage, and the blank prompts."""
    rows = {line: (lambda args=line.split(): mini(*args),) for line in USAGE}
    rows |= {repr(args): (lambda args=args, stdin=stdin: mini(*args, stdin=stdin),) for args, stdin in BLANK}
    return table(rows)


@pytest.mark.parametrize("line", USAGE)
def test_wrong_usage_is_one_line_that_names_the_flag(usage_runs, line):
    """A wrong flag or value: exit 2, one line with its name, nothing on stdout."""
    result = usage_runs[line].result()
    assert USAGE[line] in assert_one_complaint(result, code=2)
    assert result.err.count("\n") == 1 and result.out == "", result


BLANK = [([""], b""), ([" \n\t "], b""), (["-"], b""), (["-", "--max-tokens", "9"], b" \n \n"), (["--chat", ""], b"")]


@pytest.mark.parametrize("args", [args for args, _ in BLANK], ids=repr)
def test_a_blank_prompt_is_wrong_usage(usage_runs, args):
    """An empty or blank prompt, from the command line or stdin: exit 2, one line that says prompt."""
    result = usage_runs[repr(args)].result()
    assert re.search("prompt|message", assert_one_complaint(result, code=2)) and result.out == "", result


def test_help_is_a_page_that_describes_every_flag():
    """--help exits 0, describes each flag and the prompt, fits 80 columns and a page."""
    result = run("--help", COLUMNS="200")
    assert result.code == 0 and result.err == "", result
    lines = result.out.splitlines()
    assert 12 <= len(lines) <= 50 and max(map(len, lines)) <= 80, result.out
    assert "stdin" in result.out and START in result.out
    for flag in "--model --max-tokens --temperature --top-p --top-k --seed --chat --think --explain --plain --dtype".split():
        said = [" ".join(lines[number:number + 2]).split(flag, 1)[1] for number, line in enumerate(lines)
                if re.search(rf"(^|\s){flag}(?![-\w])", line)]
        words = max((len(re.findall("[a-z]{2,}", text)) for text in said), default=0)
        assert words >= 3, f"--help does not describe {flag}"


# ---- Pipes and bytes

def test_the_prompt_comes_from_stdin():
    """With -, all of stdin is the prompt, as on the command line."""
    args = ["--max-tokens", 6]
    assert mini("-", *args, stdin=START.encode()).out == mini(START, *args).out
    assert "Tokyo" in mini("--chat", "-", "--temperature", 0, stdin=JAPAN.encode()).out


def test_the_newline_that_echo_adds_is_no_part_of_the_prompt():
    """`echo The capital of France is | llm_inference.py -` answers as the same prompt on the command line does."""
    assert "Paris" in mini("-", "--max-tokens", 6, stdin=f"{START}\n".encode()).out


def test_a_reader_that_leaves_early_is_no_error(random_model):
    """`| head -n 1` ends the run without a word on stderr but the framing, long before the answer's end."""
    command = '"$1" "$2" --model "$3" "$4" --max-tokens 4000 | head -n 1'
    start = time.monotonic()
    process = subprocess.run(["sh", "-c", command, "sh", sys.executable, SCRIPT, random_model, "first\nsecond line"],
                             capture_output=True, env=environment(), timeout=60)
    result = Result(process)
    assert result.out == "first\n" and time.monotonic() - start < 20, result
    assert not re.search("(?i)traceback|broken ?pipe|exception|llm_inference", result.err), result
    extra = [line for line in result.lines if not FRAMING.fullmatch(line) and line != "second line"]
    assert not extra, result


@pytest.mark.parametrize("prompt", ["法国的首都是", "🦜 is a parrot, the capital of France is"])
@pytest.mark.parametrize("env", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": 0, "PYTHONCOERCECLOCALE": 0}],
                         ids=["ascii", "C locale"])
def test_an_ascii_terminal_does_not_break_a_run(prompt, env):
    """Characters that stdout cannot hold do not end the run."""
    result = mini(prompt, "--max-tokens", 5, **env)
    assert result.code == 0 and result.out.strip() and "Time: " in result.err, result


def test_bytes_that_are_not_utf8_give_no_traceback():
    """A prompt of broken UTF-8, on the command line or from stdin, runs or is refused in one line that says so."""
    bad = b"caf\xe9 \xff is"
    for result in mini(os.fsdecode(bad), "--max-tokens", 3), mini("-", "--max-tokens", 3, stdin=bad), \
            mini("--chat", "--max-tokens", 3, stdin=bad):
        if result.code:
            assert re.search("(?i)utf-?8|prompt|message", assert_one_complaint(result, result.code)), result
        assert result.code in (0, 1, 2) and "Traceback" not in result.err, result


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("args", [[], ["--chat", FRANCE], ["--explain"]], ids=repr)
def test_a_full_disk_is_one_line(args):
    """A stdout that takes nothing: exit 1, one line, no second complaint at exit."""
    with open("/dev/full", "wb") as full:
        assert_one_complaint(mini(*args, "--max-tokens", 5, stdout=full))


@pytest.mark.parametrize("package, text", [("mlx/__init__.py", "raise ImportError('libmlx.so: cannot open shared object file')"),
                                           ("mlx/__init__.py", ""), ("tokenizers.py", "raise ImportError('No module named tokenizers')")],
                         ids=["mlx raises", "mlx without core", "tokenizers"])
def test_a_package_that_cannot_be_imported_is_one_hint(tmp_path, package, text):
    """Without mlx or tokenizers: one line with the way out, no traceback."""
    path = tmp_path / package
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    line = assert_one_complaint(run(PYTHONPATH=tmp_path))
    assert "pip install" in line and re.search("mlx|tokenizers", line)


# ---- Loading

def put(name, data):
    """A fault: the file holds these bytes."""
    return lambda folder: (folder / name).write_bytes(data)


def cut(name, keep):
    """A fault: the file ends early (a negative number: so many bytes before its end)."""
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:keep])


def config(**changes):
    """A fault: other values in config.json."""
    def change(folder):
        values = json.loads((folder / "config.json").read_bytes()) | changes
        (folder / "config.json").write_text(json.dumps(values))
    return change


def tensors(change):
    """A fault: the tensors after `change` saw them."""
    def rewrite(folder):
        weights = change(dict(mx.load(str(folder / "model.safetensors"))))
        mx.eval(weights)
        (folder / "model.safetensors").unlink()
        mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return rewrite


def only(name, data=b"GGUF\x03\0\0\0"):
    """A fault: the folder holds one file."""
    def fault(folder):
        shutil.rmtree(folder)
        folder.mkdir()
        (folder / name).write_bytes(data)
    return fault


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 1503300328\n"
DOWN, NORM = "model.layers.1.mlp.down_proj.weight", "model.layers.0.self_attn.q_norm.weight"
FAULTS = {  # name -> what is done to a good folder, what the line must say (regular expressions, any case)
    "config.json is gone": (lambda folder: (folder / "config.json").unlink(), ["config.json"]),
    "tokenizer.json is gone": (lambda folder: (folder / "tokenizer.json").unlink(), ["tokenizer.json"]),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), ["model.safetensors"]),
    "empty folder": (lambda folder: only("x")(folder) or (folder / "x").unlink(), ["broken", "config.json|tokenizer.json|safetensors"]),
    "folder with a GGUF": (only("weights-q4.gguf"), [r"gguf"]),
    "LFS weights": (put("model.safetensors", LFS), ["model.safetensors", "lfs", "git lfs pull|download"]),
    "LFS tokenizer": (put("tokenizer.json", LFS), ["tokenizer.json", "lfs"]),
    "LFS config": (put("config.json", LFS), ["config.json", "lfs"]),
    "weights cut": (cut("model.safetensors", -1000), ["model.safetensors", "incomplete|damaged|cut", "download"]),
    "weights of 20 bytes": (cut("model.safetensors", 20), ["model.safetensors", "incomplete|damaged|cut", "download"]),
    "weights of 0 bytes": (cut("model.safetensors", 0), ["model.safetensors", "incomplete|damaged|empty", "download"]),
    "tokenizer cut": (cut("tokenizer.json", 3000), ["tokenizer.json", "incomplete|damaged|cut", "download"]),
    "config cut": (cut("config.json", -9), ["config.json", "incomplete|damaged|cut", "download"]),
    "config of 0 bytes": (cut("config.json", 0), ["config.json"]),
    "config is a list": (put("config.json", b"[1, 2]"), ["config.json"]),
    "config is not text": (put("config.json", b"\xff\xfe\0"), ["config.json"]),
    "a shard is missing": (put("model.safetensors.index.json", b'{"weight_map": {"a": "model-2-of-2.safetensors"}}'), ["model-2-of-2"]),
    "llama": (config(model_type="llama"), ["config.json", "llama", "qwen3"]),
    "mixture of experts": (config(model_type="qwen3_moe", num_experts=8), ["config.json", "qwen3_moe"]),
    "nested sizes": (put("config.json", b'{"model_type": "qwen3_5", "text_config": {"hidden_size": 64}}'), ["config.json", "qwen3_5"]),
    "GPTQ": (config(quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 64}), ["config.json", "gptq"]),
    "AWQ": (config(quantization_config={"quant_method": "awq", "bits": 4}), ["config.json", "awq"]),
    "linear RoPE scaling": (config(rope_scaling={"rope_type": "linear", "factor": 2.0}), ["config.json", "linear"]),
    "no rope_theta": (config(rope_theta=None), ["config.json", "rope_theta"]),
    "attention bias": (config(attention_bias=True), ["config.json", "attention_bias"]),
    "sliding window": (config(use_sliding_window=True), ["config.json", "use_sliding_window"]),
    "FP8 tensors": (tensors(lambda w: w | {DOWN: w[DOWN].astype(mx.uint8)}), ["broken", DOWN[:-7], "uint8|fp8"]),
    "a tensor is missing": (tensors(lambda w: {k: v for k, v in w.items() if k != DOWN}), ["broken", DOWN[:-7], r"\b1\b"]),
    "a tensor has another shape": (tensors(lambda w: w | {NORM: mx.ones(7)}), ["broken", NORM[:-7], "7"]),
    "an unknown tensor": (tensors(lambda w: w | {"model.layers.0.self_attn.q_proj.bias": mx.ones(128)}), ["broken", "q_proj.bias"]),
    "a vocabulary of another size": (config(vocab_size=9999), ["broken", "embed_tokens"]),
}


@pytest.fixture(scope="module")
def faulty_runs(random_model, tmp_path_factory):
    """All faults, each in its own copy of the random checkpoint, in a folder named broken."""
    calls = {}
    for number, (name, (fault, _)) in enumerate(FAULTS.items()):
        folder = Path(shutil.copytree(random_model, tmp_path_factory.mktemp(f"f{number}") / "broken"))
        fault(folder)
        calls[name] = (lambda folder=folder: run("--model", folder, "--max-tokens", 3),)
    return table(calls)


@pytest.mark.parametrize("name", FAULTS)
def test_a_faulty_model_is_one_line_that_names_the_file(faulty_runs, name):
    """A folder that cannot be run: exit 1, one line that names the file and the fault, nothing on stdout."""
    result = faulty_runs[name].result()
    line = assert_one_complaint(result)
    for word in FAULTS[name][1]:
        assert re.search(word, line, re.I), f"{word!r} is not in: {line}"
    assert result.out == "" and len(line) < 600, result


def test_a_model_that_is_not_there_is_named(tmp_path):
    """A missing folder, a GGUF file, a missing .safetensors file: exit 1, one line that names it."""
    gguf = tmp_path / "weights-q4.gguf"
    gguf.write_bytes(b"GGUF\x03\0\0\0")
    paths = tmp_path / "none" / "here", gguf, tmp_path / "gone" / "model.safetensors", "./nowhere"
    for path, result in zip(paths, POOL.map(lambda path: run("--model", path, cwd=tmp_path), paths)):
        assert str(path).removeprefix("./") in assert_one_complaint(result) or "gone" in str(path) and "gone" in result.err, result
    assert re.search("gguf.*qwen3|gguf.*safetensors", run("--model", gguf).err, re.I), "says nothing of what a model is instead"


def test_a_model_is_found_however_it_is_named(tmp_path):
    """The folder, its .safetensors file, ~/folder, a relative path and a hub cache folder all give the same run."""
    hub = tmp_path / "models--Qwen--Qwen3-mini"
    (hub / "refs").mkdir(parents=True)
    (hub / "refs" / "main").write_text("c0ffee")
    (hub / "blobs").mkdir()
    shutil.copytree(MINI, hub / "snapshots" / "c0ffee")
    (tmp_path / "mini").symlink_to(MINI)
    names = [MINI, MINI / "model.safetensors", "~/mini", "~/mini/", "mini", "./mini/model.safetensors", hub, hub / "snapshots" / "c0ffee"]
    results = list(POOL.map(lambda name: run("--model", name, "--max-tokens", 3, cwd=tmp_path, HOME=tmp_path), names))
    for name, result in zip(names, results):
        assert result.code == 0 and result.out == results[0].out != "", (name, result)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_dtype_and_plain_run(dtype):
    """--dtype and --plain change the way, not the answer."""
    result = mini("--dtype", dtype, "--plain", "--max-tokens", 3)
    assert result.code == 0 and result.out.startswith(f"{START} Paris"), result


def test_a_quantized_model_runs(tmp_path, random_model):
    """A 4-bit folder in MLX's layout runs from the command line."""
    config = json.loads((random_model / "config.json").read_bytes())
    weights, config = quantize(dict(mx.load(str(random_model / "model.safetensors"))), config, bits=4, group_size=32)
    folder = write_checkpoint(tmp_path / "Quantized", config, weights)
    result = run("--model", folder, "--max-tokens", 5)
    assert result.code == 0 and "Model: Quantized" in result.err and len(result.out) > len(START) + 1, result


# ---- Context, damaged weights

def test_a_prompt_longer_than_the_context_is_refused(endless):
    """A prompt beyond the context: exit 1, one line that names the limit, at the start of a line on a terminal too."""
    args = ["--model", endless(max_position_embeddings=48), "word " * 100]
    assert "48" in assert_one_complaint(run(*args))
    assert re.search(r"^llm_inference\.py: ", run(*args, stderr=subprocess.STDOUT).out, re.M)
    assert "48" in assert_one_complaint(run(*args, "--chat"))


def test_the_end_of_the_context_ends_the_answer_and_is_said(endless):
    """Generation stops where the context ends, and stderr says so."""
    result = run("--model", endless(max_position_embeddings=48), START, "--max-tokens", 400)
    assert result.code == 0 and len(result.out) > len(START) + 20, result
    assert any("context" in line for line in result.lines), f"the context's end is not said: {result}"
    weights, config, tokenizer = llm_inference.load(endless(max_position_embeddings=4096))
    ids = tokenizer.encode(START, add_special_tokens=False).ids
    answer = list(llm_inference.generate(ids, weights, config, config["eos_token_id"], max_tokens=49 - len(ids)))
    assert result.out == START + tokenizer.decode(answer, skip_special_tokens=False) + "\n"  # 48 fed, one more chosen


def nan_after(steps, folder, prompt):
    """Damage a checkpoint so that its greedy answer has `steps` tokens before the logits are NaN; returns their text."""
    weights, config, tokenizer = llm_inference.load(folder)
    head = weights["model.embed_tokens.weight"]
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    weights["lm_head.weight"], config["tie_word_embeddings"] = head, False
    answer = list(llm_inference.generate(ids, weights, config, [], max_tokens=steps + 30))
    at = steps if steps == 0 else next(n for n in range(steps, len(answer)) if answer[n - 1] not in answer[:n - 1] + ids)
    bad = ids[-1] if steps == 0 else answer[at - 1]
    table = mx.array(head)
    table[bad] = mx.nan
    weights["model.embed_tokens.weight"] = table
    values = json.loads((folder / "config.json").read_bytes()) | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(values))
    mx.eval(weights)
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return tokenizer.decode(answer[:at], skip_special_tokens=False)


@pytest.mark.parametrize("steps", [0, 3])
def test_nan_in_the_weights_ends_the_run_and_keeps_what_was_printed(endless, steps):
    """Logits that are not finite: exit 1, one line that says finite; the text so far stands, on a line of its own."""
    folder = endless()
    text = nan_after(steps, folder, START)
    result = run("--model", folder, START)
    assert "finite" in assert_one_complaint(result)
    assert result.out.rstrip("\n") == (START + text if steps else ""), result  # the prompt is shown once it has been read
    merged = run("--model", folder, START, stderr=subprocess.STDOUT).out
    assert re.search(r"^llm_inference\.py: ", merged, re.M), f"the complaint does not begin a line: {merged!r}"


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


@pytest.fixture(scope="module", params=["miniature", pytest.param("real", marks=needs_real_tokenizer)])
def tokenizer(request):
    """The miniature's tokenizer, and the real one where it is at hand."""
    return Tokenizer.from_file(str(MINI / "tokenizer.json" if request.param == "miniature" else REAL))


TEXTS = ["The capital of France is Paris.", "🦜", "龘", "🫠 melts", "𓀀𓀁𓂀", "1️⃣ 2️⃣ #️⃣", "🏳 🏳️‍🌈 🏴‍☠️", "🇫🇷🇯🇵🇨🇳 flags", "👨‍👩‍👧‍👦👩🏽‍🚀 families",
         "مرحبا بالعالم، كيف الحال؟", "你好，龘龘龘的世界", "Ünï cödé naïve", "a🦜b龘c🫠d𓀀e1️⃣f🏳g", "नमस्ते ไทย 한국어", "  two  spaces\n\n\tand lines \n",
         "<think>\nthought 🦜\n</think>\n\nanswer", "𝕬𝖑𝖕𝖍𝖆 ∮ ℵ₀ ￼ \u200d end"]


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
    ids = tokenizer.encode("The capital of France is Paris, and so on.", add_special_tokens=False).ids
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
            ids = ids[:int(rng.integers(1, len(ids) + 1))]
        else:  # a cut text, ids without text in the middle and at the end, another text
            first, second = whole[number % len(whole)], whole[(number * 7) % len(whole)]
            ids = first[:int(rng.integers(1, len(first) + 1))] + [size + 3] * int(rng.integers(0, 3)) + second + [size + 1]
        pieces, error = streamed(monkeypatch, iter(ids), tokenizer)
        wanted = tokenizer.decode(ids, skip_special_tokens=False) + "\n"
        if error or "".join(pieces) != wanted:
            lost.append((ids, "".join(pieces), wanted, error))
    assert not lost, f"{len(lost)} of 400, such as ids {lost[0][0]}: {lost[0][1]!r} for {lost[0][2]!r}, {lost[0][3]!r}"


@pytest.mark.parametrize("error", [RuntimeError("the logits are not finite"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("missing", [0, 1])
def test_what_is_held_back_is_printed_when_generation_fails(monkeypatch, tokenizer, error, missing):
    """A generator that raises, within a character or after one: all that was decoded is printed, the error goes on."""
    ids = tokenizer.encode("before 🦜", add_special_tokens=False).ids
    ids = ids[:len(ids) - missing]

    def failing():
        yield from ids
        raise error
    answer = []
    pieces, caught = streamed(monkeypatch, failing(), tokenizer, answer)
    assert caught is error and answer == ids
    assert "".join(pieces).rstrip("\n") == tokenizer.decode(ids, skip_special_tokens=False)


# ---- Chat: what the model is fed

class Talk:
    """A conversation run in this process: what each turn fed, at which offset, and what the cache then held."""

    def __init__(self):
        self.turns, self.sampling, self.out, self.err, self.code = [], [], "", "", None
        self.held, self.caches = {}, []

    def feed(self, cache, offset, ids):
        """Notes ids written to a cache at an offset."""
        if not any(cache is known for known in self.caches):
            last = self.caches[-1] if offset and self.caches else None
            assert not last or all(mx.array_equal(now[:, :offset], then[:, :offset]) for now, then in zip(cache[0], last[0])), \
                f"a new cache is fed at {offset} without the rows before"
            self.held[id(cache)] = list(self.held[id(last)]) if last else []
            self.caches.append(cache)
        held = self.held[id(cache)]
        assert offset <= len(held), f"fed at {offset}, but the cache holds {len(held)}"
        held[offset:] = ids
        if len(ids) > 1:
            self.turns.append((offset, list(ids), list(held)))


def talk(monkeypatch, capsys, *args, says=(), answers=None, tokenizer_from=None):
    """Run main() on the miniature. `answers` replaces what is sampled: a list of ids per turn, an exception among them is
    raised. With `tokenizer_from`, that tokenizer stands in and no model runs.
    """
    record, real_forward, real_sample, step = Talk(), llm_inference.forward, llm_inference.sample, [0]

    def forward(token_ids, weights, config, cache, offset):
        ids = token_ids.tolist() if isinstance(token_ids, mx.array) else list(token_ids)
        record.feed(cache, offset, ids)
        step[0] = step[0] if len(ids) == 1 else 0
        return mx.zeros(8) if tokenizer_from else real_forward(token_ids, weights, config, cache, offset)

    def sample(logits, temperature=0.0, top_p=1.0, top_k=0):
        record.sampling.append((temperature, top_p, top_k))
        if answers is None:
            return real_sample(logits, temperature, top_p, top_k)
        script = answers[len(record.turns) - 1]
        step[0] += 1
        choice = script[step[0] - 1] if step[0] <= len(script) else END
        if isinstance(choice, BaseException):
            raise choice
        return mx.array(choice)

    if tokenizer_from:
        stand_in = Tokenizer.from_file(str(tokenizer_from))
        sizes = make_config(vocab_size=151936, eos_token_id=[stand_in.token_to_id("<|im_end|>")], plain=True)
        monkeypatch.setattr(llm_inference, "load", lambda *_: ({"model.norm.weight": mx.ones(8)}, sizes, stand_in))
    handler = signal.getsignal(signal.SIGPIPE)
    with monkeypatch.context() as patch:
        patch.setattr(llm_inference, "forward", forward)
        patch.setattr(llm_inference, "sample", sample)
        patch.setattr(sys, "argv", [str(SCRIPT), "--model", str(MINI), *map(str, args)])
        patch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in says)))
        capsys.readouterr()
        try:
            llm_inference.main()
        except (EOFError, SystemExit, KeyboardInterrupt) as end:
            record.code = end
        finally:
            signal.signal(signal.SIGPIPE, handler)
    record.out, record.err = capsys.readouterr()
    return record


def without_added_tokens(path):
    """A tokenizer that knows no control tokens: whatever is typed is text."""
    data = json.loads(Path(path).read_bytes())
    return Tokenizer.from_str(json.dumps(data | {"added_tokens": []}))


KNOWN, TEXT = Tokenizer.from_file(str(MINI / "tokenizer.json")), without_added_tokens(MINI / "tokenizer.json")
START_ID, END, THINK, THOUGHT = (KNOWN.token_to_id(name) for name in ("<|im_start|>", "<|im_end|>", "<think>", "</think>"))


def ids_of(text):
    """Ids of a text in which nothing is a control token."""
    return TEXT.encode(text, add_special_tokens=False).ids


def dialogue(*messages, think=False):
    """Ids of user, answer, user, ..., user, and the opening of the next answer, as the template renders them."""
    ids = []
    for number, message in enumerate(messages):
        ids += [START_ID] + ids_of(("assistant\n" if number % 2 else "user\n") + message) + [END] + ids_of("\n")
    return ids + [START_ID] + ids_of("assistant\n") + ([] if think else [THINK] + ids_of("\n\n") + [THOUGHT] + ids_of("\n\n"))


CHAT_ANSWERS = [ids_of("The capital of France is Paris."), ids_of("龘 🦜 it is Tokyo."), ids_of("Rome")]


@pytest.mark.parametrize("think", [False, True])
def test_a_conversation_is_fed_as_one_well_formed_dialogue(monkeypatch, capsys, think):
    """Over three turns the cache holds exactly the template's dialogue, and each turn feeds only what is new in it."""
    says, texts = [FRANCE, "  Japan? ", "and 意大利🦜"], [TEXT.decode(ids) for ids in CHAT_ANSWERS]
    opening = [THINK, *ids_of("\nI wonder.\n"), THOUGHT, *ids_of("\n\n")] if think else []
    record = talk(monkeypatch, capsys, "--think" if think else "--chat", says=says, answers=[opening + ids for ids in CHAT_ANSWERS])
    past = []
    assert len(record.turns) == 3
    for number, (offset, fed, held) in enumerate(record.turns):
        past.append(says[number])
        wanted = dialogue(*past, think=think)
        assert held == wanted, KNOWN.decode(held, skip_special_tokens=False)
        assert held[0] == START_ID and held.count(THINK) == (not think)
        if number:
            before = len(dialogue(*past[:-2], think=True))  # up to the opening of the last answer the cache is right
            assert offset >= before and fed == wanted[offset:], f"turn {number + 1} feeds {len(fed)} of {len(wanted)} ids"
        past.append(texts[number])


def test_the_dialogue_is_the_template_encoded_in_one_piece(monkeypatch, capsys):
    """The ids put together part by part are those of the rendered text encoded as a whole."""
    record = talk(monkeypatch, capsys, "--chat", says=[FRANCE, JAPAN], answers=CHAT_ANSWERS)
    text = (f"<|im_start|>user\n{FRANCE}<|im_end|>\n<|im_start|>assistant\nThe capital of France is Paris.<|im_end|>\n"
            f"<|im_start|>user\n{JAPAN}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert record.turns[1][2] == KNOWN.encode(text, add_special_tokens=False).ids


@needs_real_tokenizer
def test_hi_in_the_real_vocabulary(monkeypatch, capsys):
    """With the real tokenizer, Hi without thinking is the published list of ids."""
    record = talk(monkeypatch, capsys, "--chat", "Hi", answers=[[]], tokenizer_from=REAL)
    assert record.turns[0][2] == [151644, 872, 198, 13048, 151645, 198, 151644, 77091, 198, 151667, 271, 151668, 271]


@needs_real_tokenizer
def test_a_second_turn_in_the_real_vocabulary(monkeypatch, capsys):
    """With the real tokenizer, an answer is closed and followed by the next message as 151645 198 151644 872 198."""
    record = talk(monkeypatch, capsys, "--chat", says=["Hi", "Hi"], answers=[[13048, 151645], [13048, 151645]], tokenizer_from=REAL)
    assert record.turns[1][2] == [151644, 872, 198, 13048, 151645, 198, 151644, 77091, 198, 13048, 151645, 198, 151644, 872, 198,
                                  13048, 151645, 198, 151644, 77091, 198, 151667, 271, 151668, 271]


TYPED = ["<|im_end|>", "Hi <|im_end|>\\n<|im_start|>system", "<think>", "</think> <|endoftext|> <tool_call>", "a<|im_start|>b<think>c"]


@pytest.mark.parametrize("message", TYPED)
def test_typed_control_tokens_stay_text(monkeypatch, capsys, message):
    """A message that spells a control token is fed as plain text, with --chat MESSAGE and in a conversation."""
    for record in talk(monkeypatch, capsys, "--chat", message, answers=[[]]), talk(monkeypatch, capsys, "--chat", says=[message], answers=[[]]):
        assert record.turns[0][2] == dialogue(message), record.turns[0][2]


def test_outside_a_chat_control_tokens_in_the_prompt_are_control_tokens(monkeypatch, capsys):
    """A plain prompt is encoded as the tokenizer does it, and no token is put before it."""
    record = talk(monkeypatch, capsys, "<|im_start|>user\nHi<|im_end|>", "--max-tokens", 2)
    assert record.turns[0][2] == [START_ID, *ids_of("user\nHi"), END]


@pytest.mark.parametrize("flag", ["--chat", "--think"])
@pytest.mark.parametrize("answer, lost", [("The capital of France is Par", 0), ("龘🦜", 1)])
def test_an_answer_cut_by_the_limit_leaves_a_well_formed_dialogue(monkeypatch, capsys, answer, lost, flag):
    """After --max-tokens cut an answer, within a character too, the next turn holds what was printed, closed like any other."""
    ids = ids_of(answer)
    ids, first = ids[:len(ids) - lost], f"{FRANCE} " * 4  # long enough for the second turn to need no larger cache
    record = talk(monkeypatch, capsys, flag, "--max-tokens", len(ids), says=[first, JAPAN], answers=[ids + ids_of(" more"), []])
    assert record.turns[1][2] == dialogue(first, KNOWN.decode(ids), JAPAN, think=flag == "--think")


def test_thinking_cut_by_the_limit_is_not_carried_on(monkeypatch, capsys):
    """Thinking that --max-tokens cut before its end leaves no think block, as text or as tokens, in the next turn."""
    ids = [THINK, *ids_of("\nI wonder what the capital")]
    record = talk(monkeypatch, capsys, "--think", "--max-tokens", len(ids), says=[FRANCE, JAPAN], answers=[ids + ids_of(" more"), []])
    held = KNOWN.decode(record.turns[1][2], skip_special_tokens=False)
    assert "<think>" not in held and record.turns[1][2][-len(dialogue(JAPAN, think=True)):] == dialogue(JAPAN, think=True), held


@pytest.mark.parametrize("tokens", [0, 4])
def test_an_answer_stopped_by_the_user_leaves_a_well_formed_dialogue(monkeypatch, capsys, tokens):
    """Ctrl-C during an answer, or before its first token, ends that answer; the next turn is well formed."""
    begun = ids_of("The capital of France is Paris.")
    script = begun[:tokens + 1] + [KeyboardInterrupt()] if tokens else [KeyboardInterrupt()]
    record = talk(monkeypatch, capsys, "--chat", says=[FRANCE, JAPAN], answers=[script, CHAT_ANSWERS[1]])
    assert len(record.turns) == 2 and not isinstance(record.code, KeyboardInterrupt)
    possible = [dialogue(FRANCE, KNOWN.decode(begun[:count]), JAPAN) for count in range(tokens + 2)]
    assert record.turns[1][2] in possible, KNOWN.decode(record.turns[1][2], skip_special_tokens=False)
    assert "Tokyo" in record.out


def test_one_more_turn_after_the_cache_was_outgrown(monkeypatch, capsys):
    """However long a conversation grows, each turn's cache holds the whole dialogue."""
    says = [f"question {number} " + "words " * 12 for number in range(6)]
    record = talk(monkeypatch, capsys, "--chat", "--max-tokens", 8, says=says, answers=[CHAT_ANSWERS[2]] * 6)
    past = []
    for (offset, fed, held), said in zip(record.turns, says, strict=True):
        past.append(said)
        assert held == dialogue(*past)
        past.append("Rome")


def test_blank_lines_are_skipped_and_answers_alone_are_printed(monkeypatch, capsys):
    """Blank lines cost no turn; stdout holds the answers, a line each, without the stop token; think tags are shown."""
    answers = [[THINK, *ids_of("\nhm\n"), THOUGHT, *ids_of("\n\nParis.")], ids_of("Tokyo.")]
    record = talk(monkeypatch, capsys, "--think", says=["", "  ", FRANCE, "\t", JAPAN, ""], answers=answers)
    assert len(record.turns) == 2 and record.out == "<think>\nhm\n</think>\n\nParis.\nTokyo.\n"
    assert isinstance(record.code, EOFError) or record.code is None


DEFAULTS = [(["--chat"], (0.7, 0.8, 20)), (["--think"], (0.6, 0.95, 20)), (["--chat", "--think"], (0.6, 0.95, 20)), ([], (0, 1, 0)),
            (["--chat", "--temperature", "0.1"], (0.1, 0.8, 20)), (["--think", "--top-p", "0.5"], (0.6, 0.5, 20)),
            (["--chat", "--top-k", "0"], (0.7, 0.8, 0)), (["--chat", "--temperature", "0", "--top-p", "1", "--top-k", "0"], (0, 1, 0)),
            (["--temperature", "1", "--top-k", "7"], (1, 1, 7))]


@pytest.mark.parametrize("args, wanted", DEFAULTS, ids=lambda value: " ".join(map(str, value)) or "plain")
def test_sampling_defaults_are_the_recommended_ones(monkeypatch, capsys, args, wanted):
    """Chat and thinking sample as Qwen recommends, a plain run is greedy, and each value can be overridden."""
    record = talk(monkeypatch, capsys, FRANCE, *args, "--max-tokens", 2)
    assert set(record.sampling) == {wanted}


# ---- Chat as a process

@pytest.mark.parametrize("stdin", [f"{FRANCE}\n\n   \n{JAPAN}\n", f"{FRANCE}\n{JAPAN}"], ids=["blank lines", "no last newline"])
def test_a_conversation_through_a_pipe(stdin):
    """Questions line by line from stdin: only the answers on stdout, exit 0 at the end."""
    result = mini("--chat", "--temperature", 0, stdin=stdin.encode())
    assert result.code == 0 and ">" not in result.out and "<|" not in result.out, result
    first, second = result.out.strip("\n").split("\n")
    assert "Paris" in first and "Tokyo" in second and FRANCE not in result.out + result.err, result


def test_a_conversation_says_which_answers_were_cut():
    """In a conversation each answer cut by --max-tokens is said on stderr."""
    result = mini("--chat", "--temperature", 0, "--max-tokens", 3, stdin=f"{FRANCE}\n{JAPAN}\n".encode())
    assert result.code == 0 and sum("--max-tokens" in line for line in result.lines) == 2, result


def test_one_message_is_answered():
    """--chat MESSAGE answers it: the answer alone on stdout, the framing on stderr; --think implies it and shows its thought."""
    result = mini("--chat", FRANCE, "--temperature", 0, "--max-tokens", 200)
    assert result.code == 0 and "Paris" in result.out and FRANCE not in result.out and result.out.endswith("\n"), result
    assert not result.out.startswith("\n") and "<|" not in result.out and f"Prompt: {FRANCE}" in result.err, result
    thought = mini("--think", JAPAN, "--temperature", 0, "--max-tokens", 200)
    assert thought.code == 0 and JAPAN not in thought.out and "Tokyo" in thought.out, thought


# ---- A real terminal

LAUNCH = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"


class Terminal:
    """The script in a pseudo-terminal of 80 columns, as the foreground program of its own session."""

    def __init__(self, *args, **env):
        self.fd, other = pty.openpty()
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.process = subprocess.Popen([sys.executable, "-c", LAUNCH, str(SCRIPT), *map(str, args)], stdin=other, stdout=other,
                                        stderr=other, start_new_session=True, env=environment(TERM="xterm", **env))
        os.close(other)
        self.all, self.mark = b"", 0

    def read(self, timeout):
        """Reads what is there, waiting for up to `timeout` seconds; False if nothing came."""
        if not select.select([self.fd], [], [], timeout)[0]:
            return False
        try:
            data = os.read(self.fd, 65536)
        except OSError:  # Linux says so when the other side is closed
            data = b""
        self.all += data
        return bool(data)

    def expect(self, pattern, timeout=20):
        """Reads until the pattern is in what came since the last match."""
        end = time.monotonic() + timeout
        while not (match := re.search(pattern, self.all[self.mark:], re.S)):
            assert self.read(max(0.0, end - time.monotonic())), f"no {pattern!r} in {self.all[self.mark:]!r} (all: {self.all!r})"
        self.mark += match.end()

    def prompt(self):
        """Waits until the terminal is quiet at a prompt for the next message."""
        end = time.monotonic() + 20
        while self.read(0.25) or not re.search(rb"(^|\n)[^\n]{0,9}> [^\n]{0,9}$", self.all):
            assert time.monotonic() < end and self.process.poll() is None, self.all[-300:]
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


@pytest.fixture
def terminal():
    """Starts terminals and ends them after the test, whatever happened."""
    opened = []

    def start(*args, **env):
        opened.append(Terminal(*args, **env))
        return opened[-1]
    yield start
    for one in opened:
        one.kill()


def test_a_conversation_in_a_terminal(terminal):
    """Two questions, a blank line between, then Ctrl-D: both answered, exit 0."""
    chat = terminal("--model", MINI, "--chat", "--temperature", 0)
    chat.expect(rb"Model: Qwen3-mini.*\n")
    for typed, answer in (FRANCE, b"Paris"), ("", b"\n"), (JAPAN, b"Tokyo"):
        chat.expect(b"> $")
        chat.send(typed.encode() + b"\n")
        chat.expect(answer)
    chat.expect(b"> $")
    chat.send(b"\x04")
    assert chat.close() == 0 and b"Traceback" not in chat.all and b"llm_inference.py:" not in chat.all, chat.all


def test_ctrl_c_stops_an_answer_and_the_conversation_goes_on(terminal, random_model):
    """Ctrl-C in the middle of an answer brings the prompt back; another turn works; at the prompt it ends with 130."""
    chat = terminal("--model", random_model, "--chat", "--max-tokens", 4000, "--seed", 1)
    chat.expect(b"> $")
    for message in b"go on\n", b"and again\n":
        chat.send(message)
        chat.expect(b"\n.{40}")
        chat.send(b"\x03")
        chat.prompt()
        assert chat.process.poll() is None
    chat.send(b"\x03")
    assert chat.close() == 130 and b"Traceback" not in chat.all, chat.all[-400:]


@pytest.mark.parametrize("args", [[], ["--chat"]], ids=["prompt", "message"])
def test_ctrl_c_ends_a_run_with_130_and_keeps_its_text(terminal, random_model, args):
    """Ctrl-C in a run that is no conversation: exit 130, what was printed stays, no traceback."""
    plain = terminal("--model", random_model, "a question", "--max-tokens", 4000, "--temperature", 0, *args)
    plain.expect(b"Output: .{60}")
    plain.send(b"\x03")
    assert plain.close() == 130, plain.all[-300:]
    assert b"Traceback" not in plain.all and b"Time: " not in plain.all and len(plain.all) > 150, plain.all[-300:]


# ---- --explain

def columns(line):
    """The width of a line in a terminal: wide characters are two, combining ones none."""
    return sum(0 if unicodedata.combining(character) else 2 if unicodedata.east_asian_width(character) in "WF" else 1
               for character in line)


def probabilities(ids, weights, config, layers):
    """The next token's probabilities after the first `layers` layers."""
    config = config | {"num_hidden_layers": layers}
    cache = llm_inference.make_cache(weights, config, len(ids))
    return np.array(mx.softmax(llm_inference.forward(ids, weights, config, cache, 0).astype(mx.float32)))


@pytest.mark.parametrize("prompt", [START, "The capital of", "日本的首都是"])
def test_explain_tells_the_models_real_numbers(prompt):
    """Tokens with ids, a line per layer, the five likeliest with percentages and bars, the cache's bytes, then the answer."""
    weights, config, tokenizer = llm_inference.load(MINI)
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    result = mini("--explain", prompt, "--max-tokens", 3)
    assert result.code == 0, result
    plain = mini(prompt, "--max-tokens", 3)
    assert result.out.endswith(plain.out), result
    lines = result.out.removesuffix(plain.out).splitlines()
    percent = re.compile(r"(\d+(?:\.\d+)?) ?%")
    chances = [line for line in lines if percent.search(line)]
    layers, five = chances[:-5], chances[-5:]

    at = lines.index(chances[0])
    for token in ids:
        at_token = [line for line in lines[:at] if re.search(rf"\b{token}\b", line) and tokenizer.decode([token]).strip() in line]
        assert at_token, f"token {token} is not shown in {lines[:at]}"

    numbers = [int(re.search(r"\d+", line)[0]) for line in chances]
    N = config["num_hidden_layers"]
    assert set(range(1, N)) <= set(numbers) and max(numbers[:len(layers)] + [N]) == N, chances
    assert len(layers) in (N - 1, N), f"{len(layers)} lines for {N} layers"
    for layer, line in enumerate(layers, 1):
        wanted = probabilities(ids, weights, config, layer)
        assert abs(float(percent.search(line)[1]) - 100 * wanted.max()) < 0.6, line
        assert tokenizer.decode([int(wanted.argmax())]).strip() in line, line

    shown = [float(percent.search(line)[1]) for line in five]
    wanted = probabilities(ids, weights, config, N)
    best = np.argsort(-wanted)[:5]
    assert shown == sorted(shown, reverse=True) and sum(shown) <= 100.3 and shown[0] > 0
    assert np.allclose(shown, 100 * wanted[best], atol=0.6), (shown, wanted[best])
    assert tokenizer.decode([int(best[0])]).strip() in five[0]
    bars = [len((re.search(r"[#█▇■▓=▉]+", line) or [""])[0]) for line in five]
    assert bars[0] > 0 and bars == sorted(bars, reverse=True), five

    size = 2 * N * config["num_key_value_heads"] * config["head_dim"] * weights["model.norm.weight"].itemsize
    text = re.sub(r"(?<=\d)[,_](?=\d)", "", "\n".join(lines[at:]))
    assert re.search(rf"\b{size}\b", text) and re.search(rf"\b{size * len(ids)}\b", text), lines


LONGEST = max(KNOWN.get_vocab(with_added_tokens=False), key=lambda piece: len(KNOWN.decode([KNOWN.token_to_id(piece)])))
WIDE = {"300 tokens": "The capital of France is Paris. " * 43, "Chinese": "法国的首都是巴黎。意大利的首都是罗马。日本的首都是" * 3,
        "longest token": KNOWN.decode([KNOWN.token_to_id(LONGEST)]) * 3 + "🦜🏳️‍🌈" + "\n" * 40 + " " * 200 + "مرحبا" + "=" * 100}


@pytest.mark.parametrize("name", WIDE)
def test_explain_fits_80_columns(name, random_model):
    """Whatever the prompt and the likeliest tokens, no line of --explain is wider than 80 columns."""
    prompt = WIDE[name]
    assert name != "300 tokens" or len(ids_of(prompt)) >= 300
    for folder in MINI, random_model:
        result = run("--model", folder, "--explain", prompt, "--max-tokens", 2)
        assert result.code == 0 and prompt in result.out, result
        wide = [line for line in result.out[:result.out.rindex(prompt)].splitlines() if columns(line) > 80]
        assert not wide, wide[:3]


def test_explain_fits_80_columns_with_tokens_that_are_wider(endless):
    """Vocabularies hold tokens of more than 80 characters (runs of spaces, rulers): their lines fit all the same."""
    folder = endless()
    data = json.loads((folder / "tokenizer.json").read_bytes())
    long = "=" * 120, "龘" * 45, " " * 100 + "x"
    plain = dict(special=False, normalized=False, lstrip=False, rstrip=False, single_word=False)
    free = 1 + max(token["id"] for token in data["added_tokens"])
    data["added_tokens"] += [dict(id=free + number, content=text, **plain) for number, text in enumerate(long)]
    (folder / "tokenizer.json").write_text(json.dumps(data))
    prompt = "a".join(long)
    result = run("--model", folder, "--explain", prompt, "--max-tokens", 1)
    shown = result.out[:result.out.rfind(prompt)].splitlines()
    assert result.code == 0 and all(any(str(free + number) in line for line in shown) for number in range(3)), result
    wide = [line for line in shown if columns(line) > 80]
    assert not wide, wide


def test_explain_in_a_chat_shows_the_dialogue():
    """--chat --explain shows the ids of the whole dialogue, control tokens too, before the answer."""
    result = mini("--chat", "--explain", FRANCE, "--temperature", 0)
    assert result.code == 0 and result.out.rstrip().splitlines()[-1].count("Paris"), result
    shown = [set(map(int, re.findall(r"\b\d+\b", line))) for line in result.out[:result.out.index("%")].splitlines()]
    for token in dialogue(FRANCE):  # in their order, a line each
        found = [number for number, line in enumerate(shown) if token in line]
        assert found, f"{token} is not shown: {result.out}"
        shown = shown[found[0] + 1:]
    assert "<|im_start|>" in result.out, result.out
