"""Train any objective of objectives.py on any bytes.

    python train.py                                     clm on the Python standard library's own source
    python train.py --objective mlm --data book.txt     another objective, your own text
    python train.py --resume                            resume the latest run
    python train.py --init_from out/clm --data new.txt:0.95 stdlib:0.05     continual pre-training, with replay

B rows of a batch, T = block_size positions of a row, n raw bytes that fill a row, N matrices of one shape (r, c)
"""
import itertools
import math
import os
import signal
import statistics
import sys
import time
from argparse import Namespace
from functools import partial

from data import check_sizes, compressor_bits, fail, make_rng, open_corpus, read_windows, sample_windows
from data import to_seed, to_symbol
from model import NGRAMS, StackedLinear
from objectives import CAUSAL, EVAL_ROWS, OBJECTIVES, Member, add_weights, document_mask, get_members
from run import RANK, VERSION, WORLD, GraphedStep, any_rank, barrier, build, catch_signals, choose_out_dir, copy_tensors
from run import draw_losses, get_config, join_processes, load_checkpoint, open_metrics, run_program, save_checkpoint
from run import say, settings_to_save, start_from, sum_over_processes, use_device, write_line
import torch
from tqdm import tqdm

HELD_OUT = 4096                                 # bytes of validation text kept in the checkpoint for sample.py
MIN_ITERS = 200                                 # fewest steps of a run without --max_iters, however small its text
BETAS, EPS = (0.9, 0.95), 1e-10                 # of AdamW
MOMENTUM, NS_STEPS = 0.9, 4                     # of Muon; at width 128 as good as 5 steps, and .9 better than .95
NS_COEFFICIENTS = 3.4445, -4.7750, 2.0315
NGRAM_WARMUP = 2_500_000                        # positions over which its drop rate grows, at most
BYTES_PER_ROW = 4                               # of text, that a row of the n-gram table can memorize


# ---- batches
def draw_windows(m, corpus, split, B, key):  # member -> source (B,), offset (B, candidates), on the CPU
    return sample_windows(corpus, split, m.n, B, make_rng(f"{key},windows"), m.objective.single_document)


def make_batch(m, corpus, split, windows, g, hp):  # windows: as draw_windows returns them -> batch
    source, offset = (t.to(corpus[0][split].device) for t in windows)
    x = read_windows(corpus, split, source, offset, m.n)                            # (B, n)
    if hp.device.startswith("cuda") and not x.is_cuda:          # a corpus too large for the GPU
        x = x.pin_memory().to(hp.device, non_blocking=True)
    return add_weights(m.objective.corrupt(x.to(hp.device), g, hp))


def draw_batch(m, corpus, split, B, key, hp):  # -> batch of B rows, a pure function of member and key
    windows = draw_windows(m, corpus, split, B, key)
    return make_batch(m, corpus, split, windows, make_rng(f"{key},{m.objective.name}", hp.device), hp)


