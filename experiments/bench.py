"""Measure speed: ratios between programs that run in turns.

    python -m experiments.bench                         training and decoding at the default size
    python -m experiments.bench --parts train --compile --cuda_graph --objectives clm   eager, compiled, captured, both
    python -m experiments.bench --parts decode --n_layer 6 --n_head 6 --n_embd 384 --nanogpt ../nanoGPT
    python -m experiments.bench --parts decode --run out/mtp        a trained run, for self-speculation
    python -m experiments.bench --parts loss --data book.txt --block_size 64 --batch_size 12 --nanogpt ../nanoGPT

Every number is the median of --repeats runs; the programs of a ratio are interleaved, so that a machine whose speed
drifts slows both. Training data are random bytes, but for --parts loss. --nanogpt also measures a checkout of
karpathy/nanoGPT: its model, optimizer and way to draw a batch; compiled and in bfloat16 on a GPU, not compiled and in
float32 on a CPU, as its README runs it. Other flags are train.py's, such as --n_layer 6 or --optimizer adamw.

B rows, T positions, C width, V vocabulary
"""
import contextlib
import importlib.util
import itertools
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace

# isort: off  data silences a warning of torch's, and so comes before it
from data import VOCAB_SIZE, Flag, fail, make_rng, open_corpus
from experiments.flags import parse_with_train_flags
import sample
import train
from model import ModelConfig, Transformer
from objectives import OBJECTIVES, Draft, find_use, get_objective
from run import GraphedStep, build, for_inference, get_config, load_run, preserve_torch_state, run_program, use_device
import torch
from torch.utils.flop_counter import FlopCounterMode

FLAGS = {
    "parts": Flag("train,decode", "train, decode or loss (seconds of training to a loss), separated by commas"),
    "objectives": Flag(",".join(OBJECTIVES), "for train; decode and loss use the first"),
    "repeats": Flag(5, "repetitions of each measurement", 1, 10000),
    "steps": Flag(4, "for train: training steps of a repetition", 1, 10000),
    "new": Flag(150, "for decode: bytes of a repetition", 1, 100000),
    "compile": Flag(False, "also measure it compiled"),
    "cuda_graph": Flag(False, "also measure it captured in a CUDA graph, on a GPU"),
    "nanogpt": Flag("", "folder of a checkout of karpathy/nanoGPT"),
    "run": Flag("", "for decode: a trained run, which drafts where it can"),
    "peer_iters": Flag(0, "for loss: nanoGPT's steps; 0: its own 2000 on a CPU, 5000 on a GPU", 0, 1 << 40),
}
RESERVED = {"objective", "seed", "out_dir", "resume", "init_from"}      # of train.py's flags


def interleave(sides, repeats, device):  # {name: function} -> {name: median seconds}
    """The time of a function that returns a number is divided by that number."""
    times = {name: [] for name in sides}
    for i in range(repeats + 1):
        for name, side in sides.items():
            synchronize(device)
            begin = time.perf_counter()
            units = side()
            synchronize(device)
            seconds = time.perf_counter() - begin
            if i > 0:                           # the first round warms up
                times[name].append(seconds / units if isinstance(units, int) else seconds)
    return {name: statistics.median(t) for name, t in times.items()}


def synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def gemm(device, dtype):  # -> a function that multiplies square matrices and returns FLOPs
    """What FLOP/s are compared with: what this machine reaches on the kindest of inputs, in the same run."""
    n, times = (8192, 20) if device.type == "cuda" else (1024, 8)
    a = torch.randn(n, n, device=device).to(dtype)
    b = torch.randn(n, n, device=device).to(dtype)

    def side():
        for _ in range(times):
            a @ b
        return times * 2 * n ** 3
    return side


