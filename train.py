"""Train any objective of objectives.py on any bytes.

    python train.py                                     clm on the Python standard library's own source
    python train.py --objective mlm --data book.txt     another objective, your own text
    python train.py --resume                            go on with the newest run
    python train.py --init_from out/clm --data new.txt:0.95 old.txt:0.05
"""
# B rows of a micro-batch, T = block_size positions of a row, n raw bytes that fill a row
import argparse
import bz2
import contextlib
import difflib
import json
import lzma
import math
import os
import platform
import signal
import sys
import threading
import time
import zlib

import torch
from tqdm import tqdm

from data import CLS, MASK, MID, MODE_R, MODE_S, MODE_X, PAD, PRE, SENTINEL, SEP, SUF
from data import check_sizes, document_ids, draw, fail, gather, generator, open_corpus, reseed, to_bytes
from model import Sizes, Transformer
from objectives import EVAL_ROWS, IGNORE, OBJECTIVES, apportion, token_loss

VERSION = 1                                     # of the checkpoint's layout
CHECKPOINT = {"config", "step", "seconds", "best", "sources", "metrics_bytes", "model", "heads", "adamw", "muon",
              "held_out"}
HELD_OUT = 4096                                 # bytes of validation text kept in the checkpoint for sample.py
COMPRESSED = 1 << 24                            # the compressors read at most so many bytes
BETAS, EPS = (0.9, 0.95), 1e-10                 # AdamW
MOMENTUM, NS_STEPS = 0.9, 5                     # Muon; .9 learns faster than .95 over a few hundred steps

# every flag but the objectives' own: (default, help, lowest, highest); a default may depend on device or optimizer
SETTINGS = {
    "run": {
        "objective": ("clm", "a name from the table below, or a mixture such as clm:0.5,mlm:0.5"),
        "data": (["stdlib"], "files, folders, - (standard input) or stdlib, each with an optional :weight"),
        "out_dir": ("", "folder of the run; without it out/OBJECTIVE, then out/OBJECTIVE-2, ..."),
        "resume": (False, "go on with the run in --out_dir, without it with the newest under out/"),
        "init_from": ("", "run or checkpoint whose weights to start from, with a new optimizer"),
        "seed": (1, "of weights, windows and corruption", 0, 2 ** 31),
    },
    "model": {
        "n_layer": ({"cpu": 4, "cuda": 12}, "blocks", 1, 1000),
        "n_head": ({"cpu": 4, "cuda": 6}, "attention heads", 1, 1000),
        "n_embd": ({"cpu": 128, "cuda": 768}, "width", 2, 1 << 20),
        "block_size": ({"cpu": 256, "cuda": 1024}, "positions of a row", 2, 1 << 24),
    },
    "training": {
        "batch_size": ({"cpu": 8, "cuda": 64}, "rows of a micro-batch", 1, 1 << 24),
        "accum": (1, "micro-batches of a step, which reads batch_size * accum rows", 1, 1 << 24),
        "max_iters": ({"cpu": 1200, "cuda": 5000}, "steps", 0, 1 << 40),
        "learning_rate": ({"muon": 0.01, "adamw": 0.003}, "peak rate", 0.0, 100.0),
        "warmup_iters": (20, "steps of linear warm-up", 0, 1 << 40),
        "lr_decay": (0.6, "last share of the run, over which the rate falls linearly to 0", 0.0, 1.0),
        "weight_decay": (0.0, "of hidden matrices, times the rate, per step", 0.0, 100.0),
        "grad_clip": (1.0, "largest norm of the gradient, 0 for any", 0.0, 1e30),
        "doc_mask": (False, "keep attention inside a document, where the objective keeps the text's order"),
        "optimizer": ("muon", "muon (with AdamW for embeddings, heads and vectors) or adamw (for all)"),
    },
    "evaluation": {
        "eval_interval": ({"cpu": 200, "cuda": 500}, "steps between evaluations; each one saves", 1, 1 << 40),
        "eval_iters": (8, f"validation batches of {EVAL_ROWS} rows for each source", 1, 1 << 24),
        "log_interval": (10, "steps between lines of metrics.jsonl", 1, 1 << 40),
    },
    "system": {
        "device": ("auto", "auto, cpu, cuda, cuda:1, mps"),
        "dtype": ("auto", "of activations: auto, float32, bfloat16; weights are float32"),
        "compile": (False, "torch.compile the loss"),
        "cuda_graph": (False, "replay the whole step, corruption and optimizer included, as one CUDA graph"),
    },
}
# what may differ between a run and its continuation
FREE = {"data", "out_dir", "resume", "max_iters", "eval_interval", "log_interval", "device", "compile", "cuda_graph"}
WARM = 3                                        # steps before a CUDA graph is captured
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))     # of torchrun's processes


# ---- settings

class Parser(argparse.ArgumentParser):
    def error(self, message):
        fail(f"{message}. Try: python {self.prog} --help")

    def parse_args(self, argv):
        given, unknown = self.parse_known_args(argv)
        if unknown:
            near = difflib.get_close_matches(unknown[0].split("=")[0], self._option_string_actions, 1)
            fail(f"unknown argument {unknown[0]}. Try {near[0] if near else f'python {self.prog} --help'}")
        return given

    def format_help(self):
        title = "objectives: mask, share of a row's positions with loss, rows for the signal of one clm row, what, use"
        lines = [super().format_help(), title]
        for name, entry in OBJECTIVES.items():
            share, words = default_share(name), f"{entry['help']}; {entry['use']}"
            lines.append(f"  {name:12s}{entry['mask']:14s}{share:6.1%} {1 / share:6.2f}x  {words}")
        return "\n".join(lines) + "\n"


def parse(argv):  # -> {flag: value} of the flags that argv gives
    """Exits with code 2 on a flag that does not exist, naming the nearest, or a value of the wrong type."""
    groups = SETTINGS | {"of " + name: entry["settings"] for name, entry in OBJECTIVES.items()}
    # no defaults here: what was not given must be known, since a checkpoint's settings come in between
    parser = Parser(prog="train.py", usage="python train.py [--objective NAME] [--data PATH] [flags below]",
                    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                    allow_abbrev=False, argument_default=argparse.SUPPRESS)
    listed = set()
    for title, flags in groups.items():
        group = parser.add_argument_group(title)
        for flag, (default, text, *_) in flags.items():
            if flag in listed:                  # some objectives share a setting
                continue
            listed.add(flag)
            others = [f"of {name}" for name, entry in OBJECTIVES.items() if flag in entry["settings"]][1:]
            text = ", ".join([text, *others])   # the first is the group's title
            # a default that depends on the device or optimizer is shown whole, its type taken from the first
            if isinstance(default, dict):
                shown = ", ".join(f"{k} {v}" for k, v in default.items())
                text, default = f"{text} [{shown}]", [*default.values()][0]
            elif default != "" and default is not False:
                text = f"{text} [{' '.join(default) if isinstance(default, list) else default}]"
            how = dict(action="store_true") if default is False else dict(metavar="X", type=type(default))
            how = dict(metavar="X", nargs="+") if isinstance(default, list) else how
            group.add_argument(f"--{flag}", help=text.replace("%", "%%"), **how)
    return vars(parser.parse_args(argv))


