"""Training: optimizers, runs that must be equal, CUDA graphs, what a run prints and saves, how it stops."""
import errno
import itertools
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from conftest import NEEDS_CUDA, tiny, Recording, equal, randomize, settings
from torch.distributions import Bernoulli, Categorical
from torch.testing import assert_close

import model
import run
import data
import train
from data import make_rng, open_corpus
from objectives import OBJECTIVES, document_mask
from run import SETTINGS, build, get_config, get_members, load_checkpoint, load_run, member_weights
from run import save_checkpoint

ALONE = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.path.dirname(train.__file__)}     # as under torchrun
MIXTURE = "clm:.5,mlm:.5"
INDEPENDENT = [name for name, objective in OBJECTIVES.items() if not objective.compares_rows]
on_posix = pytest.mark.skipif(sys.platform == "win32", reason="has no such signals")


def fit(text, out, *flags, code=0):  # trains without loss.png, compressors and sample
    assert train.main(tiny("--data", text, "--out_dir", out, *flags), with_sample=False) == code


def resume(out, *flags):
    assert train.main(["--resume", "--out_dir", out, *flags], with_sample=False) == 0


def write(path, content):
    Path(path).write_bytes(content)


def metrics(out, split="train, val"):  # all records except the first, without timings
    with open(os.path.join(out, "metrics.jsonl"), "rb") as f:
        records = [r for r in [json.loads(line) for line in f][1:] if r["split"] in split]
    return [{k: v for k, v in r.items() if k not in ("seconds", "tok_per_s")} for r in records]


def losses(out, field="loss", split="train"):
    return [r[field] for r in metrics(out, split)]


def assert_same_run(a, b):
    one = load_checkpoint(a)
    two = load_checkpoint(b)
    for part in ("model", "optimizer", "step", "val", "sources", "held_out"):
        assert equal(one[part], two[part]), part
    assert metrics(a) == metrics(b)


def start(*flags):  # -> State before the first step
    hp = get_config(tiny(*flags))
    corpus = open_corpus(hp.data)
    run.move_corpus(corpus, hp)
    return train.make_state(corpus, get_members(hp), hp)


def load_inputs(s, step):  # -> the member that the step trains
    m = train.member_of_step(s.members, step)
    train.load_step_inputs(s, m, step)
    return m


def batch_of(s, step):  # -> what a step trains on
    return train.make_batch(s.starts, s.g, load_inputs(s, step), s.corpus, "train", s.hp)


def take(s, *steps):  # -> what the last of these steps returns
    for step in steps:
        m = load_inputs(s, step)
        out = train.training_step(s, m, m.objective.loss, train.optimizer_step)
    return out


def state_of(s):  # -> copies of all that a step writes
    tensors = s.model.state_dict() | run.optimizer_tensors(s.opt)
    return {name: t.clone() for name, t in tensors.items()}


def on_step(n, act, monkeypatch):  # calls act just before the n-th update of the weights
    step = train.optimizer_step
    count = itertools.count(1)

    def counting(*args):
        if next(count) == n:
            act()
        step(*args)
    monkeypatch.setattr(train, "optimizer_step", counting)


def die(*args):
    raise KeyboardInterrupt


# ---- frozen bits
FROZEN = {  # losses of steps 0, 8, 16, then the validation loss after 24 steps
    "clm": [5.545177, 4.303634, 3.110652, 2.796622], "mlm": [5.545177, 4.130235, 3.003245, 2.780056],
    "span": [6.238325, 5.043033, 3.571822, 3.164323], "mdlm": [5.545177, 3.956165, 2.895681, 2.685100],
    "hybrid": [5.545177, 4.337475, 3.143755, 2.804459]}


@pytest.mark.parametrize("name", FROZEN)
def test_the_bits_of_training_are_frozen(name, text):
    """Weights, windows, corruption, optimizers and schedules are those with which the figures of the pages were
    measured. The text is read more than once, so the n-gram drop rate counts. Rounding differs between CPUs and
    versions of torch, by less than the tolerance: errors of 2e-7 in all weights change these losses by 2e-7."""
    write("squares.txt", "".join(f"{i} * {i} = {i * i}\n" for i in range(150)).encode())
    fit("squares.txt", "a", "--objective", name, "--max_iters", "24", "--warmup_iters", "3", "--log_interval", "8")
    found = [*losses("a"), losses("a", split="val")[-1]]
    why = f"{name} no longer trains as it did: {found}. Then the figures of the pages are false (a fork changes FROZEN)"
    assert found == pytest.approx(FROZEN[name], rel=1e-4), why


