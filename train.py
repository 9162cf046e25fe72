"""Train any objective of objectives.py on any bytes.

    python train.py                                     clm on the Python standard library's own source
    python train.py --objective mlm --data book.txt     another objective, your own text
    python train.py --resume                            resume the latest run
    python train.py --init_from out/clm --data new.txt:0.95 stdlib:0.05     continual pre-training, with replay

B rows of a batch, T = block_size positions of a row, n raw bytes that fill a row, N matrices of one shape (r, c)
"""
import contextlib
import itertools
import json
import math
import os
import signal
import sys
import time
from argparse import Namespace
from dataclasses import replace

from data import check_sizes, compressor_bits, document_ids, fail, make_rng, open_corpus, read_windows, sample_windows
from data import to_seed, to_symbol
from model import NGRAM_DIM, NGRAMS, StackedLinear
from objectives import CAUSAL, EVAL_ROWS, OBJECTIVES, get_members, n_targets
from run import RANK, VERSION, WORLD, GraphedStep, build, choose_out_dir, copy_tensors, discard_stdout, get_config
from run import load_checkpoint, open_metrics, run_program, save_checkpoint, start_from, use_device
import torch
from tqdm import tqdm

HELD_OUT = 4096                                 # bytes of validation text kept in the checkpoint for sample.py
MIN_ITERS = 200                                 # fewest steps of a run without --max_iters, however small its text
BETAS, EPS = (0.9, 0.95), 1e-10                 # of AdamW
MOMENTUM, NS_STEPS = 0.9, 4                     # of Muon; at width 128 as good as 5 steps, and .9 better than .95
NS_COEFFICIENTS = 3.4445, -4.7750, 2.0315
NGRAM_DECAY, NGRAM_RATE = 0.95, 6.0             # n-gram table: decay of second moments; multiple of the rate
NGRAM_WARMUP = 2_500_000                        # positions over which its drop rate grows, at most
BYTES_PER_ROW = 4                               # of text, that a row of the n-gram table can memorize


# ---- batches
def draw_windows(m, corpus, split, B, key):  # member -> source (B,), offset (B, candidates), on the CPU
    return sample_windows(corpus, split, m.n, B, make_rng(f"{key}{m.key},windows"), m.objective.single_document)


def make_batch(m, corpus, split, windows, g):  # windows: as draw_windows returns them -> batch
    source, offset = (t.to(corpus[0][split].device) for t in windows)
    x = read_windows(corpus, split, source, offset, m.n)                            # (B, n)
    if m.hp.device.startswith("cuda") and not x.is_cuda:        # a corpus too large for the GPU
        x = x.pin_memory().to(m.hp.device, non_blocking=True)
    batch = m.objective.corrupt(x.to(m.hp.device), g, m.hp)
    if m.hp.doc_mask:                           # of the corrupted ids: a masked EOT does not end a document
        batch["doc"] = document_ids(batch["inp"])
    return batch


def draw_batch(m, corpus, split, B, key):  # -> batch of B rows, a pure function of member and key
    windows = draw_windows(m, corpus, split, B, key)
    return make_batch(m, corpus, split, windows, make_rng(f"{key}{m.key},{m.objective.name}", m.hp.device))


