"""Train any objective of objectives.py on any bytes.

    python train.py                                     clm on the Python standard library's own source
    python train.py --objective mlm --data book.txt     another objective, your own text
    python train.py --resume                            resume the latest run
    python train.py --init_from out/clm --data new.txt:0.95 stdlib:0.05     continual pre-training, with replay

B rows of a batch, T = block_size positions of a row, n raw bytes that fill a row, N lengths of n-grams
"""
import contextlib
import json
import math
import os
import platform
import signal
import sys
import threading
import time
from dataclasses import dataclass

# isort: off  data silences a warning of torch's, and so comes before it
from data import check_sizes, compressor_bits, document_ids, error_reason, fail, make_rng, open_corpus, read_windows
from data import reseed, sample_windows, to_symbol
from model import NGRAM_DIM, NGRAMS, NgramLookups, StackedLinear
from objectives import CAUSAL, EVAL_ROWS, OBJECTIVES, Continue, get_objective, member_batch, members_of, n_targets
from objectives import trained_use
from run import RANK, VERSION, WORLD, GraphedStep, build, checkpoint_path, choose_out_dir, defaults, get_config
from run import discard_stdout, is_out_of_memory, load_checkpoint, load_weights, open_metrics, preserve_torch_state
from run import run_program, save_checkpoint, use_device, write_line
import torch
from tqdm import tqdm

HELD_OUT = 4096                                 # bytes of validation text kept in the checkpoint for sample.py
MIN_ITERS = 200                                 # fewest steps of a run without --max_iters, however small its text
BETAS, EPS = (0.9, 0.95), 1e-10                 # of AdamW
MOMENTUM, NS_STEPS = 0.9, 4                     # of Muon; at width 128 as good as 5 steps, and .9 better than .95
NGRAM_DECAY, NGRAM_RATE = 0.95, 6.0             # n-gram table: decay of second moments; multiple of the rate
NGRAM_WARMUP = 2_500_000                        # positions over which its drop rate grows, at most
BYTES_PER_ROW = 4                               # of text, that a row of the n-gram table can memorize


# ---- batches

def draw_windows(objective, corpus, split, B, key, hp):  # -> source (B,), offset (B, candidates), on the CPU
    n = objective.n_bytes(hp.block_size, hp)
    return sample_windows(corpus, split, n, B, make_rng(f"{key},windows"), objective.single_document)


def make_batch(objective, corpus, split, windows, g, hp):  # windows: as draw_windows returns them -> batch
    source, offset = (t.to(corpus[0][split].device) for t in windows)
    x = read_windows(corpus, split, source, offset, objective.n_bytes(hp.block_size, hp))           # (B, n)
    if hp.device.startswith("cuda") and not x.is_cuda:          # a corpus too large for the GPU
        x = x.pin_memory()                      # makes the copy asynchronous
    batch = objective.corrupt(x.to(hp.device, non_blocking=True), g, hp)
    if hp.doc_mask:                             # of the corrupted ids: a masked EOT does not end a document
        batch |= {with_suffix(k, "doc"): document_ids(batch[k]) for k in input_keys(batch)}
    return batch


def input_keys(batch):  # -> ["inp"]; of a mixture ["clm.inp", "mlm.inp"]
    return [k for k in batch if k.endswith("inp")]


def with_suffix(key, name):  # "clm.inp" -> "clm.doc"
    return key.removesuffix("inp") + name


def ngram_scales(batch, drop, g):  # a batch, 0-D -> {key: (B, ..., T, N)}: a factor for each n-gram lookup
    """0 with probability drop, else 1 / (1 - drop)."""
    scales = {}
    for k in input_keys(batch):
        u = torch.rand(*batch[k].shape, len(NGRAMS), generator=g, device=g.device)
        scales[with_suffix(k, "ngram_scale")] = (u >= drop) / (1 - drop)
    return scales


def add_lookups(batch):  # a micro-batch with ngram_scales -> the same with NgramLookups, and a list of these
    lookups = {}
    for k in input_keys(batch):
        if with_suffix(k, "ngram_scale") in batch:
            scale = batch[with_suffix(k, "ngram_scale")].flatten(0, -3)             # (B, T, N)
            row = torch.zeros_like(scale, dtype=torch.long)
            delta = scale.new_zeros(*scale.shape, NGRAM_DIM, requires_grad=True)
            lookups[with_suffix(k, "lookups")] = NgramLookups(scale, row, delta)
    return batch | lookups, [*lookups.values()]


def draw_batch(objective, corpus, split, B, key, hp):  # -> batch of B rows, a pure function of key
    """Windows from a generator on the CPU, corruption from one on the device."""
    windows = draw_windows(objective, corpus, split, B, key, hp)
    return make_batch(objective, corpus, split, windows, make_rng(f"{key},{objective.name}", hp.device), hp)


def micro_batch(batch, i, n):  # -> the i-th of n equal parts; a mixture's members have different numbers of rows
    part = {}
    for k, v in batch.items():
        if isinstance(v, int):                  # a prefix of all rows
            part[k] = v
        else:
            rows = len(v) // n
            part[k] = v[i * rows:(i + 1) * rows]
    return part


# ---- optimizer

