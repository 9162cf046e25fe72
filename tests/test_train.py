"""Training: what equals what, what a run says and leaves behind, what a step may do, what stops a run."""
import contextlib
import dataclasses
import io
import itertools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from conftest import TINY, randomize, settings
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import model
import sample
import train
from data import make_rng, open_corpus
from objectives import EVAL_ROWS, OBJECTIVES, get_objective, member_batch, members_of
from run import build, get_config, load_checkpoint, load_run, newest_run

HERE, HOME = os.path.dirname(os.path.abspath(__file__)), os.path.dirname(train.__file__)
ALONE = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": HOME}                  # as torchrun's processes
MIXTURE = "clm:.5,mlm:.5"
every = pytest.mark.parametrize("name", OBJECTIVES)
on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
on_linux = pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="reads /proc")
on_posix = pytest.mark.skipif(sys.platform == "win32", reason="has no such signals")


def fit(text, out, *flags, code=0):  # without what a finished run shows
    with mock.patch.object(train, "finish", return_value=0):
        assert train.main([*TINY, "--data", text, "--out_dir", out, *flags]) == code


def resume(out, *flags):
    with mock.patch.object(train, "finish", return_value=0):
        assert train.main(["--resume", "--out_dir", out, *flags]) == 0


def write(path, content):
    with open(path, "wb") as f:
        f.write(content)


def metrics(out, split="train, val", clock=False):  # records but the first, without what a clock says
    with open(os.path.join(out, "metrics.jsonl"), "rb") as f:
        records = [r for r in [json.loads(line) for line in f][1:] if r["split"] in split]
    return [{k: v for k, v in r.items() if clock or k not in ("seconds", "tok_per_s")} for r in records]


def losses(out, field="loss", split="train"):
    return [r[field] for r in metrics(out, split)]


def equal(a, b):  # nested dicts, lists and tensors, to the bit
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


def assert_same_run(a, b):
    one, two = load_checkpoint(a), load_checkpoint(b)
    for part in ("model", "adamw", "muon", "moments", "step", "best", "sources", "held_out"):
        assert equal(one[part], two[part]), part
    assert metrics(a) == metrics(b)


def start(*flags):  # -> State before the first step
    hp = get_config([*TINY, *flags])
    return train.prepare(get_objective(hp), open_corpus(hp.data), hp)


def take(s, *steps):  # -> what the last of these steps returns
    out = None
    for step in steps:
        train.load_step_inputs(s, step)
        out = train.training_step(s)
    return out


def snapshot(s):  # -> copies of the weights and of the optimizers' state, but of what is still 0
    adamw = [t for state in s.opt["adamw"].state.values() for t in state.values()]
    muon = [momentum for _, momentum in s.opt["muon"].values()]
    tensors = [*s.model.parameters(), *muon, s.opt["moments"], *adamw]
    return [t.detach().clone() for t in tensors if t.any()]


def on_step(n, act, monkeypatch):  # calls act when the n-th step is about to move the weights
    step, count = train.optimizer_step, itertools.count(1)
    def counting(*args):
        if next(count) == n:
            act()
        step(*args)
    monkeypatch.setattr(train, "optimizer_step", counting)


class Killed(BaseException):
    pass


def die(*args):
    raise Killed


@contextlib.contextmanager
def sigterm_at(step, monkeypatch):  # is sent during that step; a run that does not catch it dies
    on_step(step, lambda: os.kill(os.getpid(), signal.SIGTERM), monkeypatch)
    before = signal.signal(signal.SIGTERM, die)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# ---- the optimizer

def test_the_learning_rate_rises_holds_and_falls():
    hp = get_config("--max_iters 10 --warmup_iters 3 --learning_rate 1 --lr_decay .4 --device cpu".split())
    want = [0.25, 0.5, 0.75, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0]
    assert [train.learning_rate(step, hp) for step in range(11)] == pytest.approx(want)
    hp.max_iters, hp.warmup_iters = 1, 0
    assert train.learning_rate(0, hp) == 1, "a run of one step takes it whole"


def test_muon_equals_torch_for_every_shape_at_once(text):
    s = start("--data", text, "--dtype", "bfloat16", "--weight_decay", "0.1")
    assert sorted(len(momentum) for _, momentum in s.opt["muon"].values()) == [2 * (1 + 1), 2 * (3 + 1)]
    ours = [p for params, _ in s.opt["muon"].values() for p in params]
    theirs = [torch.nn.Parameter(m.detach().clone()) for p in ours for m in p]
    reference = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, momentum=train.MOMENTUM,
                                 adjust_lr_fn="match_rms_adamw", ns_steps=train.NS_STEPS)
    for step in range(3):
        for i, p in enumerate(ours):
            p.grad = torch.randn(p.shape, generator=make_rng(f"gradient {step} {i}"))
        for p, g in zip(theirs, [g for mine in ours for g in mine.grad]):
            p.grad = g.clone()
        for params, momentum in s.opt["muon"].values():
            train.muon_step(params, momentum, torch.tensor(0.02), torch.tensor(False), s.hp)
        reference.step()
    off = torch.cat([(a - b).flatten() for a, b in zip([m for p in ours for m in p], theirs)])
    assert off.abs().max() < 2e-3               # bfloat16 inside both


class Convolving(model.Block):  # a fork's block, with layers that are not the model's own
    def __init__(self, config):
        super().__init__(config)
        self.conv = torch.nn.Conv1d(config.n_embd, config.n_embd, 3, padding=1)
        self.plain = torch.nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x, *args):
        x = super().forward(x, *args)
        return x + self.plain(x) + self.conv(x.mT).mT


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_every_parameter_has_one_optimizer_and_hidden_matrices_alone_decay(optimizer, text, monkeypatch):
    """Muon has the model's own Linear layers inside blocks, AdamW all others, whatever their shape."""
    monkeypatch.setattr(model, "Block", Convolving)
    s = start("--data", text, "--objective", "nsp", "--optimizer", optimizer, "--weight_decay", "0.5")
    adamw = s.opt["adamw"]
    assert adamw.defaults["betas"] == (0.9, 0.95) and adamw.defaults["eps"] == 1e-10
    in_muon = [id(p) for params, _ in s.opt["muon"].values() for p in params]
    in_adamw = [id(p) for group in adamw.param_groups for p in group["params"]]
    hidden = [id(m.weight) for m in s.model.blocks.modules() if isinstance(m, model.StackedLinear)]
    assert len(hidden) == 2 * 4 and sorted(in_muon) == sorted(hidden if optimizer == "muon" else [])
    assert sorted(in_muon + in_adamw) == sorted(map(id, s.params))
    before = [p.detach().clone() for p in s.params]
    for p in s.params:
        p.grad = torch.zeros_like(p)
    s.opt["lr"].fill_(0.1)
    train.optimizer_step(s.opt, torch.tensor(False), s.hp)
    for p, old in zip(s.params, before):
        torch.testing.assert_close(p.detach(), old * (0.95 if id(p) in hidden else 1.0))
    take(s, 0, 1, 2)                            # head, then what starts at zero, then the rest
    assert int(s.first_nonfinite_step) == -1 and not any(map(torch.equal, before, s.params))