def specs():  # -> {flag: (default, help, lowest, highest)}, the objectives' own included
    groups = [*SETTINGS.values(), *(entry["settings"] for entry in OBJECTIVES.values())]
    return {flag: spec for group in groups for flag, spec in group.items()}


def defaults(kind="cpu", optimizer="muon"):  # -> {flag: default}
    def pick(default):
        return next(default[k] for k in (kind, optimizer) if k in default) if isinstance(default, dict) else default
    return {flag: pick(spec[0]) for flag, spec in specs().items()}


def get_config(argv):  # -> Namespace of every setting
    """Defaults, then a checkpoint's settings under --resume, then the flags given. Reads, but changes nothing.

    Exits with code 2 on an unknown flag, a value out of range, or one that contradicts the checkpoint."""
    # what was given, and what a checkpoint says
    given, saved = {flag: value for flag, value in parse(argv).items() if value != "auto"}, {}
    if given.get("resume"):
        given["out_dir"] = given.get("out_dir") or newest_run()
        saved = load_checkpoint(given["out_dir"])["config"]
        refuse_changes(given, saved, set(saved) - FREE, "the run to resume was started with")
    elif given.get("init_from"):
        sizes = ("n_layer", "n_head", "n_embd", "block_size")
        saved = {k: v for k, v in load_checkpoint(given["init_from"])["config"].items() if k in sizes}
        refuse_changes(given, saved, sizes[:3], f"the model in {given['init_from']} has")
    if given.get("optimizer", "muon") not in ("muon", "adamw"):
        fail(f"--optimizer {given['optimizer']}: unknown. Try muon or adamw")

    # defaults of the device, of the optimizer, of the objective, then those two
    device = pick_device(given.get("device", saved.get("device", "auto")))
    kind = "cuda" if device.type == "cuda" else "cpu"
    chosen = saved | given
    own = OBJECTIVES.get(chosen.get("objective", "clm"), {}).get("defaults", {})
    hp = argparse.Namespace(**defaults(kind, chosen.get("optimizer", "muon")) | own | chosen)
    hp.device = str(device)
    hp.dtype = pick_dtype(hp.dtype, device)

    # what cannot be
    for flag, spec in specs().items():
        if len(spec) == 4 and not spec[2] <= getattr(hp, flag) <= spec[3]:
            fail(f"--{flag} {getattr(hp, flag)}: must lie between {spec[2]} and {spec[3]}. Try the default")
    if hp.cuda_graph and device.type != "cuda":
        fail(f"--cuda_graph: needs an NVIDIA GPU, and the device is {device}. Try without it")
    if hp.n_embd % (2 * hp.n_head):
        fits = 2 * hp.n_head * math.ceil(hp.n_embd / hp.n_head / 2)
        fail(f"--n_embd {hp.n_embd}: must be a multiple of 2 * n_head. Try --n_embd {fits}")
    run = members(hp)
    for name, entry in OBJECTIVES.items():
        for flag in sorted(set(entry["settings"]) & set(given)):
            if not any(flag in m["settings"] for m in run):
                fail(f"--{flag}: is a setting of {name}, but this run trains {hp.objective}. Try --objective {name}")
    for m in run:
        if hp.doc_mask and not m.get("packs"):
            those = " ".join(name for name, entry in OBJECTIVES.items() if entry.get("packs"))
            fail(f"--doc_mask: {m['name']} does not keep the text's order. Try it with {those}")
    return hp


def refuse_changes(given, saved, flags, what):
    for flag in sorted(set(flags) & set(given)):
        if given[flag] != saved[flag]:
            fail(f"--{flag} {given[flag]}: {what} {'none' if saved[flag] == '' else saved[flag]}. Try without --{flag}")


def members(hp):  # -> the objectives of the run: entries of OBJECTIVES with name, weight, rows of a micro-batch, n
    """One for --objective clm, several for clm:0.5,mlm:0.5. Every micro-batch holds the same rows of each, so that
    shapes never change."""
    parts = [part.partition(":") for part in hp.objective.split(",")]
    for name, _, _ in parts:
        if name not in OBJECTIVES:
            near = difflib.get_close_matches(name, OBJECTIVES, 1)
            fail(f"--objective {name}: unknown. Try {near[0] if near else 'one of ' + ' '.join(OBJECTIVES)}")
    try:
        weights = [float(weight) if colon else 1.0 for _, colon, weight in parts]
    except ValueError:
        weights = [0.0]
    if not all(1e-9 < w < 1e9 for w in weights) or len({name for name, _, _ in parts}) < len(parts):
        fail(f"--objective {hp.objective}: wants different names with positive weights, as in clm:0.5,mlm:0.5")
    weights = [w / sum(weights) for w in weights]
    # the same rows of each member in every micro-batch, or counts and shapes would drift
    rows = apportion(weights, hp.batch_size)
    if min(rows) == 0:
        fail(f"--objective {hp.objective}: --batch_size {hp.batch_size} leaves a member without a row. "
             f"Try --batch_size {math.ceil(1 / min(weights))}")
    out = []
    for (name, _, _), weight, r in zip(parts, weights, rows):
        own = argparse.Namespace(**vars(hp) | {"batch_size": r})                    # it sees the rows that are its own
        n = OBJECTIVES[name]["window"](hp.block_size, own)
        out.append(dict(OBJECTIVES[name], name=name, weight=weight, rows=r, n=n))
    return out


def default_share(name):  # -> share of positions with loss at the default settings, from a batch that is made
    entry, B, g = OBJECTIVES[name], 64, generator("share")
    hp = defaults() | entry.get("defaults", {})
    T = hp["block_size"]
    hp = argparse.Namespace(**hp | dict(device="cpu", dtype="float32", batch_size=B))
    batch = entry["make"](torch.randint(1, 256, (B, entry["window"](T, hp)), generator=g), g, hp)
    return targets(entry, batch, hp) / (B * T)


def targets(entry, batch, hp):  # -> positions of the batch with loss; a position counts once for every target it has
    return float(sum(entry.get("targets", entry["counts"])(batch, hp).values()))


