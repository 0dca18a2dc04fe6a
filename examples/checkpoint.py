"""How is a model written so that half of one is never taken for a whole?

A checkpoint is a folder: the weights in files of 5 GB at most, with an index that says which tensor
is where, config.json, and the tokenizer's files. It is written under another name beside its place,
and renamed when all is there: a disk that is full or Ctrl-C leaves nothing behind.

    python -m examples.quantize tests/Qwen3-mini /tmp/Qwen3-mini-4bit            writes one

Imported by other examples. Described in: huggingface.co/docs/safetensors
"""

import contextlib
import json
import shutil
import tempfile
from pathlib import Path

import mlx.core as mx

SHARD = 5 * 2**30  # bytes in one file, at most


@contextlib.contextmanager
def folder_beside(target):
    """A folder to write to, which becomes target at the end. If something fails, it vanishes."""
    if target.exists() or target.is_symlink():
        raise ValueError(f"{target} exists already")
    parent = target.absolute().parent  # another disk could not rename it
    with tempfile.TemporaryDirectory(prefix=f"{target.name}.unfinished-", dir=parent) as beside:
        folder = Path(beside) / "model"
        folder.mkdir()
        yield folder
        folder.rename(target)


def write(source, folder, weights, changes):
    """The weights in files of at most SHARD bytes, all other files of source, and its config."""
    shards = [{}]
    room = SHARD
    for name, array in weights.items():
        if array.nbytes > room and shards[-1]:
            shards.append({})
            room = SHARD
        shards[-1][name] = array
        room -= array.nbytes
    place = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        mx.save_safetensors(str(folder / file), shard, metadata={"format": "mlx"})
        place |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": sum(array.nbytes for array in weights.values())}}
    index |= {"weight_map": place}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    for path in source.iterdir():
        if path.is_file() and ".safetensors" not in path.name:
            shutil.copyfile(path, folder / path.name)
    config = json.loads((source / "config.json").read_bytes()) | changes
    (folder / "config.json").write_text(json.dumps(config, indent=1))
