"""Settings, devices, processes, folders, checkpoints, what a run prints. Skip this file at first reading.

A run is a folder with ckpt.pt (the latest state), best.pt (the weights and settings of the lowest validation loss after
step 0, without the state of the optimizers, so it cannot be resumed), metrics.jsonl and, if matplotlib is installed,
loss.png.
"""
import argparse
import bz2
import contextlib
import ctypes
import difflib
import errno
import functools
import gc
import glob
import itertools
import json
import lzma
import math
import os
import pickle
import shlex
import signal
import sys
import threading
import zipfile
import zlib
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from data import CLS, EOT, MASK, MID, MODE_R, MODE_S, MODE_X, PAD, PRE, SENTINEL, SEP, SUF, VOCAB_SIZE
from data import Flag, UserError, choose_default, fail, make_rng, to_bytes
from model import ModelConfig, Transformer, for_inference
from objectives import ALIASES, IGNORE_INDEX, OBJECTIVES
import torch
from tqdm import tqdm

VERSION = 11                                    # of the checkpoint layout; raise it when older files no longer load
WORLD = int(os.environ.get("WORLD_SIZE") or 1) if os.environ.get("RANK") else 1
RANK = int(os.environ["RANK"]) if WORLD > 1 else 0              # which of torchrun's WORLD processes this is
MIN_BLOCK_SIZE = 32                             # minimum number of positions in a row
EVAL_ROWS = 32                                  # rows of a validation batch, independent of the batch size
HELD_OUT = 4096                                 # bytes of validation text in a checkpoint, for sample.py
COMPRESSED_BYTES = 1 << 24                      # maximum number of bytes to compress
SOURCE_KEYS = "name", "size", "crc", "weight"   # of a source, in checkpoints and logs
DEVICE_FLAGS = {
    "device": Flag("auto", "cpu, cuda, cuda:1, mps, or auto: cuda if there is a GPU, else cpu"),
    "dtype": Flag("auto", "of the activations; auto: bfloat16 if it is fast", choices=("auto", "float32", "bfloat16")),
}

# all flags of train.py except those of single objectives
SETTINGS = {
    "run": {
        "objective": Flag(next(iter(OBJECTIVES)), "a name from the list below, or a mixture such as clm:0.5,mlm:0.5"),
        "data": Flag(["stdlib"], "files (text or .jsonl), folders or stdlib; give each a weight (a.txt:0.9), or none"),
        "out_dir": Flag("", "folder of the run; default: out/OBJECTIVE, or out/OBJECTIVE-2, ..., if that exists"),
        "resume": Flag(False, "resume the run in --out_dir; default: the latest run under out/"),
        "init_from": Flag("", "start from the latest weights of this run; try a third of its learning rate"),
        "seed": Flag(1, "random seed for weights, windows and corruption", 0, 2 ** 31),
    },
    "model": {
        "n_layer": Flag({"cpu": 4, "cuda": 12}, "number of blocks", 1),
        "n_head": Flag({"cpu": 2, "cuda": 6}, "number of attention heads", 1),
        "n_embd": Flag({"cpu": 128, "cuda": 768}, "width of the hidden states", 2),
        "block_size": Flag({"cpu": 256, "cuda": 1024}, "number of positions in a row", MIN_BLOCK_SIZE),
        "ngram_rows": Flag(65536, "rows of the n-gram table for each n-gram length; 0: no n-grams", 0),
        "attn_scale": Flag(1.0, "multiplies the attention logits; above 1, attention is sharper", 0.0),
    },
    "training": {
        "batch_size": Flag({"cpu": 16, "cuda": 32}, f"number of rows in a micro-batch (in validation {EVAL_ROWS})", 1),
        "accum": Flag(1, "number of micro-batches in a step, which reads batch_size * accum rows", 1),
        "max_iters": Flag({"cpu": 1200, "cuda": 5000}, "maximum number of steps", 0),
        "max_passes": Flag(8.0, "maximum number of epochs; 0, or max_iters alone: no limit", 0, 1e6),
        "learning_rate": Flag({"muon": 0.01, "adamw": 0.003}, "peak learning rate of all parameters", 0.0),
        "warmup_iters": Flag(20, "steps of linear warm-up", 0),
        "lr_decay": Flag(0.6, "share of the steps, at the end, over which the learning rate falls to 0", 0.0, 1.0),
        "weight_decay": Flag(0.0, "each step multiplies the matrices of blocks by 1 - learning_rate * this", 0.0),
        "grad_clip": Flag(1.0, "maximum norm of the gradient; 0: no limit", 0.0),
        "ngram_drop": Flag(0.25, "share of n-gram lookups that training drops; larger over several epochs", 0.0, 0.99),
        "doc_mask": Flag(False, "do not read across NUL bytes, which end documents; sample.py does"),
        "optimizer": Flag("muon", "optimizer of matrices in blocks; AdamW trains the rest", choices=("muon", "adamw")),
    },
    "evaluation": {
        "eval_interval": Flag({"cpu": 200, "cuda": 500}, "steps between evaluations, which also save checkpoints", 1),
        "eval_iters": Flag(8, f"number of validation batches, of {EVAL_ROWS} rows, for each source", 1),
        "log_interval": Flag(10, "steps between lines of metrics.jsonl", 1),
    },
    "system": DEVICE_FLAGS | {
        "compile": Flag(False, "torch.compile the loss and the optimizer"),
        "cuda_graph": Flag(False, "replay the whole step, corruption and optimizer included, as one CUDA graph"),
    },
}
# flags that may be given with --resume
RESUMABLE_FLAGS = {"resume", "data", "out_dir", "max_iters", "eval_interval", "log_interval", "device", "compile",
                   "cuda_graph"}