def pick_device(name):
    """auto: CUDA, else mps, else the CPU. Exits with code 2 on one that this machine lacks."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if name == "cuda" and WORLD > 1:
        name = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    try:
        probe = torch.zeros(1, device=name)
        probe.cpu()                             # there are devices that hold nothing
        return probe.device
    except (RuntimeError, AssertionError, NotImplementedError):
        fail(f"--device {name}: not on this machine. Try --device cpu")


def pick_dtype(name, device):  # -> "float32" or "bfloat16"
    """auto: bfloat16 where the device has products of it in hardware. Exits with code 2 on another name."""
    if name not in ("auto", "float32", "bfloat16"):
        fail(f"--dtype {name}: unknown. Try float32 or bfloat16")
    if name != "auto":
        return name
    if device.type == "cuda":
        return "bfloat16" if torch.cuda.get_device_capability(device) >= (8, 0) else "float32"
    # products of bfloat16 are the faster ones on a CPU that has instructions for them, and on no other
    fast = any(getattr(torch.cpu, f"_is_{isa}_supported", bool)() for isa in ("avx512_bf16", "amx_tile"))
    return "bfloat16" if device.type == "cpu" and fast else "float32"


def set_precision(device):  # -> how float32 products are computed, in words
    """On x86 "medium" hands float32 products to oneDNN, whose AVX-512 path is up to twice as fast as MKL's on
    AMD. Where it would round the operands to bfloat16 (AMX, ARM) the probe sees it, and they stay exact."""
    torch.set_float32_matmul_precision("highest")
    if device.type != "cpu":
        return "float32 products exact"
    # a probe: some CPUs round the operands to bfloat16 at "medium", which nobody asked for
    a = torch.randn(256, 256, generator=generator("probe"))
    torch.set_float32_matmul_precision("medium")
    error = float((a @ a - (a.double() @ a.double())).norm() / (a.double() @ a.double()).norm())
    if error > 1e-5:
        torch.set_float32_matmul_precision("highest")
        return "float32 products exact"
    return f"float32 products by oneDNN (relative error {error:.0e})"


# ---- runs and checkpoints

def choose_out_dir(hp):  # -> a folder that holds no run yet
    """Exits with code 2 where --out_dir names a file, or a folder in which training has begun."""
    if hp.out_dir:
        if any(os.path.exists(os.path.join(hp.out_dir, name)) for name in ("ckpt.pt", "best.pt")):
            fail(f"--out_dir {hp.out_dir}: already holds a run. Try --resume to go on with it, or another --out_dir")
        if os.path.exists(hp.out_dir) and not os.path.isdir(hp.out_dir):
            fail(f"--out_dir {hp.out_dir}: is a file. Try another name")
        # a log alone is harmless (a start that failed) unless it holds steps
        log = os.path.join(hp.out_dir, "metrics.jsonl")
        if os.path.isfile(log):
            with open(log, "rb") as f:
                if b'"split": "train"' in f.read():
                    fail(f"--out_dir {hp.out_dir}: holds the metrics of a run whose checkpoints are gone. "
                         "Try another --out_dir")
        return hp.out_dir
    base = os.path.join("out", hp.objective.replace(",", "+").replace(":", "_"))
    path, i = base, 1
    while os.path.exists(path) and (not os.path.isdir(path) or os.listdir(path)):
        i += 1
        path = f"{base}-{i}"
    return path


def newest_run():  # -> folder under out/ whose checkpoint was written last
    runs = [os.path.join("out", d) for d in (os.listdir("out") if os.path.isdir("out") else [])]
    runs = [d for d in runs if os.path.exists(os.path.join(d, "ckpt.pt"))]
    if not runs:
        fail("no run under out/. Try python train.py first, or name a folder with --out_dir")
    return max(runs, key=lambda d: os.path.getmtime(os.path.join(d, "ckpt.pt")))


def save_checkpoint(path, state):
    """Whole or absent: written under another name, synced, then renamed. Exits with code 2 when the disk refuses."""
    try:
        # never write over the old file: a kill halfway would leave neither
        with open(path + ".tmp", "wb") as f:
            torch.save(state, f)
            f.flush()
            os.fsync(f.fileno())
        os.replace(path + ".tmp", path)
        if hasattr(os, "O_DIRECTORY"):          # the new name too, where folders can be synced
            folder = os.open(os.path.dirname(path) or ".", os.O_DIRECTORY)
            os.fsync(folder)
            os.close(folder)
    except (OSError, RuntimeError) as e:        # torch reports a full disk as a RuntimeError
        if os.path.exists(path + ".tmp"):
            os.remove(path + ".tmp")
        fail(f"{path}: could not be written ({str(e).splitlines()[0]}). The checkpoint before it is whole. "
             "Try freeing disk space, then --resume")


def load_checkpoint(path):  # run folder or file -> dict of tensors, numbers and strings
    """Never runs code from the file. Exits with code 2 when it is missing, damaged, foreign or of a newer version."""
    path = os.path.join(path, "ckpt.pt") if os.path.isdir(path) else path
    if not os.path.isfile(path):
        fail(f"{path}: no checkpoint there. Try the folder of a run, such as out/clm")
    try:
        # weights_only: a checkpoint is data, a pickle is a program
        ckpt = torch.load(path, map_location="cpu", weights_only=True)
        version = int(ckpt["version"])
        ckpt["config"] = defaults() | ckpt["config"]            # a fork's new objective may have brought new flags
        missing = CHECKPOINT - set(ckpt)
        assert version > VERSION or not missing, missing
    except Exception as e:                      # what a damaged file raises depends on where it is damaged
        fail(f"{path}: damaged, or not a checkpoint of this program ({type(e).__name__}). "
             "Try best.pt beside it, or another run")
    if version > VERSION:
        fail(f"{path}: has layout {version}, this program reads up to {VERSION}. Try a newer version of the program")
    return ckpt


def build(hp):  # -> model, heads (an nn.ModuleDict)
    """Weights are drawn on the CPU from the seed, the trunk first: the same on every device and for every objective."""
    sizes, heads = Sizes(hp.n_layer, hp.n_head, hp.n_embd), torch.nn.ModuleDict()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(hp.seed)
        # the trunk before the heads: equal seeds give equal trunks under every objective
        model = Transformer(sizes, getattr(torch, hp.dtype))
        for m in members(hp):
            heads.update(m["heads"](sizes, hp))
    return model.to(hp.device), heads.to(hp.device)


def restore(model, heads, ckpt, path, fresh=False):
    """fresh: heads that the checkpoint does not have stay as they are; else it must have them all."""
    try:
        model.load_state_dict(ckpt["model"])
        for name, head in heads.items():
            if name in ckpt["heads"] or not fresh:
                head.load_state_dict(ckpt["heads"][name])
    except (RuntimeError, KeyError, AttributeError) as e:
        fail(f"{path}: its weights do not fit its settings ({type(e).__name__}). Try another checkpoint")


def open_metrics(out_dir, keep):  # -> binary file, cut back to its first `keep` bytes
    """Locked, so that a folder holds one run at a time. Exits with code 2 where it cannot be written."""
    path = os.path.join(out_dir, "metrics.jsonl")
    try:
        os.makedirs(out_dir, exist_ok=True)
        f = open(path, "r+b" if os.path.exists(path) else "w+b")
    except OSError as e:
        fail(f"--out_dir {out_dir}: cannot be written to ({e.strerror}). Try another folder")
    try:
        import fcntl  # here: Windows has none, and there two runs in one folder are not kept apart
        fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)           # ends with the process, however that ends
    except ImportError:
        pass
    except OSError:
        fail(f"--out_dir {out_dir}: another process is training there. Try another --out_dir")
    # lines behind the checkpoint are of steps that are taken again
    f.truncate(min(keep, os.path.getsize(path)))
    f.seek(0, os.SEEK_END)
    return f


def write_line(f, record):
    """One JSON object, flushed. Exits with code 2 when the disk refuses."""
    try:
        f.write(json.dumps(record).encode() + b"\n")
        f.flush()
    except OSError as e:
        fail(f"{f.name}: could not be written ({e.strerror}). The checkpoint before it is whole. "
             "Try freeing disk space, then --resume")


# ---- batches

def draw_windows(run, corpus, split, rows, key):  # -> (source, offsets) of each member's windows, on the CPU
    g = generator(f"{key},windows")
    return [draw(corpus, split, m["n"], rows(m), g) for m in run]


def make_batches(run, corpus, split, where, gens, hp):  # -> one batch per member
    """The windows at where, each member's corrupted with numbers from its own generator."""
    batches = []
    # each member corrupts with its own generator: its rows do not depend on the others
    for m, (source, offset), g in zip(run, where, gens):
        x = gather(corpus, split, source, offset, m["n"], m.get("whole", False)).to(hp.device)
        batches.append(m["make"](x, g, hp))
        if hp.doc_mask:
            # of what the model sees: a masked EOT ends nothing
            batches[-1]["doc"] = document_ids(batches[-1]["inp"])
    return batches