# ---- optimizers
@torch.no_grad()
@pytest.mark.parametrize("r, c", [(1, 1), (8, 8), (8, 32), (5, 7)])
@pytest.mark.parametrize("dtype, error", [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_newton_schulz_changes_only_singular_values(r, c, dtype, error):
    x = torch.randn(3, r, c, generator=make_rng("x"))
    u, s, vt = torch.linalg.svd(x.double(), full_matrices=False)
    s = s / s.norm(dim=1, keepdim=True)
    for _ in range(train.NS_STEPS):
        s = 3.4445 * s - 4.7750 * s ** 3 + 2.0315 * s ** 5
    assert_close(train.newton_schulz(x, dtype).double(), u * s[:, None] @ vt, rtol=0, atol=error)
    assert (s > 0.6).double().mean() > 0.9 and s.max() < 1.3
    assert (train.newton_schulz(0 * x, dtype) == 0).all()


@torch.no_grad()
@pytest.mark.parametrize("optimizer, error", [("muon", 1e-3), ("adamw", 1e-5)])
def test_an_update_equals_that_of_torchs_optimizers(optimizer, error, text):
    """Muon computes in bfloat16. It takes the products of all matrices of a shape at once, which round differently."""
    s = start("--data", text, "--dtype", "bfloat16", "--optimizer", optimizer)
    assert len({momentum.shape[1:] for _, momentum in s.opt.muon}) == len(s.opt.muon), "a product for each shape"
    muon = []                                   # (our parameter, a part of it, torch's parameter) each
    for stack in [p for params, _ in s.opt.muon for p in params]:
        muon += [(stack, i, torch.nn.Parameter(matrix.clone())) for i, matrix in enumerate(stack)]
    adamw = [(p, ..., torch.nn.Parameter(p.clone())) for p, *_ in s.opt.adamw]
    references = [torch.optim.AdamW([q for *_, q in adamw], betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0)]
    if muon:
        references.append(torch.optim.Muon([q for *_, q in muon], weight_decay=0.0, momentum=train.MOMENTUM,
                                           adjust_lr_fn="match_rms_adamw", ns_steps=train.NS_STEPS))
    for step, lr in enumerate([0.01, 0.003, 0.001, 0.02]):
        for i, p in enumerate(s.model.parameters()):
            p.grad = torch.randn(p.shape, generator=make_rng(f"gradient {step} {i}"))
        for p, part, q in muon + adamw:
            q.grad = p.grad[part].clone()
        s.opt.lr.fill_(lr)
        train.optimizer_step(s.opt, s.hp)
        for reference in references:
            reference.param_groups[0]["lr"] = lr
            reference.step()
        for p, part, q in muon + adamw:
            assert_close(p[part], q.detach(), rtol=0, atol=error)


@pytest.mark.parametrize("optimizer", SETTINGS["training"]["optimizer"].choices)
def test_every_parameter_has_one_optimizer_and_only_hidden_matrices_decay(optimizer):
    """Muon trains the StackedLinear layers inside blocks, AdamW all others, whatever their shape."""
    hp = settings("nsp", 32, optimizer=optimizer, weight_decay=0.5)
    net = build(get_members(hp), hp)
    net.blocks[1].conv = torch.nn.Conv1d(4, 4, 3)               # a fork's block, with layers that are not the model's
    net.blocks[1].plain = torch.nn.Linear(4, 4)
    opt = train.make_optimizer(net, hp)
    in_muon = [id(p) for params, _ in opt.muon for p in params]
    in_adamw = [id(p) for p, *_ in opt.adamw]
    hidden = [id(m.weight) for m in net.blocks.modules() if isinstance(m, model.StackedLinear)]
    assert sorted(in_muon) == sorted(hidden if optimizer == "muon" else [])
    assert sorted(in_muon + in_adamw) == sorted(id(p) for p in net.parameters())
    before = [p.detach().clone() for p in net.parameters()]
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
    opt.lr.fill_(0.1)
    train.optimizer_step(opt, hp)
    for p, old in zip(net.parameters(), before):
        assert_close(p.detach(), old * (0.95 if id(p) in hidden else 1.0))


@pytest.mark.parametrize("changes, rates", [
    ({}, {0: 0.01 / 21, 9: 0.1 / 21, 19: 0.2 / 21, 20: 0.01, 250: 0.01, 480: 0.01, 660: 0.0075, 840: 0.005,
          1020: 0.0025, 1199: 0.01 / 720, 1200: 0.0}),
    # the run ends during the warm-up, whose last steps are below the fall to 0 or above it
    (dict(warmup_iters=99, max_iters=10), {0: 0.0001, 4: 0.0005, 9: 0.001, 10: 0.0}),
    (dict(warmup_iters=19, max_iters=10), {0: 0.0005, 8: 0.01 / 3, 9: 0.01 / 6, 10: 0.0}),
    (dict(lr_decay=0.0), {19: 0.2 / 21, 20: 0.01, 840: 0.01, 1199: 0.01, 1200: 0.0})])
def test_the_learning_rate_rises_is_constant_and_falls_linearly_to_0(changes, rates):
    """With the default settings and 1,200 steps, except those that are changed."""
    hp = settings("clm", 32, **dict(max_iters=1200) | changes)
    found = {step: train.learning_rate(step, hp) for step in rates}
    assert found == pytest.approx(rates, rel=1e-9, abs=1e-12)


def test_a_small_second_source_changes_steps_and_drop_rate_only_by_its_share():
    def plan(*sources):  # (share, bytes) each -> steps, drop rate
        hp = settings("clm", 32, max_iters=1200, ngram_rows=65536, max_passes=4.0, ngram_drop=0.5)
        corpus = [dict(weight=weight, train=range(size)) for weight, size in sources]
        train.shorten_run(corpus, get_members(hp), hp)
        return hp.max_iters, train.ngram_drop_rate(corpus, get_members(hp), hp)
    large, small = (1.0, 158_400), (1.0, 5_400)                     # once in 1,200 steps; 29 times
    (steps, rate), (few, high) = plan(large), plan(small)
    assert (steps, rate, few) == (1200, pytest.approx(0.5), 200)    # 200 steps: 5 passes
    assert plan((0.98, 158_400), (0.02, 5_400)) == (1200, pytest.approx(0.5, abs=0.01))
    steps, rate = plan((0.1, 158_400), (0.9, 5_400))
    assert steps == 202 and 0.5 < rate < high
    long = [(1.0, 12_000_000)], [(1 / 12, 1_000_000)] * 12          # the same text, in one file or in twelve
    rates = [train.ngram_drop_rate([dict(weight=w, train=range(n)) for w, n in sources], get_members(hp), hp)
             for sources in long for hp in [settings("clm", 32, max_iters=400_000, ngram_rows=65536)]]
    assert rates == pytest.approx([0.324, 0.324], abs=1e-3), "4.4 passes, but the table holds 9% of the text"


# ---- equalities
@pytest.mark.parametrize("name, batch_size, accum, clip", [
    ("clm", 1, 8, 0.0), *((name, 4, 2, 0.01) for name in ["clm:3,mlm:1", *INDEPENDENT])])
def test_micro_batches_give_the_gradient_of_the_whole_batch(name, batch_size, accum, clip, text):
    """Targets have their weights in the whole batch; clipping comes after the last micro-batch. Each micro-batch drops
    n-gram lookups of its own, so none are dropped here."""
    s = start("--data", text, "--objective", name, "--batch_size", str(batch_size), "--accum", str(accum),
              "--grad_clip", str(clip), "--ngram_drop", "0")
    net = build(s.members, s.hp)
    for module in (s.model, net):
        randomize(module)
    grads = []
    n_rows = []                                 # of each micro-batch

    def update(*args):
        grads.extend(p.grad for p in s.model.parameters() if p.grad is not None)

    def counted_loss(net, part, hp):
        n_rows.append(len(part["inp"]))
        return m.objective.loss(net, part, hp)
    m = load_inputs(s, 0)
    loss, norm = train.training_step(s, m, counted_loss, update)
    assert n_rows == [batch_size] * accum, "rows are lost"

    batch = train.sample_batch(m, s.corpus, "train", batch_size * accum, f"{s.hp.seed},0", s.hp)
    total, _ = m.objective.loss(net, batch, s.hp)
    total.backward()
    want = [p.grad for p in net.parameters() if p.grad is not None]
    length = float(torch.stack([w.norm() for w in want]).norm())
    why = "set compares_rows=True if rows are compared; otherwise weigh by the batch's weight or row_weight"
    assert (float(loss), float(norm)) == pytest.approx((float(total.detach()), length), rel=1e-4), why
    scale = min(1.0, clip / length) if clip else 1.0
    assert_close(grads, [w * scale for w in want], rtol=1e-3, atol=1e-5 * length * scale)


@pytest.mark.parametrize("name, n_save", [
    *((name, 0) for name in [*OBJECTIVES, MIXTURE]), ("clm", 3), ("clm", 4),
    *((f"clm --optimizer {optimizer}", 0) for optimizer in SETTINGS["training"]["optimizer"].choices)])
def test_a_killed_run_resumes_bit_for_bit(name, n_save, text, monkeypatch):
    """n_save 0: killed in step 4; otherwise in this save, before the written file is renamed: 3 is that of best.pt, 4
    that of ckpt.pt, both after step 4."""
    flags = ["--objective", *name.split(), "--max_iters", "5", "--eval_interval", "2", "--n_layer", "1"]
    fit(text, "whole", *flags)
    on_step(0 if n_save else 4, die, monkeypatch)
    replace = os.replace
    saves = itertools.count(1)
    monkeypatch.setattr(os, "replace", lambda *names: die() if next(saves) == n_save else replace(*names))
    with pytest.raises(KeyboardInterrupt):
        fit(text, "killed", *flags)
    resume("killed")
    assert_same_run("whole", "killed")


@on_posix
def test_the_log_has_each_line_once_however_often_a_run_is_stopped(text, monkeypatch):
    """Here before the first line after a resume. A log without a checkpoint is started anew."""
    flags = ["--max_iters", "6", "--eval_interval", "2", "--log_interval", "3"]
    fit(text, "whole", *flags)
    os.mkdir("a")
    write("a/metrics.jsonl", b"of a run that was killed before its first checkpoint\n" * 99)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        on_step(6, die, patch)                  # after step 3 was logged, which comes after the checkpoint of step 4
        fit(text, "a", *flags)
    write("a/metrics.jsonl", Path("a/metrics.jsonl").read_bytes() + b"of later steps\n" * 99)
    with monkeypatch.context() as patch:
        on_step(1, lambda: os.kill(os.getpid(), signal.SIGINT), patch)
        with pytest.raises(KeyboardInterrupt):
            resume("a")
    resume("a")
    assert_same_run("whole", "a")
    first, *_ = Path("a/metrics.jsonl").read_text().splitlines()
    assert "config" in json.loads(first)


def test_a_resumed_run_may_be_longer(text):
    """If no schedule depends on max_iters, it equals the longer run bit for bit."""
    unplanned = ["--lr_decay", "0", "--ngram_drop", "0"]
    fit(text, "long", "--max_iters", "6", *unplanned)
    fit(text, "short", "--max_iters", "3", *unplanned)
    resume("short", "--max_iters", "6")
    assert losses("short") == losses("long")
    assert equal(*(load_checkpoint(out)["model"] for out in ("short", "long")))


def test_a_child_continues_after_its_parents_windows(text, capsys):
    """So do a child's child and a resumed child."""
    fit(text, "a", "--max_iters", "4", "--objective", "mdlm")
    fit(text, "b", "--max_iters", "2", "--init_from", "a")
    assert ", <= " in capsys.readouterr().out, "an upper bound is printed as one"
    fit(text, "c", "--max_iters", "0", "--init_from", "a")
    assert losses("c", split="val") == losses("a", split="val")[-1:]
    os.rename("a", "gone")
    resume("b", "--max_iters", "3")
    child = start("--data", text, "--init_from", "b")
    whole = start("--data", text, "--objective", "mdlm")
    for s, step in ((child, 2), (whole, 4 + 3 + 2)):
        batch_of(s, step)
    assert equal(child.starts, whole.starts)


def test_a_text_that_has_changed_is_not_resumed_and_is_named_by_a_child(text, capsys, refuses):
    """Its held-out part may have been read before. Checkpoints of older programs have a list for each source."""
    fit(text, "a", "--max_iters", "1")
    ckpt = load_checkpoint("a")
    ckpt["sources"] = [[*source.values(), "a further value"] for source in ckpt["sources"]]
    save_checkpoint("a/ckpt.pt", ckpt)
    fit(text, "child", "--max_iters", "0", "--init_from", "a")
    assert "has changed since" not in capsys.readouterr().out
    resume("a", "--max_iters", "2")
    write(text, b"a changed file\n" * 500)
    fit(text, "later child", "--max_iters", "0", "--init_from", "a")
    assert f"--data {text}: has changed since {os.path.join('a', 'ckpt.pt')} was" in capsys.readouterr().out
    refuses("differs from the data of a", train.main, ["--resume", "--out_dir", "a", "--max_iters", "3"])


def test_evaluation_never_changes_training(text):
    fit(text, "often", "--max_iters", "6", "--eval_interval", "2")
    fit(text, "never", "--max_iters", "6", "--eval_interval", "1000", "--eval_iters", "2")
    assert losses("often") == losses("never")
    assert losses("often", "step", "val") == [0, 2, 4, 6]


def test_validation_depends_only_on_objective_and_held_out_text(text):
    """Not on batch size, seed, other sources or members, or the share of dropped lookups."""
    write("other.txt", b"a" * 9000 + b"b" * 1000)

    def first_batches(entry, data, *flags):
        hp = get_config(tiny(*flags))
        source, m = [*itertools.product(open_corpus(data), get_members(hp))][entry]
        return [*train.validation_batches(m, source, hp)]
    alone = first_batches(0, [text], "--objective", "mlm")
    other = ["--batch_size", "2", "--seed", "9"]
    assert equal(alone, first_batches(1, ["other.txt", text], "--objective", "mlm", *other))
    assert equal(alone, first_batches(1, [text], "--objective", "clm,mlm:.3", "--batch_size", "9"))
    [batch] = first_batches(0, ["other.txt", text], "--objective", "mlm")
    assert batch["tgt"].unique().tolist() == [-100, ord("b")], "training reads the others"
    batch = batch_of(start("--data", "other.txt"), 0)
    assert batch["inp"].unique().tolist() == [ord("a")]
    s = start("--data", text)
    randomize(s.model)
    records = train.evaluate(s.model, s.members, s.corpus, s.hp)
    s.model.ngrams.drop = 0.9
    assert records == train.evaluate(s.model, s.members, s.corpus, s.hp) and s.model.training


def test_progress_changes_only_training_rows(text):
    """Validation estimates the bound at every step, from rows with all numbers of masked bytes."""
    def counts(batch):
        return {*(batch["tgt"] >= 0).sum(1).tolist()}
    s = start("--data", text, "--objective", "mdlm", "--batch_size", "32", "--max_iters", "10")
    [val] = train.validation_batches(s.members[0], s.corpus[0], s.hp)
    assert len(counts(val)) == 32
    for step, few in ((0, True), (6, True), (7, False), (9, False)):
        batch = batch_of(s, step)
        assert (counts(batch) == {13}) == few and float(s.hp.progress) == pytest.approx(step / 10)
        assert float(s.opt.lr) == pytest.approx(train.learning_rate(step, s.hp))
    s.hp.init_from = "a run"
    batch = batch_of(s, 0)
    assert len(counts(batch)) > 20


def test_each_seed_and_step_has_its_own_windows_corruption_and_dropped_lookups(text, monkeypatch):
    """Each process drops its own lookups."""
    seen = []
    for seed in "12":
        s = start("--data", text, "--max_iters", "9", "--seed", seed, "--objective", "mlm,mdlm")
        seen.append(s.model.embed.weight.tolist())
        for step in range(4):                   # of both members
            seen.append((batch_of(s, step)["tgt"] < 0).tolist())
            seen += [s.starts[1].tolist(), torch.rand(4).tolist()]                 # by the seed of dropped lookups
        assert s.model.ngrams.drop == train.ngram_drop_rate(s.corpus, s.members, s.hp) > 0
    monkeypatch.setattr(train.run, "RANK", 1)
    batch_of(s, 3)
    seen.append(torch.rand(4).tolist())
    assert not any(a == b for a, b in itertools.combinations(seen, 2))


def test_a_step_does_not_change_parameters_that_its_loss_does_not_depend_on(text):
    """Nor their momentum, moments and number of updates; nor do they decay."""
    s = start("--data", text, "--objective", "clm,electra,nsp", "--weight_decay", "1", "--gen_scale", "1")
    randomize(s.model)
    name_of = {p: name for name, p in s.model.named_parameters()}
    for step in range(12):
        before = state_of(s)
        m = train.member_of_step(s.members, step)
        take(s, step)
        changed = {name for name, t in state_of(s).items() if not equal(t, before[name])}
        heads = {name.split(".")[1] for name in changed if name.startswith("heads.")}
        assert heads == {"clm": set(), "electra": {"generator", "replaced"}, "nsp": {"nsp"}}[m.objective.name]
        assert "blocks.0.up.weight" in changed and "ngrams.table" in changed
        for i, state in enumerate(s.opt.adamw):
            parts = {f"adamw.{i}.{part}" in changed for part in ("first", "second", "updates")}
            assert parts == {name_of[state.param] in changed}
        for i, (params, _) in enumerate(s.opt.muon):
            assert {f"muon.{i}" in changed} == {name_of[p] in changed for p in params}


def test_validation_keeps_documents_apart_as_training_does(text):
    write("nul.txt", b"abcdefghijklmnopqrstuvw\0" * 300)
    s = start("--data", "nul.txt", "--objective", "mdlm", "--doc_mask")
    [val] = train.validation_batches(s.members[0], s.corpus[0], s.hp)
    trained = []

    def loss(net, part, hp):
        trained.append(dict(part))
        return s.members[0].objective.loss(net, part, hp)
    train.training_step(s, load_inputs(s, 0), loss, train.optimizer_step)
    for batch in (*trained, val):
        found = {key: batch.pop(key) for key in ("mask", "before")}
        assert equal(found, document_mask(batch))


# ---- a step as a CUDA graph
@pytest.mark.parametrize("more", [[], ["--optimizer", "adamw", "--accum", "2"]], ids=" ".join)
@pytest.mark.parametrize("name, own", [
    *((name, []) for name in [*OBJECTIVES, MIXTURE]), ("mtp", ["--mtp_kind", "sequential"])])
def test_a_recorded_step_can_be_replayed(name, own, more, text):
    """Records the first step of each member. Later steps only call load_step_inputs and replay the recording, and equal
    eager steps bit for bit. Rates differ in each step."""
    write("nul.txt", Path(text).read_bytes().replace(b"\n", b"\0"))
    flags = ["--data", "nul.txt", "--objective", name, "--n_layer", "1", "--max_iters", "8", "--warmup_iters", "3",
             "--weight_decay", "0.1", *own, *more]
    if more and all(OBJECTIVES[member].supports_doc_mask for member in member_weights(name)):
        flags.append("--doc_mask")
    eager = start(*flags)
    graphed = start(*flags)
    recorded = {}                               # {member: recording of its step, its loss and norm}
    for step in range(2 + len(eager.members)):
        want = take(eager, step)
        m = load_inputs(graphed, step)
        member = m.objective.name
        if member in recorded:
            recorded[member][0].replay()
        else:
            with Recording() as recording:
                recorded[member] = recording, train.training_step(graphed, m, m.objective.loss, train.optimizer_step)
        assert_close((recorded[member][1], state_of(graphed)), (want, state_of(eager)), rtol=0, atol=0)


@NEEDS_CUDA
@pytest.mark.parametrize("name", [*OBJECTIVES, MIXTURE])
def test_steps_on_a_gpu_never_wait_for_it_and_give_the_same_losses_eager_compiled_and_captured(name, text):
    # a compiled model drops other lookups
    flags = ["--device", "cuda", "--max_iters", "20", "--data", text, "--objective", name, "--n_embd", "64",
             "--ngram_drop", "0"]
    fit(text, "eager", *flags)
    for way in ["--cuda_graph"], ["--compile"], ["--compile", "--cuda_graph"]:
        out = "run" + "".join(way)
        fit(text, out, *flags, *way)
        # atomic additions to the gradients of embeddings come in any order
        assert losses(out) == pytest.approx(losses("eager"), rel=2e-3 if "--compile" in way else 1e-4), out
    s = start(*flags)
    take(s, 0)
    torch.cuda.set_sync_debug_mode("error")
    take(s, 1)


def test_the_logged_speed_is_that_of_the_steps_since_the_last_record(text):
    s = start("--data", text, "--max_iters", "30", "--batch_size", "3")
    records = []
    s.log = run.Log(mock.Mock(), [], mock.Mock(), records.append, step=9, seconds=52.0, printed=54.0)
    s.step = 19
    s.seconds = 54.0
    run.log_step(s, s.members[0], 0.5, math.inf, 0.01)
    assert records[0]["tok_per_s"] == 5 * 3 * s.hp.block_size, "ten steps took two seconds"
    assert records[0]["grad_norm"] is None, "JSON lacks infinity"


def test_a_run_leaves_a_folder_with_checkpoints_metrics_and_picture(text, capsys, monkeypatch):
    flags = tiny("--data", text, "--max_iters", "3")
    works = mock.MagicMock()
    fails = mock.MagicMock(Figure=mock.Mock(side_effect=ValueError("no such backend")))
    for figure in (works, fails, None):         # None: not installed
        monkeypatch.setitem(sys.modules, "matplotlib", figure)
        monkeypatch.setitem(sys.modules, "matplotlib.figure", figure)
        assert train.main([*flags, "--objective", "prefix"]) == 0
    [path] = works.Figure().subplots().figure.savefig.call_args.args
    assert path == os.path.join("out", "prefix", "loss.png")
    out = capsys.readouterr().out
    assert "perplexity of the targets 256, causal rows 8.0000 bits/byte\n" in out
    assert out.count("loss.png was not drawn: ") == 2, "one line if matplotlib fails or is missing"
    for folder in (os.path.join("out", "prefix"), os.path.join("out", "prefix-2")):
        assert f" | {folder}\n" in out and {"ckpt.pt", "best.pt", "metrics.jsonl"} <= set(os.listdir(folder))
        assert load_checkpoint(folder)["config"]["out_dir"] == folder
    assert bytes(load_checkpoint("out/prefix")["held_out"].tolist()) in Path(text).read_bytes()[-10000:]
    [line, *_], [val, *_] = metrics("out/prefix-2", "train"), metrics("out/prefix-2", "val")
    assert set(line) == {"step", "split", "data", "objective", "loss", "lr", "grad_norm"}
    assert val["bpb"] == pytest.approx(8.0) and val["loss"] == pytest.approx(math.log(256))
    assert val["figures"] == {"nll": val["loss"]}


def test_a_run_outside_of_the_main_thread_trains_without_handlers_of_signals(text):
    with ThreadPoolExecutor(1) as pool:
        pool.submit(fit, text, "a", "--max_iters", "2").result()
    assert load_checkpoint("a")["step"] == 2


def test_each_member_is_validated_on_each_source_and_best_has_the_lowest_weighted_sum(text):
    write("new.txt", b"other text, of its own kind\n" * 200)
    fit(text + ":0.9", "a", "--objective", "clm:3,mlm:1", "--data", "new.txt:0.1", "--max_iters", "20",
        "--eval_interval", "5", "--learning_rate", "10", "--lr_decay", "0")
    total = dict.fromkeys(range(0, 21, 5), 0.0)
    weights = {"clm": 0.75, "mlm": 0.25, text: 0.9, "new.txt": 0.1}
    for r in metrics("a", "val"):
        total[r["step"]] += weights[r["objective"]] * weights[r["data"]] * r["loss"]
        assert (r["bpb"] is None) == (r["objective"] == "mlm")
    assert len(metrics("a", "val")) == 5 * 2 * 2
    best = load_checkpoint("a/best.pt")
    del total[0]                                # step 0 is never the best
    assert best["step"] == min(total, key=total.get) != 20
    assert best["val"] == pytest.approx(total[best["step"]])
    assert losses("a")[0] == pytest.approx(math.log(256), abs=1e-4)


@pytest.mark.parametrize("name", [name for name, objective in OBJECTIVES.items() if objective.bpb == "causal"])
def test_bits_per_byte_are_those_of_clms_rows(name, text):
    write("nul.txt", b"in which some windows of 33 bytes have an end and some do not\0" * 200)
    s = start("--data", "nul.txt", "--objective", f"clm,{name}", "--batch_size", "16")
    randomize(s.model)
    (clm, other), _ = train.evaluate(s.model, s.members, s.corpus, s.hp)
    [batch] = train.validation_batches(s.members[0], s.corpus[0], s.hp)
    s.model.eval()
    logits = s.model.logits(s.model(batch["inp"]))[..., :256]   # special ids, which fim predicts, do not compete
    nats = float(F.cross_entropy(logits.detach().mT, batch["tgt"]))
    assert other["bpb"] == pytest.approx(nats / math.log(2)) == pytest.approx(clm["bpb"])


def test_max_passes_limits_steps_unless_max_iters_is_given(text, monkeypatch):
    monkeypatch.setattr(train, "MIN_ITERS", 5)
    write("small.txt", Path(text).read_bytes()[:1000])
    fit("small.txt", "a", "--max_passes", "3")  # 900 bytes to train on, 4 rows of 33 a step
    ckpt = load_checkpoint("a")
    assert (ckpt["step"], ckpt["config"]["eval_interval"]) == (math.ceil(3 * 900 / (4 * 33)), 6) == (21, 6)
    resume("a", "--max_iters", "23")
    fit("small.txt", "b", "--max_passes", "0.1")
    fit("small.txt", "c", "--max_iters", "22")
    assert [load_checkpoint(out)["step"] for out in ("a", "b", "c")] == [23, 5, 22]


SLOW = {"rotation": 250, "nsp": 600, "electra": 250}               # steps; objectives of a fork: 150
# these learn in 60 steps of a smaller run with a higher rate
QUICK = "clm mlm prefix span ul2 fim mtp bart contrastive mdlm sedd bd3lm xlnet hybrid".split()


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else [])
                                  for name in OBJECTIVES])