def make_optimizer(model, hp):
    """-> dict(adamw=AdamW, muon={shape: (params, momentum)}, moments=of the n-gram table's rows, lr=0-D tensor)

    Muon for the StackedLinear layers inside blocks, ngram_step for the n-gram table, AdamW for embeddings, heads and
    vectors."""
    hidden = [m.weight for name, m in model.named_modules() if isinstance(m, StackedLinear) and "blocks." in name]
    rest = [p for p in model.parameters() if p.requires_grad and not any(p is q for q in hidden)]
    groups = [dict(params=rest, weight_decay=0.0)]
    if hp.optimizer == "adamw":
        groups.append(dict(params=hidden, weight_decay=hp.weight_decay))
        hidden = []
    by_shape = {}                               # one Newton-Schulz call per shape: few large products, not many small
    for p in hidden:                            # (n, rows, columns): n matrices of one shape
        by_shape.setdefault(tuple(sorted(p.shape[1:])), []).append(p)
    muon = {}
    for shape, params in by_shape.items():
        muon[shape] = params, torch.zeros(sum(len(p) for p in params), *shape, device=params[0].device)
    lr = torch.zeros((), device=hp.device)      # a tensor, so that a captured step reads each step's rate
    adamw = torch.optim.AdamW(groups, lr=lr, betas=BETAS, eps=EPS, fused=True, capturable=lr.is_cuda)
    moments = None if model.ngrams is None else torch.zeros(len(model.ngrams.table), device=hp.device)
    return dict(adamw=adamw, muon=muon, moments=moments, lr=lr)


def optimizer_step(opt, found_inf, hp):
    """Skips the update where found_inf (0-D bool), without waiting for the device."""
    if found_inf.device.type == "mps" and found_inf:            # some versions of torch ignore found_inf on mps
        return
    adamw = opt["adamw"]
    adamw.grad_scale, adamw.found_inf = None, found_inf.float()                     # read by the fused kernel
    adamw.step()
    for params, momentum in opt["muon"].values():
        muon_step(params, momentum, opt["lr"], found_inf, hp)


@torch.no_grad()
def ngram_step(table, moments, lookups, lr, found_inf):  # table (R, D), moments (R,), lookups [(row, gradient, square)]
    """Updates only the rows that were looked up, once for each lookup: RMSprop with one second moment a row.
    row (n,), gradient (n, D), its mean square (n,): no shape depends on how many lookups share a row."""
    moments.mul_(torch.where(found_inf, 1.0, NGRAM_DECAY))
    for row, _, square in lookups:
        moments.index_add_(0, row, torch.where(found_inf, 0.0, square))
    for row, grad, _ in lookups:
        scale = NGRAM_RATE * lr / (moments[row].sqrt() + EPS)
        table.index_add_(0, row, -scale[:, None] * torch.where(found_inf, 0.0, grad))


@torch.no_grad()
def muon_step(params, momentum, lr, found_inf, hp):  # momentum (N, r, c), r <= c: all matrices of one shape at once
    """Muon (Jordan et al. 2024): Nesterov momentum, orthogonalized. Scaled to the root mean square of AdamW's
    updates (Liu et al. 2025), so that one learning rate serves both."""
    def transpose_tall(t):  # the shorter side first: the iteration multiplies r x r matrices
        return t if t.size(1) <= t.size(2) else t.mT                                # (n, r, c)
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]     # None: no term depends on it
    # where found_inf, the momentum is the gradient and the rate is 0, so that nothing changes
    grad = torch.where(found_inf, momentum, torch.cat([transpose_tall(g) for g in grads]))          # (N, r, c)
    lr = lr * ~found_inf
    # Nesterov: average the gradient into the momentum, then look ahead
    momentum.lerp_(grad, 1 - MOMENTUM)
    update = newton_schulz(grad.lerp(momentum, MOMENTUM), getattr(torch, hp.dtype))
    update = update.to(momentum.dtype).mul_(lr * 0.2 * momentum.size(2) ** 0.5)
    for p, u in zip(params, update.split([len(p) for p in params])):
        if hp.weight_decay:
            p.mul_(1 - lr * hp.weight_decay)
        p.sub_(u if p.size(1) <= p.size(2) else u.mT)


def newton_schulz(x, dtype):  # (N, r, c) -> approximately the nearest matrices with orthonormal rows
    """The iteration with the coefficients of Jordan et al. 2024; all but small singular values end near 1."""
    x = x.to(dtype)
    # the iteration needs singular values of at most 1: divide by the Frobenius norm
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(NS_STEPS):
        a = x @ x.mT                                                                # A (N, r, r)
        b = torch.baddbmm(a, a, a, beta=-4.7750, alpha=2.0315)                      # B = -4.775 A + 2.0315 A^2
        x = torch.baddbmm(x, b, x, beta=3.4445)                                     # 3.4445 X + B X
    return x


# ---- what follows from the length of a run

def passes_per_step(source, objective, hp):  # -> passes that a step makes over the source
    rows = hp.batch_size * hp.accum * source["weight"]
    return rows * objective.n_bytes(hp.block_size, hp) / len(source["train"])


def most_passes_per_step(corpus, objective, hp):  # -> of the source that a step reads most often
    return max(passes_per_step(source, objective, hp) for source in corpus)


