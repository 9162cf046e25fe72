"""Train any objective of objectives.py on any bytes.

    python train.py                                     clm on the Python standard library's own source
    python train.py --objective mlm --data book.txt     another objective, your own text
    python train.py --resume                            go on with the newest run
    python train.py --init_from out/clm --data new.txt:0.95 old.txt:0.05
"""
# B rows of a batch, T = block_size positions of a row, n raw bytes that fill a row
import signal
import sys

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.SIG_DFL)                # until there is something to save, Ctrl-C just ends
import bz2
import contextlib
import json
import lzma
import math
import os
import platform
import threading
import time
import zlib
from dataclasses import dataclass

# isort: off  data silences a warning of torch's, and so comes before it
from data import check_sizes, document_ids, draw, fail, gather, generator, glyph, open_corpus, reseed, to_bytes
from model import NGRAM_DIM, NGRAMS, Linear, Lookups
from objectives import CAUSAL, EVAL_ROWS, OBJECTIVES, find_objective, part_of, targets_of
from run import RANK, VERSION, WORLD, Captured, build, choose_out_dir, defaults, get_config
from run import load_checkpoint, open_metrics, process_as_it_was, restore, save_checkpoint, use_device, write_line
import torch
from tqdm import tqdm

HELD_OUT = 4096                                 # bytes of validation text kept in the checkpoint for sample.py
MIN_ITERS = 200                                 # steps of a run whose length is not given, however small its text
COMPRESSED = 1 << 24                            # the compressors read at most so many bytes
BETAS, EPS = (0.9, 0.95), 1e-10                 # AdamW
MOMENTUM, NS_STEPS = 0.9, 4                     # Muon; at width 128 as good as 5 steps, and .9 better than .95
NGRAM_DECAY, NGRAM_RATE = 0.95, 6.0             # the n-gram table: of its second moments; times the others' rate
NGRAM_WARMUP = 2_500_000                        # positions over which its drop rate grows, at most


# ---- batches

def draw_windows(entry, corpus, split, B, key):  # -> source (B,), offset (B, tries), on the CPU
    return draw(corpus, split, entry["n"], B, generator(f"{key},windows"), entry["whole"])


def make_batch(entry, corpus, split, where, g, hp):  # the windows at where, corrupted with numbers from g -> batch
    where = [t.to(corpus[0][split].device) for t in where]
    x = gather(corpus, split, *where, entry["n"])
    if hp.device.startswith("cuda") and not x.is_cuda:          # a corpus too large for the GPU
        x = x.pin_memory()                      # its copy is not waited for
    batch = entry["make"](x.to(hp.device, non_blocking=True), g, hp)
    for k in [k for k in batch if k.endswith("inp")] if hp.doc_mask else []:
        batch[k.removesuffix("inp") + "doc"] = document_ids(batch[k])               # a masked EOT ends nothing
    return batch


def ngram_scales(batch, drop, g):  # a batch, 0-D -> {key: (B, ..., T, N)}: factors of the lookups of each input
    """0 with probability drop, else 1 / (1 - drop)."""
    shapes = {k.removesuffix("inp"): (*batch[k].shape, len(NGRAMS)) for k in batch if k.endswith("inp")}
    return {k + "ngram_scale": (torch.rand(shape, generator=g, device=g.device) >= drop) / (1 - drop)
            for k, shape in shapes.items()}


def add_lookups(batch):  # a micro-batch with ngram_scales -> the same with Lookups, and a list of these
    scales = {k: v.flatten(0, -3) for k, v in batch.items() if k.endswith("ngram_scale")}           # (B, T, N) each
    lookups = {k.removesuffix("ngram_scale") + "lookups": Lookups(
        scale, torch.zeros_like(scale, dtype=torch.long), scale.new_zeros(*scale.shape, NGRAM_DIM, requires_grad=True))
        for k, scale in scales.items()}
    return batch | lookups, [*lookups.values()]


def draw_batch(entry, corpus, split, B, key, hp):  # -> batch of B rows, a pure function of key
    """Windows from a generator on the CPU, corruption from one on the device."""
    where = draw_windows(entry, corpus, split, B, key)
    return make_batch(entry, corpus, split, where, generator(f"{key},{entry['name']}", hp.device), hp)