def micro_batch(batch, i, n):  # -> the i-th of n parts, equal to within a row; an int is a prefix of all rows
    return {k: v if isinstance(v, int) else v[len(v) * i // n:len(v) * (i + 1) // n] for k, v in batch.items()}


# ---- optimizers: Muon for the StackedLinear layers inside blocks, ngram_step for the n-gram table, AdamW for the rest
def make_optimizer(model, hp):  # -> its state, in tensors that keep their addresses for a CUDA graph
    hidden = [m.weight for name, m in model.named_modules() if isinstance(m, StackedLinear) and "blocks." in name]
    rest = [p for name, p in model.named_parameters() if name != "ngrams.table" and not any(p is q for q in hidden)]
    by_shape = {}                               # one Newton-Schulz call per shape: few large products, not many small
    for p in hidden if hp.optimizer == "muon" else []:          # (n, rows, columns): n matrices of one shape
        by_shape.setdefault(tuple(sorted(p.shape[1:])), []).append(p)
    muon = [(params, torch.zeros(sum(map(len, params)), *shape, device=hp.device))              # momentum (N, r, c)
            for shape, params in by_shape.items()]
    adamw = rest + hidden if hp.optimizer == "adamw" else rest
    first, second = torch.zeros(2, sum(p.numel() for p in adamw), device=hp.device)             # one p after another
    rows = 0 if model.ngrams is None else len(model.ngrams.table)
    ngrams = torch.zeros(rows, device=hp.device)                # second moments of the table's rows (R,)
    lr = torch.zeros((), device=hp.device)
    return Namespace(lr=lr, hidden=hidden, muon=muon, adamw=adamw, first=first, second=second, ngrams=ngrams)


def optimizer_tensors(opt):  # -> {name: tensor}, for a checkpoint
    momenta = {f"muon.{i}": momentum for i, (_, momentum) in enumerate(opt.muon)}
    return momenta | {"adamw.first": opt.first, "adamw.second": opt.second, "ngrams": opt.ngrams}


@torch.no_grad()
def optimizer_step(opt, table, lookups, step, found_inf, hp):  # lookups: of take_lookups; step, found_inf: 0-D
    lr = opt.lr * ~found_inf                    # where found_inf nothing changes, without waiting for the device
    for p in opt.hidden if hp.weight_decay else []:
        p.mul_(1 - lr * hp.weight_decay)
    for params, momentum in opt.muon:
        muon_step(params, momentum, lr, found_inf, getattr(torch, hp.dtype))
    adamw_step(opt.adamw, opt.first, opt.second, step, lr, found_inf)
    if lookups:
        ngram_step(table, opt.ngrams, lookups, lr, found_inf)


def gradients(params):  # None: no term depends on it
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in params]


def adamw_step(params, first, second, step, lr, found_inf):  # first, second (n,): moments
    """AdamW (Loshchilov and Hutter 2019), but for its weight decay, which comes before."""
    grad = torch.cat([g.flatten() for g in gradients(params)])                      # (n,)
    first.lerp_(torch.where(found_inf, first, grad), 1 - BETAS[0])
    second.lerp_(torch.where(found_inf, second, grad.square()), 1 - BETAS[1])
    mean = first / (1 - BETAS[0] ** (step + 1))
    square = second / (1 - BETAS[1] ** (step + 1))
    update = lr * mean / (square.sqrt() + EPS)
    for p, u in zip(params, update.split([p.numel() for p in params])):
        p.sub_(u.view_as(p))


def take_lookups(table):  # -> [(row (n,), gradient (n, D), mean squared gradient (n,))] of the last backward pass
    """Takes the gradient away, since torch would add up the next one's lookups by rows."""
    if table is None or table.grad is None:     # None: no term depends on it
        return []
    row = table.grad._indices()[0]
    grad = table.grad._values()
    table.grad = None
    return [(row, grad, grad.square().mean(1))]


def ngram_step(table, moments, lookups, lr, found_inf):  # table (R, D), moments (R,), lookups: of take_lookups
    """Updates only the rows that were looked up, as RMSprop does, with one second moment a row: a decayed sum, not a
    mean, to which each lookup adds its own. No shape depends on how many lookups share a row."""
    moments.mul_(torch.where(found_inf, 1.0, NGRAM_DECAY))
    for row, _, square in lookups:
        moments.index_add_(0, row, torch.where(found_inf, 0.0, square))
    for row, grad, _ in lookups:
        scale = NGRAM_RATE * lr / (moments[row].sqrt() + EPS)
        table.index_add_(0, row, -scale[:, None] * torch.where(found_inf, 0.0, grad))


def muon_step(params, momentum, lr, found_inf, dtype):  # momentum (N, r, c), r <= c: all matrices of one shape at once
    """Muon (Jordan et al. 2024): Nesterov momentum, orthogonalized. Scaled to the root mean square of AdamW's
    updates (Liu et al. 2025), so that one learning rate serves both."""
    def transpose_tall(t):  # the shorter side first: the iteration multiplies r x r matrices
        return t if t.size(1) <= t.size(2) else t.mT                                # (n, r, c)
    # where found_inf, the momentum is the gradient and the rate is 0, so that nothing changes
    grad = torch.where(found_inf, momentum, torch.cat([transpose_tall(g) for g in gradients(params)]))
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
    device = corpus[0]["train"].device
    progress = torch.zeros((), device=hp.device)                # share of the run's steps that are done, for corrupt
    members = [replace(m, hp=Namespace(**vars(m.hp) | {"progress": progress})) for m in members]
    return Namespace(
        hp=hp, members=members, corpus=corpus, model=model, opt=make_optimizer(model, hp), progress=progress,
        # of each source, for checkpoints and logs
        sources=[[source[key] for key in ("name", "size", "crc", "weight")] for source in corpus],
        optimizer_step=optimizer_step,          # perhaps compiled, as are the losses
        # of each member: its loss function; source (B,) and offset (B, candidates) of its windows
        losses=[m.objective.loss for m in members],
        windows=[[t.to(device) for t in draw_windows(m, corpus, "train", m.rows, "0")] for m in members],
        gens=[torch.Generator(hp.device) for _ in members],
        # all parameters but the n-gram table, and that table, or None
        params=[p for name, p in model.named_parameters() if name != "ngrams.table"],
        table=None if model.ngrams is None else model.ngrams.table,
        step=torch.zeros((), dtype=torch.long, device=hp.device),
        # the first step whose loss or gradient was not finite, else -1
        first_nonfinite_step=torch.full((), -1, device=hp.device))


def load_step_inputs(s, step):
    """Copies what the host decides into the tensors that the step reads, without waiting for the device."""
    hp = s.hp
    key = f"{hp.seed},{hp.init_step + step}"    # --init_from: continues after the windows of its parent
    for m, windows, g in zip(s.members, s.windows, s.gens):
        for a, b in zip(windows, draw_windows(m, s.corpus, "train", m.rows, key)):
            if a.is_cuda:
                b = b.contiguous().pin_memory()
            a.copy_(b, non_blocking=True)       # copied, not replaced: a captured graph reads addresses
        g.manual_seed(to_seed(f"{key}{m.key},{m.objective.name}"))
    s.opt.lr.fill_(learning_rate(step, hp))
    s.step.fill_(step)
    s.progress.fill_(1.0 if hp.init_from else step / max(1, hp.max_iters))
    if s.table is not None:
        s.model.ngrams.drop.fill_(ngram_drop_rate(step, s.corpus, s.members, hp))
        s.model.ngrams.seed.fill_(to_seed(key))


def training_step(s):  # -> loss (nats: sum over terms of coefficient * sum / count), norm of the gradient
    """One update: the same code for one process or several, called eagerly or replayed. Never waits for the device."""
    hp = s.hp
    # forward and backward: sums of nats, divided by the counts of the whole batch
    lookups = []
    loss = torch.zeros((), device=hp.device)
    for m, loss_fn, windows, g in zip(s.members, s.losses, s.windows, s.gens):
        batch = make_batch(m, s.corpus, "train", windows, g)
        terms = m.objective.terms(batch, m.hp)
        for i in range(RANK, hp.accum, WORLD):  # this process's micro-batches
            micro = micro_batch(batch, i, hp.accum)
            if len(micro["inp"]):               # a member may have fewer rows than there are micro-batches
                sums = loss_fn(s.model, micro, m.hp)
                parts = [coefficient * sums[term] / n for term, (n, coefficient) in terms.items() if coefficient]
                part = m.weight * sum(parts)
                part.backward()
                loss += part.detach()
                lookups += take_lookups(s.table)
    if WORLD > 1:
        lookups = sum_over_processes(s.params, s.table, lookups, loss)

    # clip, check that all is finite, update
    norm = torch.nn.utils.clip_grad_norm_(s.params, hp.grad_clip or math.inf)
    finite = torch.isfinite(loss) & torch.isfinite(norm)
    # sticky: from the first step that is not finite on, no update changes anything
    s.first_nonfinite_step.copy_(torch.where((s.first_nonfinite_step < 0) & ~finite, s.step, s.first_nonfinite_step))
    s.optimizer_step(s.opt, s.table, lookups, s.step, s.first_nonfinite_step >= 0, hp)
    s.model.zero_grad(set_to_none=True)
    return loss, norm


def compile_step(s):
    torch._dynamo.reset()                       # its limit of compiled graphs would count all runs of a process
    if s.table is not None:                     # a compiler takes no sparse gradient
        s.model.ngrams.look_up = torch.compiler.disable(s.model.ngrams.look_up)
    s.losses = [torch.compile(loss, dynamic=False) for loss in s.losses]
    s.optimizer_step = torch.compile(s.optimizer_step, dynamic=False)


# ---- evaluation
def validation_batches(m, source):  # fixed windows under fixed corruption: of objective and block size alone
    m = replace(m, key="", hp=Namespace(**vars(m.hp) | {"progress": 1.0}))
    return [draw_batch(m, [source], "val", EVAL_ROWS, f"validation,{i}") for i in range(m.hp.eval_iters)]


@torch.no_grad()
def evaluate(model, members, corpus, hp):  # -> one record for each source and member, their weighted loss
    """loss: nats, the total of the objective. bpb: bits per byte, left to right, each window after one byte of
    context; an upper bound where the objective has one; None where it has neither. targets: targets per row position,
    whatever their weight. terms: the loss's terms and metrics."""
    model.eval()
    records = []
    total = 0.0
    for source, m in itertools.product(corpus, members):
        objective = m.objective
        batches = validation_batches(m, source)
        figures, loss = mean_terms(objective, model, batches, hp)
        nats = loss
        if objective.bpb == "causal":           # not from its own rows, but from plain windows
            plain = validation_batches(replace(m, objective=CAUSAL, n=hp.block_size + 1), source)
            nats = mean_terms(CAUSAL, model, plain, hp)[1]
        targets = sum(float(n_targets(objective, b, hp)) for b in batches) / len(batches) / EVAL_ROWS / hp.block_size
        records.append({"split": "val", "data": source["name"], "objective": objective.name, "loss": loss,
                        "bpb": nats / math.log(2) if objective.bpb else None, "targets": targets, "terms": figures})
        total += source["weight"] * m.weight * loss
    model.train()
    return records, total


def mean_terms(objective, model, batches, hp):  # -> {term: sum of sums / sum of counts}, their weighted total
    terms = [objective.terms(b, hp) for b in batches]
    sums = [objective.loss(model, b, hp) for b in batches]
    means = {}
    for term in sums[0]:
        count = sum(float(t[term][0]) for t in terms)
        means[term] = sum(float(s[term]) for s in sums) / max(1.0, count)
    return means, sum(terms[0][term][1] * mean for term, mean in means.items())


# ---- several processes, as torchrun starts them: each takes every WORLD-th micro-batch
def join_processes(hp):
    if hp.accum % WORLD or hp.cuda_graph:
        fail(f"--accum {hp.accum}: {WORLD} processes share the micro-batches of a step. Try a multiple of {WORLD}, "
             "without --cuda_graph")
    if not torch.distributed.is_initialized():  # gloo: messages between hosts, without waiting for a device
        torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if hp.device.startswith("cuda") else "gloo")