# ---- equalities

INDEPENDENT = [name for name, objective in OBJECTIVES.items() if not objective.compares_rows]


@pytest.mark.parametrize("name", ["clm:3,mlm:1", *INDEPENDENT])
@pytest.mark.parametrize("clip", [0.0, 0.01])
def test_micro_batches_give_the_gradient_of_the_total_by_hand(name, clip, text, monkeypatch):
    """Weights of members, coefficients of terms, counts of the whole batch; then the norm is cut."""
    ratio = ["--hybrid_ratio", "0.25"] if name == "hybrid" else []
    s = start("--data", text, "--objective", name, "--accum", "2", "--grad_clip", str(clip), *ratio)
    grads, rows, net = [], [], build(s.hp)
    for module in (s.model, net):
        randomize(module)
    monkeypatch.setattr(train, "optimizer_step", lambda *args: grads.extend(p.grad for p in s.params))
    monkeypatch.setattr(train, "ngram_step", lambda table, moments, lookups, *rest: rows.extend(lookups))
    _, loss, norm = take(s, 0)
    batch = train.draw_batch(s.objective, s.corpus, "train", 8, f"{s.hp.seed},0", s.hp)
    net.ngrams.table.requires_grad_()
    total = 0.0
    for weight, m in members_of(s.objective):
        part = member_batch(batch, m) or batch
        terms = m.terms(part, s.hp)
        sums = m.loss(net, part, s.hp)
        total += weight * sum(terms[k][1] * x / terms[k][0] for k, x in sums.items())
    *want, table = torch.autograd.grad(total, [*(p for p in net.parameters() if p is not net.ngrams.table),
                                               net.ngrams.table], allow_unused=True)
    length = float(torch.stack([w.norm() for w in want if w is not None]).norm())
    assert (float(loss), float(norm)) == pytest.approx((float(total.detach()), length), rel=1e-4)
    scale = min(1.0, clip / length) if clip else 1.0
    for g, w in zip(grads, want, strict=True):
        if w is None:
            assert g is None or not g.any()
        else:
            assert torch.allclose(g, w * scale, rtol=1e-3, atol=1e-5 * length * scale)
    sums = torch.zeros_like(table)
    for row, grad, _ in rows:                   # the n-gram table's is not cut
        sums.index_add_(0, row, grad)
    torch.testing.assert_close(sums, table, rtol=1e-3, atol=1e-5 * length)


def test_a_mean_of_means_fails_the_test_above(text, monkeypatch):
    """What most training loops do: each micro-batch divided by its own count."""
    plain = train.training_step
    def mean_of_means(s):
        terms = s.objective.terms
        loss = s.loss
        s.objective = dataclasses.replace(s.objective, terms=lambda batch, hp: {"nll": (torch.tensor(2.0), 1.0)})
        s.loss = lambda net, part, hp: {"nll": loss(net, part, hp)["nll"] / terms(part, hp)["nll"][0]}
        return plain(s)
    monkeypatch.setattr(train, "training_step", mean_of_means)
    with pytest.raises(AssertionError):
        test_micro_batches_give_the_gradient_of_the_total_by_hand("prefix", 0.0, text, monkeypatch)


@pytest.mark.parametrize("name", [*OBJECTIVES, MIXTURE])
def test_a_killed_run_resumes_bit_for_bit(name, text, monkeypatch):
    flags = ["--objective", name, "--max_iters", "8", "--eval_interval", "4"]
    fit(text, "whole", *flags)
    on_step(6, die, monkeypatch)
    with pytest.raises(Killed):
        fit(text, "killed", *flags)
    assert load_checkpoint("killed")["step"] == 4
    resume("killed")
    assert_same_run("whole", "killed")


@pytest.mark.parametrize("n_save", [1, 2, 3, 4, 5])             # best.pt and ckpt.pt, in turn
def test_a_run_killed_during_a_save_resumes_bit_for_bit(n_save, text, monkeypatch):
    """Between the write of a checkpoint and its renaming."""
    flags = ["--max_iters", "6", "--eval_interval", "2"]
    fit(text, "whole", *flags)
    replace = os.replace
    saves = itertools.count(1)
    monkeypatch.setattr(os, "replace", lambda *names: die() if next(saves) == n_save else replace(*names))
    with pytest.raises(Killed):
        fit(text, "killed", *flags)
    assert [name for name in os.listdir("killed") if name.endswith(".tmp")]
    if n_save == 1:
        fit(text, "killed", *flags)
    else:
        resume("killed")
    assert_same_run("whole", "killed")


@on_posix
def test_a_signal_in_the_last_step_does_not_stop_a_run_that_is_done(text, monkeypatch, capsys):
    with sigterm_at(4, monkeypatch):
        fit(text, "a", "--max_iters", "4", code=0)
    assert "stopped" not in capsys.readouterr().out and load_checkpoint("a")["step"] == 4


@on_posix
@pytest.mark.parametrize("name, code, at", [("SIGINT", 130, 7), ("SIGTERM", 143, 10), ("SIGHUP", 129, 3)])
def test_a_signal_finishes_the_step_and_saves(name, code, at, text, monkeypatch, capsys):
    """One of them before an evaluation that is due."""
    flags, number = ["--max_iters", "12", "--eval_interval", "5"], getattr(signal, name)
    fit(text, "whole", *flags)
    on_step(at, lambda: os.kill(os.getpid(), number), monkeypatch)
    before = signal.signal(number, die)         # a caller's handler, not one that is ignored
    try:
        fit(text, "stopped", *flags, code=code)
        assert signal.getsignal(number) is die, "handlers are put back"
    finally:
        signal.signal(number, before)
    assert "python train.py --resume --out_dir stopped" in capsys.readouterr().out
    assert load_checkpoint("stopped")["step"] == at
    resume("stopped")
    assert_same_run("whole", "stopped")


def test_evaluation_never_changes_training(text):
    fit(text, "often", "--max_iters", "8", "--eval_interval", "2")
    fit(text, "never", "--max_iters", "8", "--eval_interval", "1000", "--eval_iters", "2")
    assert losses("often") == losses("never")
    assert losses("often", "step", "val") == [0, 2, 4, 6, 8]