def plan_steps(corpus, objective, hp):
    """Fewer steps for a small text: repeated too often, it is overfitted (Muennighoff et al. 2023)."""
    most = max(MIN_ITERS, math.ceil(hp.max_passes / most_passes_per_step(corpus, objective, hp)))
    if most < hp.max_iters:
        hp.max_iters = most
        if hp.eval_interval == defaults(hp.device.partition(":")[0])["eval_interval"]:
            hp.eval_interval = math.ceil(most / 4)


def ngram_drop_rate(step, corpus, objective, hp):  # -> share of n-gram lookups that a step drops
    """Grows over the first two passes over the text (NGRAM_WARMUP positions at most): at first the table has memorized
    nothing that the model could rely on too much. Runs of several passes end at a higher rate, since the table would
    memorize the text; a text much longer than the table cannot be memorized, and its repetitions count less. A run
    that starts from another's weights starts at the full rate."""
    if not hp.ngram_drop:
        return 0.0
    repetitions = 0.0                           # passes after the first, of the source that is memorized most
    for source in corpus:
        repeated = max(0.0, hp.max_iters * passes_per_step(source, objective, hp) - 1)
        memorizable = min(1.0, BYTES_PER_ROW * len(NGRAMS) * hp.ngram_rows / len(source["train"]))
        repetitions = max(repetitions, repeated * memorizable)
    end = 1 - (1 - hp.ngram_drop) / (1 + repetitions) ** (2 / 3)
    if hp.init_from:
        return end
    passes = step * most_passes_per_step(corpus, objective, hp)
    positions = step * hp.batch_size * hp.accum * hp.block_size
    return end * min(1.0, max(passes / 2, positions / NGRAM_WARMUP))


def learning_rate(step, hp):
    """Linear warm-up, constant, linear to 0: the smallest of the three applies."""
    warm = (step + 1) / (hp.warmup_iters + 1)
    fall = (hp.max_iters - step) / max(1, hp.lr_decay * hp.max_iters)
    return hp.learning_rate * min(warm, 1.0, fall)


# ---- a step

@dataclass
class State:
    """All that a training step reads and writes, in tensors that keep their addresses, so that a CUDA graph can replay
    the step. The host writes windows, seed, rates and step number (load_step_inputs); the device writes the rest."""
    hp: object
    objective: object
    corpus: list
    model: torch.nn.Module
    loss: object                                # the objective's, perhaps compiled
    opt: dict
    windows: list                               # source (B,), offset (B, candidates) of the step
    g: torch.Generator
    step: torch.Tensor
    first_nonfinite_step: torch.Tensor          # the first step whose loss or gradient was not finite, else -1
    ngram_drop: torch.Tensor                    # share of n-gram lookups that the step drops
    params: list                                # all parameters that take a gradient, so not the n-gram table


def prepare(objective, corpus, hp):  # -> State before the first step
    device = torch.device(hp.device)
    model = build(hp)
    windows = draw_windows(objective, corpus, "train", hp.batch_size * hp.accum, "0", hp)           # for its shapes
    return State(
        hp, objective, corpus, model, objective.loss, make_optimizer(model, hp),
        params=[p for p in model.parameters() if p.requires_grad],
        windows=[t.to(corpus[0]["train"].device) for t in windows],
        g=torch.Generator(device), step=torch.zeros((), dtype=torch.long, device=device),
        ngram_drop=torch.zeros((), device=device),
        first_nonfinite_step=torch.full((), -1, device=device))


def load_step_inputs(s, step):
    """Copies what the host decides into the tensors that the step reads, without waiting for the device."""
    hp = s.hp
    key = f"{hp.seed},{hp.init_step + step}"    # --init_from: continues after the windows of its parent
    new = draw_windows(s.objective, s.corpus, "train", hp.batch_size * hp.accum, key, hp)
    for a, b in zip(s.windows, new):            # copied, not replaced: a captured graph reads addresses
        if a.is_cuda:
            b = b.contiguous().pin_memory()
        a.copy_(b, non_blocking=True)
    reseed(s.g, f"{key},{s.objective.name}")
    s.opt["lr"].fill_(learning_rate(step, hp))
    s.ngram_drop.fill_(ngram_drop_rate(step, s.corpus, s.objective, hp))
    s.step.fill_(step)


def training_step(s):  # -> batch, loss (nats: sum over terms of coefficient * sum / count), norm of the gradient
    """One update: the same code for one process or several, called eagerly or replayed. Never waits for the device."""
    hp = s.hp
    batch = training_batch(s)
    lookups = []                                # of n-grams, for ngram_step

    # forward and backward: sums of nats, divided by the counts of the whole batch
    loss = torch.zeros_like(s.first_nonfinite_step, dtype=torch.float32)
    terms = s.objective.terms(batch, hp)
    for i in range(RANK, hp.accum, WORLD):      # this process's micro-batches
        micro, micro_lookups = add_lookups(micro_batch(batch, i, hp.accum))
        part = weighted_loss(s.loss(s.model, micro, hp), terms)
        part.backward()
        loss += part.detach()
        for lookup in micro_lookups:
            if lookup.delta.grad is not None:   # None: no term depends on it
                grad = lookup.delta.grad.flatten(0, 2)
                lookups.append((lookup.row.flatten(), grad, grad.square().mean(1)))
    if WORLD > 1:
        all_reduce_sum([p.grad for p in s.params if p.grad is not None] + [loss])
        lookups = sum_lookups(lookups, s.model.ngrams.table) if lookups else []

    # clip, check that all is finite, update
    norm = torch.nn.utils.clip_grad_norm_(s.params, hp.grad_clip or math.inf)
    finite = torch.isfinite(loss) & torch.isfinite(norm)
    s.first_nonfinite_step.copy_(torch.where((s.first_nonfinite_step < 0) & ~finite, s.step, s.first_nonfinite_step))
    found_inf = s.first_nonfinite_step >= 0
    optimizer_step(s.opt, found_inf, hp)
    if lookups:
        ngram_step(s.model.ngrams.table, s.opt["moments"], lookups, s.opt["lr"], found_inf)
    for p in s.params:
        p.grad = None
    return batch, loss, norm


