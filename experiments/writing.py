"""How good is the text that trained models write?

    python -m experiments.writing --judge out/clm-8000 --runs out/clm out/hybrid out/mdlm

Each run continues the first 32 bytes of the same held-out windows: left to right, or by filling MASKs in each of its
orders. mlm, hybrid and nsp fill 16 MASKs at a time, since they are not trained on fully masked rows. The table has a
line for the held-out text itself and for each run and order:

  tokenizes, lines    share of the bytes in whole lines that Python's tokenizer accepts; number of whole lines
  distinct            share of the lines that differ from all lines before them
  copied              share of the pieces of 48 bytes that occur in the training text; blank pieces are not counted
  space               share of the bytes that are white space
  judge               bits per byte of the written text under another model, as in generative perplexity

Read all columns together: a blank or repetitive text tokenizes, and a judge finds it likely. The judge also favors text
like its own. Everything is computed on the CPU in float32.
"""
from data import EOT, Flag, fail, make_rng, open_corpus, to_bytes
from experiments import evaluate
from experiments.compare import markdown
from experiments.flags import parse_own_flags
from objectives import find_use
from run import get_members, load_run, run_program
import torch

FLAGS = {
    "judge": Flag("", "run that judges; best a clm trained for many steps"),
    "runs": Flag([], "folders of runs, trained on the same text as the judge"),
    "windows": Flag(64, "held-out windows to continue", 2),
    "temperature": Flag(0.8, "sampling temperature; mdlm, sedd and bd3lm keep that of sample.py", 0.0, 1e6),
    "steps": Flag(64, "passes in which mdlm and sedd fill a row", 1),
}
COPIED_LENGTH = 48                              # bytes of a piece that is looked up in the training text


def list_orders(objective):  # -> orders of evaluate.write
    orders = [evaluate.LEFT_TO_RIGHT] if find_use(objective, "continue") else []
    fill = find_use(objective, "fill") or find_use(objective, "continue_blocks")
    return [*orders, *fill.orders] if fill else orders


def copied_share(written, train_text):  # (N, n), bytes -> share of the pieces of each row that occur in the text
    pieces = [bytes(piece.tolist()) for row in written for piece in row.split(COPIED_LENGTH)]
    pieces = [piece for piece in pieces if len(piece) == COPIED_LENGTH and EOT not in piece and piece.strip()]
    return sum(piece in train_text for piece in pieces) / max(1, len(pieces))


@torch.no_grad()
def measure(x, judge, train_text):  # prompts and their continuations (N, n) -> the cells of a row of the table
    written = x[:, evaluate.PROMPT:]
    tokenizes, distinct, n_lines = evaluate.line_figures(written)
    copied = copied_share(written, train_text)
    space = torch.isin(written, torch.tensor([*b" \t\n\r\f\v"])).float().mean()
    logits = evaluate.middle_logits(evaluate.left_logits, *judge, x, evaluate.PROMPT, written.size(1))
    bits = evaluate.bits_per_byte(logits, written)
    return [f"{tokenizes:.2f}", f"{distinct:.2f}", f"{n_lines}", f"{copied:.2f}", f"{space:.2f}", f"{bits:.2f}"]


def main(argv=None):  # -> exit code
    flags = parse_own_flags("python -m experiments.writing", __doc__, FLAGS, argv)
    if not flags.judge or not flags.runs:
        fail("--judge, --runs: one of them is missing. Try --judge out/clm --runs out/clm")
    runs = []                                   # [(model, objective, settings)], the judge's first
    corpus = None                               # the judge's
    for path in [flags.judge, *flags.runs]:
        model, hp, ckpt = load_run(path, "cpu", "float32")
        runs.append((model, get_members(hp)[0].objective, hp))
        corpus = corpus or open_corpus(hp.data)
        if not list_orders(runs[-1][1]):
            fail(f"{path}: {runs[-1][1].name} cannot continue a prompt. Try without this run")
        if [crc for _, _, crc, _ in ckpt["sources"]] != [source["crc"] for source in corpus]:
            fail(f"{path}: was not trained on the judge's text, or the text has changed. Try runs on the same text")
    judge, *writers = runs
    if not find_use(judge[1], "continue"):
        fail(f"--judge {flags.judge}: a judge must continue texts. Try a run of clm")
    n = min(hp.block_size for _, _, hp in runs) - 4             # leaves space for special ids around a text
    if n <= evaluate.PROMPT:
        fail(f"--runs: rows of {n + 4} positions are too short. Try runs of --block_size 64 or more")
    train_text = to_bytes(corpus[0]["train"])
    x = evaluate.windows(corpus[0]["val"], n, flags.windows, "writing")
    head = ["", "order", "tokenizes", "distinct", "lines", "copied", "space", "judge"]
    print(markdown([head, ["held-out text", "", *measure(x, judge, train_text)]]), end="", flush=True)
    for path, (model, objective, hp) in zip(flags.runs, writers):
        for order in list_orders(objective):
            g = make_rng("writing")
            written = evaluate.write(model, objective, hp, order, x, g, flags.temperature, flags.steps)
            cells = [f"{objective.name} ({path})", order, *measure(written, judge, train_text)]
            print(f"| {' | '.join(cells)} |", flush=True)       # at once: a run takes minutes
    return 0


if __name__ == "__main__":
    run_program(main)