def micro_batch(batch, i, n):  # the i-th of n equal parts; a mixture's members have rows of their own number
    return {k: v if isinstance(v, str) else v[i * len(v) // n:(i + 1) * len(v) // n] for k, v in batch.items()}


# ---- optimizer

def make_optimizer(model, hp):
    """-> dict(adamw=AdamW, muon={shape: (params, momentum)}, moments=of the n-gram table's rows, lr=0-D tensor)

    Muon for the Linear layers inside blocks, ngram_step for the n-gram table, AdamW for embeddings, heads and
    vectors."""
    hidden = [m.weight for name, m in model.named_modules() if isinstance(m, Linear) and "blocks." in name]
    rest = [p for p in model.parameters() if p.requires_grad and not any(p is q for q in hidden)]
    groups = [dict(params=rest, weight_decay=0.0)]
    if hp.optimizer == "adamw":
        groups, hidden = groups + [dict(params=hidden, weight_decay=hp.weight_decay)], []
    muon = {}
    # one Newton-Schulz call per shape: few large products in place of many small ones
    for p in hidden:                            # (n, rows, columns), as many matrices of one shape as there are
        muon.setdefault(tuple(sorted(p.shape[1:])), []).append(p)
    for shape, params in muon.items():
        muon[shape] = params, torch.zeros(sum(len(p) for p in params), *shape, device=params[0].device)
    lr = torch.zeros((), device=hp.device)      # a tensor, so that a captured step reads each step's rate
    adamw = torch.optim.AdamW(groups, lr=lr, betas=BETAS, eps=EPS, fused=True, capturable=lr.is_cuda)
    moments = None if model.ngrams is None else torch.zeros(len(model.ngrams.table), device=hp.device)
    return dict(adamw=adamw, muon=muon, moments=moments, lr=lr)


def optimizer_step(opt, bad, hp):
    """Nothing moves where bad (a 0-D bool tensor) holds; the host need not know."""
    if bad.device.type == "mps" and bad:        # where some versions of torch ignore found_inf
        return
    adamw = opt["adamw"]
    adamw.grad_scale, adamw.found_inf = None, bad.float()       # the fused kernel's own switch for skipping a step
    adamw.step()
    for params, momentum in opt["muon"].values():
        muon_step(params, momentum, opt["lr"], bad, hp)


@torch.no_grad()
def ngram_step(table, moments, lookups, lr, bad):  # table (R, D), moments (R,), lookups [(row, gradient, square)]
    """Updates the rows that were looked up, each lookup by its own gradient: RMSprop with one second moment a row.
    row (n,), gradient (n, D), its mean square (n,): no shape depends on how many lookups share a row."""
    moments.mul_(torch.where(bad, 1.0, NGRAM_DECAY))
    for row, _, square in lookups:
        moments.index_add_(0, row, torch.where(bad, 0.0, square))
    for row, grad, _ in lookups:
        scale = NGRAM_RATE * lr / (moments[row].sqrt() + EPS)
        table.index_add_(0, row, -scale[:, None] * torch.where(bad, 0.0, grad))


@torch.no_grad()
def muon_step(params, momentum, lr, bad, hp):  # momentum (N, r, c), r <= c: all matrices of one shape at once
    """Muon (Jordan et al. 2024): Nesterov momentum, made orthogonal. Scaled to the root mean square of
    AdamW's updates (Liu et al. 2025), so that one learning rate serves both."""
    def wide(t):  # the shorter side first: the iteration multiplies r x r matrices
        return t if t.size(1) <= t.size(2) else t.mT                                # (n, r, c)
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]     # None: no term reached it
    # where bad, a gradient like the momentum and a rate of 0 move nothing, without asking the device
    grad = torch.where(bad, momentum, torch.cat([wide(g) for g in grads]))          # (N, r, c)
    lr = lr * ~bad
    # Nesterov: the gradient joins the momentum, then looks ahead
    momentum.lerp_(grad, 1 - MOMENTUM)
    update = orthogonal(grad.lerp(momentum, MOMENTUM), getattr(torch, hp.dtype))
    update = update.to(momentum.dtype).mul_(lr * 0.2 * momentum.size(2) ** 0.5)
    for p, u in zip(params, update.split([len(p) for p in params])):
        if hp.weight_decay:
            p.mul_(1 - lr * hp.weight_decay)
        p.sub_(u if p.size(1) <= p.size(2) else u.mT)


def orthogonal(x, dtype):  # (N, r, c) -> about the nearest matrices with orthonormal rows
    """Newton-Schulz iteration with the coefficients of Jordan et al. 2024; all but small singular values
    end near 1."""
    x = x.to(dtype)
    # divided by its Frobenius norm no singular value is above 1, which the iteration needs
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(NS_STEPS):
        a = x @ x.mT                                                                # A (N, r, r)
        b = torch.baddbmm(a, a, a, beta=-4.7750, alpha=2.0315)                      # B = -4.775 A + 2.0315 A^2
        x = torch.baddbmm(x, b, x, beta=3.4445)                                     # 3.4445 X + B X
    return x


def passes(corpus, entry, hp):  # -> how often a step reads the source that it reads most often
    rows = hp.batch_size * hp.accum
    return max(rows * entry["n"] * source["weight"] / len(source["train"]) for source in corpus)


def drop_rate(step, corpus, entry, hp):  # share of n-gram lookups that a step leaves out
    """Grows over the first two passes over the text (NGRAM_WARMUP positions at most), since a table that has read
    little has nothing that could be relied on too much; of a run that reads its text several times it ends higher,
    since the table would know the text by heart. A run from another's weights starts at the full rate."""
    each = passes(corpus, entry, hp)
    end = 1 - (1 - hp.ngram_drop) / max(1.0, hp.max_iters * each) ** (2 / 3) if hp.ngram_drop else 0.0
    if hp.init_from:
        return end
    read = step * hp.batch_size * hp.accum * hp.block_size
    return end * min(1.0, max(step * each / 2, read / NGRAM_WARMUP))


def learning_rate(step, hp):
    """Linear warm-up, constant, linear to 0: the smallest of the three is in force."""
    warm = (step + 1) / (hp.warmup_iters + 1)
    fall = (hp.max_iters - step) / max(1, hp.lr_decay * hp.max_iters)
    return hp.learning_rate * min(warm, 1.0, fall)


# ---- a step

@dataclass
class State:
    """All that a training step reads and writes, in tensors that stay where they are. The host puts windows,
    seed, rate and number of a step into where, g, opt["lr"] and step; the rest is the device's alone, so that
    a CUDA graph can replay the step."""
    hp: object
    entry: dict                                 # of the objective
    corpus: list
    model: torch.nn.Module
    loss: object                                # the entry's, perhaps compiled
    opt: dict
    where: list                                 # source (B,), offset (B, tries) of the step's windows
    g: torch.Generator
    step: torch.Tensor
    first_bad: torch.Tensor                     # the first step whose loss or gradient was not finite, else -1
    drop: torch.Tensor                          # share of n-gram lookups that the step leaves out
    params: list                                # all with a gradient, and so not the n-gram table


def prepare(entry, corpus, hp):  # -> State before the first step
    device, model = torch.device(hp.device), build(hp)
    where = draw_windows(entry, corpus, "train", hp.batch_size * hp.accum, "0")     # its shapes alone are used
    return State(
        hp, entry, corpus, model, entry["loss"], make_optimizer(model, hp),
        params=[p for p in model.parameters() if p.requires_grad],
        where=[t.to(corpus[0]["train"].device) for t in where],
        g=torch.Generator(device), step=torch.zeros((), dtype=torch.long, device=device),
        drop=torch.zeros((), device=device),
        first_bad=torch.full((), -1, device=device))


def set_step(s, step):  # what the host has to say before a step
    """Copied into the tensors that the step reads; nothing waits for the device."""
    hp = s.hp
    new = draw_windows(s.entry, s.corpus, "train", hp.batch_size * hp.accum, f"{hp.seed},{step}")
    for a, b in zip(s.where, new):              # copied, not replaced: a captured graph reads addresses
        a.copy_(b.contiguous().pin_memory() if a.is_cuda else b, non_blocking=True)
    reseed(s.g, f"{hp.seed},{step},{s.entry['name']}")
    s.opt["lr"].fill_(learning_rate(step, hp))
    s.drop.fill_(drop_rate(step, s.corpus, s.entry, hp))
    s.step.fill_(step)


def training_step(s):  # -> batch, loss (nats: sum over terms of coefficient * sum / count), norm of the gradient
    """One update: the same for one process or many, called eagerly or replayed. Waits for nothing on the
    device."""
    hp, loss = s.hp, torch.zeros_like(s.first_bad, dtype=torch.float32)
    batch, lookups = training_batch(s), []      # lookups: of n-grams, for ngram_step

    # forward and backward: sums of nats, divided by the counts of the whole batch
    terms = s.entry["terms"](batch, hp)
    for i in range(RANK, hp.accum, WORLD):      # this process's micro-batches
        micro, taken = add_lookups(micro_batch(batch, i, hp.accum))
        part = total(s.loss(s.model, micro, hp), terms)
        part.backward()
        loss += part.detach()
        for each in taken:
            if each.delta.grad is not None:     # None: no term reached it
                grad = each.delta.grad.flatten(0, 2)
                lookups.append((each.row.flatten(), grad, grad.square().mean(1)))
    if WORLD > 1:
        add_up([p.grad for p in s.params if p.grad is not None] + [loss])
        lookups = sum_lookups(lookups, s.model.ngrams.table) if lookups else []

    # clip, look for what is not finite, move
    norm = torch.nn.utils.clip_grad_norm_(s.params, hp.grad_clip or math.inf)
    finite = torch.isfinite(loss) & torch.isfinite(norm)
    s.first_bad.copy_(torch.where((s.first_bad < 0) & ~finite, s.step, s.first_bad))
    optimizer_step(s.opt, s.first_bad >= 0, hp)
    if lookups:
        ngram_step(s.model.ngrams.table, s.opt["moments"], lookups, s.opt["lr"], s.first_bad >= 0)
    for p in s.params:
        p.grad = None
    return batch, loss, norm


def training_batch(s):  # -> the batch of the windows, seed and drop rate that the host put into s
    batch = make_batch(s.entry, s.corpus, "train", s.where, s.g, s.hp)
    return batch if s.model.ngrams is None else batch | ngram_scales(batch, s.drop, s.g)


def total(sums, terms):  # {term: sum}, {term: (count, coefficient)} -> 0-D
    return sum(terms[term][1] * x / terms[term][0] for term, x in sums.items() if terms[term][1])


def compile_loss(s):  # -> the loss, plain where torch.compile cannot; what cannot compile fails here, not later
    loss = torch.compile(s.loss, fullgraph=True, dynamic=False)
    try:
        micro, _ = add_lookups(micro_batch(training_batch(s), 0, s.hp.accum))
        sum(loss(s.model, micro, s.hp).values()).backward()
    except Exception as e:                      # no compiler, an old one, an operating system without support
        why = f"{type(e).__name__}: {str(e).strip().splitlines()[0]}"
        print(f"--compile: does not work here ({why}), going on without it")
        loss = s.loss
    for p in s.params:
        p.grad = None
    return loss


# ---- evaluation

def validation_list(entry, corpus, hp):  # -> [(source, weight, member, batches, causal batches or None)]
    """Each source's own fixed windows under fixed corruption: a function of objective and block size alone.
    Causal batches, of the same plain windows for all, say bits per byte where the objective's own do not."""
    def fixed(m, source):
        return [draw_batch(m, [source], "val", EVAL_ROWS, f"validation,{i}", hp) for i in range(hp.eval_iters)]
    plain = CAUSAL | {"n": hp.block_size + 1}
    return [(source, source["weight"] * weight, m, fixed(m, source),
             fixed(plain, source) if m["bpb"] == "causal" and m["continues"](hp) else None)
            for source in corpus for weight, m in entry["members"]]


@torch.no_grad()
def evaluate(model, validation, hp):  # -> one record for each source and member
    """loss: nats, the total of the objective. bpb: bits per byte, left to right, each window from a cold
    start; a bound from above where the entry says so; None where the objective does not define it.
    targets: targets for one row position, whatever their weight. terms: the loss's terms and figures."""
    records = []
    for source, _, m, batches, causal in validation:
        figures, loss = means(m, model, batches, hp)
        nats = means(CAUSAL, model, causal, hp)[1] if causal else loss
        positions = EVAL_ROWS * hp.block_size
        share = sum(float(targets_of(m, b, hp)) for b in batches) / len(batches) / positions
        records.append({"split": "val", "data": source["name"], "objective": m["name"], "loss": loss,
                        "bpb": nats / math.log(2) if causal or m["bpb"] in ("loss", "bound") else None,
                        "targets": share, "terms": figures})
    return records


def means(entry, model, batches, hp):  # -> {term: sum of sums / sum of counts}, their total
    known = [entry["terms"](b, hp) for b in batches]
    sums = [entry["loss"](model, b, hp) for b in batches]
    out = {term: sum(float(s[term]) for s in sums) / max(1.0, sum(float(k[term][0]) for k in known))
           for term in sums[0]}
    return out, sum(known[0][term][1] * mean for term, mean in out.items())


def compressors(data):  # (N,) uint8 -> what the standard library's compressors make of it, as one stream, in words
    text = to_bytes(data[:COMPRESSED].cpu())
    sizes = {"zlib": len(zlib.compress(text, 9)), "bz2": len(bz2.compress(text)), "lzma": len(lzma.compress(text))}
    part = f"all {len(text):,}" if len(text) == len(data) else f"the first {len(text):,} of {len(data):,}"
    bits = ", ".join(f"{name} {8 * size / len(text):.3f}" for name, size in sizes.items())
    return f"{bits} bits/byte on {part} bytes as one stream"


def plot(path):  # metrics.jsonl -> loss.png beside it: nats over steps, of every split, objective and source
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
    if not torch.distributed.is_initialized():  # gloo: what the hosts tell each other, without waiting for a device
        torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if hp.device.startswith("cuda") else "gloo")