def micro_batch(batch, i, n, hp):  # -> the i-th of n parts, equal to within a row
    part = {}
    for key, value in batch.items():
        is_number = isinstance(value, int)      # the prefix of all rows
        part[key] = value if is_number else value[len(value) * i // n:len(value) * (i + 1) // n]
    if hp.doc_mask:
        part |= document_mask(part)
    return part


# ---- optimizers: Muon for the StackedLinear layers inside blocks, AdamW for all other parameters
def make_optimizer(model, hp):  # -> its state, in tensors that keep their addresses for a CUDA graph
    hidden = [m.weight for name, m in model.named_modules() if isinstance(m, StackedLinear) and "blocks." in name]
    rest = [p for p in model.parameters() if not any(p is q for q in hidden)]
    by_shape = {}                               # one Newton-Schulz call per shape: few large products, not many small
    for p in hidden if hp.optimizer == "muon" else []:          # (n, rows, columns): n matrices of one shape
        by_shape.setdefault(tuple(sorted(p.shape[1:])), []).append(p)
    muon = [(params, torch.zeros(sum(map(len, params)), *shape, device=hp.device))              # momentum (N, r, c)
            for shape, params in by_shape.items()]
    adamw = rest + hidden if hp.optimizer == "adamw" else rest
    first, second = torch.zeros(2, sum(p.numel() for p in adamw), device=hp.device)             # one p after another
    lr = torch.zeros((), device=hp.device)
    return Namespace(lr=lr, hidden=hidden, muon=muon, adamw=adamw, first=first, second=second)


@torch.no_grad()
def optimizer_step(opt, step, lr, hp):  # step, lr: 0-D
    for p in opt.hidden if hp.weight_decay else []:
        p.mul_(1 - lr * hp.weight_decay)
    for params, momentum in opt.muon:
        muon_step(params, momentum, lr, getattr(torch, hp.dtype))
    adamw_step(opt.adamw, opt.first, opt.second, step, lr)


def adamw_step(params, first, second, step, lr):  # first, second (n,): moments
    """AdamW (Loshchilov and Hutter 2019) without weight decay, which optimizer_step applies."""
    grad = torch.cat([p.grad.flatten() for p in params])                            # (n,)
    first.lerp_(grad, 1 - BETAS[0])
    second.lerp_(grad.square(), 1 - BETAS[1])
    mean = first / (1 - BETAS[0] ** (step + 1))
    square = second / (1 - BETAS[1] ** (step + 1))
    update = lr * mean / (square.sqrt() + EPS)
    for p, u in zip(params, update.split([p.numel() for p in params])):
        p.sub_(u.view_as(p))


def muon_step(params, momentum, lr, dtype):  # momentum (N, r, c), r <= c: all matrices of one shape at once
    """Muon (Jordan et al. 2024): Nesterov momentum, orthogonalized. Scaled to the root mean square of AdamW's
    updates (Liu et al. 2025), so that one learning rate serves both."""
    def transpose_tall(t):  # the shorter side first: the iteration multiplies r x r matrices
        return t if t.size(1) <= t.size(2) else t.mT                                # (n, r, c)
    grad = torch.cat([transpose_tall(p.grad) for p in params])                      # (N, r, c)
    # Nesterov: average the gradient into the momentum, then look ahead
    momentum.lerp_(grad, 1 - MOMENTUM)
    update = newton_schulz(grad.lerp(momentum, MOMENTUM), dtype)
    update = update.to(momentum.dtype).mul_(lr * 0.2 * momentum.size(2) ** 0.5)
    for p, u in zip(params, update.split([len(p) for p in params])):
        transpose_tall(p).sub_(u)


def newton_schulz(x, dtype):  # (N, r, c), r <= c -> approximately the nearest matrices with orthonormal rows
    """The iteration with the coefficients of Jordan et al. 2024; all but small singular values end near 1."""
    x = x.to(dtype)
    # the iteration needs singular values of at most 1: divide by the Frobenius norm
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    if dtype == torch.float32 and x.size(2) > x.size(1):
        return gram_newton_schulz(x)
    a, b, c = NS_COEFFICIENTS
    for _ in range(NS_STEPS):
        gram = x @ x.mT                                                             # A (N, r, r)
        update = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)                   # b A + c A^2
        x = torch.baddbmm(x, update, x, beta=a)                                     # X <- a X + (b A + c A^2) X
    return x


def gram_newton_schulz(x):  # = newton_schulz's iteration, faster for wide matrices
    """In Gram space (Zhang et al. 2026): with X <- Q X also A <- Q A Q, so that all but two products are r x r. Rounded
    to bfloat16, A would drift."""
    a, b, c = NS_COEFFICIENTS
    gram = x @ x.mT
    q = product = None                          # product: of all Q
    for _ in range(NS_STEPS):
        if q is not None:
            gram = q @ gram @ q
        q = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        q.diagonal(dim1=1, dim2=2).add_(a)      # Q = a I + b A + c A^2
        product = q if product is None else q @ product
    return product @ x