def test_validation_does_not_depend_on_batch_size_seed_or_other_sources(text):
    write("other.txt", b"another text altogether. " * 400)
    def first_batches(source, data, *flags):
        hp = get_config([*TINY, "--objective", "mlm", *flags])
        return train.validation_list(get_objective(hp), open_corpus(data), hp)[source][3]
    alone = first_batches(0, [text])
    assert equal(alone, first_batches(1, ["other.txt:3", text], "--batch_size", "2", "--seed", "9"))
    assert not equal(alone, first_batches(0, ["other.txt:3", text]))


def test_other_seeds_have_other_weights_and_other_data(text):
    a, b = (start("--data", text, "--seed", seed) for seed in "12")
    assert not torch.equal(a.model.embed.weight, b.model.embed.weight)
    assert not torch.equal(take(a, 0)[0]["inp"], take(b, 0)[0]["inp"])


# ---- what a run says and leaves behind

def test_a_run_leaves_a_folder_with_checkpoints_metrics_and_picture(text, capsys, monkeypatch):
    matplotlib = mock.MagicMock()
    monkeypatch.setitem(sys.modules, "matplotlib", matplotlib)
    for name in ("clm:.5, mlm:.5", "prefix", "prefix"):
        assert train.main([*TINY, "--data", text, "--max_iters", "3", "--objective", name]) == 0
    out = capsys.readouterr().out
    assert sorted(os.listdir("out")) == ["clm_.5+mlm_.5", "prefix", "prefix-2"]
    assert newest_run() == os.path.join("out", "prefix-2")
    assert {"ckpt.pt", "best.pt", "metrics.jsonl"} <= set(os.listdir("out/prefix"))
    assert matplotlib.pyplot.savefig.call_args.args == (os.path.join("out", "prefix-2", "loss.png"),)
    for words in ("the first row", "prefix inp", "prefix tgt", "both ways among the first", "longer than the run",
                  "lzma", "bits/byte", "perplexity", "the model's continuation"):
        assert words in out, words
    line, val = (metrics("out/prefix", split, clock=True)[0] for split in ("train", "val"))
    assert set(line) == {"step", "split", "data", "objective", "loss", "bpb", "targets", "lr", "grad_norm",
                         "tok_per_s", "seconds"}
    assert val["bpb"] == pytest.approx(8.0) and val["loss"] == pytest.approx(math.log(256))
    assert 0.5 < line["targets"] < 0.95


def test_validation_text_is_held_out(text):
    write("split.txt", b"a" * 9000 + b"b" * 1000)
    fit("split.txt", "a", "--max_iters", "1")
    assert set(load_checkpoint("a")["held_out"].tolist()) == {ord("b")}
    s = start("--data", "split.txt")
    [(_, _, _, batches, _)] = train.validation_list(s.objective, s.corpus, s.hp)
    assert set(batches[0]["inp"].flatten().tolist()) == {ord("b")}
    assert set(take(s, 0)[0]["inp"].flatten().tolist()) == {ord("a")}


def test_best_is_the_least_loss_by_the_weights_of_members_and_sources(text):
    write("new.txt", b"other text, of its own kind\n" * 200)
    fit(text, "a", "--objective", "clm:3,mlm:1", "--data", text + ":0.9", "new.txt:0.1", "--max_iters", "30",
        "--eval_interval", "5", "--learning_rate", "10", "--lr_decay", "0")
    total = dict.fromkeys(range(0, 31, 5), 0.0)
    for r in metrics("a", "val"):
        weight = {"clm": 0.75, "mlm": 0.25}[r["objective"]] * (0.9 if r["data"] == text else 0.1)
        total[r["step"]] += weight * r["loss"]
    best = load_checkpoint("a/best.pt")
    assert best["step"] == min(total, key=total.get) != 30
    assert best["best"] == pytest.approx(total[best["step"]])


def test_standard_input_is_read_anew_until_there_is_a_run(text, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"too short")))
    with pytest.raises(SystemExit):
        fit("-", "a")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"long enough " * 200)))
    fit("-", "a", "--max_iters", "2")
    resume("a", "--max_iters", "3")


def test_the_process_is_left_as_it_was(text):
    precision, rng = torch.get_float32_matmul_precision(), torch.get_rng_state()
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    fit(text, "a", "--max_iters", "1")
    sample.main(["--out_dir", "a", "--prompt", "x", "--max_new_tokens", "1"])
    assert torch.get_float32_matmul_precision() == precision and torch.equal(torch.get_rng_state(), rng)
    assert torch.backends.cuda.cudnn_sdp_enabled() == cudnn


def test_a_run_from_a_run_reads_on_where_that_one_ended(text, monkeypatch):
    """A child, and the child's child, which is killed and resumed, read no window of their parents again."""
    seen = {}
    load = train.load_step_inputs

    def watched(s, step):
        load(s, step)
        seen.setdefault(s.hp.out_dir, []).append(s.windows[1].tolist())
    monkeypatch.setattr(train, "load_step_inputs", watched)
    fit(text, "a", "--max_iters", "4")
    fit(text, "b", "--max_iters", "3", "--init_from", "a")
    fit(text, "c", "--max_iters", "2", "--init_from", "b")
    resume("c", "--max_iters", "4")
    fit(text, "whole", "--max_iters", "11")
    assert [load_checkpoint(out)["config"]["init_step"] for out in ("a", "b", "c")] == [0, 4, 7]
    assert seen["a"] + seen["b"] + seen["c"] == seen["whole"]


def test_a_run_says_where_its_weights_come_from(text, capsys):
    fit(text, "a", "--max_iters", "3", "--learning_rate", ".01")
    for flags, hint in (([], True), (["--learning_rate", ".003"], False), (["--objective", "mlm"], False)):
        capsys.readouterr()
        out = f"b{len(os.listdir('.'))}"
        fit(text, out, "--max_iters", "1", "--init_from", "a", *flags)
        said = capsys.readouterr().out
        assert f"weights of {os.path.join('a', 'ckpt.pt')}: clm at step 3\n" in said
        assert ("Try --learning_rate 0.003\n" in said) == hint
    resume(out, "--max_iters", "2")
    assert "weights of" not in capsys.readouterr().out


def test_a_finished_run_says_so_when_it_is_resumed(text, capsys):
    fit(text, "a", "--max_iters", "2")
    resume("a")
    assert capsys.readouterr().out.count("a is finished, at step 2. A larger --max_iters prolongs it\n") == 1
    resume("a", "--max_iters", "3")
    assert "is finished" not in capsys.readouterr().out