def add_up(tensors):  # each becomes its sum over all processes, in one exchange
    flat = torch.cat([t.flatten() for t in tensors])
    torch.distributed.all_reduce(flat)
    for t, summed in zip(tensors, flat.split([t.numel() for t in tensors])):
        t.copy_(summed.view_as(t))


def sum_lookups(lookups, table):  # -> those of all processes, as one for each row of the table
    """Dense, since a sum over equal rows has the same bits in all processes only where it is made once."""
    sums, squares = torch.zeros_like(table), table.new_zeros(len(table))
    for row, grad, square in lookups:
        sums.index_add_(0, row, grad)
        squares.index_add_(0, row, square)
    add_up([sums, squares])
    return [(torch.arange(len(table), device=table.device), sums, squares)]


def any_says(yes):  # -> does any process say so?
    said = torch.tensor(int(yes))
    if WORLD > 1:
        torch.distributed.all_reduce(said, torch.distributed.ReduceOp.MAX)
    return bool(said)


# ---- the run

@process_as_it_was()
def main(argv=None):  # -> exit code
    """Leaves the process as it was, signal handlers too, for notebooks and tests; but for run.keep_memory."""
    hp, stop = get_config(sys.argv[1:] if argv is None else argv), []
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")                # a console that lacks a character prints "?"
    with contextlib.ExitStack() as stack:
        nowhere = stack.enter_context(open(os.devnull, "w"))
        stack.enter_context(contextlib.redirect_stdout(nowhere if RANK else Output(stop)))
        try:
            join_processes(hp)
            return train(hp, stop, stack)
        except RuntimeError as e:               # the CPU's lack of memory has no class of its own
            lacks = "out of memory", "allocate memory", "not enough memory"
            if not isinstance(e, torch.OutOfMemoryError) and not any(words in str(e) for words in lacks):
                raise
            half = f"--batch_size {hp.batch_size // 2} --accum {2 * hp.accum}, or " if hp.batch_size > 1 else ""
            fail(f"a model of {hp.n_layer} layers and width {hp.n_embd}, or a batch of {hp.batch_size} rows of "
                 f"{hp.block_size}, does not fit here ({str(e).splitlines()[0][:80]}). "
                 f"Try {'a device with more memory' if hp.resume else half + 'a smaller model'}")


