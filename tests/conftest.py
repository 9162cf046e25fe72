import argparse
import os
import shutil
import signal

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

import run
from data import UserError, make_rng
from run import get_members
from model import ModelConfig, Transformer
from objectives import OBJECTIVES

torch.set_num_threads(1)                        # on tensors this small, several threads are slower
os.fsync = lambda _: None                       # waiting for the disk proves nothing here
signal.signal(signal.SIGINT, signal.default_int_handler)        # ignored if pytest is a background job of a shell
NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
TINY = ["--n_layer", "2", "--n_head", "2", "--n_embd", "16", "--block_size", "32", "--batch_size", "4",
        "--eval_iters", "1", "--ngram_rows", "64", "--device", "cpu", "--dtype", "float32", "--log_interval", "1"]
# objectives that write what is missing, byte by byte
WRITE_HOLES = [name for name, objective in OBJECTIVES.items() if getattr(objective.uses.get("infill"), "prompt", None)]


def tiny(*words):  # flags of a tiny run, then these; of a flag that is given twice, the last one counts
    return [*TINY, *words]


@pytest.fixture(autouse=True)
def restore_torch_switches():  # a run sets them for the whole process
    threads = torch.get_num_threads()
    precision = torch.get_float32_matmul_precision()
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    yield
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(precision)
    torch.backends.cuda.enable_cudnn_sdp(cudnn)
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def text(tmp_path, monkeypatch):  # a text file in an empty current folder
    monkeypatch.chdir(tmp_path)
    return shutil.copyfile(argparse.__file__, os.path.join(tmp_path, "text.txt"))


@pytest.fixture
def refuses(capsys):
    """refuses(hint, function, *args) checks that function(*args) raises a UserError of one line that contains the hint.
    Returns its stdout and that line."""
    def check(hint, function, *args):
        capsys.readouterr()
        line = ""
        try:
            function(*args)
        except UserError as e:                  # the exception is not kept: it would keep the run's files open
            line = str(e)
        assert hint in line and line.count("\n") == 0, line
        return capsys.readouterr().out, line
    return check


# ---- what the tests hold attention against. A fork with other rules states them here
def may_attend(block, q, k, prefix):
    """The rule of block 0, 1, ...: may the query at position q attend to the key at position k? The arguments
    broadcast. If a batch has a mask, a block attends where the mask and may_attend(block, q, k, T) are both True."""
    return (k <= q) | (k < prefix)


def kv_head(h):  # query head -> the head of keys and values that it reads: h // 2 if each is shared by two
    return h


def randomized(n_layer=2, n_head=4, n_embd=16, seed=0, dtype=torch.float32, ngram_rows=64, n_outputs=512):
    """Returns a model whose parameters are N(0, .3). As initialized, no layer mixes positions, so even a wrong mask
    would pass its test."""
    config = ModelConfig(n_layer, n_head, n_embd, n_outputs=n_outputs, ngram_rows=ngram_rows)
    return randomize(Transformer(config, dtype), seed)


def randomize(module, seed=0):
    g = make_rng(f"randomize {seed}")
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape, generator=g) * 0.3)
    return module


def settings(name, T, **changes):  # -> all settings of a run of this objective or mixture, in rows of T positions
    tiny = dict(objective=name, block_size=T, device="cpu", dtype="float32", batch_size=4, ngram_rows=64,
                init_step=0, checkpoint="", progress=1.0)
    return argparse.Namespace(**run.defaults() | tiny | changes)


def clean_windows(hp, B, seed=0):  # -> (B, n) random bytes without NULs; one in 12 is a newline
    n = get_members(hp)[0].n
    g = make_rng(f"windows {seed}")
    x = torch.randint(1, 256, (B, n), generator=g)
    return x.masked_fill(torch.rand(B, n, generator=g) < 1 / 12, ord("\n"))


def equal(a, b):  # are nested dicts, lists and tensors equal to the bit?
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


def chi2(counts, p):  # counts of outcomes, their probabilities -> statistic of those expected more than once
    expected = counts.sum().double() * p + torch.zeros_like(counts)
    assert counts[expected < 1e-6].sum() == 0, "an impossible outcome was sampled"
    return float(((counts - expected) ** 2 / expected)[expected > 1].sum())


class NoWaiting(TorchDispatchMode):
    """Counts operations, and fails on those that wait for the device or whose result has a shape that depends on data.
    A CUDA graph cannot capture these."""
    # lift_fresh makes a tensor from a list on the host; the last three wait inside their kernels
    REFUSED = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "_unique2", "lift_fresh", "equal",
               "bincount", "unique_consecutive")
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        op = func.overloadpacket.__name__
        assert op not in self.REFUSED, f"{op} waits for the device, or copies a constant to it: try fill_, torch.where"
        assert func != torch.ops.aten.repeat_interleave.Tensor, "repeat_interleave by a tensor waits for the device"
        if op in ("index", "index_put", "index_put_"):
            boolean = any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
            assert not boolean, f"{op} with a boolean index waits for the device"
        self.count += 1
        return func(*args, **(kwargs or {}))


class Recording(NoWaiting):
    """A CUDA graph on the CPU. As a context manager it runs operations and records each with its tensors. `replay` runs
    the same operations on the same tensors again, without running any Python code: a number that Python has computed
    does not change. Random operations draw from the same generators again."""

    def __init__(self):
        super().__init__()
        self.operations = []                    # (operation, args, kwargs, results; None if not in new memory)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = super().__torch_dispatch__(func, types, args, kwargs)
        given = {t.untyped_storage().data_ptr() for t in tensors_in((args, kwargs))}
        # a result in the memory of an argument is a view of it, or was written in place
        new = [t if t.untyped_storage().data_ptr() not in given else None for t in tensors_in(out)]
        self.operations.append((func, args, kwargs, new))
        return out

    @torch.no_grad()
    def replay(self):
        for func, args, kwargs, new in self.operations:
            if not func._schema.is_mutable and all(t is None for t in new):         # a view
                continue
            for recorded, again in zip(new, tensors_in(func(*args, **kwargs))):
                if recorded is not None:
                    recorded.copy_(again)


def tensors_in(tree):  # nested tuples, lists and dicts -> the tensors in them, in order
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor)]
