"""examples/speculative.py: the text is generate's, whoever guesses."""

import random

import mlx.core as mx
import numpy as np
import pytest
from checkpoints import MINI, make_config, random_weights, write_checkpoint
from terminal import assert_one_complaint, mini
from tokenizers import Tokenizer

import llm_inference as llm
from examples import speculative
from examples.common import encode
from examples.drafts import Lookup, Model
from examples.speculative import speculate

MODULE = "examples.speculative"


@pytest.fixture(scope="module")
def model():
    config = make_config(num_hidden_layers=2, vocab_size=64, tie_word_embeddings=False)
    return random_weights(config), config | {"head_dim": 32}


class Fixed:
    """A draft that knows a text, and says it right, or wrong in some places."""

    def __init__(self, text, wrong=()):
        self.text, self.wrong, self.agreed = text, wrong, []

    def propose(self, ids, count, rng):
        assert count >= 0
        places = range(len(ids), min(len(ids) + count, len(self.text)))
        return [((self.text[at] + (at in self.wrong)) % 64, None) for at in places]

    def learn(self, agreed):
        self.agreed.append(agreed)


def alone(ids, model, stop=(), **options):
    return list(llm.generate(ids, *model, stop, **options))


def steps(ids, model, draft, stop=(), **options):
    return list(speculate(ids, *model, stop, draft, **options))


def random_ids(count, seed=0):
    draw = random.Random(seed)
    return [draw.randrange(64) for _ in range(count)]