# ---- what follows from the length of a run
def passes_per_step(source, members):  # -> passes that a step makes over a source
    return source["weight"] * sum(m.rows * m.n for m in members) / len(source["train"])


def shorten_run(corpus, members, hp):
    """Fewer steps for a small text: repeated too often, it is overfitted (Muennighoff et al. 2023)."""
    passes = sum(source["weight"] * passes_per_step(source, members) for source in corpus)          # of the mean row
    most = max(MIN_ITERS, math.ceil(hp.max_passes / passes))
    if most < hp.max_iters:
        hp.max_iters = most
        print(f"{most:,} steps for a text of this size (--max_passes {hp.max_passes:g}, but {MIN_ITERS} at least); "
              "--max_iters lifts the limit")
        hp.eval_interval = min(hp.eval_interval, math.ceil(most / 4))


def ngram_drop_rate(step, corpus, members, hp):  # -> share of n-gram lookups that a step drops
    """Grows over the first two passes over the text (NGRAM_WARMUP positions at most): at first the table has memorized
    nothing that the model could rely on too much. Runs of several passes end at a higher rate, since the table would
    memorize the text; a text much longer than the table cannot be memorized, and its repetitions count less. A run
    that starts from another's weights starts at the full rate. Of several sources it is the mean over their rows."""
    positions = step * hp.batch_size * hp.accum * hp.block_size
    memorizable = min(1.0, BYTES_PER_ROW * len(NGRAMS) * hp.ngram_rows / sum(len(source["train"]) for source in corpus))
    rate = 0.0
    for source in corpus:
        passes = passes_per_step(source, members)
        repetitions = max(0.0, (hp.max_iters * passes - 1) * memorizable)
        end = 1 - (1 - hp.ngram_drop) / (1 + repetitions) ** (2 / 3)
        reached = 1.0 if hp.init_from else min(1.0, max(step * passes / 2, positions / NGRAM_WARMUP))
        rate += source["weight"] * end * reached
    return rate if hp.ngram_drop else 0.0


def learning_rate(step, hp):  # warmup-stable-decay: linear, constant, linear to 0; the smallest applies
    warm = (step + 1) / (hp.warmup_iters + 1)
    fall = (hp.max_iters - step) / max(1, hp.lr_decay * hp.max_iters)
    return hp.learning_rate * min(warm, 1.0, fall)


# ---- a step
def prepare(members, corpus, hp):  # -> State before the first step
    """State: all that a training step reads and writes, in tensors that keep their addresses, so that a CUDA graph can
    replay the step. The host writes windows, seeds, rates and step number (load_step_inputs); the device the rest."""
    model = build(hp)
    if hp.init_from and not hp.resume:
        start_from(model, load_checkpoint(hp.init_from)["model"], hp.init_from)
    if model.ngrams is not None:
        model.ngrams.keep_lookups = True
    # each member with its loss, perhaps compiled, and what the host sets: its windows and its generator
    states = []
    for m in members:
        windows = [t.to(corpus[0]["train"].device) for t in draw_windows(m, corpus, "train", m.rows, "0")]
        states.append(Namespace(**vars(m), loss=m.objective.loss, windows=windows, g=torch.Generator(hp.device)))
    progress = torch.zeros((), device=hp.device)
    return Namespace(
        hp=Namespace(**vars(hp) | {"progress": progress}), members=states, corpus=corpus, model=model,
        opt=make_optimizer(model, hp), optimizer_step=optimizer_step,               # perhaps compiled
        # of each source, for checkpoints and logs
        sources=[[source[key] for key in ("name", "size", "crc", "weight")] for source in corpus],
        step=torch.zeros((), dtype=torch.long, device=hp.device),
        # the first step whose loss or gradient was not finite, else -1
        first_nonfinite_step=torch.full((), -1, device=hp.device))


