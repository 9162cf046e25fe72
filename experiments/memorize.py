"""How often must a model read a random string until it recites it? Canaries, after Carlini et al. 2019.

    python -m experiments.memorize --max_iters 1000
    python -m experiments.memorize --max_iters 1000 --ngram_rows 0 --times 0,16,64

Adds lines of 64 random letters, the canaries, to a text and trains clm on it. The copies of a canary are so many that
the run reads it, whole, about as often as --times says. The first 16 letters of a canary are the prompt; for each
number the table shows of the other 48:

  bits      bits per letter that the model needs; a letter drawn at random has log2 26 = 4.70
  letters   share of the letters that the model predicts, given the right ones before them
  recited   number of canaries that the model writes without an error at temperature 0

Text and run stay in --out_dir: the same command resumes an interrupted run. Flags that are not listed below are
train.py's. N canaries, n bytes of a window
"""
import os
from argparse import Namespace

# isort: off  data silences a warning of torch's, and so comes before it
from data import Flag, check_sizes, checksum, error_reason, fail, from_bytes, make_rng, open_corpus, to_bytes
from experiments import evaluate
from experiments.compare import check_folders, make_folder, markdown, parse_ints, train_cell
from experiments.flags import parse_with_train_flags
from objectives import N_BYTES, get_objective
from run import get_config, load_run, preserve_torch_state, run_program
import torch
import torch.nn.functional as F

FLAGS = {
    "times": Flag("0,1,4,16,64", "how often the run reads a canary, separated by commas"),
    "canaries": Flag(16, "different canaries for each number", 1, 1000),
    "data": Flag("stdlib", "text to which the canaries are added"),
    "out_dir": Flag("out/memorize", "folder of texts and runs"),
}
# flags of train.py that are set here, or change what the run reads
RESERVED = {"objective", "data", "out_dir", "resume", "init_from", "train_bytes", "max_passes"}
LENGTH, PROMPT = 64, 16                         # letters of a canary, of which the first are the prompt
MOST_OF_TEXT = 0.1                              # canaries may be so much of the text
FIRST_PART = 0.8                                # canaries stand in this part of it, far from what is held out


def draw_canaries(N, g):  # -> (N, LENGTH) long, lower-case letters
    return torch.randint(ord("a"), ord("z") + 1, (N, LENGTH), generator=g)


def plant(text, canaries, copies, g):  # bytes, (N, LENGTH), copies of each -> bytes with lines added at random places
    cut = int(len(text) * FIRST_PART)
    lines = text[:cut].split(b"\n")
    for canary in canaries.tolist():
        for i in torch.randint(len(lines), (copies,), generator=g).tolist():
            lines[i] = bytes(canary) + b"\n" + lines[i]
    return b"\n".join(lines) + text[cut:]


def reads_per_copy(text_bytes, n, hp):  # -> how often a run reads a whole line of LENGTH letters, on average
    """A window of n bytes holds the line and the newline before it where it starts at one of n - LENGTH places."""
    windows = hp.max_iters * hp.batch_size * hp.accum
    return windows * (n - LENGTH) / text_bytes


def count_copies(times, canaries, text_bytes, n, hp):  # [reads] -> [copies of each canary]
    """Fails where canaries would be too much of the text, or where one copy would be read too often."""
    # canaries make the text longer, so each copy is read less often
    share = (LENGTH + 1) * canaries * sum(times) / (text_bytes * reads_per_copy(text_bytes, n, hp))
    if share > MOST_OF_TEXT:
        fail(f"--times {','.join(map(str, times))}: canaries would be {share:.0%} of the text. "
             "Try a larger --max_iters, or fewer --canaries")
    once = reads_per_copy(text_bytes / (1 - share), n, hp)
    for reads in times:
        if 0 < reads < once:
            fail(f"--times {reads}: the run reads every line {once:.1f} times. Try larger numbers")
    return [round(reads / once) for reads in times]


@torch.no_grad()
def measure(model, objective, hp, canaries):  # (N, LENGTH) -> bits per letter, share predicted, canaries recited
    x = F.pad(canaries, (1, 0), value=ord("\n"))                # each begins a line
    logits = torch.cat([evaluate.left_logits(model, objective, hp, rows, 1 + PROMPT, LENGTH - PROMPT)
                        for rows in x.split(evaluate.ROWS)])
    answer = canaries[:, PROMPT:]
    # the most likely byte given the right ones before it: if all are right, this is what the model writes
    correct = logits[..., :N_BYTES].argmax(-1) == answer        # (N, LENGTH - PROMPT)
    return evaluate.bits_per_byte(logits, answer), float(correct.float().mean()), int(correct.all(1).sum())


def write_text(folder, text):  # -> path, named after the text's checksum
    path = os.path.join(folder, f"text-{checksum(from_bytes(text)):08x}.bin")
    try:
        with open(path, "wb") as f:
            f.write(text)
    except OSError as e:
        fail(f"--out_dir {folder}: cannot be written to ({error_reason(e)}). Try another folder")
    return path


@preserve_torch_state()
def main(argv=None):  # -> exit code
    flags, rest = parse_with_train_flags("python -m experiments.memorize", __doc__, FLAGS, RESERVED, argv)
    times = list(dict.fromkeys(map(int, parse_ints("times", flags.times, 0, 10000, "1,4,16"))))
    hp = get_config(rest)
    objective = get_objective(hp)
    n = objective.n_bytes(hp.block_size, hp)
    if n < 2 * LENGTH:
        fail(f"--block_size {hp.block_size}: is too short for canaries. Try --block_size {2 * LENGTH}")
    if not hp.max_iters:
        fail("--max_iters 0: reads nothing. Try --max_iters 1000")
    check_folders(Namespace(**vars(flags), new_data=""))
    [source] = open_corpus([flags.data])
    check_sizes([source], n, hp.block_size)
    make_folder(flags.out_dir)

    copies = count_copies(times, flags.canaries, len(source["train"]), n, hp)
    canaries = [draw_canaries(flags.canaries, make_rng(f"{hp.seed},{reads},canaries")) for reads in times]
    text = to_bytes(source["train"])
    for some, number in zip(canaries, copies):
        text = plant(text, some, number, make_rng(f"{hp.seed},{number},places"))
    path = write_text(flags.out_dir, text + to_bytes(source["val"]))

    steps = str(hp.max_iters)
    words = [*rest, "--data", path, "--max_iters", steps, "--eval_interval", steps]
    folder = train_cell(words, [source["crc"]], flags.out_dir)
    if not folder:
        return 1
    model, hp, _ = load_run(os.path.join(folder, "ckpt.pt"), "cpu", "float32")
    rows = [["times read", "copies", "bits", "letters", f"recited, of {flags.canaries}"]]
    for some, number in zip(canaries, copies):
        bits, share, recited = measure(model, objective, hp, some)
        read = number * reads_per_copy(len(text), n, hp)
        rows.append([f"{read:.1f}", f"{number}", f"{bits:.2f}", f"{share:.2f}", f"{recited}"])
    print(markdown(rows), end="")
    return 0


if __name__ == "__main__":
    run_program(main)
