import io
import json
import math
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
import zipfile

import pytest
import torch
from conftest import TINY

import sample
import train
from data import generator
from objectives import OBJECTIVES

HERE = os.path.dirname(os.path.abspath(__file__))
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}             # what torchrun gives its processes
every = pytest.mark.parametrize("name", OBJECTIVES)


def run(text, out, *flags, code=0):
    assert train.main([*TINY, "--data", text, "--out_dir", out, *flags]) == code


def metrics(out, clock=False):  # records but the first, without what a clock says
    with open(os.path.join(out, "metrics.jsonl"), "rb") as f:
        records = [json.loads(line) for line in f][1:]
    return [{k: v for k, v in r.items() if clock or k not in ("seconds", "tok_per_s")} for r in records]


def losses(out, field="loss", split="train"):
    return [r[field] for r in metrics(out) if r["split"] == split]


def equal(a, b):  # nested dicts, lists and tensors, to the bit
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


def assert_same_run(a, b):
    one, two = train.load_checkpoint(a), train.load_checkpoint(b)
    for part in ("model", "heads", "adamw", "muon", "step", "best", "sources", "held_out"):
        assert equal(one[part], two[part]), part
    assert metrics(a) == metrics(b)


# ---- settings

def test_settings_are_defaults_then_flags():
    hp = train.get_config(["--objective", "mlm", "--mask_rate", "0.3", "--device", "cpu"])
    assert (hp.objective, hp.mask_rate, hp.n_layer, hp.device) == ("mlm", 0.3, 4, "cpu")
    assert hp.data == ["stdlib"] and hp.resume is False and hp.dtype in ("float32", "bfloat16")
    rotation = train.get_config(["--objective", "rotation", "--device", "cpu", "--batch_size", "5"])
    assert (rotation.block_size, rotation.batch_size) == (64, 5)


def test_help_names_every_objective_and_flag(capsys):
    with pytest.raises(SystemExit) as e:
        train.main(["--help"])
    out = capsys.readouterr().out
    assert e.value.code == 0
    for word in [*OBJECTIVES, *(f"--{flag}" for flag in train.specs())]:
        assert word in out, word


def test_the_learning_rate_rises_holds_and_falls():
    hp = train.get_config("--max_iters 10 --warmup_iters 3 --learning_rate 1 --lr_decay .4 --device cpu".split())
    want = [0.25, 0.5, 0.75, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0]
    assert [train.learning_rate(step, hp) for step in range(11)] == pytest.approx(want)
    hp.max_iters, hp.warmup_iters = 1, 0
    assert train.learning_rate(0, hp) == 1, "a run of one step takes it whole"


@pytest.mark.parametrize("mixture, batch, rows", [("clm", 7, [7]), ("clm:.5,mlm:.5", 8, [4, 4]), ("clm:3,mlm:1", 8, [6, 2]),
                                                  ("clm:.5,mlm:.3,prefix:.2", 7, [4, 2, 1]), ("clm:.5,mlm:.5", 3, [2, 1])])
def test_a_mixture_holds_fixed_rows_of_each(mixture, batch, rows):
    hp = train.get_config(["--objective", mixture, "--batch_size", str(batch), "--device", "cpu"])
    assert [m["rows"] for m in train.members(hp)] == rows and sum(rows) == batch


# ---- the optimizer

def test_muon_equals_torch_for_every_shape_at_once():
    hp = train.get_config(["--device", "cpu", "--dtype", "bfloat16", "--weight_decay", "0.1"])
    shapes = [(3, 16, 16), (1, 64, 16), (1, 16, 64), (1, 64, 16)]
    ours = [torch.nn.Parameter(torch.randn(s, generator=generator(f"{s}"))) for s in shapes]
    theirs = [torch.nn.Parameter(m.detach().clone()) for p in ours for m in p]
    reference = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, momentum=train.MOMENTUM, adjust_lr_fn="match_rms_adamw")
    module = torch.nn.Module()
    module.blocks = torch.nn.ParameterList(ours)
    opt = train.make_optimizer(torch.nn.Embedding(4, 4), torch.nn.ModuleDict({"x": module}), hp)
    assert sorted(len(m) for _, m in opt["muon"].values()) == [3, 3]
    for step in range(3):
        for p in ours:
            p.grad = torch.randn(p.shape, generator=generator(f"g{step}{p.shape}"))
        for p, g in zip(theirs, [g for mine in ours for g in mine.grad]):
            p.grad = g.clone()
        for params, momentum in opt["muon"].values():
            train.muon_step(params, momentum, torch.tensor(0.02), torch.tensor(False), hp)
        reference.step()
    moved = torch.cat([(a - b).flatten() for a, b in zip([m for p in ours for m in p], theirs)])
    assert moved.abs().max() < 2e-3                                 # bfloat16 inside both


def test_updates_are_skipped_where_bad():
    hp = train.get_config(["--device", "cpu", "--dtype", "float32", "--weight_decay", "0.1"])
    model, heads = train.build(hp)
    opt = train.make_optimizer(model, heads, hp)
    for bad in (False, True):
        before = {k: v.clone() for k, v in model.state_dict().items()}
        state = [m.clone() for _, m in opt["muon"].values()]
        for p in model.parameters():
            p.grad = torch.full_like(p, math.nan if bad else 0.01)
        opt["lr"].fill_(0.01)
        train.optimizer_step(opt, torch.tensor(bad), hp)
        assert equal(before, model.state_dict()) == bad
        assert equal(state, [m for _, m in opt["muon"].values()]) == bad
    adam = opt["adamw"].state_dict()["state"][0]
    assert adam["step"] == 1 and adam["exp_avg"].isfinite().all()


def test_every_parameter_has_one_optimizer():
    for optimizer, muon in (("muon", 4 * 4), ("adamw", 0)):
        hp = train.get_config(["--device", "cpu", "--optimizer", optimizer])
        model, heads = train.build(hp)
        opt = train.make_optimizer(model, heads, hp)
        assert opt["adamw"].defaults["betas"] == (0.9, 0.95) and opt["adamw"].defaults["eps"] == 1e-10
        in_muon = [p for params, _ in opt["muon"].values() for p in params]
        in_adamw = [p for group in opt["adamw"].param_groups for p in group["params"]]
        assert len(in_muon) == muon and sorted(map(id, in_muon + in_adamw)) == sorted(map(id, model.parameters()))


# ---- equalities

@pytest.mark.parametrize("name", [name for name in OBJECTIVES if name != "contrastive"])      # which compares the rows of a micro-batch
@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_8_rows_equal_4_micro_batches_of_2(name, optimizer, text):
    for out, batch, accum in (("whole", 8, 1), ("parts", 2, 4)):
        run(text, out, "--objective", name, "--max_iters", "4", "--optimizer", optimizer, "--batch_size", str(batch), "--accum", str(accum),
            "--learning_rate", "0.002")
    for field in ("loss", "grad_norm", "targets"):
        assert losses("parts", field) == pytest.approx(losses("whole", field), rel=2e-4)
    whole, parts = (torch.cat([p.flatten() for p in train.load_checkpoint(out)["model"].values()]) for out in ("whole", "parts"))
    assert (whole - parts).norm() < 1e-3 * whole.norm()