@on_posix
def test_diverged_and_stopped_runs_draw_their_losses_too(text, monkeypatch):
    drawn = []
    monkeypatch.setattr(train, "plot", drawn.append)
    with sigterm_at(2, monkeypatch):
        fit(text, "stopped", "--max_iters", "4", code=143)
    clm = OBJECTIVES["clm"]

    def poisoned(model, batch, hp):
        return {"nll": clm.loss(model, batch, hp)["nll"] * math.nan}
    monkeypatch.setitem(OBJECTIVES, "clm", dataclasses.replace(clm, loss=poisoned))
    fit(text, "diverged", "--max_iters", "4", code=1)
    assert drawn == [os.path.join(out, "metrics.jsonl") for out in ("stopped", "diverged")]


def test_compiling_leaves_no_gradients_behind(text, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda loss, **how: loss)
    s = start("--data", text)
    train.load_step_inputs(s, 0)
    train.compile_loss(s)
    assert all(p.grad is None for p in s.params)


def test_bytes_that_are_no_text_and_skipped_files_are_said(text, capsys):
    write("latin.txt", "\xe9t\xe9 ".encode("latin-1") * 200)
    os.mkdir("folder")
    for i in range(12):
        write(f"folder/{i}.txt", f"the document of number {i} ".encode() * 20)
    write("folder/binary", b"a\0b")
    fit(text, "a", "--max_iters", "1", "--data", "latin.txt", "folder")
    out = capsys.readouterr().out
    assert "--data latin.txt: bytes that are not UTF-8 in its first MB" in out
    assert "--data folder: 12 files read, skipped 1 with a NUL byte (binary)\n" in out


def test_each_source_is_validated_by_itself(text):
    """Continual pre-training: at step 0 the old domain's loss is the parent's last one."""
    write("new.txt", b"An entirely different text, again and again. " * 300)
    fit(text, "parent", "--max_iters", "5", "--objective", "mlm")
    fit(text, "child", "--init_from", "parent", "--max_iters", "20", "--objective", "mlm",
        "--data", "new.txt", text + ":.25")
    first = metrics("child", "val")[:2]
    assert [r["data"] for r in first] == ["new.txt", text]
    assert first[1]["loss"] == pytest.approx(losses("parent", split="val")[-1], rel=1e-6)
    assert losses("child", split="val")[-2] < first[0]["loss"] - 0.5


def test_a_resumed_run_may_be_longer_and_a_child_may_have_longer_blocks(text, capsys):
    fit(text, "a", "--max_iters", "4")
    resume("a", "--max_iters", "6")
    assert "4 steps were planned, now 6" in capsys.readouterr().out
    assert load_checkpoint("a")["step"] == 6
    assert train.main(["--init_from", "a", "--data", text, "--out_dir", "b", "--block_size", "64",
                       "--objective", "mlm", "--max_iters", "2", "--eval_iters", "1"]) == 0
    config = load_checkpoint("b")["config"]
    assert config["n_embd"] == 16 and config["block_size"] == 64
    resume("b", "--init_from", "a", "--max_iters", "3")         # as the first time, which changes nothing
    assert load_checkpoint("b")["step"] == 3


def test_a_masked_end_of_document_does_not_end_it_in_the_mask(text):
    write("nul.txt", b"ab\0" * 2000)
    batch, *_ = take(start("--data", "nul.txt", "--objective", "mdlm", "--doc_mask", "--batch_size", "64"), 0)
    ends = (batch["inp"] == 0).long()
    assert (batch["tgt"] == 0).any() and torch.equal(batch["doc"], ends.cumsum(1) - ends)


@pytest.mark.parametrize("name", [name for name, objective in OBJECTIVES.items() if objective.bpb == "causal"])
def test_bits_per_byte_are_clms_on_plain_windows(name, text):
    """The same weights, the same windows: the same bits per byte, whatever rows the objective trains on."""
    write("nul.txt", b"in which some windows of 33 bytes have an end and some do not\0" * 200)
    fit("nul.txt", "a", "--objective", name, "--max_iters", "5")
    fit("nul.txt", "b", "--objective", f"clm,{name}", "--batch_size", "16", "--init_from", "a", "--max_iters", "0")
    clm, bpb = losses("b", "loss", "val")[0], losses("b", "bpb", "val")
    assert losses("a", "bpb", "val")[-1] == pytest.approx(bpb[0], rel=1e-6)
    assert bpb == pytest.approx([clm / math.log(2)] * 2)


def test_a_mixture_logs_its_total_and_evaluates_each_member(text):
    fit(text, "mix", "--objective", MIXTURE, "--max_iters", "3", "--accum", "2")
    val, line = metrics("mix", "val"), metrics("mix", "train")
    said = [(r["step"], r["objective"], r["bpb"] is None) for r in val]
    assert said == [(0, "clm", False), (0, "mlm", True), (3, "clm", False), (3, "mlm", True)]
    assert [(r["step"], r["objective"]) for r in line] == [(0, MIXTURE), (1, MIXTURE), (2, MIXTURE)]
    assert line[0]["loss"] == pytest.approx(math.log(256), abs=1e-4)
    assert line[0]["targets"] == pytest.approx((1 + 10 / 32) / 2) and line[0]["bpb"] is None


@pytest.mark.parametrize("flags, hint", [("--accum 3", "Try --accum 4"), ("--accum 2 --data -", "--data -")])
def test_what_processes_cannot_share_is_refused(flags, hint, monkeypatch, capsys):
    monkeypatch.setattr(train, "WORLD", 2)
    with pytest.raises(SystemExit) as e:
        train.main([*TINY, *flags.split()])
    err = capsys.readouterr().err
    assert e.value.code == 2 and err.count("\n") == 1 and hint in err


# ---- learning

def entropy(counts):  # nats
    p = counts.double() / counts.sum()
    return float(-(p * p.clamp(min=1e-300).log()).sum())


