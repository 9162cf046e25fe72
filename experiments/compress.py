"""Compress a file with a trained model's left-to-right probabilities: prediction is compression.

    python -m experiments.compress --out_dir out/clm --file book.txt            writes book.txt.nptx
    python -m experiments.compress --out_dir out/clm --file book.txt.nptx       writes book.txt again

Shows that bits per byte are real: writes a file of about that size and restores the text from it. To decompress, you
need the same weights, and a model that computes the same bits: the same machine, device and version of torch. The file
holds the number of threads, on which these bits depend too, and checksums of the text and of the weights. The text is
cut into S streams, which are coded at the same time. T = block_size positions of the model.
"""
import os
import struct
import zlib

from data import EOT, Flag, fail, from_bytes, to_bytes
from experiments.common import load_latest, parse_own_flags
from model import Cache
from objectives import N_BYTES
from run import DEVICE_FLAGS, compressor_bits, get_members, newest_run, run_program
import torch
import torch.nn.functional as F

FLAGS = {
    "file": Flag("", "file to compress; one that ends in .nptx is decompressed"),
    "out_dir": Flag("", "run folder (its ckpt.pt) or checkpoint file; without it the latest run under out/"),
    "device": DEVICE_FLAGS["device"],
}
PRECISION = 16                                  # the frequencies of all 256 bytes add up to 2^PRECISION
STREAMS = 64                                    # maximum number of streams
STREAM_BYTES = 4096                             # minimum length of a stream: each starts without context
MAGIC = b"nPT2"                                 # the last character is the version of the format
HEADER = "<4sIIQIB"                             # MAGIC, checksum of the text, of the weights, bytes, streams, threads
MAX_THREADS = 255                               # that the header can hold
NOT_RESTORED = ("its text cannot be restored: the file is damaged, or the model rounds differently here, as on another "
                "machine, on another device or in another version of torch")


@torch.inference_mode()
def byte_frequencies(model, S, T):  # a coroutine: is sent the last bytes (S,), yields frequencies of the next (S, 256)
    """Reads one byte of each stream at a time, also when compressing, so that both directions compute the same bits."""
    ids = torch.full((S, 1), EOT, device=model.embed.weight.device)
    cache = Cache(model, S, T)
    while True:
        h = model(ids[:, cache.first_unread(ids.size(1)):], 0, cache=cache)
        p = model.logits(h[:, -1])[:, :N_BYTES].cpu().double().softmax(-1)              # mps has no float64
        freq = (p * (2 ** PRECISION - N_BYTES)).long() + 1      # at least 1: every byte can be coded
        rest = 2 ** PRECISION - freq.sum(1, keepdim=True)
        byte = yield freq.scatter_add(1, p.argmax(1, keepdim=True), rest)
        ids = torch.cat((ids, byte[:, None].to(ids.device)), dim=1)


def weights_checksum(model):  # -> int
    weights = model.state_dict().values()
    return zlib.crc32(b"".join(to_bytes(w.cpu().flatten().view(torch.uint8)) for w in weights))


