"""Train any objective of objectives.py on any bytes.

    python train.py                                     clm on the Python standard library's own source
    python train.py --objective mlm --data book.txt     another objective, your own text
    python train.py --resume                            resume the latest run
    python train.py --init_from out/clm --data new.txt:0.95 stdlib:0.05    continual pre-training, with replay

Settings, devices, checkpoints and what a run prints are in run.py.

B rows of a batch, T = block_size positions of a row, n raw bytes that fill a row,
N matrices of one shape (r, c)
"""
import bisect
import copy
import itertools
import math
import shlex
import statistics
import sys
import time
from argparse import Namespace
from collections import namedtuple
from dataclasses import dataclass
from functools import partial

from data import check_sizes, make_rng, open_corpus, read_windows, sample_windows, to_seed
from model import NGRAMS, Block, StackedLinear, Transformer
from objectives import CAUSAL, N_BYTES, OBJECTIVES, add_weights, document_mask
import run
import torch
from torch.optim.adamw import adamw

INVERSE_GOLDEN_RATIO = 0.6180339887498949       # its multiples modulo 1 are spread evenly over [0, 1)
MIN_ITERS = 200                                 # --max_passes never shortens a run below this number of steps
MOMENTUM = 0.9                                  # of Muon; at width 128 better than .95
NS_STEPS = 4                                    # iterations of Newton-Schulz; at width 128 as good as 5
BYTES_PER_ROW = 4                               # bytes of text that a row of the n-gram table can memorize


# ---- batches: the host chooses windows of text, the device reads and corrupts them
def choose_starts(starts, g, member, corpus, split, key):
    """Writes the source and the offset at which each row starts into starts (2, B), and seeds g for the
    corruption, without waiting for the device. The same key, a string, gives the same batch if all other
    arguments and the kind of device are the same."""
    B = starts.size(1)
    chosen = torch.stack(sample_windows(corpus, split, member.n, B, make_rng(f"{key},windows")))
    if starts.is_cuda:
        chosen = chosen.pin_memory()
    starts.copy_(chosen, non_blocking=True)
    g.manual_seed(to_seed(f"{key},{member.objective.name}"))


def make_batch(starts, g, member, corpus, split, hp):  # starts, g: of choose_starts -> batch of B rows
    source, offset = starts
    x = read_windows(corpus, split, source, offset, member.n)                       # (B, n)
    if hp.device.startswith("cuda") and not x.is_cuda:          # the corpus does not fit on the GPU
        x = x.pin_memory().to(hp.device, non_blocking=True)
    return add_weights(member.objective.corrupt(x.to(hp.device), g, hp))


def sample_batch(member, corpus, split, B, key, hp):  # -> batch of B rows
    starts = torch.zeros(2, B, dtype=torch.long, device=corpus[0][split].device)
    g = torch.Generator(hp.device)
    choose_starts(starts, g, member, corpus, split, key)
    return make_batch(starts, g, member, corpus, split, hp)


# ---- the plan of a run: number of steps, n-gram drop rate, learning rate
def passes_per_step(source, members, hp):
    """Returns the part of a source's training text that a step reads, on average. A pass is an epoch. With
    4 rows of 33 bytes, half of them from a source of 6,600 bytes: 2 * 33 / 6,600 = 0.01."""
    n = sum(member.weight * member.n for member in members)     # bytes that fill a row, on average
    return source["weight"] * hp.batch_size * hp.accum * n / len(source["train"])


def shorten_run(corpus, members, hp):
    """Lowers hp.max_iters and hp.eval_interval if the run would make more than hp.max_passes passes, which
    overfits (Muennighoff et al. 2023). The passes over several sources are averaged, weighted by their shares
    of the rows."""
    passes = sum(source["weight"] * passes_per_step(source, members, hp) for source in corpus)
    max_iters = max(MIN_ITERS, math.ceil(hp.max_passes / passes))
    if max_iters < hp.max_iters:
        hp.max_iters = max_iters
        hp.eval_interval = min(hp.eval_interval, math.ceil(max_iters / 4))
        print(f"the text is small, so training stops after {max_iters:,} steps (--max_passes {hp.max_passes:g}, "
              f"but at least {MIN_ITERS} steps). Use --max_iters to override this")