def sum_over_processes(params, table, lookups, loss):  # -> lookups of all processes, as one for each row of the table
    """Replaces gradients and loss by their sums. All processes get the same bits only if the sum of each row of the
    table, too, is computed once and shared."""
    grads = gradients(params)
    tensors = [*grads, loss]
    if table is not None:
        sums = table.new_zeros(len(table), NGRAM_DIM + 1)       # of gradients and mean squares
        for row, grad, square in lookups:
            sums.index_add_(0, row, torch.cat((grad, square[:, None]), dim=1))
        tensors.append(sums)
    for t in tensors:
        torch.distributed.all_reduce(t)
    for p, grad in zip(params, grads):
        p.grad = grad
    return [] if table is None else [(torch.arange(len(table), device=table.device), sums[:, :-1], sums[:, -1])]


def any_rank(flag):  # -> is it true in any process?
    result = torch.tensor(int(flag))
    if WORLD > 1:
        torch.distributed.all_reduce(result, torch.distributed.ReduceOp.MAX)
    return bool(result)


# ---- the run
def main(argv=None, with_sample=True):  # -> exit code; with_sample: draws losses, prints compressors and a sample
    hp = get_config(sys.argv[1:] if argv is None else argv)
    if WORLD > 1:
        join_processes(hp)
    if RANK:                                    # the first process prints for all
        sys.stdout = open(os.devnull, "w", encoding="utf-8")
    code, s = train(hp)
    if with_sample and not RANK:
        draw_losses(hp)
        if s:
            finish(s)
    return code