def training_batch(s):  # -> the batch of the windows, seed and drop rate that the host wrote into s
    batch = make_batch(s.objective, s.corpus, "train", s.windows, s.g, s.hp)
    return batch if s.model.ngrams is None else batch | ngram_scales(batch, s.ngram_drop, s.g)


def weighted_loss(sums, terms):  # {term: sum}, {term: (count, coefficient)} -> 0-D
    total = 0.0
    for term, x in sums.items():
        count, coefficient = terms[term]
        if coefficient:
            total = total + coefficient * x / count
    return total


def compile_loss(s):  # -> the compiled loss, or the plain one where torch.compile fails, which it tries here
    loss = torch.compile(s.loss, fullgraph=True, dynamic=False)
    try:
        micro, _ = add_lookups(micro_batch(training_batch(s), 0, s.hp.accum))
        sum(loss(s.model, micro, s.hp).values()).backward()
    except Exception as e:                      # no compiler, an old one, an operating system without support
        why = f"{type(e).__name__}: {str(e).strip().splitlines()[0]}"
        print(f"--compile: does not work here ({why}), continuing without it")
        loss = s.loss
    for p in s.params:
        p.grad = None
    return loss


# ---- evaluation

def validation_list(objective, corpus, hp):  # -> [(source, weight, member, batches, causal batches or None)]
    """Each source's own fixed windows under fixed corruption: they depend on the objective and the block size alone.
    Where bits per byte do not come from the objective's own rows, causal batches of plain windows are added."""
    def fixed_batches(m, source):
        return [draw_batch(m, [source], "val", EVAL_ROWS, f"validation,{i}", hp) for i in range(hp.eval_iters)]
    entries = []
    for source in corpus:
        for weight, m in members_of(objective):
            causal = None
            batches = fixed_batches(m, source)
            if m.bpb == "causal" and trained_use(m, Continue, hp):
                causal = fixed_batches(CAUSAL, source)
            entries.append((source, source["weight"] * weight, m, batches, causal))
    return entries


@torch.no_grad()
def evaluate(model, validation, hp):  # -> one record for each source and member
    """loss: nats, the total of the objective. bpb: bits per byte, left to right, each window after one byte of
    context; an upper bound where the objective has one; None where it has neither. targets: targets per row position,
    whatever their weight. terms: the loss's terms and metrics."""
    records = []
    for source, _, m, batches, causal in validation:
        figures, loss = mean_terms(m, model, batches, hp)
        nats = mean_terms(CAUSAL, model, causal, hp)[1] if causal else loss
        positions = EVAL_ROWS * hp.block_size
        share = sum(float(n_targets(m, b, hp)) for b in batches) / len(batches) / positions
        records.append({"split": "val", "data": source["name"], "objective": m.name, "loss": loss,
                        "bpb": nats / math.log(2) if causal or m.bpb in ("loss", "bound") else None,
                        "targets": share, "terms": figures})
    return records


def mean_terms(objective, model, batches, hp):  # -> {term: sum of sums / sum of counts}, their weighted total
    terms = [objective.terms(b, hp) for b in batches]
    sums = [objective.loss(model, b, hp) for b in batches]
    means = {}
    for term in sums[0]:
        count = sum(float(t[term][0]) for t in terms)
        means[term] = sum(float(s[term]) for s in sums) / max(1.0, count)
    return means, sum(terms[0][term][1] * mean for term, mean in means.items())


def plot(path):  # metrics.jsonl -> loss.png beside it: nats over steps, by split, objective and source
    import matplotlib  # here: it is optional
    matplotlib.use("Agg")
    from matplotlib import pyplot
    with open(path, "rb") as f:
        records = [json.loads(line) for line in f][1:]
    curves = {}
    for r in records:
        curves.setdefault(f"{r['split']} {r['objective']}, {r['data']}", []).append((r["step"], r["loss"]))
    for label, points in sorted(curves.items()):
        style = dict(marker="o", ms=3) if label.startswith("val") else dict(lw=0.6, alpha=0.6)
        pyplot.plot(*zip(*points), label=label, **style)
    pyplot.xlabel("step")
    pyplot.ylabel("loss (nats per target)")
    pyplot.legend()
    pyplot.savefig(os.path.join(os.path.dirname(path), "loss.png"), dpi=120, bbox_inches="tight")
    pyplot.close()


# ---- several processes, as torchrun starts them: each takes every WORLD-th micro-batch

