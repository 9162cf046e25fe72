"""A run's settings, device, folder and checkpoints; command lines that cannot be."""
import contextlib
import dataclasses
import io
import os
import pickle
import platform
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from types import SimpleNamespace

import pytest
import torch
from conftest import TINY
from test_train import ALONE, HOME, assert_same_run, equal, fit, on_posix, resume, write

import run
import sample
import train
from objectives import OBJECTIVES
from run import get_config, load_checkpoint, save_checkpoint


def failed(capsys, program, *flags):  # -> the one line that says why
    code = None
    try:
        program.main([*flags])
    except SystemExit as e:                     # not kept, since with it the run's files would stay open
        code = e.code
    err = capsys.readouterr().err
    assert code == 2 and err.startswith("error: ") and err.count("\n") == 1, err
    return err


def refused(capsys, program, *flags):  # the same, and nothing on the disk has changed
    def files():
        found = [os.path.join(folder, name) for folder, _, names in os.walk(".") for name in names]
        return {path: os.stat(path).st_mtime_ns for path in found}
    before = files()
    err = failed(capsys, program, *flags)
    assert files() == before
    return err


# ---- settings

def test_settings_are_defaults_then_flags():
    hp = get_config(["--objective", "mlm", "--mask_rate", "0.3", "--device", "cpu"])
    assert (hp.objective, hp.mask_rate, hp.n_layer, hp.device) == ("mlm", 0.3, 4, "cpu")
    assert (hp.data, hp.resume, hp.learning_rate) == (["stdlib"], "", 0.01)
    assert hp.dtype in ("float32", "bfloat16")
    assert get_config(["--optimizer", "adamw", "--device", "cpu"]).learning_rate == 0.003
    for name, block in (("rotation", 64), ("rotation:2", 64), ("rotation:2,mlm:1", 256)):           # a mixture has none
        hp = get_config(["--objective", name, "--device", "cpu", "--batch_size", "5"])
        assert (hp.block_size, hp.batch_size) == (block, 5)


def test_help_names_every_objective_and_flag(capsys):
    with pytest.raises(SystemExit) as e:
        train.main(["--help"])
    out = capsys.readouterr().out
    assert e.value.code == 0
    for word in [*OBJECTIVES, *(f"--{flag}" for flag in run.flag_specs())]:
        assert word in out, word


# ---- devices

def pretend_two_gpus(monkeypatch):
    """A machine with two, of which this process, the second of torchrun's two, should take its own."""
    zeros = torch.zeros
    def probe(*shape, device=None, **how):
        if not str(device).startswith("cuda"):
            return zeros(*shape, device=device, **how)
        return SimpleNamespace(device=torch.device(device), cpu=lambda: None)
    monkeypatch.setattr(torch, "zeros", probe)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(run, "RANK", 1)
    monkeypatch.setattr(run, "WORLD", 2)


def test_a_resumed_run_takes_the_device_of_its_process_not_of_its_checkpoint(text, monkeypatch):
    fit(text, "a", "--max_iters", "1")
    ckpt = load_checkpoint("a")                 # first: torch keeps a list of its constructors from then on
    pretend_two_gpus(monkeypatch)
    ckpt["config"]["device"] = "cuda:99"
    save_checkpoint("a/ckpt.pt", ckpt)
    for flags, device in ([], "cuda:1"), (["--device", "auto"], "cuda:1"), (["--device", "cuda:0"], "cuda:0"):
        assert get_config(["--resume", "--out_dir", "a", *flags]).device == device