def train(hp):  # -> exit code, State of a run that is done or None
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
    run = dict(step=0, seconds=0.0, best=math.inf, best_step=0, val=math.inf, metrics_bytes=0)
    if hp.resume:
        run = resume(load_checkpoint(hp.resume), s)
    if hp.compile:
        compile_step(s)
    step_fn = lambda: training_step(s)
    if hp.cuda_graph:
        step_fn = GraphedStep(step_fn, s.gens)

    if not hp.resume:
        hp.out_dir = choose_out_dir(hp)
    any_rank(False)                             # the first process makes the folder after all have looked into it
    with open(os.devnull, "r+b") if RANK else open_metrics(hp.out_dir) as metrics, catch_signals() as stop:
        if not RANK:                            # drop log lines after the checkpoint: those steps are run again
            is_whole = metrics.seek(0, os.SEEK_END) >= run["metrics_bytes"]         # else it starts anew
            metrics.truncate(run["metrics_bytes"] if is_whole else 0)
            metrics.seek(0, os.SEEK_END)
        announce(s, metrics, run)
        start = clock_step = run["step"]
        clock = last_line = time.perf_counter()
        # once more than there are steps: the last iteration only evaluates and saves
        bar = tqdm(range(start, hp.max_iters + 1), total=hp.max_iters, initial=start, disable=True if RANK else None,
                   unit="step", dynamic_ncols=True)
        for step in bar:
            due = step % hp.eval_interval == 0 or step == hp.max_iters
            halt = any_rank(bool(stop))
            if (due or halt) and (step > start or not hp.resume):
                if int(s.first_nonfinite_step) >= 0:
                    break
                run["step"] = step
                run["seconds"] += time.perf_counter() - clock   # evaluation is not counted
                if due:
                    records, loss = evaluate(s.model, members, corpus, hp)
                    run["val"] = math.inf if math.isnan(loss) else loss             # NaN: far too large weights
                    for r in records:
                        write_line(metrics, {"step": step, **r, "seconds": round(run["seconds"], 3)})
                        say(describe(step, r), stop)
                    if run["val"] < run["best"]:
                        run["best"] = run["val"]
                        run["best_step"] = step
                        save(s, metrics, "best.pt", run)        # first: after a kill in between, it is written again
                save(s, metrics, "ckpt.pt", run)
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
                positions = round(speed * hp.batch_size * hp.accum * hp.block_size)                     # per second
                write_line(metrics, {
                    "step": step, "split": "train", "data": " ".join(hp.data), "objective": hp.objective,
                    "loss": float(loss), "lr": learning_rate(step, hp), "grad_norm": float(norm),
                    "tok_per_s": positions, "seconds": round(run["seconds"] + now - clock, 3)})
                line = f"loss {float(loss):.3f}, {positions / 1e3:.1f}k positions/s"
                bar.set_postfix_str(line)
                if bar.disable and now - last_line > 5:         # no terminal: a plain line every 5 seconds
                    last_line = now
                    say(f"step {step:6d} | {line}, {(hp.max_iters - step) / speed:.0f} s left", stop)
        bad = int(s.first_nonfinite_step)
        if bad >= 0:                            # no update was made after it
            save(s, metrics, "ckpt.pt", run | {"step": bad})
            any_rank(False)                     # no process ends before the file is written
            if not RANK:
                print(f"error: loss or gradient not finite at step {bad}; {hp.out_dir} holds the state before it. "
                      f"Try --init_from {hp.out_dir} with a lower --learning_rate or --dtype float32", file=sys.stderr)
            return 1, None
        if halt and step < hp.max_iters:
            say(f"stopped at step {step}, saved. Resume with: python train.py --resume --out_dir {hp.out_dir}", stop)
            return 128 + (stop[0] if stop else signal.SIGTERM), None                # empty: another process got it
    if run["val"] > run["best"]:
        print(f"validation loss was lowest at step {run['best_step']}: {run['best']:.4f} nats, now {run['val']:.4f}; "
              f"{hp.out_dir}/best.pt holds that state")
    return 0, s