def test_every_objective_learns_in_a_short_run(name, text):
    """Its loss falls below the unigram entropy of its targets or, if it predicts no bytes, below chance."""
    steps = 60 if name in QUICK else SLOW.get(name, 150)
    quick = ["--batch_size", "8", "--n_layer", "1", "--learning_rate", ".03"]
    size = quick if name in QUICK else ["--batch_size", "16"]
    data = ["--data", "stdlib", "--block_size", "64"] if name == "nsp" else ["--data", text]
    s = start("--objective", name, *size, "--n_embd", "32", "--max_iters", str(steps), "--eval_iters", "3", *data)
    [first], _ = train.evaluate(s.model, s.members, s.corpus, s.hp)
    take(s, *range(steps))
    [last], _ = train.evaluate(s.model, s.members, s.corpus, s.hp)
    [m] = s.members
    objective = m.objective
    batches = [*train.validation_batches(m, s.corpus[0], s.hp)]
    found = last["figures"] | {"loss": last["loss"]}
    limits = {"loss": first["loss"] - 0.02}
    if "tgt" in batches[0]:
        targets = torch.cat([b["tgt"][b["tgt"] >= 0] for b in batches])
        target_weights = torch.cat([b["weight"][b["tgt"] >= 0] for b in batches])
        # what a model that predicts the weighted frequencies would reach; the weights of a batch should add up to 1
        frequencies = Categorical(torch.zeros(512).index_add(0, targets, target_weights))
        unigram = float(frequencies.entropy() * target_weights.sum() / len(batches))
        nats = {"nll", "generator", *(key for key in found if key.startswith("head"))} & found.keys()
        limits |= dict.fromkeys(nats or {"loss"}, unigram)
    if "nsp" in found:
        limits["nsp"] = math.log(2) - 0.01
    if "discriminator" in found:
        limits["discriminator"] = float(Bernoulli(found["replaced"]).entropy())
    for key, limit in limits.items():
        assert found[key] < limit, f"{key} is {found[key]:.3f}, not below {limit:.3f}, after {steps} steps"
    if objective.bpb in ("loss", "causal"):
        assert last["bpb"] < unigram / math.log(2) - 0.5