def count_flops(hp):  # -> FLOPs of the products of a micro-batch's forward and backward pass, as they are computed
    """Of any blocks. What a mask hides counts all the same, except for what attend_causal_halves leaves out of causal
    rows; a GPU's kernels leave out more. In eager mode: on a CPU only positions with a target have logits; compiled and
    on a GPU all have."""
    cpu = Namespace(**vars(hp) | {"device": "cpu"})
    objective = get_objective(cpu)
    model = build(cpu)
    batch = train.draw_batch(objective, random_corpus(cpu), "train", hp.batch_size, "flops", cpu)
    if hp.device != "cpu":                      # without values nothing is computed; a counter stops FlexAttention
        model = model.to("meta")
        batch = {k: v if isinstance(v, int) else v.to("meta") for k, v in batch.items()}
    if model.ngrams is not None:                # whose lookups have gradients in training
        model.ngrams.table.requires_grad_()
    with FlopCounterMode(display=False) as counter:
        sum(objective.loss(model, batch, hp).values()).backward()
    return counter.get_total_flops()


def random_corpus(hp):
    text = torch.randint(1, 256, (1 << 20,), generator=make_rng("bench"), dtype=torch.uint8)
    text = text.to(hp.device if "cuda" in hp.device else "cpu")
    return [dict(name="random", weight=1.0, train=text, val=text)]


def settings(flags, name, *more):  # -> train.py's settings
    return get_config(["--objective", name, *flags.rest, *more])


def make_step(hp):  # -> a function that takes one training step, or None where torch cannot compile
    s = train.prepare(get_objective(hp), random_corpus(hp), hp)
    numbers = itertools.count()
    if hp.compile:
        eager_loss = s.loss
        s.loss = train.compile_loss(s)
        if s.loss is eager_loss:
            return None

    def step_fn():
        return train.training_step(s)
    if hp.cuda_graph:
        step_fn = GraphedStep(step_fn, [s.g])

    def step():
        train.load_step_inputs(s, next(numbers))
        step_fn()
    if hp.cuda_graph:                           # settle and capture before any clock runs
        for _ in range(4):
            step()
    return step


# ---- nanoGPT