def train(hp, stop, stack):  # -> exit code
    """Folder, corpus, model; then steps, each a pure function of (seed, step); then a sample.

    0 when done, 1 after a loss that is not finite, 128 + signal when stopped; fail() ends with 2."""
    precision, entry = use_device(torch.device(hp.device)), find_objective(hp)
    metrics = open(os.devnull, "r+b") if RANK else None
    if not RANK and os.path.exists(os.path.join(hp.out_dir, "metrics.jsonl")) and hp.resume:
        metrics = stack.enter_context(open_metrics(hp.out_dir))         # locked before the checkpoint is read
    if not hp.resume:
        hp.out_dir = choose_out_dir(hp)
    any_says(False)                             # the first process makes the folder when all have looked for one
    corpus = open_corpus(hp.data, hp.out_dir, hp.resume)
    for source in corpus:
        source["train"] = source["train"][:hp.train_bytes or None]
    check_sizes(corpus, entry["n"], hp.block_size)
    if hp.max_passes and not hp.resume:
        plan_steps(corpus, entry, hp)
    sources = [[s["name"], s["size"], s["crc"], s["weight"]] for s in corpus]
    move_corpus(corpus, hp)

    # the model, its optimizer, what a checkpoint says of them
    s = prepare(entry, corpus, hp)
    at = dict(step=0, seconds=0.0, best=math.inf, best_step=0, val=math.inf, metrics_bytes=0)
    if hp.resume:
        at = resume(load_checkpoint(hp.resume), s, sources)
    elif hp.init_from:
        restore(s.model, load_checkpoint(hp.init_from), hp.init_from, fresh=True)
    validation = validation_list(entry, corpus, hp)
    if metrics is None:
        metrics = stack.enter_context(open_metrics(hp.out_dir))
    if not RANK:                                # lines after the checkpoint's are of steps that are taken again
        metrics.truncate(min(at["metrics_bytes"], os.path.getsize(metrics.name)))
    metrics.seek(0, os.SEEK_END)
    announce(s, sources, precision, metrics)
    if at["step"] == 0:
        show_example(draw_batch(entry, corpus, "train", hp.batch_size * hp.accum, f"{hp.seed},0", hp), entry)
    if hp.compile or hp.device.startswith("cuda"):
        torch._dynamo.reset()                   # or the limit of its cache is that of all runs of a process
    if hp.compile:
        s.loss = compile_loss(s)
    take = Captured(lambda: training_step(s), [s.g]) if hp.cuda_graph else lambda: training_step(s)
    log, start = Log(s, metrics, at), at["step"]
    handlers = catch_signals(stop)
    stack.callback(release, handlers)

    # the loop runs once more than there are steps: the last pass only evaluates and saves
    for step in range(start, hp.max_iters + 1):
        due, halt = step % hp.eval_interval == 0 or step == hp.max_iters, any_says(bool(stop))
        if (due or halt) and (step > start or not hp.resume):
            if int(s.first_bad) >= 0:
                break
            log.pause()
            better = due and log.evaluation(step, evaluate(s.model, validation, hp), validation)
            for name in ["best.pt"] * better + ["ckpt.pt"]:     # after a kill in between, best.pt is written anew
                save(s, log, name, step, sources)
            log.go_on(step)
        if step == hp.max_iters or halt:
            break
        set_step(s, step)
        batch, loss, norm = take()
        log.bar.update()
        if step % hp.log_interval == 0:         # diagnostics, which alone read from the device
            if int(s.first_bad) >= 0:
                break
            log.step(step, batch, float(loss), float(norm))

    # how it ended
    log.bar.close()
    bad = int(s.first_bad)
    if bad >= 0:                                # since then nothing has moved
        log.pause()
        save(s, log, "ckpt.pt", bad, sources)
        any_says(False)                         # none ends before it is written
        print(f"error: loss or gradient not finite at step {bad}; {hp.out_dir} holds the state before it. "
              f"Try --init_from {hp.out_dir} with a lower --learning_rate or --dtype float32", file=sys.stderr)
        return 1
    metrics.close()
    if halt and step < hp.max_iters:
        print(f"stopped at step {step}, saved. Go on with: python train.py --resume --out_dir {hp.out_dir}")
        return 128 + (stop or [signal.SIGTERM])[0]
    release(handlers)                           # what is left can be interrupted anywhere
    if log.val > log.best:
        print(f"validation was at its best at step {log.best_step}: {log.best:.4f} nats, now {log.val:.4f}; "
              f"{hp.out_dir}/best.pt holds that state")
    return finish(s) if RANK == 0 else 0