def test_a_mean_of_means_would_not_pass(text, monkeypatch):
    """What most training loops do: each micro-batch divided by its own count."""
    counts = OBJECTIVES["prefix"]["counts"]
    loss = OBJECTIVES["prefix"]["loss"]
    def mean_of_means(model, heads, batch, hp):
        s, n, c = loss(model, heads, batch, hp)["nll"]
        return {"nll": (s / n * 8 * 16 / 4, n, c)}                  # 8 rows of about 16 targets over 4 micro-batches
    monkeypatch.setitem(OBJECTIVES["prefix"], "counts", lambda batch, hp: {"nll": torch.tensor(8 * 16.0)})
    monkeypatch.setitem(OBJECTIVES["prefix"], "loss", mean_of_means)
    run(text, "wrong", "--objective", "prefix", "--max_iters", "4", "--batch_size", "2", "--accum", "4")
    monkeypatch.setitem(OBJECTIVES["prefix"], "counts", counts)
    monkeypatch.setitem(OBJECTIVES["prefix"], "loss", loss)
    run(text, "right", "--objective", "prefix", "--max_iters", "4", "--batch_size", "8")
    assert losses("wrong", "grad_norm") != pytest.approx(losses("right", "grad_norm"), rel=2e-4)


@every
def test_a_killed_run_resumes_bit_for_bit(name, text, monkeypatch, capsys):
    flags = ["--objective", name, "--max_iters", "20", "--eval_interval", "10"]
    run(text, "whole", *flags)
    class Killed(BaseException):
        pass
    step = train.optimizer_step
    steps = []
    def dies(*args):
        steps.append(1)
        if len(steps) == 14:
            raise Killed
        step(*args)
    monkeypatch.setattr(train, "optimizer_step", dies)
    with pytest.raises(Killed):
        run(text, "killed", *flags)
    monkeypatch.setattr(train, "optimizer_step", step)
    assert train.load_checkpoint("killed")["step"] == 10
    assert train.main(["--resume", "--out_dir", "killed"]) == 0
    assert_same_run("whole", "killed")


@pytest.mark.parametrize("at", [7, 10])
def test_ctrl_c_finishes_the_step_and_saves(at, text, monkeypatch, capsys):
    flags = ["--max_iters", "20", "--eval_interval", "10"]
    run(text, "whole", *flags)
    step, steps = train.optimizer_step, []
    def interrupted(*args):
        steps.append(1)
        if len(steps) == at:
            os.kill(os.getpid(), signal.SIGINT)
        step(*args)
    monkeypatch.setattr(train, "optimizer_step", interrupted)
    before = signal.getsignal(signal.SIGINT)
    run(text, "stopped", *flags, code=130)
    assert signal.getsignal(signal.SIGINT) is before, "handlers are put back"
    assert "python train.py --resume --out_dir stopped" in capsys.readouterr().out
    assert train.load_checkpoint("stopped")["step"] == at
    monkeypatch.setattr(train, "optimizer_step", step)
    assert train.main(["--resume", "--out_dir", "stopped"]) == 0
    assert_same_run("whole", "stopped")


def test_evaluation_never_changes_training(text):
    run(text, "often", "--max_iters", "20", "--eval_interval", "5")
    run(text, "never", "--max_iters", "20", "--eval_interval", "1000", "--eval_iters", "2")
    assert losses("often") == losses("never")
    assert [r["step"] for r in metrics("often") if r["split"] == "val"] == [0, 5, 10, 15, 20]


def test_validation_does_not_depend_on_batch_size_seed_or_other_sources(text, tmp_path):
    other = tmp_path / "other.txt"
    other.write_bytes(b"another text altogether. " * 400)
    run(text, "a", "--max_iters", "0", "--objective", "mlm")
    assert train.main([*TINY, "--data", str(other) + ":3", text, "--out_dir", "b", "--max_iters", "0", "--objective", "mlm",
                       "--batch_size", "2", "--seed", "9"]) == 0
    hp = train.get_config([*TINY, "--data", text, "--objective", "mlm"])
    alone, both = (train.open_corpus(d) for d in ([text], [str(other), text]))
    hp2 = train.get_config([*TINY, "--objective", "mlm", "--batch_size", "2", "--seed", "9"])
    first = train.validation_list(train.members(hp), alone, hp)[0][2]
    second = train.validation_list(train.members(hp2), both, hp2)[1][2]
    assert equal(first, second)
    assert [r["data"] for r in metrics("b")] == [str(other), text]


def test_seeds_see_different_data_and_equal_seeds_the_same(text):
    for out, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        run(text, out, "--max_iters", "3", "--seed", seed)
    assert metrics("a") == metrics("b")
    hp = train.get_config([*TINY, "--data", text])
    corpus = train.open_corpus([text])
    draws = [train.draw_batches(train.members(hp), corpus, "train", lambda m: 4, f"{seed},2", hp)[0]["inp"] for seed in (1, 2)]
    assert not torch.equal(*draws)


# ---- what a run leaves behind

def test_a_run_is_a_folder_with_all_it_needs(text, capsys):
    assert train.main([*TINY, "--data", text, "--max_iters", "3", "--objective", "prefix"]) == 0
    assert train.main([*TINY, "--data", text, "--max_iters", "3", "--objective", "prefix"]) == 0
    out = capsys.readouterr().out
    assert sorted(os.listdir("out")) == ["prefix", "prefix-2"]
    assert {"ckpt.pt", "best.pt", "metrics.jsonl"} <= set(os.listdir("out/prefix"))
    for word in ("the first row", "prefix inp", "prefix tgt", "positions see each other", "lzma", "bits/byte", "perplexity", "the model's continuation"):
        assert word in out, word
    train_line, val_line = (next(r for r in metrics("out/prefix", clock=True) if r["split"] == s) for s in ("train", "val"))
    assert {"step", "split", "data", "objective", "loss", "bpb", "targets", "lr", "grad_norm", "tok_per_s", "seconds"} <= set(train_line)
    assert val_line["bpb"] == pytest.approx(9.0) and val_line["loss"] == pytest.approx(math.log(512))
    assert 0.3 < train_line["targets"] < 0.7
    assert train.newest_run() in ("out/prefix-2", os.path.join("out", "prefix-2"))


def test_validation_text_is_held_out(text, tmp_path):
    split = tmp_path / "split.txt"
    split.write_bytes(b"a" * 9000 + b"b" * 1000)
    run(str(split), "a", "--max_iters", "3")
    assert set(train.load_checkpoint("a")["held_out"].tolist()) == {ord("b")}
    hp = train.get_config([*TINY, "--data", str(split)])
    corpus = train.open_corpus([str(split)])
    assert set(train.validation_list(train.members(hp), corpus, hp)[0][2][0]["inp"].flatten().tolist()) == {ord("b")}
    assert set(train.draw_batches(train.members(hp), corpus, "train", lambda m: 8, "1,1", hp)[0]["inp"].flatten().tolist()) == {ord("a")}