@pytest.mark.parametrize("wrong", ["never", "always", "thirds", "first"])
def test_greedy_ids_are_those_of_generate(model, wrong):
    for length, count in ((1, 9), (7, 30), (150, 12)):
        ids = random_ids(length)
        wanted = alone(ids, model, max_tokens=count)
        places = range(length + count)
        wrong_places = {
            "never": (),
            "always": places,
            "thirds": places[::3],
            "first": places[length : length + 1],
        }[wrong]
        draft = Fixed(ids + wanted, wrong_places)
        found = steps(ids, model, draft, max_tokens=count, guesses=3)
        assert sum(found, []) == wanted
        assert all(1 <= len(step) <= 4 for step in found)
        if wrong == "never":
            assert all(len(step) == 4 for step in found[:-1]) and len(found) == -(-count // 4)
        if wrong == "always":
            assert len(found) == count and not any(draft.agreed)


def test_what_was_rejected_leaves_no_trace_in_the_cache(model, monkeypatch):
    """Before each pass the cache's rows are those of the text alone."""
    ids = random_ids(5)
    wanted = alone(ids, model, max_tokens=20)
    whole = llm.make_cache(*model, 30)
    llm.hidden_states(ids + wanted, *model, whole, 0)
    original = llm.hidden_states
    checked = []

    def checking(rows, weights, config, cache, offset):
        for one, other in zip(cache, whole):
            assert np.allclose(one[0][:, :offset], other[0][:, :offset], atol=1e-4)
        checked.append(offset)
        return original(rows, weights, config, cache, offset)

    monkeypatch.setattr(llm, "hidden_states", checking)
    draft = Fixed(ids + wanted, range(0, 40, 2))
    assert sum(steps(ids, model, draft, max_tokens=20), []) == wanted
    assert len(checked) > 8


def test_stop_ids_and_the_context_end_it_as_in_generate(model):
    ids = random_ids(6)
    plain = alone(ids, model, max_tokens=20)
    draft = Fixed(ids + plain)
    for stop in ({plain[0]}, {plain[5]}, {plain[7], plain[11]}):
        assert sum(steps(ids, model, draft, stop), []) == alone(ids, model, stop)
    short = (model[0], model[1] | {"max_position_embeddings": 17})
    assert sum(steps(ids, short, draft), []) == alone(ids, short) == plain[:12]
    for bad in ([], [64], [1] * 18):
        with pytest.raises(ValueError):
            steps(bad, short, draft)


def test_a_smaller_model_guesses(model):
    """Its own wrong guesses do not stay in its cache either: the same model is always right."""
    small = make_config(num_hidden_layers=1, vocab_size=64, tie_word_embeddings=False)
    small = (random_weights(small, seed=1), small | {"head_dim": 32})
    for ids in (random_ids(9), random_ids(150)):
        wanted = alone(ids, model, max_tokens=25)
        same = steps(ids, model, Model(*model, {}), max_tokens=25)
        assert sum(same, []) == wanted and [len(step) for step in same] == [5] * 5
        other = steps(ids, model, Model(*small, {}), max_tokens=25)
        assert sum(other, []) == wanted
    draft = Model(*small, {})
    ids = random_ids(9)
    for extra in ([], [3], [60, 2, 1], [60, 2]):  # as if guesses had been rejected
        guesses = [guess for guess, _ in draft.propose(ids + extra, 4, random.Random(0))]
        assert guesses == alone(ids + extra, small, max_tokens=4)
    short = small[1] | {"max_position_embeddings": 12}
    assert len(Model(small[0], short, {}).propose(random_ids(10), 9, random.Random(0))) == 3
    assert Model(small[0], short, {}).propose(random_ids(14), 4, random.Random(0)) == []


def test_lookup_proposes_what_came_after_and_pauses_after_failures():
    draft = Lookup()
    ids = [1, 2, 3, 4, 5, 6, 9, 1, 2, 3]
    assert draft.propose(ids, 4, None) == [(4, None), (5, None), (6, None), (9, None)]
    draft.learn(2)
    ids += [4, 5, 7, 1, 2, 3]
    assert draft.propose(ids, 2, None) == [(4, None), (5, None)]  # the latest place counts
    waits = []
    for _ in range(9):
        draft.learn(0)
        waits.append(0)
        while not draft.propose(ids, 2, None):
            waits[-1] += 1
    assert waits == [2, 4, 8, 16, 32, 64, 64, 64, 64]
    draft.learn(1)
    assert draft.propose(ids, 2, None)
    assert Lookup().propose([1, 2], 4, None) == Lookup().propose([1, 2, 3, 4], 4, None) == []


def test_a_text_that_repeats_itself_takes_fewer_steps():
    """And it is lookup that finds it, on the miniature."""
    weights, config, tokenizer = llm.load(MINI, mx.float32)
    ids = encode("The capital of Italy is Rome. The capital of Germany is Berlin. " * 2, tokenizer)
    stop = config["eos_token_id"]
    found = list(speculate(ids, weights, config, stop, Lookup(), max_tokens=30))
    assert sum(found, []) == alone(ids, (weights, config), stop, max_tokens=30)
    assert len(found) < 30


# ---- With a temperature (tests/reference_batch.py counts 20,000 draws of each)


@pytest.mark.parametrize("drawn", [True, False], ids=["drawn guess", "certain guess"])
def test_the_rule_keeps_the_distribution(drawn, draws=1500):
    p = mx.array([0.5, 0.2, 0.15, 0.1, 0.05, 0.0])
    q = mx.array([0.1, 0.3, 0.0, 0.2, 0.2, 0.2])
    rng = random.Random(1)
    counts = np.zeros(6)
    for _ in range(draws):
        guess = rng.choices(range(6), q.tolist())[0] if drawn else 1
        counts[speculative.judge(guess, p, q if drawn else None, rng)] += 1
    assert chi_square(counts, np.array(p)) < 4, counts


@pytest.mark.parametrize("kind", ["lookup", "model", "top-k"])
def test_the_whole_text_keeps_the_distribution(monkeypatch, kind, tokens=1000):
    """A model that looks at one token only: each is followed by its own shares."""
    V = 5
    tables = [mx.random.normal((V, V), key=mx.random.key(seed)) * 0.7 for seed in (0, 1)]
    monkeypatch.setattr(llm, "hidden_states", lambda rows, weights, *rest: (rows, weights["seed"]))
    monkeypatch.setattr(llm, "head", lambda x, weights, config: tables[x[1]][mx.array(x[0])])
    monkeypatch.setattr(
        llm, "forward", lambda rows, weights, *rest: tables[weights["seed"]][rows[-1]]
    )
    config = make_config(vocab_size=V, max_position_embeddings=10**6, num_hidden_layers=1)
    norm = {"model.norm.weight": mx.ones(1)}
    config |= {"head_dim": 1, "num_key_value_heads": 1}
    sampling = {"temperature": 0.8, "top_k": 3 if kind == "top-k" else 0}
    draft = Lookup()
    if kind == "model":
        draft = Model(norm | {"seed": 1}, config, {"temperature": 1.3})
    counts = np.zeros((V, V))
    last = 0
    passes = 0
    for step in speculate([0], norm | {"seed": 0}, config, (), draft, 3, tokens, 7, **sampling):
        passes += 1
        for token_id in step:
            counts[last, token_id] += 1
            last = token_id
    assert counts.sum() == tokens and passes < 0.95 * tokens
    for row in range(V):
        logits = tables[0][row] / 0.8
        if kind == "top-k":
            logits = mx.where(logits >= mx.sort(logits)[-3], logits, -mx.inf)
        assert chi_square(counts[row], np.array(mx.softmax(logits))) < 5, (row, counts[row])


def chi_square(counts, p):
    """How far the counts are from p, in standard deviations of its square sum."""
    assert not counts[p == 0].any()
    expected = (p * counts.sum())[p > 0]
    free = len(expected) - 1
    return (((counts[p > 0] - expected) ** 2 / expected).sum() - free) / np.sqrt(2 * free)


def test_a_seed_makes_it_repeatable(model):
    ids = random_ids(9)
    options = {"temperature": 1.0, "max_tokens": 15}
    runs = [steps(ids, model, Lookup(), seed=seed, **options) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def test_logits_that_are_not_finite(model):
    broken = model[0] | {"model.norm.weight": mx.full((64,), mx.nan)}
    with pytest.raises(ValueError, match="finite"):
        steps([1], (broken, model[1]), Lookup())
    with pytest.raises(ValueError, match="finite"):
        steps([1], model, Model(broken, model[1], {}))


# ---- The command line


def test_the_command_line_prints_what_the_file_prints(tmp_path):
    text = "The capital of Italy is Rome. The capital of"
    plain = mini(text, "--max-tokens", 12, "--dtype", "float32")
    for flags in ([], ["--draft", MINI]):
        args = (text, "--max-tokens", 12, "--dtype", "float32", *flags)
        result = mini(*args, module=MODULE)
        assert result.code == 0 and result.out == plain.out, result
        assert "12 tokens in" in result.err and "a step" in result.err
    assert "12 tokens in 3 steps, 4.00 a step" in result.err


def test_wrong_use(tmp_path):
    other = write_checkpoint(tmp_path / "other", make_config())
    tokenizer = Tokenizer.from_file(str(other / "tokenizer.json"))
    tokenizer.add_tokens(["another"])
    tokenizer.save(str(other / "tokenizer.json"))
    assert "another vocabulary" in assert_one_complaint(mini("--draft", other, module=MODULE))
    other = write_checkpoint(tmp_path / "small", make_config(vocab_size=2100))
    assert "another vocabulary" in assert_one_complaint(mini("--draft", other, module=MODULE))
    result = mini("--guesses", 0, module=MODULE)
    assert result.code == 2 and "Traceback" not in result.err, result