# flags of all programs in which ~ is the home folder
PATHS = {"data", "out_dir", "init_from", "corpus", "file", "pairs", "nanogpt", "run"}
SHARED_FLAGS = {flag for group in SETTINGS.values() for flag in group}             # those of every objective


# ---- command lines, of every program
def in_range(flag, kind):  # -> argparse type with a range check
    def convert(word):
        value = kind(word)
        if not flag.low <= value <= flag.high:                  # refuses NaN, too
            raise argparse.ArgumentTypeError(f"{value} is not between {flag.low:g} and {flag.high:g}")
        return value
    convert.__name__ = kind.__name__            # for argparse's message "invalid int value"
    return convert


def spell_out(default):  # of a Flag, for --help: {"cpu": 4, "cuda": 12} -> "cpu 4, cuda 12"
    if isinstance(default, dict):
        return ", ".join(f"{key} {value}" for key, value in default.items())
    return " ".join(default) if isinstance(default, list) else default


def make_parser(prog, doc, groups, epilog=""):  # groups {title: {name: Flag}} -> ArgumentParser
    """The parser returns only the flags that were given, because a checkpoint's settings come before the defaults."""
    parser = argparse.ArgumentParser(
        prog=prog, usage=f"{prog} [flags below]", description=doc, epilog=epilog, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter, argument_default=argparse.SUPPRESS)
    parser.error = lambda message: fail(f"{message}. Try {prog} --help")
    for title, flags in groups.items():
        group = parser.add_argument_group(title)
        for name, flag in flags.items():
            first = choose_default(flag.default)
            if isinstance(first, bool):
                options = dict(action=argparse.BooleanOptionalAction)
            elif isinstance(first, list):
                # --data; given twice, the lists are joined
                options = dict(metavar="X", nargs="+", action="extend", type=os.path.expanduser)
            elif flag.choices:
                options = dict(choices=flag.choices)
            else:
                kind = os.path.expanduser if name in PATHS else type(first)
                options = dict(metavar="X", type=kind if isinstance(first, str) else in_range(flag, kind))
            default = f" [{spell_out(flag.default)}]" if first and first is not True else ""
            group.add_argument(f"--{name}", help=(flag.help + default).replace("%", "%%"), **options)
    return parser


def to_words(given):  # {name: value} -> the words of a command line
    words = []
    for name, value in given.items():
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, list):
            words += [f"--{name}", *value]
        else:                                   # a number or a text; of anything else fsdecode raises a TypeError
            words.append(f"--{name}={value if isinstance(value, (int, float)) else os.fsdecode(value)}")
    return words


def first_line(e):  # of the message of an exception, or the name of its type
    return (str(e).splitlines() or [type(e).__name__])[0]


# ---- --objective: one objective, or a mixture of several. Both become a list of members
# weight: the share of the steps that train the objective; n: raw bytes that fill a row
Member = namedtuple("Member", "objective weight n")


def member_weights(objective):  # hp.objective, such as "clm:3,mlm" -> {"clm": 3.0, "mlm": 1.0}
    parts = [part.partition(":") for part in objective.replace(" ", "").split(",")]
    for name, _, _ in parts:
        if name not in OBJECTIVES:
            refuse_name(name)
    try:
        weights = {name: float(weight) if colon else 1.0 for name, colon, weight in parts}
    except ValueError:
        weights = {}                            # refused by the next line
    if len(weights) < len(parts) or not all(1e-9 < w < 1e9 for w in weights.values()):
        fail(f"--objective {objective}: needs different names, with weights of 1e-9 to 1e9, as in clm:0.5,mlm:0.5")
    return weights


def refuse_name(name):  # of an objective that does not exist; suggests the closest one
    names = ALIASES | {known: known for known in OBJECTIVES}
    close = difflib.get_close_matches(name.lower().replace("-", "_"), names, 1)
    hint = names[close[0]] if close else f"one of {' '.join(OBJECTIVES)} (or a script that imports yours)"
    fail(f"--objective {name}: unknown. Try {hint}")


def get_members(hp):  # -> [Member] of hp.objective; fails if the settings allow no row
    weights = member_weights(hp.objective)
    members = []
    for name, weight in weights.items():
        objective = OBJECTIVES[name]
        rows = hp.batch_size if objective.compares_rows else hp.batch_size * hp.accum
        if rows < objective.min_rows:
            fail(f"--batch_size {hp.batch_size}: too small for {name}. Try --batch_size {objective.min_rows}")
        members.append(Member(objective, weight / sum(weights.values()), objective.n_bytes(hp.block_size, hp)))
    return members


# ---- settings of a run
def flag_specs():  # -> {name: Flag} of train.py, including those of single objectives
    groups = [*SETTINGS.values(), *(objective.flags for objective in OBJECTIVES.values())]
    return {name: flag for group in groups for name, flag in group.items()}


def defaults(kind="cpu", optimizer=""):  # -> {name: default}
    return {name: choose_default(flag.default, kind, optimizer) for name, flag in flag_specs().items()}


def parse(argv):  # -> {name: value} of the flags of train.py in argv
    groups = dict(SETTINGS)
    for flag, spec in flag_specs().items():
        owners = [name for name, objective in OBJECTIVES.items() if flag in objective.flags]
        if owners:
            groups.setdefault(f"flags of {', '.join(owners)}", {})[flag] = spec
    lines = ["objectives: attention, what is predicted; what sample.py does with it; defaults that differ"]
    for name, objective in OBJECTIVES.items():
        changed = "".join(f" [{flag} {spell_out(value)}]" for flag, value in objective.flag_defaults.items())
        lines.append(f"  {name:12s}{objective.attention:14s} {objective.help}; {objective.use_help}{changed}")
    about = "Train any objective of objectives.py on any bytes. Examples are at the top of train.py."
    return vars(make_parser("python train.py", about, groups, "\n".join(lines)).parse_args(argv))