def test_the_best_checkpoint_is_that_of_the_least_validation_loss(text):
    run(text, "a", "--max_iters", "30", "--eval_interval", "5", "--learning_rate", "3", "--lr_decay", "0")
    val = [(r["loss"], r["step"]) for r in metrics("a") if r["split"] == "val"]
    best = train.load_checkpoint("a/best.pt")
    assert (best["best"], best["step"]) == min(val) and min(val) != val[-1]


def test_standard_input_is_read_anew_until_there_is_a_run(text, monkeypatch, capsys):
    for words, works in ((b"too short", False), (b"long enough " * 200, True)):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(words)))
        if works:
            run("-", "a", "--max_iters", "2")
        else:
            with pytest.raises(SystemExit):
                run("-", "a")
    assert train.main(["--resume", "--out_dir", "a", "--max_iters", "3"]) == 0


def test_the_process_is_left_as_it_was(text):
    precision, rng = torch.get_float32_matmul_precision(), torch.get_rng_state()
    run(text, "a", "--max_iters", "1")
    assert torch.get_float32_matmul_precision() == precision and torch.equal(torch.get_rng_state(), rng)


def test_old_domain_and_new_are_both_followed(text, tmp_path):
    """Continual pre-training: at step 0 the old domain's loss is the parent's last one; then an objective follows another."""
    new = tmp_path / "new.txt"
    new.write_bytes(b"An entirely different text, again and again. " * 300)
    run(text, "parent", "--max_iters", "5", "--objective", "mlm")
    flags = ["--init_from", "parent", "--device", "cpu", "--dtype", "float32", "--eval_iters", "1", "--batch_size", "4", "--max_iters", "20"]
    assert train.main([*flags, "--data", str(new), text + ":.25", "--objective", "mlm", "--out_dir", "child"]) == 0
    last = [r for r in metrics("parent") if r["split"] == "val"][-1]
    first = [r for r in metrics("child") if r["split"] == "val"][:2]
    assert [r["data"] for r in first] == [str(new), text] and first[1]["loss"] == pytest.approx(last["loss"], rel=1e-6)
    assert losses("child", split="val")[-2] < losses("child", split="val")[0] - 0.5
    assert train.main([*flags, "--data", text, "--objective", "contrastive", "--out_dir", "other", "--max_iters", "3"]) == 0


def test_a_masked_end_of_document_does_not_show_in_the_mask(tmp_path):
    (tmp_path / "nul.txt").write_bytes(b"ab\0" * 2000)
    hp = train.get_config([*TINY, "--data", str(tmp_path / "nul.txt"), "--objective", "mdlm", "--doc_mask"])
    batch = train.draw_batches(train.members(hp), train.open_corpus(hp.data), "train", lambda m: 64, "1,1", hp)[0]
    ends = (batch["inp"] == 0).long()
    assert (batch["tgt"] == 0).any() and torch.equal(batch["doc"], ends.cumsum(1) - ends)


def test_document_masks_reach_training_and_validation(text, tmp_path):
    many = tmp_path / "many"
    many.mkdir()
    for i in range(40):
        (many / f"{i}.txt").write_text(f"document {i} " * 3)
    for out, flags in (("plain", []), ("masked", ["--doc_mask"])):
        run(str(many), out, "--objective", "clm:.5,mdlm:.5", "--max_iters", "12", "--learning_rate", ".05", *flags)
    assert losses("plain")[1:] != losses("masked")[1:] and losses("plain", split="val")[2:] != losses("masked", split="val")[2:]


def test_bits_per_byte_of_prefix_are_those_of_clm(text):
    run(text, "p", "--objective", "prefix", "--max_iters", "5")
    assert train.main(["--init_from", "p", "--data", text, "--max_iters", "0", "--eval_iters", "1", "--out_dir", "c", "--dtype", "float32",
                       "--device", "cpu"]) == 0
    assert losses("c", "bpb", "val")[0] == pytest.approx(losses("p", "bpb", "val")[-1], rel=1e-6)
    assert losses("c", "loss", "val")[0] / math.log(2) == pytest.approx(losses("c", "bpb", "val")[0])


def test_a_run_may_be_prolonged_and_a_block_lengthened(text, capsys):
    run(text, "a", "--max_iters", "4")
    assert train.main(["--resume", "--out_dir", "a", "--max_iters", "6"]) == 0
    assert "4 steps were planned, now 6" in capsys.readouterr().out
    assert train.load_checkpoint("a")["step"] == 6
    assert train.main(["--init_from", "a", "--data", text, "--out_dir", "b", "--block_size", "64", "--max_iters", "2", "--batch_size", "2",
                       "--eval_iters", "1", "--objective", "mlm"]) == 0
    assert train.load_checkpoint("b")["config"]["n_embd"] == 16


def test_a_mixture_logs_each_member(text):
    run(text, "mix", "--objective", "clm:.5,mlm:.5", "--max_iters", "3")
    val = [r for r in metrics("mix") if r["split"] == "val" and r["step"] == 0]
    assert [(r["objective"], r["bpb"] is None) for r in val] == [("clm", False), ("mlm", True)]
    first = [r for r in metrics("mix") if r["split"] == "train"][:3]
    assert [r["objective"] for r in first] == ["clm:.5,mlm:.5", "clm", "mlm"]
    assert first[0]["loss"] == pytest.approx((first[1]["loss"] + first[2]["loss"]) / 2) == pytest.approx(math.log(512), abs=1e-4)
    assert [r["targets"] for r in first[1:]] == [1.0, pytest.approx(5 / 32)] and first[0]["targets"] == pytest.approx((1 + 5 / 32) / 2)


# ---- learning

def entropy(counts):  # nats
    p = counts.double() / counts.sum()
    return float(-(p * p.clamp(min=1e-300).log()).sum())


