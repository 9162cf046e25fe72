"""A run: its settings, its device, its folder, its checkpoint. What training and sampling both need.

A run is a folder that holds ckpt.pt (the newest state), best.pt (that of the least validation loss),
metrics.jsonl and, where matplotlib is installed, loss.png.
"""
import argparse
import contextlib
import ctypes
import difflib
import gc
import glob
import json
import math
import os
import sys
import warnings
import zipfile

import torch

from data import fail, generator
from model import Linear, Sizes, Transformer, pack_weights
from objectives import EVAL_ROWS, OBJECTIVES, find_objective

VERSION = 6                                     # of checkpoints: their layout, and that of the rows they know
PARTS = dict(config=dict, step=int, seconds=float, best=float, best_step=int, val=float, sources=list,
             metrics_bytes=int, model=dict, adamw=dict, muon=list, held_out=torch.Tensor)
WORSE = 1.01                                    # a loss that is clearly worse than another, as a multiple of it
WORLD = int(os.environ.get("WORLD_SIZE", 1))    # torchrun's processes
RANK = int(os.environ.get("RANK", 0)) if WORLD > 1 else 0
DEVICE = {"device": ("auto", "auto, cpu, cuda, cuda:1, mps"),
          "dtype": ("auto", "of activations", ("auto", "float32", "bfloat16"))}

# every flag but the objectives' own: (default, help), with lowest and highest, or choices; a default may depend on
# device or optimizer
SETTINGS = {
    "run": {
        "objective": (next(iter(OBJECTIVES)), "a name from the list below, or a mixture such as clm:0.5,mlm:0.5"),
        "data": (["stdlib"], "files, folders, - (standard input) or stdlib, each with an optional :weight"),
        "train_bytes": (0, "train on the first so many bytes of each source, 0 for all", 0, 1 << 50),
        "out_dir": ("", "folder of the run; without it out/OBJECTIVE, then out/OBJECTIVE-2, ..."),
        "resume": (False, "go on with the run in --out_dir, without it with the newest under out/"),
        "init_from": ("", "run (its last state) or checkpoint whose weights to start from, with a new optimizer"),
        "seed": (1, "of weights, windows and corruption", 0, 2 ** 31),
    },
    "model": {
        "n_layer": ({"cpu": 4, "cuda": 12}, "blocks", 1, 1000),
        "n_head": ({"cpu": 4, "cuda": 6}, "attention heads", 1, 1000),
        "n_embd": ({"cpu": 128, "cuda": 768}, "width", 2, 1 << 20),
        "block_size": ({"cpu": 256, "cuda": 1024}, "positions of a row", 32, 1 << 24),
        "ngram_rows": (65536, "rows of the table of hashed n-grams for each of their lengths, 0 for none", 0, 1 << 26),
        "attn_scale": (1.0, "attention's logits are so many times q k / sqrt(D)", 0.01, 100.0),
    },
    "training": {
        "batch_size": ({"cpu": 16, "cuda": 64}, "rows of a micro-batch", 1, 1 << 24),
        "accum": (1, "micro-batches of a step, which reads batch_size * accum rows", 1, 1 << 24),
        "max_iters": ({"cpu": 1200, "cuda": 5000}, "steps at most", 0, 1 << 40),
        "max_passes": (4.0, "passes over a text after which a run ends, but not before step 200; 0, the default with "
                            "--max_iters: any number", 0.0, 1e9),
        "learning_rate": ({"muon": 0.01, "adamw": 0.003}, "peak rate", 0.0, 100.0),
        "warmup_iters": (20, "steps of linear warm-up", 0, 1 << 40),
        "lr_decay": (0.6, "last share of the run, over which the rate falls linearly to 0", 0.0, 1.0),
        "weight_decay": (0.0, "of hidden matrices, times the rate, per step", 0.0, 100.0),
        "grad_clip": (1.0, "largest norm of the gradient, but of the n-gram table's; 0 for any", 0.0, 1e30),
        "ngram_drop": (0.5, "share of n-gram lookups left out after two passes; of more passes more", 0.0, 0.99),
        "doc_mask": (False, "keep attention inside a document, where rows keep the text's order"),
        "optimizer": ("muon", "muon (AdamW for embeddings, heads, vectors) or adamw (for all but n-grams)",
                      ("muon", "adamw")),
    },
    "evaluation": {
        "eval_interval": ({"cpu": 600, "cuda": 500}, "steps between evaluations; each one saves", 1, 1 << 40),
        "eval_iters": (8, f"validation batches of {EVAL_ROWS} rows for each source", 1, 1 << 24),
        "log_interval": (10, "steps between lines of metrics.jsonl", 1, 1 << 40),
    },
    "system": DEVICE | {
        "compile": (False, "torch.compile the loss"),
        "cuda_graph": (False, "replay the whole step, corruption and optimizer included, as one CUDA graph"),
    },
}
# what may differ between a run and its continuation
FREE = {"data", "out_dir", "resume", "max_iters", "eval_interval", "log_interval", "device", "compile", "cuda_graph"}