def get_config(argv):
    """Returns the Namespace hp of all settings. Each comes from the first of these sources that has it: the flags in
    argv, a checkpoint, the objective's defaults, the device's defaults. With --resume, all settings of the checkpoint
    count, with --init_from only those that parent_settings returns. hp also has init_step, the number of steps that the
    weights were trained before this run; progress, the share of the run that is done, which is 1.0 here and
    a tensor in training; and checkpoint, what load_checkpoint returned for --resume or --init_from, or None."""
    given = {"resume": False} | parse(argv)
    ckpt = None
    saved = {}                                  # settings from the checkpoint
    if given["resume"]:
        ckpt = load_checkpoint(given.get("out_dir") or newest_run())
        path = ckpt["path"]
        if "optimizer" not in ckpt:
            fail(f"{path}: has no state of the optimizers. Try ckpt.pt, or --init_from {shlex.quote(path)}")
        saved = ckpt["config"]
        given["out_dir"] = Path(path).parent.as_posix()         # no backslashes, which would need quotes
        for flag in sorted(set(given) - RESUMABLE_FLAGS):
            if given[flag] != saved[flag]:
                value = "none" if saved[flag] == "" else saved[flag]
                fail(f"--{flag} {given[flag]}: the run has {value}. Try without it, or --init_from")
    elif given.get("init_from"):
        ckpt = load_checkpoint(given["init_from"])
        saved = parent_settings(ckpt, given)

    device = resolve_device(given.get("device", "auto"))        # of this machine, not the one in the checkpoint
    settings = {"init_step": 0} | defaults(device.type, given.get("optimizer", ""))
    objective = (settings | saved | given)["objective"]
    settings |= objective_defaults(objective, device.type)
    if "max_iters" in given:
        settings["max_passes"] = 0.0
    settings |= saved | given | {"device": str(device), "checkpoint": ckpt, "progress": 1.0}
    hp = argparse.Namespace(**settings)
    hp.dtype = resolve_dtype(hp.dtype, device)
    check_combinations(hp, given)
    return hp


def objective_defaults(objective, kind="cpu"):  # -> {flag: default} that an objective changes; a mixture changes none
    names = [*member_weights(objective)]
    changed = OBJECTIVES[names[0]].flag_defaults if len(names) == 1 else {}
    return {flag: choose_default(value, kind) for flag, value in changed.items()}


def parent_settings(ckpt, given):  # -> settings that a run with --init_from takes from its parent's checkpoint
    """The settings of the model; if the objective stays the same, also its settings. If the new objective has its own
    defaults of attn_scale or block_size, these replace the parent's values: no weight's shape depends on them."""
    config = ckpt["config"]
    names = set(SETTINGS["model"])
    if given.get("n_head", config["n_head"]) != config["n_head"]:               # copy_tensors would not notice
        fail(f"--n_head {given['n_head']}: the run of --init_from has {config['n_head']} heads. Try without --n_head")
    if member_weights(given.get("objective", config["objective"])).keys() == member_weights(config["objective"]).keys():
        own_flags = set(flag_specs()) - SHARED_FLAGS
        names |= {"objective", "doc_mask"} | own_flags
    else:
        names -= {"attn_scale", "block_size"} & set(objective_defaults(given["objective"]))
    return {name: config[name] for name in names} | {"init_step": config["init_step"] + ckpt["step"]}


def check_combinations(hp, given):  # fails if settings exclude each other, or if no objective has a given flag
    if hp.cuda_graph and not hp.device.startswith("cuda"):
        fail(f"--cuda_graph: needs an NVIDIA GPU, and the device is {hp.device}. Try --no-cuda_graph")
    if hp.n_embd % (2 * hp.n_head):
        fail(f"--n_embd {hp.n_embd}: is not a multiple of 2 * n_head. Try a multiple of {2 * hp.n_head}")
    objectives = [OBJECTIVES[name] for name in member_weights(hp.objective)]
    for flag in sorted(set(given) - SHARED_FLAGS):
        if not any(flag in objective.flags for objective in objectives):
            names = " ".join(name for name, other in OBJECTIVES.items() if flag in other.flags)
            fail(f"--{flag}: {hp.objective} has no such setting. Try it with {names}")
    if hp.doc_mask and not all(objective.supports_doc_mask for objective in objectives):
        names = " ".join(name for name, other in OBJECTIVES.items() if other.supports_doc_mask)
        fail(f"--doc_mask: {hp.objective} cannot keep documents apart. Try it with {names}")


# ---- the device
def resolve_device(name):  # -> torch.device; auto: CUDA, else the CPU; never mps, on which nothing was tested
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and WORLD > 1:            # each of torchrun's processes has its own GPU
        name = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    with contextlib.suppress(RuntimeError, AssertionError, ImportError):
        device = torch.zeros(1, device=name).device
        if device.type in ("cpu", "cuda", "mps"):
            return device
    fail(f"--device {name}: unknown, or not on this machine. Try --device cpu")


def resolve_dtype(name, device):  # -> "float32" or "bfloat16"; auto: bfloat16 if the hardware can multiply it
    if name != "auto":
        return name
    if device.type == "cuda":
        return "bfloat16" if torch.cuda.get_device_capability(device) >= (8, 0) else "float32"
    # on a CPU, bfloat16 is faster only with instructions that multiply it; without a probe in torch, assume none
    probes = [getattr(torch.cpu, f"_is_{isa}_supported", bool) for isa in ("avx512_bf16", "amx_tile")]
    return "bfloat16" if device.type == "cpu" and any(probe() for probe in probes) else "float32"