def save(s, metrics, name, run):
    if RANK:
        return
    os.fsync(metrics.fileno())                  # the checkpoint stores its length
    save_checkpoint(os.path.join(s.hp.out_dir, name), run | dict(
        version=VERSION, config=vars(s.hp) | {"resume": False}, sources=s.sources,
        metrics_bytes=metrics.tell(), held_out=s.corpus[0]["val"][:HELD_OUT].cpu().clone(),
        model=s.model.state_dict(), optimizer=optimizer_tensors(s.opt)))


def resume(ckpt, s):  # -> step, clock and best value of the checkpoint; fails where corpus or plan are not its own
    hp = s.hp
    if [x[1:] for x in ckpt["sources"]] != [x[1:] for x in s.sources]:
        fail(f"--data {' '.join(hp.data)}: its bytes or weights are not those of the run in {hp.out_dir}. "
             f"Try the same data, or --init_from {hp.out_dir}")
    if hp.max_iters < ckpt["step"]:
        fail(f"--max_iters {hp.max_iters}: the run in {hp.out_dir} is at step {ckpt['step']}. Try a larger number")
    if hp.max_iters != ckpt["config"]["max_iters"]:
        print(f"resume: {ckpt['config']['max_iters']} steps planned, now {hp.max_iters}; the schedules follow")
    copy_tensors(s.model.state_dict(), ckpt["model"], hp.resume)
    copy_tensors(optimizer_tensors(s.opt), ckpt["optimizer"], hp.resume)
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