FAULTS = """
import resource, torch, run
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def step():  # six blocks of 31 MB, just below the highest threshold: 47,616 pages
    blocks = [torch.ones(31 << 18) for _ in range(6)]
run.use_device(torch.device("cpu"))
for _ in range(3):
    step()
before = faults()
for _ in range(20):
    step()
print(faults() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc's allocator")
def test_memory_that_is_freed_is_kept_for_the_next_step():
    """A page that was returned to the system is zeroed when it is touched again; without tune_malloc 900,000 are."""
    done = subprocess.run([sys.executable, "-c", FAULTS], cwd=HOME, capture_output=True, text=True)
    assert int(done.stdout) < 100_000, done.stderr


@pytest.mark.parametrize("highest, blocks", [(1 << 40, 1 << 30), (32 << 20, 32 << 20)])
def test_malloc_keeps_the_largest_blocks_that_its_version_allows(highest, blocks, monkeypatch):
    """Older versions refuse a threshold above 32 MB, and would then keep their own, which is 128 kB."""
    options = {}

    def mallopt(option, value):
        if option == -3 and value > highest:
            return 0
        options[option] = value
        return 1
    monkeypatch.setattr(run.ctypes, "CDLL", lambda name: SimpleNamespace(mallopt=mallopt))
    run.tune_malloc()
    assert options == {-3: blocks, -1: 2 ** 31 - 1}


def test_auto_never_picks_a_device_that_was_never_tried(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert run.resolve_device("auto").type == "cpu"


def test_a_run_with_a_graph_can_be_resumed_without(text, capsys):
    """As on a CPU."""
    fit(text, "a", "--max_iters", "1")
    ckpt = load_checkpoint("a")
    ckpt["config"] |= {"cuda_graph": True, "compile": True}
    save_checkpoint("a/ckpt.pt", ckpt)
    assert "Try --no-cuda_graph" in refused(capsys, train, "--resume", "--out_dir", "a", "--max_iters", "2")
    resume("a", "--max_iters", "2", "--no-cuda_graph", "--no-compile")
    config = load_checkpoint("a")["config"]
    assert not config["cuda_graph"] and not config["compile"]


# ---- the folder

@pytest.mark.parametrize("flags", ["--data tiny.txt", "--data text.txt --device cpu --init_from a --block_size 65536",
                                   "--data text.txt --batch_size 16777216 --accum 16777216"])
@pytest.mark.parametrize("folder", ["new/deep", "old"])
def test_a_start_that_fails_leaves_no_folder_of_its_own(flags, folder, text, capsys):
    fit(text, "a", "--max_iters", "1")
    os.mkdir("old")
    write("tiny.txt", b"tiny")
    small = [flag for flag in TINY if "--init_from" not in flags]
    refused(capsys, train, *small, *flags.split(), "--out_dir", folder)
    assert not os.path.exists("new") and os.listdir("old") == []


def test_a_start_that_fails_keeps_folders_that_were_there(text, capsys):
    os.mkdir("mine")
    refused(capsys, train, *TINY, "--data", "nowhere", "--out_dir", "mine/a")
    assert os.listdir("mine") == []


def test_a_resumption_that_fails_keeps_the_text_from_standard_input(text, capsys, monkeypatch):
    with open(text, "rb") as f:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(f.read())))
    fit("-", "a", "--max_iters", "2")
    os.remove("a/metrics.jsonl")
    assert "is at step 2 already" in refused(capsys, train, "--resume", "--out_dir", "a", "--max_iters", "1")
    assert os.path.exists("a/stdin.bin")


@on_posix
def test_a_second_start_leaves_the_first_ones_standard_input_alone(text, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"of the second " * 200)))
    with run.open_metrics("a"):
        write("a/stdin.bin", b"of the first")
        assert "another process" in refused(capsys, train, *TINY, "--data", "-", "--out_dir", "a")


@on_posix
@pytest.mark.parametrize("content, hint", [(b"x" * 9000, "Try freeing disk space"), (b"", "is empty"),
                                           (b"short", "--block_size")])
def test_standard_input_that_cannot_be_used_leaves_nothing(content, hint, text, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    with full_disk(5000):
        err = refused(capsys, train, *TINY, "--data", "-", "--out_dir", "a")
    assert hint in err and "--data -" in err and not os.path.exists("a")


@on_posix
def test_a_folder_holds_one_run_at_a_time(text, capsys):
    fit(text, "a", "--max_iters", "1")
    with run.open_metrics("a"):
        assert "another process" in refused(capsys, train, "--resume", "--out_dir", "a", "--max_iters", "2")
    resume("a", "--max_iters", "2")


# ---- a disk that is full

@contextlib.contextmanager
def full_disk(limit):  # files may not grow beyond so many bytes
    import resource
    import torch._dynamo  # noqa: F401  under some versions of torch it writes files of its own
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


@on_posix
@pytest.mark.parametrize("limit", [400, 60000])                 # a line of the log, the checkpoint
def test_a_full_disk_leaves_the_checkpoint_before_it(limit, text, capsys):
    fit(text, "a", "--eval_interval", "5", "--max_iters", "5")
    before = load_checkpoint("a")
    with full_disk(limit):
        err = failed(capsys, train, "--resume", "--out_dir", "a", "--max_iters", "20")
    assert "could not be written" in err and "--resume --out_dir a, whose ckpt.pt is complete" in err
    assert equal(before, load_checkpoint("a")) and not os.path.exists("a/ckpt.pt.tmp")
    resume("a", "--max_iters", "20")
    assert load_checkpoint("a")["step"] == 20


@on_posix
@pytest.mark.parametrize("limit", [100, 60000])
def test_before_the_first_save_the_same_command_works_again(limit, text, capsys):
    with full_disk(limit), pytest.raises(SystemExit):
        fit(text, "a", "--max_iters", "3")
    assert capsys.readouterr().err.endswith("Try freeing disk space, then the same command\n")
    fit(text, "a", "--max_iters", "3")
    fit(text, "b", "--max_iters", "3")
    assert_same_run("a", "b")


# ---- checkpoints

def test_best_pt_alone_is_enough_to_resume(text, monkeypatch, capsys):
    """best.pt is written first: a kill, or a full disk, in between leaves it alone."""
    flags, save, seen = ["--max_iters", "20", "--eval_interval", "10"], torch.save, []
    fit(text, "whole", *flags)
    def fills_up(state, f):
        seen.append(f.name)
        if len(seen) == 2:
            f.write(b"half of it")
            raise OSError(28, "No space left on device")
        save(state, f)
    monkeypatch.setattr(torch, "save", fills_up)
    with pytest.raises(SystemExit):
        fit(text, "out/a", *flags)
    err = capsys.readouterr().err
    assert "No space left" in err and "--resume --out_dir out/a, whose best.pt is complete" in err
    assert sorted(os.listdir("out/a")) == ["best.pt", "metrics.jsonl"]
    assert "--resume" in refused(capsys, train, *TINY, "--data", text, "--out_dir", "out/a")
    fit(text, "child", "--init_from", "out/a", "--max_iters", "0")
    sample.main(["--max_new_tokens", "3"])
    assert train.main(["--resume"]) == 0
    assert_same_run("whole", "out/a")


def test_a_damaged_checkpoint_names_best_pt_which_resumes(text, capsys):
    fit(text, "a", "--max_iters", "2")
    with open("a/ckpt.pt", "r+b") as f:
        f.truncate(50000)
    best = os.path.join("a", "best.pt")
    assert f"Try {best}\n" in refused(capsys, train, "--resume", "--out_dir", "a")
    resume(best, "--max_iters", "3")
    assert load_checkpoint("a")["step"] == 3


def test_a_checkpoint_cut_anywhere_is_refused(text, capsys):
    fit(text, "a", "--max_iters", "1")
    with open("a/ckpt.pt", "rb") as f:
        whole = f.read()
    for n in [0, 1, 100, *range(1000, len(whole), len(whole) // 40), len(whole) - 1]:
        with open("cut.pt", "wb") as f:
            f.write(whole[:n])
        assert "damaged" in refused(capsys, sample, "--out_dir", "cut.pt")


def test_flipped_bits_are_refused(text, capsys):
    """One low bit in every 64 bytes of the tensors; as a zip and as a pickle the file is what it was."""
    fit(text, "a", "--max_iters", "1")
    shutil.copy("a/ckpt.pt", "flipped.pt")
    with zipfile.ZipFile("a/ckpt.pt") as z, open("flipped.pt", "r+b") as f:
        for entry in [e for e in z.infolist() if re.search(r"/data/\d+$", e.filename)]:
            f.seek(entry.header_offset + 26)    # the lengths of name and extra field, which the data follow
            start = entry.header_offset + 30 + sum(int.from_bytes(f.read(2), "little") for _ in range(2))
            for at in range(start, start + entry.file_size, 64):
                f.seek(at)
                byte = f.read(1)[0] ^ 1
                f.seek(at)
                f.write(bytes([byte]))
    assert not equal(*(torch.load(path, weights_only=True)["model"] for path in ("a/ckpt.pt", "flipped.pt")))
    assert "damaged" in refused(capsys, train, "--init_from", "flipped.pt")


@pytest.fixture
def crafted(place, monkeypatch, capsys):  # -> changes a checkpoint, offers it to every program, yields what they say
    monkeypatch.chdir(place)
    def attempt(change, init=True):
        ckpt = load_checkpoint("run")
        change(ckpt)
        save_checkpoint("crafted/ckpt.pt", ckpt)
        yield refused(capsys, train, "--resume", "--out_dir", "crafted", "--max_iters", "2")
        yield refused(capsys, sample, "--out_dir", "crafted")
        if init:
            yield refused(capsys, train, *TINY, "--data", "text.txt", "--init_from", "crafted")
    return attempt


@pytest.mark.parametrize("key, value", [
    ("n_layer", "two"), ("n_layer", 3), ("n_embd", 32), ("ngram_rows", 7), ("optimizer", "sgd"), ("mask_rate", 2.0)])
def test_settings_that_do_not_fit_a_checkpoint_are_named(key, value, crafted):
    def change(ckpt):
        ckpt["config"][key] = value
    for line in crafted(change):
        assert f"--{key}" in line or "do not fit" in line


def test_a_checkpoint_of_an_unknown_objective_is_named(crafted):
    def change(ckpt):
        ckpt["config"]["objective"] = "clam"    # of a fork
    assert all("crafted/ckpt.pt: --objective clam: unknown. Try clm" in line for line in crafted(change))


@pytest.mark.parametrize("part, value", [("embed.weight", float("nan")), ("ngrams.table", float("inf")),
                                         ("heads.replaced.bias", float("nan"))])
def test_weights_that_are_not_finite_are_refused(part, value, crafted):
    def spoil(ckpt):
        ckpt["model"][part].view(-1)[-1] = value
    assert all("not finite" in line for line in crafted(spoil, init="heads" not in part))


@pytest.mark.parametrize("what", ["exp_avg", "exp_avg_sq", "step", "muon", "moments"])
@pytest.mark.parametrize("spoil", [lambda t: t.new_zeros(1), lambda t: t.double(), lambda t: t.int(), float])
def test_an_optimizer_state_of_another_layout_is_refused(what, spoil, crafted):
    """A fused kernel would read past the end of it, and a copy would spread one number over all."""
    def change(ckpt):
        part, key = {"muon": (ckpt["muon"], 0), "moments": (ckpt, "moments")}.get(
            what, (ckpt["adamw"]["state"][0], what))
        part[key] = 0.0 if spoil is float else spoil(part[key])
    assert "its optimizer's state does not fit" in next(crafted(change))


def test_an_optimizer_state_of_no_parameter_is_refused(crafted):
    def change(ckpt):
        state = ckpt["adamw"]["state"]
        state[-1] = state[0]
    assert "its optimizer's state does not fit" in next(crafted(change))


def test_the_optimizers_settings_are_the_runs_own(text):
    """Not those that a checkpoint's file may have, or lack."""
    fit(text, "a", "--max_iters", "2")
    fit(text, "b", "--max_iters", "2")
    ckpt = load_checkpoint("b")
    ckpt["adamw"]["param_groups"] = [{"params": [], "betas": 3}]
    save_checkpoint("b/ckpt.pt", ckpt)
    resume("a", "--max_iters", "4")
    resume("b", "--max_iters", "4")
    assert_same_run("a", "b")