def use_device(device):
    """Makes a GPU the current device, on which streams and graphs are created. On a CPU, chooses the faster float32
    products. With precision "medium", x86 uses oneDNN, whose AVX-512 code is up to twice as fast as MKL's on AMD. On
    some CPUs (AMX, ARM) oneDNN then rounds to bfloat16. If a test product shows this, precision is "highest"."""
    torch.set_default_dtype(torch.float32)      # of weights and optimizers, whatever the caller has set
    torch.set_float32_matmul_precision("highest")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if device.type == "cpu":
        # by default, kernels are cached for the last 1,024 shapes, which takes GBs for texts of many lengths
        for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
            os.environ.setdefault(name, "256")
        tune_malloc()
        a = torch.randn(256, 256, generator=make_rng("probe"))
        exact = a.double() @ a.double()
        torch.set_float32_matmul_precision("medium")
        if float((a @ a - exact).norm() / exact.norm()) > 1e-5:
            torch.set_float32_matmul_precision("highest")


def tune_malloc():
    """Makes glibc keep large freed blocks of memory: the page faults of new blocks take a tenth of a step's time."""
    M_TRIM_THRESHOLD = -1                       # of malloc.h
    M_MMAP_THRESHOLD = -3
    with contextlib.suppress(AttributeError, OSError, TypeError):   # other systems have no mallopt
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_THRESHOLD, 32 << 20)
        mallopt(M_MMAP_THRESHOLD, 1 << 30)      # older versions refuse this, and the threshold stays 32 MB
        mallopt(M_TRIM_THRESHOLD, 2 ** 31 - 1)


def move_corpus(corpus, hp):  # to the GPU, as uint8, if it takes less than a quarter of the free memory
    if not hp.device.startswith("cuda"):
        return
    size = sum(source["size"] for source in corpus)
    free, _ = torch.cuda.mem_get_info(torch.device(hp.device))
    if size < free / 4:
        for source in corpus:
            source["train"] = source["train"].to(hp.device)
            source["val"] = source["val"].to(hp.device)
    elif hp.cuda_graph:
        fail(f"--cuda_graph: the corpus of {size:,} bytes takes over a quarter of the free GPU memory. Try without it")


@functools.cache
def side_stream(device):  # -> the stream of all graphs on this GPU; cuBLAS keeps a workspace for each stream
    return torch.cuda.Stream(device)


class GraphedStep:
    """Runs f as a CUDA graph. The first `warm` calls run f eagerly, since f may allocate and compile in them. The next
    call captures the graph. This call and all later ones replay it. f takes no arguments, and the tensors that it reads
    and writes must keep their addresses.

    gens: the generators that f draws from; seeding one affects the next replay
    share: another GraphedStep, whose memory pool is used; then each overwrites the output of the other"""

    def __init__(self, f, gens=(), warm=3, share=None):
        self.f = f
        self.gens = gens
        self.warm = warm
        self.n_calls = 0
        self.stream = side_stream(torch.cuda.current_device())
        self.pool = share.pool if share else torch.cuda.graph_pool_handle()
        self.graph = torch.cuda.CUDAGraph()

    def __call__(self):
        self.n_calls += 1
        if self.n_calls <= self.warm:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                out = self.f()
            torch.cuda.current_stream().wait_stream(self.stream)
            return out
        if self.n_calls == self.warm + 1:
            for g in self.gens:
                self.graph.register_generator_state(g)
            gc.disable()                        # freeing another graph during the capture would break it
            try:
                with torch.cuda.graph(self.graph, self.pool, self.stream):          # captures f without running it
                    self.out = self.f()
            finally:
                gc.enable()
        self.graph.replay()
        return self.out


# ---- several processes, started by torchrun; each takes every WORLD-th micro-batch of a step
def join_processes(hp):  # connects them
    if hp.accum % WORLD:
        fail(f"--accum {hp.accum}: {WORLD} processes share the micro-batches of a step. Try a multiple of {WORLD}")
    if hp.cuda_graph:
        fail("--cuda_graph: works in one process only. Try without it")
    if not torch.distributed.is_initialized():  # gloo for tensors on the CPU, so that any_rank never waits for a GPU
        torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if hp.device.startswith("cuda") else "gloo")
    if RANK:                                    # only the first process prints
        sys.stdout = open(os.devnull, "w", encoding="utf-8")


def sum_over_processes(model, loss):  # replaces the loss and all gradients by their sums over the processes
    grads = [p.grad for p in model.parameters() if p.grad is not None]              # the same ones in each process
    for t in [loss, *grads]:
        torch.distributed.all_reduce(t)


def any_rank(flag):  # -> whether flag is true in any process
    result = torch.tensor(int(flag))
    if WORLD > 1:
        torch.distributed.all_reduce(result, torch.distributed.ReduceOp.MAX)
    return bool(result)


def barrier():  # waits for all processes
    any_rank(False)


# ---- the folder
def choose_out_dir(hp):  # -> a folder that holds no run; fails if --out_dir holds one
    if hp.out_dir:
        if glob.glob(os.path.join(glob.escape(hp.out_dir), "*.pt")):
            fail(f"--out_dir {hp.out_dir}: already holds a run. Try --resume to resume it, or another --out_dir")
        return hp.out_dir
    base = "out/" + hp.objective.replace(" ", "").replace(",", "+").replace(":", "_")
    paths = itertools.chain([base], (f"{base}-{i}" for i in itertools.count(2)))
    return next(path for path in paths if not os.path.lexists(path))            # a dangling link exists, too


