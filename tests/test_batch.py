"""examples/batch.py: many texts at once, each as if it were alone."""

import random

import mlx.core as mx
import numpy as np
import pytest
from checkpoints import MINI, make_config, random_weights
from terminal import START, assert_one_complaint, mini, run

import llm_inference as llm
from examples import batch
from examples.batch import answer_all, batch_step
from examples.common import encode
from examples.sequence import Sequence

MODULE = "examples.batch"
LENGTHS = [1, 2, 3, 17, 40, 5, 129, 8, 1, 60, 4, 9]
TOKENS = [5, 1, 12, 3, 9, 2, 7, 20, 1, 4, 6, 11]


@pytest.fixture(scope="module")
def model():
    config = make_config(num_hidden_layers=2, tie_word_embeddings=False)  # tied: no variety
    return random_weights(config), config | {"head_dim": 32}


def prompts(lengths=LENGTHS, vocabulary=2048, seed=0):
    draw = random.Random(seed)
    return [[draw.randrange(vocabulary) for _ in range(length)] for length in lengths]


def alone(ids, weights, config, stop=(), **options):
    return list(llm.generate(ids, weights, config, stop, **options))


def together(sequences, slots, model, stop=()):
    ended = list(answer_all(sequences, slots, *model, stop))
    assert ended == sequences
    return [sequence.answer for sequence in ended]


@pytest.mark.parametrize("fused", [False, True])
def test_each_row_of_a_step_is_that_texts_forward(model, monkeypatch, fused):
    """Ragged pasts, some empty; the caches get the same rows, each its own."""
    monkeypatch.setattr(llm, "FUSED", fused)
    texts = prompts([1, 7, 30, 2, 1])
    wanted = []
    pasts = []
    for ids in texts:
        caches = [llm.make_cache(*model, 32) for _ in range(2)]
        for cache in caches:
            for position, token_id in enumerate(ids[:-1]):
                llm.forward([token_id], *model, cache, position)
        wanted.append(llm.forward(ids[-1:], *model, caches[0], len(ids) - 1))
        pasts.append(caches)
    caches = [past[1] for past in pasts]
    found = batch_step([ids[-1] for ids in texts], *model, caches, [len(ids) - 1 for ids in texts])
    assert found.shape == (5, 2048)
    assert np.abs(np.array(found) - np.array(mx.stack(wanted))).max() < 1e-4
    for (single, cache), ids in zip(pasts, texts):
        for layer in range(2):
            for one, other in zip(single[layer], cache[layer]):
                assert np.allclose(one, other, atol=1e-5)
                assert not np.array(other)[:, len(ids) :].any()  # nothing after the text


@pytest.mark.parametrize("slots", [1, 2, 5, 16])
def test_answers_are_those_of_single_runs(model, slots):
    """Ragged prompts and answers, in another order for each number of slots."""
    jobs = list(zip(prompts(), TOKENS))
    random.Random(slots).shuffle(jobs)
    sequences = [Sequence(ids, model[1], max_tokens=count) for ids, count in jobs]
    found = together(sequences, slots, model)
    assert found == [alone(ids, *model, max_tokens=count) for ids, count in jobs]
    assert all(sequence.ended == "length" for sequence in sequences)


def test_stop_ids_end_a_text_as_in_generate(model):
    plain = [alone(ids, *model, max_tokens=12) for ids in prompts()]
    stop = {answer[4] for answer in plain[::2]}
    sequences = [Sequence(ids, model[1], max_tokens=12) for ids in prompts()]
    found = together(sequences, 3, model, stop)
    assert found == [alone(ids, *model, stop, max_tokens=12) for ids in prompts()]
    assert {sequence.ended for sequence in sequences} == {"stop", "length"}
    for sequence, answer in zip(sequences, found):
        assert (sequence.ended == "length") == (len(answer) == 12)


def test_each_has_its_own_seed_and_sampling(model):
    options = [
        {"seed": seed, "temperature": [0, 0.7, 1.5][seed % 3], "top_p": 0.9, "top_k": seed * 10}
        for seed in range(len(LENGTHS))
    ]
    sequences = [Sequence(ids, model[1], 8, **one) for ids, one in zip(prompts(), options)]
    wanted = [alone(ids, *model, max_tokens=8, **one) for ids, one in zip(prompts(), options)]
    assert together(sequences, 4, model) == wanted
    other = [Sequence(prompts()[1], model[1], 8, seed=seed, temperature=1.0) for seed in range(2)]
    assert other[0].answer == other[1].answer == []
    first, second = together(other, 2, model)
    assert first != second


def test_a_slot_is_taken_again_at_once_and_caches_are_let_go(model, monkeypatch):
    sizes = []

    def counting(token_ids, *rest):
        sizes.append(len(token_ids))
        return batch_step(token_ids, *rest)

    monkeypatch.setattr(batch, "batch_step", counting)
    counts = [2, 9, 1, 4, 3, 1, 6]
    sequences = [Sequence([7, 8], model[1], max_tokens=count) for count in counts]
    sequences.insert(3, Sequence([], model[1]))  # a bad one takes no slot
    together(sequences, 2, model)
    assert sum(sizes) == sum(counts)
    assert sizes == 10 * [2] + 6 * [1]  # until only one is left
    assert all(sequence.cache is None for sequence in sequences)