# ---- flags, of every program

class Parser(argparse.ArgumentParser):
    def error(self, message):
        fail(f"{message}. Try: python {self.prog} --help")

    def parse_args(self, argv):
        given, unknown = self.parse_known_args(argv)
        if not unknown:
            return given
        word = unknown[0].split("=")[0]
        if not word.startswith("-"):
            fail(f"stray word {word!r}. Try quotes around what belongs together, or no space in it")
        near = difflib.get_close_matches(word, self._option_string_actions, 1)
        fail(f"unknown argument {word}. Try {near[0] if near else f'python {self.prog} --help'}")


def make_parser(prog, doc, groups, epilog=""):  # groups {title: {flag: spec}} -> Parser that returns what was given
    # no defaults here: what was not given must be known, since a checkpoint's settings come in between
    parser = Parser(prog=prog, usage=f"python {prog} [flags below]", description=doc, epilog=epilog,
                    formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
                    argument_default=argparse.SUPPRESS)
    for title, flags in groups.items():
        group = parser.add_argument_group(title)
        for flag, (default, text, *_) in flags.items():
            first = [*default.values()][0] if isinstance(default, dict) else default
            words = default if isinstance(default, list) else [str(default)]
            if isinstance(default, dict):       # depends on the device or the optimizer
                words = [f"{k} {v}" for k, v in default.items()]
            if default != "" and not isinstance(default, bool):
                text += f" [{', '.join(words)}]"
            if first is False:
                how = dict(action="store_true")
            elif first is True:
                how = dict(action=argparse.BooleanOptionalAction)
            elif isinstance(first, list):
                how = dict(metavar="X", nargs="+")
            else:
                how = dict(metavar="X", type=type(first))
            group.add_argument(f"--{flag}", help=text.replace("%", "%%"), **how)
    return parser


def parse_beside(prog, doc, flags, own, argv):  # -> the program's flags, as a Namespace; the words that are train.py's
    """For programs that train: flags are theirs, those of train.py are passed on but for own, which they set. Fails
    on a flag that neither has."""
    parser = make_parser(prog, doc, {"flags, beside train.py's": flags})
    given, rest = parser.parse_known_args(argv)
    for word in rest:
        name = word.removeprefix("--").partition("=")[0]
        if word.startswith("--") and name in own:
            fail(f"--{name}: is set by {prog} itself. Try its own flags, python {prog} --help")
        if word.startswith("--") and name not in specs():
            near = difflib.get_close_matches(name, {*flags, *specs()} - own, 1)
            fail(f"unknown argument --{name}. Try {f'--{near[0]}' if near else f'python {prog} --help'}")
    values = {flag: spec[0] for flag, spec in flags.items()} | vars(given)
    check(values, flags)
    return argparse.Namespace(**values), rest


def check(values, specs, where=""):
    """Fails where a value is not of its default's type, out of its range or not among its choices."""
    for flag, (default, _, *bounds) in specs.items():
        value, first = values[flag], [*default.values()][0] if isinstance(default, dict) else default
        kind = (int, float) if isinstance(first, float) else type(first)
        words = all(isinstance(word, str) for word in value) if isinstance(value, list) else True
        if not isinstance(value, kind) or isinstance(value, bool) != isinstance(first, bool) or not words:
            fail(f"{where}--{flag} {value!r}: wants {type(first).__name__}. Try the default")
        if len(bounds) == 2 and not bounds[0] <= value <= bounds[1]:
            fail(f"{where}--{flag} {value}: must lie between {bounds[0]} and {bounds[1]}. Try the default")
        if len(bounds) == 1 and value not in bounds[0]:
            fail(f"{where}--{flag} {value}: unknown. Try {' or '.join(bounds[0])}")