def open_metrics(out_dir, length):
    """Creates the folder and returns metrics.jsonl, opened for appending bytes and locked. Fails if another process
    holds the lock. Keeps only the whole lines in its first `length` bytes, its size when the checkpoint was saved,
    because a resumed run logs the later steps again. Only the first of several processes writes."""
    if RANK:
        return open(os.devnull, "ab")
    try:
        os.makedirs(out_dir, exist_ok=True)
        f = open(os.path.join(out_dir, "metrics.jsonl"), "a+b", buffering=0)
    except OSError as e:
        fail(f"--out_dir {out_dir}: cannot be written to ({e.strerror}). Try another folder")
    # Windows and some network file systems have no such locks; there, a second run in the folder goes unnoticed
    with contextlib.suppress(ImportError, OSError):
        import fcntl
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)       # released when the process ends, even if killed
        except BlockingIOError:
            fail(f"--out_dir {out_dir}: another process is training there. Try another --out_dir")
    f.seek(0)
    f.truncate(f.read(length).rfind(b"\n") + 1)
    f.seek(0, os.SEEK_END)
    return f


# ---- metrics.jsonl, signals
@dataclass
class Log:
    """What a run writes to, and what stops it."""
    metrics: object             # metrics.jsonl, of open_metrics
    stop: list                  # the signals that came, of catch_signals; a closed stdout counts as one
    bar: tqdm                   # on a terminal; elsewhere it is disabled
    on_record: Callable | None  # called with each record of metrics.jsonl
    step: int                   # of the last record of training; the speed is that of the steps since then
    seconds: float              # at this record, of training
    printed: float              # seconds at the last printed line of training


@contextlib.contextmanager
def open_log(s, on_record):  # makes the folder of the run, and sets s.log
    barrier()                                   # every process has chosen the folder before the first one makes it
    hidden = True if RANK else None             # None: shown on a terminal
    bar = tqdm(total=s.hp.max_iters, initial=s.step, unit="step", dynamic_ncols=True, disable=hidden)
    with open_metrics(s.hp.out_dir, s.metrics_bytes) as metrics, catch_signals() as stop, bar:
        s.log = Log(metrics, stop, bar, on_record, s.step - 1, s.seconds, s.seconds)
        yield


def write_record(log, record):  # a line of metrics.jsonl
    record = json.loads(json.dumps(record), parse_constant=lambda _: None)          # JSON lacks infinity and NaN
    log.metrics.write(json.dumps(record).encode() + b"\n")
    if log.on_record:
        log.on_record(record)


@contextlib.contextmanager
def catch_signals():  # yields a list, to which signals are appended; a second one of a kind ends the process at once
    stop = []
    if threading.current_thread() is not threading.main_thread():                   # no other may set handlers
        yield stop
        return

    def handler(number, frame):
        stop.append(number)
        signal.signal(number, signal.SIG_DFL)
    before = {}
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)    # Windows has no SIGHUP
        if number and signal.getsignal(number) is not signal.SIG_IGN:               # under nohup SIGHUP is ignored
            before[number] = signal.signal(number, handler)
    try:
        yield stop
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def say(text, stop):  # prints; if stdout is closed (| head, a closed terminal), the run stops as after a signal
    try:
        tqdm.write(text)
        sys.stdout.flush()
    except OSError as e:
        discard_stdout(e)
        stop.append(getattr(signal, "SIGPIPE", signal.SIGTERM))                     # Windows has no SIGPIPE


def discard_stdout(e):  # e: its OSError; redirects it to the null device, where the flush at exit works
    if e.errno != errno.EPIPE:
        print(f"error: {e}. If a disk is full, try to free space", file=sys.stderr)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# ---- checkpoint files
def checkpoint_path(path, names=("ckpt.pt", "best.pt")):  # a file -> itself; a folder of a run -> the first file there
    for file in [path, *(os.path.join(path, name) for name in names)]:
        if os.path.isfile(file):
            return file
    fail(f"{path}: no checkpoint there. Try the folder of a run, such as out/clm")


def newest_run():  # -> the folder under out/ whose checkpoint is the newest
    found = glob.glob(os.path.join("out", "*", "*.pt"))
    if not found:
        fail("no run under out/. Try python train.py first, or name a folder with --out_dir")
    return os.path.dirname(max(found, key=os.path.getmtime))


def save_checkpoint(path, ckpt):
    """Writes to a temporary file, which is renamed when complete: neither a kill nor a full disk leaves half a file."""
    try:
        with open(path + ".tmp", "wb") as f:
            torch.save(ckpt, f)
            f.flush()
            os.fsync(f.fileno())
        os.replace(path + ".tmp", path)
    except (OSError, RuntimeError) as e:        # RuntimeError: torch.save could not write
        with contextlib.suppress(OSError):
            os.remove(path + ".tmp")
        cause = e if isinstance(e, OSError) else e.__context__ or e
        fail(f"{path}: cannot be saved ({first_line(cause)}); the last checkpoint, if any, is unchanged. "
             f"Try to free space, then python train.py --resume --out_dir {shlex.quote(os.path.dirname(path))}")


def load_checkpoint(path):  # run folder or file -> dict of tensors, numbers and strings, with the "path" of the file
    """Checks all checksums. Fails if the file is damaged or not a checkpoint. Never runs code from the file. Settings
    that the checkpoint lacks, such as a new flag, get their defaults, which must preserve the old behaviour."""
    path = checkpoint_path(path)
    try:
        with zipfile.ZipFile(path) as z:
            if z.testzip():
                raise ValueError("a checksum is wrong")
        ckpt = torch.load(path, map_location="cpu", weights_only=True)          # no code is unpickled
        if ckpt.get("version") != VERSION:
            raise ValueError(f"layout {ckpt.get('version')}, this program reads {VERSION}")
        config = defaults() | ckpt["config"]
        # older programs wrote a list for each source
        sources = [x if isinstance(x, dict) else dict(zip(SOURCE_KEYS, x)) for x in ckpt["sources"]]
    except Exception as e:                      # a damaged file may raise anything
        # torch's own message says how to run the code in the file
        why = "it holds code" if isinstance(e, pickle.UnpicklingError) else first_line(e)
        fail(f"{path}: damaged, or not a checkpoint of this program ({why}). Try another file or run")
    return ckpt | {"config": config, "sources": sources, "path": path}


