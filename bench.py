"""Measure speed, as ratios of sides that take turns in one run.

    python bench.py                                     training and decoding at the default size
    python bench.py --parts train --compile --cuda_graph --objectives clm       eager, compiled, captured, both
    python bench.py --parts decode --n_layer 6 --n_head 6 --n_embd 384 --nanogpt ../nanoGPT
    python bench.py --parts decode --run out/mtp        a trained run, for self-speculation
    python bench.py --parts loss --data book.txt --block_size 64 --batch_size 12 --nanogpt ../nanoGPT

Every figure is the median of --repeats runs; the sides of a ratio are interleaved, so that a machine whose
speed drifts slows both. Data are random bytes. --nanogpt measures a checkout of karpathy/nanoGPT beside ours:
its model, optimizer and way to draw a batch; on a GPU compiled, in bfloat16, on a CPU eager, in float32, as its
train.py has them. Flags that are not listed below are train.py's, such as --n_layer 6 or --optimizer adamw.
"""
# B rows, T positions, C width, V vocabulary
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
from data import V, fail, generator, open_corpus
import sample
import train
from model import Sizes, Transformer
from objectives import OBJECTIVES, find_objective
from run import Captured, build, for_inference, get_config, load_run, parse_beside, process_as_it_was, use_device
import torch
from torch.utils.flop_counter import FlopCounterMode

FLAGS = {
    "parts": ("train,decode", "what to measure, separated by commas; loss too, which trains"),
    "objectives": (",".join(OBJECTIVES), "for train"),
    "repeats": (5, "runs of each side", 1, 10000),
    "steps": (4, "training steps of a run", 1, 10000),
    "new": (150, "bytes of a decoding run", 1, 100000),
    "compile": (False, "compiled sides too"),
    "cuda_graph": (False, "captured sides too, on a GPU"),
    "nanogpt": ("", "folder of a checkout of karpathy/nanoGPT"),
    "run": ("", "for decode: a trained run, which drafts where it can"),
    "peer_iters": (0, "for loss: nanoGPT's steps, 0 for those of its configuration", 0, 1 << 40),
}
OWN = {"objective", "seed", "out_dir", "resume", "init_from"}   # of train.py's flags


def take_turns(sides, repeats, device):  # {name: function} -> {name: median seconds}
    """A function that returns a number is charged for each of so many units."""
    times = {name: [] for name in sides}
    for i in range(repeats + 1):                # the first round warms up
        for name, side in sides.items():
            synchronize(device)
            begin = time.perf_counter()
            units = side()
            synchronize(device)
            times[name] += [(time.perf_counter() - begin) / (units if isinstance(units, int) else 1)] if i else []
    return {name: statistics.median(t) for name, t in times.items()}


def synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def gemm(device, dtype):  # -> a function that multiplies square matrices and returns FLOPs
    """The yardstick for FLOP/s: what this machine reaches on the kindest of inputs, in the same run."""
    n, times = (8192, 20) if device.type == "cuda" else (1024, 8)
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))

    def side():
        for _ in range(times):
            a @ b
        return times * 2 * n ** 3
    return side


def count_flops(hp):  # -> FLOPs of the products of a micro-batch's forward and backward pass, as they are computed
    """Whatever the blocks are. What a mask hides counts all the same, but of causal rows what attend_causal leaves out;
    a GPU's kernels leave out more. In eager mode: on a CPU logits of targets alone, which compiled and on a GPU are
    those of all positions."""
    cpu = Namespace(**vars(hp) | {"device": "cpu"})
    entry, model = find_objective(cpu), build(cpu)
    batch = train.draw_batch(entry, random_corpus(cpu), "train", hp.batch_size, "flops", cpu)
    if hp.device != "cpu":                      # without values nothing is computed; a counter stops FlexAttention
        model = model.to("meta")
        batch = {k: v if isinstance(v, str) else v.to("meta") for k, v in batch.items()}
    if model.ngrams is not None:                # whose lookups have gradients in training
        model.ngrams.table.requires_grad_()
    with FlopCounterMode(display=False) as counter:
        sum(entry["loss"](model, batch, hp).values()).backward()
    return counter.get_total_flops()


def random_corpus(hp):
    text = torch.randint(1, 256, (1 << 20,), generator=generator("bench"), dtype=torch.uint8)
    text = text.to(hp.device if "cuda" in hp.device else "cpu")
    return [dict(name="random", weight=1.0, train=text, val=text)]