@every
def test_every_objective_learns_in_a_short_run(name, text):
    """The unigram entropy of the targets, or chance, or the prior."""
    slow = {"rotation": (text, 32, 250), "nsp": ("stdlib", 64, 250), "electra": (text, 32, 250)}
    data, T, steps = slow.get(name, (text, 32, 120))
    flags = ["--data", data, "--objective", name, "--block_size", str(T), "--batch_size", "16",
             "--n_embd", "32", "--max_iters", str(steps), "--eval_interval", str(steps), "--eval_iters", "3"]
    fit(data, "a", *flags)
    (first, last), hp = metrics("a", "val"), get_config([*TINY, *flags])
    [(_, _, _, batches, _)] = train.validation_list(get_objective(hp), open_corpus(hp.data), hp)
    terms, limits = last["terms"], {"seam": math.log(T) - 0.02, "nsp": math.log(2) - 0.01}
    if "tgt" in batches[0]:
        targets = torch.cat([b["tgt"][b["tgt"] >= 0] for b in batches])
        unigram = entropy(torch.bincount(targets, minlength=512))
        limits = dict.fromkeys(terms, unigram) | limits
    if name == "contrastive":                   # of bags of bytes
        bags = [F.normalize(F.one_hot(b["inp"], 512).float().mean(2), dim=-1).unbind(1) for b in batches]
        chance = [F.cross_entropy(a @ b.T / hp.tau, torch.arange(EVAL_ROWS)) for a, b in bags]
        limits["infonce"] = min(first["loss"], float(sum(chance)) / len(chance))
    if name == "electra":
        p = terms["replaced"]
        limits["discriminator"] = entropy(torch.tensor([p, 1 - p]))
        assert terms["auc"] > 0.55
    for term, (_, coefficient) in get_objective(hp).terms(batches[0], hp).items():
        if coefficient:                         # of a term that is not known here: less than before training
            assert terms[term] < limits.get(term, first["terms"][term]), term
    if OBJECTIVES[name].bpb in ("loss", "causal"):
        assert last["bpb"] < unigram / math.log(2) - 0.5


@pytest.mark.slow
def test_compile_gives_the_same_losses_or_continues_without(text, capsys):
    flags = ["--max_iters", "3", "--objective", "prefix", "--n_layer", "1"]
    fit(text, "plain", *flags)
    fit(text, "compiled", *flags, "--compile")
    assert losses("plain") == pytest.approx(losses("compiled"), rel=1e-4)
    if shutil.which("g++"):
        assert "continuing without" not in capsys.readouterr().out


def test_a_compiler_that_fails_is_one_line(text, capsys, monkeypatch):
    def broken(*args, **kwargs):
        return mock.Mock(side_effect=RuntimeError("no compiler\nmore"))
    monkeypatch.setattr(torch, "compile", broken)
    fit(text, "a", "--max_iters", "2", "--compile")
    why = "--compile: does not work here (RuntimeError: no compiler), continuing without it\n"
    assert why in capsys.readouterr().out


# ---- what a step may do

def test_a_step_reads_nothing_but_its_tensors(text):
    """What a graph would replay: other windows, seeds, rate and number give what a fresh batch gives."""
    s = start("--data", text, "--objective", "ul2", "--max_iters", "9", "--seed", "2")
    def places():
        return [t.data_ptr() for t in (s.step, s.first_nonfinite_step, s.opt["lr"], s.ngram_drop, *s.windows)]
    before = places()
    for step in range(4):
        batch, *_ = take(s, step)
        want = train.draw_batch(s.objective, s.corpus, "train", 4, f"2,{step}", s.hp)
        assert batch.keys() - want.keys() == {"ngram_scale"} and equal({k: batch[k] for k in want}, want)
        assert float(s.ngram_drop) == pytest.approx(train.ngram_drop_rate(step, s.corpus, s.objective, s.hp))
        rate = s.opt["adamw"].param_groups[0]["lr"]
        assert float(rate) == pytest.approx(train.learning_rate(step, s.hp))
    assert places() == before


class NoNumbers:  # stands for a generator of the device "meta", which torch does not have
    device = torch.device("meta")

    def manual_seed(self, seed):
        return self


class NothingOnTheHost(TorchDispatchMode):  # what few of the operations on meta notice by themselves
    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            assert not isinstance(t, torch.Tensor) or t.is_meta or t.dim() == 0, f"{op}: on {t.device}"
        return out


@pytest.fixture
def meta(monkeypatch):  # -> takes a step with all tensors on a device whose values nobody can read
    """Whatever waits for the device raises, and whatever is on another one."""
    def without_numbers(draw):
        def call(*args, generator=None, **how):
            return draw(*args, generator=None if isinstance(generator, NoNumbers) else generator, **how)
        return call
    def take_on_meta(hp):
        hp.device = "meta"
        corpus = open_corpus(hp.data)
        for split in ("train", "val"):
            corpus[0][split] = corpus[0][split].to("meta")
        s = train.prepare(get_objective(hp), corpus, hp)
        train.load_step_inputs(s, 0)
        with NothingOnTheHost():
            return s, train.training_step(s)
    real = torch.Generator
    def generator_of(device="cpu"):
        return NoNumbers() if torch.device(device).type == "meta" else real(device)
    monkeypatch.setattr(torch, "Generator", generator_of)
    for name in ("rand", "randint"):
        monkeypatch.setattr(torch, name, without_numbers(getattr(torch, name)))
    monkeypatch.setattr(torch.optim, "AdamW", mock.Mock())      # its fused kernel is for real devices
    return take_on_meta


@pytest.mark.parametrize("name", [*OBJECTIVES, MIXTURE])
def test_a_step_needs_no_value_on_the_host(name, text, meta):
    flags = [*TINY, "--data", text, "--objective", name, "--n_layer", "1", "--accum", "2"]
    can_mask = get_objective(get_config(flags)).supports_doc_mask
    for more in [[], ["--doc_mask"]] if can_mask else [[]]:
        s, (batch, loss, norm) = meta(get_config([*flags, *more]))
        assert loss.is_meta and norm.is_meta and loss.dim() == 0
        assert not more or any(k.endswith("doc") for k in batch)


WAITS = {
    "a loss that is read": dict(loss=lambda sums: {k: v + float(v.detach()) for k, v in sums.items()}),
    "a loss that looks": dict(loss=lambda sums: sums if sums["nll"] > 0 else {}),
    "positions that are counted": dict(corrupt=lambda batch: batch | {"positions": batch["tgt"].nonzero()}),
    "rows from the host": dict(corrupt=lambda batch: batch | {"inp": batch["inp"][torch.arange(4)]})}


@pytest.mark.parametrize("case", WAITS)
def test_a_step_that_waits_is_noticed(case, text, meta, monkeypatch):
    [(key, change)] = WAITS[case].items()
    clm = OBJECTIVES["clm"]
    right = getattr(clm, key)
    wrong = dataclasses.replace(clm, **{key: lambda *args: change(right(*args))})
    monkeypatch.setitem(OBJECTIVES, "clm", wrong)
    with pytest.raises((RuntimeError, NotImplementedError, AssertionError)):
        meta(get_config([*TINY, "--data", text]))


WIDE = ["--n_embd", "64", "--device", "cuda"]   # heads of 32, which FlexAttention takes