def join_processes(hp):
    """Fails where the micro-batches cannot be shared, or a flag is for one process alone."""
    if WORLD == 1:
        return
    if hp.accum % WORLD:
        fail(f"--accum {hp.accum}: {WORLD} processes share the micro-batches of a step. "
             f"Try --accum {WORLD * math.ceil(hp.accum / WORLD)}")
    if hp.cuda_graph or any(d.split(":")[0] == "-" for d in hp.data):
        fail(f"{'--cuda_graph' if hp.cuda_graph else '--data -'}: is for one process. Try without torchrun")
    if not torch.distributed.is_initialized():  # gloo: messages between hosts, without waiting for a device
        torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if hp.device.startswith("cuda") else "gloo")


def all_reduce_sum(tensors):  # replaces each by its sum over all processes, in one exchange
    flat = torch.cat([t.flatten() for t in tensors])
    torch.distributed.all_reduce(flat)
    for t, summed in zip(tensors, flat.split([t.numel() for t in tensors])):
        t.copy_(summed.view_as(t))


def sum_lookups(lookups, table):  # -> the lookups of all processes, as one for each row of the table
    """Dense: all processes get the same bits only if each row's sum is computed once and shared."""
    sums = torch.zeros_like(table)
    squares = table.new_zeros(len(table))
    for row, grad, square in lookups:
        sums.index_add_(0, row, grad)
        squares.index_add_(0, row, square)
    all_reduce_sum([sums, squares])
    return [(torch.arange(len(table), device=table.device), sums, squares)]


def any_rank(flag):  # -> is it true in any process?
    result = torch.tensor(int(flag))
    if WORLD > 1:
        torch.distributed.all_reduce(result, torch.distributed.ReduceOp.MAX)
    return bool(result)


def barrier():
    any_rank(False)


# ---- the run

@preserve_torch_state()
def main(argv=None, with_sample=True):  # -> exit code
    """Restores torch's global switches and the signal handlers at the end, for notebooks and tests; run.tune_malloc
    stays. with_sample: ends with compressors, the picture and a sample."""
    hp = get_config(sys.argv[1:] if argv is None else argv)
    stop = []                                   # signals that were received
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")                # a console that lacks a character prints "?"
    with contextlib.ExitStack() as stack:
        nowhere = stack.enter_context(open(os.devnull, "w"))
        stack.enter_context(contextlib.redirect_stdout(nowhere if RANK else PipeSafeStdout(stop)))
        try:
            join_processes(hp)
            code, s = train(hp, stop, stack)
            if s and with_sample and RANK == 0:
                finish(s)
            return code
        except RuntimeError as e:
            if not is_out_of_memory(e):
                raise
            hint = "a smaller model, or fewer --ngram_rows"
            if hp.batch_size > 1:
                hint = f"--batch_size {hp.batch_size // 2} --accum {2 * hp.accum}, or " + hint
            if hp.resume:                       # which takes none of these flags
                hint = "a device with more memory"
            fail(f"a model of {hp.n_layer} layers and width {hp.n_embd}, or a batch of {hp.batch_size} rows of "
                 f"{hp.block_size}, does not fit here ({str(e).splitlines()[0][:80]}). Try {hint}")


def train(hp, stop, stack):  # -> exit code, State of a run that is done or None
    """Folder, corpus, model; then steps, each a pure function of (seed, step).

    0 when done, 1 after a loss that is not finite, 128 + signal when stopped; fail() ends with 2."""
    # the folder, locked for one process before the corpus and a checkpoint are read
    precision = use_device(torch.device(hp.device))
    objective = get_objective(hp)
    if not hp.resume:
        hp.out_dir = choose_out_dir(hp)
    barrier()                                   # the first process makes the folder after all have looked for one
    metrics = stack.enter_context(open(os.devnull, "r+b") if RANK else open_metrics(hp.out_dir))

    # the corpus
    corpus = open_corpus(hp.data, hp.out_dir, hp.resume)
    for source in corpus:
        source["train"] = source["train"][:hp.train_bytes or None]
    check_sizes(corpus, objective.n_bytes(hp.block_size, hp), hp.block_size)
    if hp.max_passes and not hp.resume:
        plan_steps(corpus, objective, hp)
    sources = [[source[key] for key in ("name", "size", "crc", "weight")] for source in corpus]
    move_corpus(corpus, hp)

    # the model, its optimizer, their state in a checkpoint
    s = prepare(objective, corpus, hp)
    progress = dict(step=0, seconds=0.0, best=math.inf, best_step=0, val=math.inf, metrics_bytes=0)
    parent = None                               # the checkpoint of --init_from
    if hp.resume:
        progress = resume(load_checkpoint(hp.resume), s, sources)
    elif hp.init_from:
        parent = load_checkpoint(hp.init_from)
        load_weights(s.model, parent, hp.init_from, init=hp)
    validation = validation_list(objective, corpus, hp)
    if not RANK:                                # drop log lines after the checkpoint: those steps are run again
        metrics.truncate(min(progress["metrics_bytes"], os.path.getsize(metrics.name)))
    metrics.seek(0, os.SEEK_END)
    announce(s, sources, precision, metrics)
    if parent:
        announce_parent(parent, hp)
    if hp.resume and progress["step"] == hp.max_iters:
        print(f"{hp.out_dir} is finished, at step {hp.max_iters:,}. A larger --max_iters prolongs it")
    if progress["step"] == 0:
        key = f"{hp.seed},{hp.init_step}"
        show_example(draw_batch(objective, corpus, "train", hp.batch_size * hp.accum, key, hp), objective)
    if hp.compile or hp.device.startswith("cuda"):
        torch._dynamo.reset()                   # its cache limit would count all runs of a process
    if hp.compile:
        s.loss = compile_loss(s)

    log = Log(s, metrics, progress)
    handlers = catch_signals(stop)
    stack.callback(restore_handlers, handlers)
    step, stopped = run_steps(s, log, validation, sources, progress["step"], stop)
    if int(s.first_nonfinite_step) < 0:         # else end_run saves, which Ctrl-C must not interrupt
        restore_handlers(handlers)
    signal_number = None
    if stopped:
        signal_number = stop[0] if stop else signal.SIGTERM     # empty where another process received it
    return end_run(s, log, sources, step, signal_number)


