import argparse

import pytest
import torch

import run
from data import generator
from model import Sizes, Transformer
from objectives import find_objective

TINY = ["--n_layer", "2", "--n_head", "2", "--n_embd", "16", "--block_size", "32", "--batch_size", "4",
        "--eval_iters", "1", "--ngram_rows", "64", "--device", "cpu", "--dtype", "float32", "--log_interval", "1"]


@pytest.fixture
def text(tmp_path, monkeypatch):  # a text file in an empty current folder
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "text.txt"
    with open(argparse.__file__, "rb") as f:
        path.write_bytes(f.read())
    return str(path)


def randomized(n_layer=2, n_head=2, n_embd=16, seed=0, dtype=torch.float32, ngram_rows=64, n_outputs=512):
    """A model in which every parameter is N(0, .3): at zero-init nothing mixes positions, and a test of a
    mask or a cache would pass on anything."""
    sizes = Sizes(n_layer, n_head, n_embd, n_outputs=n_outputs, ngram_rows=ngram_rows)
    return randomize(Transformer(sizes, dtype), seed)


def randomize(module, seed=0):
    g = generator(f"randomize {seed}")
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape, generator=g) * 0.3)
    return module


def settings(name, T, **changes):  # every setting of a run of that objective or mixture, in rows of T
    tiny = dict(objective=name, block_size=T, device="cpu", dtype="float32", batch_size=4, ngram_rows=64)
    return argparse.Namespace(**run.defaults() | tiny | changes)


def clean_windows(hp, B, seed=0):  # (B, n) random bytes without a NUL, in lines
    n, g = find_objective(hp)["n"], generator(f"windows {seed}")
    x = torch.randint(1, 256, (B, n), generator=g)
    return x.masked_fill(torch.rand(B, n, generator=g) < 1 / 12, ord("\n"))
