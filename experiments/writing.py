"""How good is the text that trained models write? The same numbers for all objectives that write.

    python -m experiments.writing --judge out/clm-8000 --runs out/clm out/hybrid out/mdlm

Each run continues the first 32 bytes of the same held-out windows: an objective that continues texts from left to
right, one that fills [MASK] in each of its orders. mdlm and sedd fill the rest of a window in --steps passes, sampled
as sample.py does by default. Objectives that are not trained on fully masked rows (mlm, hybrid, nsp) fill 16 MASKs at a
time, a byte a pass. The table shows for each, and for the held-out text itself:

  tokenizes   share of the bytes that stand in whole lines which are tokens of Python, however wrong the program
  distinct    share of the lines that differ from all others before them
  lines       number of whole lines
  copied      share of the pieces of 48 bytes, those of white space alone left out, that occur in the training text
  space       share of the bytes that are white space
  judge       generative perplexity: bits per byte that another model needs for what was written

A text that repeats itself, or is blank, tokenizes and is cheap to a judge: no number means much without the others.
The judge favors texts that it would write itself. All is computed on the CPU, in float32.

N windows, n bytes of a window
"""
import sys

# isort: off  data silences a warning of torch's, and so comes before it
from data import EOT, MASK, Flag, fail, open_corpus, to_bytes
from experiments import evaluate
import sample
from experiments.compare import markdown
from experiments.evaluate import PROMPT
from experiments.flags import parse_own_flags
from objectives import Continue, Fill, find_use, get_objective, members_of, trained_use
from run import load_run, preserve_torch_state, run_program
import torch
import torch.nn.functional as F
from tqdm import tqdm

FLAGS = {
    "judge": Flag("", "run that judges; it must continue texts, best a clm of many steps"),
    "runs": Flag([], "folders of trained runs, of the judge's text"),
    "windows": Flag(64, "held-out windows to continue", 2, 1 << 20),
    "temperature": Flag(0.8, "of all runs but those of mdlm and sedd", 0.0, 1e6),
    "steps": Flag(64, "passes in which mdlm and sedd fill a row, in every order", 1, 1 << 20),
    "seed": Flag(1, "of the samples", 0, 2 ** 31),
}
LEFT_TO_RIGHT = "left to right"
PIECE = 16                                      # MASKs filled at a time, where fully masked rows were not trained
COPIED_LENGTH = 48                              # bytes of a piece that is looked up in the training text
WHITE_SPACE = b" \t\n\r\f\v"
RESERVED_IDS = 4                                # positions of a row that are left to what stands around a text


def list_orders(objective, hp):  # -> [LEFT_TO_RIGHT and orders of sample.unmask]
    orders = [LEFT_TO_RIGHT] if trained_use(objective, Continue, hp) else []
    fill_use = trained_use(objective, Fill, hp)
    if fill_use:
        orders += fill_use.orders
    return orders


def write(model, objective, hp, order, x, flags):  # windows (N, n) -> (N, n): the same prompts, continued
    n_new = x.size(1) - PROMPT
    ids = x[:, :PROMPT]
    gens = sample.sample_generators(flags.seed, len(x))
    how = dict(gens=gens, doc_mask=hp.doc_mask)
    if order == LEFT_TO_RIGHT:
        use = find_use(objective, Continue)
        row = torch.tensor([[*use.before, *prompt, *use.after] for prompt in ids.tolist()])
        prefix = row.size(1) if use.both_ways else 0
        written = list(sample.generate(model, row, n_new, hp.block_size, prefix=prefix, temperature=flags.temperature,
                                       **how))
        written = torch.stack(written, dim=1)
        return torch.cat((ids, F.pad(written, (0, n_new - written.size(1)), value=EOT)), dim=1)             # all ended
    use = find_use(objective, Fill)
    if use.trained_at_any_rate:
        row = F.pad(ids, (0, n_new), value=MASK)
        how |= sample.DIFFUSION_SAMPLING
        return sample.fill(model, row, use=use, order=order, steps=flags.steps, **how)
    while ids.size(1) < x.size(1):
        row = F.pad(ids, (0, min(PIECE, x.size(1) - ids.size(1))), value=MASK)
        ids = sample.fill(model, row, use=use, order=order, temperature=flags.temperature, **how)
    return ids