@on_cuda
@pytest.mark.parametrize("name", [*OBJECTIVES, MIXTURE])
def test_eager_compiled_and_captured_steps_give_the_same_losses(name, text, capsys):
    flags = ["--objective", name, "--max_iters", "20", "--eval_interval", "10", *WIDE]
    ways = {"eager": [], "graph": ["--cuda_graph"], "compiled": ["--compile"]}
    ways["both"] = ways["compiled"] + ways["graph"]
    for way, more in ways.items():
        fit(text, way, *flags, *more)
    assert "continuing without" not in capsys.readouterr().out
    for way in ways:
        assert losses(way) == pytest.approx(losses("eager"), rel=2e-3), way
    assert losses("graph") == pytest.approx(losses("eager"), rel=1e-5), "the same kernels, the same numbers"


@on_cuda
@pytest.mark.parametrize("more", [[], ["--cuda_graph"]])
def test_a_run_on_a_gpu_resumes(more, text, monkeypatch):
    flags, plain = ["--max_iters", "20", "--eval_interval", "10", *WIDE, *more], train.load_step_inputs
    fit(text, "whole", *flags)
    monkeypatch.setattr(train, "load_step_inputs", lambda s, step: die() if step == 14 else plain(s, step))
    with pytest.raises(Killed):
        fit(text, "part", *flags)
    monkeypatch.setattr(train, "load_step_inputs", plain)
    resume("part", *more)
    assert losses("part", "step") == [*range(20)]
    assert losses("part")[10:] == pytest.approx(losses("whole")[10:], rel=1e-4)


