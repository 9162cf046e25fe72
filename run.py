"""A run: its settings, its device, its folder, its checkpoint. What training and sampling share.

A run is a folder that holds ckpt.pt (the latest state), best.pt (the state of lowest validation loss),
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
import zipfile

# isort: off  data silences a warning of torch's, and so comes before it
from data import MIN_BLOCK_SIZE, STDIN_COPY, Flag, error_reason, fail, make_rng
from model import ModelConfig, StackedLinear, Transformer, prepack_weights
from objectives import EVAL_ROWS, OBJECTIVES, get_objective, member_names
import torch

VERSION = 6                                     # of the checkpoint's layout
CHECKPOINT_KEYS = {"config", "step", "seconds", "best", "best_step", "val", "sources", "metrics_bytes", "held_out",
                   "model", "adamw", "muon", "moments"}
CLEARLY_WORSE = 1.01                            # sample.py uses best.pt where the last loss is so many times the best
WORLD = int(os.environ.get("WORLD_SIZE", 1)) if "RANK" in os.environ else 1        # torchrun's processes
RANK = int(os.environ["RANK"]) if WORLD > 1 else 0
DEVICE_FLAGS = {
    "device": Flag("auto", "cpu, cuda, cuda:1, mps, or auto: cuda where there is one, else cpu"),
    "dtype": Flag("auto", "of activations", choices=("auto", "float32", "bfloat16")),
}

# every flag of train.py but the objectives' own
SETTINGS = {
    "run": {
        "objective": Flag(next(iter(OBJECTIVES)), "a name from the list below, or a mixture such as clm:0.5,mlm:0.5"),
        "data": Flag(["stdlib"], "files, folders or stdlib, each with an optional :weight, or - (standard input)"),
        "train_bytes": Flag(0, "train on only so many bytes of each source's training split; 0 for all", 0, 1 << 50),
        "out_dir": Flag("", "folder of the run; without it out/OBJECTIVE, then out/OBJECTIVE-2, ..."),
        "resume": Flag(False, "resume the run in --out_dir, without it the latest run under out/"),
        "init_from": Flag("", "run (its last state) or checkpoint to start from: its weights, its objective "
                              "unless another is given, a new optimizer"),
        "seed": Flag(1, "random seed of weights, windows and corruption", 0, 2 ** 31),
    },
    "model": {
        "n_layer": Flag({"cpu": 4, "cuda": 12}, "blocks", 1, 1000),
        "n_head": Flag({"cpu": 4, "cuda": 6}, "attention heads", 1, 1000),
        "n_embd": Flag({"cpu": 128, "cuda": 768}, "width", 2, 1 << 20),
        "block_size": Flag({"cpu": 256, "cuda": 1024}, "positions of a row", MIN_BLOCK_SIZE, 1 << 24),
        "ngram_rows": Flag(65536, "rows of the hashed n-gram table for each length; 0 for no n-grams", 0, 1 << 26),
        "attn_scale": Flag(1.0, "multiplies the attention logits; 2 is sharper", 0.01, 100.0),
    },
    "training": {
        "batch_size": Flag({"cpu": 16, "cuda": 64}, "rows of a micro-batch; more for objectives with shorter rows", 1,
                           1 << 24),
        "accum": Flag(1, "micro-batches of a step, which reads batch_size * accum rows", 1, 1 << 24),
        "max_iters": Flag({"cpu": 1200, "cuda": 5000}, "steps at most", 0, 1 << 40),
        "max_passes": Flag(4.0, "most passes over the text, but never below 200 steps; 0: no limit, the default with "
                                "--max_iters", 0.0, 1e9),
        "learning_rate": Flag({"muon": 0.01, "adamw": 0.003}, "peak learning rate", 0.0, 100.0),
        "warmup_iters": Flag(20, "steps of linear warm-up", 0, 1 << 40),
        "lr_decay": Flag(0.6, "last share of the steps, over which the learning rate falls linearly to 0", 0.0, 1.0),
        "weight_decay": Flag(0.0, "a step multiplies the matrices of blocks by 1 - learning_rate * this",
                             0.0, 100.0),
        "grad_clip": Flag(1.0, "largest norm of the gradient (n-gram table excluded); 0 for no limit", 0.0, 1e30),
        "ngram_drop": Flag(0.5, "share of n-gram lookups that training drops, after growing from 0 over the first two "
                                "passes or less; more in runs of several passes", 0.0, 0.99),
        "doc_mask": Flag(False, "attend only within a document; for objectives that keep the text's order"),
        "optimizer": Flag("muon", "muon (for the matrices of blocks, AdamW for the rest) or adamw",
                          choices=("muon", "adamw")),
    },
    "evaluation": {
        "eval_interval": Flag({"cpu": 600, "cuda": 500}, "steps between evaluations; each one saves", 1, 1 << 40),
        "eval_iters": Flag(8, f"validation batches of {EVAL_ROWS} rows for each source", 1, 1 << 24),
        "log_interval": Flag(10, "steps between lines of metrics.jsonl", 1, 1 << 40),
    },
    "system": DEVICE_FLAGS | {
        "compile": Flag(False, "torch.compile the loss"),
        "cuda_graph": Flag(False, "replay the whole step, corruption and optimizer included, as one CUDA graph"),
    },
}
# flags that may change when a run is resumed
RESUMABLE_FLAGS = {"data", "out_dir", "resume", "max_iters", "eval_interval", "log_interval", "device", "compile",
                   "cuda_graph"}


# ---- flags, of every program

class Parser(argparse.ArgumentParser):
    def error(self, message):
        fail(f"{message}. Try: {self.prog} --help")

    def parse_args(self, argv):
        given, unknown = self.parse_known_args(argv)
        if not unknown:
            return given
        word = unknown[0].split("=")[0]
        if not word.startswith("-"):
            fail(f"stray word {word!r}. Try quotes around what belongs together, or no space in it")
        options = self._option_string_actions
        near = [option for option in options if initials(option) == word.lstrip("-")]               # --lr
        near = near or difflib.get_close_matches(word, options, 1)
        fail(f"unknown argument {word}. Try {near[0] if near else f'{self.prog} --help'}")


def initials(option):  # --learning_rate -> lr
    return "".join(part[:1] for part in option.lstrip("-").split("_"))


def choose_default(default, *keys):  # a default, or a dict of them -> the value of the first key in it, else its first
    if not isinstance(default, dict):
        return default
    return next((default[key] for key in keys if key in default), next(iter(default.values())))


def help_text(flag):  # -> its help, with the default in brackets
    default = flag.default
    if default in ("", []) or isinstance(default, bool):
        return flag.help
    if isinstance(default, dict):
        words = [f"{key} {value}" for key, value in default.items()]
    elif isinstance(default, list):
        words = default
    else:
        words = [str(default)]
    return f"{flag.help} [{', '.join(words)}]"


def make_parser(prog, doc, groups, epilog=""):  # groups {title: {name: Flag}} -> Parser
    """It returns only the flags that were given: a checkpoint's settings come before defaults."""
    parser = Parser(prog=prog, usage=f"{prog} [flags below]", description=doc, epilog=epilog,
                    formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
                    argument_default=argparse.SUPPRESS)
    for title, flags in groups.items():
        group = parser.add_argument_group(title)
        for name, flag in flags.items():
            first = choose_default(flag.default)
            if isinstance(first, bool):
                how = dict(action=argparse.BooleanOptionalAction)
            elif isinstance(first, list):
                how = dict(metavar="X", nargs="+")
            else:
                how = dict(metavar="X", type=type(first))
            group.add_argument(f"--{name}", help=help_text(flag).replace("%", "%%"), **how)
    return parser