def copied_share(written, train_text):  # (N, n), bytes -> share of the pieces that occur in the text
    pieces = [bytes(piece.tolist()) for row in written for piece in row.split(COPIED_LENGTH)]
    pieces = [piece for piece in pieces if len(piece) == COPIED_LENGTH and EOT not in piece and piece.strip()]
    return sum(piece in train_text for piece in pieces) / max(1, len(pieces))


@torch.no_grad()
def measure(x, judge, train_text):  # prompts and their continuations (N, n) -> the cells of a row of the table
    model, objective, hp = judge
    written = x[:, PROMPT:]
    tokenizes, distinct, n_lines = evaluate.line_figures(written)
    copied = copied_share(written, train_text)
    space = torch.isin(written, torch.tensor(list(WHITE_SPACE))).float().mean()
    logits = evaluate.left_logits(model, objective, hp, x, PROMPT, written.size(1))
    bits = evaluate.bits_per_byte(logits, written)
    return [f"{tokenizes:.2f}", f"{distinct:.2f}", f"{n_lines}", f"{copied:.2f}", f"{space:.2f}", f"{bits:.2f}"]


def load(path):  # -> [(model, objective, settings)] of each member of the run's objective, its sources
    model, hp, ckpt = load_run(path, "cpu", "float32")
    sources = [(name, size, crc, hp.train_bytes) for name, size, crc, _ in ckpt["sources"]]
    return [(model, objective, hp) for _, objective in members_of(get_objective(hp))], sources


def parse(argv):  # -> Namespace
    flags = parse_own_flags("python -m experiments.writing", __doc__, FLAGS, argv)
    for name in ("judge", "runs"):
        if not getattr(flags, name):
            fail(f"--{name}: is missing. Try --{name} out/clm")
    return flags


@preserve_torch_state()
def main(argv=None):  # -> exit code
    flags = parse(sys.argv[1:] if argv is None else argv)
    members, sources = load(flags.judge)
    judge = next((member for member in members if trained_use(member[1], Continue, member[2])), None)
    if not judge or "-" in judge[2].data:
        fail(f"--judge {flags.judge}: must continue texts, and be trained on files. Try a run of clm")
    n = judge[2].block_size
    writers = []
    for path in flags.runs:
        members, other_sources = load(path)
        if other_sources != sources:
            fail(f"--runs {path}: was trained on other text than the judge. Try runs of the same text")
        writers += [(path, *member) for member in members]
        n = min(n, members[0][2].block_size)
    n -= RESERVED_IDS
    if n < 2 * PROMPT:
        fail(f"rows of {n + RESERVED_IDS} positions are too short. Try runs and a judge with --block_size 128")
    corpus = open_corpus(judge[2].data)
    if [(source["name"], source["size"], source["crc"]) for source in corpus] != [source[:3] for source in sources]:
        fail(f"--judge {flags.judge}: its text has changed, so what is held out now may have been trained on. "
             "Try the original text")
    [source, *_] = corpus
    train_text = to_bytes(source["train"][:judge[2].train_bytes or None])
    x = evaluate.windows(source["val"], n, flags.windows, "writing")
    x = x[(x[:, :PROMPT] != EOT).all(1)]        # sample.generate wants documents to end at the same place in all rows
    if not len(x):
        fail("every window of the held-out text has the end of a document in its first bytes. Try other text")
    head = ["", "order", "tokenizes", "distinct", "lines", "copied", "space", "judge"]
    print(markdown([head, ["held-out text", "", *measure(x, judge, train_text)]]), end="", flush=True)
    for path, model, objective, hp in writers:
        orders = list_orders(objective, hp)
        if not orders:
            print(f"{path}: {objective.name} writes no text from a prompt", file=sys.stderr)
        for order in tqdm(orders, desc=path, disable=None, leave=False, dynamic_ncols=True):
            written = write(model, objective, hp, order, x, flags)
            cells = [f"{objective.name} ({path})", order, *measure(written, judge, train_text)]
            tqdm.write(f"| {' | '.join(cells)} |")              # at once: a run takes minutes
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    run_program(main)
