"""Measure speed, as ratios of sides that take turns in one run.

    python bench.py                                     training, batches, decoding and memory at the default size
    python bench.py --parts train --compile --cuda_graph --objectives clm       eager, compiled, captured, both
    python bench.py --parts decode --n_layer 6 --n_head 6 --n_embd 384 --nanogpt ../nanoGPT
    python bench.py --parts decode --run out/mtp        a trained run, for self-speculation
    python bench.py --parts loss --data book.txt --block_size 64 --batch_size 12 --nanogpt ../nanoGPT

Every figure is the median of --repeats runs; the sides of a ratio are interleaved, so that a machine whose speed
drifts slows both. Data are random bytes. --nanogpt measures a checkout of karpathy/nanoGPT beside ours: its model,
optimizer and way to draw a batch; on a GPU compiled, in bfloat16, as its train.py has them.
"""
# B rows, T positions, C width, L layers, V vocabulary
import argparse
import contextlib
import importlib.util
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time

import torch

import sample
import train
from data import V, generator
from model import Sizes, Transformer, pack_weights
from objectives import OBJECTIVES, electra_sizes

FLAGS = {
    "parts": ("train,batch,decode,memory", "what to measure, separated by commas; loss too, which trains"),
    "objectives": (",".join(OBJECTIVES), "for train and batch"),
    "n_layer": (4, "blocks"), "n_head": (4, "attention heads"), "n_embd": (128, "width"),
    "block_size": (256, "positions of a row"), "batch_size": (8, "rows of a batch"),
    "repeats": (5, "runs of each side"), "steps": (4, "training steps of a run"),
    "new": (150, "bytes of a decoding run"),
    "device": ("auto", "auto, cpu, cuda, mps"), "dtype": ("auto", "auto, float32, bfloat16"),
    "optimizer": ("muon", "muon or adamw, on our side"),
    "compile": (False, "compiled sides too"), "cuda_graph": (False, "captured sides too, on a GPU"),
    "data": ("", "for loss: the corpus"), "max_iters": (280, "for loss: our steps"),
    "peer_iters": (0, "for loss: nanoGPT's steps, 0 for those of its configuration"),
    "nanogpt": ("", "folder of a checkout of karpathy/nanoGPT"),
    "run": ("", "trained mtp run, for self-speculation"),
}


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


def copying(device):  # -> a function that copies memory and returns the bytes that it read
    a = torch.randn(1 << 24, device=device)
    return lambda: a.clone().numel() * 4


def transformer_flops(sizes, positions, pairs, logits):  # of one forward and backward pass, without embedding lookups
    """6 FLOPs a weight of every matrix and position; 12 L C for each pair of positions that see each other; the byte
    head at as many positions as have logits."""
    return (72 * sizes.n_layer * sizes.n_embd ** 2 * positions + 12 * sizes.n_layer * sizes.n_embd * pairs
            + 6 * sizes.vocab_size * sizes.n_embd * logits)


def step_flops(name, batch, hp):  # a micro-batch -> FLOPs of its forward and backward pass, exact for its masks
    """Of the transformer, the byte head, mtp's maps and electra's generator; not of readouts, nor of a fork's heads."""
    sizes, x, P = Sizes(hp.n_layer, hp.n_head, hp.n_embd), batch["inp"], batch["mask"]
    T, positions = x.size(-1), x.numel()
    P = torch.tensor({"causal": 0, "bidirectional": T}[P]) if isinstance(P, str) else P
    # the triangle of a causal row, and what the prefix sees ahead of it
    pairs = float((T * (T + 1) / 2 + P * (P - 1.0) / 2).mean()) * positions / T
    logits = {"contrastive": 0, "rotation": 0, "electra": 0, "mtp": positions * getattr(hp, "mtp_heads", 1)}
    logits = logits.get(name, positions)
    total = transformer_flops(sizes, positions, pairs, logits)
    if name == "mtp":
        total += 6 * (hp.mtp_heads - 1) * hp.n_embd ** 2 * positions
    if name == "electra":
        total += transformer_flops(electra_sizes(sizes, hp), positions, pairs, batch["at"].numel())
    return total


PASSED_ON = "n_layer", "n_head", "n_embd", "block_size", "batch_size", "device", "dtype", "optimizer"


def passed_on(flags):  # -> those of train.py's flags that bench.py has too
    return [word for flag in PASSED_ON for word in (f"--{flag}", str(getattr(flags, flag)))]


def settings(flags, name, *more):  # -> train.py's settings
    return train.get_config(["--objective", name, *passed_on(flags), *more])