@every
def test_a_short_run_beats_the_trivial_baseline(name, text):
    """On the standard library's source: the unigram entropy of the targets, or chance, or the constant prior."""
    T, steps = {"rotation": (32, 600), "nsp": (64, 400)}.get(name, (64, 150))       # where a row holds one label
    flags = ["--data", "stdlib", "--objective", name, "--n_layer", "2", "--n_head", "2", "--n_embd", "64", "--block_size", str(T), "--batch_size", "16",
             "--max_iters", str(steps), "--eval_iters", "3", "--eval_interval", str(steps), "--device", "cpu"]
    assert train.main([*flags, "--out_dir", "o"]) == 0
    first, last = ([r for r in metrics("o") if r["split"] == "val"][i] for i in (0, -1))
    hp = train.get_config(flags)
    corpus = train.open_corpus(hp.data)
    batches = train.validation_list(train.members(hp), corpus, hp)[0][2]
    terms = last["terms"]
    if name in ("contrastive", "rotation"):
        unigram = None
    else:
        unigram = entropy(torch.bincount(torch.cat([b["tgt"][b["tgt"] >= 0] for b in batches]), minlength=512))
    if name == "contrastive":
        own = torch.arange(train.EVAL_ROWS)
        bags = [torch.nn.functional.one_hot(b["inp"], 512).float().mean(2) for b in batches]     # (B, 2, 512): mean byte embeddings
        sims = [torch.nn.functional.normalize(bag, dim=-1).unbind(1) for bag in bags]
        nats = [torch.nn.functional.cross_entropy(a @ b.T / hp.tau, own) for a, b in sims]
        assert terms["info"] < min(first["loss"], float(sum(nats)) / len(nats))
    elif name == "rotation":
        assert terms["seam"] < math.log(T) - 0.02
    elif name == "electra":
        p = terms["replaced"]
        assert terms["generator"] < unigram and terms["discriminator"] < entropy(torch.tensor([p, 1 - p])) and terms["auc"] > 0.55
    elif name == "mdlm":
        assert terms["bound"] < unigram
    elif name == "nsp":
        assert terms["nll"] < unigram and terms["nsp"] < math.log(2) - 0.01
    else:
        assert all(v < unigram for v in terms.values()), terms
    if last["bpb"] is not None and name != "mdlm":
        assert last["bpb"] < unigram / math.log(2) - 0.5


def test_compile_gives_the_same_losses_or_goes_on_without(text, capsys):
    run(text, "plain", "--max_iters", "3", "--objective", "prefix")
    run(text, "compiled", "--max_iters", "3", "--objective", "prefix", "--compile")
    assert losses("plain") == pytest.approx(losses("compiled"), rel=1e-4)
    if shutil.which("g++"):
        assert "going on without" not in capsys.readouterr().out


def test_a_compiler_that_fails_is_one_line(text, capsys, monkeypatch):
    def broken(*args, **kwargs):
        def call(*args):
            raise RuntimeError("no compiler\nmore")
        return call
    monkeypatch.setattr(torch, "compile", broken)
    run(text, "a", "--max_iters", "2", "--compile")
    assert "--compile: does not work here (RuntimeError: no compiler), going on without it\n" in capsys.readouterr().out


# ---- on a GPU

WIDE = ["--n_embd", "64", "--device", "cuda", "--dtype", "float32"]                # heads of 32, which FlexAttention takes


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("name", [*OBJECTIVES, "clm:0.5,mlm:0.5"])
def test_eager_compiled_and_captured_steps_give_the_same_losses(name, text, capsys):
    flags = ["--objective", name, "--max_iters", "20", "--eval_interval", "10", *WIDE]
    ways = {"eager": [], "graph": ["--cuda_graph"], "compiled": ["--compile"], "both": ["--compile", "--cuda_graph"]}
    for way, more in ways.items():
        run(text, way, *flags, *more)
    assert "going on without" not in capsys.readouterr().out
    for way in ways:
        assert losses(way) == pytest.approx(losses("eager"), rel=2e-3), way
    assert losses("graph") == pytest.approx(losses("eager"), rel=1e-5), "the same kernels, the same numbers"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("more", [[], ["--cuda_graph"]])
def test_a_run_on_a_gpu_resumes(more, text, monkeypatch):
    flags = ["--max_iters", "20", "--eval_interval", "10", *WIDE, *more]
    run(text, "whole", *flags)
    plain = train.set_step
    def stops(s, run, corpus, rows, step, hp):
        if step == 14:
            raise KeyboardInterrupt
        plain(s, run, corpus, rows, step, hp)
    monkeypatch.setattr(train, "set_step", stops)
    with pytest.raises(KeyboardInterrupt):
        run(text, "part", *flags)
    monkeypatch.setattr(train, "set_step", plain)
    assert train.main(["--resume", "--out_dir", "part", *more]) == 0
    assert losses("part")[10:] == pytest.approx(losses("whole")[10:], rel=1e-4) and len(losses("part")) == 20


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@every
def test_a_step_never_waits_for_the_gpu(name, text):
    hp = train.get_config([*TINY, *WIDE, "--data", text, "--objective", name])
    corpus, members, rows = train.open_corpus([text]), train.members(hp), lambda m: m["rows"]
    for split in ("train", "val"):
        corpus[0][split] = corpus[0][split].cuda()
    s = train.prepare(members, corpus, hp, rows)
    for step in range(3):
        torch.cuda.set_sync_debug_mode("error" if step else "default")
        try:
            train.set_step(s, members, corpus, rows, step, hp)
            train.training_step(s, members, corpus, hp)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_a_step_reads_nothing_but_its_tensors(text, monkeypatch):
    """What a graph would replay: the same call with other windows, seeds, rate and number equals a run that is fresh."""
    hp = train.get_config([*TINY, "--data", text, "--objective", "ul2", "--max_iters", "9"])
    corpus, members, rows = train.open_corpus([text]), train.members(hp), lambda m: m["rows"]
    s = train.prepare(members, corpus, hp, rows)
    places = lambda: [t.data_ptr() for t in (s["step"], s["first_bad"], s["opt"]["lr"], *s["where"][0])]
    before = places()
    for step in range(4):
        train.set_step(s, members, corpus, rows, step, hp)
        batches, *_ = train.training_step(s, members, corpus, hp)
        want = train.draw_batches(members, corpus, "train", rows, f"{hp.seed},{step}", hp)
        assert equal(batches[0], want[0]) and float(s["opt"]["adamw"].param_groups[0]["lr"]) == pytest.approx(train.learning_rate(step, hp))
    assert places() == before


# ---- what goes wrong

@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_non_finite_step_never_reaches_the_weights(where, text, monkeypatch, capsys):
    loss = OBJECTIVES["clm"]["loss"]
    calls, before = [], signal.getsignal(signal.SIGINT)
    def poisoned(model, heads, batch, hp):
        terms = loss(model, heads, batch, hp)
        if torch.is_grad_enabled():
            calls.append(1)
            if len(calls) == 8:                                     # step 7
                s, n, c = terms["nll"]
                s = s * math.nan if where == "loss" else s + (model.head.weight * 0).sum().sqrt()
                return {"nll": (s, n, c)}
        return terms
    monkeypatch.setitem(OBJECTIVES["clm"], "loss", poisoned)
    run(text, "a", "--max_iters", "30", "--eval_interval", "5", "--log_interval", "4", code=1)
    err = capsys.readouterr().err
    assert "not finite at step 7" in err and err.count("\n") == 1
    assert len(calls) == 9, "read at step 8, the next one that is logged"
    assert signal.getsignal(signal.SIGINT) is before
    ckpt = train.load_checkpoint("a")
    assert ckpt["step"] == 5 and all(p.isfinite().all() for p in ckpt["model"].values())
    monkeypatch.setitem(OBJECTIVES["clm"], "loss", loss)
    assert train.main(["--resume", "--out_dir", "a"]) == 0
    assert [r["step"] for r in metrics("a") if r["split"] == "train"] == [0, 4, 8, 12, 16, 20, 24, 28]


