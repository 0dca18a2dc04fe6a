"""generate in other threads, seeds, the growing cache, ids of any kind, and what load does for the examples."""

import json
import threading

import checkpoints
import mlx.core as mx
import numpy as np
import pytest

import llm_inference as llm

LARGE = dict(hidden_size=1024, intermediate_size=1100, num_hidden_layers=2, vocab_size=1200)


def in_thread(work):
    """What `work` returns, or raises, in a thread of its own."""
    found = []

    def run():
        try:
            found.append(work())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A bfloat16 checkpoint with matrices above 2^20 numbers, which a CPU computes on two streams."""
    config = checkpoints.make_config(**LARGE)
    folder = tmp_path_factory.mktemp("large")
    return checkpoints.write_checkpoint(folder, config, dtype=mx.bfloat16)


@pytest.fixture(scope="module")
def small():
    return llm.load(checkpoints.MINI, mx.float32)


@pytest.mark.parametrize(
    "draw", [{}, {"temperature": 1.0, "top_p": 0.9, "top_k": 40}], ids=["greedy", "drawn"]
)
def test_any_thread_may_load_make_the_cache_and_ask_for_the_next_id(large, draw):
    """Each of the three in a thread of its own, and every `next` in another: the same ids as in one."""
    weights, config, _ = llm.load(large)
    assert max(array.size for array in weights.values()) > 2**20
    want = list(llm.generate([5, 6, 7], weights, config, [], 6, seed=3, **draw))
    weights, config, _ = in_thread(lambda: llm.load(large))
    cache = in_thread(lambda: llm.make_cache(weights, config, 4))
    tokens = in_thread(
        lambda: llm.generate([5, 6, 7], weights, config, [], 6, seed=3, cache=cache, **draw)
    )
    assert [in_thread(lambda: next(tokens)) for _ in range(6)] == want
    assert (
        in_thread(lambda: list(llm.generate([5, 6, 7], weights, config, [], 6, seed=3, **draw)))
        == want
    )


def test_a_seed_decides_in_every_thread_and_none_does_not(small):
    weights, config, _ = small

    def text(seed):
        return list(llm.generate([366, 293], weights, config, [], 12, seed=seed, temperature=3.0))

    assert in_thread(lambda: text(7)) == in_thread(lambda: text(7)) == text(7) != text(8)
    assert in_thread(lambda: text(None)) != in_thread(lambda: text(None))


def test_a_longer_limit_does_not_change_what_a_seed_gives(small):
    weights, config, _ = small
    short = list(llm.generate([366, 293], weights, config, [], 5, seed=1, temperature=2.0))
    assert (
        list(llm.generate([366, 293], weights, config, [], 9, seed=1, temperature=2.0))[:5] == short
    )


def test_a_key_gives_the_same_draw_in_any_thread():
    def draws():
        keys = [mx.random.key(seed) for seed in range(20)]
        return [
            llm.sample(mx.zeros(1000), 1.0, top_p=0.9, top_k=500, key=key).item() for key in keys
        ]

    assert in_thread(draws) == draws() and len(set(draws())) > 10


@pytest.mark.parametrize(
    "size, needed, limit, want",
    [
        (0, 5, 10_000, 256),
        (0, 400, 10_000, 400),
        (0, 5, 9, 9),
        (100, 100, 500, 100),
        (100, 101, 10_000, 356),
    ]
    + [
        (2000, 2001, 10_000, 2500),
        (2000, 2001, 2100, 2100),
        (2000, 2700, 10_000, 2700),
        (5, 6, 6, 6),
    ],
)
def test_a_cache_grows_by_a_quarter_and_at_least_256_rows(small, size, needed, limit, want):
    """Never past the limit; what it held stays, all layers are alike."""
    weights, config, _ = small
    cache = llm.make_cache(weights, config, size)
    for keys, values in cache:
        keys[:, :size] = 1.5
        values[:, :size] = 2.5
    llm.grow_cache(cache, needed, limit)
    shape = (config["num_key_value_heads"], want, config["head_dim"])
    assert {rows.shape for pair in cache for rows in pair} == {shape} and len(cache) == 6
    for keys, values in cache:
        assert (keys[:, :size] == 1.5).all() and (values[:, :size] == 2.5).all()
        assert not keys[:, size:].any() and not values[:, size:].any()


def test_growing_holds_only_one_layer_twice():
    """16 layers: all at once would peak at more than twice what is held in the end."""
    config = checkpoints.make_config(num_hidden_layers=16, head_dim=64)
    weights = {"model.norm.weight": mx.zeros(8)}
    cache = llm.make_cache(weights, config, 4000)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    llm.grow_cache(cache, 4001, 10_000)
    mx.eval(cache)
    held = sum(rows.nbytes for pair in cache for rows in pair)
    assert (
        mx.get_peak_memory() - before < 0.6 * held
    )  # the quarter that is new, and one layer twice


def test_memory_follows_the_text_not_the_limit():
    """One token of at most 20,000: a cache for all would be 41 MB here."""
    config = checkpoints.make_config(num_hidden_layers=2, head_dim=64) | {
        "max_position_embeddings": 40960
    }
    weights = checkpoints.random_weights(config)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    tokens = llm.generate([5, 6], weights, config, [], 20_000)
    next(tokens)
    assert mx.get_peak_memory() - before < 4e6


class Scalar:
    """An id as torch hands it out: a number only when asked."""

    def __init__(self, number):
        self.number = number

    def __int__(self):
        return self.number


KINDS = {
    "tuple": tuple,
    "iterator": iter,
    "numpy": np.array,
    "mlx": mx.array,
    "numpy's numbers": lambda ids: map(np.int64, ids),
    "torch's numbers": lambda ids: [Scalar(number) for number in ids],
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_any_iterable_of_ids_is_a_prompt(small, kind):
    weights, config, _ = small
    want = list(llm.generate([366, 293, 285], weights, config, [], 4))
    assert list(llm.generate(kind([366, 293, 285]), weights, config, [], 4)) == want


def test_lazy_leaves_the_weights_on_disk(large):
    """Nothing is read until a tensor is used; then the numbers are the same."""
    mx.clear_cache()
    before = mx.get_active_memory()
    weights, _, _ = llm.load(large, lazy=True)
    assert mx.get_active_memory() - before < 1e6
    assert all(mx.array_equal(array, weights[name]) for name, array in llm.load(large)[0].items())


@pytest.mark.parametrize("kind", ["yarn", "linear"])
def test_stretched_rope_lets_a_longer_context_through(tmp_path, kind):
    """Refused by name without the flag; with it, the keys of the rotation are in the config."""
    scaling = {"rope_type": kind, "factor": 4.0, "original_max_position_embeddings": 1024}
    config = checkpoints.make_config(num_hidden_layers=1, rope_scaling=scaling)
    folder = checkpoints.write_checkpoint(tmp_path, config)
    with pytest.raises(ValueError, match=kind):
        llm.load(folder)
    assert llm.load(folder, stretched_rope=True)[1]["factor"] == 4.0


def test_settings_stored_in_a_tokenizer_do_not_touch_the_prompt(tmp_path):
    folder = checkpoints.write_checkpoint(tmp_path, checkpoints.make_config(num_hidden_layers=1))
    content = json.loads((folder / "tokenizer.json").read_bytes())
    content["truncation"] = {
        "direction": "Right",
        "max_length": 8,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    content["padding"] = {
        "strategy": {"Fixed": 30},
        "direction": "Right",
        "pad_to_multiple_of": None,
    }
    content["padding"] |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>"}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    text = "The capital of France is Paris. The capital of Italy is Rome."
    assert llm.load(folder)[2].encode(text).ids == llm.load(checkpoints.MINI)[2].encode(text).ids
