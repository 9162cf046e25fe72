"""Measure the speed of training and decoding.

    python -m experiments.bench                         training and decoding at the default size
    python -m experiments.bench --parts train --compile --cuda_graph --objectives clm   eager, compiled, captured, both
    python -m experiments.bench --parts decode --n_layer 6 --n_head 6 --n_embd 384 --nanogpt ../nanoGPT
    python -m experiments.bench --parts decode --run out/mtp --compile                  plain, drafted; both compiled
    python -m experiments.bench --parts race --nanogpt ../nanoGPT --device cpu --repeats 3      whole runs on a CPU

Every number is the median of --repeats rounds. The programs that are compared run in turns, so that a machine whose
speed drifts slows all of them. A ratio of speeds is the median of those of single rounds; the smallest and the largest
are in parentheses. Training reads random bytes. --nanogpt also measures a checkout of karpathy/nanoGPT with its
own model, optimizer and batches, as its README runs it: on a GPU compiled and in bfloat16, on a CPU not compiled and in
float32. A race times whole programs: its README's CPU example, and train.py on the same text with as many blocks of
the same width, and a table of n-grams on top. It prints their losses on the whole held-out tenth of the text.
Other flags are train.py's, such as --n_layer 6 or --optimizer adamw.
"""
import contextlib
import functools
import importlib.util
import itertools
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from pathlib import Path

from data import VOCAB_SIZE, Flag, fail, make_rng
from experiments.common import ROOT, load_latest, parse_with_train_flags
import sample
import train
from model import for_inference
from objectives import OBJECTIVES, document_mask
from run import build, get_config, get_members, load_run, run_program, use_device
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

FLAGS = {
    "parts": Flag("train,decode", "train, decode or race, separated by commas"),
    "objectives": Flag(",".join(OBJECTIVES), "for train; decode uses the first one"),
    "repeats": Flag(5, "timed rounds", 1),
    "steps": Flag(4, "for train: training steps in a round", 1),
    "new": Flag(150, "for decode: bytes in a round", 1),
    "compile": Flag(False, "also measure the compiled program"),
    "cuda_graph": Flag(False, "also measure steps captured in a CUDA graph; needs a GPU"),
    "nanogpt": Flag("", "folder of a checkout of karpathy/nanoGPT; for race with its shakespeare_char data prepared"),
    "run": Flag("", "for decode: a trained run, whose drafts are good; default: random weights"),
}
RESERVED = {"objective", "seed", "out_dir", "resume", "init_from"}      # flags of train.py that this program sets
PEER = "nanoGPT"
# {what stands after the objective's name: the switches that are on}
WAYS = {"": [], " compiled": ["compile"], " captured": ["cuda_graph"], " both": ["compile", "cuda_graph"]}


