"""How often must a model read a random string until it recites it? Canaries, after Carlini et al. 2019.

    python -m experiments.memorize --max_iters 1000         other flags are train.py's, such as --ngram_rows 0

Trains clm on a text to which lines of 64 random letters are added, so often that the run reads each about as often as
TIMES says. The table shows of their last 48 letters, given the first 16, the bits per letter (drawn at random: log2 26
= 4.70), the share that the model predicts, and how many lines it recites: without an error, at temperature 0.
"""
import math
import os
import tempfile
from pathlib import Path

from data import Flag, fail, make_rng, open_corpus, to_bytes
from experiments.flags import parse_with_train_flags
import train
from objectives import N_BYTES, get_members
from run import get_config, load_run, run_program
import torch
import torch.nn.functional as F

FLAGS = {"data": Flag("stdlib", "text to which the lines are added")}
RESERVED = {"objective", "out_dir", "resume", "init_from", "max_passes"}
TIMES = 0, 1, 4, 16, 64                         # about how often the run reads a canary
CANARIES = 16                                   # different ones for each of these numbers
LENGTH, PROMPT = 64, 16                         # letters of a canary, of which the first are the prompt


def plant(text, canaries, n, g):  # bytes, (N, LENGTH), copies of each -> bytes with lines added at random places
    cut = int(len(text) * 0.8)                  # far from what is held out
    lines = text[:cut].split(b"\n")
    for canary in canaries.tolist() * n:
        i = int(torch.randint(len(lines), (), generator=g))
        lines[i] = bytes(canary) + b"\n" + lines[i]
    return b"\n".join(lines) + text[cut:]


@torch.no_grad()
def measure(model, canaries):  # (N, LENGTH) -> bits per letter, share predicted, canaries recited
    x = F.pad(canaries, (1, 0), value=ord("\n"))                # each begins a line
    logits = model.logits(model(x[:, :-1], 0))[:, PROMPT:]      # (N, LENGTH - PROMPT, V)
    answer = canaries[:, PROMPT:]
    bits = float(F.cross_entropy(logits.flatten(0, 1), answer.flatten())) / math.log(2)
    # the most likely byte given the right ones before it: if all are right, this is what the model writes
    correct = logits[..., :N_BYTES].argmax(-1) == answer
    return bits, float(correct.float().mean()), int(correct.all(1).sum())


def main(argv=None):  # -> exit code
    flags, rest = parse_with_train_flags("python -m experiments.memorize", __doc__, FLAGS, RESERVED, argv)
    hp = get_config(rest)
    # a window holds a line and the newline before it where it starts at one of n - LENGTH places
    read = hp.max_iters * hp.batch_size * hp.accum * max(0, get_members(hp)[0].n - LENGTH)
    share = (LENGTH + 1) * CANARIES * sum(TIMES) / max(1, read)                     # of the text that is canaries
    if share > 0.1:
        fail(f"--max_iters {hp.max_iters}: reads too little. Try --max_iters 1000 --block_size 256")
    [source] = open_corpus([flags.data])
    text = to_bytes(source["train"])
    once = read * (1 - share) / len(text)       # how often the run reads one copy
    copies = [round(times / once) for times in TIMES]
    g = make_rng(f"{hp.seed},canaries")
    canaries = torch.randint(ord("a"), ord("z") + 1, (len(TIMES), CANARIES, LENGTH), generator=g)
    for some, n in zip(canaries, copies):
        text = plant(text, some, n, g)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "text")
        path.write_bytes(text + to_bytes(source["val"]))
        words = [*rest, "--data", str(path), "--max_iters", str(hp.max_iters), "--out_dir", folder]
        if code := train.main(words, with_sample=False):
            print("the folder is temporary: nothing was kept")
            return code
        model, _, _ = load_run(os.path.join(folder, "ckpt.pt"), "cpu", "float32")
    print(f"times read  copies    bits  letters  recited, of {CANARIES}")
    for some, n in zip(canaries, copies):
        bits, predicted, recited = measure(model, some)
        print(f"{n * read / len(text):10.1f} {n:7d} {bits:7.2f} {predicted:8.2f} {recited:8d}")
    return 0


if __name__ == "__main__":
    run_program(main)