# ---- models
def build(members, hp):  # -> model
    """Initializes weights on the CPU, those of the heads last, so that runs with the same seed start from the same
    network on every device and for every objective."""
    n_outputs = max(m.objective.n_outputs for m in members)
    config = ModelConfig(hp.n_layer, hp.n_head, hp.n_embd, VOCAB_SIZE, n_outputs, hp.ngram_rows, hp.attn_scale)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(hp.seed)
        model = Transformer(config, getattr(torch, hp.dtype))
        for m in members:
            model.heads.update(m.objective.heads(config, hp))
    return model.to(hp.device)


def load_run(path, device="auto", dtype="auto"):  # -> model, settings, checkpoint
    """Loads a run for inference, with frozen weights. Changes settings of torch and of the process (use_device).
    In float32, model.train().requires_grad_() makes the weights trainable again, by any optimizer.

    path: a file, or the folder of a run, of which best.pt is loaded if it exists. Disables cuDNN's attention, which
    would compile a new plan for every length of a prompt."""
    ckpt = load_checkpoint(checkpoint_path(path, ("best.pt", "ckpt.pt")))
    device = resolve_device(device)
    use_device(device)
    torch.backends.cuda.enable_cudnn_sdp(False)
    hp = argparse.Namespace(**ckpt["config"] | {"device": str(device), "dtype": resolve_dtype(dtype, device)})
    model = build(get_members(hp), hp)
    copy_tensors(model.state_dict(), ckpt["model"], ckpt["path"])
    return for_inference(model), hp, ckpt


def is_finite(t):  # -> bool. The sum shows any inf or NaN, in 3% of the time of t.isfinite().all()
    return math.isfinite(float(t.sum()))


@torch.no_grad()
def copy_tensors(target, saved, path):  # {name: tensor} each, of a model or an optimizer, and of the checkpoint at path
    """Copies all saved tensors to target. Fails if names, shapes or types differ, or if a number is not finite."""
    def describe(t):
        return "missing" if t is None else f"{t.dtype} {[*t.shape]}"
    for name in target | saved:
        here = describe(target.get(name))
        there = describe(saved.get(name))
        if here != there:
            fail(f"{path}: {name} is {there}, here {here}. Try its --n_layer, --n_embd, --ngram_rows, or another run")
        if not is_finite(saved[name]):
            fail(f"{path}: {name} is not finite. Try another run")
        target[name].copy_(saved[name])


def start_from(model, parent):
    """Copies a parent's weights. Heads that the parent lacks or has in another shape keep their initial weights. So do
    those outputs of the byte head that the parent lacks. Heads that this model lacks are not copied."""
    weights = model.state_dict()
    saved = parent["model"]
    tensors = {name: t for name, t in saved.items() if name in weights or not name.startswith("heads.")}
    new = []
    for name, t in weights.items():
        if name.startswith("heads.") and (name not in saved or saved[name].shape != t.shape):
            tensors[name] = t
            new.append(name)
    # the byte head has 256 outputs for clm, 512 for span; from clm to span, the last 256 of span are new
    head = weights["head.weight"].cpu()                                             # (1, n_outputs, C)
    old = saved.get("head.weight")
    if old is not None and old.shape[2:] == head.shape[2:]:     # otherwise copy_tensors fails
        n = min(old.size(1), head.size(1))
        tensors["head.weight"] = torch.cat((old[:, :n], head[:, n:]), dim=1)
    copy_tensors(weights, tensors, parent["path"])
    print(f"started from the weights of {parent['path']} at step {parent['step']:,}; newly initialized: "
          f"{', '.join(new) or 'none'}")


# ---- the state of a run (s: train.State) and its checkpoints
def identify(s):  # -> what identifies a run, for its checkpoints and its log
    config = vars(s.hp) | {"resume": False, "checkpoint": None, "progress": 1.0}
    sources = [{key: source[key] for key in SOURCE_KEYS} for source in s.corpus]
    return dict(config=config, version=VERSION, sources=sources)


def optimizer_tensors(opt):  # -> {name: tensor}
    tensors = {f"muon.{i}": group.momentum for i, group in enumerate(opt.muon)}
    for i, state in enumerate(opt.adamw):
        tensors[f"adamw.{i}.first"] = state.first
        tensors[f"adamw.{i}.second"] = state.second
        tensors[f"adamw.{i}.updates"] = state.n_updates
    return tensors


def check_finite(ok, what, s):
    if not ok:
        raise FloatingPointError(
            f"{what} is not finite at step {s.step}; the last checkpoint in {s.hp.out_dir}, if any, is unchanged. "
            "Try a lower --learning_rate or --dtype float32, in a new run or with --init_from")


def save(s, name):  # name: ckpt.pt or best.pt
    """Weights and optimizer must be finite: otherwise copy_tensors would refuse to load what is saved."""
    weights = s.model.state_dict()
    optimizer = optimizer_tensors(s.opt)
    for tensors, what in (weights, "a weight"), (optimizer, "the optimizer's state"):
        check_finite(all(map(is_finite, tensors.values())), what, s)
    if RANK:
        return
    ckpt = identify(s) | dict(
        model=weights, model_config=vars(s.model.config), held_out=s.corpus[0]["val"][:HELD_OUT].cpu().clone(),
        step=s.step, seconds=s.seconds, val=s.val, metrics_bytes=s.log.metrics.tell())
    if name == "ckpt.pt":                       # nobody resumes from best.pt
        ckpt["optimizer"] = optimizer
    save_checkpoint(os.path.join(s.hp.out_dir, name), ckpt)