def check(values, flags, where=""):  # values {name: value}, flags {name: Flag}
    """Fails where a value is not of its default's type, out of its range or not among its choices."""
    for name, flag in flags.items():
        value = values[name]
        if value is flag.default:
            continue
        first = choose_default(flag.default)
        kind = (int, float) if isinstance(first, float) else type(first)
        is_words = not isinstance(value, list) or (value and all(isinstance(word, str) for word in value))
        if not isinstance(value, kind) or isinstance(value, bool) != isinstance(first, bool) or not is_words:
            fail(f"{where}--{name} {value!r}: wants {type(first).__name__}. Try the default")
        if flag.low is not None and not flag.low <= value <= flag.high:
            # 15 is a percentage, 1.5 hardly
            is_percent = flag.high <= 1 and value >= 5 and flag.low <= value / 100 <= flag.high
            hint = f"{value / 100:g}" if is_percent else "the default"
            fail(f"{where}--{name} {value}: must lie between {flag.low} and {flag.high}. Try {hint}")
        if flag.choices and value not in flag.choices:
            fail(f"{where}--{name} {value}: unknown. Try {' or '.join(flag.choices)}")


# ---- settings of a run

def flag_specs():  # -> {name: Flag} of train.py, the objectives' own included
    groups = [*SETTINGS.values(), *(objective.flags for objective in OBJECTIVES.values())]
    return {name: flag for group in groups for name, flag in group.items()}