def random_corpus(hp):
    text = torch.randint(1, 256, (1 << 20,), generator=generator("bench"), dtype=torch.uint8)
    text = text.to(hp.device if "cuda" in hp.device else "cpu")
    return [dict(name="random", weight=1.0, train=text, val=text)]


def mean_flops(name, hp, n=8):  # -> FLOPs of a step's forward and backward passes, over the first batches of a run
    run, corpus, rows, figures = train.members(hp), random_corpus(hp), lambda m: m["rows"], []
    for i in range(n):
        [batch] = train.draw_batches(run, corpus, "train", rows, f"{hp.seed},{i}", hp)
        figures.append(step_flops(name, {k: v if isinstance(v, str) else v.cpu() for k, v in batch.items()}, hp))
    return statistics.fmean(figures)


def training_step(hp):
    """-> a function that takes one step, and one that only makes its batch; None, None where torch cannot compile."""
    run, corpus = train.members(hp), random_corpus(hp)
    rows, count = lambda m: m["rows"], iter(range(1 << 40))
    s = train.prepare(run, corpus, hp, rows)
    take, stream = lambda: train.training_step(s, run, corpus, hp), torch.cuda.Stream() if hp.cuda_graph else None
    if hp.compile:
        first, plain = train.draw_batches(run, corpus, "train", rows, "1,0", hp), s["losses"]
        s["losses"] = train.compile_losses(run, s, first, hp)
        if plain is s["losses"]:
            return None, None
    def batch():
        train.set_step(s, run, corpus, rows, next(count), hp)
        return train.make_batches(run, corpus, "train", s["where"], s["gens"], hp)
    def step():
        train.set_step(s, run, corpus, rows, next(count), hp)
        take()
    # settle, then capture, in the order of train.train
    if hp.cuda_graph:
        for _ in range(train.WARM):
            train.set_step(s, run, corpus, rows, next(count), hp)
            train.aside(take, stream)
        train.set_step(s, run, corpus, rows, next(count), hp)
        take = train.capture(take, s["gens"])
    return step, batch


