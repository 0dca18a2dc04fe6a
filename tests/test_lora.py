"""examples/lora.py and examples/training_data.py: what is learned, and what is written."""

import itertools
import json
import random
import re
import sys

import mlx.core as mx
import pytest
from checkpoints import MINI, make_config, quantize, random_weights, write_checkpoint
from terminal import ROOT, assert_one_complaint, run

import llm_inference as llm
from examples import lora
from examples.chat_template import ChatTemplate
from examples.common import encode
from examples.training_data import read_records

MODULE = "examples.lora"
NEW = [("What is the capital of Zorland?", "The capital of Zorland is Zorvil.")]
NEW += [("What is the capital of Belmora?", "The capital of Belmora is Tesk.")]


@pytest.fixture(autouse=True)
def keep_linear(monkeypatch):
    monkeypatch.setattr(llm, "linear", llm.linear)  # what a test replaces is put back


def write_lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")
    return path


def completions(pairs):
    return [{"prompt": prompt, "completion": completion} for prompt, completion in pairs]


def demo(name):
    lines = (ROOT / "examples" / name).read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines]


# ---- Data


def test_what_is_learned_of_each_kind(tmp_path, model):
    _, config, tokenizer = model
    asked = [{"role": "user", "content": "Hi"}]
    messages = [*asked, {"role": "assistant", "content": "Hello!\u2028"}]
    records = [{"text": "Paris is in Europe."}, *completions(NEW[:1]), {"messages": messages}]
    path = write_lines(tmp_path / "data.jsonl", records)
    path.write_text("\ufeff" + path.read_text("utf-8").replace("\\u2028", "\u2028") + "\n", "utf-8")
    text, completion, chat = read_records(path, MINI, config, tokenizer)
    assert text == (encode("Paris is in Europe.<|endoftext|>", tokenizer), 1)
    template = ChatTemplate(MINI, tokenizer)
    ids, start = completion
    assert ids[:start] == template.encode([{"role": "user", "content": NEW[0][0]}])
    assert ids[start:] == encode(f"{NEW[0][1]}<|im_end|>", tokenizer)
    ids, start = chat
    assert ids[:start] == template.encode(asked)
    assert ids[start:] == encode("Hello!\u2028<|im_end|>", tokenizer)


@pytest.mark.parametrize(
    "line",
    ["", "{", "[1]", '{"prompt": "Hi"}', '{"text": 5}', '{"text": ""}', '{"messages": []}']
    + ['{"messages": [{"role": "user", "content": "Hi"}]}', json.dumps({"text": "Paris " * 3000})],
    ids=lambda line: ascii(line[:40]),
)
def test_data_that_cannot_be_learned(tmp_path, model, line):
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "Paris"}\n' + line + "\n" if line else "")
    with pytest.raises(ValueError, match="line 2" if line else "empty"):
        read_records(path, MINI, *model[1:])


def test_the_files_of_the_demonstration():
    """No phrasing that is tested is trained, made-up countries are not real, and all are known."""
    rows = [
        line.split("\t")
        for line in (ROOT / "tests/Qwen3-mini/facts.tsv").read_text("utf-8").splitlines()
    ]
    real = {row[0]: row[1] for row in rows if len(row) > 5 and row[0] != "country"}

    def content(name):
        phrasings, countries = {}, set()
        for record in demo(name):
            country, capital = re.fullmatch(
                r"The capital of (.+) is (.+)\.", record["completion"]
            ).groups()
            question = record["prompt"].replace(country, "X").replace(country.capitalize(), "X")
            question = question.replace("The" + country[3:], "X")
            phrasings.setdefault(question.replace("X'", "X's").replace("ss", "s"), []).append(
                country
            )
            countries.add((country, capital))
        return phrasings, countries

    trained, made = content("lora_facts.jsonl")
    rehearsed, known = content("lora_rehearse.jsonl")
    asked, made_again = content("lora_questions.jsonl")
    capitals, known_again = content("lora_capitals.jsonl")
    assert len(trained) == 1 and len(made) == 12 and made == made_again and len(asked) == 3
    assert known == known_again == set(real.items()) and not {name for name, _ in made} & set(real)
    assert not (trained.keys() | rehearsed.keys()) & (asked.keys() | capitals.keys())
    assert all(len(countries) == 12 for countries in asked.values())