def draw_batches(run, corpus, split, rows, key, hp):  # -> one batch per member, rows(member) rows each
    """A pure function of key: windows from a generator on the CPU, corruption from one on the device."""
    on = corpus[0][split].device                # windows are gathered where the corpus is
    where = [(source.to(on), offset.to(on)) for source, offset in draw_windows(run, corpus, split, rows, key)]
    return make_batches(run, corpus, split, where, [generator(f"{key},{m['name']}", hp.device) for m in run], hp)


def rows_of(batch, a, b):
    return {k: v if isinstance(v, str) else v[a:b] for k, v in batch.items()}


GLYPHS = {10: "⏎", 9: "⇥", 0: "∅", IGNORE: "·", PAD: "░", MASK: "█", CLS: "Ⓒ", SEP: "‖", PRE: "Ⓟ", SUF: "Ⓢ",
          MID: "Ⓜ", MODE_R: "ⓡ", MODE_S: "ⓢ", MODE_X: "ⓧ"}


def glyphs(ids):  # -> one character for each position
    def glyph(i):
        if i >= SENTINEL:
            return chr(0x2460 + (i - SENTINEL) % 20)            # circled numbers
        return GLYPHS.get(i) or (chr(i) if 32 <= i < 127 else "�")
    return "".join(map(glyph, ids))


def show_example(run, batches, width=128, most=256):
    """Prints the first row of each member's batch, one character a position, inputs above targets."""
    print("the first row, one character a position (█ MASK, ∅ EOT, ‖ SEP, ① a sentinel, ░ PAD; · no loss):")
    for m, batch in zip(run, batches):
        shown = {name: batch[name][0].reshape(-1)[:most].tolist() for name in ("inp", "tgt") if name in batch}
        for i in range(0, len(shown["inp"]), width):
            for name, row in shown.items():
                print(f"  {m['name']} {name}   {glyphs(row[i:i + width])}")
        if "labels" in batch:
            print(f"  {m['name']} label {int(batch['labels'][0])}")
        mask = batch["mask"] if isinstance(batch["mask"], str) else int(batch["mask"][0])
        mask = {0: "causal", batch["inp"].size(-1): "bidirectional"}.get(mask, mask)
        rule = "the first {} positions see each other, the rest what is before them"
        print(f"  {m['name']} mask  {mask if isinstance(mask, str) else rule.format(mask)}")


def compile_losses(run, s, batches, hp):  # -> the members' losses, plain where torch.compile cannot
    """Compiles both passes on a first batch, so that what fails fails here."""
    torch._dynamo.reset()                       # or the limit of its cache is that of all runs of a process
    losses = [torch.compile(loss, fullgraph=True, dynamic=False) for loss in s["losses"]]
    try:
        # forward and backward once on real shapes: what cannot compile fails here, not later
        for m, batch, loss in zip(run, batches, losses):
            terms = loss(s["model"], s["heads"], rows_of(batch, 0, m["rows"]), hp)
            sum(total for total, _, _ in terms.values()).backward()
    except Exception as e:                      # no compiler, an old one, an operating system without support
        why = f"{type(e).__name__}: {str(e).strip().splitlines()[0]}"
        print(f"--compile: does not work here ({why}), going on without it")
        losses = s["losses"]
    for p in s["params"]:
        p.grad = None
    return losses


# ---- optimizer

def make_optimizer(model, heads, hp):  # -> dict(adamw=AdamW, muon={shape: (params, momentum)}, lr=0-D tensor)
    """Muon for the matrices inside blocks, AdamW for embeddings, heads and vectors."""
    named = [*model.named_parameters(), *heads.named_parameters()]
    # Muon is for maps from states to states; embeddings and heads are tables of vectors
    hidden = [p for name, p in named if p.dim() == 3 and "blocks." in name]
    rest = [p for name, p in named if not any(p is q for q in hidden)]
    groups = [dict(params=rest, weight_decay=0.0)]
    if hp.optimizer == "adamw":
        groups, hidden = groups + [dict(params=hidden, weight_decay=hp.weight_decay)], []
    muon = {}
    # one Newton-Schulz call per shape: few large products in place of many small ones
    for p in hidden:                            # (n, rows, columns), as many matrices of one shape as there are
        muon.setdefault(tuple(sorted(p.shape[1:])), []).append(p)
    for shape, params in muon.items():
        muon[shape] = params, torch.zeros(sum(len(p) for p in params), *shape, device=params[0].device)
    lr = torch.zeros((), device=hp.device)      # a tensor, so that a captured step reads each step's rate
    adamw = torch.optim.AdamW(groups, lr=lr, betas=BETAS, eps=EPS, fused=True, capturable=lr.device.type == "cuda")
    return dict(adamw=adamw, muon=muon, lr=lr)


