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

GOLDEN_RATIO = 0.6180339887498949               # its multiples modulo 1 are spread evenly over [0, 1)
HELD_OUT = 4096                                 # bytes of validation text kept in the checkpoint for sample.py
MIN_ITERS = 200                                 # fewest steps of a run without --max_iters, however small its text
BETAS, EPS = (0.9, 0.95), 1e-10                 # of AdamW
MOMENTUM, NS_STEPS = 0.9, 4                     # of Muon; at width 128 as good as 5 steps, and .9 better than .95
NS_COEFFICIENTS = 3.4445, -4.7750, 2.0315
NGRAM_WARMUP = 2_500_000                        # positions over which its drop rate grows, at most
BYTES_PER_ROW = 4                               # of text, that a row of the n-gram table can memorize


# ---- batches
def draw_windows(m, corpus, split, B, key):  # member -> source (B,), offset (B,), on the CPU
    return sample_windows(corpus, split, m.n, B, make_rng(f"{key},windows"))


def make_batch(m, corpus, split, windows, g):  # windows: as draw_windows returns them -> batch
    source, offset = (t.to(corpus[0][split].device) for t in windows)
    x = read_windows(corpus, split, source, offset, m.n)                            # (B, n)
    device = m.hp.device
    if device.startswith("cuda") and not x.is_cuda:             # a corpus too large for the GPU
        x = x.pin_memory().to(device, non_blocking=True)
    return add_weights(m.objective.corrupt(x.to(device), g, m.hp))


def draw_batch(m, corpus, split, B, key):  # -> batch of B rows, a pure function of member and key
    windows = draw_windows(m, corpus, split, B, key)
    return make_batch(m, corpus, split, windows, make_rng(f"{key},{m.objective.name}", m.hp.device))


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
    """A parameter that the loss of a step does not depend on, such as the head of another member of a mixture, has no
    gradient in that step, and is left alone."""
    hidden = {}                                 # {(module that holds the blocks, shape): [weight (n, rows, columns)]}
    rest = []
    layers = {m.weight for m in model.modules() if isinstance(m, StackedLinear)}
    for name, p in model.named_parameters():
        owner, is_hidden, _ = name.rpartition("blocks.")
        if is_hidden and p in layers:
            hidden.setdefault((owner, *sorted(p.shape[1:])), []).append(p)
        else:
            rest.append(p)
    matrices = [p for params in hidden.values() for p in params]
    muon = []                                   # one Newton-Schulz call for each: few large products, not many small
    if hp.optimizer == "muon":
        for (_, r, c), params in hidden.items():
            momentum = torch.zeros(sum(map(len, params)), r, c, device=hp.device)
            muon.append((params, momentum))
    else:
        rest += matrices
    adamw = torch.optim.AdamW(rest, lr=torch.zeros((), device=hp.device), betas=BETAS, eps=EPS, weight_decay=0.0,
                              fused=True, capturable=hp.cuda_graph)
    for p in rest:                              # AdamW would make it in its first step
        adamw.state[p] = dict(step=torch.zeros((), device=hp.device), exp_avg=torch.zeros_like(p),
                              exp_avg_sq=torch.zeros_like(p))
    return Namespace(lr=torch.zeros((), device=hp.device), matrices=matrices, muon=muon, adamw=adamw)