def ngram_drop_rate(corpus, members, hp):  # -> share of the n-gram lookups that training drops
    """Averages the rates of the sources, weighted by their shares of the rows. The rate of a source is

        1 - (1 - ngram_drop) / (1 + repetitions) ** 0.4

    repetitions: the number of passes after the first one, times the share of the text that fits into the
        table. In these passes the table could recite what it has memorized. With ngram_drop 0.25 and four
        passes over a short text, the rate is 1 - 0.75 / (1 + 3) ** 0.4 = 0.57."""
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
    """Rises linearly (warmup_iters), is constant, then falls linearly to 0 (lr_decay). With the defaults and
    1,200 steps, it is constant from step 20 to step 480, half as large at step 840, and 0 at the end."""
    warmup = (step + 1) / (hp.warmup_iters + 1)
    decay = (hp.max_iters - step) / max(1, hp.lr_decay * hp.max_iters)
    return hp.learning_rate * min(warmup, 1.0, decay)


def member_of_step(members, step):  # -> the member that this step trains
    """The members divide [0, 1) in proportion to their weights. Each step trains the member whose part contains
    the number u = step / golden ratio, modulo 1, which is spread evenly in any stretch of steps. In the first
    steps, u is 0, 0.62, 0.24, 0.85; of two members of equal weight, these train 0, 1, 0, 1."""
    u = step * INVERSE_GOLDEN_RATIO % 1
    ends = [*itertools.accumulate(member.weight for member in members)]
    return members[min(bisect.bisect(ends, u), len(members) - 1)]               # the last end may be below u


# ---- optimizers: by default Muon for the StackedLinear layers inside blocks, AdamW for all other parameters
MuonState = namedtuple("MuonState", "params momentum")          # weights of a group of matrices; (N, r, c)
# a parameter, its first and second moments, and how often it was updated (0-D tensor)
AdamWState = namedtuple("AdamWState", "param first second n_updates")


@dataclass
class Optimizer:
    """A parameter without a gradient, such as a head of another member of a mixture, is not changed."""
    lr: torch.Tensor            # learning rate, 0-D
    matrices: list              # the weights (stack, rows, columns) inside blocks; only they decay
    muon: list                  # of MuonState; empty with --optimizer adamw
    adamw: list                 # of AdamWState


def make_optimizer(model, hp):  # -> Optimizer
    """Muon updates a group of matrices at once: a few large products are faster than many small ones. A tall
    matrix is transposed, so r <= c. The blocks of a network have a name in common: "blocks" for the model,
    "heads.generator.blocks" for electra's generator, which in a mixture has gradients only in electra's
    steps."""
    groups = {}                                 # {(name of the blocks, r, c): weights}
    blocks = {name: block for name, block in model.named_modules() if isinstance(block, Block)}
    for name, block in blocks.items():
        for layer in block.modules():
            if isinstance(layer, StackedLinear):
                r, c = sorted(layer.weight.shape[1:])
                groups.setdefault((name.rpartition(".")[0], r, c), []).append(layer.weight)
    matrices = [p for params in groups.values() for p in params]
    in_blocks = set(matrices)
    assert len(in_blocks) == len(matrices), "a Block inside a Block: its matrices would be updated twice"
    by_adamw = [p for p in model.parameters() if p not in in_blocks]

    zero = partial(torch.zeros, device=hp.device)
    opt = Optimizer(lr=zero(()), matrices=matrices, muon=[], adamw=[])
    if hp.optimizer == "adamw":
        by_adamw += matrices
    else:
        for (_, r, c), params in groups.items():
            N = sum(len(p) for p in params)
            opt.muon.append(MuonState(params, zero((N, r, c))))
    for p in by_adamw:
        opt.adamw.append(AdamWState(p, torch.zeros_like(p), torch.zeros_like(p), zero(())))
    return opt