# ---- settings of a run

def specs():  # -> {flag: spec}, the objectives' own included
    groups = [*SETTINGS.values(), *(entry["settings"] for entry in OBJECTIVES.values())]
    return {flag: spec for group in groups for flag, spec in group.items()}


def defaults(kind="cpu", optimizer="muon"):  # -> {flag: default}
    def pick(default):
        if not isinstance(default, dict):
            return default
        return default.get(kind, default.get(optimizer, [*default.values()][0]))
    return {flag: pick(spec[0]) for flag, spec in specs().items()}


def parse(argv):  # -> {flag: value} of train.py's flags that argv gives
    groups, listed = dict(SETTINGS), {flag for flags in SETTINGS.values() for flag in flags}
    for name, entry in OBJECTIVES.items():      # a setting that several share is listed with the first
        groups["of " + name] = {flag: spec for flag, spec in entry["settings"].items() if flag not in listed}
        listed |= set(entry["settings"])
    lines = ["objectives: who sees whom, what is learned; what sample.py does with it; own defaults; what to expect"]
    for name, e in OBJECTIVES.items():
        own = "".join(f" [{flag} {value}]" for flag, value in e["defaults"].items())
        lines.append(f"  {name:12s}{e['mask']:14s} {e['help']}; {e['use']}{own}")
        if e["reaches"]:
            lines.append(f"{'':29s}after {e['reaches'][0]:,} steps of default size: {e['reaches'][1]}")
    epilog = "\n".join(lines)
    about = "Train any objective of objectives.py on any bytes."
    return vars(make_parser("train.py", about, groups, epilog).parse_args(argv))


def get_config(argv):  # -> Namespace of every setting; hp.resume is the path of the checkpoint to go on from, or ""
    """Defaults, then a checkpoint's settings under --resume, then the flags given. Reads, but changes
    nothing.

    Fails on an unknown flag, a value out of range, or one that contradicts the checkpoint."""
    given, saved = {k: v for k, v in parse(argv).items() if k not in DEVICE or v != "auto"}, {}
    resume = given.pop("resume", False) and checkpoint_path(given.get("out_dir") or newest_run())
    if resume:
        saved = load_checkpoint(resume)["config"]
        given["out_dir"] = os.path.dirname(resume) or "."
        refuse_changes(given, saved, set(saved) - FREE, "the run to resume was started with")
    elif given.get("init_from"):
        config = load_checkpoint(given["init_from"])["config"]
        saved = {flag: config[flag] for flag in SETTINGS["model"]}
        weights = set(saved) - {"block_size", "attn_scale"}     # settings that say their shapes
        refuse_changes(given, saved, weights, f"the model in {given['init_from']} has")

    # defaults of the device, of the optimizer, of the objective, then those two; the device is the machine's, not
    # the run's
    device = pick_device(given.get("device", "auto"))
    kind = "cuda" if device.type == "cuda" else "cpu"
    chosen = saved | given
    usual = defaults(kind, chosen.get("optimizer", "muon"))
    name, _, weight = chosen.get("objective", usual["objective"]).strip().partition(":")
    own = dict(OBJECTIVES.get(name, {}).get("defaults", {})) if "," not in weight else {}           # a mixture has none
    if "max_iters" in chosen:
        usual["max_passes"] = own["max_passes"] = 0.0
    values = usual | own | chosen | {"device": str(device), "resume": False}
    check(values, specs())
    hp = argparse.Namespace(**values | {"dtype": pick_dtype(values["dtype"], device), "resume": resume or ""})

    # what cannot be
    if hp.cuda_graph and device.type != "cuda":
        fail(f"--cuda_graph: needs an NVIDIA GPU, and the device is {device}. Try without it")
    if hp.n_embd % (2 * hp.n_head):
        fits = 2 * hp.n_head * math.ceil(hp.n_embd / hp.n_head / 2)
        fail(f"--n_embd {hp.n_embd}: must be a multiple of 2 * n_head. Try --n_embd {fits}")
    objective = find_objective(hp)
    for name, entry in OBJECTIVES.items():
        for flag in sorted(set(entry["settings"]) & set(given) - set(objective["settings"])):
            fail(f"--{flag}: is a setting of {name}, but this run trains {hp.objective}. Try --objective {name}")
    if hp.doc_mask and not objective["packs"]:
        those = " ".join(name for name, entry in OBJECTIVES.items() if entry["packs"])
        fail(f"--doc_mask: {hp.objective} does not keep the text's order. Try it with {those}")
    return hp