def settings(flags, name, *more):  # -> train.py's settings
    return get_config(["--objective", name, *flags.rest, *more])


def training_step(hp):  # -> a function that takes one step, or None where torch cannot compile
    s = train.prepare(find_objective(hp), random_corpus(hp), hp)
    count, plain = itertools.count(), s.loss
    if hp.compile:
        s.loss = train.compile_loss(s)
        if s.loss is plain:
            return None
    take = Captured(lambda: train.training_step(s), [s.g]) if hp.cuda_graph else lambda: train.training_step(s)

    def step():
        train.set_step(s, next(count))
        take()
    for _ in range(4 if hp.cuda_graph else 0):  # settle and capture before any clock runs
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


def as_torch_has_it(side):  # nanoGPT leaves alone what we set
    @process_as_it_was()
    def run():
        torch.set_float32_matmul_precision("highest")
        torch.backends.cuda.enable_cudnn_sdp(True)
        return side()
    return run


def nanogpt_model(folder, hp, vocab=V):  # -> the model, the context in which its train.py and sample.py call it
    module, cuda = load_nanogpt(folder), hp.device.startswith("cuda")
    dropout = 0.2 if cuda and vocab != V else 0.0               # as in its configurations
    sizes = module.GPTConfig(block_size=hp.block_size, vocab_size=vocab, n_layer=hp.n_layer, n_head=hp.n_head,
                             n_embd=hp.n_embd, dropout=dropout, bias=False)
    context = torch.autocast("cuda", torch.bfloat16) if cuda else contextlib.nullcontext()
    return module.GPT(sizes).to(hp.device), context


def nanogpt_step(folder, hp, text=None, rate=lambda i: 1e-3, vocab=V):  # -> function that takes a step, model
    """Its way: random windows, AdamW with weight decay .1, clipping at 1, gradients set to None."""
    device, (model, context) = torch.device(hp.device), nanogpt_model(folder, hp, vocab)
    opt = model.configure_optimizers(0.1, 1e-3, (0.9, 0.99), device.type)
    forward = torch.compile(model) if device.type == "cuda" else model
    text = torch.randint(0, 256, (1 << 20,), generator=generator("bench")) if text is None else text.long()
    B, T, count = hp.batch_size, hp.block_size, itertools.count()

    def step():
        lr = rate(next(count))
        for group in opt.param_groups:
            group["lr"] = lr
        at = torch.randint(len(text) - T, (B,))
        x, y = (torch.stack([text[i + k:i + k + T] for i in at]) for k in (0, 1))
        if device.type == "cuda":
            x, y = (t.pin_memory().to(device, non_blocking=True) for t in (x, y))
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
    ways = {"": [], " compiled": ["--compile"], " captured": ["--cuda_graph"], " both": ["--compile", "--cuda_graph"]}
    asked = {f"--{way}" for way in ("compile", "cuda_graph") if getattr(flags, way)}
    ways = {way: more for way, more in ways.items() if set(more) <= asked}
    hps = {name + way: settings(flags, name, *more) for name in names for way, more in ways.items()}
    if hp.optimizer == "adamw":                 # the default's figure beside
        hps[f"{names[0]}, muon"] = settings(flags, names[0], "--optimizer", "muon")
    steps = {name: step for name, hp in hps.items() if (step := training_step(hp))}
    flops = {name: count_flops(hps[name]) for name in steps}
    rows = {name: hps[name].batch_size * hps[name].accum for name in steps}
    if flags.nanogpt:
        steps["nanoGPT"], rows["nanoGPT"] = as_torch_has_it(nanogpt_step(flags.nanogpt, hp)[0]), hp.batch_size
    sides = {name: lambda step=step: len([step() for _ in range(flags.steps)]) for name, step in steps.items()}
    device = torch.device(hp.device)
    seconds = take_turns(sides | {"GEMM": gemm(device, getattr(torch, hp.dtype))}, flags.repeats, device)
    rate = 1 / seconds.pop("GEMM")
    speed = {name: rows[name] * hp.block_size / s for name, s in seconds.items()}

    print(f"GEMM probe, {hp.dtype}: {rate / 1e9:.0f} GFLOP/s")
    peer = "  to nanoGPT" if flags.nanogpt else ""
    print(f"{'training':20s} {'positions/s':>12s} {'to ' + names[0]:>14s} {'of GEMM':>8s}{peer}")
    for name, v in speed.items():
        share = f"{flops[name] * hp.accum / seconds[name] / rate:8.1%}" if name in flops else ""
        ratio = f" {v / speed['nanoGPT']:11.2f}" if flags.nanogpt else ""
        print(f"{name:20s} {v:12.0f} {v / speed[names[0]]:14.2f} {share:>8s}{ratio}")