def run_steps(s, log, validation, sources, start, stop):  # -> the step that it reached, did any process get a signal?
    """Steps from `start` to max_iters; evaluates and saves between them. Ends early after a signal, whose number is
    in the list stop, and at the next log line or evaluation after a loss or gradient that was not finite."""
    hp = s.hp

    def step_fn():
        return training_step(s)
    if hp.cuda_graph:
        step_fn = GraphedStep(step_fn, [s.g])
    # once more than there are steps: the last iteration only evaluates and saves
    for step in range(start, hp.max_iters + 1):
        due = step % hp.eval_interval == 0 or step == hp.max_iters
        halt = any_rank(bool(stop))
        if (due or halt) and (step > start or not hp.resume):
            if int(s.first_nonfinite_step) >= 0:
                break
            log.pause_clock()
            if due:
                records = evaluate(s.model, validation, hp)
                is_best = log.write_evaluation(step, records, validation)
                if is_best:
                    save(s, log, "best.pt", step, sources)      # first: after a kill in between, it is written again
            save(s, log, "ckpt.pt", step, sources)
            log.resume_clock(step)
        if step == hp.max_iters or halt:
            break
        load_step_inputs(s, step)
        batch, loss, norm = step_fn()
        log.bar.update()
        if step % hp.log_interval == 0:         # only logging waits for the device
            if int(s.first_nonfinite_step) >= 0:
                break
            log.write_step(step, batch, float(loss), float(norm))
    return step, halt


def end_run(s, log, sources, step, signal_number):  # -> exit code, State of a run that is done or None
    hp = s.hp
    log.bar.close()
    bad = int(s.first_nonfinite_step)
    if bad >= 0:                                # no update was made after it
        log.pause_clock()
        save(s, log, "ckpt.pt", bad, sources)
        barrier()                               # no process ends before the file is written
        print(f"error: loss or gradient not finite at step {bad}; {hp.out_dir} holds the state before it. "
              f"Try --init_from {hp.out_dir} with a lower --learning_rate or --dtype float32", file=sys.stderr)
        draw_losses(hp)
        return 1, None
    log.metrics.close()
    if signal_number and step < hp.max_iters:
        print(f"stopped at step {step}, saved. Resume with: python train.py --resume --out_dir {hp.out_dir}")
        draw_losses(hp)
        return 128 + signal_number, None
    if log.val > log.best:
        print(f"validation loss was lowest at step {log.best_step}: {log.best:.4f} nats, now {log.val:.4f}; "
              f"{hp.out_dir}/best.pt holds that state")
    return 0, s


class Log:
    """A run's output while it trains: lines of metrics.jsonl, the bar or plain lines; and its clock."""

    def __init__(self, s, metrics, progress):
        self.s = s
        self.hp = s.hp
        self.metrics = metrics
        self.seconds = progress["seconds"]
        self.best = progress["best"]
        self.best_step = progress["best_step"]
        self.val = progress["val"]
        self.bar = tqdm(total=self.hp.max_iters, initial=progress["step"], disable=True if RANK else None, unit="step",
                        dynamic_ncols=True)
        self.printed = 0.0
        self.resume_clock(progress["step"])

    def pause_clock(self):                      # evaluation is not counted
        self.seconds += time.perf_counter() - self.clock

    def resume_clock(self, step):
        self.clock = time.perf_counter()
        self.clock_step = step

    def write_evaluation(self, step, records, validation):  # -> is it the best so far?
        for r in records:
            write_line(self.metrics, {"step": step, **r, "seconds": round(self.seconds, 3)})
            self.bar.write(describe(step, r))
        self.val = sum(r["loss"] * weight for r, (_, weight, *_) in zip(records, validation))
        if math.isnan(self.val):                # of weights that are finite but far too large
            self.val = math.inf
        better = self.val < self.best
        if better:
            self.best = self.val
            self.best_step = step
        return better

    def write_step(self, step, batch, loss, norm):
        hp = self.hp
        now = time.perf_counter()
        positions = hp.batch_size * hp.accum * hp.block_size
        speed = (step + 1 - self.clock_step) * positions / (now - self.clock)
        # of a training batch bits per byte are known where the loss is nats per byte: clm's, and bounds
        bpb = loss / math.log(2) if self.s.objective.bpb in ("loss", "bound") else None
        write_line(self.metrics, {
            "step": step, "split": "train", "data": " ".join(hp.data), "objective": hp.objective, "loss": loss,
            "bpb": bpb, "targets": float(n_targets(self.s.objective, batch, hp)) / positions,
            "lr": learning_rate(step, hp), "grad_norm": norm, "tok_per_s": round(speed),
            "seconds": round(self.seconds + now - self.clock, 3)})
        line = f"loss {loss:.3f}, {speed / 1e3:.1f}k positions/s"
        self.bar.set_postfix_str(line)
        if self.bar.disable and now - self.printed > 5:         # no terminal: a plain line every 5 seconds
            self.printed = now
            print(f"step {step:6d} | {line}, {(hp.max_iters - step) * positions / speed:.0f} s left")


