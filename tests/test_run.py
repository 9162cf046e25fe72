"""A run's settings, device, folder and checkpoints; command lines that must be refused."""
import dataclasses
import errno
import math
import os
import pickle
import re
import shlex
import signal
import zipfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from conftest import tiny, equal, randomize, settings
from test_train import assert_same_run, fit, metrics, on_posix, resume, write

import run
import sample
import train
from data import MASK, from_bytes, to_bytes
from experiments.score import score_exact
from objectives import OBJECTIVES
from run import get_config, get_members, load_checkpoint, save_checkpoint


def refused(refuses, hint, program, *flags):  # asserts that it fails in one line and changes no file
    def files():
        found = [os.path.join(folder, name) for folder, _, names in os.walk(".") for name in names]
        return {path: os.stat(path).st_mtime_ns for path in found}
    before = files()
    refuses(hint, program.main, [*flags])
    assert files() == before


# ---- settings
@pytest.mark.parametrize("flags, expected", [
    ("", dict(objective="clm", data=["stdlib"], resume=False, checkpoint=None, n_layer=4, learning_rate=0.01,
              max_passes=8.0)),
    ("--optimizer adamw", dict(learning_rate=0.003, weight_decay=0.0)),
    ("--max_iters 5", dict(max_passes=0.0)), ("--max_iters 5 --max_passes 2", dict(max_passes=2.0)),
    ("--data ~/a:1 b:2 --data c:3", dict(data=[os.path.expanduser("~/a:1"), "b:2", "c:3"])),
    ("--objective contrastive", dict(batch_size=32, n_head=4)),
    ("--objective rotation --batch_size 5", dict(block_size=64, batch_size=5)),
    # in a mixture, the defaults of its objectives do not apply
    ("--objective bart,clm", dict(attn_scale=1.0, n_head=2, block_size=256, batch_size=16))])
def test_settings_are_defaults_then_the_objectives_then_flags(flags, expected):
    hp = get_config(["--device", "cpu", *flags.split()])
    assert {name: getattr(hp, name) for name in expected} == expected
    assert hp.dtype in ("float32", "bfloat16") and run.defaults("cuda")["n_layer"] == 12


def test_a_child_has_its_parents_model_and_by_default_its_objective(text):
    fit(text, "a", "--objective", "mlm", "--mask_rate", ".5", "--doc_mask", "--attn_scale", "3", "--block_size", "128",
        "--n_head", "1", "--max_iters", "0")
    same = dict(n_embd=16, n_head=1, block_size=128, batch_size=16, objective="mlm", mask_rate=0.5, doc_mask=True,
                attn_scale=3.0)
    for flags, expected in {
            "": same,
            "--objective mlm:1": same | {"objective": "mlm:1"},
            "--mask_rate .2 --no-doc_mask --attn_scale 1": same | dict(mask_rate=0.2, doc_mask=False, attn_scale=1.0),
            "--objective hybrid": same | dict(objective="hybrid", mask_rate=0.3, doc_mask=False),
            "--objective span": same | dict(objective="span", mask_rate=0.3, doc_mask=False, attn_scale=2.0),
            "--objective rotation": dict(block_size=64, batch_size=64, attn_scale=3.0)}.items():
        hp = get_config(["--device", "cpu", "--init_from", "a", *flags.split()])
        assert {name: getattr(hp, name) for name in expected} == expected, flags


def test_a_resumed_run_has_all_settings_of_its_checkpoint_except_the_device(text):
    """Settings that the checkpoint lacks, such as a fork's new ones, have their defaults."""
    fit(text, "a", "--objective", "mlm", "--mask_rate", ".4", "--attn_scale", "3", "--seed", "7", "--max_iters", "0")
    ckpt = load_checkpoint("a")
    ckpt["config"]["device"] = "cuda:99"
    del ckpt["config"]["attn_scale"]
    save_checkpoint("a/ckpt.pt", ckpt)
    hp = get_config(["--resume", "--out_dir", "a", "--log_interval", "5"])
    assert hp.checkpoint["path"] == os.path.join("a", "ckpt.pt") and hp.checkpoint["step"] == ckpt["step"]
    own = dict(attn_scale=1.0, resume=True, checkpoint=hp.checkpoint, log_interval=5, device=hp.device)
    assert vars(hp) == ckpt["config"] | own and hp.device != "cuda:99"