def interleave(programs, repeats, device):  # {name: program} -> {name: its units per second in each round}
    """Runs programs in turns. A program takes the number of the round and returns how many units it has done, such as
    bytes or FLOPs. The first round is not timed, since compilation happens in it."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    speeds = {name: [] for name in programs}
    for i in range(repeats + 1):
        for name, program in programs.items():
            wait()
            begin = time.perf_counter()
            units = program(i)
            wait()
            if i > 0:
                speeds[name].append(units / (time.perf_counter() - begin))
    return speeds


def describe_ratio(speeds, others):  # units per second of two programs in each round -> "median (smallest-largest)"
    ratios = [speed / other for speed, other in zip(speeds, others)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"


def repeat(step, n, units=1):  # -> a program that takes n steps, each of this many units
    def program(i):
        for _ in range(n):
            step()
        return n * units
    return program


def gemm(device, dtype):  # -> a program that multiplies square matrices; its units are FLOPs
    """Its speed is about the highest FLOP/s of this machine, with which the FLOP/s of training are compared."""
    n, times = (8192, 20) if device.type == "cuda" else (1024, 8)
    a = torch.randn(n, n, device=device).to(dtype)
    b = torch.randn(n, n, device=device).to(dtype)
    return repeat(lambda: a @ b, times, 2 * n ** 3)


def random_corpus(hp):
    text = torch.randint(1, 256, (1 << 20,), generator=make_rng("bench"), dtype=torch.uint8)
    text = text.to(hp.device if "cuda" in hp.device else "cpu")
    return [dict(name="random", weight=1.0, train=text, val=text, size=len(text), crc=0)]


def count_flops(hp):  # -> FLOPs of the matrix products in the forward and backward pass of a micro-batch
    """Also counts attention scores that a mask hides, some of which a GPU's kernels skip. For a mixture, the mean over
    the steps."""
    cpu = Namespace(**vars(hp) | {"device": "cpu"})
    members = get_members(cpu)
    corpus = random_corpus(cpu)
    model = train.make_state(corpus, members, cpu).model.to("meta")                 # shapes without values: no work
    flops = 0.0
    for member in members:
        batch = train.sample_batch(member, corpus, "train", hp.batch_size, "flops", cpu)
        if hp.doc_mask:
            batch |= document_mask(batch)
        batch = {k: v if isinstance(v, int) else v.to("meta") for k, v in batch.items()}
        with FlopCounterMode(display=False) as counter:
            loss, _ = member.objective.loss(model, batch, hp)
            loss.backward()
        flops += member.weight * counter.get_total_flops()
    return flops


def make_step(hp):  # -> a function that takes one training step
    s = train.make_state(random_corpus(hp), get_members(hp), hp)
    [m] = s.members
    [step_fn] = train.make_step_fns(s).values()
    numbers = itertools.count()

    def step():
        train.load_step_inputs(s, m, next(numbers))
        step_fn()
    if hp.cuda_graph:                           # capture before the clock runs
        for _ in range(4):
            step()
    return step


# ---- nanoGPT
def load_nanogpt(folder):  # -> its model.py as a module
    path = os.path.join(folder, "model.py")
    if not os.path.isfile(path):
        fail(f"--nanogpt {folder}: holds no model.py. Try the folder of a checkout of karpathy/nanoGPT")
    spec = importlib.util.spec_from_file_location("nanogpt_model", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def with_torch_defaults(program):  # -> the same program, run with torch's default switches, as nanoGPT runs
    def run(i):
        precision = torch.get_float32_matmul_precision()
        cudnn = torch.backends.cuda.cudnn_sdp_enabled()
        torch.set_float32_matmul_precision("highest")
        torch.backends.cuda.enable_cudnn_sdp(True)
        units = program(i)
        torch.set_float32_matmul_precision(precision)
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
        return units
    return run


def nanogpt_model(folder, hp):  # -> the model, the autocast context in which nanoGPT calls it
    module = load_nanogpt(folder)
    cuda = hp.device.startswith("cuda")
    config = module.GPTConfig(block_size=hp.block_size, vocab_size=VOCAB_SIZE, n_layer=hp.n_layer, n_head=hp.n_head,
                              n_embd=hp.n_embd, dropout=0.0, bias=False)
    context = torch.autocast("cuda", torch.bfloat16) if cuda else contextlib.nullcontext()
    return module.GPT(config).to(hp.device), context


def nanogpt_step(folder, hp, text):  # -> a function that takes one training step
    """Trains as nanoGPT's train.py: random windows, AdamW with weight decay .1, gradients clipped at 1."""
    device = torch.device(hp.device)
    model, context = nanogpt_model(folder, hp)
    opt = model.configure_optimizers(0.1, 1e-3, (0.9, 0.99), device.type)
    forward = torch.compile(model) if device.type == "cuda" else model
    text = text.cpu().long()
    B, T = hp.batch_size, hp.block_size

    def step():
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
    return step


# ---- parts: each takes the flags and the settings of the first objective, and prints a table
def bench_train(flags, hp):  # positions per second of each objective, and its FLOP/s as a share of those of GEMM
    device = torch.device(hp.device)
    n = hp.batch_size * hp.block_size           # positions of a micro-batch
    hps = {}
    flops = {}                                  # per position
    for name in flags.objectives.split(","):
        flops_of_all_ways = count_flops(get_config(["--objective", name, *flags.rest])) / n
        for way, switches in WAYS.items():
            if all(getattr(flags, switch) for switch in switches):
                words = [f"--{switch}" for switch in switches]
                hps[name + way] = get_config(["--objective", name, *flags.rest, *words])
                flops[name + way] = flops_of_all_ways
    programs = {name: repeat(make_step(own_hp), flags.steps, n * hp.accum) for name, own_hp in hps.items()}
    if flags.nanogpt:
        step = nanogpt_step(flags.nanogpt, hp, random_corpus(hp)[0]["train"])
        programs[PEER] = with_torch_defaults(repeat(step, flags.steps, n))
    programs["GEMM"] = gemm(device, getattr(torch, hp.dtype))
    speeds = interleave(programs, flags.repeats, device)
    gemm_speed = statistics.median(speeds.pop("GEMM"))
    print(f"product of large matrices (GEMM), {hp.dtype}: {gemm_speed / 1e9:.0f} GFLOP/s")
    shares = {name: flops[name] * statistics.median(speeds[name]) / gemm_speed for name in flops}
    print_speeds("training", "positions/s", speeds, shares)