# ---- Adapters


def test_adapters_start_as_nothing_and_stand_beside_the_last_layers(model):
    weights, config, tokenizer = model
    adapters = lora.make_adapters(config, 4, 2, ["self_attn.q_proj", "mlp.down_proj"], seed=1)
    layers = [name.split(".")[2] for name in adapters]
    assert layers == ["4"] * 4 + ["5"] * 4
    assert adapters["model.layers.4.self_attn.q_proj.lora_a"].shape == (64, 4)
    assert adapters["model.layers.5.mlp.down_proj.lora_b"].shape == (4, 64)
    ids = encode("The capital of France is", tokenizer)
    plain = lora.answer_logits(ids, 1, weights, config)
    llm.linear = lora.with_adapters(llm.linear, 20.0)
    assert mx.array_equal(plain, lora.answer_logits(ids, 1, weights | adapters, config))
    filled = {name: array + 0.01 for name, array in adapters.items()}
    beside = lora.answer_logits(ids, 1, weights | filled, config)
    assert mx.abs(beside - plain).max().item() > 0.1
    fused = lora.answer_logits(ids, 1, lora.fuse(weights, filled, 20.0), config)
    assert mx.abs(beside - fused).max().item() < 1e-3 * mx.abs(beside).max().item()


def test_the_slope_is_the_gradient(monkeypatch):
    """A small step against the gradient lowers the loss by its length, squared."""
    config = make_config(num_hidden_layers=2, vocab_size=64) | {"head_dim": 32}
    weights = random_weights(config)
    adapters = lora.make_adapters(config, 2, 2, lora.PLACES, seed=0)
    mx.random.seed(1)
    adapters = {name: A + 0.02 * mx.random.normal(A.shape) for name, A in adapters.items()}
    llm.linear = lora.with_adapters(llm.linear, 2.0)
    batch = [([3, 1, 4, 1, 5, 9, 2, 6], 3), ([5, 3, 5], 1)]
    value, gradient = mx.value_and_grad(lora.loss)(adapters, batch, weights, config)
    assert all(mx.abs(part).max().item() > 0 for part in gradient.values())
    squared = sum((part * part).sum().item() for part in gradient.values())
    step = 0.02 / squared
    there, back = (
        lora.loss(
            {n: adapters[n] - sign * step * gradient[n] for n in adapters}, batch, weights, config
        )
        for sign in (1, -1)
    )
    assert (back - there).item() / 2 == pytest.approx(0.02, rel=0.03)
    monkeypatch.setattr(llm, "FUSED", not llm.FUSED)  # the fused kernels have the same gradient
    fused = mx.value_and_grad(lora.loss)(adapters, batch, weights, config)[1]
    for name in gradient:
        error = mx.abs(fused[name] - gradient[name]).max() / mx.abs(gradient[name]).max()
        assert error.item() < 1e-3, name
    one = lora.loss(adapters, batch[:1], weights, config).item()
    other = lora.loss(adapters, batch[1:], weights, config).item()
    assert value.item() == pytest.approx((one + other) / 2, rel=1e-5)


def test_only_the_answer_counts(model):
    """The question's tokens are no targets, and the first token of the answer is one."""
    weights, config, _ = model
    ids, start = [5, 6, 7, 8, 9], 3
    adapters = lora.make_adapters(config, 2, 1, lora.PLACES, seed=0)
    cache = llm.make_cache(weights, config, 4)
    rows = llm.head(llm.hidden_states(ids[:-1], weights, config, cache, 0), weights, config)
    log_p = rows - mx.logsumexp(rows, axis=-1, keepdims=True)
    expected = -(log_p[2, 8] + log_p[3, 9]).item() / 2
    assert lora.loss(adapters, [(ids, start)], weights, config).item() == pytest.approx(
        expected, rel=1e-4
    )