def plan_steps(corpus, entry, hp):
    """Of a small text fewer steps: repeated too often, it is learned by heart (Muennighoff et al. 2023)."""
    most = max(MIN_ITERS, math.ceil(hp.max_passes / passes(corpus, entry, hp)))
    if most < hp.max_iters:
        hp.max_iters = most
        if hp.eval_interval == defaults(hp.device.partition(":")[0])["eval_interval"]:
            hp.eval_interval = math.ceil(most / 4)


class Log:
    """What a run says while it trains: lines of metrics.jsonl, the bar or plain lines; and its clock."""

    def __init__(self, s, metrics, at):
        self.s, self.hp, self.metrics, self.seconds = s, s.hp, metrics, at["seconds"]
        self.best, self.best_step, self.val = at["best"], at["best_step"], at["val"]
        self.bar = tqdm(total=self.hp.max_iters, initial=at["step"], disable=True if RANK else None, unit="step",
                        dynamic_ncols=True)
        self.printed = 0.0
        self.go_on(at["step"])

    def pause(self):                            # the clock stands while the model is evaluated
        self.seconds += time.perf_counter() - self.clock

    def go_on(self, step):
        self.clock, self.clock_step = time.perf_counter(), step

    def evaluation(self, step, records, validation):  # -> is it the best so far?
        for r in records:
            write_line(self.metrics, {"step": step, **r, "seconds": round(self.seconds, 3)})
            self.bar.write(describe(step, r))
        self.val = sum(r["loss"] * weight for r, (_, weight, *_) in zip(records, validation))
        better = self.val < self.best
        if better:
            self.best, self.best_step = self.val, step
        return better

    def step(self, step, batch, loss, norm):
        hp, entry, now = self.hp, self.s.entry, time.perf_counter()
        positions = hp.batch_size * hp.accum * hp.block_size
        speed = (step + 1 - self.clock_step) * positions / (now - self.clock)
        # a training batch says bits per byte where the loss is nats a byte: of clm, and of bounds
        bpb = loss / math.log(2) if entry["bpb"] in ("loss", "bound") else None
        write_line(self.metrics, {
            "step": step, "split": "train", "data": " ".join(hp.data), "objective": hp.objective, "loss": loss,
            "bpb": bpb, "targets": float(targets_of(entry, batch, hp)) / positions, "lr": learning_rate(step, hp),
            "grad_norm": norm, "tok_per_s": round(speed), "seconds": round(self.seconds + now - self.clock, 3)})
        line = f"loss {loss:.3f}, {speed / 1e3:.1f}k positions/s"
        self.bar.set_postfix_str(line)
        if self.bar.disable and now - self.printed > 5:         # no terminal: a plain line now and then
            self.printed = now
            print(f"step {step:6d} | {line}, {(hp.max_iters - step) * positions / speed:.0f} s left")