@pytest.mark.parametrize("content", [b"abcdefghijk\0" * 300, b"a" * 3000, bytes(range(256)) * 12])
def test_any_bytes_can_be_trained_on(content, text, monkeypatch):
    monkeypatch.setattr(data, "is_text", lambda contents: True)
    write("any.bin", content)
    for name in OBJECTIVES:
        loss, norm = take(start("--data", "any.bin", "--objective", name), 0, 1)
        assert math.isfinite(loss) and math.isfinite(norm), name


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="compiles C++")
def test_compiling_gives_the_same_losses(text):
    for out, way in (("plain", "--no-compile"), ("compiled", "--compile")):
        fit(text, out, "--max_iters", "30", "--objective", "prefix", "--n_layer", "1", "--ngram_drop", "0", way)
    assert losses("plain") == pytest.approx(losses("compiled"), rel=1e-4)


@pytest.mark.parametrize("where, log, what", [("loss", 4, "loss or gradient is not finite at step 8"),
                                              ("gradient", 7, "loss or gradient is not finite at step 7"),
                                              ("loss", 100, "the validation loss is not finite at step 10"),
                                              ("n-gram", 100, "a weight is not finite at step 10"),
                                              ("moment", 100, "the optimizer's state is not finite at step 10")])
def test_a_step_that_is_not_finite_ends_the_run_and_saves_nothing(where, log, what, text, monkeypatch, capsys):
    """In step 7 the first of two micro-batches is bad. It is noticed when step 7 or 8 is logged, or before step 10,
    whose state is validated and saved. A row of the n-gram table that no validation text reads is noticed when it is
    saved. So is an infinite second moment, as of a gradient whose square overflows: it changes no weight. A child of
    the run trains; the resumed run repeats the step."""
    plan = ["--accum", "2", "--lr_decay", "0", "--ngram_drop", "0", "--eval_interval", "5", "--log_interval", str(log)]
    forward = model.Transformer.forward
    hash_ngrams = model.hash_ngrams
    update = train.optimizer_step
    passes = itertools.count()
    updates = itertools.count()

    def poisoned(net, *args, **how):
        h = forward(net, *args, **how)
        if not net.training or next(passes) != 7 * 2:
            return h
        if where == "n-gram":
            net.ngrams.table.data[0] = math.nan
            patch.setattr(model, "hash_ngrams", lambda *args: 1 + hash_ngrams(*args).clamp(max=8))
            return h
        zero = (h * 0).sum()                    # the gradient of its root is not finite
        return h + (zero * math.nan if where == "loss" else zero.sqrt())

    def poisoned_update(opt, hp):
        update(opt, hp)
        if next(updates) == 7:
            opt.adamw[0].second.fill_(math.inf)
    with monkeypatch.context() as patch:
        if where == "moment":
            patch.setattr(train, "optimizer_step", poisoned_update)
        else:
            patch.setattr(model.Transformer, "forward", poisoned)
        with pytest.raises(FloatingPointError) as e:
            fit(text, "a run", "--max_iters", "12", *plan)
    assert str(e.value).startswith(f"{what}; the last checkpoint in a run, if any, is unchanged. Try a lower ")
    for name in ("ckpt.pt", "best.pt"):
        saved = load_checkpoint(f"a run/{name}")
        assert saved["step"] == 5 and all(t.isfinite().all() for t in saved["model"].values())
    fit(text, "child", "--max_iters", "3", "--init_from", "a run", "--learning_rate", "0.001")
    resume("a run")
    assert losses("a run", "step") == [*range(0, 12, log)] and all(map(math.isfinite, losses("a run")))