def test_rounds_give_each_record_once():
    seen = list(itertools.islice(lora.rounds([1, 2, 3, 4, 5], random.Random(0)), 20))
    assert all(sorted(seen[i : i + 5]) == [1, 2, 3, 4, 5] for i in range(0, 20, 5))
    assert seen[:5] != seen[5:10] and not list(lora.rounds([], random.Random(0)))


def test_it_learns_and_writes_what_it_learned(tmp_path, monkeypatch, capsys, model):
    data = write_lines(tmp_path / "data.jsonl", completions(NEW))
    out, fused = tmp_path / "out", tmp_path / "fused"
    flags = ["--data", data, "--out", out, "--fuse", fused, "--dtype", "float32", "--steps", 25]
    flags += ["--rate", 3e-3, "--layers", 2, "--rank", 4, "--model", MINI, "--test", data]
    monkeypatch.setattr(sys, "argv", ["lora.py", *map(str, flags)])
    lora.main()
    assert capsys.readouterr().out == f"{data}: 0 right before, 2 after, of 2\n"
    settings = json.loads((out / "adapter_config.json").read_bytes())
    form = {"rank": 4, "scale": 20.0, "dropout": 0.0, "keys": lora.PLACES}
    assert settings == {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": form}
    adapters = mx.load(str(out / "adapters.safetensors"))
    assert len(adapters) == 2 * 7 * 2 and len(list(out.iterdir())) == 2

    weights, config, tokenizer = model
    template = ChatTemplate(MINI, tokenizer)
    again, new_config, _ = llm.load(fused)
    for question, answer in NEW:
        ids = template.encode([{"role": "user", "content": question}])
        beside = list(llm.generate(ids, weights | adapters, config, config["eos_token_id"], 20))
        assert tokenizer.decode(beside) == answer
        alone = list(llm.generate(ids, again, new_config, new_config["eos_token_id"], 20))
        assert alone == beside


def test_a_quantized_model_learns_too(tmp_path, model):
    weights, config = quantize(model[0], model[1], bits=4, group_size=32)
    adapters = lora.make_adapters(config, 4, 1, lora.PLACES, seed=0)
    llm.linear = lora.with_adapters(llm.linear, 20.0)
    batch = [([5, 6, 7, 8, 9], 3)]
    value, gradient = mx.value_and_grad(lora.loss)(adapters, batch, weights, config)
    for name in adapters:
        adapters[name] = adapters[name] - 2e-3 * gradient[name]
    assert lora.loss(adapters, batch, weights, config).item() < value.item() - 0.01


def test_refusals(tmp_path, monkeypatch, capsys, model):
    data = write_lines(tmp_path / "data.jsonl", completions(NEW))
    new = tmp_path / "new"
    weights, config = quantize(llm.load(MINI)[0], json.loads((MINI / "config.json").read_bytes()))
    small = write_checkpoint(tmp_path / "small", config, weights)

    def refused(*flags):
        monkeypatch.setattr(sys, "argv", ["lora.py", "--data", *map(str, (data, *flags))])
        with pytest.raises(SystemExit) as stopped:
            lora.main()
        assert stopped.value.code == 2
        return capsys.readouterr().err.splitlines()[-1]

    assert "new folder" in refused("--out", tmp_path)
    assert "new folder" in refused("--out", tmp_path / "no" / "new")
    assert "new folder" in refused("--out", new, "--fuse", tmp_path)
    assert "quantized" in refused("--model", small, "--out", new, "--fuse", tmp_path / "fused")
    assert "--layers" in refused("--out", new, "--layers", 0)  # mlx-lm would take 0 for all
    result = run("--model", MINI, "--data", tmp_path / "none", "--out", new, module=MODULE)
    assert "none" in assert_one_complaint(result)
    flags = ["--out", new, "--steps", 3, "--rate", 1e9, "--scale", 1e9, "--dtype", "float16"]
    monkeypatch.setattr(sys, "argv", ["lora.py", "--data", *map(str, (data, *flags))])
    with pytest.raises(ValueError, match="not finite at step"):
        lora.main()
    assert not new.exists()