def save(s, log, name, step, sources):
    if RANK > 0:
        return
    os.fsync(log.metrics.fileno())              # a checkpoint counts its bytes
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
              "the learning rate follows the new plan")
    restore(s.model, ckpt, hp.resume)
    adamw, muon, moments = s.opt["adamw"], s.opt["muon"], s.opt["moments"]
    params = [p for group in adamw.param_groups for p in group["params"]]
    try:
        for i, state in ckpt["adamw"]["state"].items():
            check_layout(state["step"], torch.zeros(()))
            check_layout(state["exp_avg"], params[i])
            check_layout(state["exp_avg_sq"], params[i])
        adamw.load_state_dict(ckpt["adamw"])
        for (_, momentum), saved in zip(muon.values(), ckpt["muon"], strict=True):
            check_layout(saved, momentum)
            momentum.copy_(saved)
        if moments is not None:
            check_layout(ckpt["moments"], moments)
            moments.copy_(ckpt["moments"])
    except (RuntimeError, KeyError, ValueError, TypeError, AttributeError, IndexError) as e:
        fail(f"{hp.resume}: its optimizer's state does not fit its settings ({type(e).__name__}). "
             f"Try --init_from {hp.out_dir}")
    for group in adamw.param_groups:            # of this device, not of the checkpoint's
        group.update(lr=s.opt["lr"], capturable=s.opt["lr"].is_cuda)
    return {k: ckpt[k] for k in ("step", "seconds", "best", "best_step", "val", "metrics_bytes")}