def defaults(kind="cpu", optimizer="muon"):  # -> {name: default}
    return {name: choose_default(flag.default, kind, optimizer) for name, flag in flag_specs().items()}


def parse(argv):  # -> {name: value} of train.py's flags that argv gives
    groups = dict(SETTINGS)
    owners = {}                                 # {flag: the objectives that have it}
    for name, objective in OBJECTIVES.items():
        for flag in objective.flags:
            owners.setdefault(flag, []).append(name)
    for flag, names in owners.items():
        groups.setdefault(f"of {', '.join(names)}", {})[flag] = OBJECTIVES[names[0]].flags[flag]
    lines = ["objectives: attention, what is predicted; what sample.py does with it; defaults that differ"]
    for name, objective in OBJECTIVES.items():
        own = "".join(f" [{flag} {value}]" for flag, value in objective.flag_defaults.items())
        lines.append(f"  {name:12s}{objective.attention:14s} {objective.help}; {objective.use_help}{own}")
    about = """Train any objective of objectives.py on any bytes.

    python train.py                                     clm on the Python standard library's own source
    python train.py --objective mlm --data book.txt     another objective, your own text
    python train.py --resume                            resume the latest run
    python train.py --init_from out/clm --data new.txt:0.95 stdlib:0.05     continual pre-training, with replay"""
    return vars(make_parser("python train.py", about, groups, "\n".join(lines)).parse_args(argv))