def write_line(f, record):  # one JSON object, flushed
    record = json.loads(json.dumps(record), parse_constant=lambda _: None)          # JSON has no infinity and no NaN
    f.write(json.dumps(record).encode() + b"\n")
    f.flush()


def say(text, stop):  # where nobody reads it any more (| head, a closed terminal), the run stops as by a signal
    try:
        tqdm.write(text)
        sys.stdout.flush()
    except OSError:
        discard_stdout()
        stop.append(getattr(signal, "SIGPIPE", signal.SIGTERM))                     # Windows has no such signal


def announce(s, metrics, run):  # the first line of metrics.jsonl, the first lines on the terminal
    hp = s.hp
    size = sum(p.numel() for p in s.params)
    table = 0 if s.table is None else s.table.numel()
    if metrics.tell() == 0:
        write_line(metrics, {"config": vars(hp), "version": VERSION, "torch": torch.__version__, "processes": WORLD,
                             "threads": torch.get_num_threads(), "parameters": size + table,
                             "ngram_parameters": table, "sources": s.sources})
    print(f"{hp.objective} | {size:,} parameters and {table:,} in the n-gram table | {hp.out_dir}")
    print(f"{hp.device}, {torch.get_num_threads()} threads, {WORLD} processes | activations {hp.dtype} | "
          f"{hp.max_iters:,} steps")
    for source in s.corpus:
        passes = hp.max_iters * passes_per_step(source, s.members)
        print(f"--data {source['name']}: {source['size']:,} bytes, {source['weight']:.1%} of rows, {passes:.2g} passes")
    if run["step"] == 0:
        print("the first row, one character a position (█ MASK, ∅ EOT, ‖ SEP, ① a sentinel, ░ PAD; · no loss):")
        load_step_inputs(s, 0)
        for m, windows, g in zip(s.members, s.windows, s.gens):
            show_row(m.objective, make_batch(m, s.corpus, "train", windows, g))
    sys.stdout.flush()