@on_cuda
def test_a_step_never_waits_for_the_gpu(text):
    """Nor what the host does before it; every objective's own part is captured above, where none may wait."""
    s = start(*WIDE, "--data", text)
    train.move_corpus(s.corpus, s.hp)
    s = train.prepare(s.objective, s.corpus, s.hp)
    take(s, 0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        take(s, 1, 2)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ---- n-grams

def test_the_update_of_touched_rows_equals_a_dense_one(text, monkeypatch):
    """Row by row: one second moment a row, to which each lookup adds its own; rows that were not looked up stay."""
    s, seen, update = start("--data", text, "--accum", "2"), [], train.ngram_step
    randomize(s.model)
    table, moments = s.model.ngrams.table, s.opt["moments"]
    monkeypatch.setattr(train, "ngram_step", lambda *args: (seen.append(args[2]), update(*args)))
    for i in range(3):
        weights, second = table.clone().double(), moments.clone().double() * train.NGRAM_DECAY
        take(s, i)
        row, grad, square = (torch.cat(parts) for parts in zip(*seen[i]))
        torch.testing.assert_close(square, grad.square().mean(1))
        assert len(row) == 2 * 4 * 32 * 4, "micro-batches, rows, positions, lengths"
        for r, g in zip(row.tolist(), grad.double()):
            second[r] += g.square().mean()
        for r, g in zip(row.tolist(), grad.double()):
            weights[r] -= train.NGRAM_RATE * float(s.opt["lr"]) * g / (second[r].sqrt() + train.EPS)
        torch.testing.assert_close(table.double(), weights, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(moments.double(), second, rtol=1e-4, atol=1e-12)
        same = torch.ones(len(table), dtype=torch.bool)
        same[row] = False
        assert same.any() and torch.equal(table[same].double(), weights[same])


def test_lookups_are_dropped_at_the_drop_rate(text, monkeypatch):
    monkeypatch.setattr(train, "ngram_drop_rate", lambda step, *rest: min(0.4, 0.1 * step))
    s = start("--data", text, "--batch_size", "64")
    for step, drop in enumerate([0.0, 0.1, 0.2, 0.3, 0.4, 0.4]):
        train.load_step_inputs(s, step)
        scale = train.training_batch(s)["ngram_scale"]
        assert scale.shape == (64, 32, 4)
        assert float(scale.max()) == pytest.approx(1 / (1 - drop))
        assert ((scale == 0) | (scale == scale.max())).all()
        assert float((scale == 0).float().mean()) == pytest.approx(drop, abs=0.03)
    assert train.training_batch(start("--data", text, "--ngram_rows", "0")).keys() == {"inp", "tgt", "prefix"}


def test_the_ngram_drop_rate_grows_with_passes():
    def rate(step, size, steps, **changes):
        hp = settings("clm", 32, max_iters=steps, **{"ngram_rows": 65536} | changes)
        corpus = [dict(weight=1.0, train=range(size))]
        return train.ngram_drop_rate(step, corpus, OBJECTIVES["clm"], hp)           # a step reads 4 * 33 bytes
    assert rate(0, 13_200, 400) == 0
    for passes, end in ((1, 0.5), (4, 1 - 0.5 / 4 ** (2 / 3)), (0.5, 0.5)):
        steps = int(100 * passes)
        assert rate(steps, 13_200, steps) == pytest.approx(end * min(1, passes / 2))
        assert rate(50, 13_200, steps) == pytest.approx(end / 4), "half a pass"
    assert rate(1000, 1 << 30, 1000) == pytest.approx(0.5 * 1000 * 4 * 32 / train.NGRAM_WARMUP)
    assert rate(30_000, 1 << 30, 30_000) == 0.5
    assert rate(0, 13_200, 100, init_from="a") == 0.5
    assert rate(100, 13_200, 400, ngram_drop=0.0) == 0
    mostly_long = [dict(weight=0.9999, train=range(100 * 4 * 4 * 65536)), dict(weight=0.0001, train=range(200_000))]
    steps = 3 * len(mostly_long[0]["train"]) // 132                 # 3 passes over the long text, .6 over the short
    hp = settings("clm", 32, max_iters=steps, ngram_rows=65536)
    assert 0.5 < train.ngram_drop_rate(steps, mostly_long, OBJECTIVES["clm"], hp) < 0.52
    long = 4 * 4 * 65536 * 10                   # ten times the text that the table can memorize, read three times
    assert rate(3 * long // 132, long, 3 * long // 132) == pytest.approx(1 - 0.5 / 1.2 ** (2 / 3), abs=1e-4)


@every
def test_every_objective_trains_the_table(name, text):
    """A loss that does not hand the batch's lookups on would leave it as it is."""
    s = start("--data", text, "--objective", name, "--batch_size", "16")
    take(s, 0, 1)
    assert s.model.ngrams.table.any()


# ---- how long a run is, and which of its states is used

def test_a_small_text_is_read_a_few_times_unless_steps_are_given(text, monkeypatch, capsys):
    monkeypatch.setattr(train, "MIN_ITERS", 5)
    write("small.txt", open(text, "rb").read()[:1000])
    train.main([*TINY, "--data", "small.txt", "--out_dir", "a", "--max_passes", "3"])
    steps = math.ceil(3 * 900 / (4 * 33))       # 900 bytes to train on, 4 rows of 33 a step
    config = load_checkpoint("a")["config"]
    assert load_checkpoint("a")["step"] == steps == 21 and config["eval_interval"] == 6
    assert "21 steps, which read the text 3.1 times" in capsys.readouterr().out
    train.main([*TINY, "--data", "small.txt", "--out_dir", "b", "--max_passes", "0.1", "--eval_interval", "4"])
    assert load_checkpoint("b")["step"] == 5 and load_checkpoint("b")["config"]["eval_interval"] == 4
    train.main([*TINY, "--data", "small.txt", "--out_dir", "c", "--max_iters", "40"])
    assert load_checkpoint("c")["step"] == 40
    train.main(["--resume", "--out_dir", "a", "--max_iters", "23"])
    assert load_checkpoint("a")["step"] == 23


def test_the_best_state_is_used_where_the_last_is_clearly_worse(text, capsys):
    fit(text, "a", "--max_iters", "4", "--eval_interval", "2")
    last, best = load_checkpoint("a"), load_checkpoint("a/best.pt")
    best["model"]["embed.weight"] += 1
    torch.save(best, "a/best.pt")
    for val, step, used in ((1.02, 2, best), (1.005, 2, last), (1.02, 0, last)):
        torch.save(last | {"val": val, "best": 1.0, "best_step": step}, "a/ckpt.pt")
        capsys.readouterr()
        model, *_ = load_run("a", "cpu", "float32")
        assert torch.equal(model.embed.weight, used["model"]["embed.weight"])
        assert ("a/best.pt" in capsys.readouterr().err) == (used is best)
    torch.save(last | {"val": 2.0, "best": 1.0, "best_step": 2}, "a/ckpt.pt")
    model, *_ = load_run("a/ckpt.pt", "cpu", "float32")
    assert torch.equal(model.embed.weight, last["model"]["embed.weight"]), "a file is what was asked for"


def test_the_end_says_when_validation_loss_was_lowest(text, monkeypatch, capsys):
    values = iter([5.0, 3.0, 4.0])
    real = train.evaluate
    monkeypatch.setattr(train, "evaluate", lambda *args: [r | {"loss": next(values)} for r in real(*args)])
    fit(text, "a", "--max_iters", "4", "--eval_interval", "2")
    assert "lowest at step 2: 3.0000 nats, now 4.0000" in capsys.readouterr().out
    ckpt = load_checkpoint("a")
    assert (ckpt["val"], ckpt["best"], ckpt["best_step"]) == (4.0, 3.0, 2)


def test_a_byte_head_starts_from_the_outputs_that_both_objectives_have(text):
    fit(text, "span", "--objective", "span", "--max_iters", "3")
    wide = load_checkpoint("span")["model"]["head.weight"]
    fit(text, "clm", "--objective", "clm", "--init_from", "span", "--max_iters", "0")
    narrow = load_checkpoint("clm")["model"]["head.weight"]
    assert wide.shape == (1, 512, 16) and torch.equal(narrow, wide[:, :256]) and narrow.any()
    fit(text, "wide", "--objective", "span", "--init_from", "clm", "--max_iters", "0")
    again = load_checkpoint("wide")["model"]["head.weight"]
    assert torch.equal(again[:, :256], narrow) and not again[:, 256:].any()
    fit(text, "electra", "--objective", "electra", "--max_iters", "1")
    fit(text, "mix", "--objective", "electra,span", "--init_from", "electra", "--max_iters", "1")


# ---- what goes wrong

@pytest.mark.parametrize("where, log, seen", [("loss", 4, 9), ("gradient", 4, 9), ("loss", 100, 10)])
def test_a_non_finite_step_never_reaches_the_weights(where, log, seen, text, monkeypatch, capsys):
    """Step 7 is bad; that is seen after step 8, which is logged, or before step 10, which is saved."""
    clm = OBJECTIVES["clm"]
    calls = []
    before = signal.getsignal(signal.SIGINT)
    def poisoned(model, batch, hp):
        sums = clm.loss(model, batch, hp)
        calls.append(torch.is_grad_enabled())
        if calls[-1] and sum(calls) == 8:
            zero = (model.head.weight * 0).sum()                # the gradient of its root is not finite
            sums["nll"] = sums["nll"] + (zero * math.nan if where == "loss" else zero.sqrt())
        return sums
    monkeypatch.setitem(OBJECTIVES, "clm", dataclasses.replace(clm, loss=poisoned))
    fit(text, "a", "--max_iters", "30", "--eval_interval", "5", "--log_interval", str(log), code=1)
    err = capsys.readouterr().err
    assert "not finite at step 7" in err and err.count("\n") == 1 and sum(calls) == seen
    assert signal.getsignal(signal.SIGINT) is before
    ckpt = load_checkpoint("a")
    assert ckpt["step"] == 7 and all(p.isfinite().all() for p in ckpt["model"].values())
    resume("a")
    assert losses("a", "step") == [*range(0, 30, log)]


def test_train_bytes_keeps_the_first_bytes_of_the_training_split(text, monkeypatch, capsys):
    seen, prepare = [], train.prepare

    def watched(objective, corpus, hp):
        seen.append(corpus[0])
        return prepare(objective, corpus, hp)
    monkeypatch.setattr(train, "prepare", watched)
    fit(text, "a", "--train_bytes", "100", "--max_iters", "2")
    resume("a", "--max_iters", "3")
    [whole] = open_corpus([text])
    for source in seen:
        assert torch.equal(source["train"], whole["train"][:100]) and torch.equal(source["val"], whole["val"])
    assert len(seen) == 2
    with pytest.raises(SystemExit):
        train.main(["--resume", "--out_dir", "a", "--train_bytes", "99"])
    assert "--train_bytes 99" in capsys.readouterr().err


@pytest.mark.parametrize("bad", [0, 2])
@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_after_a_non_finite_step_nothing_changes(optimizer, bad, text):
    """Neither weights nor the optimizers' state, in which NaN would stay."""
    s = start("--data", text, "--weight_decay", "0.1", "--optimizer", optimizer)
    take(s, *range(bad))
    before, embed = snapshot(s), s.model.embed.weight.detach()
    kept = embed.clone()
    embed.fill_(math.inf)
    take(s, bad, bad + 1)
    embed.copy_(kept)
    take(s, *range(bad + 2, 6))
    assert equal(before, snapshot(s)) and int(s.first_nonfinite_step) == bad
    s.first_nonfinite_step.fill_(-1)
    take(s, 6)
    assert not equal(before, snapshot(s))


ANY = {"random": bytes(torch.randint(0, 256, (3000,), generator=make_rng("any")).tolist()),
       "NUL alone": b"\0" * 3000, "one byte": b"a" * 3000}


@pytest.mark.parametrize("kind", ANY)
def test_any_bytes_can_be_trained_on(kind, text, capsys):
    write("any.bin", ANY[kind])
    for name in OBJECTIVES:
        fit("any.bin", name, "--objective", name, "--max_iters", "2")
        assert all(math.isfinite(x) for x in losses(name)), name
    assert sample.main(["--out_dir", "clm", "--score", "any.bin"]) is None
    assert sample.main(["--out_dir", "clm", "--prompt", ""]) is None
    assert "bits per byte" in capsys.readouterr().out


def default_interrupt():  # a script's background jobs start with SIGINT ignored
    return signal.signal(signal.SIGINT, signal.default_int_handler)


def test_a_second_signal_is_not_caught():
    at_start = default_interrupt()
    stop = []
    handlers = train.catch_signals(stop)
    try:
        signal.raise_signal(signal.SIGINT)
        assert stop == [signal.SIGINT] and signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    finally:
        train.restore_handlers(handlers | {signal.SIGINT: at_start})


@on_posix
def test_a_signal_that_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    handlers = train.catch_signals([])
    now = signal.getsignal(signal.SIGHUP)
    train.restore_handlers(handlers | {signal.SIGHUP: before})
    assert now is signal.SIG_IGN


# ---- real processes

def command(text, out, *flags):  # train.py as a process of its own
    return [sys.executable, train.__file__, *TINY, "--data", text, "--out_dir", out, *flags]


@on_posix
def test_broken_pipe_saves(text):
    """As of python train.py | head -1."""
    with subprocess.Popen(command(text, "a", "--max_iters", "100000", "--eval_interval", "5"), env=ALONE,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.readline().startswith(b"clm | ")
        process.stdout.close()
        assert process.stderr.read() == b"" and process.wait(60) == 141
    step = load_checkpoint("a")["step"]
    resume("a", "--max_iters", str(step + 1))


@on_posix
def test_ctrl_c_after_training_just_ends(text):
    """It comes as matplotlib is imported, when all is done and saved."""
    os.mkdir("modules")
    write("modules/matplotlib.py", b"import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    done = subprocess.run(command(text, "a", "--max_iters", "2"), capture_output=True, preexec_fn=default_interrupt,
                          env=ALONE | {"PYTHONPATH": os.path.abspath("modules")})
    assert (done.returncode, done.stderr) == (130, b"")
    assert load_checkpoint("a")["step"] == 2


def wait_for(condition, seconds=90):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_50_runs_killed_at_random_moments_resume_bit_for_bit(text):
    flags = [*TINY, "--n_embd", "96", "--data", text, "--max_iters", "60"]
    done = subprocess.run([sys.executable, os.path.join(HERE, "kill_runs.py"), ".", "50", *flags],
                          capture_output=True, text=True, env=ALONE)
    assert done.returncode == 0 and "all equal" in done.stdout, done.stderr


TORCHRUN = ["-m", "torch.distributed.run", "--nproc_per_node=2"]


@pytest.mark.slow
def test_two_processes_equal_one_for_every_objective(text):
    flags = [*TINY, "--data", text, "--accum", "4", "--max_iters", "20", "--eval_interval", "10"]
    for launch, out in (([], "one"), (TORCHRUN, "two")):
        subprocess.run([sys.executable, *launch, os.path.join(HERE, "every_objective.py"), out, *flags],
                       check=True, capture_output=True, env=ALONE)
    assert len(os.listdir("one")) == len(OBJECTIVES) + 1
    for name in os.listdir("one"):
        assert losses(f"one/{name}", "step") == losses(f"two/{name}", "step") == [*range(20)]
        for split in ("train", "val"):
            one, two = (losses(f"{out}/{name}", split=split) for out in ("one", "two"))
            assert one == pytest.approx(two, rel=1e-5), name


@pytest.mark.slow
@on_linux
@pytest.mark.parametrize("rank, number", [(1, signal.SIGKILL), (0, signal.SIGTERM), (1, signal.SIGTERM)])
def test_a_signal_to_any_process_ends_all_and_leaves_a_checkpoint(rank, number, text):
    args = command(text, "a", "--accum", "2", "--max_iters", "100000", "--eval_interval",
                   "20" if number == signal.SIGKILL else "100000")
    launcher = subprocess.Popen([sys.executable, *TORCHRUN, *args[1:]], env=ALONE,
                                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: os.path.exists("a/ckpt.pt") and len(metrics("a")) > 50)
        with open(f"/proc/{launcher.pid}/task/{launcher.pid}/children") as f:
            children = f.read().split()
        workers = [int(pid) for pid in children if "train.py" in open(f"/proc/{pid}/cmdline").read()]
        assert len(workers) == 2
        os.kill(workers[rank], number)
        assert launcher.wait(timeout=90) != 0
    finally:
        launcher.kill()
    step = load_checkpoint("a")["step"]
    assert step > 0
    resume("a", "--max_iters", str(step + 5))


RESIDENT = """
import sys, train
def anonymous():
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) for line in f if line.startswith("RssAnon")) / 1024
step, seen = train.training_step, []
def measured(s):
    seen.append(anonymous() if len(seen) in (500, 2000) else 0)
    return step(s)
train.training_step = measured
train.main(sys.argv[1:])
print("MiB", seen[500], seen[2000])
"""


@pytest.mark.slow
@on_linux
def test_memory_does_not_grow_with_the_corpus_or_the_steps(text):
    at = {}
    for name, size in (("small.bin", 10 << 20), ("large.bin", 8 << 30)):
        with open(name, "wb") as f:
            f.truncate(size)                    # sparse: it takes no room on the disk
        args = [*TINY, "--data", name, "--out_dir", name + ".run", "--max_iters", "2001",
                "--eval_interval", "1000", "--log_interval", "100"]
        done = subprocess.run([sys.executable, "-c", RESIDENT, *args], check=True, capture_output=True,
                              text=True, env=ALONE)
        at[name] = [float(x) for x in done.stdout.split("MiB ")[1].split()]
    assert abs(at["large.bin"][1] - at["small.bin"][1]) < 50, at
    assert all(late - early < 20 for early, late in at.values()), at


def test_a_validation_loss_that_is_no_number_does_not_make_a_checkpoint_unreadable(text, monkeypatch):
    """Weights that are finite but far too large: training says --init_from, which must then work."""
    evaluate = train.evaluate
    monkeypatch.setattr(train, "evaluate", lambda *args: [r | {"loss": math.nan} for r in evaluate(*args)])
    fit(text, "a", "--max_iters", "2")
    assert load_checkpoint("a")["val"] == math.inf


def test_a_perplexity_too_large_for_a_float_is_printed():
    record = dict(data="a", objective="clm", loss=2000.0, bpb=None, terms={"nll": 2000.0})
    assert "perplexity" in train.describe(1, record)