def drop_heads(ckpt):
    for name in [name for name in ckpt["model"] if name.startswith("heads.")]:
        del ckpt["model"][name]


def test_a_head_that_is_missing_may_be_fresh_only_where_training_begins(crafted, tmp_path):
    assert all("do not fit" in line for line in crafted(drop_heads, init=False))
    fit("text.txt", str(tmp_path / "b"), "--objective", "electra", "--max_iters", "1", "--init_from", "crafted")


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_objective_with_its_own_block_size_reads_as_many_positions_a_step(name, kind, monkeypatch):
    monkeypatch.setattr(run, "resolve_device", lambda device: torch.device(kind))
    flags = ["--objective", name, "--dtype", "float32"]
    shared = run.defaults(kind)
    own = OBJECTIVES[name].flag_defaults
    hp = get_config(flags)
    assert hp.block_size == own.get("block_size", shared["block_size"])
    assert hp.batch_size == own.get("batch_size", shared["batch_size"] * shared["block_size"] // hp.block_size)
    assert get_config([*flags, "--block_size", "96"]).batch_size == own.get("batch_size", shared["batch_size"])
    assert get_config([*flags, "--batch_size", "24"]).batch_size == 24


def test_an_objective_may_have_longer_rows_of_its_own(monkeypatch):
    rows = {}
    for T in 512, 1 << 20:
        clm = dataclasses.replace(OBJECTIVES["clm"], flag_defaults={"block_size": T})
        monkeypatch.setitem(OBJECTIVES, "clm", clm)
        rows[T] = get_config(["--device", "cpu"]).batch_size
    assert rows == {512: 8, 1 << 20: 1}


def test_a_mixture_has_the_defaults_that_all_its_members_share():
    own = {"electra:.5,nsp:.5": {"attn_scale": 2.0, "mask_rate": 0.15}, "bart,span": {"attn_scale": 2.0},
           "bart,clm": {"attn_scale": 1.0, "block_size": 256}}
    for mixture, expected in own.items():
        hp = get_config(["--objective", mixture, "--device", "cpu"])
        assert {name: getattr(hp, name) for name in expected} == expected


def test_what_starts_from_a_run_goes_on_with_its_objective(text, tmp_path):
    out, more = str(tmp_path / "a"), ["--init_from", str(tmp_path / "a")]
    fit(text, out, "--objective", "mlm", "--mask_rate", ".5", "--doc_mask", "--max_iters", "0")
    for flags in [], ["--objective", "mlm"], ["--objective", "mlm:1"]:
        hp = get_config([*more, *flags])
        assert (hp.objective[:3], hp.mask_rate, hp.doc_mask) == ("mlm", 0.5, True)
    hp = get_config([*more, "--objective", "mlm", "--mask_rate", ".2", "--no-doc_mask"])
    assert (hp.mask_rate, hp.doc_mask) == (0.2, False)
    hp = get_config([*more, "--objective", "hybrid"])
    assert (hp.mask_rate, hp.doc_mask) == (0.3, False), "another objective has its own settings"


@pytest.mark.parametrize("parent, child, block_size, rows", [
    ("rotation", "clm", 64, 64), ("clm", "rotation", 64, 64), ("bart", "clm", 128, 32), ("clm", "bart", 128, 32),
    ("clm", "mlm", 256, 16)])
def test_what_starts_from_a_run_reads_as_many_positions_a_step(parent, child, block_size, rows, text, tmp_path):
    out, small = str(tmp_path / "a"), ["--n_layer", "1", "--n_head", "1", "--n_embd", "8", "--ngram_rows", "0"]
    train.main(["--objective", parent, "--data", text, "--out_dir", out, "--max_iters", "0", *small], with_sample=False)
    hp = get_config(["--init_from", out, "--objective", child])
    assert (hp.block_size, hp.batch_size) == (block_size, rows)


def test_attention_is_as_sharp_as_it_was_in_training(text, tmp_path):
    """A checkpoint from before the setting has 1, whatever its objective's default; what starts from a run of the same
    objective, or of one without a default of its own, has the run's, but may be told another."""
    span, out = ["--objective", "span", "--max_iters"], str(tmp_path / "a")
    for name, objective in OBJECTIVES.items():
        scale = objective.flag_defaults.get("attn_scale", 1.0)
        assert get_config(["--objective", name, "--device", "cpu"]).attn_scale == scale
    fit(text, out, *span, "1")
    assert run.load_run(out)[0].config.attn_scale == 2.0
    same = ["--objective", "span:1", "--attn_scale", "1", "--max_iters", "1"]
    fit(text, str(tmp_path / "same"), *same)
    assert get_config([*TINY, *span, "1", "--init_from", str(tmp_path / "same")]).attn_scale == 1.0
    for flags, scale in ([], 2.0), (["--attn_scale", "3"], 3.0), (["--objective", "clm"], 2.0):
        assert get_config([*TINY, *span, "1", "--init_from", out, *flags]).attn_scale == scale
    plain = str(tmp_path / "plain")
    fit(text, plain, "--max_iters", "1")
    for flags, scale in ([], 2.0), (["--attn_scale", "1.5"], 1.5), (["--objective", "clm"], 1.0):
        assert get_config([*TINY, *span, "1", "--init_from", plain, *flags]).attn_scale == scale
    ckpt = load_checkpoint(out)
    del ckpt["config"]["attn_scale"]
    for name in ("ckpt.pt", "best.pt"):
        torch.save(ckpt, os.path.join(out, name))
    assert run.load_run(out)[0].config.attn_scale == 1.0
    assert get_config(["--resume", "--out_dir", out]).attn_scale == 1.0


# ---- what cannot be

BAD = {  # name: flags, what the line says
    "unknown flag": ("--max_iter 3", "Try --max_iters"),
    "initials of a flag": ("--lr .1", "Try --learning_rate"),
    "unknown objective": ("--objective mml", "Try mlm"),
    "empty objective": ("--objective ''", "Try one of clm"),
    "two words": ("--objective clm:.5, mlm:.5", "stray word 'mlm:.5'. Try quotes"),
    "not a number": ("--max_iters many", "max_iters"),
    "rate too high": ("--objective mlm --mask_rate 1.5", "between 0.001 and 1.0. Try the default"),
    "rate in percent": ("--objective mlm --mask_rate 15", "Try 0.15"),
    "rate in permille": ("--objective mlm --mask_rate 150", "Try the default"),
    "shares of more than 1": ("--objective mlm --mask_token 1", "Try --mask_random 0"),
    "spans longer than a row": ("--objective span --span_mean 500", "--span_mean 500"),
    "short spans longer than a row": ("--objective ul2 --span_mean 1000000", "bytes in spans"),
    "no prefix": ("--objective prefix --prefix_max 0", "--prefix_max 0"),
    "setting of another objective": ("--mask_rate .2", "Try it with mlm"),
    "no layers": ("--n_layer 0", "--n_layer 0"),
    "odd width": ("--n_embd 15", "--n_embd 16"),
    "unknown negatives": ("--objective nsp --nsp_negatives hard", "Try random or swap"),
    "a member twice": ("--objective clm:.5,clm:.5", "different names"),
    "a vanishing weight": ("--objective clm:1e-320,mlm:1", "positive weights"),
    "endless weights": ("--objective clm:1e308,mlm:1e308", "positive weights"),
    "no row of a denoiser": ("--objective clm:.75,ul2:.25 --batch_size 8", "has 2"),
    "documents where order is lost": ("--objective bart --doc_mask", "--doc_mask"),
    "missing file": ("--data nowhere.txt", "nowhere.txt"),
    "empty file": ("--data empty.txt", "is empty"),
    "tiny file": ("--data tiny.txt", "--block_size"),
    "folder without text": ("--data bare", "no text file"),
    "a pipe": ("--data pipe", "not a regular file"),
    "weight of data": ("--data text.txt:-1", "positive number"),
    "an endless weight": ("--data text.txt:inf", "positive number"),
    "no such device": ("--device cuda:99", "--device cpu"),
    "no device at all": ("--device toaster", "--device cpu"),
    "the word for all such devices": ("--device gpu", "unknown device. Try cuda"),
    "a device that holds nothing": ("--device meta", "--device cpu"),
    "a graph without a GPU": ("--cuda_graph", "NVIDIA GPU"),
    "a batch beyond all memory": ("--batch_size 16777216 --accum 16777216", "does not fit here"),
    "a file as folder": ("--out_dir text.txt", "--out_dir"),
    "an existing run": ("--out_dir run", "--resume"),
    "the metrics of a run that is gone": ("--out_dir gone", "checkpoints are gone"),
    "resume without runs": ("--resume", "no run under out/"),
    "resume nothing": ("--resume --out_dir bare", "no checkpoint"),
    "fewer steps than done": ("--resume --out_dir run --max_iters 0", "at step 1 already"),
    "resume another width": ("--resume --out_dir run --n_embd 32", "--n_embd 32"),
    "resume another objective": ("--resume --out_dir run --objective clm", "--objective clm"),
    "resume another corpus": ("--resume --out_dir run --data other.txt", "not those of the run"),
    "resume other weights": ("--resume --out_dir run --data text.txt other.txt:.1", "not those of the run"),
    "resume other sizes": ("--resume --out_dir sizes", "do not fit"),
    "resume beyond all memory": ("--resume --out_dir huge", "Try a device with more memory"),
    "resume another optimizer's state": ("--resume --out_dir state", "does not fit"),
    "init from nothing": ("--init_from nowhere", "nowhere"),
    "heads of another shape": ("--objective mtp --init_from mtp.pt --mtp_heads 2", "Try --mtp_heads 3\n"),
    "init from another width": ("--init_from run --n_layer 5", "--n_layer 5"),
    "init from a newer version": ("--init_from newer.pt", "the version that wrote it"),
    "init from an older version": ("--init_from older.pt", "the version that wrote it"),
} | {f"init from {file}": (f"--init_from {file}", "not a checkpoint") for file in (
    "text.txt", "parts.pt", "payload.pt", "bare.pkl", "other.zip")}


@pytest.fixture(scope="module")
def place(tmp_path_factory):  # a folder with a run, and with everything that can be wrong
    place, here = tmp_path_factory.mktemp("bad"), os.getcwd()
    os.chdir(place)
    with open(shlex.__file__, "rb") as f:
        words = f.read()
    for name, content in (("text.txt", words), ("other.txt", words[::-1]), ("empty.txt", b""),
                          ("tiny.txt", b"tiny text, too short"), ("bare.pkl", pickle.dumps(Payload()))):
        with open(name, "wb") as f:
            f.write(content)
    fit("text.txt", "run", "--objective", "electra", "--max_iters", "1")
    fit("text.txt", "mtp", "--objective", "mtp", "--mtp_heads", "3", "--max_iters", "1")
    shutil.move("mtp/ckpt.pt", "mtp.pt")
    ckpt = load_checkpoint("run")
    for name in ("bare", "crafted", "gone", "huge", "sizes", "state"):
        os.mkdir(name)
    shutil.copy("run/metrics.jsonl", "gone")
    save_checkpoint("newer.pt", ckpt | {"version": run.VERSION + 1})
    save_checkpoint("parts.pt", dict(version=run.VERSION, config={}))
    save_checkpoint("older.pt", ckpt | {"version": run.VERSION - 1})
    save_checkpoint("sizes/ckpt.pt", ckpt | {"model": {k: v[..., :1] for k, v in ckpt["model"].items()}})
    huge = ckpt["config"] | {"batch_size": 1 << 24, "accum": 1 << 24}
    save_checkpoint("huge/ckpt.pt", ckpt | {"config": huge})
    save_checkpoint("state/ckpt.pt", ckpt | {"muon": ckpt["muon"][:1]})
    with zipfile.ZipFile("payload.pt", "w") as z:
        z.writestr("archive/data.pkl", pickle.dumps(Payload(), protocol=2))
        z.writestr("archive/version", "3\n")
    with zipfile.ZipFile("other.zip", "w") as z:
        z.writestr("hello.txt", "hello")
    if hasattr(os, "mkfifo"):
        os.mkfifo("pipe")
    os.chdir(here)
    return place


class Payload:
    def __reduce__(self):
        return os.mkdir, ("executed",)


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_changes_nothing(case, place, monkeypatch, capsys, recwarn):
    monkeypatch.chdir(place)
    flags, hint = BAD[case]
    if case == "a pipe" and not hasattr(os, "mkfifo"):
        pytest.skip("an operating system without named pipes")
    small = [] if "--resume" in flags or "--init_from" in flags else [*TINY, "--data", "text.txt"]
    assert hint in refused(capsys, train, *small, *shlex.split(flags))
    assert not os.path.exists("executed") and not [str(w.message) for w in recwarn]


@pytest.mark.parametrize("command, hint", [
    ("train.py --data nowhere", "no such file"), ("sample.py", "no run under out/"),
    ("-m experiments.compare --sweep nothing=1", "wants a setting")])
def test_bad_input_is_one_line_of_a_real_process(command, hint, text):
    words = [os.path.join(HOME, word) if word.endswith(".py") else word for word in command.split()]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, env=ALONE)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and hint in done.stderr
    assert not done.stdout and not os.path.exists("out")