def test_nothing_is_saved_before_the_device_was_asked(text, monkeypatch, capsys):
    """The step goes bad between two reads: the next one is the save's."""
    loss, calls = OBJECTIVES["clm"]["loss"], []
    def poisoned(*args):
        [(name, (s, n, c))] = loss(*args).items()
        calls.append(torch.is_grad_enabled())
        return {name: (s * math.nan if sum(calls) == 8 and calls[-1] else s, n, c)}
    monkeypatch.setitem(OBJECTIVES["clm"], "loss", poisoned)
    run(text, "a", "--max_iters", "30", "--eval_interval", "5", "--log_interval", "100", code=1)
    assert "not finite at step 7" in capsys.readouterr().err and train.load_checkpoint("a")["step"] == 5


def one_step(hp, text, steps=1, spoil=None):  # -> the state, its gradients as the optimizer sees them
    corpus, members, rows = train.open_corpus([text]), train.members(hp), lambda m: m["rows"] * hp.accum
    s, grads, plain = train.prepare(members, corpus, hp, rows), [], train.optimizer_step
    def noted(opt, bad, hp):
        grads.append([None if p.grad is None else p.grad.clone() for p in s["params"]])
        plain(opt, bad, hp)
    train.optimizer_step = noted
    try:
        for step in range(steps):
            train.set_step(s, members, corpus, rows, step, hp)
            if step == spoil:
                with torch.no_grad():
                    kept = s["model"].embed.weight.clone()
                    s["model"].embed.weight.fill_(math.inf)
            train.training_step(s, members, corpus, hp)
            if step == spoil:
                with torch.no_grad():
                    s["model"].embed.weight.copy_(kept)
    finally:
        train.optimizer_step = plain
    return s, grads


def test_after_a_bad_step_nothing_moves_any_more(text):
    hp = train.get_config([*TINY, "--data", text, "--weight_decay", "0.1"])
    after = [one_step(hp, text, steps, spoil=2)[0] for steps in (2, 3, 6)]
    for s in after[1:]:
        assert equal(after[0]["model"].state_dict(), s["model"].state_dict()) and int(s["first_bad"]) == 2
    assert not equal(after[0]["model"].state_dict(), one_step(hp, text, 3)[0]["model"].state_dict())


def test_the_first_bad_step_is_named_even_if_it_is_the_first_of_all(text):
    hp = train.get_config([*TINY, "--data", text])
    corpus, members, rows = train.open_corpus([text]), train.members(hp), lambda m: m["rows"]
    s = train.prepare(members, corpus, hp, rows)
    with torch.no_grad():
        s["model"].embed.weight.fill_(math.inf)
    for step in range(3):
        train.set_step(s, members, corpus, rows, step, hp)
        train.training_step(s, members, corpus, hp)
        assert int(s["first_bad"]) == 0


@pytest.mark.parametrize("name", ["clm:3,mlm:1", "electra", "hybrid", "nsp"])
@pytest.mark.parametrize("clip", [0.0, 0.01])
def test_the_gradient_is_that_of_the_total_by_hand(name, clip, text):
    """Weights of members, coefficients of terms, counts of the whole batch; then the norm is cut to grad_clip."""
    hp = train.get_config([*TINY, "--data", text, "--objective", name, "--accum", "2", "--grad_clip", str(clip), "--hybrid_ratio", "0.25"]
                          if name == "hybrid" else [*TINY, "--data", text, "--objective", name, "--accum", "2", "--grad_clip", str(clip)])
    s, [grads] = one_step(hp, text)
    model, heads = train.build(hp)
    members = train.members(hp)
    batches = train.draw_batches(members, train.open_corpus([text]), "train", lambda m: m["rows"] * 2, f"{hp.seed},0", hp)
    total = 0.0
    for m, batch in zip(members, batches):
        total += m["weight"] * sum(c * x / n for x, n, c in m["loss"](model, heads, batch, hp).values())
    want = torch.autograd.grad(total, [*model.parameters(), *heads.parameters()], allow_unused=True)
    norm = torch.stack([g.norm() for g in want if g is not None]).norm()
    scale = min(1.0, clip / float(norm)) if clip else 1.0
    for g, w in zip(grads, want):
        assert (g is None or float(g.abs().max()) == 0) if w is None else torch.allclose(g, w * scale, rtol=1e-3, atol=1e-6 * scale)


def test_weight_decay_is_of_hidden_matrices_alone():
    for optimizer in ("adamw", "muon"):
        hp = train.get_config([*TINY, "--optimizer", optimizer, "--weight_decay", "0.5"])
        model, heads = train.build(hp)
        opt, before = train.make_optimizer(model, heads, hp), {k: v.clone() for k, v in model.state_dict().items()}
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        opt["lr"].fill_(0.1)
        train.optimizer_step(opt, torch.tensor(False), hp)
        for k, v in model.state_dict().items():
            torch.testing.assert_close(v, before[k] * (0.95 if "blocks." in k else 1.0))


def test_best_is_by_the_weights_of_members_and_sources(text):
    with open("new.txt", "wb") as f:
        f.write(b"other text, of its own kind\n" * 200)
    run(text, "a", "--objective", "clm:3,mlm:1", "--max_iters", "1", "--data", text + ":0.9", "new.txt:0.1")
    with open("a/metrics.jsonl") as f:
        records = [r for r in map(json.loads, f) if r.get("split") == "val"]
    share = lambda r: {"clm": 0.75, "mlm": 0.25}[r["objective"]] * (0.9 if r["data"] == text else 0.1)
    best = min(sum(share(r) * r["loss"] for r in records if r["step"] == step) for step in (0, 1))
    assert train.load_checkpoint("a/best.pt")["best"] == pytest.approx(best)


def test_a_head_that_is_missing_may_be_fresh_only_where_training_begins(text, capsys):
    run(text, "a", "--objective", "electra", "--max_iters", "1")
    ckpt = train.load_checkpoint("a")
    ckpt["heads"] = {}
    train.save_checkpoint("a/ckpt.pt", ckpt)
    for refused in (lambda: train.main(["--resume", "--out_dir", "a", "--max_iters", "2"]), lambda: sample.main(["--out_dir", "a"])):
        with pytest.raises(SystemExit) as e:
            refused()
        assert e.value.code == 2 and "do not fit" in capsys.readouterr().err
    run(text, "b", "--objective", "electra", "--max_iters", "1", "--init_from", "a")


def test_a_second_signal_is_not_caught():
    stop = []
    before = train.catch_signals(stop)
    try:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop == [signal.SIGINT] and signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    finally:
        train.release(before)