def optimizer_step(opt, bad, hp):
    """Nothing moves where bad (a 0-D bool tensor) holds; the host need not know."""
    if bad.device.type == "mps" and bad:        # where some versions of torch ignore found_inf
        return
    adamw = opt["adamw"]
    adamw.grad_scale, adamw.found_inf = None, bad.float()       # the fused kernel's own switch for skipping a step
    adamw.step()
    for params, momentum in opt["muon"].values():
        muon_step(params, momentum, opt["lr"], bad, hp)


@torch.no_grad()
def muon_step(params, momentum, lr, bad, hp):  # momentum (N, r, c), r <= c: all matrices of one shape at once
    """Muon (Jordan et al. 2024): Nesterov momentum, made orthogonal. Scaled to the root mean square of AdamW's
    updates (Liu et al. 2025), so that one learning rate serves both."""
    # the shorter side first: the iteration multiplies r x r matrices, r <= c
    wide = lambda t: t if t.size(1) <= t.size(2) else t.mT                          # (n, r, c)
    grad = torch.cat([wide(p.grad) for p in params])                                # (N, r, c)
    # pass 1: momentum; where(bad) keeps the old value without asking the device
    momentum.copy_(torch.where(bad, momentum, momentum.lerp(grad, 1 - MOMENTUM)))
    # pass 2: Nesterov's look ahead, made orthogonal; nothing where bad
    update = orthogonal(grad.lerp(momentum, MOMENTUM), getattr(torch, hp.dtype)).float()
    update = torch.where(bad, 0.0, update * (lr * 0.2 * momentum.size(2) ** 0.5))
    keep = torch.where(bad, 1.0, 1.0 - lr * hp.weight_decay)
    # pass 3: decay, then move
    for p, u in zip(params, update.split([len(p) for p in params])):
        p.mul_(keep).sub_(u if p.size(1) <= p.size(2) else u.mT)


def orthogonal(x, dtype):  # (N, r, c) -> about the nearest matrices with orthonormal rows
    """Newton-Schulz iteration with the coefficients of Jordan et al. 2024; singular values end near 1."""
    x = x.to(dtype)
    # divided by its Frobenius norm no singular value is above 1, which the iteration needs
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(NS_STEPS):
        a = x @ x.mT                                                                # A (N, r, r)
        b = torch.baddbmm(a, a, a, beta=-4.7750, alpha=2.0315)                      # B = -4.775 A + 2.0315 A^2
        x = torch.baddbmm(x, b, x, beta=3.4445)                                     # 3.4445 X + B X
    return x


def learning_rate(step, hp):
    """Linear warm-up, constant, linear to 0: the smallest of the three is in force."""
    warm = (step + 1) / (hp.warmup_iters + 1)
    fall = (hp.max_iters - step) / max(1, hp.lr_decay * hp.max_iters)
    return hp.learning_rate * min(warm, 1.0, fall)


# ---- a step

def prepare(run, corpus, hp, rows):  # -> all that a training step reads and writes, in tensors that stay where they are
    """rows: of the global batch, by member. The host puts windows, seeds, rate and number of a step into where, gens,
    opt["lr"] and step; the rest is the device's alone, so that a CUDA graph can replay the step."""
    device, (model, heads) = torch.device(hp.device), build(hp)
    on = corpus[0]["train"].device
    # only the shapes of this draw are used: set_step copies every step's windows into them
    where = [(source.to(on), offset.to(on)) for source, offset in draw_windows(run, corpus, "train", rows, "0")]
    opt = make_optimizer(model, heads, hp)
    return dict(
        model=model, heads=heads, params=[*model.parameters(), *heads.parameters()], opt=opt,
        losses=[m["loss"] for m in run], weights=torch.tensor([m["weight"] for m in run], device=device),
        where=where, gens=[torch.Generator(device) for _ in run],
        step=torch.zeros((), dtype=torch.long, device=device),
        first_bad=torch.full((), -1, device=device))            # the first step whose loss or gradient was not finite


def set_step(s, run, corpus, rows, step, hp):  # what the host has to say before a step
    """Windows, seeds, rate and number are copied into the tensors that the step reads; nothing waits for the device."""
    for held, new in zip(s["where"], draw_windows(run, corpus, "train", rows, f"{hp.seed},{step}")):
        # copied, not replaced: a captured graph reads addresses, and these stay
        for a, b in zip(held, new):
            a.copy_(b.pin_memory() if a.is_cuda else b, non_blocking=True)
    for g, m in zip(s["gens"], run):
        reseed(g, f"{hp.seed},{step},{m['name']}")
    s["opt"]["lr"].fill_(learning_rate(step, hp))
    s["step"].fill_(step)


def training_step(s, run, corpus, hp):  # -> batches, loss of each member (len(run),), total loss, norm of the gradient
    """One update: the same for one process or many, called eagerly or replayed. Waits for nothing on the device.

    loss: nats, each member's sum over terms of coefficient * sum / count over the batch of all processes."""
    batches = make_batches(run, corpus, "train", s["where"], s["gens"], hp)

    # forward and backward: sums of nats, divided by the counts of the whole batch
    counts = [m["counts"](batch, hp) for m, batch in zip(run, batches)]
    each = torch.zeros_like(s["weights"])
    for i in range(RANK, hp.accum, WORLD):      # this process's micro-batches
        part = []
        for m, batch, count, loss in zip(run, batches, counts, s["losses"]):
            terms = loss(s["model"], s["heads"], rows_of(batch, i * m["rows"], (i + 1) * m["rows"]), hp)
            part.append(sum(coefficient * total / count[term] for term, (total, _, coefficient) in terms.items()))
        (torch.stack(part) * s["weights"]).sum().backward()
        each += torch.stack(part).detach()
    if WORLD > 1:
        add_up([p.grad for p in s["params"] if p.grad is not None] + [each])

    # clip, look for what is not finite, move
    loss = (each * s["weights"]).sum()
    norm = torch.nn.utils.clip_grad_norm_(s["params"], hp.grad_clip or math.inf)
    finite = torch.isfinite(loss) & torch.isfinite(norm)
    s["first_bad"].copy_(torch.where((s["first_bad"] < 0) & ~finite, s["step"], s["first_bad"]))
    optimizer_step(s["opt"], s["first_bad"] >= 0, hp)
    for p in s["params"]:
        p.grad = None
    return batches, each, loss, norm


