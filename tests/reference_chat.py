#!/usr/bin/env python3
"""The chat's ids against apply_chat_template of transformers: the published template, the
miniature's, and those of other families, over several turns.

python -m pytest tests/reference_chat.py
"""

import functools
import json
import random
import shutil
import subprocess
import sys

import mlx.core as mx
import pytest
from checkpoints import MINI, make_config, write_checkpoint
from terminal import PUBLISHED, ROOT, environment
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer

from examples.chat_template import ChatTemplate

TURNS = {
    "one": ["What is the capital of Japan?"],
    "several": ["Hi", "日本的首都是哪里？", "  spaces  and a tab\t, café 🦜 1️⃣ "],
    "line ends": ["\nHi", "\n\n  indented\n\n\nlines\n", "\t\n"],
    "quotes": [
        '"it\'s" <b>&amp;</b> {{ no }} {% template %}',
        "\\n [INS]x",
        "user: a\nassistant:",
    ],
}
ANSWERS = ["Hello! 你好。", "\n东京。\n\n- Tokyo\n", " Bye "]
PARTS = ["Hi", " ", "\n", "\n\n", "\t", "日本", "é", "🦜", ":", "a b", "<", "|", ">", "'s", "123"]

# ---- Templates as other families have them (written for this test), and the marks they need.