def test_a_long_prompt_does_not_stall_the_others(model, monkeypatch):
    """It is read a chunk a step, while the others get their tokens."""
    monkeypatch.setattr(llm, "CHUNK", 16)
    long = prompts([100])[0]
    first = Sequence([5], model[1], max_tokens=30)
    second = Sequence(long, model[1], max_tokens=4)
    for step in range(6):
        ready = batch.advance([first, second], *model, ())
        assert ready == [first] and len(first.answer) == step + 1
        assert second.offset == 16 * (step + 1)
    batch.advance([first, second], *model, ())
    assert len(second.answer) == 1
    while not (first.ended and second.ended):
        batch.advance([first, second], *model, ())
    assert first.answer == alone([5], *model, max_tokens=30)
    assert second.answer == alone(long, *model, max_tokens=4)
    assert batch.advance([first, second], *model, ()) == []


def test_a_step_reads_one_chunk_in_all(model, monkeypatch):
    monkeypatch.setattr(llm, "CHUNK", 16)
    texts = prompts([30, 30, 6])
    sequences = [Sequence(ids, model[1], max_tokens=3) for ids in texts]
    read = []
    for _ in range(4):
        batch.advance(sequences, *model, ())
        read.append([sequence.offset for sequence in sequences])
    assert read == [[16, 0, 0], [30, 3, 0], [31, 19, 0], [32, 30, 6]]
    wanted = [alone(ids, *model, max_tokens=3) for ids in texts]
    assert together(sequences, 3, model) == wanted


def test_a_given_cache_is_continued(model):
    ids = prompts([20])[0]
    cache = llm.make_cache(*model, 12)
    list(llm.generate(ids[:12], *model, (), max_tokens=1, cache=cache))
    sequences = [
        Sequence(ids[12:], model[1], 9, cache=cache, offset=12),
        Sequence(ids[:4], model[1], 9),
    ]
    assert together(sequences, 2, model) == [
        alone(ids, *model, max_tokens=9),
        alone(ids[:4], *model, max_tokens=9),
    ]


@pytest.mark.parametrize("bad", [[], [-1], [2048], [1] * 4097], ids=["none", "low", "high", "long"])
def test_a_bad_prompt_fails_alone(model, bad):
    texts = prompts([3, 9])
    sequences = [Sequence(ids, model[1], 5) for ids in (texts[0], bad, texts[1])]
    assert sequences[1].ended == "error"
    found = together(sequences, 1, model)
    assert found == [
        alone(texts[0], *model, max_tokens=5),
        [],
        alone(texts[1], *model, max_tokens=5),
    ]
    with pytest.raises(ValueError) as single:
        alone(bad, *model, max_tokens=5)
    assert str(single.value) == sequences[1].error
    assert f"the prompt ends at {len(bad)}: " in sequences[1].error


def test_logits_that_are_not_finite_fail_alone():
    config = make_config(num_hidden_layers=2, tie_word_embeddings=False)
    weights = random_weights(config)
    weights["model.embed_tokens.weight"][9] = mx.nan
    model = (weights, config)
    sequences = [Sequence(ids, config, 5) for ids in ([1, 2], [1, 9], [3])]
    found = together(sequences, 3, model)
    assert [sequence.ended for sequence in sequences] == ["length", "error", "length"]
    assert "finite" in sequences[1].error
    assert found == [alone([1, 2], *model, max_tokens=5), [], alone([3], *model, max_tokens=5)]


def test_the_end_of_the_context_ends_an_answer(model):
    config = model[1] | {"max_position_embeddings": 20}
    sequences = [Sequence(ids, config, 50) for ids in prompts([20, 15, 1])]
    found = together(sequences, 3, (model[0], config))
    assert [len(answer) for answer in found] == [1, 6, 20]
    assert found == [alone(ids, model[0], config, max_tokens=50) for ids in prompts([20, 15, 1])]


# ---- The command line


def test_the_answers_of_a_file_come_in_order(tmp_path):
    chat = "<|im_start|>user Where is Paris?<|im_end|><|im_start|>assistant"  # then a line break
    lines = [START, "日本的首都是", "", chat, "The capital of Japan is"]
    file = tmp_path / "prompts.txt"
    file.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode() + b"\nThe capital of \xff")
    result = mini(file, "--slots", 2, "--max-tokens", 6, "--dtype", "float32", module=MODULE)
    complaint = assert_one_complaint(result)
    assert "1 of 6 lines" in complaint
    assert "(line 3: the prompt ends at 0" in result.err
    assert "Time: " in result.err and "2 slots" in result.err and "tokens/s" in result.err
    weights, config, tokenizer = llm.load(MINI, mx.float32)
    shown = result.out.split("\n")
    assert len(shown) == 7 and shown[2] == shown[6] == ""
    assert shown[5].startswith("The capital of \ufffd") and "\\n" in shown[3]
    for number in (0, 1, 3, 4):
        ids = encode(lines[number], tokenizer)
        answer = alone(ids, weights, config, config["eos_token_id"], max_tokens=6)
        text = lines[number] + tokenizer.decode(answer, skip_special_tokens=False)
        assert shown[number] == text.replace("\n", "\\n")


def test_stdin_and_wrong_use():
    result = mini("-", "--max-tokens", 2, module=MODULE, stdin=b"Paris")
    assert result.code == 0 and result.out.startswith("Paris") and result.out.count("\n") == 1
    result = mini("-", module=MODULE)
    assert result.code == 0 and result.out == "", result
    assert "nowhere.txt" in assert_one_complaint(mini("nowhere.txt", module=MODULE))
    result = run("--slots", "0", module=MODULE)
    assert result.code == 2 and "Traceback" not in result.err, result