def capture(take, gens):  # -> a function that does what take() did, as one CUDA graph, and returns the same tensors
    """CUDA alone. The state must have been through WARM steps, so that nothing is allocated any more."""
    graph = torch.cuda.CUDAGraph()
    for g in gens:
        graph.register_generator_state(g)       # a new seed reaches the next replay
    with torch.cuda.graph(graph):
        out = take()
    def replay():
        graph.replay()
        return out
    return replay


def aside(take, stream):  # on a stream of its own, as steps before a capture must be
    now = torch.cuda.current_stream()
    stream.wait_stream(now)
    with torch.cuda.stream(stream):
        out = take()
    now.wait_stream(stream)
    return out


# ---- evaluation

def validation_list(run, corpus, hp):  # -> [(source, member, batches, causal batches or None)]
    """Each source's own fixed windows under fixed corruption: a function of objective and block size alone. The causal
    batches are for bits per byte, where the objective's own are not clm's."""
    def fixed(m, source):
        rows = lambda m: EVAL_ROWS
        return [draw_batches([m], [source], "val", rows, f"validation,{i}", hp)[0] for i in range(hp.eval_iters)]
    # bits/byte of every causal coder on the same plain windows, whatever its own rows are
    clm = dict(OBJECTIVES["clm"], name="clm", n=hp.block_size + 1)
    causal = lambda m, source: fixed(clm, source) if m.get("bpb") == "exact" and m["name"] != "clm" else None
    return [(source, m, fixed(m, source), causal(m, source)) for source in corpus for m in run]


@torch.no_grad()
def evaluate(model, heads, validation, hp):  # -> one record for each source and member
    """loss: nats, the total of the objective. bpb: bits per byte, left to right, each window from a cold start; for
    mdlm a bound from above; None where the objective does not define it. tokens_per_target: row positions for the
    training signal of one position of clm. terms: the loss's terms and the objective's own figures."""
    records = []
    for source, m, batches, causal in validation:
        terms = [m["loss"](model, heads, b, hp) for b in batches]
        figures = means(terms)
        loss = sum(coefficient * figures[term] for term, (_, _, coefficient) in terms[0].items())
        nats = means([token_loss(model, heads, b, hp) for b in causal])["nll"] if causal else figures.get("nll", loss)
        if "stats" in m:
            figures |= means([m["stats"](model, heads, b, hp) for b in batches])
        share = sum(targets(m, b, hp) for b in batches) / (len(batches) * EVAL_ROWS * hp.block_size)
        records.append({"split": "val", "data": source["name"], "objective": m["name"], "loss": loss,
                        "bpb": nats / math.log(2) if "bpb" in m else None, "targets": share,
                        "tokens_per_target": 1 / share, "terms": figures})
    return records


def means(parts):  # [{name: (sum, count, ...)}] -> {name: sum of sums / sum of counts}
    total = lambda name, i: sum(float(part[name][i]) for part in parts)
    return {name: total(name, 0) / max(1.0, total(name, 1)) for name in parts[0]}


def compressors(data):  # (N,) uint8 -> what the standard library's compressors make of it, as one stream, in words
    text = to_bytes(data[:COMPRESSED].cpu())
    sizes = {"zlib": len(zlib.compress(text, 9)), "bz2": len(bz2.compress(text)), "lzma": len(lzma.compress(text))}
    part = f"all {len(text):,}" if len(text) == len(data) else f"the first {len(text):,} of {len(data):,}"
    bits = ", ".join(f"{name} {8 * size / len(text):.3f}" for name, size in sizes.items())
    return f"{bits} bits/byte on {part} bytes as one stream"