def load_step_inputs(s, step):
    """Copies what the host decides into the tensors that the step reads, without waiting for the device."""
    hp = s.hp
    key = f"{hp.seed},{hp.init_step + step}"    # --init_from: continues after the windows of its parent
    for m in s.members:
        for a, b in zip(m.windows, draw_windows(m, s.corpus, "train", m.rows, key + m.key)):
            if a.is_cuda:
                b = b.contiguous().pin_memory()
            a.copy_(b, non_blocking=True)       # copied, not replaced: a captured graph reads addresses
        m.g.manual_seed(to_seed(f"{key}{m.key},{m.objective.name}"))
    s.opt.lr.fill_(learning_rate(step, hp))
    s.step.fill_(step)
    hp.progress.fill_(1.0 if hp.init_from else step / max(1, hp.max_iters))
    if s.model.ngrams is not None:
        s.model.ngrams.drop.fill_(ngram_drop_rate(step, s.corpus, s.members, hp))
        s.model.ngrams.seed.fill_(to_seed(key))


def training_step(s):  # -> loss (nats), norm of the gradient
    """One update: the same code for one process or several, called eagerly or replayed. Never waits for the device."""
    hp = s.hp
    params = [*s.model.parameters()]
    # forward and backward: the losses of micro-batches add up to that of the step
    loss = torch.zeros((), device=hp.device)
    for m in s.members:
        batch = make_batch(m, s.corpus, "train", m.windows, m.g, hp)
        for i in range(RANK, hp.accum, WORLD):  # this process's micro-batches
            micro = micro_batch(batch, i, hp.accum, hp)
            if len(micro["inp"]):               # a member may have fewer rows than there are micro-batches
                part, _ = m.loss(s.model, micro, hp)
                part = m.weight * part
                part.backward()
                loss += part.detach()
    sum_over_processes(s.model, loss)

    # clip, then check that all is finite
    norm = torch.nn.utils.clip_grad_norm_(params, hp.grad_clip or math.inf)
    finite = torch.isfinite(loss) & torch.isfinite(norm)
    s.first_nonfinite_step.copy_(torch.where((s.first_nonfinite_step < 0) & ~finite, s.step, s.first_nonfinite_step))

    # update. From the first step that is not finite on, gradients and rate are zero: no weight changes any more
    ok = s.first_nonfinite_step < 0
    for p in params:                            # None: the loss does not depend on it
        p.grad = torch.zeros_like(p) if p.grad is None else torch.where(ok, p.grad, 0.0)
    lr = s.opt.lr * ok
    s.optimizer_step(s.opt, s.step, lr, hp)
    if s.model.ngrams is not None:
        s.model.ngrams.update(lr, ok)
    s.model.zero_grad(set_to_none=True)
    return loss, norm


def compile_step(s):
    torch._dynamo.reset()                       # its limit of compiled graphs would count all runs of a process
    for m in s.members:
        m.loss = torch.compile(m.loss, dynamic=False)
    s.optimizer_step = torch.compile(s.optimizer_step, dynamic=False)


# ---- evaluation
def validation_batches(m, source, hp):  # yields the same batches at every step: of objective and block size alone
    hp = Namespace(**vars(hp) | {"progress": 1.0})
    for i in range(hp.eval_iters):
        batch = draw_batch(m, [source], "val", EVAL_ROWS, f"validation,{i}", hp)
        yield micro_batch(batch, 0, 1, hp)


@torch.no_grad()
def evaluate(model, members, corpus, hp):  # -> one record for each source and member, their weighted loss
    """loss: nats. bpb: bits per byte, left to right, each window after one byte of context; an upper bound where the
    objective has one; None where it has neither. figures: what the loss returns beside it."""
    model.eval()
    records = []
    total = 0.0
    for source, m in itertools.product(corpus, members):
        objective = m.objective
        loss, figures = mean_loss(objective, model, validation_batches(m, source, hp), hp)
        nats = loss
        if objective.bpb == "causal":           # not from its own rows, but from plain windows
            plain = Member(CAUSAL, weight=1.0, rows=EVAL_ROWS, n=hp.block_size + 1, key="")
            nats, _ = mean_loss(CAUSAL, model, validation_batches(plain, source, hp), hp)
        bpb = nats / math.log(2) if objective.bpb else None
        records.append({"split": "val", "data": source["name"], "objective": objective.name, "loss": loss, "bpb": bpb,
                        "figures": figures})
        total += source["weight"] * m.weight * loss
    model.train()
    return records, total