def refuse_changes(given, saved, flags, what):
    for flag in sorted(set(flags) & set(given)):
        if given[flag] != saved[flag]:
            fail(f"--{flag} {given[flag]}: {what} {'none' if saved[flag] == '' else saved[flag]}. Try without --{flag}")


# ---- the device

def pick_device(name):
    """auto: CUDA, else mps, else the CPU; of torchrun's processes each has its own GPU."""
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


def pick_dtype(name, device):  # -> "float32" or "bfloat16"; auto: the second where the hardware multiplies it
    if name != "auto":
        return name
    if device.type == "cuda":
        return "bfloat16" if torch.cuda.get_device_capability(device) >= (8, 0) else "float32"
    # products of bfloat16 are the faster ones on a CPU that has instructions for them, and on no other
    fast = any(getattr(torch.cpu, f"_is_{isa}_supported", bool)() for isa in ("avx512_bf16", "amx_tile"))
    return "bfloat16" if device.type == "cpu" and fast else "float32"


@contextlib.contextmanager
def process_as_it_was():  # a notebook, whose process this may be, finds it so again
    precision, cudnn = torch.get_float32_matmul_precision(), torch.backends.cuda.cudnn_sdp_enabled()
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.backends.cuda.enable_cudnn_sdp(cudnn)


def use_device(device):  # -> how float32 products are computed, in words
    """Makes a GPU the current one, to which streams and graphs belong. On x86 "medium" hands float32 products
    to oneDNN, whose AVX-512 path is up to twice as fast as MKL's on AMD. Where it would round the operands to
    bfloat16 (AMX, ARM) a probe sees it, and they stay exact."""
    torch.set_float32_matmul_precision("highest")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if device.type != "cpu":
        return "float32 products exact"
    keep_memory()
    a = torch.randn(256, 256, generator=generator("probe"))
    torch.set_float32_matmul_precision("medium")
    off = float((a @ a - (a.double() @ a.double())).norm() / (a.double() @ a.double()).norm())
    if off < 1e-5:
        return f"float32 products by oneDNN, exact to {off:.0e}"
    torch.set_float32_matmul_precision("highest")
    return "float32 products exact"


def keep_memory():
    """glibc returns large blocks to the system when they are freed, and a step's next tensors fault their pages in
    anew: a tenth of its time. For the rest of the process it keeps them; other allocators are left alone."""
    trim_threshold, mmap_threshold = -1, -3     # of malloc.h
    with contextlib.suppress(AttributeError, OSError, TypeError):   # no mallopt, no libc by that name
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(mmap_threshold, 1 << 30) or mallopt(mmap_threshold, 32 << 20)       # older ones take no more
        mallopt(trim_threshold, 2 ** 31 - 1)


class Captured:
    """f as one CUDA graph. The first calls run eagerly on a stream of their own, while f allocates and
    compiles; the next is captured, and it and all later ones replay the graph. f takes no arguments and reads
    and writes tensors that stay where they are; gens: the generators it draws from, whose new seeds reach the
    next replay."""

    def __init__(self, f, gens=(), warm=3):
        self.f, self.gens, self.warm = f, gens, warm
        self.stream, self.graph, self.out = torch.cuda.Stream(), None, None

    def __call__(self):
        if self.warm > 0:
            self.warm -= 1
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                out = self.f()
            torch.cuda.current_stream().wait_stream(self.stream)
            return out
        if self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            for g in self.gens:
                self.graph.register_generator_state(g)
            gc.collect()                        # a graph that is freed during a capture would end it
            with torch.cuda.graph(self.graph, stream=self.stream):          # records, runs nothing
                self.out = self.f()
        self.graph.replay()
        return self.out


# ---- the folder