CHATML = """{% if messages[0].role != 'system' %}{{ '<|im_start|>system\\nYou help.<|im_end|>\\n' }}{% endif %}
{% for m in messages %}
{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' + '\\n' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
HEADERS = """{{- bos_token }}
{%- for m in messages %}
    {{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' + m['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""
INSTRUCTIONS = """{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]\
{% elif m.role == 'assistant' %}{% generation %} {{ m.content }}{{ eos_token }}{% endgeneration %}\
{% else %}{{ raise_exception('no ' + m.role) }}{% endif %}{% endfor %}"""
ROLES = """{% for m in messages %}
{{ '<|' + m['role'] + '|>\\n' + m['content'] + eos_token + '\\n' }}
{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}
{% endfor %}"""
TURN_MARKS = """{{ bos_token }}{% for m in messages %}{% set role = 'model' if m.role == 'assistant' else m.role %}
<start_of_turn>{{ role }}
{{ m.content | trim }}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""
FAMILIES = {
    "chatml": (CHATML, [], {}),
    "headers": (
        HEADERS,
        ["<|begin|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        {"bos_token": "<|begin|>", "eos_token": "<|eot_id|>"},
    ),
    "instructions": (
        INSTRUCTIONS,
        ["<s>", "</s>", "[INST]", "[/INST]"],
        {
            "bos_token": {"__type": "AddedToken", "content": "<s>", "special": True},
            "eos_token": {"__type": "AddedToken", "content": "</s>", "special": True},
        },
    ),
    "roles": (ROLES, ["<|user|>", "<|assistant|>", "<|system|>", "</s>"], {"eos_token": "</s>"}),
    "turn marks": (
        TURN_MARKS,
        ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"],
        {"bos_token": "<bos>", "eos_token": "<eos>"},
    ),
}


def added(names, first, **flags):
    usual = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    usual["special"] = True
    tokens = enumerate(names, first)
    return [usual | flags | {"id": number, "content": name} for number, name in tokens]


def metaspace():
    """A tokenizer of the older kind: a space becomes a sign, also before the first word."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Metaspace()
    alphabet = ["<unk>", *[f"<0x{byte:02X}>" for byte in range(256)]]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=alphabet, show_progress=False)
    tokenizer.train_from_iterator([MINI.joinpath("README.md").read_text()] * 3, trainer)
    return json.loads(tokenizer.to_str())


@pytest.fixture(params=["byte level", "byte level, strip", "metaspace"])
def family_folder(request, tmp_path):
    """write(family): a folder with that template and its marks in one of three tokenizers."""

    def write(family):
        source, marks, names = FAMILIES[family]
        if request.param == "metaspace":
            data = metaspace()
            marks = marks or ["<|im_start|>", "<|im_end|>"]
            settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"}
            first = len(data["model"]["vocab"])
        else:
            data = json.loads((MINI / "tokenizer.json").read_bytes())
            settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
            first = 1 + max(token["id"] for token in data["added_tokens"])
        strip = request.param == "byte level, strip"
        data["added_tokens"] += added(marks, first, lstrip=strip, rstrip=strip)
        (tmp_path / "tokenizer.json").write_text(json.dumps(data))
        settings |= {"chat_template": source} | names
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        return tmp_path

    return write


@functools.cache
def tools(folder, think):
    """Tokenizer, our template, their tokenizer: the published ones take seconds to load."""
    known = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ours = ChatTemplate(folder, known, think=think)
    return known, ours, AutoTokenizer.from_pretrained(folder)


def compare(folder, turns, think=False, system=None):
    """Over the turns: our ids are theirs. An answer goes through its ids, as in a chat."""
    known, ours, theirs = tools(folder, think)
    first = [{"role": "system", "content": system}] if system else []
    mine, real = list(first), list(first)
    for turn, answer in zip(turns, ANSWERS):
        mine.append({"role": "user", "content": turn})
        real.append({"role": "user", "content": turn})
        found = ours.encode(mine)
        flags = {"add_generation_prompt": True, "enable_thinking": think}
        wanted = theirs.apply_chat_template(real, return_dict=True, **flags)["input_ids"]
        assert found == wanted, (known.decode(found, skip_special_tokens=False), len(real))
        answer = f"<think>\nA question.\n</think>\n\n{answer}" if think else answer
        ids = known.encode(answer, add_special_tokens=False).ids
        answer = known.decode(ids, skip_special_tokens=False)
        mine.append({"role": "assistant", "content": ours.answer_content(ids)})
        real.append({"role": "assistant", "content": answer})


@pytest.fixture(scope="session")
def published(tmp_path_factory):
    """Random weights in a tiny model under the published tokenizer and chat template."""
    if not PUBLISHED:
        pytest.skip("the published tokenizer is not at hand")
    sizes = {"vocab_size": 151936, "hidden_size": 32, "num_hidden_layers": 1}
    config = make_config(**sizes, eos_token_id=151645)
    folder = tmp_path_factory.mktemp("published")
    return write_checkpoint(folder, config, dtype=mx.bfloat16, tokenizer_from=PUBLISHED)


@pytest.mark.parametrize("system", [None, "Be brief.\n"], ids=["", "system"])
@pytest.mark.parametrize("think", [False, True], ids=["plain", "think"])
@pytest.mark.parametrize("turns", TURNS.values(), ids=TURNS)
@pytest.mark.parametrize("which", ["published", "miniature"])
def test_ids_of_qwen3s_templates(which, turns, think, system, request):
    folder = request.getfixturevalue("published") if which == "published" else MINI
    compare(folder, turns, think, system)


@pytest.mark.parametrize("turns", TURNS.values(), ids=TURNS)
@pytest.mark.parametrize("family", FAMILIES)
def test_ids_of_foreign_templates(family, turns, family_folder):
    compare(family_folder(family), turns)


def test_ids_of_random_messages():
    """Pieces in any order, also at the edges, where they meet the template's text."""
    draw = random.Random(3)
    for _ in range(150):
        turns = ["".join(draw.choices(PARTS, k=draw.randint(1, 6))) for _ in range(3)]
        compare(MINI, turns, think=draw.random() < 0.5)


def test_a_template_in_a_file_of_its_own_comes_first(tmp_path):
    """As transformers saves it today."""
    for name in "tokenizer.json", "tokenizer_config.json":
        shutil.copy(MINI / name, tmp_path)
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    compare(tmp_path, TURNS["several"])


# ---- The program

RECORD = """
import json, sys
import llm_inference
from examples import chat

answers = json.loads(sys.argv.pop(1))
held, seen = [], []
find = llm_inference.load


def load(*arguments):
    global tokenizer
    found = find(*arguments)
    tokenizer = found[2]
    return found


def generate(prompt_ids, *_, offset=0, **__):
    held[offset:] = prompt_ids  # what the model has read when the answer begins
    seen.append(list(held))
    for token in tokenizer.encode(answers[len(seen) - 1], add_special_tokens=False).ids:
        held.append(token)
        yield token


llm_inference.load, llm_inference.generate = load, generate
chat.main()
sys.stderr.write("SEEN" + json.dumps(seen))
"""


@pytest.mark.parametrize("turns", ["one", "several"])
@pytest.mark.parametrize("think", [False, True], ids=["plain", "think"])
@pytest.mark.parametrize("which", ["published", "miniature"])
def test_the_program_feeds_the_templates_ids(which, think, turns, request):
    """What the cache holds when an answer begins, turn by turn, through a pipe."""
    folder = request.getfixturevalue("published") if which == "published" else MINI
    texts = ["Hello! 你好。", "东京。\n\n- Tokyo", "Bye"]
    thought = "<think>\nA question.\n</think>\n\n" if think else ""
    answers = [thought + text for text in texts]
    flags = ["--think"] if think else []
    done = subprocess.run(
        [sys.executable, "-c", RECORD, json.dumps(answers), "--model", str(folder), *flags],
        input="\n".join(TURNS[turns]) + "\n",
        capture_output=True,
        encoding="utf-8",
        cwd=ROOT,
        env=environment(),
    )
    assert "SEEN" in done.stderr, done.stderr
    tokenizer, messages, expected = AutoTokenizer.from_pretrained(folder), [], []
    for turn, answer in zip(TURNS[turns], answers):
        messages.append({"role": "user", "content": turn})
        settings = {"add_generation_prompt": True, "enable_thinking": think}
        ids = tokenizer.apply_chat_template(messages, return_dict=True, **settings)
        expected.append(ids["input_ids"])
        messages.append({"role": "assistant", "content": answer})
    assert json.loads(done.stderr.partition("SEEN")[2]) == expected