def show_row(objective, batch, width=96, most=256):  # prints the first row of a batch, inputs above targets
    rows = {k: batch[k][0].flatten()[:most].tolist() for k in ("inp", "tgt") if k in batch}
    for i in range(0, len(rows["inp"]), width):
        for k, row in rows.items():
            print(f"  {objective.name} {k}   {''.join(map(to_symbol, row[i:i + width]))}")


def describe(step, r):  # -> a line for a record of evaluate
    bound = "<= " if OBJECTIVES[r["objective"]].bpb == "bound" else ""
    bpb = "" if r["bpb"] is None else f", {bound}{r['bpb']:.4f} bits/byte"
    terms = "" if len(r["terms"]) == 1 else " (" + ", ".join(f"{k} {v:.4f}" for k, v in r["terms"].items()) + ")"
    perplexity = f", perplexity {math.exp(min(r['terms']['nll'], 700.0)):.2f}" if "nll" in r["terms"] else ""
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


def draw_losses(hp):  # into loss.png beside metrics.jsonl: nats over steps, by split, objective and source
    try:
        from matplotlib.figure import Figure  # here: it is optional
    except ImportError:
        return
    curves = {}
    with open(os.path.join(hp.out_dir, "metrics.jsonl"), "rb") as f:
        for r in [json.loads(line) for line in f][1:]:
            curves.setdefault(f"{r['split']} {r['objective']}, {r['data']}", []).append((r["step"], r["loss"]))
    axes = Figure().subplots()
    for label, points in sorted(curves.items()):
        style = dict(marker="o", ms=3) if label.startswith("val") else dict(lw=0.6, alpha=0.6)
        axes.plot(*zip(*points), label=label, **style)
    axes.set(xlabel="step", ylabel="loss (nats per target)")
    axes.legend()
    axes.figure.savefig(os.path.join(hp.out_dir, "loss.png"), dpi=120, bbox_inches="tight")


# ---- how a run is stopped
@contextlib.contextmanager
def catch_signals():  # -> a list of the signals that were received; a second one ends the process at once
    stop = []

    def handler(number, frame):
        stop.append(number)
        signal.signal(number, signal.SIG_DFL)
    caught = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
    caught = [number for number in caught if signal.getsignal(number) is not signal.SIG_IGN]        # of nohup
    before = {number: signal.signal(number, handler) for number in caught}
    try:
        yield stop
    finally:
        for number, old in before.items():
            signal.signal(number, old)


if __name__ == "__main__":
    run_program(main)