@torch.no_grad()
def optimizer_step(opt, lr, hp):  # lr: 0-D
    for p in opt.matrices if hp.weight_decay else []:
        if p.grad is not None:
            p.mul_(1 - lr * hp.weight_decay)
    for params, momentum in opt.muon:
        if params[0].grad is not None:
            muon_step(params, momentum, lr, getattr(torch, hp.dtype))
    [group] = opt.adamw.param_groups
    group["lr"] = lr
    opt.adamw.step()


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
    """The iteration X <- Q X of Jordan et al. 2024 with A = X X^T and Q = a I + b A + c A^2, after which all but small
    singular values are near 1.

    Wide matrices are iterated in Gram space (Zhang et al. 2026): A <- Q A Q, and X is multiplied once by the product of
    several Q, so that most products are of r x r matrices. In bfloat16 A drifts: it is computed from X every two steps.
    For square matrices A is computed from X in every step."""
    x = x.to(dtype)
    # the iteration needs singular values of at most 1: divide by the Frobenius norm
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    a, b, c = NS_COEFFICIENTS
    n = 1 if x.size(1) == x.size(2) else 2 if dtype == torch.bfloat16 else NS_STEPS
    for _ in range(NS_STEPS // n):
        gram = x @ x.mT                                                             # A (N, r, r)
        product = None                          # of the Q of these n steps
        for i in range(n):
            q = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
            q.diagonal(dim1=1, dim2=2).add_(a)
            product = q if product is None else q @ product
            if i < n - 1:
                gram = q @ gram @ q
        x = product @ x
    return x


# ---- what follows from the length of a run
def passes_per_step(source, members, hp):  # -> passes over a source that a step makes on average
    n = sum(m.weight * m.n for m in members)
    return source["weight"] * hp.batch_size * hp.accum * n / len(source["train"])


def shorten_run(corpus, members, hp):
    """Fewer steps for a small text: repeated too often, it is overfitted (Muennighoff et al. 2023)."""
    passes = sum(source["weight"] * passes_per_step(source, members, hp) for source in corpus)      # of the mean row
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
        passes = passes_per_step(source, members, hp)
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
def prepare(corpus, hp):  # -> State before the first step
    """State: all that a training step reads and writes, in tensors that keep their addresses, so that a CUDA graph can
    replay the step. The host writes windows, seeds, rates and step number (load_step_inputs); the device the rest."""
    model = build(hp)
    if hp.init_from and not hp.resume:
        start_from(model, load_checkpoint(hp.init_from)["model"], hp.init_from)
    if model.ngrams is not None:
        model.ngrams.keep_lookups = True
    hp = Namespace(**vars(hp) | {"progress": torch.zeros((), device=hp.device)})
    # each member with its loss, perhaps compiled, and what the host sets: its windows and its generator
    members = []
    for m in get_members(hp):
        windows = draw_windows(m, corpus, "train", hp.batch_size * hp.accum, "0")
        windows = [t.to(corpus[0]["train"].device) for t in windows]
        members.append(Namespace(**vars(m), loss=m.objective.loss, windows=windows, g=torch.Generator(hp.device)))
    return Namespace(
        hp=hp, members=members, corpus=corpus, model=model,
        opt=make_optimizer(model, hp), optimizer_step=optimizer_step,               # perhaps compiled
        # of each source, for checkpoints and logs
        sources=[[source[key] for key in ("name", "size", "crc", "weight")] for source in corpus],
        step=torch.zeros((), dtype=torch.long, device=hp.device),
        # the first step whose loss or gradient was not finite, else -1
        first_nonfinite_step=torch.full((), -1, device=hp.device))


def member_of_step(members, step):  # -> the member that a step trains: each has its share of any stretch of steps
    u = step * GOLDEN_RATIO % 1
    edges = itertools.accumulate(m.weight for m in members)
    return next((m for m, edge in zip(members, edges) if u < edge), members[-1])


def load_step_inputs(s, m, step):
    """Copies what the host decides into the tensors that the step reads, without waiting for the device."""
    hp = s.hp
    key = f"{hp.seed},{hp.init_step + step}"    # --init_from: continues after the windows of its parent
    for a, b in zip(m.windows, draw_windows(m, s.corpus, "train", len(m.windows[0]), key)):
        if a.is_cuda:
            b = b.pin_memory()
        a.copy_(b, non_blocking=True)           # copied, not replaced: a captured graph reads addresses
    m.g.manual_seed(to_seed(f"{key},{m.objective.name}"))
    s.opt.lr.fill_(learning_rate(step, hp))
    s.step.fill_(step)
    hp.progress.fill_(1.0 if hp.init_from else step / max(1, hp.max_iters))
    if s.model.ngrams is not None:
        s.model.ngrams.drop.fill_(ngram_drop_rate(step, s.corpus, s.members, hp))
        s.model.ngrams.seed.fill_(to_seed(key))


def training_step(s, m):  # -> loss (nats), norm of the gradient
    """One update: the same code for one process or several, called eagerly or replayed. Never waits for the device."""
    hp = s.hp
    # forward and backward: the losses of micro-batches add up to that of the step
    batch = make_batch(m, s.corpus, "train", m.windows, m.g)
    loss = torch.zeros((), device=hp.device)
    for i in range(RANK, hp.accum, WORLD):      # this process's micro-batches
        part, _ = m.loss(s.model, micro_batch(batch, i, hp.accum, m.hp), m.hp)
        part.backward()
        loss += part.detach()
    sum_over_processes(s.model, loss)

    # clip, then check that all is finite
    params = [p for p in s.model.parameters() if p.grad is not None]                # those that the loss depends on
    norm = torch.nn.utils.clip_grad_norm_(params, hp.grad_clip or math.inf)
    finite = torch.isfinite(loss) & torch.isfinite(norm)
    s.first_nonfinite_step.copy_(torch.where((s.first_nonfinite_step < 0) & ~finite, s.step, s.first_nonfinite_step))

    # update. From the first step that is not finite on, gradients and rate are zero: no weight changes any more
    ok = s.first_nonfinite_step < 0
    for p in params:
        p.grad = torch.where(ok, p.grad, 0.0)
    lr = s.opt.lr * ok
    s.optimizer_step(s.opt, lr, hp)
    if s.model.ngrams is not None:
        s.model.ngrams.update(lr, ok)
    s.model.zero_grad(set_to_none=True)
    return loss, norm


def make_step_fns(s):  # -> {objective: function without arguments that takes a step of this member}
    step_fns = {}
    graphed = None
    for m in s.members:
        step_fn = partial(training_step, s, m)
        if s.hp.cuda_graph:
            step_fn = graphed = GraphedStep(step_fn, [m.g], share=graphed)
        step_fns[m.objective.name] = step_fn
    return step_fns


def compile_step(s):
    torch._dynamo.reset()                       # its limit of compiled graphs would count all runs of a process
    for m in s.members:
        m.loss = torch.compile(m.loss, dynamic=False)
    s.optimizer_step = torch.compile(s.optimizer_step, dynamic=False)


# ---- evaluation
def validation_batches(m, source):  # yields the same batches at every step: of objective and block size alone
    m = Member(m.objective, m.weight, m.n, Namespace(**vars(m.hp) | {"progress": 1.0}))
    for i in range(m.hp.eval_iters):
        batch = draw_batch(m, [source], "val", EVAL_ROWS, f"validation,{i}")
        yield micro_batch(batch, 0, 1, m.hp)


@torch.no_grad()
def evaluate(model, members, corpus):  # -> one record for each source and member, their weighted loss
    """loss: nats, the mean over validation batches, which count alike. bpb: bits per byte, left to right, each window
    after one byte of context; an upper bound where the objective has one; None where it has neither. figures: what the
    loss returns beside it."""
    model.eval()
    records = []
    total = 0.0
    for source, m in itertools.product(corpus, members):
        objective = m.objective
        loss, figures = mean_loss(m, model, validation_batches(m, source))
        nats = loss
        if objective.bpb == "causal":           # not from its own rows, but from plain windows
            plain = Member(CAUSAL, 1.0, m.hp.block_size + 1, m.hp)
            nats, _ = mean_loss(plain, model, validation_batches(plain, source))
        bpb = nats / math.log(2) if objective.bpb else None
        records.append({"split": "val", "data": source["name"], "objective": objective.name, "loss": loss, "bpb": bpb,
                        "figures": figures})
        total += source["weight"] * m.weight * loss
    model.train()
    return records, total


def mean_loss(m, model, batches):  # -> mean loss, {name: mean figure} over batches
    losses = []
    figures = {}
    for batch in batches:
        loss, found = m.objective.loss(model, batch, m.hp)
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

    0 when done, 1 after a loss that is not finite, 128 + signal when stopped; fail() ends with 2. A run that is resumed
    equals one that was never stopped, except after a loss that is not finite: the optimizers' moments have decayed."""
    # everything that may be refused comes before the folder
    use_device(torch.device(hp.device))
    members = get_members(hp)
    corpus = open_corpus(hp.data)
    check_sizes(corpus, max(m.n for m in members), hp.block_size)
    if hp.max_passes and not hp.resume:
        shorten_run(corpus, members, hp)
    move_corpus(corpus, hp)
    s = prepare(corpus, hp)
    hp = s.hp
    status = dict(step=0, seconds=0.0, best=math.inf, best_step=0, val=math.inf, metrics_bytes=0)
    if hp.resume:
        status = resume(load_checkpoint(hp.resume), s)
    else:
        hp.out_dir = choose_out_dir(hp)
    if hp.compile:
        compile_step(s)
    step_fns = make_step_fns(s)

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
            m = member_of_step(s.members, step)
            load_step_inputs(s, m, step)
            loss, norm = step_fns[m.objective.name]()
            if step % hp.log_interval == 0:     # only logging waits for the device
                if int(s.first_nonfinite_step) >= 0:
                    break
                now = time.perf_counter()
                speed = (step + 1 - clock_step) / (now - clock)                     # steps per second
                line = log_step(m, metrics, step, float(loss), float(norm), speed, status["seconds"] + now - clock)
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


def log_step(m, metrics, step, loss, norm, speed, seconds):  # -> what the progress bar shows
    hp = m.hp
    positions = round(speed * hp.batch_size * hp.accum * hp.block_size)             # per second
    write_line(metrics, {"step": step, "split": "train", "data": " ".join(hp.data), "objective": m.objective.name,
                         "loss": loss, "lr": learning_rate(step, hp), "grad_norm": norm, "tok_per_s": positions,
                         "seconds": round(seconds, 3)})
    return f"loss {loss:.3f}, {positions / 1e3:.1f}k positions/s"


def validate(s, status, metrics, stop):  # evaluates, logs, saves best.pt
    records, loss = evaluate(s.model, s.members, s.corpus)
    status["val"] = math.inf if math.isnan(loss) else loss      # NaN: the weights have exploded
    for r in records:
        write_line(metrics, {"step": status["step"], **r, "seconds": round(status["seconds"], 3)})
        say(describe(status["step"], r), stop)
    if status["val"] < status["best"]:
        status["best"] = status["val"]
        status["best_step"] = status["step"]
        save(s, metrics, "best.pt", status)     # before ckpt.pt: after a kill in between, it is written again


def optimizer_tensors(s):  # -> {name: tensor}, for a checkpoint
    tensors = {f"muon.{i}": momentum for i, (_, momentum) in enumerate(s.opt.muon)}
    for i, state in enumerate(s.opt.adamw.state.values()):
        tensors |= {f"adamw.{i}.{name}": t for name, t in state.items()}
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
        passes = hp.max_iters * passes_per_step(source, s.members, hp)
        sizes = f"{len(source['train']):,} bytes to train on, {len(source['val']):,} to validate on"
        print(f"--data {source['name']}: {sizes}; {source['weight']:.1%} of rows, {passes:.2g} passes")
    if status["step"] == 0:
        print("the first row, one character a position (█ MASK, ∅ EOT, ‖ SEP, ① a sentinel, ░ PAD; · no loss):")
        for m in s.members:
            load_step_inputs(s, m, 0)
            show_row(m.objective, make_batch(m, s.corpus, "train", m.windows, m.g))
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