def newton_schulz(X, dtype):  # (N, r, c), r <= c -> approximately the nearest matrices with orthonormal rows
    """Moves all singular values near 1, except those that were very small. The plain form (Jordan et al. 2024):

        for _ in range(NS_STEPS):
            A = X @ X.mT
            Q = 3.4445 * I - 4.7750 * A + 2.0315 * A @ A
            X = Q @ X

    The next A is (Q X)(Q X)^T = Q A Q, since Q is symmetric. So several steps can be taken with A and Q alone,
    which are r x r; X is then multiplied once, by the product of their Qs. This saves products with the larger
    X (Gram Newton-Schulz, Zhang et al. 2026)."""
    X = X.to(dtype)
    X = X / (X.norm(dim=(1, 2), keepdim=True) + 1e-7)           # singular values must be at most 1
    # A is computed from X again after n steps, since its rounding errors add up
    n = 2 if dtype == torch.bfloat16 else NS_STEPS
    if X.size(1) == X.size(2):                  # A is as large as X: the plain form needs fewer products
        n = 1
    assert NS_STEPS % n == 0, "in bfloat16 the number of steps must be even"
    for _ in range(NS_STEPS // n):
        A = X @ X.mT                                                                # (N, r, r)
        Q = ns_polynomial(A)
        product = Q                             # of the Qs of n steps
        for _ in range(n - 1):
            A = Q @ A @ Q
            Q = ns_polynomial(A)
            product = Q @ product
        X = product @ X
    return X


def ns_polynomial(A):  # (N, r, r) -> 3.4445 I - 4.7750 A + 2.0315 A A
    Q = torch.baddbmm(A, A, A, beta=-4.7750, alpha=2.0315)
    Q.diagonal(dim1=1, dim2=2).add_(3.4445)
    return Q


def muon_step(params, momentum, lr, dtype):  # params: all matrices of a group; momentum (N, r, c), r <= c
    """Muon (Jordan et al. 2024): Nesterov momentum, orthogonalized. Updates are scaled to the root mean square
    of those of AdamW (Liu et al. 2025), so one learning rate serves both optimizers."""
    is_tall = [p.size(1) > p.size(2) for p in params]
    grad = torch.cat([p.grad.mT if tall else p.grad for p, tall in zip(params, is_tall)])       # (N, r, c)
    momentum.lerp_(grad, 1 - MOMENTUM)
    nesterov = grad.lerp(momentum, MOMENTUM)
    update = newton_schulz(nesterov, dtype).to(momentum.dtype)
    update.mul_(lr * 0.2 * momentum.size(2) ** 0.5)
    for p, u, tall in zip(params, update.split([len(p) for p in params]), is_tall):
        p.sub_(u.mT if tall else u)


@torch.no_grad()
def optimizer_step(opt, hp):
    if hp.weight_decay:
        for p in opt.matrices:
            if p.grad is not None:
                p.mul_(1 - opt.lr * hp.weight_decay)
    for params, momentum in opt.muon:
        if params[0].grad is not None:          # then all matrices of this network have one
            muon_step(params, momentum, opt.lr, getattr(torch, hp.dtype))
    # AdamW (Loshchilov and Hutter 2019), in torch's functional form: constructing torch.optim.AdamW imports
    # the compiler, which takes a second
    states = [state for state in opt.adamw if state.param.grad is not None]
    adamw(params=[state.param for state in states], grads=[state.param.grad for state in states],
          exp_avgs=[state.first for state in states], exp_avg_sqs=[state.second for state in states],
          max_exp_avg_sqs=[], state_steps=[state.n_updates for state in states], fused=True, lr=opt.lr,
          beta1=0.9, beta2=0.95, eps=1e-10, weight_decay=0.0, amsgrad=False, maximize=False)


# ---- a training step
@dataclass
class State:
    """All that a run reads and writes. Tensors are only modified in place: a CUDA graph reads and writes the
    same addresses."""
    hp: Namespace               # settings; hp.progress is the share of the steps that are done (0-D)
    members: list               # of run.Member: a step trains one of them
    corpus: list                # sources of text, of data.open_corpus
    model: Transformer
    opt: Optimizer
    starts: torch.Tensor        # source and offset at which each row of a step starts, (2, batch_size * accum)
    g: torch.Generator          # for the corruption
    # counters and the log; a checkpoint holds all but best, which is in best.pt, and log
    step: int = 0               # number of steps done
    seconds: float = 0.0        # of training, without evaluations
    val: float = math.inf       # the latest validation loss
    best: float = math.inf      # the validation loss of best.pt
    metrics_bytes: int = 0      # length of metrics.jsonl at the checkpoint from which a run is resumed
    log: object = None          # run.Log: metrics.jsonl, signals; from run.open_log


def make_state(corpus, members, hp):  # -> State before the first step
    model = run.build(members, hp)
    if model.ngrams is not None:
        model.ngrams.drop = ngram_drop_rate(corpus, members, hp)
    hp.progress = torch.full((), 1.0 if hp.init_from else 0.0, device=hp.device)
    starts = torch.zeros(2, hp.batch_size * hp.accum, dtype=torch.long, device=corpus[0]["train"].device)
    return State(hp, members, corpus, model, make_optimizer(model, hp), starts, torch.Generator(hp.device))


def load_step_inputs(s, member, step):
    """Copies what the host decides into the tensors that the step reads, without waiting for the device."""
    hp = s.hp
    key = f"{hp.seed},{hp.init_step + step}"    # with --init_from, the steps of the parent count, so windows are new
    s.opt.lr.fill_(learning_rate(step, hp))
    hp.progress.fill_(1.0 if hp.init_from else step / max(1, hp.max_iters))
    choose_starts(s.starts, s.g, member, s.corpus, "train", key)
    torch.manual_seed(to_seed(f"{key},{run.RANK},dropped lookups"))


def training_step(s, member, loss_fn, update):  # -> loss (nats), norm of the gradient; 0-D each
    """Updates the weights once, on the inputs that load_step_inputs has set. Never waits for the device.
    loss_fn and update are the member's loss and optimizer_step, or their compiled versions."""
    hp = s.hp
    batch = make_batch(s.starts, s.g, member, s.corpus, "train", hp)

    # forward and backward: the losses of micro-batches add up to that of the step
    loss = torch.zeros((), device=hp.device)
    for i in range(run.RANK, hp.accum, run.WORLD):              # this process's micro-batches
        rows = slice(i * hp.batch_size, (i + 1) * hp.batch_size)
        # an int is the prefix of all rows
        part = {key: value if isinstance(value, int) else value[rows] for key, value in batch.items()}
        if hp.doc_mask:
            part |= document_mask(part)
        part_loss, _ = loss_fn(s.model, part, hp)
        part_loss.backward()
        loss += part_loss.detach()
    if run.WORLD > 1:
        run.sum_over_processes(s.model, loss)

    # clip and update
    params = [p for p in s.model.parameters() if p.grad is not None]            # those that the loss depends on
    norm = torch.nn.utils.clip_grad_norm_(params, hp.grad_clip or math.inf)
    update(s.opt, hp)
    s.model.zero_grad(set_to_none=True)
    return loss, norm


def make_step_fns(s):  # -> {objective: function without arguments that takes a step of this member}
    """--compile compiles the losses and the optimizer, but not the corruption. With --cuda_graph each function
    replays a graph of its own; the graphs share a stream and a memory pool."""
    hp = s.hp
    update = optimizer_step
    if hp.compile:
        # torch limits recompilations per process: count anew in each run
        torch._dynamo.reset()
        # a mixture compiles losses and optimizer for each kind of member
        torch._dynamo.config.recompile_limit = 4 * len(OBJECTIVES)
        update = torch.compile(update, dynamic=False)
    step_fns = {}
    graphed = None
    for member in s.members:
        loss_fn = member.objective.loss
        if hp.compile:
            loss_fn = torch.compile(loss_fn, dynamic=False)
        step_fn = partial(training_step, s, member, loss_fn, update)
        if hp.cuda_graph:
            step_fn = graphed = run.GraphedStep(step_fn, [s.g], share=graphed)
        step_fns[member.objective.name] = step_fn
    return step_fns


# ---- evaluation
def validation_batches(member, source, hp):  # yields batches, the same whatever the seed, batch size and step
    hp = Namespace(**vars(hp) | {"progress": 1.0})              # validation does not change during training
    for i in range(hp.eval_iters):
        batch = sample_batch(member, [source], "val", run.EVAL_ROWS, f"validation,{i}", hp)
        if hp.doc_mask:
            batch |= document_mask(batch)
        yield batch


def mean_loss(member, model, batches, hp):  # -> mean loss, {name: mean figure} over batches
    results = [member.objective.loss(model, batch, hp) for batch in batches]
    loss = statistics.fmean(float(loss) for loss, _ in results)
    _, names = results[0]
    return loss, {name: statistics.fmean(float(figures[name]) for _, figures in results) for name in names}


def bits_per_byte(member, model, source, loss, hp):  # the member's loss in nats -> bits, or None
    """The softmax is over the 256 bytes, even if the byte head also predicts special ids, as in a mixture."""
    if member.objective.bpb is None:
        return None
    if member.objective.bpb == "causal":        # evaluate the model on clm's rows
        member = run.Member(CAUSAL, 1.0, hp.block_size + 1)
    elif model.config.n_outputs == N_BYTES:
        return loss / math.log(2)
    byte_model = copy.copy(model)               # shallow: it has the same weights
    byte_model.logits = lambda h: model.logits(h)[..., :N_BYTES]
    loss, _ = mean_loss(member, byte_model, validation_batches(member, source, hp), hp)
    return loss / math.log(2)


@torch.no_grad()
def evaluate(model, members, corpus, hp):  # -> records, loss
    """Evaluates each member on the validation text of each source. A record holds the names of both, the mean
    "loss" in nats, the means of the other "figures" that the loss function returns, and "bpb", bits per byte.
    The loss that is returned is the mean of all, weighted by the weights of source and member."""
    model.eval()
    records = []
    total = 0.0
    for source, member in itertools.product(corpus, members):
        loss, figures = mean_loss(member, model, validation_batches(member, source, hp), hp)
        bpb = bits_per_byte(member, model, source, loss, hp)
        records.append({"split": "val", "data": source["name"], "objective": member.objective.name,
                        "loss": loss, "bpb": bpb, "figures": figures})
        total += source["weight"] * member.weight * loss
    model.train()
    return records, total


def validate(s):  # evaluates, logs, saves best.pt
    records, s.val = evaluate(s.model, s.members, s.corpus, s.hp)
    run.check_finite(math.isfinite(s.val), "the validation loss", s)
    run.log_validation(s, records)
    if s.step > 0 and s.val < s.best:           # best.pt never holds the weights that a run starts with
        s.best = s.val
        # before ckpt.pt: a run that is killed between the two resumes from the older ckpt.pt
        run.save(s, "best.pt")


# ---- a run
def train(s):  # -> is the run stopped by a signal, before its last step?
    """Trains, evaluates and saves. Raises FloatingPointError if a loss, a gradient, a weight or the optimizer's
    state is not finite, when it is logged, validated or saved. From then on nothing is saved."""
    hp = s.hp
    step_fns = make_step_fns(s)
    saved_step = s.step if hp.resume else -1                    # a resumed run starts at a saved step
    start = time.perf_counter() - s.seconds                     # now - start: seconds without evaluations
    while True:
        # evaluate and save if due
        is_last = s.step == hp.max_iters
        is_due = is_last or s.step % hp.eval_interval == 0
        is_end = is_last or run.any_rank(bool(s.log.stop))
        if (is_due or is_end) and s.step != saved_step:
            s.seconds = time.perf_counter() - start
            if is_due:
                validate(s)
            if s.step > 0 or is_end:            # otherwise the weights are untrained
                run.save(s, "ckpt.pt")
            start = time.perf_counter() - s.seconds
        if is_end:
            break

        # take a step
        member = member_of_step(s.members, s.step)
        load_step_inputs(s, member, s.step)
        loss, norm = step_fns[member.objective.name]()

        # log
        if s.step % hp.log_interval == 0:
            loss = float(loss)                  # waits for the device; nothing else does
            norm = float(norm)
            run.check_finite(math.isfinite(loss) and math.isfinite(norm), "loss or gradient", s)
            s.seconds = time.perf_counter() - start
            run.log_step(s, member, loss, norm, learning_rate(s.step, hp))
        s.step += 1
        s.log.bar.update()

    s.log.bar.close()
    # after saving, because the checkpoint must equal that of a run that was not stopped
    if not is_due and s.step not in (0, saved_step):
        validate(s)
    return not is_last


def first_batches(s):  # -> {objective: batch} of step 0, as if it trained each of the members
    batches = {}
    for m in s.members:
        load_step_inputs(s, m, 0)
        batches[m.objective.name] = make_batch(s.starts, s.g, m, s.corpus, "train", s.hp)
    return batches


def finish(s):  # prints what compressors reach on the validation text, and a sample of the model
    out_dir = s.hp.out_dir
    run.print_compressors(s)
    if any(member.objective.uses for member in s.members):
        import sample  # here, since training does not need it
        sample.main(["--out_dir", out_dir, "--device", s.hp.device])
    print(f"\ndone: {out_dir}/ckpt.pt. To use it: python sample.py --out_dir {shlex.quote(out_dir)}")


def main(argv=None, with_sample=True, on_record=None):
    """Trains, and returns the exit code: 0 when done, 128 + signal after a signal. Changes settings of torch and
    of the process (run.use_device). Only one thread may train: torch's global generator, which draws the dropped
    lookups, is seeded in each step, and has its old state afterwards.

        with_sample     at the end, draw loss.png, compress the validation text and print a sample
        on_record       called with each record of metrics.jsonl, a dict

    Raises UserError if the flags or the data cannot be used, and FloatingPointError as `train` does. After
    Ctrl-C, saves and raises KeyboardInterrupt, so that a loop over runs ends, too."""
    # settings, text, model and optimizer; all refusals come before the run's folder is made
    hp = run.get_config(sys.argv[1:] if argv is None else argv)
    if run.WORLD > 1:
        run.join_processes(hp)
    run.use_device(torch.device(hp.device))
    members = run.get_members(hp)
    corpus = open_corpus(hp.data)
    check_sizes(corpus, max(member.n for member in members), hp.block_size)
    if hp.max_passes and not hp.resume:
        shorten_run(corpus, members, hp)
    run.move_corpus(corpus, hp)
    s = make_state(corpus, members, hp)
    if hp.resume:
        run.resume(s)
    elif hp.init_from:
        run.load_parent(s)
    hp.checkpoint = None                        # frees its memory
    if not hp.resume:
        hp.out_dir = run.choose_out_dir(hp)

    # train
    is_shown = with_sample and not run.RANK
    gpus = [hp.device] if hp.device.startswith("cuda") else []
    try:
        with run.open_log(s, on_record), torch.random.fork_rng(gpus):
            run.announce(s, [hp.max_iters * passes_per_step(source, members, hp) for source in corpus])
            if s.step == 0:
                run.show_rows(s, first_batches(s))
            code = run.end_run(s, train(s))
    except (FloatingPointError, KeyboardInterrupt):             # raised in all processes
        if is_shown:
            run.draw_losses(hp.out_dir)
        run.barrier()                           # torchrun ends all processes as soon as one has failed
        raise

    # show what was learned
    if is_shown:
        run.draw_losses(hp.out_dir)
        if code == 0:
            finish(s)
    return code


if __name__ == "__main__":
    run.run_program(main)
