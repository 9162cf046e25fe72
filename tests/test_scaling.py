import pytest

from experiments import scaling


def law(x):
    return 1.2 + 2.0 * x ** -0.3


def write_table(path, head, lines):  # lines [(row, steps, TFLOPs, bits)], each of two seeds
    text = [f"{head},steps,seed,metric,value"]
    for row, steps, x, bits in lines:
        for seed, shift in ((1, 0.01), (2, -0.01)):
            text += [f"{row},{steps},{seed},tflop,{x}", f"{row},{steps},{seed},left_to_right,{bits + shift}",
                     f"{row},{steps},{seed},probe,0.5"]
    path.write_text("\n".join(text) + "\n")
    return str(path)


def test_the_largest_run_is_predicted_from_the_others(tmp_path, capsys, refuses):
    some = [(32, 10, 0.5), (256, 10, 20), (64, 10, 1.5), (128, 10, 5), (96, 10, 3), (512, 5, 90)]
    sizes = [(size, steps, x, law(x) + 0.1 * (size == 256)) for size, steps, x in some]
    assert scaling.main(["--curves", write_table(tmp_path / "a.csv", "n_embd", sizes), "--steps", "10"]) == 0
    last = capsys.readouterr().out.splitlines()[-1].split(" | ")
    assert last[:4] == ["| 256", "10", "20", f"{law(20) + 0.1:.3f}"], "512 has another number of steps"
    assert float(last[5].strip(" |")) == pytest.approx(law(20), abs=3e-3), "the largest run is not fitted"
    steps = [(name, n, n, law(n)) for name in ("mlm", "clm") for n in (1, 2, 4, 8, 16)]
    path = write_table(tmp_path / "b.csv", "objective", steps)
    assert scaling.main(["--curves", path]) == 0 and capsys.readouterr().out.count("| clm |") == 5
    for flags, hint in ((["--curves", "no.csv"], "cannot be read"), (["--curves", path, "--objective", "x"], "5 are")):
        refuses(hint, scaling.main, flags)