def choose_out_dir(hp):  # -> a folder that holds no run yet
    """Fails where --out_dir names a file, or a folder in which training has begun."""
    if not hp.out_dir:
        base = path = os.path.join("out", hp.objective.replace(" ", "").replace(",", "+").replace(":", "_"))
        i = 1
        while os.path.exists(path) and (not os.path.isdir(path) or os.listdir(path)):
            i += 1
            path = f"{base}-{i}"
        return path
    if any(os.path.exists(os.path.join(hp.out_dir, name)) for name in ("ckpt.pt", "best.pt")):
        fail(f"--out_dir {hp.out_dir}: already holds a run. Try --resume to go on with it, or another --out_dir")
    if os.path.exists(hp.out_dir) and not os.path.isdir(hp.out_dir):
        fail(f"--out_dir {hp.out_dir}: is a file. Try another name")
    log = os.path.join(hp.out_dir, "metrics.jsonl")             # harmless (a start that failed) unless it holds steps
    if os.path.isfile(log):
        with open(log, "rb") as f:
            if b'"split": "train"' in f.read():
                fail(f"--out_dir {hp.out_dir}: holds the metrics of a run whose checkpoints are gone. Try another")
    return hp.out_dir


@contextlib.contextmanager
def open_metrics(out_dir):  # -> binary file
    """Locked, so that a folder holds one run at a time. Fails where it cannot be written."""
    path = os.path.join(out_dir, "metrics.jsonl")
    try:
        os.makedirs(out_dir, exist_ok=True)
        f = open(path, "a+b")
    except OSError as e:
        fail(f"--out_dir {out_dir}: cannot be written to ({e.strerror}). Try another folder")
    try:
        import fcntl  # here: Windows has none, and there two runs in one folder are not kept apart
        fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)           # ends with the process, however that ends
    except ImportError:
        pass
    except OSError:
        fail(f"--out_dir {out_dir}: another process is training there. Try another --out_dir")
    try:
        yield f
    finally:
        with contextlib.suppress(OSError):      # what a full disk refused was said
            f.close()


def write_line(f, record):  # one JSON object, flushed
    try:
        f.write(json.dumps(record).encode() + b"\n")
        f.flush()
    except OSError as e:
        disk_refused(f.name, e.strerror)


# ---- checkpoints

def checkpoint_path(path):  # a run's folder, or a file -> the file: ckpt.pt, or best.pt where a kill left it alone
    for file in [path, os.path.join(path, "ckpt.pt"), os.path.join(path, "best.pt")]:
        if os.path.isfile(file):
            return file
    fail(f"{path}: no checkpoint there. Try the folder of a run, such as out/clm")


def newest_run():  # -> folder under out/ whose checkpoint was written last
    found = [path for name in ("ckpt.pt", "best.pt") for path in glob.glob(os.path.join("out", "*", name))]
    if not found:
        fail("no run under out/. Try python train.py first, or name a folder with --out_dir")
    return os.path.dirname(max(found, key=os.path.getmtime))


def save_checkpoint(path, state):
    """Whole or absent: written under another name, synced, then renamed. Fails when the disk refuses."""
    try:
        # never write over the old file: a kill halfway would leave neither
        with open(path + ".tmp", "wb") as f:
            torch.save(state, f)
            f.flush()
            os.fsync(f.fileno())
        os.replace(path + ".tmp", path)
    except (OSError, RuntimeError) as e:        # torch reports a full disk as a RuntimeError
        if os.path.exists(path + ".tmp"):
            os.remove(path + ".tmp")
        disk_refused(path, str(e).splitlines()[0])


def disk_refused(path, why):
    folder = os.path.dirname(path) or "."
    then = "the same command"                   # before the first save nothing is lost
    for name in ("best.pt", "ckpt.pt"):
        if os.path.exists(os.path.join(folder, name)):
            then = f"--resume --out_dir {folder}, whose {name} is whole"
    fail(f"{path}: could not be written ({why}). Try freeing disk space, then {then}")