@pytest.mark.skipif(sys.platform == "win32", reason="has no flock")
def test_a_folder_holds_one_run_at_a_time(text, capsys):
    run(text, "a", "--max_iters", "1")
    held = train.open_metrics("a", 1 << 20)
    with pytest.raises(SystemExit) as e:
        train.main(["--resume", "--out_dir", "a", "--max_iters", "2"])
    assert e.value.code == 2 and "another process" in capsys.readouterr().err
    held.close()
    assert train.main(["--resume", "--out_dir", "a", "--max_iters", "2"]) == 0


BAD = {
    "unknown flag": (["--max_iter", "3"], "Try --max_iters"),
    "unknown objective": (["--objective", "mml"], "Try mlm"),
    "empty objective": (["--objective", ""], "Try one of clm"),
    "not a number": (["--max_iters", "many"], "max_iters"),
    "missing value": (["--data"], "--data"),
    "rate too high": (["--objective", "mlm", "--mask_rate", "1.5"], "--mask_rate 1.5"),
    "rate not a number": (["--objective", "mlm", "--mask_rate", "nan"], "--mask_rate"),
    "prefix upside down": (["--objective", "prefix", "--prefix_min", ".9", "--prefix_max", ".1"], "--prefix_min"),
    "setting of another objective": (["--mask_rate", ".2"], "--objective mlm"),
    "no layers": (["--n_layer", "0"], "--n_layer 0"),
    "odd width": (["--n_embd", "15"], "--n_embd 16"),
    "no rows": (["--batch_size", "0"], "--batch_size"),
    "a member without a row": (["--objective", "clm:.9,mlm:.1", "--batch_size", "4"], "--batch_size 10"),
    "a member twice": (["--objective", "clm:.5,clm:.5"], "different names"),
    "a weight of 0": (["--objective", "clm:0,mlm:1"], "positive weights"),
    "missing file": (["--data", "nowhere.txt"], "nowhere.txt"),
    "empty file": (["--data", "empty.txt"], "is empty"),
    "tiny file": (["--data", "tiny.txt"], "--block_size"),
    "folder without text": (["--data", "bare"], "no text file"),
    "block larger than the data": (["--block_size", "100000"], "Try --block_size"),
    "weight of data": (["--data", "text.txt:-1"], "positive number"),
    "no such device": (["--device", "cuda:99"], "--device cpu"),
    "no device at all": (["--device", "toaster"], "--device cpu"),
    "unknown dtype": (["--dtype", "float8"], "Try float32"),
    "unknown optimizer": (["--optimizer", "sgd"], "Try muon or adamw"),
    "an existing run": (["--out_dir", "run"], "--resume"),
    "a run without its last checkpoint": (["--out_dir", "half"], "--resume"),
    "fewer steps than done": (["--resume", "--out_dir", "run", "--max_iters", "0"], "at step 1 already"),
    "resume other weights": (["--resume", "--out_dir", "run", "--data", "text.txt", "other.txt:.1"], "not the weights"),
    "a pipe": (["--data", "pipe"], "not a regular file"),
    "a checkpoint without its parts": (["--init_from", "parts.pt"], "not a checkpoint"),
    "resume a checkpoint of other sizes": (["--resume", "--out_dir", "sizes"], "do not fit"),
    "resume another optimizer's state": (["--resume", "--out_dir", "state"], "does not fit"),
    "documents where order is lost": (["--objective", "bart", "--doc_mask"], "--doc_mask"),
    "touching spans": (["--objective", "span", "--span_rate", ".9", "--span_mean", "1"], "would touch"),
    "too many spans": (["--objective", "span", "--block_size", "4096", "--span_mean", "1"], "sentinels"),
    "a denoiser without a row": (["--objective", "ul2", "--batch_size", "2"], "larger --batch_size"),
    "unknown denoiser": (["--objective", "ul2", "--ul2_weights", "R:.5,Q:.5"], "--ul2_weights"),
    "unknown noise": (["--objective", "bart", "--bart_noise", "infill,shuffle"], "infill,permute"),
    "unknown negatives": (["--objective", "nsp", "--nsp_negatives", "hard"], "swap"),
    "a mixture with one row to contrast": (["--objective", "clm:.75,contrastive:.25"], "has 1. Try a larger --batch_size"),
    "a mixture with one row of nsp": (["--objective", "clm:.75,nsp:.25"], "2 rows a step"),
    "a mixture without an X row": (["--objective", "clm:.75,ul2:.25", "--batch_size", "8"], "one of 2 rows"),
    "denoisers too uneven": (["--objective", "ul2", "--batch_size", "256", "--ul2_weights", "R:.98,S:.01,X:.01"], "more even weights\n"),
    "crops of the whole window": (["--objective", "contrastive", "--crop", "1"], "--crop 0.5"),
    "nothing to contrast": (["--objective", "contrastive", "--batch_size", "1"], "such as 8"),
    "a hybrid of one kind": (["--objective", "hybrid", "--hybrid_ratio", ".1"], "--hybrid_ratio"),
    "a file as folder": (["--out_dir", "text.txt"], "--out_dir"),
    "resume nothing": (["--resume", "--out_dir", "bare"], "no checkpoint"),
    "resume without runs": (["--resume"], "no run under out/"),
    "resume another width": (["--resume", "--out_dir", "run", "--n_embd", "32"], "--n_embd 32"),
    "resume another corpus": (["--resume", "--out_dir", "run", "--data", "other.txt"], "not the corpus"),
    "init from nothing": (["--init_from", "nowhere"], "nowhere"),
    "init from another width": (["--init_from", "run", "--n_layer", "5"], "--n_layer 5"),
    "init from text": (["--init_from", "text.txt"], "not a checkpoint"),
    "init from a cut file": (["--init_from", "cut.pt"], "damaged"),
    "init from a newer version": (["--init_from", "newer.pt"], "newer version"),
    "init from a payload": (["--init_from", "payload.pt"], "not a checkpoint"),
    "init from a bare pickle": (["--init_from", "bare.pkl"], "not a checkpoint"),
    "init from another zip": (["--init_from", "other.zip"], "not a checkpoint"),
    "init from random bytes": (["--init_from", "random.pt"], "not a checkpoint"),
    "init from an empty file": (["--init_from", "empty.txt"], "not a checkpoint"),
    "resume another block": (["--resume", "--out_dir", "run", "--block_size", "64"], "--block_size 64"),
    "resume another objective": (["--resume", "--out_dir", "run", "--objective", "mlm"], "--objective mlm"),
    "a graph without a GPU": (["--cuda_graph"], "NVIDIA GPU"),
    "an endless weight": (["--data", "text.txt:inf"], "positive number"),
    "a negative rate": (["--learning_rate", "-1"], "--learning_rate"),
    "the metrics of a run that is gone": (["--out_dir", "gone"], "checkpoints are gone"),
    "endless weights of members": (["--objective", "clm:1e308,mlm:1e308"], "positive weights"),
    "a vanishing weight": (["--objective", "clm:1e-320,mlm:1"], "positive weights"),
    "endless weights of data": (["--data", "text.txt:1e308", "other.txt:1e308"], "positive number"),
    "a device that holds nothing": (["--device", "meta"], "--device cpu"),
    "a batch beyond all memory": (["--batch_size", "16777216", "--accum", "16777216"], "does not fit here"),
}