def test_auto_is_cuda_or_cpu_and_each_process_has_its_own_gpu(monkeypatch):
    """Never mps, which was not tested."""
    def probe(n, device):
        return SimpleNamespace(device=torch.device(device), cpu=lambda: None)
    monkeypatch.setattr(torch, "zeros", probe)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setenv("LOCAL_RANK", "1")
    for has_cuda, world, name, device in ((False, 1, "auto", "cpu"), (True, 1, "auto", "cuda"),
                                          (True, 2, "auto", "cuda:1"), (True, 2, "cuda:0", "cuda:0")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
        monkeypatch.setattr(run, "WORLD", world)
        assert str(run.resolve_device(name)) == device


@pytest.mark.parametrize("error, precision", [(1e-6, "medium"), (1e-4, "highest")])
def test_a_cpu_uses_fast_products_only_if_they_are_exact(error, precision, monkeypatch):
    """As on a CPU whose products are rounded with precision medium, and only then: in float32 by 1e-6, in
    bfloat16 by more. The probe does not draw from torch's own generator."""
    matmul = torch.Tensor.__matmul__

    def product(a, b):
        exact = matmul(a.double(), b.double())
        is_fast = a.dtype == torch.float32 and torch.get_float32_matmul_precision() == "medium"
        return (exact * (1 + error * is_fast)).to(a.dtype)
    monkeypatch.setattr(torch.Tensor, "__matmul__", product)
    seed = torch.get_rng_state()
    for before in ("highest", "medium"):        # what an earlier run left
        torch.set_float32_matmul_precision(before)
        run.use_device(torch.device("cpu"))
        assert torch.get_float32_matmul_precision() == precision
    assert torch.equal(torch.get_rng_state(), seed)


def test_a_gpu_becomes_the_current_device_and_rounds_no_float32_product(monkeypatch):
    torch.set_float32_matmul_precision("medium")                # as an earlier run on a CPU left it
    monkeypatch.setattr(torch.cuda, "set_device", mock.Mock())
    run.use_device(torch.device("cuda:1"))
    torch.cuda.set_device.assert_called_once_with(torch.device("cuda:1"))
    assert torch.get_float32_matmul_precision() == "highest"


# ---- the folder and its checkpoints
def test_a_run_is_named_for_its_objective_and_the_latest_is_found(text):
    for name, folder in (("clm :.5, mlm:.5", "clm_.5+mlm_.5"), ("clm", "clm"), ("clm", "clm-2")):
        path = run.choose_out_dir(settings(name, 32))
        assert path == os.path.join("out", folder)
        run.open_metrics(path, 0).close()
        write(os.path.join(path, "best.pt"), b"")
        os.utime(os.path.join(path, "best.pt"), (len(folder), len(folder)))
    os.symlink("nowhere", "out/span")
    assert run.choose_out_dir(settings("span", 32)) == "out/span-2", "a dangling link blocks a run"
    os.mkdir("out/mlm")                         # a run that has just begun has nothing to sample from
    assert run.newest_run() == os.path.join("out", "clm_.5+mlm_.5")
    assert run.choose_out_dir(settings("clm", 32, out_dir="mine")) == "mine"


@on_posix
def test_a_folder_holds_one_run_at_a_time_where_there_are_locks(text, refuses, monkeypatch):
    fit(text, "a", "--max_iters", "1")
    with run.open_metrics("a", 0):
        refused(refuses, "another process", train, "--resume", "--out_dir", "a", "--max_iters", "2")
    resume("a", "--max_iters", "2")
    monkeypatch.setattr("fcntl.flock", mock.Mock(side_effect=OSError(38, "not implemented")))
    run.open_metrics("a", 0).close()


def recipes(heading):  # -> the blocks of code of a section of docs/EXTENDING.md
    page = (Path(run.__file__).parent / "docs" / "EXTENDING.md").read_text("utf-8")
    section = re.search(rf"</a>{heading}\n(.*?)\n## ", page, re.DOTALL)[1]
    return re.findall(r"```python\n(.*?)```", section, re.DOTALL)


def test_the_page_fine_tunes_a_run_on_labels(text, capsys):
    """As printed, with fewer steps. From the same run with frozen weights the accuracy is 0.5."""
    fit(text, "out/mlm", "--objective", "mlm", "--n_embd", "32", "--max_iters", "20", "--batch_size", "16")
    capsys.readouterr()
    [recipe] = recipes("Fine-tuning on labels")
    exec(recipe.replace("range(200)", "range(80)"), {})
    assert float(capsys.readouterr().out.split()[1]) > 0.7


@mock.patch.dict(OBJECTIVES)
def test_the_recipes_of_the_page_run_in_its_order(text, monkeypatch):
    for name in ("clm", "mlm", "contrastive"):
        fit(text, f"out/{name}", "--objective", name, "--max_iters", "9")
    main = train.main
    monkeypatch.setattr(train, "learning_rate", train.learning_rate)       # the page replaces it
    monkeypatch.setattr(train, "main", lambda argv, **how: main(tiny("--data", text, *argv, "--max_iters", "2"), **how))
    found = {}
    for recipe in recipes("Use from Python"):
        exec(recipe, found)
    bits = score_exact(found["clm"], from_bytes(b"\0" + found["texts"][0]), 32, 32) - 8
    assert -float(found["logp"][0].sum()) / math.log(2) == pytest.approx(bits, rel=1e-5)
    assert torch.equal(found["filled"] != found["holes"], found["holes"] == MASK)
    assert torch.allclose(found["vectors"].norm(dim=1), torch.ones(3))
    assert equal(load_checkpoint("out/mlm/changed.pt")["model"], load_checkpoint("out/mlm/best.pt")["model"])
    assert [step for step, _ in found["accuracy"]] == [0, 2]
    assert len({*found["best"].values()}) == 6


def test_an_objective_without_uses_trains_and_sample_py_refuses_it(text, refuses):
    name = next(iter(OBJECTIVES))
    with mock.patch.dict(OBJECTIVES, {name: dataclasses.replace(OBJECTIVES[name], uses={})}):
        assert train.main(tiny("--data", text, "--out_dir", "a", "--max_iters", "1")) == 0
        for flags in ([], ["--prompt", "a"], ["--objective", name]):
            refused(refuses, "no use for", sample, "--out_dir", "a", "--device", "cpu", *flags)


def test_a_damaged_file_is_refused_and_best_pt_starts_a_new_run(text, refuses):
    """Truncated anywhere, or with one flipped bit, which torch.load itself does not notice."""
    fit(text, "a", "--max_iters", "2")
    whole = Path("a/ckpt.pt").read_bytes()
    weight = load_checkpoint("a")["model"]["embed.weight"]
    at = whole.index(to_bytes(weight.flatten().view(torch.uint8)))
    files = [whole[:n] for n in [0, 1, 100, *range(1000, len(whole), len(whole) // 10), len(whole) - 1]]
    files.append(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1:])
    for content in files:
        write("a/ckpt.pt", content)
        refused(refuses, "damaged", train, "--resume", "--out_dir", "a", "--max_iters", "3")
    assert not equal(torch.load("a/ckpt.pt")["model"]["embed.weight"], weight)
    os.remove("a/ckpt.pt")
    for path in ("a", os.path.join("a", "best.pt")):            # holds no state of the optimizers
        refused(refuses, f"--init_from {os.path.join('a', 'best.pt')}", train, "--resume", "--out_dir", path)
    fit(text, "b", "--init_from", "a", "--max_iters", "0")
    assert equal(load_checkpoint("b")["model"], load_checkpoint("a")["model"])


FAULTS = {
    "missing": lambda tensors, name: tensors.pop(name),
    "unknown": lambda tensors, name: tensors.update(more=tensors[name]),
    "of another shape": lambda tensors, name: tensors.update({name: tensors[name][None]}),
    "of another type": lambda tensors, name: tensors.update({name: tensors[name].double()}),
    "not finite": lambda tensors, name: tensors[name].view(-1)[-1:].fill_(float("nan"))}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("part, name", [("model", "embed.weight"), ("model", "heads.replaced.bias"),
                                        ("model", "ngrams.table"), ("model", "head.weight"), ("optimizer", "muon.0"),
                                        ("optimizer", "adamw.0.second")])
def test_tensors_that_do_not_fit_are_refused_wherever_they_are_loaded(part, name, fault, place, refuses):
    ckpt = load_checkpoint("run")
    FAULTS[fault](ckpt[part], name)
    save_checkpoint("crafted/ckpt.pt", ckpt)
    reason = "is not finite" if fault == "not finite" else ", here "
    refused(refuses, reason, train, "--resume", "--out_dir", "crafted", "--max_iters", "2")
    if part == "model":
        refused(refuses, reason, sample, "--out_dir", "crafted", "--device", "cpu")
    # a parent's heads may be missing or different
    if part == "model" and fault != "unknown" and not name.startswith("heads."):
        refused(refuses, reason, train, *tiny("--data", "text.txt", "--init_from", "crafted"))


@torch.no_grad()
def test_a_child_has_its_parents_weights_and_fresh_heads_where_they_differ(capsys):
    """Of the byte head it has those outputs that the parent has, too."""
    parents = {"narrow": settings("mtp", 32, mtp_heads=3), "wide": settings("mtp,span", 32, mtp_heads=2)}
    for parent, child in (("narrow", "wide"), ("wide", "narrow"), ("narrow", "narrow")):
        saved = randomize(run.build(get_members(parents[parent]), parents[parent])).state_dict()
        net = run.build(get_members(parents[child]), parents[child])
        fresh = {name: t.clone() for name, t in net.state_dict().items()}
        run.start_from(net, dict(model=saved, path="a", step=3))
        new = capsys.readouterr().out
        for name, t in net.state_dict().items():
            if name == "head.weight":
                assert torch.equal(t[:, :256], saved[name][:, :256]) and not t[:, 256:].any()
            else:
                assert torch.equal(t, (fresh if name in new else saved)[name])
        assert ("heads." in new) == (parent != child)


# ---- signals, the device
@on_posix
@pytest.mark.parametrize("at_start, later", [(signal.default_int_handler, signal.SIG_DFL),
                                             (signal.SIG_IGN, signal.SIG_IGN)])
def test_a_second_signal_and_signals_that_nohup_ignores_are_not_caught(at_start, later):
    before = signal.signal(signal.SIGHUP, at_start)
    try:
        with run.catch_signals() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert stop == ([signal.SIGHUP] if later is signal.SIG_DFL else [])
            assert signal.getsignal(signal.SIGHUP) is later
    finally:
        signal.signal(signal.SIGHUP, before)


# ---- what must be refused
BAD = [  # flags, part of the error message
    ("--max_iter 3", "--max_iter"), ("--max_iters many", "invalid int value: 'many'"),
    ("--max_passes nan", "nan is not between"), ("--n_embd 15", "a multiple of 4"),
    ("--objective bert", "Try mlm"), ("--objective clm,clm", "as in clm:"),
    ("--objective clm:1e-320,mlm", "weights of 1e-9 to 1e9"), ("--mask_rate .2", "Try it with mlm"),
    ("--objective mlm --mask_random 1", "than 1"), ("--objective bart --doc_mask", "--doc_mask"),
    ("--objective span --block_size 64 --span_rate .9", "7 spans (mean length 6) and their gaps"),
    ("--objective clm,contrastive --batch_size 1 --accum 2", "too small for contrastive"),
    ("--data tiny.txt", "--block_size"),
    # a run that read a pipe is resumed without it in this way, too
    (f"--data {os.devnull}", f"--data {os.devnull}: neither a file"), ("--device cuda:99", "--device cpu"),
    ("--cuda_graph", "NVIDIA GPU"), ("--accum 3", "a multiple of 2"), ("--out_dir text.txt", "--out_dir"),
    ("--out_dir run", "--resume"), ("--resume", "no run under out/"),
    ("--resume --out_dir bare", "no checkpoint"), ("--resume --out_dir run --max_iters 0", "is at step 1"),
    ("--resume --out_dir run --n_embd 32", "--n_embd 32"), ("--resume --out_dir run --weight_decay 2", "run has 0.0"),
    ("--resume --out_dir run --data other.txt", "differs from the data of run"),
    ("--init_from run --n_head 1", "has 2 heads"), ("--init_from run --ngram_rows 0", "here missing"),
    ("--init_from new.pt", "--objective new: unknown. Try one of "), ("--init_from version.pt", "layout"),
    ("--init_from text.txt", "not a checkpoint"),
    ("--init_from payload.pt", "not a checkpoint of this program (it holds code)")]


class Payload:
    def __reduce__(self):
        return os.mkdir, ("executed",)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):  # with a run, and with bad files of every kind
    folder = tmp_path_factory.mktemp("bad")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write("text.txt", b"some words " * 500)
        write("other.txt", b"other words " * 500)
        write("tiny.txt", b"tiny")
        fit("text.txt", "run", "--objective", "electra", "--optimizer", "muon", "--max_iters", "1")
        os.mkdir("bare")
        os.mkdir("crafted")
        save_checkpoint("version.pt", load_checkpoint("run") | {"version": run.VERSION + 1})
        save_checkpoint("new.pt", load_checkpoint("run") | {"config": {"objective": "clm:.5,new:.5"}})
        with zipfile.ZipFile("payload.pt", "w") as z:
            z.writestr("archive/data.pkl", pickle.dumps(Payload(), protocol=2))
            z.writestr("archive/version", "3\n")
    return folder


@pytest.fixture
def place(folder, monkeypatch):
    monkeypatch.chdir(folder)


@pytest.mark.parametrize("flags, hint", BAD)
def test_bad_input_is_one_line_and_changes_nothing(flags, hint, place, monkeypatch, refuses):
    if flags == "--accum 3":                    # micro-batches that processes cannot share
        monkeypatch.setattr(run, "WORLD", 2)
    words = shlex.split(flags)
    if "--resume" not in words and "--init_from" not in words:
        words = tiny("--data", "text.txt", *words)
    refused(refuses, hint, train, *words)
    assert not os.path.exists("executed")


def test_ctrl_c_a_full_gpu_and_a_full_disk_end_a_program_without_a_traceback(capsys):
    """Mistakes of the program keep theirs."""
    memory = torch.OutOfMemoryError("CUDA out of memory")
    for error, result in ((KeyboardInterrupt(), (130, "")), (memory, (1, f"error: {memory}\n"))):
        with pytest.raises(SystemExit) as e:
            run.run_program(mock.Mock(side_effect=error))
        assert (e.value.code, capsys.readouterr().err) == result
    with mock.patch("os.dup2") as dup2, mock.patch("sys.stdout", mock.Mock()), pytest.raises(SystemExit) as e:
        run.run_program(mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    assert e.value.code == 1 and dup2.called
    assert capsys.readouterr().err .endswith("No space left on device. If a disk is full, try to free space\n")
    with pytest.raises(RuntimeError, match="a mistake"):
        run.run_program(mock.Mock(side_effect=RuntimeError("a mistake")))


# ---- a run among other things
def test_training_leaves_torchs_generator_and_does_not_depend_on_the_default_dtype(text):
    state = torch.get_rng_state()
    fit(text, "a", "--max_iters", "3", "--ngram_drop", "0.5")
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(5)
    torch.set_default_dtype(torch.float64)
    try:
        fit(text, "b", "--max_iters", "3", "--ngram_drop", "0.5")
    finally:
        torch.set_default_dtype(torch.float32)
    assert_same_run("a", "b")
    sample.load_run("b", "cpu")


def test_closed_streams_are_the_null_device(monkeypatch):
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(run.sys, name, None)
    with pytest.raises(SystemExit) as e:
        run.run_program(lambda: print("lost") or run.tqdm.write("lost"))
    assert not e.value.code


def test_lines_of_metrics_that_were_changed_or_cut_are_not_glued(text, capsys):
    """For example, an editor has written CRLF. The curves leave out a line that is being written."""
    fit(text, "a", "--max_iters", "6")
    path = Path("a/metrics.jsonl")
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    resume("a", "--max_iters", "8")
    steps = [record["step"] for record in metrics("a", "train")]
    assert steps == sorted(set(steps)) and {0, 1, 6, 7} <= {*steps}
    path.write_bytes(path.read_bytes() + b'{"step": 9, "spl')
    run.draw_losses("a")
    assert "loss.png" in capsys.readouterr().out
