"""examples/beam_search.py: against a search that feeds every text from its beginning."""

import itertools

import mlx.core as mx
import numpy as np
import pytest
from checkpoints import MINI, make_config, random_weights
from terminal import START, assert_one_complaint, mini

import llm_inference as llm
from examples import beam_search as module
from examples.beam_search import beam_search
from examples.common import encode

MODULE = "examples.beam_search"
V = 12


@pytest.fixture(scope="module")
def tiny():
    """A vocabulary so small that all texts can be tried."""
    config = make_config(vocab_size=V, num_hidden_layers=2, tie_word_embeddings=False)
    weights = random_weights(config, seed=1)
    weights["lm_head.weight"] *= 2  # more decided: texts end at different lengths
    return weights, config | {"head_dim": 32}


def log_probabilities(ids, model, known={}):  # noqa: B006
    key = (id(model[0]), *ids)
    if key not in known:
        cache = llm.make_cache(*model, len(ids))
        logits = np.array(llm.forward(ids, *model, cache, 0), dtype=np.float64)
        known[key] = logits - np.log(np.exp(logits).sum())
    return known[key]


def slow_search(prompt, model, stop, beams, max_tokens, penalty):
    """The same search on whole texts: no cache, no batch."""
    living, ended = [(0.0, [])], []
    for length in range(1, max_tokens + 1):
        children = []
        for total, ids in living:
            log_p = log_probabilities(prompt + ids, model)
            children += [(total + log_p[token], [*ids, token]) for token in range(len(log_p))]
        children.sort(key=lambda child: -child[0])
        last = length == max_tokens
        for total, ids in children[:beams]:
            if ids[-1] in stop or last:
                ended.append((total / length**penalty, ids))
        ended = sorted(ended, key=lambda pair: -pair[0])[:beams]
        living = [child for child in children if child[1][-1] not in stop][:beams]
        if len(ended) == beams and living[0][0] / length**penalty <= ended[-1][0]:
            break
    return ended


def assert_same(found, wanted):
    assert [ids for _, ids in found] == [ids for _, ids in wanted]
    assert np.allclose([score for score, _ in found], [score for score, _ in wanted], atol=1e-4)


@pytest.mark.parametrize("penalty", [1.0, 0.0, 2.0, -1.0])
@pytest.mark.parametrize("beams", [1, 3, 5])
def test_it_finds_what_a_slow_search_finds(tiny, beams, penalty):
    """Texts that end early and late, and those that max_tokens ends."""
    lengths = set()
    for prompt in ([1], [2, 3], [4, 5, 6]):
        for stop in ([7], [0, 3, 8]):
            options = {"beams": beams, "max_tokens": 7, "length_penalty": penalty}
            found = beam_search(prompt, *tiny, stop, **options)
            assert_same(found, slow_search(prompt, tiny, stop, beams, 7, penalty))
            assert len(found) == beams
            lengths |= {len(ids) for _, ids in found}
    assert beams == 1 or len(lengths) > 2, lengths


def test_with_as_many_beams_as_texts_it_finds_the_best_of_all(tiny):
    scores = {}
    for text in itertools.product(range(V), repeat=3):
        rows = [log_probabilities([1, *text[:end]], tiny)[text[end]] for end in range(3)]
        scores[text] = sum(rows) / 3
    best = sorted(scores, key=lambda text: -scores[text])[:10]
    found = beam_search([1], *tiny, (), beams=V**3, max_tokens=3)
    assert [tuple(ids) for _, ids in found[:10]] == best
    assert len(found) == V**3


def test_a_cache_is_copied_only_for_a_second_child(tiny, monkeypatch):
    """As many copies as there are children beyond the first, counted by the tokens fed."""
    copies = []
    fed = []
    copy, step = module.copy, module.batch_step
    monkeypatch.setattr(module, "copy", lambda cache: copies.append(len(fed)) or copy(cache))

    def recorded(tokens, weights, config, caches, offsets):
        assert len({id(cache) for cache in caches}) == len(caches)
        assert len(set(offsets)) == 1
        fed.append(len(tokens))
        return step(tokens, weights, config, caches, offsets)

    monkeypatch.setattr(module, "batch_step", recorded)
    beam_search([1, 2], *tiny, (), beams=4, max_tokens=6)
    assert fed == [1, 4, 4, 4, 4, 4]
    assert copies.count(1) == 3  # one parent, four children
    assert len(copies) < 3 + 4 * 3
    copies.clear()
    beam_search([1, 2], *tiny, (), beams=1, max_tokens=6)
    assert not copies


def test_the_context_and_bad_prompts(tiny):
    weights, config = tiny
    short = config | {"max_position_embeddings": 6}
    found = beam_search([1, 2, 3], weights, short, (), beams=2, max_tokens=50)
    assert [len(ids) for _, ids in found] == [4, 4]
    assert_same(found, beam_search([1, 2, 3], *tiny, (), beams=2, max_tokens=4))
    for bad in ([], [V], [1] * 7):
        with pytest.raises(ValueError):
            beam_search(bad, weights, short, ())
    broken = weights | {"model.norm.weight": mx.full((64,), mx.nan)}
    with pytest.raises(ValueError, match="finite"):
        beam_search([1], broken, config, ())


def test_a_long_prompt_is_read_in_chunks(tiny, monkeypatch):
    prompt = [1, 2, 3, 4, 5] * 4
    wanted = beam_search(prompt, *tiny, (), beams=3, max_tokens=4)
    monkeypatch.setattr(llm, "CHUNK", 8)
    assert_same(beam_search(prompt, *tiny, (), beams=3, max_tokens=4), wanted)


def test_the_command_line():
    result = mini(START, "--beams", 3, "--max-tokens", 5, "--dtype", "float32", module=MODULE)
    assert result.code == 0, result
    lines = result.out.splitlines()
    assert lines[0].startswith("1 beam,") and lines[2].startswith("3 beams,") and len(lines) == 6
    scores = [float(line.split()[0]) for line in lines[3:]]
    assert scores == sorted(scores, reverse=True) and scores[0] >= float(lines[1].split()[0])
    assert START + " Paris" in lines[3]
    weights, config, tokenizer = llm.load(MINI, mx.float32)
    ids = encode(START, tokenizer)
    found = beam_search(ids, weights, config, config["eos_token_id"], beams=3, max_tokens=5)
    for line, (score, answer) in zip(lines[3:], found):
        assert line == f"{score:9.4f}  {START}{tokenizer.decode(answer)}"


@pytest.mark.parametrize("flags", [["--temperature", "1"], ["--seed", "1"], ["--beams", "0"]])
def test_wrong_flags(flags):
    result = mini(*flags, module=MODULE)
    assert result.code == 2 and "Traceback" not in result.err, result


def test_an_empty_prompt():
    assert_one_complaint(mini("", module=MODULE))