@on_posix
@pytest.mark.parametrize("name, code, at", [("SIGINT", 130, 7), ("SIGTERM", 143, 10), ("SIGHUP", 129, 3),
                                            ("SIGTERM", 0, 12)])
def test_a_signal_finishes_the_step_and_saves(name, code, at, text, monkeypatch, capsys):
    """In one case just before an evaluation, in one in the last step, after which the run is done. A run that is
    stopped is evaluated, so that sample.py uses its best state up to then."""
    flags = ["--max_iters", "12", "--eval_interval", "5"]
    number = getattr(signal, name)
    fit(text, "whole", *flags)
    on_step(at, lambda: os.kill(os.getpid(), number), monkeypatch)
    before = signal.signal(number, die)         # a caller's handler, not one that is ignored
    try:
        if name == "SIGINT":                    # so that a loop over runs ends, too
            with pytest.raises(KeyboardInterrupt):
                fit(text, "a run", *flags)
        else:
            fit(text, "a run", *flags, code=code)
        assert signal.getsignal(number) is die, "handlers are put back"
    finally:
        signal.signal(number, before)
    assert ("python train.py --resume --out_dir 'a run'" in capsys.readouterr().out) == bool(code)
    assert load_checkpoint("a run")["step"] == at
    loss_at = dict(zip(losses("a run", "step", "val"), losses("a run", split="val")))
    assert at in loss_at and load_run("a run", "cpu")[2]["step"] == min({*loss_at} - {0}, key=loss_at.get)
    resume("a run")
    assert_same_run("whole", "a run")