def bench_decode(flags, hp, names):
    """Bytes per second of a single sample: plain, compiled, speculated, both."""
    if flags.run:
        model, hp, ckpt = load_run(flags.run, hp.device, hp.dtype)
        entry, T = find_objective(hp), hp.block_size
        prompt = ckpt["held_out"][:T // 2].tolist()
    else:
        entry, T, dtype = OBJECTIVES[names[0]], hp.block_size, getattr(torch, hp.dtype)
        torch.manual_seed(1)
        sizes = Sizes(hp.n_layer, hp.n_head, hp.n_embd, n_outputs=entry["n_outputs"], ngram_rows=hp.ngram_rows)
        model = Transformer(sizes, dtype).to(hp.device)
        for p in model.requires_grad_(False).parameters():      # at zero-init every byte is alike, EOT too
            p.normal_(0, 0.05)
        for_inference(model)
        torch.backends.cuda.enable_cudnn_sdp(False)             # as load_run does
        prompt = torch.randint(1, 256, (T // 2,), generator=generator("bench")).tolist()
    x, seeds, tally = torch.tensor([prompt], device=hp.device), itertools.count(), []
    drafter = entry["drafter"] and model.heads and entry["drafter"](model, hp)

    def decode(step=None, seed=None, temperature=0.8):
        gens = [generator(seed or f"decode,{next(seeds)}")]
        return [int(b) for b in sample.generate(model, x, flags.new, T, gens, step=step, temperature=temperature)]

    def speculate(step=None, seed=None, temperature=0.8, tally=tally):
        g = generator(seed or f"decode,{next(seeds)}")
        return list(sample.speculate(model, drafter, prompt, flags.new, T, g, tally, step, temperature=temperature))
    sides = {"plain": lambda: len(decode())}
    fast = flags.compile and sample.fast_step(model, 1, T)
    if fast:                                    # what does not compile has no side
        sides["compiled"] = lambda: len(decode(fast))
    if drafter:
        sides["speculated"] = lambda: len(speculate())
    both = drafter and flags.compile and sample.fast_step(model, 1, T, drafter.tail, drafter.k + 1)
    if both:
        sides["both"] = lambda: len(speculate(both))
    if flags.nanogpt:
        theirs, context = nanogpt_model(flags.nanogpt, hp)
        theirs.eval()

        def generate():
            with context:
                return theirs.generate(x, flags.new, temperature=0.8).size(1) - len(prompt)
        sides["nanoGPT"] = as_torch_has_it(generate)
    speed = {name: 1 / s for name, s in take_turns(sides, flags.repeats, x.device).items()}
    peer = "  to nanoGPT" if flags.nanogpt else ""
    print(f"{'decoding':12s} {'bytes/s':>8s} {'to plain':>9s}{peer}   batch 1, {hp.dtype}, a prompt of {len(prompt)}, "
          f"{hp.n_layer} layers, width {hp.n_embd}")
    for name, v in speed.items():
        ratio = f" {v / speed['nanoGPT']:11.1f}" if flags.nanogpt else ""
        print(f"{name:12s} {v:8.0f} {v / speed['plain']:9.2f}{ratio}")
    if tally:
        plain, drafted = decode(seed="greedy", temperature=0), speculate(seed="greedy", temperature=0, tally=None)
        differ = sum(a != b for a, b in zip(plain, drafted)) + abs(len(plain) - len(drafted))
        print(f"speculation: {sum(kept + 1 for _, kept in tally) / len(tally):.2f} bytes a pass; at temperature 0 "
              f"{differ} of {len(plain)} bytes differ from plain decoding")


def bench_loss(flags, hp, names):
    """Seconds to nats per byte of the validation split, in disjoint cold windows of a block; our seeds, then
    nanoGPT once, and whether our median loss is no worse than its."""
    if len(hp.data) > 1 or hp.data == ["-"] or find_objective(hp)["bpb"] != "loss":
        fail("--parts loss: trains clm on one text. Try --objectives clm, and --data with one file")
    [source], T = open_corpus(hp.data), hp.block_size
    source["train"] = source["train"][:hp.train_bytes or None]

    def nats(model, text):
        return sample.score(model, text, T, T) * math.log(2) / len(text)
    print(f"{'loss':12s} {'nats':>8s} {'process, s':>11s} {'loop, s':>8s}")
    ours = []
    for seed in range(1, flags.repeats + 1):
        with tempfile.TemporaryDirectory() as folder:
            out = os.path.join(folder, "run")
            words = [*flags.rest, *(f"--{way}" for way in ("compile", "cuda_graph") if getattr(flags, way))]
            begin = time.perf_counter()
            done = subprocess.run([sys.executable, train.__file__, "--eval_interval", str(hp.max_iters), *words,
                                   "--seed", str(seed), "--out_dir", out],
                                  text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
            whole = time.perf_counter() - begin
            if done.returncode:
                fail(f"--parts loss: {done.stderr.strip().splitlines()[-1].removeprefix('error: ')}")
            model, _, ckpt = load_run(out, hp.device, "float32")
            ours.append((nats(model, source["val"]), whole, ckpt["seconds"]))
            print(f"seed {seed:<7d} {ours[-1][0]:8.4f} {whole:11.1f} {ckpt['seconds']:8.1f}", flush=True)
    medians = [statistics.median(column) for column in zip(*ours)]
    print(f"{'median':12s} {medians[0]:8.4f} {medians[1]:11.1f} {medians[2]:8.1f}")
    if not flags.nanogpt:
        return
    # its config/train_shakespeare_char.py; on a CPU with its README's flags
    n = flags.peer_iters or (5000 if hp.device.startswith("cuda") else 2000)

    def rate(i):
        fall = 1e-4 + 4.5e-4 * (1 + math.cos(math.pi * (i - 100) / max(1, n - 100)))
        return 1e-3 * (i + 1) / 101 if i < 100 else fall
    used = torch.cat((source["train"], source["val"])).unique().long()              # its vocabulary
    numbers = torch.arange(len(used), dtype=torch.uint8)
    table = torch.zeros(256, dtype=torch.uint8).index_copy_(0, used, numbers)
    step, theirs = nanogpt_step(flags.nanogpt, hp, table[source["train"].long()], rate, len(used))
    begin = time.perf_counter()
    as_torch_has_it(lambda: [step() for _ in range(n)])()
    synchronize(torch.device(hp.device))
    seconds = time.perf_counter() - begin
    theirs.eval()

    class Theirs:                               # as sample.score calls a model
        embed = theirs.transformer.wte

        def __call__(self, x, mask, doc):
            return theirs(x, x.contiguous())[0]

        def logits(self, logits):
            return logits
    loss = nats(Theirs(), table[source["val"].long()])
    print(f"{'nanoGPT':12s} {loss:8.4f} {'':11s} {seconds:8.1f}   {n} steps without evaluation, "
          f"{seconds / medians[2]:.1f} times our loop, whose median loss is "
          f"{'no worse' if medians[0] <= loss else 'worse'}")


PARTS = dict(train=bench_train, decode=bench_decode, loss=bench_loss)


@process_as_it_was()
def main(argv=None):
    flags, rest = parse_beside("bench.py", __doc__, FLAGS, OWN, sys.argv[1:] if argv is None else argv)
    names = flags.objectives.split(",")
    for words, known, flag in ((flags.parts.split(","), PARTS, "parts"), (names, OBJECTIVES, "objectives")):
        for name in words:
            if name not in known:
                fail(f"--{flag} {name}: unknown. Try some of {','.join(known)}")
    hp = get_config(["--objective", names[0], *rest])
    if flags.nanogpt:
        load_nanogpt(flags.nanogpt)             # fails now, not after a training
    # all in rows of the first objective's number and length
    flags.rest = [*rest, "--batch_size", str(hp.batch_size), "--block_size", str(hp.block_size)]
    print(f"torch {torch.__version__}, {hp.device}, {torch.get_num_threads()} threads, "
          f"{use_device(torch.device(hp.device))}; {hp.n_layer} layers, width {hp.n_embd}, block {hp.block_size}, "
          f"batch {hp.batch_size}")
    for part in flags.parts.split(","):
        PARTS[part](flags, hp, names)


if __name__ == "__main__":
    sys.exit(main())