@pytest.fixture(scope="module")
def bad_place(tmp_path_factory):  # a folder with a run, and with everything that can be wrong
    place = tmp_path_factory.mktemp("bad")
    here = os.getcwd()
    os.chdir(place)
    with open(train.argparse.__file__, "rb") as f:
        words = f.read()
    for name, content in (("text.txt", words), ("other.txt", words[::-1]), ("empty.txt", b""), ("tiny.txt", b"tiny text, too short")):
        with open(name, "wb") as f:
            f.write(content)
    os.mkdir("bare")
    assert train.main([*TINY, "--data", "text.txt", "--out_dir", "run", "--max_iters", "1"]) == 0
    with open("run/ckpt.pt", "rb") as f, open("cut.pt", "wb") as cut:
        cut.write(f.read()[:50000])
    ckpt = train.load_checkpoint("run")
    train.save_checkpoint("newer.pt", dict(ckpt, version=train.VERSION + 1))
    train.save_checkpoint("parts.pt", dict(version=1, config={}))
    narrow = {k: v[..., :1] for k, v in ckpt["model"].items()}
    for name, change in (("half", {}), ("sizes", dict(model=narrow)), ("state", dict(muon=ckpt["muon"][:1]))):
        os.mkdir(name)
        train.save_checkpoint(f"{name}/{'best' if name == 'half' else 'ckpt'}.pt", {**ckpt, **change})
    os.mkdir("gone")
    shutil.copy("run/metrics.jsonl", "gone")
    if hasattr(os, "mkfifo"):
        os.mkfifo("pipe")
    class Payload:
        def __reduce__(self):
            return os.mkdir, ("executed",)
    with zipfile.ZipFile("payload.pt", "w") as z:
        z.writestr("archive/data.pkl", pickle.dumps(Payload(), protocol=2))
        z.writestr("archive/version", "3\n")
    with open("bare.pkl", "wb") as f:
        pickle.dump(Payload(), f)
    with zipfile.ZipFile("other.zip", "w") as z:
        z.writestr("hello.txt", "hello")
    with open("random.pt", "wb") as f:
        f.write(bytes(torch.randint(0, 256, (5000,), generator=generator("random")).tolist()))
    os.chdir(here)
    return place


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_changes_nothing(case, bad_place, monkeypatch, capsys):
    monkeypatch.chdir(bad_place)
    before = {p: os.stat(p).st_mtime_ns for root, _, files in os.walk(".") for p in (os.path.join(root, f) for f in files)}
    flags, hint = BAD[case]
    if case == "a pipe" and not hasattr(os, "mkfifo"):
        pytest.skip("an operating system without named pipes")
    small = [] if {"--resume", "--init_from"} & set(flags) else [*TINY, *([] if "--data" in flags else ["--data", "text.txt"])]
    with pytest.raises(SystemExit) as e:
        train.main(small + flags)
    err = capsys.readouterr().err
    assert e.value.code == 2 and err.count("\n") == 1 and err.startswith("error: ") and hint in err, err
    assert before == {p: os.stat(p).st_mtime_ns for root, _, files in os.walk(".") for p in (os.path.join(root, f) for f in files)}
    assert not os.path.exists("executed")


@pytest.mark.parametrize("command, hint", [("train.py --max_iter 3", "Try --max_iters"), ("sample.py --promt x", "Try --prompt"), ("sample.py", "no run under out/"),
                                           ("train.py --data nowhere", "no such file"), ("compare.py --sweep nothing=1", "no such setting")])
def test_bad_input_is_one_line_of_a_real_process(command, hint, text):
    program, *flags = command.split()
    done = subprocess.run([sys.executable, os.path.join(os.path.dirname(train.__file__), program), *flags], capture_output=True, text=True, env=ONE_THREAD)
    assert done.returncode == 2 and len(said(done)) == 1 and hint in done.stderr and not done.stdout and not os.path.exists("out")


def said(process):  # -> lines on stderr, but torch's own warning that numpy is not installed
    return [line for line in process.stderr.splitlines() if "NumPy" not in line and "_conversion_method_template" not in line]


def test_a_write_that_fails_leaves_the_checkpoint_before_it(text, monkeypatch, capsys):
    run(text, "a", "--max_iters", "2")
    def full(state, f):
        f.write(b"half of it")
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(SystemExit) as e:
        train.main(["--resume", "--out_dir", "a", "--max_iters", "4"])
    assert e.value.code == 2 and "No space left" in capsys.readouterr().err
    assert train.load_checkpoint("a")["step"] == 2 and not os.path.exists("a/ckpt.pt.tmp")