def check_layout(saved, own):  # the fused kernels read past the end of a state that is too small
    if saved.shape != own.shape or saved.dtype != own.dtype:
        raise ValueError("layout")


def move_corpus(corpus, hp):  # to the GPU, as bytes, if it fits there: no loader
    if not hp.device.startswith("cuda"):
        return
    size = sum(s["size"] for s in corpus)
    if size < torch.cuda.mem_get_info(torch.device(hp.device))[0] / 4:
        for s in corpus:
            s["train"], s["val"] = s["train"].to(hp.device), s["val"].to(hp.device)
    elif hp.cuda_graph:
        fail(f"--cuda_graph: the corpus of {size:,} bytes does not fit on the GPU beside the model. Try without it")


def announce(s, sources, precision, metrics):  # the first line of metrics.jsonl, the first three on the terminal
    hp, size, threads = s.hp, sum(p.numel() for p in s.model.parameters()), torch.get_num_threads()
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
    print(f"{hp.max_iters:,} steps, which read the text {hp.max_iters * passes(s.corpus, s.entry, hp):.2g} times")
    if hp.warmup_iters > hp.max_iters > 0:
        print(f"--warmup_iters {hp.warmup_iters}: longer than the run, whose rate never reaches its peak")


def show_example(batch, entry, width=96, most=256):
    """Prints the first row of each member's batch, one character a position, inputs above targets."""
    print("the first row, one character a position (█ MASK, ∅ EOT, ‖ SEP, ① a sentinel, ░ PAD; · no loss):")
    for _, m in entry["members"]:
        b = part_of(batch, m) or batch
        shown = {k: b[k][0].reshape(-1)[:most].tolist() for k in ("inp", "tgt") if k in b}
        for i in range(0, len(shown["inp"]), width):
            for k, row in shown.items():
                print(f"  {m['name']} {k}   {''.join(map(glyph, row[i:i + width]))}")
        if "labels" in b:
            print(f"  {m['name']} label {int(b['labels'][0])}")
        seen = b["mask"] if isinstance(b["mask"], str) else int(b["mask"][0])
        seen = {0: "causal", b["inp"].size(-1): "bidirectional"}.get(seen, seen)
        rule = f"the first {seen} positions see each other, the rest what is before them"
        print(f"  {m['name']} mask  {seen if isinstance(seen, str) else rule}")