def get_config(argv):  # -> Namespace of every setting; hp.resume is the path of the checkpoint to resume, or ""
    """Defaults, then a checkpoint's settings, then the flags given. --resume takes all settings from the checkpoint,
    --init_from those of the model and, where the objective stays the same, of the objective. Has no side effects.

    Fails on an unknown flag, a value out of range, or one that contradicts the checkpoint."""
    given = parse(argv)
    for name in DEVICE_FLAGS:                   # auto is the same as not given
        if given.get(name) == "auto":
            del given[name]
    saved = {}
    parent_config = None                        # of the run of --init_from
    resume = ""
    if given.pop("resume", False):
        resume = checkpoint_path(given.get("out_dir") or newest_run())
        saved = load_checkpoint(resume)["config"]
        given["out_dir"] = os.path.dirname(resume) or "."
        refuse_changes(given, saved, set(saved) - RESUMABLE_FLAGS, "the run to resume was started with")
    elif given.get("init_from"):
        ckpt = load_checkpoint(given["init_from"])
        parent_config = ckpt["config"]
        inherited = set(SETTINGS["model"])
        parent_names = member_names(parent_config["objective"])
        if member_names(given.get("objective", parent_config["objective"])) == parent_names:
            inherited |= {"objective", "doc_mask", *(flag for each in OBJECTIVES.values() for flag in each.flags)}
        saved = {name: parent_config[name] for name in inherited}
        shapes = set(SETTINGS["model"]) - {"block_size", "attn_scale"}              # settings that shape weights
        refuse_changes(given, saved, shapes, f"the model in {given['init_from']} has")
        saved["init_step"] = parent_config["init_step"] + ckpt["step"]

    # defaults of the device and the optimizer, then of the objective, then the checkpoint's settings and the flags
    device = resolve_device(given.get("device", "auto"))        # of this machine, not of the run
    chosen = saved | given
    base = defaults("cuda" if device.type == "cuda" else "cpu", chosen.get("optimizer", "muon"))
    names = member_names(chosen.get("objective", base["objective"]))
    own = shared_defaults(names)
    if parent_config and names != parent_names:
        saved |= {name: own[name] for name in ("attn_scale", "block_size") if name in own}
        chosen = saved | given
    if "block_size" not in given:               # shorter rows are more rows, so that a step has as many positions
        positions = base["batch_size"] * base["block_size"]
        base["batch_size"] = max(1, positions // chosen.get("block_size", own.get("block_size", base["block_size"])))
    base |= own
    if "max_iters" in chosen:
        base["max_passes"] = 0.0
    # init_step: steps that the weights had before this run; it reads the windows after theirs
    values = {"init_step": 0} | base | chosen | {"device": str(device), "resume": False}
    check(values, flag_specs())
    hp = argparse.Namespace(**values | {"dtype": resolve_dtype(values["dtype"], device), "resume": resume})

    check_combinations(hp, given)
    return hp


def shared_defaults(names):  # -> {flag: default} that all these objectives have of their own
    if not set(names) <= set(OBJECTIVES):       # get_objective refuses it
        return {}
    return dict(set.intersection(*(set(OBJECTIVES[name].flag_defaults.items()) for name in names)))


def check_combinations(hp, given):  # fails where settings exclude each other
    if hp.cuda_graph and not hp.device.startswith("cuda"):
        fail(f"--cuda_graph: needs an NVIDIA GPU, and the device is {hp.device}. Try --no-cuda_graph")
    if hp.n_embd % (2 * hp.n_head):
        fits = 2 * hp.n_head * math.ceil(hp.n_embd / hp.n_head / 2)
        fail(f"--n_embd {hp.n_embd}: must be a multiple of 2 * n_head. Try --n_embd {fits}")
    objective = get_objective(hp)
    for other in OBJECTIVES.values():
        for flag in sorted(set(other.flags) & set(given) - set(objective.flags)):
            those = " ".join(name for name, owner in OBJECTIVES.items() if flag in owner.flags)
            fail(f"--{flag}: {hp.objective} has no such setting. Try it with {those}")
    if hp.doc_mask and not objective.supports_doc_mask:
        those = " ".join(name for name, other in OBJECTIVES.items() if other.supports_doc_mask)
        fail(f"--doc_mask: {hp.objective} does not keep the text's order. Try it with {those}")


def refuse_changes(given, saved, flags, what):
    for flag in sorted(set(flags) & set(given)):
        if given[flag] != saved[flag]:
            fail(f"--{flag} {given[flag]}: {what} {'none' if saved[flag] == '' else saved[flag]}. Try without --{flag}")


# ---- the device

def resolve_device(name):
    """auto: CUDA, else the CPU, never mps, on which nothing here has been tried; of torchrun's processes each has its
    own GPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and WORLD > 1:
        name = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    try:
        torch.device(name)
    except RuntimeError:
        fail(f"--device {name}: unknown device. Try cuda, or --device cpu")
    try:
        probe = torch.zeros(1, device=name)
        probe.cpu()                             # the meta device has no data
        return probe.device
    except (RuntimeError, AssertionError, NotImplementedError):
        fail(f"--device {name}: not on this machine. Try --device cpu")


def resolve_dtype(name, device):  # -> "float32" or "bfloat16"; auto: bfloat16 where the hardware multiplies it
    if name != "auto":
        return name
    if device.type == "cuda":
        return "bfloat16" if torch.cuda.get_device_capability(device) >= (8, 0) else "float32"
    # on a CPU bfloat16 is faster only where there are instructions for its matmuls
    fast = any(getattr(torch.cpu, f"_is_{isa}_supported", bool)() for isa in ("avx512_bf16", "amx_tile"))
    return "bfloat16" if device.type == "cpu" and fast else "float32"


@contextlib.contextmanager
def preserve_torch_state():  # restores torch's global switches at the end, for notebooks and tests
    precision = torch.get_float32_matmul_precision()
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.backends.cuda.enable_cudnn_sdp(cudnn)


def use_device(device):  # -> how float32 matmuls are computed, in words
    """Makes a GPU the current one, to which streams and graphs belong. On x86, precision "medium" hands float32
    products to oneDNN, whose AVX-512 path is up to twice as fast as MKL's on AMD. Where oneDNN would round the
    operands to bfloat16 (AMX, ARM), a test product shows it, and the precision stays "highest"."""
    torch.set_float32_matmul_precision("highest")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if device.type != "cpu":
        return "float32 matmuls in full precision"
    tune_malloc()
    a = torch.randn(256, 256, generator=make_rng("probe"))
    torch.set_float32_matmul_precision("medium")
    exact = a.double() @ a.double()
    error = float((a @ a - exact).norm() / exact.norm())
    if error < 1e-5:
        return f"float32 matmuls by oneDNN, relative error {error:.0e}"
    torch.set_float32_matmul_precision("highest")
    return "float32 matmuls in full precision"


def tune_malloc():
    """glibc returns large freed blocks to the system, and the next step's tensors fault their pages in again, which
    costs a tenth of a step. Makes it keep them for the rest of the process; other allocators are left alone."""
    trim_threshold = -1                         # of malloc.h
    mmap_threshold = -3
    with contextlib.suppress(AttributeError, OSError, TypeError):   # no mallopt, or no libc by that name
        mallopt = ctypes.CDLL(None).mallopt
        if not mallopt(mmap_threshold, 1 << 30):
            mallopt(mmap_threshold, 32 << 20)   # the limit of older versions
        mallopt(trim_threshold, 2 ** 31 - 1)


class GraphedStep:
    """f as one CUDA graph. The first calls run eagerly on a stream of their own, while f allocates and
    compiles; the next is captured, and it and all later ones replay the graph. f takes no arguments and reads
    and writes tensors that stay where they are; gens: the generators it draws from, whose new seeds reach the
    next replay."""

    def __init__(self, f, gens=(), warm=3):
        self.f = f
        self.gens = gens
        self.warm = warm
        self.stream = torch.cuda.Stream()
        self.graph = None
        self.out = None

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
        fail(f"--out_dir {hp.out_dir}: already holds a run. Try --resume to resume it, or another --out_dir")
    if os.path.exists(hp.out_dir) and not os.path.isdir(hp.out_dir):
        fail(f"--out_dir {hp.out_dir}: is a file. Try another name")
    log = os.path.join(hp.out_dir, "metrics.jsonl")             # of a start that failed, unless it holds steps
    if os.path.isfile(log):
        with open(log, "rb") as f:
            if b'"split": "train"' in f.read():
                fail(f"--out_dir {hp.out_dir}: holds the metrics of a run whose checkpoints are gone. Try another")
    return hp.out_dir


@contextlib.contextmanager
def open_metrics(out_dir):  # -> binary file
    """Locked, so that a folder holds one run at a time. Fails where it cannot be written. A start that fails before the
    first line is written leaves no file or folder of its own."""
    path = os.path.join(out_dir, "metrics.jsonl")
    new_files = [file for file in (path, os.path.join(out_dir, STDIN_COPY)) if not os.path.exists(file)]
    new_folders = []                            # the innermost first
    folder = out_dir
    while folder and not os.path.exists(folder):
        new_folders.append(folder)
        folder = os.path.dirname(folder)
    try:
        os.makedirs(out_dir, exist_ok=True)
        f = open(path, "a+b")
    except OSError as e:
        fail(f"--out_dir {out_dir}: cannot be written to ({e.strerror}). Try another folder")
    try:
        import fcntl  # here: Windows has none; there a second run in the folder is not noticed
        fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)           # ends with the process, however that ends
    except ImportError:
        pass
    except OSError:
        fail(f"--out_dir {out_dir}: another process is training there. Try another --out_dir")
    try:
        yield f
    finally:
        with contextlib.suppress(OSError):      # a full disk was reported already
            f.close()
        if os.path.isfile(path) and os.path.getsize(path) == 0:
            for remove, names in ((os.remove, new_files), (os.rmdir, new_folders)):
                for name in names:
                    with contextlib.suppress(OSError):
                        remove(name)


def write_line(f, record):  # one JSON object, flushed
    try:
        f.write(json.dumps(record).encode() + b"\n")
        f.flush()
    except OSError as e:
        fail_write(f.name, error_reason(e))


# ---- checkpoints

def checkpoint_path(path):  # a run's folder, or a file -> the file: ckpt.pt, or best.pt if a kill left only that
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
    """The file is complete or absent: written under another name, synced, then renamed. Fails when the disk is full."""
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
        fail_write(path, error_reason(e))


def fail_write(path, why):
    folder = os.path.dirname(path) or "."
    then = "the same command"                   # there is no checkpoint yet
    for name in ("best.pt", "ckpt.pt"):
        if os.path.exists(os.path.join(folder, name)):
            then = f"--resume --out_dir {folder}, whose {name} is complete"
    fail(f"{path}: could not be written ({why}). Try freeing disk space, then {then}")


def load_checkpoint(path):  # run folder or file -> dict of tensors, numbers and strings
    """Never runs code from the file, and checks every byte against the file's own checksums (milliseconds a MB). Fails
    where it is missing, damaged, foreign or of another version."""
    path = checkpoint_path(path)
    try:
        with zipfile.ZipFile(path) as z:
            if z.testzip():
                raise ValueError("a checksum is wrong")
        ckpt = torch.load(path, map_location="cpu", weights_only=True)          # data; a pickle would be a program
        version = ckpt["version"]
        if version == VERSION and not CHECKPOINT_KEYS <= set(ckpt):
            raise ValueError("records are missing")
    except Exception as e:                      # what a damaged file raises depends on where it is damaged
        other = "ckpt.pt" if os.path.basename(path) == "best.pt" else "best.pt"
        beside = os.path.join(os.path.dirname(path), other)
        beside = beside if os.path.exists(beside) else "another run"
        why = str(e) if type(e) in (ValueError, zipfile.BadZipFile) else "its records cannot be read"
        fail(f"{path}: damaged, or not a checkpoint of this program ({why}). Try {beside}")
    if version != VERSION:
        fail(f"{path}: has layout {version!r}, this program reads {VERSION}. Try the version that wrote it")
    config = defaults() | {"init_step": 0} | ckpt["config"] | {"resume": False}     # a fork may have added flags
    check(config | {"device": "auto"}, flag_specs(), f"{path}: ")
    get_objective(argparse.Namespace(**config), f"{path}: ")    # fails on that of a fork
    return ckpt | {"config": config}


def model_config(hp):
    return ModelConfig(hp.n_layer, hp.n_head, hp.n_embd, n_outputs=get_objective(hp).n_outputs,
                       ngram_rows=hp.ngram_rows, attn_scale=hp.attn_scale)


def build(hp):  # -> model
    """Weights are drawn on the CPU from the seed, the model's before its heads': with equal seeds all objectives start
    from equal weights, on every device."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(hp.seed)
        model = Transformer(model_config(hp), getattr(torch, hp.dtype))
        model.heads.update(get_objective(hp).heads(model.config, hp))
    return model.to(hp.device)


def load_weights(model, ckpt, path, init=None):
    """init: settings of a run that only starts from these weights: heads that the checkpoint lacks keep their own, and
    of the byte head only the ids that both have are copied. Fails where weights do not fit or are not finite."""
    saved = ckpt["model"]
    own = model.state_dict()
    try:
        if init:
            saved = {k: v for k, v in saved.items() if not k.startswith("heads.") or k in own}
            saved |= {k: v for k, v in own.items() if k.startswith("heads.") and k not in saved}
            n = min(own["head.weight"].size(1), saved["head.weight"].size(1))
            saved["head.weight"] = torch.cat((saved["head.weight"][:, :n], own["head.weight"].cpu()[:, n:]), dim=1)
        model.load_state_dict(saved)
    except (RuntimeError, KeyError):            # of a fork
        if init:
            refuse_head_flags(init, ckpt["config"], path)
        fail(f"{path}: its weights do not fit its settings, or this model.py and objectives.py. Try another run")
    if not all(bool(p.isfinite().all()) for p in model.parameters()):
        fail(f"{path}: has weights that are not finite. Try best.pt beside it, or another run")


def refuse_head_flags(hp, config, path):  # fails where a flag of the objective may be why heads do not fit
    changed = [flag for flag in sorted(get_objective(hp).flags) if getattr(hp, flag) != config[flag]]
    if changed:
        given = " ".join(f"--{flag} {getattr(hp, flag)}" for flag in changed)
        wanted = " ".join(f"--{flag} {config[flag]}" for flag in changed)
        fail(f"{given}: gives heads of other shapes than those in {path}. Try {wanted}")


def load_run(path, device="auto", dtype="auto"):  # -> model, settings, checkpoint; for inference
    """Reads ckpt.pt of a run's folder, or best.pt if validation became clearly worse after it, which it reports on
    standard error. Fails where there is no such run, or its weights do not fit. Sets the precision of float32
    products, and switches off cuDNN's attention, which plans anew for every length of a cache."""
    ckpt = load_checkpoint(path)
    best = os.path.join(path, "best.pt")
    if ckpt["val"] > CLEARLY_WORSE * ckpt["best"] and ckpt["best_step"] and os.path.isfile(best):
        print(f"--- uses {best}: validation was at its best at step {ckpt['best_step']:,} ({ckpt['best']:.3f} nats, "
              f"{ckpt['val']:.3f} when it was last measured)", file=sys.stderr)
        ckpt = load_checkpoint(best)
    device = resolve_device(device)
    use_device(device)
    torch.backends.cuda.enable_cudnn_sdp(False)
    hp = argparse.Namespace(**ckpt["config"])
    hp.device = str(device)
    hp.dtype = resolve_dtype(dtype, device)
    model = build(hp)
    load_weights(model, ckpt, path)
    for_inference(model)
    return model, hp, ckpt


def for_inference(model):  # casts weights to the activations' type, so that a pass reads half as much memory
    model.requires_grad_(False)
    for layer in [m for m in model.modules() if isinstance(m, (StackedLinear, torch.nn.Embedding))]:
        layer.to(model.dtype)
    prepack_weights(model)


# ---- a program

def is_out_of_memory(e):  # a RuntimeError -> bool; the CPU's lack of memory has no class of its own
    lacks = "out of memory", "allocate memory", "not enough memory"
    return isinstance(e, torch.OutOfMemoryError) or any(words in str(e) for words in lacks)


def run_program(main):  # ends the process with main's exit code
    """Ctrl-C, a reader that goes away (as in | head), a full disk behind standard output and streams that were closed
    at the start (as by >&-) end or run it without a traceback."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))
    try:
        try:
            code = main()
        finally:
            sys.stdout.flush()                  # Python would flush it at exit, where an error is a traceback
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        discard_stdout()
        code = 141
    except OSError as e:
        if e.filename is not None:              # of another file
            raise
        discard_stdout()
        with contextlib.suppress(OSError):      # standard error may be as full
            print(f"error: the output could not be written ({error_reason(e)}). Try another place for it",
                  file=sys.stderr)
        code = 1
    if WORLD > 1 and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    sys.exit(code)


def discard_stdout():  # what is still buffered would be an error once more at exit
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