def test_a_checkpoint_cut_anywhere_is_refused(text, capsys):
    run(text, "a", "--max_iters", "1")
    with open("a/ckpt.pt", "rb") as f:
        whole = f.read()
    for n in [0, 1, 100, *range(1000, len(whole), len(whole) // 40), len(whole) - 1]:
        with open("cut.pt", "wb") as f:
            f.write(whole[:n])
        with pytest.raises(SystemExit) as e:
            train.load_checkpoint("cut.pt")
        assert e.value.code == 2 and "damaged" in capsys.readouterr().err


def limited(limit, args):  # runs train.py in a process whose files may not grow beyond so many bytes
    """_dynamo is imported before, since under some versions of torch that writes files of its own."""
    code = f"import resource, signal, sys; sys.path.insert(0, {os.path.dirname(train.__file__)!r}); import train, torch._dynamo; " \
           f"signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit})); " \
           f"sys.exit(train.main({args!r}))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ONE_THREAD)


@pytest.mark.skipif(sys.platform == "win32", reason="has no RLIMIT_FSIZE")
@pytest.mark.parametrize("limit", [400, 2000, 60000])           # hit by the first line of metrics.jsonl, a later one, the checkpoint
def test_a_full_disk_leaves_the_checkpoint_before_it(limit, text, capsys):
    run(text, "full", "--eval_interval", "5", "--max_iters", "5")
    before = train.load_checkpoint("full")
    failed = limited(limit, ["--resume", "--out_dir", "full", "--max_iters", "20"])
    assert failed.returncode == 2 and len(said(failed)) == 1 and "could not be written" in failed.stderr, failed.stderr
    assert equal(before, train.load_checkpoint("full")) and not os.path.exists("full/ckpt.pt.tmp")
    assert train.main(["--resume", "--out_dir", "full", "--max_iters", "20"]) == 0 and train.load_checkpoint("full")["step"] == 20


ANY = {"random": bytes(torch.randint(0, 256, (3000,), generator=generator("any")).tolist()), "all values": bytes(range(256)) * 12, "empty lines": b"\n" * 3000,
       "one byte": b"a" * 3000, "NUL alone": b"\0" * 3000, "CRLF": b"a line\r\n" * 400, "UTF-16": ("text " * 300).encode("utf-16"),
       "half an emoji": "🙂".encode()[:2] * 1500}


@pytest.mark.parametrize("kind", ANY)
def test_any_bytes_are_data(kind, text, capsys):
    with open("any.bin", "wb") as f:
        f.write(ANY[kind])
    for name in OBJECTIVES if kind in ("random", "NUL alone") else ("clm", "bart"):
        run("any.bin", name, "--objective", name, "--max_iters", "2")
        assert all(math.isfinite(x) for x in losses(name)), name
    sample = __import__("sample")
    assert sample.main(["--out_dir", "clm", "--score", "any.bin"]) is None and sample.main(["--out_dir", "clm", "--prompt", ""]) is None
    assert "bits per byte" in capsys.readouterr().out


def test_the_same_seed_gives_the_same_bits(text):
    for out in ("a", "b"):
        run(text, out, "--max_iters", "6", "--objective", "electra")
    assert_same_run("a", "b")


def test_every_load_is_of_weights_only():
    root = os.path.dirname(train.__file__)
    for name in os.listdir(root):
        if name.endswith(".py"):
            with open(os.path.join(root, name), encoding="utf-8") as f:
                for line in f:
                    assert "torch.load(" not in line or "weights_only=True" in line, f"{name}: {line}"



@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_50_runs_killed_at_random_moments_resume_bit_for_bit(text):
    flags = [*TINY, "--n_embd", "96", "--data", text, "--max_iters", "60"]
    done = subprocess.run([sys.executable, os.path.join(HERE, "kill_runs.py"), ".", "50", *flags], capture_output=True, text=True, env=ONE_THREAD)
    assert done.returncode == 0 and "all equal" in done.stdout, done.stderr


@pytest.mark.slow
def test_two_processes_equal_one_for_every_objective(text):
    program = [os.path.join(HERE, "every_objective.py")]
    flags = [*TINY, "--data", text, "--accum", "4", "--max_iters", "20", "--eval_interval", "10"]
    for launch, out in (([], "one"), (["-m", "torch.distributed.run", "--nproc_per_node=2"], "two")):
        subprocess.run([sys.executable, *launch, *program, out, *flags], check=True, capture_output=True, env=ONE_THREAD)
    for name in os.listdir("one"):
        one, two = metrics(f"one/{name}"), metrics(f"two/{name}")
        assert len(one) == len(two) >= 23
        for a, b in zip(one, two):
            assert a["step"] == b["step"] and a["loss"] == pytest.approx(b["loss"], rel=1e-5), name
    assert len(os.listdir("one")) == len(OBJECTIVES) + 1


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="reads /proc")
def test_a_process_that_dies_ends_all_and_leaves_the_checkpoint(text):
    flags = [*TINY, "--data", text, "--accum", "2", "--max_iters", "100000", "--eval_interval", "20", "--out_dir", "run"]
    launcher = subprocess.Popen([sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", train.__file__, *flags],
                                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=ONE_THREAD)
    try:
        wait_for(lambda: os.path.exists("run/best.pt") and train.load_checkpoint("run")["step"] >= 40)
        with open(f"/proc/{launcher.pid}/task/{launcher.pid}/children") as f:
            children = [int(pid) for pid in f.read().split()]
        workers = [pid for pid in children if "train.py" in open(f"/proc/{pid}/cmdline").read()]
        assert len(workers) == 2
        os.kill(workers[1], signal.SIGKILL)
        assert launcher.wait(timeout=90) != 0
    finally:
        launcher.kill()
    step = train.load_checkpoint("run")["step"]
    assert train.main(["--resume", "--out_dir", "run", "--max_iters", str(step + 5)]) == 0


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="sends signals")
@pytest.mark.parametrize("signals, code, saved", [([signal.SIGTERM], 143, True), ([signal.SIGINT], 130, True), ([signal.SIGINT] * 2, -2, False)])
def test_a_real_process_ends_as_it_is_told(signals, code, saved, text):
    slow = "import sys, time, train; step = train.training_step\n" \
           "train.training_step = lambda *a: (time.sleep(0.5), step(*a))[1]\nsys.exit(train.main(sys.argv[1:]))"
    args = [*TINY, "--data", text, "--out_dir", "run", "--max_iters", "1000", "--eval_interval", "1000"]
    process = subprocess.Popen([sys.executable, "-u", "-c", slow, *args], stdout=subprocess.PIPE, text=True,
                               env={**ONE_THREAD, "PYTHONPATH": os.path.dirname(train.__file__)})
    wait_for(lambda: os.path.exists("run/metrics.jsonl") and len(metrics("run")) > 3)
    for s in signals:
        process.send_signal(s)
        time.sleep(0.1)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == code and ("--resume --out_dir run" in out) == saved
    assert (train.load_checkpoint("run")["step"] > 0) == saved


RESIDENT = """
import sys, train
def anonymous():
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) for line in f if line.startswith("RssAnon")) / 1024
step, seen = train.training_step, []
def measured(*args):
    seen.append(anonymous()) if len(seen) in (500, 2000) or len(seen) < 1 else seen.append(0)
    return step(*args)
train.training_step = measured
train.main(sys.argv[1:])
print("MiB", seen[500], seen[2000])
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads /proc")
def test_memory_does_not_grow_with_the_corpus_or_the_steps(text):
    at = {}
    for name, size in (("small.bin", 10 << 20), ("large.bin", 8 << 30)):
        with open(name, "wb") as f:
            f.truncate(size)                    # sparse: it takes no room on the disk
        args = [*TINY, "--data", name, "--out_dir", name + ".run", "--max_iters", "2001", "--eval_interval", "1000", "--log_interval", "100"]
        done = subprocess.run([sys.executable, "-c", RESIDENT, *args], check=True, capture_output=True, text=True,
                              env={**ONE_THREAD, "PYTHONPATH": os.path.dirname(train.__file__)})
        at[name] = [float(x) for x in done.stdout.split("MiB ")[1].split()]
    print(at)
    assert abs(at["large.bin"][1] - at["small.bin"][1]) < 50
    assert all(late - early < 20 for early, late in at.values())


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="reads /proc")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_any_process_saves_and_ends_all(rank, text):
    flags = [*TINY, "--data", text, "--accum", "2", "--max_iters", "100000", "--eval_interval", "100000", "--log_interval", "50", "--out_dir", "run"]
    launcher = subprocess.Popen([sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", train.__file__, *flags],
                                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=ONE_THREAD)
    try:
        wait_for(lambda: os.path.exists("run/ckpt.pt") and len(metrics("run")) > 5)
        with open(f"/proc/{launcher.pid}/task/{launcher.pid}/children") as f:
            workers = [pid for pid in f.read().split() if "train.py" in open(f"/proc/{pid}/cmdline").read()]
        os.kill(int(workers[rank]), signal.SIGTERM)
        assert launcher.wait(timeout=90) != 0
    finally:
        launcher.kill()
    assert train.load_checkpoint("run")["step"] > 0


def wait_for(condition, seconds=90):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)