def resume(s):  # loads weights, optimizer and counters; fails if corpus or number of steps do not fit
    hp = s.hp
    ckpt = hp.checkpoint
    identity = lambda sources: [(source["size"], source["crc"], source["weight"]) for source in sources]
    if identity(ckpt["sources"]) != identity(s.corpus):         # names may differ
        fail(f"--data {' '.join(hp.data)}: differs from the data of {hp.out_dir} in its text, its weights "
             "or, in an older program, its held-out documents. Try the same data, or a new run")
    planned = ckpt["config"]["max_iters"]
    if hp.max_iters != planned and hp.max_iters <= ckpt["step"]:
        fail(f"--max_iters {hp.max_iters}: the run in {hp.out_dir} is at step {ckpt['step']}. Try a larger number")
    if hp.max_iters != planned:
        print(f"resuming with {hp.max_iters} steps instead of {planned}; the schedules follow the new number")
    copy_tensors(s.model.state_dict(), ckpt["model"], ckpt["path"])
    copy_tensors(optimizer_tensors(s.opt), ckpt["optimizer"], ckpt["path"])
    s.step = ckpt["step"]
    s.seconds = ckpt["seconds"]
    s.val = ckpt["val"]
    s.metrics_bytes = ckpt["metrics_bytes"]
    # best.pt may be newer than ckpt.pt, or of the step at which the run was stopped
    best = os.path.join(hp.out_dir, "best.pt")
    if os.path.isfile(best):
        s.best = load_checkpoint(best)["val"]


def load_parent(s):  # loads the weights of --init_from
    parent = s.hp.checkpoint
    start_from(s.model, parent)
    crcs = {source["name"]: source["crc"] for source in parent["sources"]}
    for source in s.corpus:
        if crcs.get(source["name"], source["crc"]) != source["crc"]:
            print(f"--data {source['name']}: has changed since {parent['path']} was trained. That run may have read "
                  "what is held out now; if so, the validation loss is too low")


# ---- what a run prints
# ids that are printed as a symbol, which is followed by what the legend calls it
SYMBOLS = {MASK: "█ MASK", EOT: "∅ EOT", PAD: "░ PAD", SEP: "‖ SEP", CLS: "Ⓒ CLS", PRE: "Ⓟ PRE", SUF: "Ⓢ SUF",
           MID: "Ⓜ MID", MODE_R: "ⓡ mode R", MODE_S: "ⓢ mode S", MODE_X: "ⓧ mode X", IGNORE_INDEX: "· no loss",
           ord("\t"): "⇥ tab", ord("\n"): "⏎ newline"}
SENTINELS = "①②③④⑤⑥⑦⑧⑨"


def to_symbol(i):  # id -> character; of a byte outside printable ASCII, each bit is a dot of a Braille character
    if i in SYMBOLS:
        return SYMBOLS[i][0]
    if i >= SENTINEL:
        return SENTINELS[(i - SENTINEL) % 9]
    return chr(i) if 32 <= i < 127 else chr(0x2800 + i)


def explain_symbols(text):  # -> a legend of the symbols in it: "█ MASK, ① ② sentinels"
    legend = [entry for entry in [*SYMBOLS.values(), f"{' '.join(SENTINELS[:3])} sentinels"] if entry[0] in text]
    if any("\u2800" <= symbol <= "\u28ff" for symbol in text):
        legend.append("⠿ another byte, a dot for each bit")
    return ", ".join(legend)


def draw_row(name, batch, width=96):  # name: of the objective -> lines: inputs, and targets below
    """Shows the end of the last one of the rows with the fewest PADs."""
    n_pads = (batch["inp"].flatten(1) == PAD).sum(1).tolist()
    b = max(range(len(n_pads)), key=lambda b: (-n_pads[b], b))
    lines = []
    for key in ("inp", "tgt"):
        if key in batch:
            ids = batch[key][b].flatten()[-width:].tolist()
            lines.append(f"  {name} {key}   {''.join(map(to_symbol, ids))}")
    return lines


def announce(s, passes):  # passes: of each source
    """Prints what is trained, and logs it in the first line of metrics.jsonl."""
    hp = s.hp
    table = 0 if s.model.ngrams is None else s.model.ngrams.table.numel()
    size = sum(p.numel() for p in s.model.parameters()) - table
    threads = torch.get_num_threads()
    if s.log.metrics.tell() == 0:
        write_record(s.log, identify(s) | {
            "torch": torch.__version__, "processes": WORLD, "threads": threads, "parameters": size + table,
            "ngram_parameters": table})
    lines = [f"{hp.objective} | {size:,} parameters and {table:,} in the n-gram table | {hp.out_dir}",
             f"{hp.device}, threads: {threads}, processes: {WORLD} | activations {hp.dtype} | "
             f"{s.step:,} of {hp.max_iters:,} steps done"]
    for source, n in zip(s.corpus, passes):
        lines.append(f"--data {source['name']}: trains on {len(source['train']):,} bytes, validates on "
                     f"{len(source['val']):,}; {source['weight']:.1%} of rows, {n:.3g} passes")
    say("\n".join(lines), s.log.stop)


def show_rows(s, batches):  # batches: {objective: its first batch}
    rows = "\n".join(line for name, batch in batches.items() for line in draw_row(name, batch))
    say(f"the end of a row of the first batch, with one character for each position:\n{explain_symbols(rows)}\n{rows}",
        s.log.stop)


