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

from data import MASK, PAD, SENTINEL, check_sizes, compressor_bits, fail, make_rng, open_corpus, read_windows
from data import sample_windows, to_seed, to_symbol
from model import NGRAMS, StackedLinear
from objectives import CAUSAL, EVAL_ROWS, OBJECTIVES, Member, add_weights, document_mask, get_members
from run import RANK, VERSION, WORLD, GraphedStep, any_rank, barrier, build, catch_signals, choose_out_dir, copy_tensors
from run import draw_losses, get_config, join_processes, load_checkpoint, open_metrics, run_program, save_checkpoint
from run import say, settings_to_save, start_from, sum_over_processes, use_device, write_line
import torch
from torch.optim.adamw import adamw
from tqdm import tqdm

INVERSE_GOLDEN_RATIO = 0.6180339887498949       # its multiples modulo 1 are spread evenly over [0, 1)
HELD_OUT = 4096                                 # bytes of validation text in a checkpoint, for sample.py
MIN_ITERS = 200                                 # --max_passes never shortens a run below this number of steps
MOMENTUM = 0.9                                  # of Muon; at width 128 better than .95
NS_STEPS = 4                                    # iterations of Newton-Schulz; at width 128 as good as 5
NGRAM_WARMUP = 2_500_000                        # maximum number of positions over which the n-gram drop rate grows
BYTES_PER_ROW = 4                               # bytes of text that a row of the n-gram table can memorize


# ---- batches
def make_batch(member, corpus, split, windows, g):  # windows: source (B,), offset (B,) -> batch of B rows
    source, offset = (t.to(corpus[0][split].device) for t in windows)
    x = read_windows(corpus, split, source, offset, member.n)                       # (B, n)
    device = member.hp.device
    if device.startswith("cuda") and not x.is_cuda:             # the corpus does not fit on the GPU
        x = x.pin_memory().to(device, non_blocking=True)
    return add_weights(member.objective.corrupt(x.to(device), g, member.hp))


def draw_batch(member, corpus, split, B, key):  # -> batch of B rows, the same for the same key
    windows = sample_windows(corpus, split, member.n, B, make_rng(f"{key},windows"))
    return make_batch(member, corpus, split, windows, make_rng(f"{key},{member.objective.name}", member.hp.device))