def load_nanogpt(folder):  # -> its model.py as a module
    path = os.path.join(folder, "model.py")
    if not os.path.isfile(path):
        fail(f"--nanogpt {folder}: has no model.py. Try the folder of a checkout of karpathy/nanoGPT")
    spec = importlib.util.spec_from_file_location("nanogpt_model", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def with_torch_defaults(side):  # -> the same function; nanoGPT leaves alone the global switches that we set
    @preserve_torch_state()
    def run():
        torch.set_float32_matmul_precision("highest")
        torch.backends.cuda.enable_cudnn_sdp(True)
        return side()
    return run


def nanogpt_model(folder, hp, vocab=VOCAB_SIZE):  # -> the model, the context in which its own programs call it
    module = load_nanogpt(folder)
    cuda = hp.device.startswith("cuda")
    dropout = 0.2 if cuda and vocab != VOCAB_SIZE else 0.0      # as in its configurations
    config = module.GPTConfig(block_size=hp.block_size, vocab_size=vocab, n_layer=hp.n_layer, n_head=hp.n_head,
                              n_embd=hp.n_embd, dropout=dropout, bias=False)
    context = torch.autocast("cuda", torch.bfloat16) if cuda else contextlib.nullcontext()
    return module.GPT(config).to(hp.device), context


class NanoGPTAdapter:
    """nanoGPT's model, called as sample.score calls ours."""

    def __init__(self, model):
        self.model = model
        self.embed = model.transformer.wte

    def __call__(self, x, prefix, doc):
        return self.model(x, x.contiguous())[0]                 # with targets it returns all logits

    def logits(self, logits):
        return logits


def constant_rate(i):
    return 1e-3


def nanogpt_step(folder, hp, text=None, rate=constant_rate, vocab=VOCAB_SIZE):  # -> function that takes a step, model
    """Its way: random windows, AdamW with weight decay .1, clipping at 1, gradients set to None."""
    device = torch.device(hp.device)
    model, context = nanogpt_model(folder, hp, vocab)
    opt = model.configure_optimizers(0.1, 1e-3, (0.9, 0.99), device.type)
    forward = torch.compile(model) if device.type == "cuda" else model
    if text is None:
        text = torch.randint(0, 256, (1 << 20,), generator=make_rng("bench"))
    text = text.long()
    B, T = hp.batch_size, hp.block_size
    numbers = itertools.count()

    def step():
        lr = rate(next(numbers))
        for group in opt.param_groups:
            group["lr"] = lr
        starts = torch.randint(len(text) - T, (B,))
        x = torch.stack([text[i:i + T] for i in starts])
        y = torch.stack([text[i + 1:i + 1 + T] for i in starts])
        if device.type == "cuda":
            x = x.pin_memory().to(device, non_blocking=True)
            y = y.pin_memory().to(device, non_blocking=True)
        with context:
            _, loss = forward(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad(set_to_none=True)
    return step, model


# ---- parts: (flags, settings of the first objective, names of objectives) -> prints

def bench_train(flags, hp, names):
    """Positions per second of every objective, and the share of a large product's FLOP/s that they reach."""
    ways = {"": []}                             # {what is added to a name: flags}
    if flags.compile:
        ways[" compiled"] = ["--compile"]
    if flags.cuda_graph:
        ways[" captured"] = ["--cuda_graph"]
    if flags.compile and flags.cuda_graph:
        ways[" both"] = ["--compile", "--cuda_graph"]
    hps = {name + way: settings(flags, name, *more) for name in names for way, more in ways.items()}
    if hp.optimizer == "adamw":                 # the default's figure beside
        hps[f"{names[0]}, muon"] = settings(flags, names[0], "--optimizer", "muon")
    steps, flops, rows = {}, {}, {}
    for name, its_hp in hps.items():
        step = make_step(its_hp)
        if step:
            steps[name] = step
            flops[name] = count_flops(its_hp)
            rows[name] = its_hp.batch_size * its_hp.accum
    if flags.nanogpt:
        step, _ = nanogpt_step(flags.nanogpt, hp)
        steps["nanoGPT"] = with_torch_defaults(step)
        rows["nanoGPT"] = hp.batch_size

    def repeated(step):  # -> a function that takes --steps steps, and returns how many
        def side():
            for _ in range(flags.steps):
                step()
            return flags.steps
        return side
    sides = {name: repeated(step) for name, step in steps.items()}
    device = torch.device(hp.device)
    sides["GEMM"] = gemm(device, getattr(torch, hp.dtype))
    seconds = interleave(sides, flags.repeats, device)
    rate = 1 / seconds.pop("GEMM")
    speed = {name: rows[name] * hp.block_size / s for name, s in seconds.items()}

    print(f"GEMM probe, {hp.dtype}: {rate / 1e9:.0f} GFLOP/s")
    peer = "  to nanoGPT" if flags.nanogpt else ""
    print(f"{'training':20s} {'positions/s':>12s} {'to ' + names[0]:>14s} {'of GEMM':>8s}{peer}")
    for name, v in speed.items():
        share = f"{flops[name] * hp.accum / seconds[name] / rate:8.1%}" if name in flops else ""
        ratio = f" {v / speed['nanoGPT']:11.2f}" if flags.nanogpt else ""
        print(f"{name:20s} {v:12.0f} {v / speed[names[0]]:14.2f} {share:>8s}{ratio}")


def load_decoder(flags, hp, name):  # -> objective, model, settings, prompt (ids)
    """A trained run, or a model of random weights: at initialization every byte is equally likely, EOT too."""
    if flags.run:
        model, hp, ckpt = load_run(flags.run, hp.device, hp.dtype)
        return get_objective(hp), model, hp, ckpt["held_out"][:hp.block_size // 2].tolist()
    objective = OBJECTIVES[name]
    torch.manual_seed(1)
    config = ModelConfig(hp.n_layer, hp.n_head, hp.n_embd, n_outputs=objective.n_outputs, ngram_rows=hp.ngram_rows)
    model = Transformer(config, getattr(torch, hp.dtype)).to(hp.device)
    for p in model.requires_grad_(False).parameters():
        p.normal_(0, 0.05)
    for_inference(model)
    torch.backends.cuda.enable_cudnn_sdp(False)                 # as load_run does
    prompt = torch.randint(1, 256, (hp.block_size // 2,), generator=make_rng("bench")).tolist()
    return objective, model, hp, prompt


def bench_decode(flags, hp, names):
    """Bytes per second of a single sample: plain, compiled, speculated, both."""
    objective, model, hp, prompt = load_decoder(flags, hp, names[0])
    T = hp.block_size
    x = torch.tensor([prompt], device=hp.device)
    draft = find_use(objective, Draft)
    drafter = draft.make_drafter(model, hp) if draft and model.heads else None
    numbers = itertools.count()
    stats = []

    def decode(compiled=None, seed=None, temperature=0.8):
        gens = [make_rng(seed or f"decode,{next(numbers)}")]
        written = sample.generate(model, x, flags.new, T, gens, compiled=compiled, temperature=temperature)
        return [int(b) for b in written]

    def speculate(compiled=None, seed=None, temperature=0.8, stats=stats):
        g = make_rng(seed or f"decode,{next(numbers)}")
        return [*sample.speculate(model, drafter, prompt, flags.new, T, g, stats, compiled, temperature=temperature)]
    sides = {"plain": lambda: len(decode())}
    compiled = sample.compile_step(model, 1, T) if flags.compile else None
    if compiled:                                # what does not compile has no side
        sides["compiled"] = lambda: len(decode(compiled))
    if drafter:
        sides["speculated"] = lambda: len(speculate())
    both = None
    if drafter and flags.compile:
        both = sample.compile_step(model, 1, T, drafter.draft_features, drafter.k + 1)
    if both:
        sides["both"] = lambda: len(speculate(both))
    if flags.nanogpt:
        nanogpt, context = nanogpt_model(flags.nanogpt, hp)
        nanogpt.eval()

        def generate():
            with context:
                return nanogpt.generate(x, flags.new, temperature=0.8).size(1) - len(prompt)
        sides["nanoGPT"] = with_torch_defaults(generate)
    speed = {name: 1 / s for name, s in interleave(sides, flags.repeats, x.device).items()}

    peer = "  to nanoGPT" if flags.nanogpt else ""
    print(f"{'decoding':12s} {'bytes/s':>8s} {'to plain':>9s}{peer}   batch 1, {hp.dtype}, a prompt of {len(prompt)}, "
          f"{hp.n_layer} layers, width {hp.n_embd}")
    for name, v in speed.items():
        ratio = f" {v / speed['nanoGPT']:11.1f}" if flags.nanogpt else ""
        print(f"{name:12s} {v:8.0f} {v / speed['plain']:9.2f}{ratio}")
    if stats:
        plain = decode(seed="greedy", temperature=0)
        drafted = speculate(seed="greedy", temperature=0, stats=None)
        differ = sum(a != b for a, b in zip(plain, drafted)) + abs(len(plain) - len(drafted))
        print(f"speculation: {sum(kept + 1 for _, kept in stats) / len(stats):.2f} bytes per pass; at temperature 0 "
              f"{differ} of {len(plain)} bytes differ from plain decoding")


def bench_loss(flags, hp, names):
    """Seconds to nats per byte of the validation split, in disjoint windows of a block, each after one byte of context;
    our seeds, then nanoGPT once, and whether our median loss is no worse than its."""
    exact = [name for name, objective in OBJECTIVES.items() if objective.bpb == "loss"]
    if len(hp.data) > 1 or hp.data == ["-"] or hp.objective not in exact:
        fail(f"--parts loss: trains {exact[0]} on one text. Try --objectives {exact[0]}, and --data with one file")
    [source] = open_corpus(hp.data)
    source["train"] = source["train"][:hp.train_bytes or None]
    T = hp.block_size

    def nats(model, text, doc_mask=False):
        return sample.score(model, text, T, T, doc_mask) * math.log(2) / len(text)
    print(f"{'loss':12s} {'nats':>8s} {'process, s':>11s} {'loop, s':>8s}")
    ours = []                                   # (nats, seconds of the process, of the loop)
    for seed in range(1, flags.repeats + 1):
        with tempfile.TemporaryDirectory() as folder:
            out = os.path.join(folder, "run")
            seconds = train_process(flags, hp, seed, out)
            model, _, ckpt = load_run(out, hp.device, "float32")
            ours.append((nats(model, source["val"], hp.doc_mask), seconds, ckpt["seconds"]))
            print(f"seed {seed:<7d} {ours[-1][0]:8.4f} {seconds:11.1f} {ckpt['seconds']:8.1f}", flush=True)
    loss, process, loop = (statistics.median(column) for column in zip(*ours))
    print(f"{'median':12s} {loss:8.4f} {process:11.1f} {loop:8.1f}")
    if not flags.nanogpt:
        return
    used = torch.cat((source["train"], source["val"])).unique().long()              # its vocabulary
    table = torch.zeros(256, dtype=torch.uint8).index_copy_(0, used, torch.arange(len(used), dtype=torch.uint8))
    n, peer, seconds = train_nanogpt(flags, hp, table[source["train"].long()], len(used))
    peer_loss = nats(NanoGPTAdapter(peer), table[source["val"].long()])
    print(f"{'nanoGPT':12s} {peer_loss:8.4f} {'':11s} {seconds:8.1f}   {n} steps without evaluation, "
          f"{seconds / loop:.1f} times our loop, whose median loss is {'no worse' if loss <= peer_loss else 'worse'}")


def train_process(flags, hp, seed, out_dir):  # -> seconds of train.py as a process of its own
    words = list(flags.rest)
    if flags.compile:
        words.append("--compile")
    if flags.cuda_graph:
        words.append("--cuda_graph")
    command = [sys.executable, train.__file__, "--objective", hp.objective, "--eval_interval", str(hp.max_iters),
               *words, "--seed", str(seed), "--out_dir", out_dir]
    begin = time.perf_counter()
    done = subprocess.run(command, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    seconds = time.perf_counter() - begin
    if done.returncode:
        fail(f"--parts loss: {done.stderr.strip().splitlines()[-1].removeprefix('error: ')}")
    return seconds


def train_nanogpt(flags, hp, text, vocab):  # -> number of steps, the trained model, seconds of its loop
    """As in its config/train_shakespeare_char.py; on a CPU with its README's flags."""
    n = flags.peer_iters or (5000 if hp.device.startswith("cuda") else 2000)

    def rate(i):
        if i < 100:
            return 1e-3 * (i + 1) / 101
        return 1e-4 + 4.5e-4 * (1 + math.cos(math.pi * (i - 100) / max(1, n - 100)))
    step, model = nanogpt_step(flags.nanogpt, hp, text, rate, vocab)

    def loop():
        for _ in range(n):
            step()
    begin = time.perf_counter()
    with_torch_defaults(loop)()
    synchronize(torch.device(hp.device))
    seconds = time.perf_counter() - begin
    return n, model.eval(), seconds


PARTS = dict(train=bench_train, decode=bench_decode, loss=bench_loss)


def check_names(flag, names, known):
    for name in names:
        if name not in known:
            fail(f"--{flag} {name}: unknown. Try some of {','.join(known)}")


@preserve_torch_state()
def main(argv=None):  # -> exit code
    argv = sys.argv[1:] if argv is None else argv
    flags, rest = parse_with_train_flags("python -m experiments.bench", __doc__, FLAGS, RESERVED, argv)
    parts = flags.parts.split(",")
    names = flags.objectives.split(",")
    check_names("parts", parts, PARTS)
    check_names("objectives", names, OBJECTIVES)
    hp = get_config(["--objective", names[0], *rest])
    if flags.nanogpt:
        load_nanogpt(flags.nanogpt)             # fails now, not after a training
    # all in rows of the first objective's number and length
    flags.rest = [*rest, "--batch_size", str(hp.batch_size), "--block_size", str(hp.block_size)]
    print(f"torch {torch.__version__}, {hp.device}, {torch.get_num_threads()} threads, "
          f"{use_device(torch.device(hp.device))}; {hp.n_layer} layers, width {hp.n_embd}, block {hp.block_size}, "
          f"batch {hp.batch_size}")
    for part in parts:
        PARTS[part](flags, hp, names)
    return 0


if __name__ == "__main__":
    run_program(main)