def print_speeds(title, unit, speeds, shares):  # of interleave, {name: share of the FLOP/s of GEMM}
    first = next(iter(speeds))
    peer = f"{'to ' + PEER:>20s}" if PEER in speeds else ""
    print(f"{title:20s} {unit:>12s} {'to ' + first:>20s} {'of GEMM' if shares else '':>8s}{peer}")
    for name, values in speeds.items():
        share = f"{shares[name]:.1%}" if name in shares else ""
        to_first = describe_ratio(values, speeds[first])
        to_peer = describe_ratio(values, speeds[PEER]) if PEER in speeds else ""
        print(f"{name:20s} {statistics.median(values):12.0f} {to_first:>20s} {share:>8s}{to_peer:>20s}")


def load_decoder(flags, hp):  # -> model, settings, prompt (ids)
    """Loads --run or makes a model of random weights. Weights as initialized would not do: with them every byte is
    equally likely, EOT too, and a sample would soon end."""
    if flags.run:
        model, hp, ckpt = load_latest(flags.run, hp.device, hp.dtype)
        return model, hp, ckpt["held_out"][:hp.block_size // 2].tolist()
    model = build(get_members(hp), hp)
    torch.manual_seed(1)
    for t in model.requires_grad_(False).parameters():
        t.normal_(0, 0.05)
    torch.backends.cuda.enable_cudnn_sdp(False)                 # as load_latest does
    prompt = torch.randint(1, 256, (hp.block_size // 2,), generator=make_rng("bench")).tolist()
    return for_inference(model), hp, prompt


def bench_decode(flags, hp):  # bytes per second of a single sample: plain, compiled, drafted, both
    model, hp, prompt = load_decoder(flags, hp)
    x = torch.tensor([prompt], device=hp.device)
    n_and_T = flags.new, hp.block_size
    use = get_members(hp)[0].objective.uses.get("continue")
    draft = use.drafter(hp) if use and use.drafter else None
    stats = []

    def plain(i, compile=False):
        g = make_rng(f"decode,{i}")
        return sum(1 for _ in sample.generate(model, x, *n_and_T, g, compile=compile, temperature=0.8))

    def drafted(i, compile=False):
        g = make_rng(f"decode,{i}")
        written = sample.generate_drafted(model, draft, prompt, *n_and_T, g, stats, compile, temperature=0.8)
        return sum(1 for _ in written)
    programs = {"plain": plain} | ({"drafted": drafted} if draft else {})
    if flags.compile:
        programs |= {f"{name} compiled": functools.partial(each, compile=True) for name, each in programs.items()}
    if flags.nanogpt:
        nanogpt, context = nanogpt_model(flags.nanogpt, hp)
        nanogpt.eval()

        def generate(i):
            with context:
                return nanogpt.generate(x, flags.new, temperature=0.8).size(1) - len(prompt)
        programs[PEER] = with_torch_defaults(generate)
    print_speeds("decoding", "bytes/s", interleave(programs, flags.repeats, x.device), {})
    print(f"one sample, {hp.dtype}, a prompt of {len(prompt)} bytes, {hp.n_layer} layers, width {hp.n_embd}")
    if stats:
        print(f"{statistics.fmean(kept + 1 for _, kept in stats):.2f} bytes per pass with drafts")


# ---- race: whole runs, each a program of its own
RACE_T = 64                                     # bytes of a row, and of a window of the held-out tenth
THEIR_RACE = ["train.py", "config/train_shakespeare_char.py", "--device=cpu", "--compile=False", "--eval_iters=20",
              "--log_interval=1", f"--block_size={RACE_T}", "--batch_size=12", "--n_layer=4", "--n_head=4",
              "--n_embd=128", "--max_iters=2000", "--lr_decay_iters=2000", "--dropout=0.0"]
# chosen on this held-out text: 130 steps reach a lower loss than nanoGPT's 2,000, and half of the table is enough
OUR_RACE = ["train.py", "--device=cpu", f"--block_size={RACE_T}", "--batch_size=12", "--n_layer=4", "--n_embd=128",
            "--ngram_rows=32768", "--max_iters=130"]


def held_out_windows(ids):  # (n,) -> inputs and targets (N, T): all disjoint windows of the last tenth
    held_out = ids[int(len(ids) * 0.9):]
    N = (len(held_out) - 1) // RACE_T
    return held_out[:N * RACE_T].view(N, RACE_T), held_out[1:N * RACE_T + 1].view(N, RACE_T)


@torch.no_grad()
def mean_nats(predict, ids):  # predict: (N, T) -> logits (N, T, V)
    inp, tgt = held_out_windows(ids)
    nats = [F.cross_entropy(predict(x).flatten(0, 1), y.flatten(), reduction="sum")
            for x, y in zip(inp.split(256), tgt.split(256))]
    return float(sum(nats)) / tgt.numel()


def load_theirs(folder, out_dir, text):  # -> the model that nanoGPT saved, its ids -> logits, ids of the text
    module = load_nanogpt(folder)
    ckpt = torch.load(os.path.join(out_dir, "ckpt.pt"), map_location="cpu", weights_only=False)
    model = module.GPT(module.GPTConfig(**ckpt["model_args"]))
    model.load_state_dict(ckpt["model"])
    model.eval()
    with open(os.path.join(folder, "data", "shakespeare_char", "meta.pkl"), "rb") as f:
        stoi = pickle.load(f)["stoi"]
    # given targets, it returns the logits of all positions
    return model, lambda x: model(x, x)[0], torch.tensor([stoi[character] for character in text])


def load_ours(_, out_dir, text):  # -> the same of our run
    model, _, _ = load_run(os.path.join(out_dir, "ckpt.pt"), "cpu", "float32")
    return model, lambda x: model.logits(model(x)), torch.tensor([*text.encode()])


def bench_race(flags, hp):  # seconds of whole runs, their held-out losses, and the sizes of the models
    path = os.path.abspath(os.path.join(flags.nanogpt, "data", "shakespeare_char", "input.txt"))
    if not os.path.isfile(path) or not os.path.isfile(path.replace("input.txt", "train.bin")):
        fail(f"--nanogpt {flags.nanogpt}: its text is not prepared. Try python data/shakespeare_char/prepare.py there")
    text = Path(path).read_text("ascii")        # one character is one byte, so losses can be compared
    ours = [*OUR_RACE, *flags.given, "--data", path]          # of a flag that is given twice the last one counts
    sides = {PEER: (THEIR_RACE, flags.nanogpt, load_theirs), "nanoPretext": (ours, ROOT, load_ours)}
    seconds = {side: [] for side in sides}
    for side, (words, folder, load) in [*sides.items()] * flags.repeats:
        with tempfile.TemporaryDirectory() as work:
            out_dir = os.path.join(work, "run")
            words = [sys.executable, *words, f"--out_dir={out_dir}"]
            begin = time.perf_counter()
            done = subprocess.run(words, cwd=folder, capture_output=True, text=True, errors="replace")
            seconds[side].append(time.perf_counter() - begin)
            if done.returncode:
                fail(f"{' '.join(words)} in {folder} failed: {done.stderr.strip().splitlines()[-1:]}")
            model, predict, ids = load(flags.nanogpt, out_dir, text)
        nats = with_torch_defaults(lambda _: mean_nats(predict, ids))(0)
        n_table = sum(p.numel() for name, p in model.named_parameters() if name.endswith("ngrams.table"))
        n_rest = sum(p.numel() for p in model.parameters()) - n_table
        table = f" and {n_table:,} in a table of n-grams" if n_table else ""
        print(f"{side:12s} {seconds[side][-1]:7.1f} s, {nats:.4f} nats/byte, {n_rest:,} parameters{table}", flush=True)
    theirs, mine = (statistics.median(each) for each in seconds.values())
    print(f"medians: {theirs:.1f} s and {mine:.1f} s, a ratio of {theirs / mine:.1f}")


PARTS = dict(train=bench_train, decode=bench_decode, race=bench_race)


def main(argv=None):  # -> exit code
    flags, rest = parse_with_train_flags("python -m experiments.bench", __doc__, FLAGS, RESERVED, argv)
    parts = flags.parts.split(",")
    for part in parts:
        if part not in PARTS:
            fail(f"--parts {part}: unknown. Try one or more of {','.join(PARTS)}")
    hp = get_config(["--objective", flags.objectives.split(",")[0], *rest])
    if flags.nanogpt:
        load_nanogpt(flags.nanogpt)             # fails now, instead of after a training
    flags.given = rest
    # the same for all objectives
    flags.rest = [*rest, "--batch_size", str(hp.batch_size), "--block_size", str(hp.block_size)]
    use_device(torch.device(hp.device))
    print(f"torch {torch.__version__}, {hp.device}, {torch.get_num_threads()} threads; {hp.n_layer} layers, "
          f"width {hp.n_embd}, block {hp.block_size}, batch {hp.batch_size}")
    for part in parts:
        PARTS[part](flags, hp)
    return 0


if __name__ == "__main__":
    run_program(main)