def describe(step, r):  # -> a line for a record of evaluate
    """nats per target, perplexity where a term is nats of the byte head, bits per byte where they are
    defined."""
    bound = "<= " if OBJECTIVES[r["objective"]]["bpb"] == "bound" else ""
    bpb = "" if r["bpb"] is None else f", {bound}{r['bpb']:.4f} bits/byte"
    terms = "" if len(r["terms"]) == 1 else " (" + ", ".join(f"{k} {v:.4f}" for k, v in r["terms"].items()) + ")"
    perplexity = f", perplexity {math.exp(r['terms']['nll']):.2f}" if "nll" in r["terms"] else ""
    figures = f"loss {r['loss']:.4f} nats{terms}{perplexity}{bpb}"
    return f"step {step:6d} | validation on {r['data']}: {r['objective']} {figures}"


def finish(s):  # -> exit code; compressors, the picture, a sample
    """What goes wrong here cannot harm the run, which is saved."""
    hp = s.hp
    for source in s.corpus if any(m["bpb"] for _, m in s.entry["members"]) else []:
        print(f"compressors on the validation split of {source['name']}: {compressors(source['val'])}")
    try:
        plot(os.path.join(hp.out_dir, "metrics.jsonl"))
    except ImportError:
        print("hint: pip install matplotlib, and the next run draws its losses into loss.png")
    except Exception as e:                      # a damaged metrics.jsonl, a full disk
        print(f"no loss.png: {type(e).__name__}: {e}")
    print(f"done: {hp.out_dir}/ckpt.pt\n")
    import sample  # here: only now, since it is the one thing that training wants of it
    try:
        sample.main(["--out_dir", hp.out_dir, "--device", hp.device])
    except SystemExit:                          # it said why
        pass
    except Exception as e:
        print(f"no sample: {type(e).__name__}: {e}")
    print(f"\nmore of it: python sample.py --out_dir {hp.out_dir}")
    return 0


# ---- how a run is stopped

class Output:
    """Standard output that a run survives: when its reader goes away (as of | head) the run stops as by a
    signal, and what it still says goes nowhere."""

    def __init__(self, stop):
        self.stream, self.stop = sys.stdout, stop

    def write(self, text):
        try:
            self.stream.write(text)
            self.stream.flush()
        except OSError:                         # a closed pipe, a terminal that is gone, a full disk
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())
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


def release(handlers):
    for number, handler in handlers.items():
        signal.signal(number, handler)


if __name__ == "__main__":
    code = main()
    if WORLD > 1:
        torch.distributed.destroy_process_group()
    sys.exit(code)