def micro_batch(batch, i, n, hp):  # -> the i-th of n parts, whose numbers of rows differ by at most one
    part = {}
    for key, value in batch.items():
        if not isinstance(value, int):          # an int is the prefix of all rows
            value = value[len(value) * i // n:len(value) * (i + 1) // n]
        part[key] = value
    if hp.doc_mask:
        part |= document_mask(part)
    return part


# ---- optimizers: Muon for the StackedLinear layers inside blocks, AdamW for all other parameters
def make_optimizer(model, hp):  # -> state of both; its tensors keep their addresses, as CUDA graphs require
    """A parameter that the loss of a step does not depend on, such as a head of another member of a mixture, has no
    gradient in this step and is not changed."""
    # all matrices of one network and shape go through Newton-Schulz at once: few large products, not many small ones
    groups = {}                                 # {(network, r, c): [weight (stack, rows, columns)]}
    for name, layer in model.named_modules():
        network, separator, _ = name.rpartition("blocks.")
        if separator and isinstance(layer, StackedLinear):      # a layer inside a block
            r, c = sorted(layer.weight.shape[1:])
            groups.setdefault((network, r, c), []).append(layer.weight)
    matrices = [p for params in groups.values() for p in params]
    in_blocks = set(matrices)
    others = [p for p in model.parameters() if p not in in_blocks]
    muon = []
    if hp.optimizer == "muon":
        for (_, r, c), params in groups.items():
            momentum = torch.zeros(sum(map(len, params)), r, c, device=hp.device)
            muon.append((params, momentum))
    else:
        others += matrices
    # each with its first and second moments and its number of updates
    moments = [(p, torch.zeros_like(p), torch.zeros_like(p), torch.zeros((), device=hp.device)) for p in others]
    return Namespace(lr=torch.zeros((), device=hp.device), matrices=matrices, muon=muon, adamw=moments)


@torch.no_grad()
def optimizer_step(opt, lr, hp):  # lr: 0-D tensor
    if hp.weight_decay:
        for p in opt.matrices:
            if p.grad is not None:
                p.mul_(1 - lr * hp.weight_decay)
    for params, momentum in opt.muon:
        if params[0].grad is not None:          # then all matrices of this network have one
            muon_step(params, momentum, lr, getattr(torch, hp.dtype))
    adamw_step(opt.adamw, lr)


def adamw_step(moments, lr):  # moments: of make_optimizer
    """AdamW (Loshchilov and Hutter 2019). optimizer_step applies the weight decay, to the matrices of blocks only. This
    calls torch's function, because creating torch's class loads the compiler, which takes a second."""
    params, first, second, n_updates = zip(*[state for state in moments if state[0].grad is not None])
    grads = [p.grad for p in params]
    adamw([*params], grads, [*first], [*second], [], [*n_updates], fused=True, lr=lr, beta1=0.9, beta2=0.95, eps=1e-10,
          weight_decay=0.0, amsgrad=False, maximize=False)


def muon_step(params, momentum, lr, dtype):  # params: all matrices of one shape; momentum (N, r, c), r <= c
    """Muon (Jordan et al. 2024): Nesterov momentum, orthogonalized. Updates are scaled to the root mean square of those
    of AdamW (Liu et al. 2025), so one learning rate serves both optimizers."""
    def transpose_tall(t):  # -> r <= c, so that the iteration multiplies the smaller matrices, r x r
        return t if t.size(1) <= t.size(2) else t.mT                                # (stack, r, c)
    grad = torch.cat([transpose_tall(p.grad) for p in params])                      # (N, r, c)
    # Nesterov: average the gradient into the momentum, then look ahead
    momentum.lerp_(grad, 1 - MOMENTUM)
    update = newton_schulz(grad.lerp(momentum, MOMENTUM), dtype)
    update = update.to(momentum.dtype).mul_(lr * 0.2 * momentum.size(2) ** 0.5)
    for p, u in zip(params, update.split([len(p) for p in params])):
        transpose_tall(p).sub_(u)


def newton_schulz(x, dtype):  # (N, r, c), r <= c -> approximately the nearest matrices with orthonormal rows
    """Repeats X <- Q X, where A = X X^T and Q = a I + b A + c A^2 (Jordan et al. 2024). Then all singular values are
    near 1, except those that were very small.

    Gram space (Zhang et al. 2026) saves products of r x c matrices. Since Q is symmetric, the next A is Q A Q, and n
    steps are X <- Q_n ... Q_1 X: iterate A and the product of the Qs, then multiply X once. In bfloat16 A drifts, so it
    is computed from X again every 2 steps; a square X gains nothing, so n is 1."""
    x = x.to(dtype)
    # the iteration needs singular values of at most 1: divide by the Frobenius norm
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    a, b, c = 3.4445, -4.7750, 2.0315
    n = 2 if dtype == torch.bfloat16 else NS_STEPS              # steps between two computations of A from X
    if x.size(1) == x.size(2):
        n = 1
    assert NS_STEPS % n == 0, "in bfloat16 the number of steps must be even"
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


# ---- the plan of a run: number of steps, n-gram drop rate, learning rate
def passes_per_step(source, members, hp):  # -> epochs over this source in a step, on average
    n = sum(member.weight * member.n for member in members)
    return source["weight"] * hp.batch_size * hp.accum * n / len(source["train"])


def shorten_run(corpus, members, hp):
    """Lowers hp.max_iters for a small text, which too many passes would overfit (Muennighoff et al. 2023)."""
    # the passes of a row over its source, averaged over rows
    passes = sum(source["weight"] * passes_per_step(source, members, hp) for source in corpus)
    most = max(MIN_ITERS, math.ceil(hp.max_passes / passes))
    if most < hp.max_iters:
        hp.max_iters = most
        hp.eval_interval = min(hp.eval_interval, math.ceil(most / 4))
        print(f"training stops after {most:,} steps, since the text is small: --max_passes is {hp.max_passes:g}, the "
              f"minimum {MIN_ITERS} steps; --max_iters overrides this")


def ngram_drop_rate(step, corpus, members, hp):  # -> share of n-gram lookups that a step drops
    """The rate is final * growth, averaged over the rows of all sources.

    final: the share for the whole run, higher if it reads the text several times, or the table would memorize it: with
        --ngram_drop 0.5, 0.5 for one pass, 0.8 for four. Passes over a text too long to be memorized count less.
    growth: from 0 to 1 over the first two passes, or NGRAM_WARMUP positions if that is less, since at first the table
        has memorized nothing that the model could rely on. With --init_from it is 1."""
    positions = step * hp.batch_size * hp.accum * hp.block_size
    memorizable = min(1.0, BYTES_PER_ROW * len(NGRAMS) * hp.ngram_rows / sum(len(source["train"]) for source in corpus))
    rate = 0.0
    for source in corpus:
        passes = passes_per_step(source, members, hp)
        repetitions = max(0.0, (hp.max_iters * passes - 1) * memorizable)
        final = 1 - (1 - hp.ngram_drop) / (1 + repetitions) ** (2 / 3)
        growth = 1.0 if hp.init_from else min(1.0, max(step * passes / 2, positions / NGRAM_WARMUP))
        rate += source["weight"] * final * growth
    return rate if hp.ngram_drop else 0.0


def learning_rate(step, hp):  # warmup, constant, decay: rises linearly, and at the end falls linearly to 0
    warmup = (step + 1) / (hp.warmup_iters + 1)
    decay = (hp.max_iters - step) / max(1, hp.lr_decay * hp.max_iters)
    return hp.learning_rate * min(warmup, 1.0, decay)


# ---- a training step
def prepare(corpus, hp):  # -> State before the first step
    """State, a Namespace, holds everything that a step reads and writes, in tensors that keep their addresses, so that
    a CUDA graph can replay the step. load_step_inputs sets windows, seeds, rates and step number; training_step writes
    the rest."""
    model = build(hp)
    if hp.init_from and not hp.resume:
        start_from(model, load_checkpoint(hp.init_from)["model"], hp.init_from)
    if model.ngrams is not None:
        model.ngrams.keep_lookups = True
    hp = Namespace(**vars(hp) | {"progress": torch.zeros((), device=hp.device)})
    members = []                                # each with its loss, perhaps compiled, its windows and its generator
    for m in get_members(hp):
        windows = corpus[0]["train"].new_zeros(2, hp.batch_size * hp.accum, dtype=torch.long)       # source, offset
        members.append(Namespace(**vars(m), loss=m.objective.loss, windows=windows, g=torch.Generator(hp.device)))
    return Namespace(
        hp=hp, members=members, corpus=corpus, model=model,
        opt=make_optimizer(model, hp), optimizer_step=optimizer_step,               # perhaps compiled
        # of each source, for checkpoints and logs
        sources=[[source[key] for key in ("name", "size", "crc", "weight")] for source in corpus],
        step=torch.zeros((), dtype=torch.long, device=hp.device),
        # the first step whose loss or gradient was not finite; -1 if there was none
        first_nonfinite_step=torch.full((), -1, device=hp.device))


def member_of_step(members, step):  # -> the member that a step trains
    """Each member has its share of any stretch of steps: with two equal weights, u is 0, 0.62, 0.24, 0.85 in the first
    steps, which train the members 0, 1, 0, 1."""
    u = step * INVERSE_GOLDEN_RATIO % 1
    upper = 0.0
    for member in members:
        upper += member.weight
        if u < upper:
            break
    return member                               # the last one, where rounding leaves the sum below u


def load_step_inputs(s, member, step):
    """Copies what the host decides into the tensors that the step reads, without waiting for the device."""
    hp = s.hp
    key = f"{hp.seed},{hp.init_step + step}"    # a run with --init_from reads the windows after its parent's
    n_rows = hp.batch_size * hp.accum
    windows = sample_windows(s.corpus, "train", member.n, n_rows, make_rng(f"{key},windows"))
    for static, new in zip(member.windows, windows):
        if static.is_cuda:
            new = new.pin_memory()
        static.copy_(new, non_blocking=True)    # a captured graph reads this address
    member.g.manual_seed(to_seed(f"{key},{member.objective.name}"))
    s.opt.lr.fill_(learning_rate(step, hp))
    s.step.fill_(step)
    hp.progress.fill_(1.0 if hp.init_from else step / max(1, hp.max_iters))
    if s.model.ngrams is not None:
        s.model.ngrams.drop.fill_(ngram_drop_rate(step, s.corpus, s.members, hp))
        s.model.ngrams.seed.fill_(to_seed(key))


def training_step(s, member):  # -> loss (nats), norm of the gradient; 0-D each
    """One update, in one process or several, run eagerly or as a CUDA graph. Never waits for the device."""
    hp = s.hp
    # forward and backward: the losses of micro-batches add up to that of the step
    batch = make_batch(member, s.corpus, "train", member.windows, member.g)
    loss = torch.zeros((), device=hp.device)
    for i in range(RANK, hp.accum, WORLD):      # this process's micro-batches
        part, _ = member.loss(s.model, micro_batch(batch, i, hp.accum, member.hp), member.hp)
        part.backward()
        loss += part.detach()
    sum_over_processes(s.model, loss)

    # clip, then check that loss and gradient are finite
    params = [p for p in s.model.parameters() if p.grad is not None]                # those that the loss depends on
    norm = torch.nn.utils.clip_grad_norm_(params, hp.grad_clip or math.inf)
    finite = torch.isfinite(loss) & torch.isfinite(norm)
    s.first_nonfinite_step.copy_(torch.where((s.first_nonfinite_step < 0) & ~finite, s.step, s.first_nonfinite_step))

    # update; from the first non-finite step on with zero gradients and a zero rate, so that no weight changes any more
    ok = s.first_nonfinite_step < 0
    for p in params:
        p.grad = torch.where(ok, p.grad, 0.0)
    lr = s.opt.lr * ok
    s.optimizer_step(s.opt, lr, hp)
    if s.model.ngrams is not None:
        s.model.ngrams.update(lr, ok)
    s.model.zero_grad(set_to_none=True)
    return loss, norm


def make_step_fns(s):  # -> {objective: function without arguments that takes a step with this member}
    step_fns = {}
    graphed = None
    for member in s.members:
        step_fn = partial(training_step, s, member)
        if s.hp.cuda_graph:
            step_fn = graphed = GraphedStep(step_fn, [member.g], share=graphed)
        step_fns[member.objective.name] = step_fn
    return step_fns


def compile_step(s):
    if s.model.ngrams is not None:              # torch.compile does not support the hook
        s.model.ngrams.look_up = torch.compiler.disable(s.model.ngrams.look_up)
    torch._dynamo.reset()                       # torch's limit of recompilations is per process: reset it for each run
    for member in s.members:
        member.loss = torch.compile(member.loss, dynamic=False)
    s.optimizer_step = torch.compile(s.optimizer_step, dynamic=False)


# ---- evaluation
def validation_batches(member, source):  # yields batches that depend only on source, objective and block size
    member = Member(member.objective, member.weight, member.n, Namespace(**vars(member.hp) | {"progress": 1.0}))
    for i in range(member.hp.eval_iters):
        batch = draw_batch(member, [source], "val", EVAL_ROWS, f"validation,{i}")
        yield micro_batch(batch, 0, 1, member.hp)


@torch.no_grad()
def evaluate(model, members, corpus):  # -> a record for each source and member, their weighted mean loss
    """A record holds "loss", in nats, and "figures", both means over validation batches, and "bpb", bits per byte as
    defined by Objective.bpb, or None; clm's windows start with one byte of context."""
    model.eval()
    records = []
    total = 0.0
    for source, member in itertools.product(corpus, members):
        objective = member.objective
        loss, figures = mean_loss(member, model, validation_batches(member, source))
        nats = loss
        if objective.bpb == "causal":           # bits per byte come from clm's rows
            plain = Member(CAUSAL, 1.0, member.hp.block_size + 1, member.hp)
            nats, _ = mean_loss(plain, model, validation_batches(plain, source))
        bpb = nats / math.log(2) if objective.bpb else None
        records.append({"split": "val", "data": source["name"], "objective": objective.name, "loss": loss, "bpb": bpb,
                        "figures": figures})
        total += source["weight"] * member.weight * loss
    model.train()
    return records, total


def mean_loss(member, model, batches):  # -> mean loss, {name: mean figure} over batches
    results = [member.objective.loss(model, batch, member.hp) for batch in batches]
    loss = statistics.fmean(float(loss) for loss, _ in results)
    names = results[0][1]
    return loss, {name: statistics.fmean(float(figures[name]) for _, figures in results) for name in names}


# ---- a run
def main(argv=None, with_sample=True):  # -> exit code; with_sample=False: no loss.png, no compressors, no sample
    hp = get_config(sys.argv[1:] if argv is None else argv)
    join_processes(hp)
    code, s = train(hp)
    if with_sample and not RANK:
        draw_losses(s.hp.out_dir)
        if code == 0:
            finish(s)
    return code


def train(hp):  # -> exit code, State
    """Trains, evaluates and saves. Exit codes: 0 when done, 1 after a loss that is not finite, 128 + signal. A resumed
    run equals one that was never stopped. Exception: after a loss that is not finite the optimizers' moments decay."""
    s, status = set_up(hp)
    hp = s.hp
    step_fns = make_step_fns(s)
    barrier()                                   # every process has chosen the folder before the first one makes it
    with open_metrics(hp.out_dir, status["metrics_bytes"]) as metrics, catch_signals() as stop:
        announce(s, metrics, status)
        start = clock_step = status["step"]
        clock = last_line = time.perf_counter()
        # one extra iteration, which only evaluates and saves
        bar = tqdm(range(start, hp.max_iters + 1), total=hp.max_iters, initial=start, disable=True if RANK else None,
                   unit="step", dynamic_ncols=True)
        for step in bar:
            # evaluate and save
            is_due = step % hp.eval_interval == 0 or step == hp.max_iters
            is_stopped = any_rank(bool(stop))
            is_saved = hp.resume and step == start              # a resumed run starts at a saved step
            if (is_due or is_stopped) and not is_saved:
                if int(s.first_nonfinite_step) >= 0:
                    break
                status["step"] = step
                status["seconds"] += time.perf_counter() - clock                    # without evaluations
                if is_due:
                    validate(s, status, metrics, stop)
                save(s, metrics, "ckpt.pt", status)
                clock = time.perf_counter()
                clock_step = step
            if step == hp.max_iters or is_stopped:
                break

            # take a step
            member = member_of_step(s.members, step)
            load_step_inputs(s, member, step)
            loss, norm = step_fns[member.objective.name]()

            # log
            if step % hp.log_interval == 0:     # only logging waits for the device
                if int(s.first_nonfinite_step) >= 0:
                    break
                now = time.perf_counter()
                speed = (step + 1 - clock_step) / (now - clock)                     # steps per second
                line = log_step(member, metrics, step, float(loss), float(norm), speed, status["seconds"] + now - clock)
                bar.set_postfix_str(line)
                if bar.disable and now - last_line > 5:         # not a terminal: print a line every 5 seconds
                    last_line = now
                    say(f"step {step:6d} | {line}, {duration((hp.max_iters - step) / speed)} left", stop)

        bad = int(s.first_nonfinite_step)
        if bad >= 0:
            save(s, metrics, "ckpt.pt", status | {"step": bad})                     # the weights before that step
            barrier()                           # no process ends before the file is written
            if not RANK:
                print(f"error: loss or gradient not finite at step {bad}; {hp.out_dir} holds the weights before it. "
                      f"Try --init_from {hp.out_dir} with a lower --learning_rate or --dtype float32", file=sys.stderr)
            return 1, s
        if is_stopped and step < hp.max_iters:
            say(f"stopped at step {step}, saved. Resume with: python train.py --resume --out_dir {hp.out_dir}", stop)
            return 128 + (stop[0] if stop else signal.SIGTERM), s                   # empty if another process got it
    if status["val"] > status["best"]:
        print(f"validation loss was lowest at step {status['best_step']}: {status['best']:.4f} nats, now "
              f"{status['val']:.4f}; {hp.out_dir}/best.pt holds that state")
    return 0, s


def set_up(hp):  # -> State, status: the numbers that a checkpoint holds besides weights and settings
    """All refusals come before the folder is made."""
    use_device(torch.device(hp.device))
    members = get_members(hp)
    corpus = open_corpus(hp.data)
    check_sizes(corpus, max(member.n for member in members), hp.block_size)
    if hp.max_passes and not hp.resume:
        shorten_run(corpus, members, hp)
    move_corpus(corpus, hp)
    s = prepare(corpus, hp)
    status = dict(step=0, seconds=0.0, best=math.inf, best_step=0, val=math.inf, metrics_bytes=0)
    if hp.resume:
        status = resume(load_checkpoint(hp.resume), s)
    else:
        s.hp.out_dir = choose_out_dir(hp)
    if hp.compile:
        compile_step(s)
    return s, status


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


def validate(s, status, metrics, stop):  # evaluates, logs, saves best.pt
    records, loss = evaluate(s.model, s.members, s.corpus)
    status["val"] = math.inf if math.isnan(loss) else loss      # NaN: the weights have exploded
    for record in records:
        write_line(metrics, {"step": status["step"], **record, "seconds": round(status["seconds"], 3)})
        say(describe(status["step"], record), stop)
    if status["val"] < status["best"]:
        status["best"] = status["val"]
        status["best_step"] = status["step"]
        save(s, metrics, "best.pt", status)     # before ckpt.pt: a run killed in between evaluates and saves again


# ---- checkpoints
def optimizer_tensors(s):  # -> {name: tensor}
    tensors = {f"muon.{i}": momentum for i, (_, momentum) in enumerate(s.opt.muon)}
    for i, (_, first, second, n_updates) in enumerate(s.opt.adamw):
        tensors |= {f"adamw.{i}.first": first, f"adamw.{i}.second": second, f"adamw.{i}.updates": n_updates}
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


def resume(ckpt, s):  # loads weights and optimizer -> status; fails if corpus or number of steps do not fit
    hp = s.hp
    if [x[1:] for x in ckpt["sources"]] != [x[1:] for x in s.sources]:
        fail(f"--data {' '.join(hp.data)}: its bytes or weights are not those of the run in {hp.out_dir}. "
             f"Try the same data, or --init_from {hp.out_dir}")
    if hp.max_iters < ckpt["step"]:
        fail(f"--max_iters {hp.max_iters}: the run in {hp.out_dir} is at step {ckpt['step']}. Try a larger number")
    planned = ckpt["config"]["max_iters"]
    if hp.max_iters != planned:
        print(f"resuming with {hp.max_iters} steps in place of {planned}; learning rate and drop rate follow")
    copy_tensors(s.model.state_dict(), ckpt["model"], hp.resume)
    copy_tensors(optimizer_tensors(s), ckpt["optimizer"], hp.resume)
    return {key: ckpt[key] for key in ("step", "seconds", "best", "best_step", "val", "metrics_bytes")}


# ---- what a run prints and logs
def announce(s, metrics, status):  # the first line of metrics.jsonl, the first lines on the terminal
    hp = s.hp
    size = sum(p.numel() for p in s.model.parameters())
    table = 0 if s.model.ngrams is None else s.model.ngrams.table.numel()
    threads = torch.get_num_threads()
    if metrics.tell() == 0:
        write_line(metrics, {"config": settings_to_save(hp), "version": VERSION, "torch": torch.__version__,
                             "processes": WORLD, "threads": threads, "parameters": size + table,
                             "ngram_parameters": table, "sources": s.sources})
    print(f"{hp.objective} | {size:,} parameters and {table:,} in the n-gram table | {hp.out_dir}")
    print(f"{hp.device}, {threads} {'thread' if threads == 1 else 'threads'}, {WORLD} "
          f"{'process' if WORLD == 1 else 'processes'} | activations {hp.dtype} | {hp.max_iters:,} steps")
    for source in s.corpus:
        passes = hp.max_iters * passes_per_step(source, s.members, hp)
        sizes = f"{len(source['train']):,} bytes to train on, {len(source['val']):,} to validate on"
        print(f"--data {source['name']}: {sizes}; {source['weight']:.1%} of rows, {passes:.2g} passes")
    if status["step"] == 0:
        print("rows of the first batch, one of each kind, one character for each position:")
        print("█ MASK, ∅ EOT, ‖ SEP, ① a sentinel, ░ PAD, � a byte that is no character, · no loss")
        for member in s.members:
            load_step_inputs(s, member, 0)
            show_rows(member.objective, make_batch(member, s.corpus, "train", member.windows, member.g))
    sys.stdout.flush()


def show_rows(objective, batch, width=96, most=256):  # prints inputs above targets, and the label if there is one
    """Kinds of rows differ in the mask, causal or not, or in the control id that they start with. Of each kind the row
    with the least PAD is shown."""
    inp = batch["inp"].flatten(1)
    shown = set()
    for b in (inp == PAD).sum(1).argsort(stable=True).tolist():
        prefix = batch["prefix"] if isinstance(batch["prefix"], int) else int(batch["prefix"][b])
        first = int(inp[b, 0])
        kind = prefix == 0, first if MASK < first < SENTINEL else None
        if kind in shown:
            continue
        shown.add(kind)
        keys = [key for key in batch if key == "inp" or key.endswith("tgt") and batch[key].dim() == 2]
        rows = {key: batch[key][b].flatten()[:most].tolist() for key in keys}
        for i in range(0, len(rows["inp"]), width):
            for key, row in rows.items():
                is_ids = key in ("inp", "tgt")  # other targets may be labels
                symbols = [to_symbol(id) if is_ids or id < 0 else str(id) for id in row[i:i + width]]
                print(f"  {objective.name} {key}   {''.join(symbols)}")
        if "labels" in batch:
            print(f"  {objective.name} label {int(batch['labels'][b])}")


def log_step(member, metrics, step, loss, norm, speed, seconds):  # -> what the progress bar shows
    hp = member.hp
    positions = round(speed * hp.batch_size * hp.accum * hp.block_size)             # per second
    write_line(metrics, {"step": step, "split": "train", "data": " ".join(hp.data), "objective": member.objective.name,
                         "loss": loss, "lr": learning_rate(step, hp), "grad_norm": norm, "tok_per_s": positions,
                         "seconds": round(seconds, 3)})
    return f"training loss {loss:.3f}, {positions:,} positions/s"


def duration(seconds):  # 8426 -> "2 h 20 min", 75 -> "1 min 15 s", 3 -> "3 s"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    if minutes:
        return f"{minutes} min {seconds} s"
    return f"{seconds} s"


def describe(step, record):  # -> a line for a record of evaluate
    loss = record["loss"]
    figures = record["figures"]
    terms = ", ".join(f"{name} {value:.4f}" for name, value in figures.items() if value != loss)    # "nll" may equal it
    line = f"loss {loss:.4f} nats" + (f" ({terms})" if terms else "")
    if "nll" in figures:
        line += f", perplexity {math.exp(min(figures['nll'], 700.0)):.2f}"
    if record["bpb"] is not None:
        kind = {"bound": "<= ", "causal": "causal rows "}.get(OBJECTIVES[record["objective"]].bpb, "")
        line += f", {kind}{record['bpb']:.4f} bits/byte"
    return f"step {step:6d} | validation on {record['data']}: {record['objective']} {line}"


def finish(s):  # compressors, a sample
    out_dir = s.hp.out_dir
    if any(member.objective.bpb for member in s.members):
        for source in s.corpus:
            bits = compressor_bits(source["val"])
            print(f"for comparison, compressors on the validation text of {source['name']}: {bits}")
    print(flush=True)
    import sample  # here, since training does not need it
    sample.main(["--out_dir", out_dir, "--device", s.hp.device])
    print(f"\ndone: {out_dir}/ckpt.pt. More samples: python sample.py --out_dir {out_dir}")


if __name__ == "__main__":
    run_program(main)