def compress(model, text, T):  # bytes -> bytes
    """rANS (Duda 2013): the code of a stream is one large integer, its state. A byte of frequency f, and with `before`
    the sum of the frequencies of smaller bytes, turns the state x into (x // f) 2^16 + x % f + before: about 2^16 / f
    times as large, which is log2(2^16 / f) bits. Decoding undoes the last step first, so bytes are coded from the last
    to the first. Whenever the state gets too large, its lowest 16 bits are moved to `words`.

        frequency 16384 (probability 1/4) and before 8192: x = 100000 becomes 6 * 65536 + 1696 + 8192 = 403104, which
        is 2 bits longer. 403104 % 65536 = 9888 lies from 8192 to 8192 + 16384, which tells the decoder the byte
    """
    S = min(STREAMS, max(1, len(text) // STREAM_BYTES))
    threads = min(MAX_THREADS, torch.get_num_threads())
    torch.set_num_threads(threads)              # as decompress does; this fixes MKL's number, too
    frequencies = byte_frequencies(model, S, T)
    freq = next(frequencies)
    symbols = []                                # of each step: f (S,), before (S,)
    padded = F.pad(from_bytes(text).long(), (0, -len(text) % S))
    for byte in padded.view(S, -1).unbind(1):
        chosen = freq.gather(1, byte[:, None])
        before = freq.cumsum(1).gather(1, byte[:, None]) - chosen
        symbols.append((chosen[:, 0], before[:, 0]))
        freq = frequencies.send(byte)
    state = torch.full((S,), 1 << 31)           # stays from 2^31 to 2^47
    words = []                                  # in reverse order
    for freq, before in reversed(symbols):
        is_full = state >= freq << 31
        words += (state[is_full] & 0xFFFF).flip(0).tolist()
        state = state.where(~is_full, state >> 16)
        state = (state // freq << PRECISION) + state % freq + before
    header = struct.pack(HEADER, MAGIC, zlib.crc32(text), weights_checksum(model), len(text), S, threads)
    return header + struct.pack(f"<{S}q{len(words)}H", *state.tolist(), *reversed(words))


def decompress(model, blob, T):  # bytes -> bytes
    """Raises ValueError or struct.error if blob is damaged, or was made with another model. Sets the number of
    threads to that of `compress`, because the number of parts of a sum decides how it is rounded."""
    magic, checksum, weights, n, S, threads = struct.unpack_from(HEADER, blob)
    body = blob[struct.calcsize(HEADER):]
    if magic != MAGIC or not 0 < S <= STREAMS or not threads:
        raise ValueError("was not compressed by this version of the program")
    numbers = struct.unpack(f"<{S}q{(len(body) - 8 * S) // 2}H", body)
    if weights != weights_checksum(model):
        raise ValueError("was compressed with another model")
    torch.set_num_threads(threads)
    state, words = torch.tensor(numbers).split((S, len(numbers) - S))
    frequencies = byte_frequencies(model, S, T)
    freq = next(frequencies)
    columns = [torch.zeros(S, 0, dtype=torch.long)]
    for _ in range((n + S - 1) // S):
        slot = state & (2 ** PRECISION - 1)
        ends = freq.cumsum(1)
        byte = torch.searchsorted(ends, slot[:, None], right=True)
        chosen = freq.gather(1, byte)[:, 0]
        before = ends.gather(1, byte)[:, 0] - chosen
        state = chosen * (state >> PRECISION) + slot - before
        is_low = state < 1 << 31
        n_low = int(is_low.sum())
        if len(words) < n_low:
            raise ValueError(NOT_RESTORED)
        state[is_low] = state[is_low] << 16 | words[:n_low]
        words = words[n_low:]
        columns.append(byte)
        freq = frequencies.send(byte[:, 0])
    text = to_bytes(torch.cat(columns, dim=1).flatten()[:n].byte())
    if zlib.crc32(text) != checksum:
        raise ValueError(NOT_RESTORED)
    return text


def main(argv=None):  # -> exit code
    flags = parse_own_flags("python -m experiments.compress", __doc__, FLAGS, argv)
    path = flags.file
    is_compressed = path.endswith(".nptx")
    out = path.removesuffix(".nptx") if is_compressed else f"{path}.nptx"
    if os.path.exists(out):
        fail(f"--file {path}: would overwrite {out}, which exists. Try to rename that file")
    model, hp, _ = load_latest(flags.out_dir or newest_run(), flags.device, "float32")
    objectives = [m.objective for m in get_members(hp)]
    exact = [o for o in objectives if o.bpb in ("loss", "causal") and "continue" in o.uses]
    if not exact:
        fail(f"--out_dir: {hp.objective} has no left-to-right probability. Try a run trained as clm")
    try:
        with open(path, "rb") as f:
            given = f.read()
        convert = decompress if is_compressed else compress
        result = convert(model, given, hp.block_size)
        with open(out, "xb") as f:
            f.write(result)
    except (OSError, ValueError, struct.error) as e:
        advice = "the run and machine that compressed it" if is_compressed else "another file"
        fail(f"--file {path}: {e}. Try {advice}")
    print(f"{path}: {len(given):,} bytes -> {out}: {len(result):,} bytes")
    if given and not is_compressed:
        print(f"{8 * len(result) / len(given):.4f} bits per byte; compressors: {compressor_bits(from_bytes(given))}")
    return 0


if __name__ == "__main__":
    run_program(main)