def test_untrained_weights_are_saved_only_if_the_run_ends_with_them(text, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(FloatingPointError) as e:
        patch.setattr(train, "learning_rate", lambda step, hp: math.inf)
        fit(text, "a", "--max_iters", "6", "--eval_interval", "3", "--log_interval", "9")
    assert str(e.value).startswith("the validation loss is not finite at step 3; the last checkpoint in a, if any, ")
    assert os.listdir("a") == ["metrics.jsonl"] and losses("a", "step", "val") == [0]
    with monkeypatch.context() as patch:
        patch.setattr(run, "show_rows", lambda *args: os.kill(os.getpid(), signal.SIGTERM))
        fit(text, "a", "--max_iters", "6", code=143)
    assert load_checkpoint("a")["step"] == 0 and losses("a", "step", "val") == [0]
    resume("a")
    fit(text, "b", "--max_iters", "0")
    assert [load_checkpoint(out)["step"] for out in ("a", "b")] == [6, 0]


def test_best_pt_has_the_lowest_loss_of_a_run_that_was_stopped_and_then_got_worse(text, monkeypatch):
    """The loss at the stop is not in ckpt.pt, which equals that of a run that was not stopped."""
    flags = ["--max_iters", "9", "--eval_interval", "6"]
    on_step(4, lambda: os.kill(os.getpid(), signal.SIGTERM), monkeypatch)
    fit(text, "a", *flags, code=143)
    lowest = load_checkpoint("a/best.pt")
    monkeypatch.setattr(train, "learning_rate", lambda step, hp: 9.0)
    resume("a")
    assert load_checkpoint("a/best.pt")["step"] == 4 and load_checkpoint("a")["val"] > lowest["val"]
    os.remove("a/best.pt")
    resume("a", "--max_iters", "10")
    assert load_checkpoint("a/best.pt")["step"] == 10


def command(text, out, *flags):  # train.py as a process of its own
    return [sys.executable, train.__file__, *tiny("--data", text, "--out_dir", out, *flags)]


@on_posix
def test_a_run_loads_no_compiler_and_a_broken_pipe_saves(text):
    """As with python train.py | head. The run does not load the compiler, which takes longer than a hundred steps of a
    small model. An optimizer's class or a decorator would load it."""
    code = """import atexit, sys, train
atexit.register(lambda: print("the compiler is loaded" * ("torch._dynamo" in sys.modules), end="", file=sys.stderr))
train.run.run_program(train.main)"""
    flags = command(text, "a", "--max_iters", "2000", "--eval_interval", "5")[2:]
    with subprocess.Popen([sys.executable, "-c", code, *flags], env=ALONE, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE) as process:
        assert any(line.startswith(b"step      0 | validation") for line in process.stdout)
        process.stdout.close()
        assert process.stderr.read() == b"" and process.wait(60) == 141
    step = load_checkpoint("a")["step"]
    assert step % 5 == 1, "stops one step after the line that could not be printed"
    resume("a", "--max_iters", str(step + 1))


def test_a_failed_save_ends_the_run_in_one_line_and_the_last_checkpoint_stays(text, monkeypatch, refuses):
    flags = ["--max_iters", "4", "--eval_interval", "2"]
    fit(text, "whole", *flags)
    calls = itertools.count(1)

    def fsync(_):
        if next(calls) == 4:                    # of ckpt.pt, after step 4
            raise OSError(errno.ENOSPC, "No space left on device")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        refuses("python train.py --resume --out_dir a", fit, text, "a", *flags)
    assert sorted(os.listdir("a")) == ["best.pt", "ckpt.pt", "metrics.jsonl"] and load_checkpoint("a")["step"] == 2
    resume("a")
    assert_same_run("whole", "a")


@pytest.mark.slow
@on_posix
def test_a_run_killed_at_random_moments_resumes_bit_for_bit(text):
    """By SIGKILL after some evaluations: during a step, or during a save."""
    flags = ["--n_embd", "96", "--max_iters", "60", "--eval_interval", "1"]
    fit(text, "whole", *flags)
    args = command(text, "killed", *flags)
    rng = random.Random(1)
    codes = []
    while 0 not in codes:                       # until a process finishes before it is killed
        with subprocess.Popen(args, env=ALONE, stdout=subprocess.PIPE) as process:
            lines = (line for line in process.stdout if b"validation" in line)
            list(itertools.islice(lines, rng.randint(2, 9)))
            time.sleep(rng.uniform(0, 0.05))
            process.kill()
        codes.append(process.returncode)
        assert codes[-1] in (0, -signal.SIGKILL), "it failed"
        args = [sys.executable, train.__file__, "--resume", "--out_dir", "killed"]
    assert len(codes) > 5
    assert_same_run("whole", "killed")


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"]
EVERY = f"""
import os, sys, train
for name in {[*OBJECTIVES, MIXTURE]}:
    flags = ["--objective", name, "--out_dir", os.path.join(sys.argv[1], name.replace(":", "_")), *sys.argv[2:]]
    assert train.main(flags, with_sample=False) == 0
if train.run.WORLD > 1:
    train.torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_two_processes_equal_one_for_every_objective(text):
    """If no n-gram lookups are dropped: each process drops its own."""
    write("every.py", EVERY.encode())
    flags = tiny("--data", text, "--accum", "4", "--max_iters", "20", "--eval_interval", "10", "--ngram_drop", "0")
    for launch, out in (([sys.executable], "one"), (TORCHRUN, "two")):
        subprocess.run([*launch, "every.py", out, *flags], check=True, capture_output=True, env=ALONE)
    assert len(os.listdir("one")) == len(OBJECTIVES) + 1
    for name in os.listdir("one"):
        one = losses(f"one/{name}", split="train, val")
        assert len(one) == 20 + 3 * (1 + name.count(","))       # steps, validations of each member
        assert one == pytest.approx(losses(f"two/{name}", split="train, val"), rel=1e-5), name


STOPPED = """
import os, signal, sys, train
step = train.training_step
steps = iter(range(1000))
def signalled(*args):
    if train.run.RANK == 1 and next(steps) == 5:
        os.kill(os.getpid(), signal.SIGTERM)
    return step(*args)
train.training_step = signalled
train.run.run_program(train.main)
"""


@pytest.mark.slow
@on_posix
def test_a_signal_to_one_process_stops_all_and_saves(text):
    write("stopped.py", STOPPED.encode())
    args = command(text, "a", "--accum", "2", "--max_iters", "1000")[2:]
    assert subprocess.run([*TORCHRUN, "stopped.py", *args], capture_output=True, env=ALONE).returncode != 0
    assert load_checkpoint("a")["step"] == 6
    resume("a", "--max_iters", "8")