def log_step(s, member, loss, norm, lr):  # a line of metrics.jsonl, and one on the terminal
    hp = s.hp
    speed = (s.step - s.log.step) / (s.seconds - s.log.seconds)                     # steps/s since the last log
    s.log.step = s.step
    s.log.seconds = s.seconds
    positions = round(speed * hp.batch_size * hp.accum * hp.block_size)             # per second
    write_record(s.log, {
        "step": s.step, "split": "train", "data": " ".join(hp.data), "objective": member.objective.name,
        "loss": loss, "lr": lr, "grad_norm": norm, "tok_per_s": positions, "seconds": round(s.seconds, 3)})
    minutes_left = (hp.max_iters - s.step - 1) / speed / 60
    line = f"training loss {loss:.3f}, {positions:,} positions/s"
    s.log.bar.set_postfix_str(line)
    if s.log.bar.disable and s.seconds > s.log.printed + 5:     # without a bar, a line every 5 seconds
        s.log.printed = s.seconds
        say(f"step {s.step:6d} | {line}, {minutes_left:.1f} min left", s.log.stop)


def log_validation(s, records):  # of train.evaluate
    for record in records:
        record = {"step": s.step, **record, "seconds": round(s.seconds, 3)}
        write_record(s.log, record)
        say(describe(record), s.log.stop)


def describe(record):  # of a validation -> a line
    objective = OBJECTIVES[record["objective"]]
    line = (f"step {record['step']:6d} | validation on {record['data']}: "
            f"{objective.name} loss {record['loss']:.4f} nats")
    for name, value in record["figures"].items():
        if name == "nll":
            name = "perplexity of the targets"
            value = math.exp(min(value, 700.0))                 # exp(710) overflows
        line += f", {name} {value:.4g}"
    if record["bpb"] is not None:
        kind = {"bound": "<= ", "causal": "causal rows "}.get(objective.bpb, "")
        line += f", {kind}{record['bpb']:.4f} bits/byte"
    return line


def end_run(s, is_stopped):  # is_stopped: by a signal, before the last step; -> exit code
    stop = s.log.stop
    if is_stopped:
        say(f"stopped at step {s.step} and saved. Resume with: python train.py --resume --out_dir "
            f"{shlex.quote(s.hp.out_dir)}", stop)
    if any_rank(signal.SIGINT in stop):
        raise KeyboardInterrupt
    number = stop[0] if stop else signal.SIGTERM                # stop is empty if the signal went to another process
    return 128 + number if is_stopped else 0


def draw_losses(out_dir):  # metrics.jsonl -> loss.png: a curve for each split, objective and source
    path = os.path.join(out_dir, "loss.png")
    records = []
    for line in Path(out_dir, "metrics.jsonl").read_bytes().splitlines():
        with contextlib.suppress(ValueError):   # a line that is being written
            records.append(json.loads(line))
    curves = {}
    for r in records[1:]:
        if 20 * r["step"] >= records[-1]["step"]:               # without the steep start
            label = f"{r['split']} {r['objective']}, {r['data']}".replace("$", r"\$")            # no formula
            curves.setdefault(label, []).append((r["step"], r["loss"]))
    try:
        from matplotlib.figure import Figure  # here, since it is optional
        axes = Figure().subplots()
        for label, points in sorted(curves.items()):
            axes.plot(*zip(*points), ".-" if label.startswith("val") else "-", alpha=0.6, label=label)
        axes.set(xlabel="step", ylabel="loss (nats)")
        axes.legend()
        axes.figure.savefig(path, dpi=120, bbox_inches="tight")
        print(f"losses: {path}")
    except Exception as e:                      # matplotlib is missing, or refuses its settings
        print(f"{path} was not drawn: {first_line(e)}")


def compressor_bits(data):  # (N,) uint8 -> text: bits per byte of the standard library's compressors
    text = to_bytes(data[:COMPRESSED_BYTES].cpu())
    results = {"zlib": zlib.compress(text, 9), "bz2": bz2.compress(text), "lzma": lzma.compress(text)}
    bits = [f"{name} {8 * len(result) / len(text):.3f}" for name, result in results.items()]
    return f"{', '.join(bits)} bits/byte as one stream of {len(text):,} bytes"


def print_compressors(s):
    if any(member.objective.bpb for member in s.members):
        for source in s.corpus:
            bits = compressor_bits(source["val"])
            print(f"compressors on the validation text of {source['name']}, without the training text: {bits}")
    print(flush=True)


# ---- a program
def run_program(main):  # exits with main's code; no traceback after what a user can cure
    for name in ("stdout", "stderr"):           # a stream that is closed from the start (2>&-) is the null device
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))
    with contextlib.suppress(AttributeError):   # a notebook's stdout has no such method
        if sys.stdout.isatty():
            sys.stdout.reconfigure(errors="replace")            # a console may lack a character
        else:                                   # a file or a pipe gets all bytes and line ends of a text
            sys.stdout.reconfigure(encoding="utf-8", errors="surrogateescape", newline="\n")
    try:
        code = main()
        sys.stdout.flush()                      # here, where errors are caught: at exit, Python prints a traceback
        if WORLD > 1 and torch.distributed.is_initialized():    # not after an error: it could wait for other processes
            torch.distributed.destroy_process_group()
    except (UserError, FloatingPointError, torch.OutOfMemoryError) as e:
        code = 2 if isinstance(e, UserError) else 1
        if not RANK or not isinstance(e, FloatingPointError):   # a loss is not finite in all processes at once
            print(f"error: {e}", file=sys.stderr)
    except KeyboardInterrupt:
        code = 130
    except OSError as e:                        # standard output is closed, or a disk or a quota is full
        discard_stdout(e)
        code = 141 if e.errno == errno.EPIPE else 1
    sys.exit(code)
