"""Train any objective of objectives.py on any bytes.

    python train.py                                     clm on the Python standard library's own source
    python train.py --objective mlm --data book.txt     another objective, your own text
    python train.py --resume                            resume the latest run
    python train.py --init_from out/clm --data new.txt:0.95 stdlib:0.05     continual pre-training, with replay

B rows of a batch, T = block_size positions of a row, n raw bytes that fill a row, N matrices of one shape (r, c)
"""
import bisect
import bz2
import copy
import itertools
import lzma
import math
import os
import shlex
import signal
import statistics
import sys
import time
import zlib
from argparse import Namespace
from collections import namedtuple
from functools import partial

from data import CLS, EOT, MASK, MID, MODE_R, MODE_S, MODE_X, PAD, PRE, SENTINEL, SEP, SUF
from data import check_sizes, fail, make_rng, open_corpus, read_windows, sample_windows, to_bytes, to_seed
from model import NGRAMS, StackedLinear
from objectives import CAUSAL, IGNORE_INDEX, N_BYTES, OBJECTIVES, add_weights, document_mask
import run
import torch
from torch.optim.adamw import adamw
from tqdm import tqdm

INVERSE_GOLDEN_RATIO = 0.6180339887498949       # its multiples modulo 1 are spread evenly over [0, 1)
COMPRESSED_BYTES = 1 << 24                      # maximum number of bytes to compress
HELD_OUT = 4096                                 # bytes of validation text in a checkpoint, for sample.py
MIN_ITERS = 200                                 # --max_passes never shortens a run below this number of steps
MOMENTUM = 0.9                                  # of Muon; at width 128 better than .95
NS_STEPS = 4                                    # iterations of Newton-Schulz; at width 128 as good as 5
BYTES_PER_ROW = 4                               # bytes of text that a row of the n-gram table can memorize


# ---- batches
def make_batch(member, corpus, split, windows, g, hp):  # windows: source (B,), offset (B,) -> batch of B rows
    source, offset = (t.to(corpus[0][split].device) for t in windows)
    x = read_windows(corpus, split, source, offset, member.n)                       # (B, n)
    if hp.device.startswith("cuda") and not x.is_cuda:          # the corpus does not fit on the GPU
        x = x.pin_memory().to(hp.device, non_blocking=True)
    return add_weights(member.objective.corrupt(x.to(hp.device), g, hp))


def draw_batch(member, corpus, split, B, key, hp):  # -> batch of B rows
    """Draws windows and corruption from generators seeded with the string `key`. The same key gives the same batch if
    all other arguments and the kind of device are the same."""
    windows = sample_windows(corpus, split, member.n, B, make_rng(f"{key},windows"))
    g = make_rng(f"{key},{member.objective.name}", hp.device)
    return make_batch(member, corpus, split, windows, g, hp)