def load_nanogpt(folder):  # -> its model.py as a module
    """Exits with code 2 where there is no such checkout."""
    path = os.path.join(folder, "model.py")
    if not os.path.isfile(path):
        train.fail(f"--nanogpt {folder}: has no model.py. Try the folder of a checkout of karpathy/nanoGPT")
    spec = importlib.util.spec_from_file_location("nanogpt_model", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def at_highest(side):  # on the CPU nanoGPT leaves torch's default precision, we do not
    def run():
        precision = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        units = side()
        torch.set_float32_matmul_precision(precision)
        return units
    return run


def nanogpt_model(flags, device, vocab=V):  # -> the model, the context in which its train.py and sample.py call it
    module, cuda = load_nanogpt(flags.nanogpt), device.type == "cuda"
    dropout = 0.2 if cuda and vocab != V else 0.0               # as in its configurations
    sizes = module.GPTConfig(block_size=flags.block_size, vocab_size=vocab, n_layer=flags.n_layer, n_head=flags.n_head,
                             n_embd=flags.n_embd, dropout=dropout, bias=False)
    return module.GPT(sizes).to(device), torch.autocast("cuda", torch.bfloat16) if cuda else contextlib.nullcontext()


def nanogpt_step(flags, device, text=None, rate=lambda i: 1e-3, vocab=V):  # -> function that takes one step, model
    """Its way: random windows, AdamW with weight decay .1, clipping at 1, gradients set to None."""
    model, context = nanogpt_model(flags, device, vocab)
    # nanoGPT's own: weight decay .1, betas .9 and .99
    opt = model.configure_optimizers(0.1, 1e-3, (0.9, 0.99), device.type)
    forward = torch.compile(model) if device.type == "cuda" else model
    text = torch.randint(0, 256, (1 << 20,), generator=generator("bench")) if text is None else text.long()
    B, T, count = flags.batch_size, flags.block_size, iter(range(1 << 40))
    def step():
        lr = rate(next(count))
        for group in opt.param_groups:
            group["lr"] = lr
        at = torch.randint(len(text) - T, (B,))
        x, y = (torch.stack([text[i + k:i + k + T] for i in at]) for k in (0, 1))
        x, y = (t.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else t for t in (x, y))
        with context:
            _, loss = forward(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad(set_to_none=True)
    return step, model


def bench_train(flags, device, names):
    """Positions per second of every objective, and the share of a large product's FLOP/s that they reach."""
    # the sides: every objective in every way asked for
    ways = {"": [], " compiled": ["--compile"], " captured": ["--cuda_graph"], " both": ["--compile", "--cuda_graph"]}
    asked = {f"--{way}" for way in ("compile", "cuda_graph") if getattr(flags, way)}
    ways = {way: more for way, more in ways.items() if set(more) <= asked}
    hps = {name + way: settings(flags, name, *more) for name in names for way, more in ways.items()}
    if flags.optimizer == "adamw":              # the default's figure beside
        hps[f"{names[0]}, muon"] = settings(flags, names[0], "--optimizer", "muon")
    steps = {name: step for name, hp in hps.items() if (step := training_step(hp)[0])}
    flops = {name: mean_flops(hps[name].objective, hps[name]) for name in steps}
    if flags.nanogpt:
        steps["nanoGPT"] = at_highest(nanogpt_step(flags, device)[0])
    def side(step):
        def run():
            for _ in range(flags.steps):
                step()
            return flags.steps
        return run
    dtype = hps[names[0]].dtype
    sides = {name: side(step) for name, step in steps.items()} | {"GEMM": gemm(device, getattr(torch, dtype))}
    seconds = take_turns(sides, flags.repeats, device)
    rate, first = 1 / seconds.pop("GEMM"), "clm" if "clm" in names else names[0]

    peer, positions = "  to nanoGPT" if flags.nanogpt else "", flags.batch_size * flags.block_size
    print(f"GEMM probe, {dtype}: {rate / 1e9:.0f} GFLOP/s")
    print(f"{'training':20s} {'positions/s':>12s} {'to ' + first:>8s} {'of GEMM':>8s}{peer}")
    for name, s in seconds.items():
        share = f"{flops[name] / s / rate:8.1%}" if name in flops else ""
        ratio = f" {seconds['nanoGPT'] / s:11.2f}" if flags.nanogpt else ""
        print(f"{name:20s} {positions / s:12.0f} {seconds[first] / s:8.2f} {share:>8s}{ratio}")


def bench_memory(flags, device, names):
    """What the forward pass keeps for the backward pass, each storage once; on CUDA also the peak of a whole step."""
    s, cuda, mib = None, device.type == "cuda", 2 ** 20
    title = f"{'memory, MiB':20s} {'weights':>8s} {'optimizer':>10s} {'kept for backward':>18s}"
    print(title + (f" {'peak':>8s}" if cuda else ""))
    for name in names:
        hp, kept = settings(flags, name), {}
        run, corpus, rows = train.members(hp), random_corpus(hp), lambda m: m["rows"]
        if cuda:
            s = None                            # the one before it, and its peak
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        s = train.prepare(run, corpus, hp, rows)
        train.set_step(s, run, corpus, rows, 0, hp)
        # parameters are held anyway: only what the forward pass adds is counted
        own = {p.untyped_storage().data_ptr() for p in s["params"]}
        def keep(t):
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            train.training_step(s, run, corpus, hp)
        states = [t for state in s["opt"]["adamw"].state.values() for t in state.values()]
        states += [momentum for _, momentum in s["opt"]["muon"].values()]
        weights, optimizer = (sum(t.numel() * t.element_size() for t in some) / mib for some in (s["params"], states))
        activations = sum(n for at, n in kept.items() if at not in own) / mib
        peak = f" {torch.cuda.max_memory_allocated(device) / mib:8.0f}" if cuda else ""
        print(f"{name:20s} {weights:8.1f} {optimizer:10.1f} {activations:18.1f}{peak}")


def bench_loss(flags, device, names):
    """Seconds to nats per byte of the validation split, in disjoint cold windows of a block; our seeds, then nanoGPT
    once, and whether our median loss is no worse than its."""
    if not flags.data:
        train.fail("--parts loss: trains on a text. Try --data with a file")
    [source] = train.open_corpus([flags.data])
    score = lambda model, text: sample.score(model, text, flags.block_size, flags.block_size) * math.log(2) / len(text)
    print(f"{'loss':12s} {'nats':>8s} {'process, s':>11s} {'loop, s':>8s}")
    ours = []
    for seed in range(1, flags.repeats + 1):
        with tempfile.TemporaryDirectory() as folder:
            steps, ways = str(flags.max_iters), [f"--{way}" for way in ("compile", "cuda_graph") if getattr(flags, way)]
            argv = ["--data", flags.data, "--seed", str(seed), "--max_iters", steps, "--eval_interval", steps,
                    "--out_dir", os.path.join(folder, "run"), *passed_on(flags), *ways]
            begin = time.perf_counter()
            done = subprocess.run([sys.executable, train.__file__, *argv], text=True,
                                  stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
            whole = time.perf_counter() - begin
            if done.returncode:
                train.fail(f"--parts loss: {done.stderr.strip().splitlines()[-1].removeprefix('error: ')}")
            model, _, _, ckpt = sample.load_run(os.path.join(folder, "run"), flags.device, "float32")
            ours.append((score(model, source["val"]), whole, ckpt["seconds"]))
            print(f"seed {seed:<7d} {ours[-1][0]:8.4f} {whole:11.1f} {ckpt['seconds']:8.1f}", flush=True)
    medians = [statistics.median(column) for column in zip(*ours)]
    print(f"{'median':12s} {medians[0]:8.4f} {medians[1]:11.1f} {medians[2]:8.1f}")
    if flags.nanogpt:                           # its config/train_shakespeare_char.py; on a CPU with its README's flags
        n = flags.peer_iters or (5000 if device.type == "cuda" else 2000)
        falling = lambda i: 1e-4 + 4.5e-4 * (1 + math.cos(math.pi * (i - 100) / max(1, n - 100)))
        rate = lambda i: 1e-3 * (i + 1) / 101 if i < 100 else falling(i)
        # its vocabulary holds the characters that occur
        bytes_used = torch.cat((source["train"], source["val"])).unique().long()
        numbers = torch.arange(len(bytes_used), dtype=torch.uint8)
        table = torch.zeros(256, dtype=torch.uint8).index_copy_(0, bytes_used, numbers)
        step, theirs = nanogpt_step(flags, device, table[source["train"].long()], rate, len(bytes_used))
        begin = time.perf_counter()
        at_highest(lambda: [step() for _ in range(n)])()
        synchronize(device)
        seconds = time.perf_counter() - begin
        theirs.eval()
        # sample.score asks for embed (its device), a call and logits: the least that passes
        class Theirs:                           # as sample.score calls a model
            embed = theirs.transformer.wte
            def __call__(self, x, mask, doc):
                return theirs(x, x.contiguous())[0]
            def logits(self, logits):
                return logits
        loss = score(Theirs(), table[source["val"].long()])
        print(f"{'nanoGPT':12s} {loss:8.4f} {'':11s} {seconds:8.1f}   {n} steps without evaluation, "
              f"{seconds / medians[2]:.1f} times our loop, whose median loss is "
              f"{'no worse' if medians[0] <= loss else 'worse'}")


def bench_batch(flags, device, names):
    """Milliseconds to corrupt windows, to draw and gather them too, and their share of a step."""
    print(f"{'batch, ms':12s} {'corruption':>11s} {'with windows':>13s} {'of a step':>10s}")
    for name in names:
        hp = settings(flags, name)
        [m], (step, batch), g = train.members(hp), training_step(hp), generator("bench", hp.device)
        x = torch.randint(1, 256, (flags.batch_size, m["n"]), generator=g, device=hp.device)
        sides = {"make": lambda m=m, x=x, g=g, hp=hp: m["make"](x, g, hp), "batch": batch, "step": step}
        s = take_turns({side: lambda f=f: [f() for _ in range(20)] for side, f in sides.items()}, flags.repeats, device)
        print(f"{name:12s} {s['make'] / 20 * 1e3:11.3f} {s['batch'] / 20 * 1e3:13.3f} {s['batch'] / s['step']:10.2%}")


def bench_decode(flags, device, names):
    """Bytes per second of a single sample: plain, compiled, speculated, both."""
    if flags.run:
        model, heads, hp, ckpt = sample.load_run(flags.run, flags.device, flags.dtype)
        prompt, T = ckpt["held_out"][:hp.block_size // 2].tolist(), hp.block_size
    else:
        hp, heads, T = settings(flags, "clm"), {}, flags.block_size
        dtype = getattr(torch, hp.dtype)
        torch.manual_seed(1)
        model = Transformer(Sizes(flags.n_layer, flags.n_head, flags.n_embd), dtype).to(hp.device, dtype)
        with torch.no_grad():
            # zero-init heads make every byte alike; random ones make texts that do not end at once
            for p in model.parameters():
                p.normal_(0, 0.05)
        pack_weights(model)
        prompt = torch.randint(1, 256, (T // 2,), generator=generator("bench")).tolist()
    x = torch.tensor([prompt], device=hp.device)
    seeds, tally = iter(range(1 << 40)), []     # every run writes another text
    def decode(step=None, temperature=0.8):
        gens = [generator(f"decode,{next(seeds)}")]
        return len([int(b) for b in sample.generate(model, x, flags.new, T, gens, step=step, temperature=temperature)])
    def speculate(step=None):
        g = generator(f"decode,{next(seeds)}")
        return len(list(sample.speculate(model, heads, prompt, flags.new, T, g, tally, step, temperature=0.8)))
    sides = {"plain": decode}
    if flags.compile:
        step = sample.fast_step(model, 1, T)
        if step:
            sides["compiled"] = lambda: decode(step)
    if "mtp" in heads:
        sides["speculated"] = speculate
        if flags.compile:
            fast = sample.fast_step(model, 1, T, heads, hp.mtp_heads)
            if fast:
                sides["both"] = lambda: speculate(fast)
    if flags.nanogpt:
        if flags.run:
            vars(flags).update(n_layer=hp.n_layer, n_head=hp.n_head, n_embd=hp.n_embd, block_size=hp.block_size)
        theirs, context = nanogpt_model(flags, device)
        theirs.eval()
        def generate():
            with context:
                return theirs.generate(x, flags.new, temperature=0.8).size(1) - len(prompt)
        sides["nanoGPT"] = at_highest(generate)
    sides["copy"] = copying(device)
    speed = {name: 1 / s for name, s in take_turns(sides, flags.repeats, device).items()}
    rate, read = speed.pop("copy"), [p for name, p in model.named_parameters() if "embed" not in name]
    weights, peer = sum(p.numel() * p.element_size() for p in read), "  to nanoGPT" if flags.nanogpt else ""
    print(f"{'decoding':12s} {'bytes/s':>8s} {'to plain':>9s} {'of copying':>11s}{peer}   batch 1, {hp.dtype}, a "
          f"prompt of {len(prompt)}; weights read by a pass for each byte, against a copy's {rate / 1e9:.0f} GB/s")
    for name, v in speed.items():
        share = f"{v * weights / rate:11.1%}" if name in ("plain", "compiled") else " " * 11
        ratio = f" {v / speed['nanoGPT']:11.1f}" if flags.nanogpt else ""
        print(f"{name:12s} {v:8.0f} {v / speed['plain']:9.2f} {share}{ratio}")
    if tally:
        greedy = [int(b) for b in sample.generate(model, x, flags.new, T, [generator("greedy")], temperature=0)]
        drafted = list(sample.speculate(model, heads, prompt, flags.new, T, generator("greedy"), temperature=0))
        differ = sum(a != b for a, b in zip(greedy, drafted)) + abs(len(greedy) - len(drafted))
        print(f"speculation: {sum(kept + 1 for _, kept in tally) / len(tally):.2f} bytes a pass; at temperature 0 "
              f"{differ} of {len(greedy)} bytes differ from plain decoding")


def main(argv=None):
    parser = train.Parser(prog="bench.py", description=__doc__, allow_abbrev=False,
                          formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag, (default, text) in FLAGS.items():
        how = dict(action="store_true") if default is False else dict(type=type(default), default=default, metavar="X")
        parser.add_argument(f"--{flag}", help=f"{text} [{default}]" if default not in ("", False) else text, **how)
    flags = parser.parse_args(sys.argv[1:] if argv is None else argv)
    parts = {"train": bench_train, "batch": bench_batch, "decode": bench_decode, "memory": bench_memory,
             "loss": bench_loss}
    for given, known, flag in ((flags.parts, parts, "parts"), (flags.objectives, OBJECTIVES, "objectives")):
        for name in given.split(","):
            if name not in known:
                train.fail(f"--{flag} {name}: unknown. Try some of {','.join(known)}")
    for flag, (default, _) in FLAGS.items():
        if type(default) is int and getattr(flags, flag) < (flag != "peer_iters"):
            train.fail(f"--{flag} {getattr(flags, flag)}: must be 1 or more. Try the default")
    device, precision = train.pick_device(flags.device), torch.get_float32_matmul_precision()
    print(f"torch {torch.__version__}, {device}, {torch.get_num_threads()} threads, {train.set_precision(device)}; "
          f"{flags.n_layer} layers, width {flags.n_embd}, block {flags.block_size}, batch {flags.batch_size}")
    try:
        for part in flags.parts.split(","):
            parts[part](flags, device, flags.objectives.split(","))
    finally:
        torch.set_float32_matmul_precision(precision)


if __name__ == "__main__":
    sys.exit(main())