def load_checkpoint(path):  # run folder or file -> dict of tensors, numbers and strings
    """Never runs code from the file, and checks every byte against the file's own checksums (milliseconds a
    MB). Fails where it is missing, damaged, foreign or of another version."""
    path = checkpoint_path(path)
    try:
        with warnings.catch_warnings(), zipfile.ZipFile(path) as z:
            warnings.simplefilter("ignore")     # of foreign files
            if z.testzip():
                raise ValueError("checksum")
            # weights_only: a checkpoint is data, a pickle is a program
            ckpt = torch.load(path, map_location="cpu", weights_only=True)
        version = int(ckpt["version"])
        if version == VERSION and not all(isinstance(ckpt[part], kind) for part, kind in PARTS.items()):
            raise ValueError("layout")
        config = defaults() | ckpt["config"] | {"resume": False}                    # a fork may have brought new flags
    except Exception as e:                      # what a damaged file raises depends on where it is damaged
        other = "ckpt.pt" if os.path.basename(path) == "best.pt" else "best.pt"
        beside = os.path.join(os.path.dirname(path), other)
        beside = beside if os.path.exists(beside) else "another run"
        fail(f"{path}: damaged, or not a checkpoint of this program ({type(e).__name__}). Try {beside}")
    if version != VERSION:
        fail(f"{path}: has layout {version}, this program reads {VERSION}. Try the version that wrote it")
    check(config | {"device": "auto"}, specs(), f"{path}: ")
    if config["n_embd"] % (2 * config["n_head"]):
        fail(f"{path}: --n_embd {config['n_embd']}: must be a multiple of 2 * n_head. Try another run")
    if ckpt["step"] < 0:
        fail(f"{path}: is at step {ckpt['step']}. Try another run")
    return ckpt | {"config": config}


def build(hp):  # -> model
    """Weights are drawn on the CPU from the seed, the trunk before the heads: equal seeds give equal trunks
    on every device and under every objective."""
    objective = find_objective(hp)
    sizes = Sizes(hp.n_layer, hp.n_head, hp.n_embd, n_outputs=objective["n_outputs"], ngram_rows=hp.ngram_rows,
                  attn_scale=hp.attn_scale)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(hp.seed)
        model = Transformer(sizes, getattr(torch, hp.dtype))
        model.heads.update(objective["heads"](sizes, hp))
    return model.to(hp.device)


def restore(model, ckpt, path, fresh=False):
    """fresh: heads that the checkpoint does not have stay as they are, and of its byte head the ids that both
    have are taken. Fails where weights do not fit, or are not finite."""
    saved, own = ckpt["model"], model.state_dict()
    try:
        if fresh:
            saved = {k: v for k, v in saved.items() if not k.startswith("heads.") or k in own}
            saved |= {k: v for k, v in own.items() if k.startswith("heads.") and k not in saved}
            n = min(own["head.weight"].size(1), saved["head.weight"].size(1))
            saved["head.weight"] = torch.cat((saved["head.weight"][:, :n], own["head.weight"].cpu()[:, n:]), dim=1)
        model.load_state_dict(saved)
    except (RuntimeError, KeyError, AttributeError, IndexError) as e:
        fail(f"{path}: its weights do not fit its settings, or this model.py ({type(e).__name__}). Try another run")
    if not all(bool(p.isfinite().all()) for p in model.parameters()):
        fail(f"{path}: has weights that are not finite. Try best.pt beside it, or another run")


def load_run(path, device="auto", dtype="auto"):  # -> model, settings, checkpoint; for inference
    """Of a run's folder ckpt.pt, or best.pt where validation became clearly worse after it, which a line on standard
    error says. Fails where there is no such run, or its weights do not fit. Sets the precision of float32 products,
    and switches cuDNN's attention off, which plans anew for every length of a cache."""
    ckpt, best = load_checkpoint(path), os.path.join(path, "best.pt")
    if ckpt["val"] > WORSE * ckpt["best"] and ckpt["best_step"] and os.path.isfile(best):
        print(f"--- uses {best}: validation was at its best at step {ckpt['best_step']:,} ({ckpt['best']:.3f} nats, "
              f"{ckpt['val']:.3f} when it was last measured)", file=sys.stderr)
        ckpt = load_checkpoint(best)
    hp, device = argparse.Namespace(**ckpt["config"]), pick_device(device)
    use_device(device)
    torch.backends.cuda.enable_cudnn_sdp(False)
    hp.device, hp.dtype = str(device), pick_dtype(dtype, device)
    model = build(hp)
    restore(model, ckpt, path)
    for_inference(model)
    return model, hp, ckpt


def for_inference(model):  # weights take the activations' type, and a pass reads half as much
    model.requires_grad_(False)
    for layer in [m for m in model.modules() if isinstance(m, (Linear, torch.nn.Embedding))]:
        layer.to(model.dtype)
    pack_weights(model)