def save(s, log, name, step, sources):
    if RANK > 0:
        return
    os.fsync(log.metrics.fileno())              # the checkpoint stores its length
    save_checkpoint(os.path.join(s.hp.out_dir, name), dict(
        version=VERSION, config=vars(s.hp) | {"resume": False}, step=step, seconds=log.seconds,
        best=log.best, best_step=log.best_step, val=log.val, sources=sources, metrics_bytes=log.metrics.tell(),
        held_out=s.corpus[0]["val"][:HELD_OUT].cpu().clone(),
        model=s.model.state_dict(), adamw=s.opt["adamw"].state_dict(),
        muon=[momentum for _, momentum in s.opt["muon"].values()], moments=s.opt["moments"]))


def resume(ckpt, s, sources):  # -> {step, seconds, best, best_step, val, metrics_bytes} of the checkpoint
    """Fails where the corpus, the plan or the optimizer is not the checkpoint's."""
    hp = s.hp
    if [x[1:] for x in ckpt["sources"]] != [x[1:] for x in sources]:
        fail(f"--data {' '.join(hp.data)}: its bytes or weights are not those of the run in {hp.out_dir}. "
             f"Try the same data, or --init_from {hp.out_dir}")
    if hp.max_iters < ckpt["step"]:
        fail(f"--max_iters {hp.max_iters}: the run in {hp.out_dir} is at step {ckpt['step']} already. "
             "Try a larger number")
    if hp.max_iters != ckpt["config"]["max_iters"]:
        print(f"resume: {ckpt['config']['max_iters']} steps were planned, now {hp.max_iters}: "
              "the learning rate and the n-grams' drop rate follow the new plan")
    load_weights(s.model, ckpt, hp.resume)
    adamw = s.opt["adamw"]
    moments = s.opt["moments"]
    params = [p for group in adamw.param_groups for p in group["params"]]
    try:
        for i, state in ckpt["adamw"]["state"].items():
            check_layout(state["step"], torch.zeros(()))
            check_layout(state["exp_avg"], params[i])
            check_layout(state["exp_avg_sq"], params[i])
        # groups hold settings, which are this run's own
        adamw.load_state_dict({"state": ckpt["adamw"]["state"], "param_groups": adamw.state_dict()["param_groups"]})
        for (_, momentum), saved in zip(s.opt["muon"].values(), ckpt["muon"], strict=True):
            check_layout(saved, momentum)
            momentum.copy_(saved)
        if moments is not None:
            check_layout(ckpt["moments"], moments)
            moments.copy_(ckpt["moments"])
    except (RuntimeError, KeyError, ValueError, TypeError, AttributeError, IndexError) as e:
        fail(f"{hp.resume}: its optimizer's state does not fit its settings ({type(e).__name__}). "
             f"Try --init_from {hp.out_dir}")
    for group in adamw.param_groups:            # the checkpoint may be from another device
        group.update(lr=s.opt["lr"], capturable=s.opt["lr"].is_cuda)
    return {k: ckpt[k] for k in ("step", "seconds", "best", "best_step", "val", "metrics_bytes")}


def check_layout(saved, own):  # the fused kernels read past the end of a state that is too small
    if saved.shape != own.shape or saved.dtype != own.dtype:
        raise ValueError("layout")


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


def announce(s, sources, precision, metrics):  # the first line of metrics.jsonl, the first three on the terminal
    hp = s.hp
    size = sum(p.numel() for p in s.model.parameters())
    threads = torch.get_num_threads()
    table = 0 if s.model.ngrams is None else s.model.ngrams.table.numel()
    if metrics.tell() == 0:
        write_line(metrics, {"config": vars(hp), "version": VERSION, "torch": torch.__version__,
                             "python": platform.python_version(), "processes": WORLD, "threads": threads,
                             "parameters": size, "ngram_parameters": table, "sources": sources})
    names = ", ".join(f"{name} {n:,} bytes" for name, n, _, _ in sources)
    names += f", the first {hp.train_bytes:,} to train on" if hp.train_bytes else ""
    many = f"{threads} thread{'s' * (threads > 1)}" + (f", {WORLD} processes" if WORLD > 1 else "")
    ngrams = f" and {table:,} in the n-gram table" if table else ""
    print(f"{hp.objective} | {size - table:,} parameters{ngrams} | {names} | {hp.out_dir}")
    print(f"{hp.device}, {many} | activations {hp.dtype}, {precision}")
    for source in s.corpus:
        for note in source["notes"]:
            print(f"--data {note}")
    passes = hp.max_iters * most_passes_per_step(s.corpus, s.objective, hp)
    print(f"{hp.max_iters:,} steps, which read the text {passes:.2g} times")
    if hp.warmup_iters > hp.max_iters > 0:
        print(f"--warmup_iters {hp.warmup_iters}: longer than the run, so the learning rate never reaches its peak")