def mean_loss(objective, model, batches, hp):  # -> mean loss, {name: mean figure} over batches
    losses = []
    figures = {}
    for batch in batches:
        loss, found = objective.loss(model, batch, hp)
        losses.append(float(loss))
        for name, figure in found.items():
            figures.setdefault(name, []).append(float(figure))
    return statistics.fmean(losses), {name: statistics.fmean(values) for name, values in figures.items()}


# ---- the run
def main(argv=None, with_sample=True):  # -> exit code; with_sample: draws losses, prints compressors and a sample
    hp = get_config(sys.argv[1:] if argv is None else argv)
    join_processes(hp)
    code, s = train(hp)
    if with_sample and not RANK:
        draw_losses(s.hp.out_dir)
        if code == 0:
            finish(s)
    return code


def train(hp):  # -> exit code, State
    """Corpus, model, folder; then steps, each a pure function of (seed, step).

    0 when done, 1 after a loss that is not finite, 128 + signal when stopped; fail() ends with 2."""
    # everything that may be refused comes before the folder
    use_device(torch.device(hp.device))
    members = get_members(hp)
    corpus = open_corpus(hp.data)
    check_sizes(corpus, max(m.n for m in members), hp.block_size)
    if hp.max_passes and not hp.resume:
        shorten_run(corpus, members, hp)
    move_corpus(corpus, hp)
    s = prepare(members, corpus, hp)
    hp = s.hp
    status = dict(step=0, seconds=0.0, best=math.inf, best_step=0, val=math.inf, metrics_bytes=0)
    if hp.resume:
        status = resume(load_checkpoint(hp.resume), s)
    else:
        hp.out_dir = choose_out_dir(hp)
    if hp.compile:
        compile_step(s)
    step_fn = partial(training_step, s)
    if hp.cuda_graph:
        step_fn = GraphedStep(step_fn, [m.g for m in s.members])

    barrier()                                   # the first process makes the folder after all have looked for it
    with open_metrics(hp.out_dir, status["metrics_bytes"]) as metrics, catch_signals() as stop:
        announce(s, metrics, status)
        start = clock_step = status["step"]
        clock = last_line = time.perf_counter()
        # one extra iteration, which only evaluates and saves
        bar = tqdm(range(start, hp.max_iters + 1), total=hp.max_iters, initial=start, disable=True if RANK else None,
                   unit="step", dynamic_ncols=True)
        for step in bar:
            due = step % hp.eval_interval == 0 or step == hp.max_iters
            halt = any_rank(bool(stop))
            if (due or halt) and (step > start or not hp.resume):
                if int(s.first_nonfinite_step) >= 0:
                    break
                status["step"] = step
                status["seconds"] += time.perf_counter() - clock                    # without evaluations
                if due:
                    validate(s, status, metrics, stop)
                save(s, metrics, "ckpt.pt", status)
                clock = time.perf_counter()
                clock_step = step
            if step == hp.max_iters or halt:
                break
            load_step_inputs(s, step)
            loss, norm = step_fn()
            if step % hp.log_interval == 0:     # only logging waits for the device
                if int(s.first_nonfinite_step) >= 0:
                    break
                now = time.perf_counter()
                speed = (step + 1 - clock_step) / (now - clock)                     # steps per second
                line = log_step(hp, metrics, step, float(loss), float(norm), speed, status["seconds"] + now - clock)
                bar.set_postfix_str(line)
                if bar.disable and now - last_line > 5:         # no terminal: a plain line every 5 seconds
                    last_line = now
                    say(f"step {step:6d} | {line}, {(hp.max_iters - step) / speed:.0f} s left", stop)
        bad = int(s.first_nonfinite_step)
        if bad >= 0:                            # no weight has changed since
            save(s, metrics, "ckpt.pt", status | {"step": bad})
            barrier()                           # no process ends before the file is written
            if not RANK:
                print(f"error: loss or gradient not finite at step {bad}; {hp.out_dir} holds the weights before it. "
                      f"Try --init_from {hp.out_dir} with a lower --learning_rate or --dtype float32", file=sys.stderr)
            return 1, s
        if halt and step < hp.max_iters:
            say(f"stopped at step {step}, saved. Resume with: python train.py --resume --out_dir {hp.out_dir}", stop)
            return 128 + (stop[0] if stop else signal.SIGTERM), s                   # empty: another process got it
    if status["val"] > status["best"]:
        print(f"validation loss was lowest at step {status['best_step']}: {status['best']:.4f} nats, now "
              f"{status['val']:.4f}; {hp.out_dir}/best.pt holds that state")
    return 0, s


