"""How good is the text that trained models write? The same four numbers for all objectives that write.

    python -m experiments.writing --runs out/clm out/hybrid out/mdlm --judge out/clm-8000
    python -m experiments.writing --runs out/mdlm --temperature 0.8 --steps 32

Each run continues the first 32 bytes of the same held-out windows: an objective that continues texts from left to
right, one that fills [MASK] in each of its orders. One that is not trained on rows of MASKs alone (mlm, hybrid, nsp)
fills 16 MASKs at a time. The table shows for each, and for the held-out text itself:

  tokenizes   share of the bytes that stand in whole lines which are tokens of Python, however wrong the program
  distinct    share of the lines that differ from all others before them
  copied      share of the pieces of 48 bytes that occur in the training text
  judge       bits per byte that a model which continues texts needs for what was written

A text that repeats itself tokenizes and is cheap to a judge: no number means much without the others. All is computed
on the CPU, in float32.

N windows, n bytes of a window
"""
import argparse
import sys

# isort: off  data silences a warning of torch's, and so comes before it
from data import MASK, Flag, fail, open_corpus, to_bytes
from experiments import evaluate
import sample
from experiments.compare import markdown
from experiments.evaluate import PROMPT
from objectives import Fill, continue_layout, fill_layout, find_use, get_objective
from run import check, load_run, make_parser, preserve_torch_state, run_program
import torch
import torch.nn.functional as F
from tqdm import tqdm

FLAGS = {
    "runs": Flag([], "folders of trained runs, all of the same text"),
    "judge": Flag("", "run that judges; without it the first of the runs that continues texts"),
    "windows": Flag(64, "held-out windows to continue", 2, 1 << 20),
    "temperature": Flag(-1.0, "of all runs; without it 0.8, and 0.65 for mdlm and sedd, as in sample.py", -1.0, 1e6),
    "steps": Flag(64, "passes in which mdlm and sedd fill a row", 1, 1 << 20),
    "seed": Flag(1, "of the samples", 0, 2 ** 31),
}
LEFT_TO_RIGHT = "left to right"
PIECE = 16                                      # MASKs filled at a time by who was not trained on rows of MASKs
COPIED_LENGTH = 48                              # bytes of a piece that is looked up in the training text
RESERVED_IDS = 4                                # positions of a row that are left to what stands around a text


def list_ways(objective, hp):  # -> [LEFT_TO_RIGHT and orders of sample.unmask]
    ways = [LEFT_TO_RIGHT] if continue_layout(objective, hp) else []
    if fill_layout(objective, hp):
        ways += find_use(objective, Fill).orders
    return ways


def write(model, objective, hp, way, x, flags):  # windows (N, n) -> (N, n): the same prompts, continued
    n_new = x.size(1) - PROMPT
    ids = x[:, :PROMPT]
    fill = find_use(objective, Fill)
    at_any_rate = fill is not None and fill.trained_at_any_rate
    temperature = flags.temperature
    if temperature < 0:
        temperature = sample.DIFFUSION_TEMPERATURE if at_any_rate else sample.FLAGS["how"]["temperature"].default
    gens = sample.sample_generators(flags.seed, len(x))
    how = dict(gens=gens, doc_mask=hp.doc_mask, temperature=temperature)
    if way == LEFT_TO_RIGHT:
        both_ways, before, after = continue_layout(objective, hp)
        row = torch.tensor([before + prompt + after for prompt in ids.tolist()])
        prefix = row.size(1) if both_ways else 0
        written = list(sample.generate(model, row, n_new, hp.block_size, prefix=prefix, **how))
        written = torch.stack(written, dim=1)
        return torch.cat((ids, F.pad(written, (0, n_new - written.size(1)))), dim=1)            # EOT where all ended
    if at_any_rate:
        row = F.pad(ids, (0, n_new), value=MASK)
        return sample.fill(model, row, layout=fill.layout(hp), order=way, steps=flags.steps, **how)
    while ids.size(1) < x.size(1):
        row = F.pad(ids, (0, min(PIECE, x.size(1) - ids.size(1))), value=MASK)
        ids = sample.fill(model, row, layout=fill.layout(hp), order=way, **how)
    return ids


def copied_share(written, train_text):  # (N, n), bytes -> share of the pieces that occur in the text
    pieces = [bytes(piece.tolist()) for row in written for piece in row.split(COPIED_LENGTH)]
    pieces = [piece for piece in pieces if len(piece) == COPIED_LENGTH and 0 not in piece]
    return sum(piece in train_text for piece in pieces) / max(1, len(pieces))


@torch.no_grad()
def measure(x, judge, train_text):  # prompts and their continuations (N, n) -> [number of each column]
    model, objective, hp = judge
    written = x[:, PROMPT:]
    tokenizes, distinct = evaluate.line_figures(written)
    logits = evaluate.left_logits(model, objective, hp, x, PROMPT, written.size(1))
    return [tokenizes, distinct, copied_share(written, train_text), evaluate.bits_per_byte(logits, written)]


def parse(argv):  # -> Namespace
    given = make_parser("python -m experiments.writing", __doc__, {"flags": FLAGS}).parse_args(argv)
    values = {name: flag.default for name, flag in FLAGS.items()} | vars(given)
    if not values["runs"]:
        fail("--runs: is missing. Try --runs out/clm")
    check(values, FLAGS)
    return argparse.Namespace(**values)


def load(path):  # -> model, objective, settings
    model, hp, _ = load_run(path, "cpu", "float32")
    return model, get_objective(hp), hp


@preserve_torch_state()
def main(argv=None):  # -> exit code
    flags = parse(sys.argv[1:] if argv is None else argv)
    runs = {path: load(path) for path in flags.runs}
    judge = load(flags.judge) if flags.judge else None
    for model, objective, hp in runs.values():
        if judge is None and continue_layout(objective, hp):
            judge = model, objective, hp
    if judge is None or not continue_layout(*judge[1:]):
        fail(f"--judge {flags.judge or '(none)'}: must be a run that continues texts. Try one of clm")
    n = min(hp.block_size for _, _, hp in [judge, *runs.values()]) - RESERVED_IDS
    if n < 2 * PROMPT:
        fail(f"--runs: rows of {n + RESERVED_IDS} positions are too short. Try runs with --block_size 128")
    [source, *_] = open_corpus(judge[2].data)
    train_text = to_bytes(source["train"])
    x = evaluate.windows(source["val"], n, flags.windows, "writing")
    rows = [["", "in order", "tokenizes", "distinct", "copied", "judge"]]
    rows.append(["held-out text", ""] + [f"{v:.2f}" for v in measure(x, judge, train_text)])
    for path, (model, objective, hp) in runs.items():
        ways = list_ways(objective, hp)
        if not ways:
            print(f"{path}: {objective.name} writes no text from a prompt", file=sys.stderr)
        for way in tqdm(ways, desc=path, disable=None, leave=False, dynamic_ncols=True):
            written = write(model, objective, hp, way, x, flags)
            rows.append([path, way] + [f"{v:.2f}" for v in measure(written, judge, train_text)])
    print(markdown(rows))
    return 0


if __name__ == "__main__":
    run_program(main)