def announce_parent(parent, hp):  # where the weights come from
    objective = parent["config"]["objective"]
    print(f"weights of {checkpoint_path(hp.init_from)}: {objective} at step {parent['step']:,}")
    if objective == hp.objective and hp.learning_rate >= parent["config"]["learning_rate"]:
        print(f"hint: {objective} starts at its parent's peak learning rate, so its loss rises at first. "
              f"Try --learning_rate {0.3 * hp.learning_rate:g}")


def show_example(batch, objective, width=96, most=256):
    """Prints the first row of each member's batch, one character a position, inputs above targets."""
    print("the first row, one character a position (█ MASK, ∅ EOT, ‖ SEP, ① a sentinel, ░ PAD; · no loss):")
    for _, m in members_of(objective):
        b = member_batch(batch, m) or batch
        rows = {k: b[k][0].reshape(-1)[:most].tolist() for k in ("inp", "tgt") if k in b}
        for i in range(0, len(rows["inp"]), width):
            for k, row in rows.items():
                print(f"  {m.name} {k}   {''.join(map(to_symbol, row[i:i + width]))}")
        if "labels" in b:
            print(f"  {m.name} label {int(b['labels'][0])}")
        prefix = b["prefix"] if isinstance(b["prefix"], int) else int(b["prefix"][0])
        if "mask" in b:
            attention = "a mask of its own"
        elif prefix == 0:
            attention = "causal"
        elif prefix == b["inp"].size(-1):
            attention = "bidirectional"
        else:
            attention = f"both ways among the first {prefix} positions, then causal"
        print(f"  {m.name} attention  {attention}")


def describe(step, r):  # -> a line for a record of evaluate
    """nats per target, perplexity where a term is nats of the byte head, bits per byte where they are
    defined."""
    bound = "<= " if OBJECTIVES[r["objective"]].bpb == "bound" else ""
    bpb = "" if r["bpb"] is None else f", {bound}{r['bpb']:.4f} bits/byte"
    terms = "" if len(r["terms"]) == 1 else " (" + ", ".join(f"{k} {v:.4f}" for k, v in r["terms"].items()) + ")"
    perplexity = f", perplexity {math.exp(min(r['terms']['nll'], 700.0)):.2f}" if "nll" in r["terms"] else ""
    figures = f"loss {r['loss']:.4f} nats{terms}{perplexity}{bpb}"
    return f"step {step:6d} | validation on {r['data']}: {r['objective']} {figures}"


def finish(s):  # compressors, the picture, a sample
    """Errors here do not harm the run, which is saved."""
    hp = s.hp
    if any(m.bpb for _, m in members_of(s.objective)):
        for source in s.corpus:
            print(f"compressors on the validation split of {source['name']}: {compressor_bits(source['val'])}")
    draw_losses(hp)
    print(f"done: {hp.out_dir}/ckpt.pt\n")
    import sample  # here: training needs it only now
    try:
        sample.main(["--out_dir", hp.out_dir, "--device", hp.device])
    except SystemExit:                          # it printed why
        pass
    except Exception as e:
        print(f"no sample: {type(e).__name__}: {e}")
    print(f"\nmore samples: python sample.py --out_dir {hp.out_dir}")


def draw_losses(hp):  # into loss.png; errors here do not harm the run, which is saved
    if RANK > 0:
        return
    try:
        plot(os.path.join(hp.out_dir, "metrics.jsonl"))
    except ImportError:
        print("hint: pip install matplotlib, and the next run draws its losses into loss.png")
    except Exception as e:                      # a damaged metrics.jsonl, a full disk
        print(f"no loss.png: {type(e).__name__}: {e}")


# ---- how a run is stopped

class PipeSafeStdout:
    """Standard output for which a broken pipe (as after | head) does not end the run: the run stops as by a signal,
    and what it still prints is discarded."""

    def __init__(self, stop):
        self.stream = sys.stdout
        self.stop = stop

    def write(self, text):
        try:
            self.stream.write(text)
            self.stream.flush()
        except OSError as e:                    # a closed pipe, a terminal that is gone, a full disk
            discard_stdout()
            if not isinstance(e, BrokenPipeError):
                with contextlib.suppress(OSError):              # standard error may be as full
                    print(f"error: the output could not be written ({error_reason(e)})", file=sys.stderr)
            self.stop.append(getattr(signal, "SIGPIPE", signal.SIGTERM))            # Windows has no such signal

    def __getattr__(self, name):
        return getattr(self.stream, name)


def catch_signals(stop):  # -> {signal: the handler that was there before}
    def handler(number, frame):
        stop.append(number)
        signal.signal(number, signal.SIG_DFL)                   # the second one ends at once
    if threading.current_thread() is not threading.main_thread():
        return {}
    caught = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
    caught = [number for number in caught if signal.getsignal(number) is not signal.SIG_IGN]        # of nohup
    return {number: signal.signal(number, handler) for number in caught}


def restore_handlers(handlers):
    for number, handler in handlers.items():
        signal.signal(number, handler)


if __name__ == "__main__":
    run_program(main)