def log_step(hp, metrics, step, loss, norm, speed, seconds):  # -> what the progress bar shows
    positions = round(speed * hp.batch_size * hp.accum * hp.block_size)             # per second
    write_line(metrics, {"step": step, "split": "train", "data": " ".join(hp.data), "objective": hp.objective,
                         "loss": loss, "lr": learning_rate(step, hp), "grad_norm": norm, "tok_per_s": positions,
                         "seconds": round(seconds, 3)})
    return f"loss {loss:.3f}, {positions / 1e3:.1f}k positions/s"


def validate(s, status, metrics, stop):  # evaluates, logs, saves best.pt
    records, loss = evaluate(s.model, s.members, s.corpus, s.hp)
    status["val"] = math.inf if math.isnan(loss) else loss      # NaN: the weights have exploded
    for r in records:
        write_line(metrics, {"step": status["step"], **r, "seconds": round(status["seconds"], 3)})
        say(describe(status["step"], r), stop)
    if status["val"] < status["best"]:
        status["best"] = status["val"]
        status["best_step"] = status["step"]
        save(s, metrics, "best.pt", status)     # before ckpt.pt: after a kill in between, it is written again


def optimizer_tensors(s):  # -> {name: tensor}, for a checkpoint
    tensors = {"adamw.first": s.opt.first, "adamw.second": s.opt.second}
    for i, (_, momentum) in enumerate(s.opt.muon):
        tensors[f"muon.{i}"] = momentum
    if s.model.ngrams is not None:
        tensors["ngrams"] = s.model.ngrams.moments
    return tensors


def save(s, metrics, name, status):
    if RANK:
        return
    os.fsync(metrics.fileno())                  # the checkpoint stores its length
    save_checkpoint(os.path.join(s.hp.out_dir, name), status | dict(
        version=VERSION, config=settings_to_save(s.hp), sources=s.sources, metrics_bytes=metrics.tell(),
        held_out=s.corpus[0]["val"][:HELD_OUT].cpu().clone(), model=s.model.state_dict(),
        optimizer=optimizer_tensors(s)))


def resume(ckpt, s):  # -> status of the checkpoint; fails where corpus or plan are not its own
    hp = s.hp
    if [x[1:] for x in ckpt["sources"]] != [x[1:] for x in s.sources]:
        fail(f"--data {' '.join(hp.data)}: its bytes or weights are not those of the run in {hp.out_dir}. "
             f"Try the same data, or --init_from {hp.out_dir}")
    if hp.max_iters < ckpt["step"]:
        fail(f"--max_iters {hp.max_iters}: the run in {hp.out_dir} is at step {ckpt['step']}. Try a larger number")
    if hp.max_iters != ckpt["config"]["max_iters"]:
        print(f"resume: {ckpt['config']['max_iters']} steps planned, now {hp.max_iters}; the schedules follow")
    copy_tensors(s.model.state_dict(), ckpt["model"], hp.resume)
    copy_tensors(optimizer_tensors(s), ckpt["optimizer"], hp.resume)
    return {k: ckpt[k] for k in ("step", "seconds", "best", "best_step", "val", "metrics_bytes")}


