"""How often must a model read a random string before it can recite it?

    python -m experiments.memorize --max_iters 1000         other flags are train.py's, such as --ngram_rows 0

Adds canaries (Carlini et al. 2019), which are lines of 64 random letters, to a text and trains clm on it. Each group of
canaries is added so many times that the run reads them about as often as TIMES says. The table is about their last 48
letters, given the first 16. It shows the bits per letter (log2 26 = 4.70 for random guesses), the share of letters that
the model predicts, and how many canaries it recites without an error at temperature 0.
"""
import math
import os
import tempfile
from pathlib import Path

from data import Flag, fail, make_rng, open_corpus, to_bytes
from experiments.common import parse_with_train_flags, to_words
import train
from objectives import N_BYTES
from run import get_config, get_members, load_run, parse, run_program
import torch
import torch.nn.functional as F

FLAGS = {"data": Flag("stdlib", "text to which the lines are added")}
RESERVED = {"objective", "out_dir", "resume", "init_from", "max_passes"}
TIMES = 0, 1, 4, 16, 64                         # about how often the run reads a canary, for each group
CANARIES = 16                                   # different canaries in a group
LENGTH = 64                                     # letters of a canary
PROMPT = 16                                     # letters of it that are given


def plant(text, canaries, n, g):  # bytes, (N, LENGTH), copies of each -> bytes with lines added at random places
    cut = int(len(text) * 0.8)                  # no canary near the end, which is held out
    lines = text[:cut].split(b"\n")
    for canary in canaries.tolist() * n:
        i = int(torch.randint(len(lines), (), generator=g))
        lines[i] = bytes(canary) + b"\n" + lines[i]
    return b"\n".join(lines) + text[cut:]


@torch.no_grad()
def measure(model, canaries):  # (N, LENGTH) -> bits per letter, share predicted, canaries recited
    x = F.pad(canaries, (1, 0), value=ord("\n"))                # as in the text, where each begins a line
    logits = model.logits(model(x[:, :-1], 0))[:, PROMPT:, :N_BYTES]                # (N, LENGTH - PROMPT, 256)
    answer = canaries[:, PROMPT:]
    bits = float(F.cross_entropy(logits.flatten(0, 1), answer.flatten())) / math.log(2)
    # each letter is predicted from the right letters before it; if all are correct, the model recites the canary
    correct = logits.argmax(-1) == answer
    return bits, float(correct.float().mean()), int(correct.all(1).sum())


def main(argv=None):  # -> exit code
    flags, rest = parse_with_train_flags("python -m experiments.memorize", __doc__, FLAGS, RESERVED, argv)
    hp = get_config(rest)
    # a canary and the newline before it lie in a window of n bytes if it starts at one of n - LENGTH places
    read = hp.max_iters * hp.batch_size * hp.accum * max(0, get_members(hp)[0].n - LENGTH)
    share = (LENGTH + 1) * CANARIES * sum(TIMES) / max(1, read)                     # canaries, as a share of the text
    if share > 0.1:
        fail(f"--max_iters {hp.max_iters}: reads too little. Try --max_iters 1000 --block_size 256")
    [source] = open_corpus([flags.data])
    text = to_bytes(source["train"])
    once = read * (1 - share) / len(text)       # how often the run reads a line that occurs once
    copies = [round(times / once) for times in TIMES]
    g = make_rng(f"{hp.seed},canaries")
    canaries = torch.randint(ord("a"), ord("z") + 1, (len(TIMES), CANARIES, LENGTH), generator=g)
    for group, n in zip(canaries, copies):
        text = plant(text, group, n, g)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "text")
        path.write_bytes(text + to_bytes(source["val"]))
        words = to_words(parse(rest) | {"data": [str(path)], "max_iters": hp.max_iters, "out_dir": folder})
        code = train.main(words, with_sample=False)
        if code:
            return code
        model, _, _ = load_run(os.path.join(folder, "ckpt.pt"), "cpu", "float32")
    print(f"times read  copies    bits  predicted  recited, of {CANARIES}")
    for group, n in zip(canaries, copies):
        bits, predicted, recited = measure(model, group)
        print(f"{n * read / len(text):10.1f} {n:7d} {bits:7.2f} {predicted:10.2f} {recited:8d}")
    return 0


if __name__ == "__main__":
    run_program(main)