@pytest.mark.parametrize("module", ["model", "data", "sample"])
def test_a_module_is_imported_without_a_warning(module):
    """Of NumPy, which is not required."""
    done = subprocess.run([sys.executable, "-c", f"import {module}"], cwd=HOME, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")


@on_posix
@pytest.mark.parametrize("program", ["train.py --data text.txt --out_dir b --max_iters 2", "sample.py --out_dir a"])
@pytest.mark.parametrize("redirection", [">&-", *(pytest.param(other, marks=pytest.mark.slow) for other in (
    "2>&-", ">&- 2>&-", "> /dev/full", "> /dev/full 2> /dev/full"))])
def test_closed_and_full_streams_end_without_a_traceback(program, redirection, text):
    fit(text, "a", "--max_iters", "1")
    flags = " ".join(TINY) if "train.py" in program else ""
    command = f"{shlex.quote(sys.executable)} {shlex.quote(HOME)}/{program} {flags} {redirection}"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, env=ALONE)
    needs_stdout = "sample.py" in program       # where the answer goes; training has its folder
    assert (done.returncode != 0) == ("full" in redirection or needs_stdout and redirection.startswith(">&-")), done
    if redirection == "> /dev/full":
        assert done.stderr.count("\n") == 1 and "could not be written (No space left on device)" in done.stderr
    else:
        assert "Traceback" not in done.stderr
    if "train.py" in program:
        assert os.path.exists("b/ckpt.pt")


def test_the_readmes_notebook_runs(text, capsys):
    fit(text, "out/clm", "--max_iters", "1")
    with open(os.path.join(os.path.dirname(run.__file__), "README.md"), encoding="utf-8") as f:
        block = f.read().split("\n## In a notebook\n")[1].split("```python\n")[1].split("```")[0]
    exec(block, {})
    out = capsys.readouterr().out
    assert "torch.Size([16, 256, 256])" in out
    accuracy, baseline = map(float, out.split()[-2:])
    assert 1 > accuracy > baseline > 0.5