def move_corpus(corpus, hp):  # to the GPU, as bytes, if it fits there; then no loader is needed
    if not hp.device.startswith("cuda"):
        return
    size = sum(source["size"] for source in corpus)
    if size < torch.cuda.mem_get_info(torch.device(hp.device))[0] / 4:
        for source in corpus:
            source["train"] = source["train"].to(hp.device)
            source["val"] = source["val"].to(hp.device)
    elif hp.cuda_graph:
        fail(f"--cuda_graph: the corpus of {size:,} bytes does not fit on the GPU beside the model. Try without it")


def announce(s, metrics, status):  # the first line of metrics.jsonl, the first lines on the terminal
    hp = s.hp
    size = sum(p.numel() for p in s.model.parameters())
    table = 0 if s.model.ngrams is None else s.model.ngrams.table.numel()
    if metrics.tell() == 0:
        write_line(metrics, {"config": settings_to_save(hp), "version": VERSION, "torch": torch.__version__,
                             "processes": WORLD, "threads": torch.get_num_threads(), "parameters": size + table,
                             "ngram_parameters": table, "sources": s.sources})
    print(f"{hp.objective} | {size:,} parameters and {table:,} in the n-gram table | {hp.out_dir}")
    print(f"{hp.device}, {torch.get_num_threads()} threads, {WORLD} processes | activations {hp.dtype} | "
          f"{hp.max_iters:,} steps")
    for source in s.corpus:
        passes = hp.max_iters * passes_per_step(source, s.members)
        print(f"--data {source['name']}: {source['size']:,} bytes, {source['weight']:.1%} of rows, {passes:.2g} passes")
    if status["step"] == 0:
        print("the first row, one character a position (█ MASK, ∅ EOT, ‖ SEP, ① a sentinel, ░ PAD; · no loss):")
        load_step_inputs(s, 0)
        for m in s.members:
            show_row(m.objective, make_batch(m, s.corpus, "train", m.windows, m.g, hp))
    sys.stdout.flush()


def show_row(objective, batch, width=96, most=256):  # prints the first row of a batch, inputs above targets
    rows = {k: batch[k][0].flatten()[:most].tolist() for k in ("inp", "tgt") if k in batch}
    for i in range(0, len(rows["inp"]), width):
        for k, row in rows.items():
            print(f"  {objective.name} {k}   {''.join(map(to_symbol, row[i:i + width]))}")


def describe(step, r):  # -> a line for a record of evaluate
    bound = "<= " if OBJECTIVES[r["objective"]].bpb == "bound" else ""
    bpb = "" if r["bpb"] is None else f", {bound}{r['bpb']:.4f} bits/byte"
    others = {name: value for name, value in r["figures"].items() if value != r["loss"]}        # often "nll" is both
    terms = " (" + ", ".join(f"{name} {value:.4f}" for name, value in others.items()) + ")" if others else ""
    perplexity = f", perplexity {math.exp(min(r['figures']['nll'], 700.0)):.2f}" if "nll" in r["figures"] else ""
    figures = f"loss {r['loss']:.4f} nats{terms}{perplexity}{bpb}"
    return f"step {step:6d} | validation on {r['data']}: {r['objective']} {figures}"


def finish(s):  # compressors, a sample
    hp = s.hp
    if any(m.objective.bpb for m in s.members):
        for source in s.corpus:
            print(f"compressors on the validation split of {source['name']}: {compressor_bits(source['val'])}")
    print(flush=True)
    import sample  # here: training needs it only now
    sample.main(["--out_dir", hp.out_dir, "--device", hp.device])
    print(f"\ndone: {hp.out_dir}/ckpt.pt. More samples: python sample.py --out_dir {hp.out_dir}")


if __name__ == "__main__":
    run_program(main)