def micro_batch(batch, i, n, hp):  # -> part i of n
    B = len(batch["inp"])
    rows = slice(B * i // n, B * (i + 1) // n)                  # four parts of 10 rows are 0-1, 2-4, 5-6, 7-9
    # an int is the prefix of all rows
    part = {key: value if isinstance(value, int) else value[rows] for key, value in batch.items()}
    if hp.doc_mask:
        part |= document_mask(part)
    return part


# ---- the plan of a run: number of steps, n-gram drop rate, learning rate
def passes_per_step(source, members, hp):  # -> the part of a source's training text that a step reads, on average
    """A pass is an epoch. With 4 rows of 33 bytes, half of them from a source of 6,600 bytes: 2 * 33 / 6,600 = 0.01."""
    n = sum(member.weight * member.n for member in members)     # bytes that fill a row, on average over the members
    return source["weight"] * hp.batch_size * hp.accum * n / len(source["train"])


def shorten_run(corpus, members, hp):
    """Lowers hp.max_iters and hp.eval_interval if the run would make more than hp.max_passes passes, which overfits
    (Muennighoff et al. 2023). The passes over several sources are averaged, weighted by their shares of the rows."""
    passes = sum(source["weight"] * passes_per_step(source, members, hp) for source in corpus)
    max_iters = max(MIN_ITERS, math.ceil(hp.max_passes / passes))
    if max_iters < hp.max_iters:
        hp.max_iters = max_iters
        hp.eval_interval = min(hp.eval_interval, math.ceil(max_iters / 4))
        print(f"the text is small, so training stops after {max_iters:,} steps (--max_passes {hp.max_passes:g}, but at "
              f"least {MIN_ITERS} steps). Use --max_iters to override this")


def ngram_drop_rate(corpus, members, hp):  # -> share of the n-gram lookups that training drops
    """Averages the rates of the sources, weighted by their shares of the rows. The rate of a source is

        1 - (1 - ngram_drop) / (1 + repetitions) ** 0.4

    repetitions: the number of passes after the first one, times the share of the text that fits into the table. In
        these passes the table could recite what it has memorized. With ngram_drop 0.25 and four passes over a
        short text, the rate is 1 - 0.75 / (1 + 3) ** 0.4 = 0.57."""
    if not hp.ngram_drop:
        return 0.0
    n_bytes = sum(len(source["train"]) for source in corpus)
    memorizable = min(1.0, BYTES_PER_ROW * len(NGRAMS) * hp.ngram_rows / n_bytes)   # share of the text
    rate = 0.0
    for source in corpus:
        passes = hp.max_iters * passes_per_step(source, members, hp)
        repetitions = max(0.0, passes - 1) * memorizable
        rate += source["weight"] * (1 - (1 - hp.ngram_drop) / (1 + repetitions) ** 0.4)
    return rate


def learning_rate(step, hp):
    """Rises linearly (warmup_iters), is constant, then falls linearly to 0 (lr_decay). With the defaults and 1,200
    steps, it is constant from step 20 to step 480, half as large at step 840, and 0 at the end."""
    warmup = (step + 1) / (hp.warmup_iters + 1)
    decay = (hp.max_iters - step) / max(1, hp.lr_decay * hp.max_iters)
    return hp.learning_rate * min(warmup, 1.0, decay)


# ---- optimizers: by default Muon for the StackedLinear layers inside blocks, AdamW for all other parameters
# a parameter, its first and second moments, and how often it was updated (0-D tensor)
AdamWState = namedtuple("AdamWState", "param first second n_updates")


def make_optimizer(model, hp):
    """Returns a Namespace: lr, the learning rate (0-D); matrices, those of blocks; muon, a list of (weights of a group,
    momentum (N, r, c)); adamw, a list of AdamWState. A parameter without a gradient, such as a head of another member
    of a mixture, is not changed."""
    groups = group_matrices(model)
    matrices = [p for params in groups.values() for p in params]
    in_blocks = set(matrices)
    by_adamw = [p for p in model.parameters() if p not in in_blocks]
    muon = []
    if hp.optimizer == "adamw":
        by_adamw += matrices
    else:
        for (_, r, c), params in groups.items():
            N = sum(len(p) for p in params)
            muon.append((params, torch.zeros(N, r, c, device=hp.device)))
    zero = partial(torch.zeros, (), device=hp.device)
    states = [AdamWState(p, torch.zeros_like(p), torch.zeros_like(p), zero()) for p in by_adamw]
    return Namespace(lr=zero(), matrices=matrices, muon=muon, adamw=states)


def group_matrices(model):  # -> {(network, r, c): [weight (stack, rows, columns)]} of the matrices inside blocks
    """Muon updates a group at once: a few large products are faster than many small ones. A tall matrix is transposed,
    so r <= c. The network is the part of a layer's name before "blocks.": "" for the model, "heads.generator." for
    electra's generator, which in a mixture has gradients only in electra's steps."""
    groups = {}
    for name, layer in model.named_modules():
        network, separator, _ = name.rpartition("blocks.")
        if separator and isinstance(layer, StackedLinear):      # a layer inside a block
            r, c = sorted(layer.weight.shape[1:])
            groups.setdefault((network, r, c), []).append(layer.weight)
    return groups


def newton_schulz(X, dtype):  # (N, r, c), r <= c -> approximately the nearest matrices with orthonormal rows
    """Moves all singular values near 1, except those that were very small. The plain form (Jordan et al. 2024) is

        for _ in range(NS_STEPS):
            A = X @ X.mT
            Q = 3.4445 * I - 4.7750 * A + 2.0315 * A @ A
            X = Q @ X

    The next A is (Q X)(Q X)^T = Q A Q, since Q is symmetric. So several steps can be taken with A and Q alone, which
    are r x r; X is then multiplied once, by the product of their Qs. This saves products with the larger X (Gram
    Newton-Schulz, Zhang et al. 2026)."""
    def polynomial(A):
        Q = torch.baddbmm(A, A, A, beta=-4.7750, alpha=2.0315)
        Q.diagonal(dim1=1, dim2=2).add_(3.4445)
        return Q
    X = X.to(dtype)
    X = X / (X.norm(dim=(1, 2), keepdim=True) + 1e-7)           # the iteration needs singular values of at most 1
    # A is computed from X again after n steps, since its rounding errors add up
    n = 2 if dtype == torch.bfloat16 else NS_STEPS
    if X.size(1) == X.size(2):                  # A is as large as X: the plain form needs fewer products
        n = 1
    assert NS_STEPS % n == 0, "in bfloat16 the number of steps must be even"
    for _ in range(NS_STEPS // n):
        A = X @ X.mT                                                                # (N, r, r)
        Q = polynomial(A)
        product = Q
        for _ in range(n - 1):
            A = Q @ A @ Q
            Q = polynomial(A)
            product = Q @ product
        X = product @ X
    return X


def muon_step(params, momentum, lr, dtype):  # params: all matrices of a group; momentum (N, r, c), r <= c
    """Muon (Jordan et al. 2024): Nesterov momentum, orthogonalized. Updates are scaled to the root mean square of those
    of AdamW (Liu et al. 2025), so one learning rate serves both optimizers."""
    def transpose_tall(t):  # (stack, rows, columns) -> (stack, r, c)
        return t if t.size(1) <= t.size(2) else t.mT
    grad = torch.cat([transpose_tall(p.grad) for p in params])                      # (N, r, c)
    momentum.lerp_(grad, 1 - MOMENTUM)
    nesterov = grad.lerp(momentum, MOMENTUM)
    update = newton_schulz(nesterov, dtype).to(momentum.dtype)
    update.mul_(lr * 0.2 * momentum.size(2) ** 0.5)
    for p, u in zip(params, update.split([len(p) for p in params])):
        transpose_tall(p).sub_(u)


def adamw_step(states, lr):  # states: [AdamWState]; lr: 0-D tensor
    """AdamW (Loshchilov and Hutter 2019). Weight decay is applied in optimizer_step. This calls torch's functional
    form, because constructing torch.optim.AdamW imports the compiler, which takes a second."""
    states = [state for state in states if state.param.grad is not None]
    adamw(params=[s.param for s in states], grads=[s.param.grad for s in states], exp_avgs=[s.first for s in states],
          exp_avg_sqs=[s.second for s in states], max_exp_avg_sqs=[], state_steps=[s.n_updates for s in states],
          fused=True, lr=lr, beta1=0.9, beta2=0.95, eps=1e-10, weight_decay=0.0, amsgrad=False, maximize=False)


@torch.no_grad()
def optimizer_step(opt, hp):  # opt: of make_optimizer
    if hp.weight_decay:
        for p in opt.matrices:                  # only these matrices decay
            if p.grad is not None:
                p.mul_(1 - opt.lr * hp.weight_decay)
    for params, momentum in opt.muon:
        if params[0].grad is not None:          # then all matrices of this network have one
            muon_step(params, momentum, opt.lr, getattr(torch, hp.dtype))
    adamw_step(opt.adamw, opt.lr)


# ---- a training step
def prepare(corpus, members, hp):  # -> State before the first step
    """A State is a Namespace of all that a step reads and writes. load_step_inputs writes the inputs of the step,
    training_step the rest. Tensors are only modified in place: a CUDA graph reads and writes the same addresses."""
    model = run.build(members, hp)
    # what identifies each source, for checkpoints and logs
    sources = [[source[key] for key in ("name", "size", "crc", "weight", "split")] for source in corpus]
    if hp.init_from and not hp.resume:
        parent = run.load_checkpoint(hp.init_from)
        run.start_from(model, parent["model"], hp.init_from)
        for name in find_new_splits(parent["sources"], sources):
            print(f"--data {name}: is divided into training and validation text in another way than in {hp.init_from}, "
                  "which may have trained on what is validation text now: then the validation loss is too low")
    hp = Namespace(**vars(hp) | {"progress": torch.zeros((), device=hp.device)})
    if model.ngrams is not None:
        model.ngrams.drop = ngram_drop_rate(corpus, members, hp)
    return Namespace(
        hp=hp, members=members, corpus=corpus, model=model, opt=make_optimizer(model, hp),
        # what compile_step replaces
        loss_fns={member.objective.name: member.objective.loss for member in members},
        optimizer_step=optimizer_step,
        # inputs of the step, besides hp.progress and opt.lr
        windows=corpus[0]["train"].new_zeros(2, hp.batch_size * hp.accum, dtype=torch.long),        # source, offset
        g=torch.Generator(hp.device),           # for the corruption
        on_record=None,                         # called with each record of metrics.jsonl
        best=math.inf,                          # the validation loss of best.pt
        sources=sources)


def find_new_splits(saved, sources):  # sources of a checkpoint, and of now -> names of those that are split differently
    rules = {os.path.realpath(name): "".join(rule) for name, _, _, _, *rule in saved}             # older ones lack it
    return [name for name, _, crc, _, rule in sources           # a file without a rule is split anew if it has changed
            if crc not in [x[2] for x in saved] and rules.get(os.path.realpath(name)) not in (None, rule or None)]


def member_of_step(members, step):  # -> the member that this step trains
    """The members divide [0, 1) in proportion to their weights. Each step trains the member whose part contains the
    number u = step / golden ratio, modulo 1, which is spread evenly in any stretch of steps. In the first steps, u is
    0, 0.62, 0.24, 0.85; of two members of equal weight, these train 0, 1, 0, 1."""
    u = step * INVERSE_GOLDEN_RATIO % 1
    ends = [*itertools.accumulate(member.weight for member in members)]
    return members[min(bisect.bisect(ends, u), len(members) - 1)]                   # the last end may be below u


def load_step_inputs(s, member, step):
    """Copies what the host decides into the tensors that the step reads, without waiting for the device."""
    hp = s.hp
    key = f"{hp.seed},{hp.init_step + step}"    # with --init_from, the steps of the parent count, so windows are new
    n_rows = hp.batch_size * hp.accum
    windows = sample_windows(s.corpus, "train", member.n, n_rows, make_rng(f"{key},windows"))
    for static, new in zip(s.windows, windows):
        if static.is_cuda:
            new = new.pin_memory()
        static.copy_(new, non_blocking=True)
    s.g.manual_seed(to_seed(f"{key},{member.objective.name}"))
    s.opt.lr.fill_(learning_rate(step, hp))
    hp.progress.fill_(1.0 if hp.init_from else step / max(1, hp.max_iters))
    torch.manual_seed(to_seed(f"{key},{run.RANK},dropped lookups"))


def training_step(s, member):  # -> loss (nats), norm of the gradient; 0-D each
    """Updates the weights once, on the inputs that load_step_inputs has set. Never waits for the device."""
    hp = s.hp
    # forward and backward: the losses of micro-batches add up to that of the step
    batch = make_batch(member, s.corpus, "train", s.windows, s.g, hp)
    loss_fn = s.loss_fns[member.objective.name]
    loss = torch.zeros((), device=hp.device)
    for i in range(run.RANK, hp.accum, run.WORLD):              # this process's micro-batches
        part_loss, _ = loss_fn(s.model, micro_batch(batch, i, hp.accum, hp), hp)
        part_loss.backward()
        loss += part_loss.detach()
    run.sum_over_processes(s.model, loss)

    # clip and update
    params = [p for p in s.model.parameters() if p.grad is not None]                # those that the loss depends on
    norm = torch.nn.utils.clip_grad_norm_(params, hp.grad_clip or math.inf)
    s.optimizer_step(s.opt, hp)
    s.model.zero_grad(set_to_none=True)
    return loss, norm


def compile_step(s):  # compiles the losses and the optimizer, but not the corruption
    torch._dynamo.reset()                       # torch limits recompilations per process: count anew in each run
    # a mixture compiles losses and optimizer for each kind of member
    torch._dynamo.config.recompile_limit = 4 * len(OBJECTIVES)
    for name, loss_fn in s.loss_fns.items():
        s.loss_fns[name] = torch.compile(loss_fn, dynamic=False)
    s.optimizer_step = torch.compile(s.optimizer_step, dynamic=False)


def make_step_fns(s):  # -> {objective: function without arguments that calls training_step for this member}
    """With --cuda_graph each function replays a graph of its own; the graphs share a stream and a memory pool."""
    step_fns = {member.objective.name: partial(training_step, s, member) for member in s.members}
    if s.hp.cuda_graph:
        graphed = None
        for name, step_fn in step_fns.items():
            graphed = run.GraphedStep(step_fn, [s.g], share=graphed)
            step_fns[name] = graphed
    return step_fns


# ---- evaluation
def validation_batches(member, source, hp):  # yields batches, the same whatever the seed, batch size and step
    hp = Namespace(**vars(hp) | {"progress": 1.0})              # validation does not change during training
    for i in range(hp.eval_iters):
        batch = draw_batch(member, [source], "val", run.EVAL_ROWS, f"validation,{i}", hp)
        yield micro_batch(batch, 0, 1, hp)


def mean_loss(member, model, batches, hp):  # -> mean loss, {name: mean figure} over batches
    results = [member.objective.loss(model, batch, hp) for batch in batches]
    loss = statistics.fmean(float(loss) for loss, _ in results)
    return loss, {name: statistics.fmean(float(figures[name]) for _, figures in results) for name in results[0][1]}


def bits_per_byte(member, model, source, loss, hp):  # the member's loss in nats -> bits, or None if not defined
    """The softmax is over the 256 bytes alone, even if the byte head also predicts special ids, as in a mixture: a text
    contains none. Objectives with bpb="causal" are evaluated on clm's rows."""
    if member.objective.bpb is None:
        return None
    if member.objective.bpb == "causal":        # evaluate the model on clm's rows
        member = run.Member(CAUSAL, 1.0, hp.block_size + 1)
    elif model.config.n_outputs == N_BYTES:
        return loss / math.log(2)
    byte_model = copy.copy(model)               # shares the weights
    byte_model.logits = lambda h: model.logits(h)[..., :N_BYTES]
    loss, _ = mean_loss(member, byte_model, validation_batches(member, source, hp), hp)
    return loss / math.log(2)


@torch.no_grad()
def evaluate(model, members, corpus, hp):  # -> records, loss
    """Evaluates each member on the validation text of each source. A record holds the names of both, the mean "loss" in
    nats, the means of the other "figures" that the loss function returns, and "bpb", bits per byte. The loss that is
    returned is the mean of all, weighted by the weights of source and member."""
    model.eval()
    records = []
    total = 0.0
    for source, member in itertools.product(corpus, members):
        loss, figures = mean_loss(member, model, validation_batches(member, source, hp), hp)
        bpb = bits_per_byte(member, model, source, loss, hp)
        records.append({"split": "val", "data": source["name"], "objective": member.objective.name, "loss": loss,
                        "bpb": bpb, "figures": figures})
        total += source["weight"] * member.weight * loss
    model.train()
    return records, total


# ---- checkpoints
def optimizer_tensors(s):  # -> {name: tensor}
    tensors = {f"muon.{i}": momentum for i, (_, momentum) in enumerate(s.opt.muon)}
    for i, state in enumerate(s.opt.adamw):
        tensors[f"adamw.{i}.first"] = state.first
        tensors[f"adamw.{i}.second"] = state.second
        tensors[f"adamw.{i}.updates"] = state.n_updates
    return tensors


def check_finite(is_finite, what, step, hp):
    if not is_finite:
        raise FloatingPointError(
            f"{what} is not finite at step {step}; the last checkpoint, if any, is unchanged. Try "
            f"--init_from {shlex.quote(hp.out_dir)} with a lower --learning_rate or --dtype float32")


def save(s, name, status, metrics):  # name: ckpt.pt or best.pt
    weights = s.model.state_dict()
    check_finite(all(bool(t.isfinite().all()) for t in weights.values()), "a weight", status["step"], s.hp)
    if run.RANK:
        return
    ckpt = status | dict(
        version=run.VERSION, config=run.settings_to_save(s.hp), model_config=vars(s.model.config), model=weights,
        sources=s.sources, metrics_bytes=metrics.tell(), held_out=s.corpus[0]["val"][:HELD_OUT].cpu().clone())
    if name == "ckpt.pt":                       # nobody resumes from best.pt
        ckpt["optimizer"] = optimizer_tensors(s)
    run.save_checkpoint(os.path.join(s.hp.out_dir, name), ckpt)


def resume(ckpt, s):  # loads weights and optimizer -> status; fails if corpus or number of steps do not fit
    hp = s.hp
    if [x[1:4] for x in ckpt["sources"]] != [x[1:4] for x in s.sources]:            # names may differ
        fail(f"--data {' '.join(hp.data)}: differs from the data of {hp.out_dir} in its text, its weights "
             "or, in an older program, its held-out documents. Try the same data, or a new run")
    planned = ckpt["config"]["max_iters"]
    if hp.max_iters != planned and hp.max_iters <= ckpt["step"]:
        fail(f"--max_iters {hp.max_iters}: the run in {hp.out_dir} is at step {ckpt['step']}. Try a larger number")
    if hp.max_iters != planned:
        print(f"resuming with {hp.max_iters} steps instead of {planned}; the schedules follow the new number")
    run.copy_tensors(s.model.state_dict(), ckpt["model"], hp.resume)
    run.copy_tensors(optimizer_tensors(s), ckpt["optimizer"], hp.resume)
    best = os.path.join(hp.out_dir, "best.pt")  # may be later than ckpt.pt, or of a moment at which the run was stopped
    if os.path.isfile(best):
        s.best = run.load_checkpoint(best)["val"]
    return {key: ckpt[key] for key in ("step", "seconds", "val", "metrics_bytes")}


# ---- what a run prints and logs
# {characters that stand for ids when a row is printed: what they mean}
LEGEND = {
    "█": "MASK hides text", "∅": "EOT ends a document", "‖": "SEP ends a text", "Ⓒ": "CLS stands for the row",
    "Ⓟ": "PRE starts a prefix", "Ⓢ": "SUF starts a suffix", "Ⓜ": "MID starts a middle", "ⓡ": "R: short spans",
    "ⓢ": "S: a suffix", "ⓧ": "X: long spans", "░": "PAD fills the row", "⇥": "tab", "⏎": "newline", "·": "no loss",
    "①②③④⑤⑥⑦⑧⑨": "sentinels replace spans", "␣": "space", "�": "a byte outside printable ASCII"}
SYMBOLS = dict(zip((MASK, EOT, SEP, CLS, PRE, SUF, MID, MODE_R, MODE_S, MODE_X, PAD, 9, 10, IGNORE_INDEX), LEGEND))


def to_symbol(i):  # id -> character
    if i >= SENTINEL:
        return "①②③④⑤⑥⑦⑧⑨"[(i - SENTINEL) % 9]
    return SYMBOLS.get(i) or (chr(i) if 32 <= i < 127 else "�")


def draw_rows(name, batch, width=96):  # name: of the objective -> lines of text
    """Shows `width` positions of one row of each kind, starting a third of the width before its first target: inputs,
    with targets below, then the label, if any. Rows are of the same kind if both or neither have causal attention, and
    if the same control ids are among their first two ids. Of each kind, the row with the fewest PADs is shown."""
    inp = batch["inp"].flatten(1)
    prefix = torch.as_tensor(batch["prefix"]).expand(len(inp))
    rows = {}                                   # {kind: number of a row}
    for b in (inp == PAD).sum(1).argsort(stable=True).tolist():
        controls = tuple(i for i in inp[b, :2].tolist() if MASK < i < SENTINEL)
        rows.setdefault((int(prefix[b]) == 0, controls), b)
    has_targets = "tgt" in batch and batch["tgt"].dim() == 2
    lines = []
    for b in rows.values():
        start = 0
        if has_targets:
            first_target = int((batch["tgt"][b] != IGNORE_INDEX).byte().argmax())
            start = max(0, first_target - width // 3)
        for ids in batch["inp"][b].reshape(-1, batch["inp"].size(-1)).tolist():     # one text, or two
            lines.append(f"  {name} inp   {''.join(map(to_symbol, ids[start:start + width]))}")
        if has_targets:
            text = "".join(map(to_symbol, batch["tgt"][b, start:start + width].tolist()))
            lines.append(f"  {name} tgt   {text.replace(' ', '␣')}")                # a space looks like no loss
        if "labels" in batch:
            lines.append(f"  {name} label {int(batch['labels'][b])}")
    return lines


def explain_symbols(text):  # -> "█ MASK hides text, ①② sentinels replace spans", the symbols that occur in the text
    used = {meaning: "".join(symbol for symbol in symbols if symbol in text) for symbols, meaning in LEGEND.items()}
    return ", ".join(f"{symbols} {meaning}" for meaning, symbols in used.items() if symbols)


def announce(s, metrics, status, stop):  # prints what is trained, and logs it in the first line of metrics.jsonl
    hp = s.hp
    table = 0 if s.model.ngrams is None else s.model.ngrams.table.numel()
    size = sum(p.numel() for p in s.model.parameters()) - table
    threads = torch.get_num_threads()
    if metrics.tell() == 0:
        record = {"config": run.settings_to_save(hp), "version": run.VERSION, "torch": torch.__version__,
                  "processes": run.WORLD, "threads": threads, "parameters": size + table, "ngram_parameters": table,
                  "sources": s.sources}
        run.write_line(metrics, record, s.on_record)
    run.say(f"{hp.objective} | {size:,} parameters and {table:,} in the n-gram table | {hp.out_dir}", stop)
    print(f"{hp.device}, threads: {threads}, processes: {run.WORLD} | activations {hp.dtype} | "
          f"{status['step']:,} of {hp.max_iters:,} steps done")
    for source in s.corpus:
        passes = hp.max_iters * passes_per_step(source, s.members, hp)
        print(f"--data {source['name']}: trains on {len(source['train']):,} bytes, validates on {len(source['val']):,}"
              f"; {source['weight']:.1%} of rows, {passes:.3g} passes")
    if status["step"] == 0:
        lines = []
        for member in s.members:
            load_step_inputs(s, member, 0)
            batch = make_batch(member, s.corpus, "train", s.windows, s.g, hp)
            lines += draw_rows(member.objective.name, batch)
        rows = "\n".join(lines)
        print("a part of one row of each kind in the first batch, with one character for each position:")
        print(f"{explain_symbols(rows)}\n{rows}", flush=True)


def describe(step, record):  # -> a line for a record of evaluate
    loss = record["loss"]
    line = f"step {step:6d} | validation on {record['data']}: {record['objective']} loss {loss:.4f} nats"
    figures = record["figures"]
    others = [f"{name} {value:.4f}" for name, value in figures.items() if value != loss]        # "nll" may be the loss
    if others:
        line += f" ({', '.join(others)})"
    if "nll" in figures:
        name = "perplexity" if OBJECTIVES[record["objective"]].bpb == "loss" else "perplexity of the targets"
        line += f", {name} {math.exp(min(figures['nll'], 700.0)):.2f}"              # exp(710) overflows
    if record["bpb"] is not None:
        kind = {"bound": "<= ", "causal": "causal rows "}.get(OBJECTIVES[record["objective"]].bpb, "")
        line += f", {kind}{record['bpb']:.4f} bits/byte"
    return line


def log_step(s, member, metrics, last_log, step, loss, norm, seconds):  # -> loss and speed (text), minutes left
    hp = s.hp
    speed = (step - last_log["step"]) / (seconds - last_log["seconds"])             # steps/s since the last log
    positions = round(speed * hp.batch_size * hp.accum * hp.block_size)             # per second
    record = {"step": step, "split": "train", "data": " ".join(hp.data), "objective": member.objective.name,
              "loss": loss, "lr": learning_rate(step, hp), "grad_norm": norm, "tok_per_s": positions,
              "seconds": round(seconds, 3)}
    run.write_line(metrics, record, s.on_record)
    minutes = (hp.max_iters - step - 1) / speed / 60
    return f"training loss {loss:.3f}, {positions:,} positions/s", minutes


def compressor_bits(data):  # (N,) uint8 -> text: bits per byte of the standard library's compressors, for comparison
    text = to_bytes(data[:COMPRESSED_BYTES].cpu())
    results = {"zlib": zlib.compress(text, 9), "bz2": bz2.compress(text), "lzma": lzma.compress(text)}
    bits = [f"{name} {8 * len(result) / len(text):.3f}" for name, result in results.items()]
    return f"{', '.join(bits)} bits/byte as one stream of {len(text):,} bytes"


def finish(s):  # after training: prints what compressors reach on the validation text, and a sample of the model
    out_dir = s.hp.out_dir
    if any(member.objective.bpb for member in s.members):
        for source in s.corpus:
            bits = compressor_bits(source["val"])
            print(f"for comparison, compressors on the validation text of {source['name']}: {bits}")
    print(flush=True)
    hint = f"sample.py has no use for {s.hp.objective}"
    if any(member.objective.uses for member in s.members):
        import sample  # here, since training does not need it
        sample.main(["--out_dir", out_dir, "--device", s.hp.device])
        hint = f"More samples: python sample.py --out_dir {shlex.quote(out_dir)}"
    print(f"\ndone: {out_dir}/ckpt.pt. {hint}")


# ---- a run
def move_corpus(corpus, hp):  # to the GPU, as uint8, if it takes less than a quarter of the free memory
    if not hp.device.startswith("cuda"):
        return
    size = sum(source["size"] for source in corpus)
    free, _ = torch.cuda.mem_get_info(torch.device(hp.device))
    if size < free / 4:
        for source in corpus:
            source["train"] = source["train"].to(hp.device)
            source["val"] = source["val"].to(hp.device)
    elif hp.cuda_graph:
        fail(f"--cuda_graph: the corpus of {size:,} bytes does not fit on the GPU beside the model. Try without it")


def set_up(hp):  # -> State, status: the numbers that a checkpoint holds besides weights and settings
    """All refusals come before the run's folder is made."""
    run.use_device(torch.device(hp.device))
    members = run.get_members(hp)
    corpus = open_corpus(hp.data)
    check_sizes(corpus, max(member.n for member in members), hp.block_size)
    if hp.max_passes and not hp.resume:
        shorten_run(corpus, members, hp)
    move_corpus(corpus, hp)
    s = prepare(corpus, members, hp)
    if hp.resume:
        status = resume(run.load_checkpoint(hp.resume), s)
    else:
        status = dict(step=0, seconds=0.0, val=math.inf, metrics_bytes=0)
        s.hp.out_dir = run.choose_out_dir(hp)
    if hp.compile:
        compile_step(s)
    return s, status


def validate(s, status, metrics, stop):  # evaluates, logs, saves best.pt
    step = status["step"]
    records, loss = evaluate(s.model, s.members, s.corpus, s.hp)
    check_finite(math.isfinite(loss), "the validation loss", step, s.hp)
    for record in records:
        record = {"step": step, **record, "seconds": round(status["seconds"], 3)}
        run.write_line(metrics, record, s.on_record)
        run.say(describe(step, record), stop)
    status["val"] = loss
    if step > 0 and loss < s.best:              # best.pt never holds the weights that a run starts with
        s.best = loss
        # before ckpt.pt: a run that is killed between the two resumes from the older ckpt.pt
        save(s, "best.pt", status, metrics)


def end_run(s, status, stop, is_stopped):  # is_stopped: by a signal, before the last step; -> exit code
    out_dir = s.hp.out_dir
    if is_stopped:
        run.say(f"stopped at step {status['step']} and saved. Resume with: python train.py --resume --out_dir "
                f"{shlex.quote(out_dir)}", stop)
    elif status["val"] > s.best:
        print(f"{out_dir}/best.pt has the lowest validation loss, {s.best:.4f}; the last: {status['val']:.4f}")
    if run.any_rank(signal.SIGINT in stop):
        raise KeyboardInterrupt
    number = stop[0] if stop else signal.SIGTERM                # stop is empty if the signal went to another process
    return 128 + number if is_stopped else 0


def train(s, status):  # s, status: of set_up -> exit code
    """Trains, evaluates and saves. The exit code is 0 when done, and 128 + signal after a signal. After Ctrl-C, saves
    and raises KeyboardInterrupt, so that a loop over runs ends, too. Raises FloatingPointError if a loss, a gradient or
    a weight is not finite, when it is logged, validated or saved. From then on nothing is saved. status describes the
    latest checkpoint."""
    hp = s.hp
    step_fns = make_step_fns(s)
    first_step = status["step"]
    run.barrier()                               # every process has chosen the folder before the first one makes it
    with run.open_metrics(hp.out_dir, status["metrics_bytes"]) as metrics, run.catch_signals() as stop:
        announce(s, metrics, status, stop)
        start = time.perf_counter() - status["seconds"]         # now - start: seconds of training, without evaluations
        last_line = status["seconds"]
        last_log = {"step": first_step - 1, "seconds": status["seconds"]}
        # the last iteration takes no step: it only evaluates and saves
        bar = tqdm(range(first_step, hp.max_iters + 1), total=hp.max_iters, initial=first_step,
                   disable=True if run.RANK else None, unit="step", dynamic_ncols=True)     # None: only on a terminal
        for step in bar:
            # evaluate and save if due
            is_due = step % hp.eval_interval == 0 or step == hp.max_iters
            is_stopped = run.any_rank(bool(stop))
            is_saved = bool(hp.resume) and step == first_step   # a resumed run starts at a saved step
            if (is_due or is_stopped) and not is_saved:
                new = status | {"step": step, "seconds": time.perf_counter() - start}
                if is_due:
                    validate(s, new, metrics, stop)
                save(s, "ckpt.pt", new, metrics)
                status.update(new)
                # after saving, because the checkpoint must equal that of a run that was not stopped
                if is_stopped and not is_due and step > 0:
                    validate(s, new, metrics, stop)
                start = time.perf_counter() - status["seconds"]
            if step == hp.max_iters or is_stopped:
                break

            # take a step
            member = member_of_step(s.members, step)
            load_step_inputs(s, member, step)
            loss, norm = step_fns[member.objective.name]()

            # log
            if step % hp.log_interval == 0:     # only logging waits for the device
                loss = float(loss)
                norm = float(norm)
                check_finite(math.isfinite(loss) and math.isfinite(norm), "loss or gradient", step, hp)
                seconds = time.perf_counter() - start
                line, minutes = log_step(s, member, metrics, last_log, step, loss, norm, seconds)
                last_log = {"step": step, "seconds": seconds}
                bar.set_postfix_str(line)
                # without a bar, print a line every 5 seconds, but not after the first step, which may compile
                if bar.disable and seconds > last_line + 5 and step > first_step:
                    last_line = seconds
                    run.say(f"step {step:6d} | {line}, {minutes:.1f} min left", stop)
        is_stopped = is_stopped and step < hp.max_iters
        return end_run(s, status, stop, is_stopped)


def main(argv=None, with_sample=True, on_record=None):
    """Trains, and returns the exit code. Changes settings of torch and of the process (run.use_device).

        with_sample     at the end, draw loss.png, compress the validation text and print a sample
        on_record       called with each record of metrics.jsonl, a dict

    Raises UserError if the flags or the data cannot be used, and FloatingPointError and KeyboardInterrupt as `train`
    does."""
    hp = run.get_config(sys.argv[1:] if argv is None else argv)
    run.join_processes(hp)
    s, status = set_up(hp)
    s.on_record = on_record
    is_shown = with_sample and not run.RANK
    try:
        code = train(s, status)
    except (FloatingPointError, KeyboardInterrupt):             # raised in all processes
        if is_shown:
            run.draw_losses(s.hp.out_dir)
        run.barrier()                           # torchrun ends all processes as soon as one has failed
        raise
    if is_shown:
        run.draw_losses(s.hp.out_dir)
        if code == 0:
            finish(s)
    return code


if __name__ == "__main__":
    run.run_program(main)