def plot(path):  # metrics.jsonl -> loss.png beside it, where matplotlib is installed
    """Curves of every split, objective and source, nats over steps. One hint line where matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        print("hint: pip install matplotlib, and the next run draws its losses into loss.png")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot
    with open(path, "rb") as f:
        records = [json.loads(line) for line in f][1:]
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for split, style in (("train", dict(lw=0.6, alpha=0.6)), ("val", dict(marker="o", ms=3))):
        curves = {}
        for r in [r for r in records if r["split"] == split]:
            curves.setdefault(f"{split} {r['objective']}, {r['data']}", []).append((r["step"], r["loss"]))
        for label, points in sorted(curves.items()):
            axes.plot(*zip(*points), label=label, **style)
    axes.set(xlabel="step", ylabel="loss (nats per target)")
    axes.legend()
    figure.savefig(os.path.join(os.path.dirname(path), "loss.png"), dpi=120, bbox_inches="tight")
    pyplot.close(figure)


# ---- several processes, as torchrun starts them: each takes every WORLD-th micro-batch

def join_processes(hp):
    """Exits with code 2 where the micro-batches cannot be shared, or a flag is for one process alone."""
    if WORLD == 1:
        return
    if hp.accum % WORLD:
        fail(f"--accum {hp.accum}: {WORLD} processes share the micro-batches of a step. "
             f"Try --accum {WORLD * math.ceil(hp.accum / WORLD)}")
    if hp.cuda_graph or any(d.split(":")[0] == "-" for d in hp.data):
        fail(f"{'--cuda_graph' if hp.cuda_graph else '--data -'}: is for one process. Try without torchrun")
    if hp.device.startswith("cuda"):
        torch.cuda.set_device(hp.device)
    if not torch.distributed.is_initialized():  # gloo for what the hosts tell each other, without waiting for a device
        torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if hp.device.startswith("cuda") else "gloo")


def add_up(tensors):  # each becomes its sum over all processes, in one exchange
    flat = torch.cat([t.flatten() for t in tensors])
    torch.distributed.all_reduce(flat)
    for t, total in zip(tensors, flat.split([t.numel() for t in tensors])):
        t.copy_(total.view_as(t))


def agree_on(path):  # -> what the first process says
    """A name that depends on what is on the disk must not be chosen by each process for itself."""
    if WORLD == 1:
        return path
    # as bytes, since torch sends objects with numpy alone
    said, own = torch.zeros(4096, dtype=torch.uint8), os.fsencode(path)
    said[:len(own)] = torch.tensor(list(own), dtype=torch.uint8)
    torch.distributed.broadcast(said, src=0)
    return os.fsdecode(bytes(said.tolist()).rstrip(b"\0"))


def any_says(yes):  # -> does any process say so?
    said = torch.tensor(int(yes))
    if WORLD > 1:
        torch.distributed.all_reduce(said, torch.distributed.ReduceOp.MAX)
    return bool(said)


# ---- the run

def main(argv=None):  # -> exit code
    """Puts signal handlers and the precision of products back, for notebooks and tests."""
    hp = get_config(sys.argv[1:] if argv is None else argv)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")                # a console that lacks a character prints "?"
    handlers, precision = {}, torch.get_float32_matmul_precision()
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere if RANK else sys.stdout):
        try:
            join_processes(hp)
            return train(hp, handlers)
        except RuntimeError as e:               # the CPU's lack of memory has no class of its own
            if not isinstance(e, torch.OutOfMemoryError) and "memory" not in str(e):
                raise
            fail(f"a model of {hp.n_layer} layers and width {hp.n_embd}, or a batch of {hp.batch_size} rows of "
                 f"{hp.block_size}, does not fit here ({str(e).splitlines()[0][:80]}). "
                 f"Try --batch_size {max(1, hp.batch_size // 2)} --accum {2 * hp.accum}, or a smaller model")
        finally:                                # a notebook gets its process back as it was
            release(handlers)
            torch.set_float32_matmul_precision(precision)


def train(hp, handlers):  # -> exit code
    """Folder, corpus, model; then steps, each a pure function of (seed, step); then a sample.

    0 when done, 1 after a loss that is not finite, 128 + signal when stopped; fail() ends with 2."""
    device, run = torch.device(hp.device), members(hp)
    rows = lambda m: m["rows"] * hp.accum       # of a member, in the batch of a step
    precision = set_precision(device)

    # the folder, the corpus
    hp.out_dir = agree_on(hp.out_dir if hp.resume else choose_out_dir(hp))
    corpus = open_corpus(hp.data, hp.out_dir, hp.resume)
    for m in run:
        check_sizes(corpus, m["n"], hp.block_size, lambda T: m["window"](T, hp))
    sources = [[s["name"], s["size"], s["crc"], s["weight"]] for s in corpus]
    move_corpus(corpus, hp)

    # the model, its optimizer, what a checkpoint says of them
    s = prepare(run, corpus, hp, rows)
    start, seconds, best, kept = 0, 0.0, math.inf, 0
    if hp.init_from and not hp.resume:
        restore(s["model"], s["heads"], load_checkpoint(hp.init_from), hp.init_from, fresh=True)
    if hp.resume:
        start, seconds, best, kept = resume(load_checkpoint(hp.out_dir), s, sources, hp)
    validation = validation_list(run, corpus, hp)

    # what is about to happen
    metrics = open_metrics(hp.out_dir, kept) if RANK == 0 else open(os.devnull, "wb")
    announce(s, sources, precision, metrics, hp)
    if start == 0 or hp.compile:
        batches = draw_batches(run, corpus, "train", rows, f"{hp.seed},{start}", hp)
        show_example(run, batches)
        s["losses"] = compile_losses(run, s, batches, hp) if hp.compile else s["losses"]

    stop = []                                   # signals so far: the step in progress is finished, then all is saved
    handlers.update(catch_signals(stop))
    def save(name, step):
        if RANK == 0:
            os.fsync(metrics.fileno())          # a checkpoint counts its bytes
            save_checkpoint(os.path.join(hp.out_dir, name), dict(
                version=VERSION, config=vars(hp), step=step, seconds=seconds, best=best, sources=sources,
                metrics_bytes=metrics.tell(), held_out=corpus[0]["val"][:HELD_OUT].cpu().clone(),
                model=s["model"].state_dict(), heads={name: head.state_dict() for name, head in s["heads"].items()},
                adamw=s["opt"]["adamw"].state_dict(), muon=[momentum for _, momentum in s["opt"]["muon"].values()]))
    bar = tqdm(total=hp.max_iters, initial=start, disable=True if RANK else None, unit="step", dynamic_ncols=True)
    clock, clock_step, printed, bpb = time.perf_counter(), start, 0.0, None
    step_once = take = lambda: training_step(s, run, corpus, hp)
    stream = torch.cuda.Stream() if hp.cuda_graph else None

    # the loop runs once more than there are steps: the last pass only evaluates and saves
    for step in range(start, hp.max_iters + 1):
        due = step % hp.eval_interval == 0 or step == hp.max_iters
        halt = any_says(bool(stop))
        if (due or halt) and (step > start or not hp.resume):
            if int(s["first_bad"]) >= 0:
                break
            seconds += time.perf_counter() - clock              # the clock stands while the model is evaluated
            if due:
                records = evaluate(s["model"], s["heads"], validation, hp)
                for r in records:
                    write_line(metrics, {"step": step, **r, "seconds": round(seconds, 3)})
                    bpb = r["bpb"] if r["bpb"] is not None else bpb
                    bar.write(describe(step, r))
                weights = [source["weight"] * m["weight"] for source, m, *_ in validation]
                mean = sum(r["loss"] * weight for r, weight in zip(records, weights))
                if mean < best:                 # first best.pt: if the run is killed in between, it writes it once more
                    best = mean
                    save("best.pt", step)
            save("ckpt.pt", step)
            clock, clock_step = time.perf_counter(), step
        if step == hp.max_iters or halt:
            break

        # one step, on CUDA perhaps the replay of a captured one
        set_step(s, run, corpus, rows, step, hp)
        # the first steps allocate optimizer state and kernels; only a settled step is captured
        if hp.cuda_graph and step - start < WARM:
            take = lambda: aside(step_once, stream)
        elif hp.cuda_graph and step - start == WARM:
            take = capture(step_once, s["gens"])
        batches, each, loss, norm = take()

        # everything that follows is diagnostics, and alone reads from the device
        bar.update()
        if step % hp.log_interval == 0:
            value = float(loss)
            if int(s["first_bad"]) >= 0:
                break
            now, positions = time.perf_counter(), hp.batch_size * hp.accum * hp.block_size
            speed = (step + 1 - clock_step) * positions / (now - clock)
            record = {"step": step, "split": "train", "data": " ".join(hp.data), "lr": learning_rate(step, hp),
                      "grad_norm": float(norm), "tok_per_s": round(speed), "seconds": round(seconds + now - clock, 3)}
            for figures in logged_losses(run, batches, each.tolist(), value, rows, hp):
                write_line(metrics, record | figures)
            so_far = f", {bpb:.3f} bits/byte on validation" if bpb else ""
            line = f"loss {value:.3f}{so_far}, {speed / 1e3:.1f}k positions/s"
            bar.set_postfix_str(line)
            if bar.disable and now - printed > 5:               # no terminal: a plain line now and then
                printed = now
                print(f"step {step:6d} | {line}, {(hp.max_iters - step) * positions / speed:.0f} s left", flush=True)

    # how it ended
    bar.close()
    metrics.close()
    if int(s["first_bad"]) >= 0:
        print(f"error: loss or gradient not finite at step {int(s['first_bad'])}; nothing after it was kept, "
              f"{hp.out_dir} holds the last good state. Try --init_from {hp.out_dir} with a lower --learning_rate "
              "or --dtype float32", file=sys.stderr)
        return 1
    if halt and step < hp.max_iters:
        print(f"stopped at step {step}, saved. Go on with: python train.py --resume --out_dir {hp.out_dir}")
        return 128 + (stop or [signal.SIGTERM])[0]
    release(handlers)                           # what is left can be interrupted anywhere
    return finish(corpus, hp) if RANK == 0 else 0


def move_corpus(corpus, hp):  # to the GPU, as bytes, if it fits there: no loader
    if not hp.device.startswith("cuda"):
        return
    size = sum(s["size"] for s in corpus)
    if size < torch.cuda.mem_get_info(torch.device(hp.device))[0] / 4:
        for s in corpus:
            s["train"], s["val"] = s["train"].to(hp.device), s["val"].to(hp.device)
    elif hp.cuda_graph:
        fail(f"--cuda_graph: the corpus of {size:,} bytes does not fit on the GPU beside the model. Try without it")


def announce(s, sources, precision, metrics, hp):  # the first line of metrics.jsonl, the first two on the terminal
    size, threads = sum(p.numel() for p in s["params"]), torch.get_num_threads()
    if metrics.tell() == 0:
        write_line(metrics, {"config": vars(hp), "version": VERSION, "torch": torch.__version__,
                             "python": platform.python_version(), "processes": WORLD, "threads": threads,
                             "parameters": size, "sources": sources})
    names = ", ".join(f"{name} {n:,} bytes" for name, n, _, _ in sources)
    processes = f", {WORLD} processes" if WORLD > 1 else ""
    print(f"{hp.objective} | {size:,} parameters | {names} | {hp.out_dir}")
    print(f"{hp.device}, {threads} threads{processes} | activations {hp.dtype}, {precision}")


def logged_losses(run, batches, each, total, rows, hp):  # -> [{objective, loss, bpb, targets}]
    """A mixture's own line first, then its members'."""
    shares = [targets(m, b, hp) / (rows(m) * hp.block_size) for m, b in zip(run, batches)]
    lines = [(m["name"], x, share) for m, x, share in zip(run, each, shares)]
    if len(run) > 1:
        share = sum(share * rows(m) for share, m in zip(shares, run)) / sum(map(rows, run))
        lines.insert(0, (hp.objective, total, share))
    # a training batch says bits per byte where the loss is nats a byte: of clm, and of bounds
    nats = {m["name"] for m in run if m["name"] == "clm" or m.get("bpb") == "bound"}
    return [{"objective": name, "loss": x, "bpb": x / math.log(2) if name in nats else None, "targets": share}
            for name, x, share in lines]


def finish(corpus, hp):  # -> exit code; the compressors beside it, the picture, a sample
    """What goes wrong here cannot harm the run, which is saved."""
    for s in corpus:
        print(f"compressors on the validation split of {s['name']}: {compressors(s['val'])}")
    plot(os.path.join(hp.out_dir, "metrics.jsonl"))
    print(f"done: {hp.out_dir}/ckpt.pt. What it can do: python sample.py --help\n")
    import sample  # here and not on top, since sample.py reads runs and so imports this file
    try:
        sample.main(["--out_dir", hp.out_dir, "--device", hp.device])
    except SystemExit:                          # it said why; the run is done all the same
        pass
    return 0


def resume(ckpt, s, sources, hp):  # -> step, seconds, best validation loss, bytes of metrics.jsonl
    """Exits with code 2 where the corpus, the plan or the optimizer is not the checkpoint's."""
    if [x[1:] for x in ckpt["sources"]] != [x[1:] for x in sources]:
        fail(f"--data {' '.join(hp.data)}: is not the corpus, or not the weights, of the run in {hp.out_dir}. "
             f"Try the same, or --init_from {hp.out_dir}")
    if hp.max_iters < ckpt["step"]:
        fail(f"--max_iters {hp.max_iters}: the run in {hp.out_dir} is at step {ckpt['step']} already. "
             "Try a larger number")
    if hp.max_iters != ckpt["config"]["max_iters"]:
        print(f"resume: {ckpt['config']['max_iters']} steps were planned, now {hp.max_iters}: "
              "the learning rate follows the new plan")
    restore(s["model"], s["heads"], ckpt, hp.out_dir)
    adamw, muon = s["opt"]["adamw"], s["opt"]["muon"]
    # of this device, not of the checkpoint's
    here = [{k: group[k] for k in ("lr", "capturable")} for group in adamw.param_groups]
    try:
        adamw.load_state_dict(ckpt["adamw"])
        for (_, momentum), saved in zip(muon.values(), ckpt["muon"], strict=True):
            momentum.copy_(saved)
    except (RuntimeError, KeyError, ValueError, TypeError, AttributeError) as e:
        fail(f"{hp.out_dir}: its optimizer's state does not fit its settings ({type(e).__name__}). "
             f"Try --init_from {hp.out_dir}")
    for group, own in zip(adamw.param_groups, here):
        group.update(own)
    return ckpt["step"], ckpt["seconds"], ckpt["best"], ckpt["metrics_bytes"]


def catch_signals(stop):  # -> {signal: the handler that was there before}
    def handler(number, frame):
        stop.append(number)
        signal.signal(number, signal.SIG_DFL)                   # the second one ends at once
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}


def release(handlers):
    for number, handler in handlers.items():
        signal.signal(number, handler)


def describe(step, r):  # -> a line for a record of evaluate
    """nats per target, perplexity where a term is nats of the byte head, bits per byte where they are defined."""
    bound = "<= " if OBJECTIVES[r["objective"]].get("bpb") == "bound" else ""
    bpb = "" if r["bpb"] is None else f", {bound}{r['bpb']:.4f} bits/byte"
    terms = "" if len(r["terms"]) == 1 else " (" + ", ".join(f"{k} {v:.4f}" for k, v in r["terms"].items()) + ")"
    perplexity = f", perplexity {math.exp(r['terms']['nll']):.2f}" if "nll" in r["terms"] else ""
    figures = f"loss {r['loss']:.4f} nats{terms}{perplexity}{bpb}"
    return f"step {step:6d} | validation on {r['data']}: {r['objective']} {figures}"


if __name__ == "__main__":
    code = main()
    if WORLD > 1:
        torch.distributed.destroy_process_group()
    sys.exit(code)
