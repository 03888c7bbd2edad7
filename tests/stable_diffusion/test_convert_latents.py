"""stable_diffusion/data/convert_latents: MLPerf's tar files give the same samples; bad ones are named."""

import io
import os
import pickle
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest

from common.config import mistakes_in_one_line
from common.training.data import safetensors_header
from stable_diffusion.data import convert_latents
from stable_diffusion.data.batches import Batches
from stable_diffusion.data.shards import Samples
from tests.helpers import forked
from tests.llama2_lora.test_convert_packed_text import Calls, Pointer

ROOT = Path(__file__).resolve().parents[2]
SIZES = (8, 4, 16)  # latent size, tokens, dim
FLAGS = ["--latent-size", "8", "--context-tokens", "4", "--context-dim", "16"]


def arrays(value=0.0):
    """Return the arrays of one .pyd, with all moments and encodings equal to `value`."""
    return {
        "image_embed": np.full((1, 8, 8, 8), value, np.float32),
        "captions_embed": np.full((4, 16), value, np.float32),
    }


def write_tar(path, samples):
    """samples: key -> bytes, or what is to be pickled; a caption goes with each."""
    with tarfile.open(path, "w") as tar:
        for key, sample in samples.items():
            content = sample if isinstance(sample, bytes) else pickle.dumps(sample)
            for name, part in ((f"{key}.pyd", content), (f"{key}.txt", b"a caption")):
                member = tarfile.TarInfo(name)
                member.size = len(part)
                tar.addfile(member, io.BytesIO(part))
    return path


@pytest.fixture
def folder(tmp_path):
    """Two tar files of four samples; sample i holds the number i."""
    (tmp_path / "tars").mkdir()
    for shard in range(2):
        numbers = range(4 * shard, 4 * shard + 4)
        write_tar(tmp_path / "tars" / f"{shard:05d}.tar", {f"{number:09d}": arrays(number) for number in numbers})
    return tmp_path / "tars"


def convert(folder, *more):
    arguments = ["--in", folder, "--out", folder.parent / "new", "--trust-input", *FLAGS, *more]
    return convert_latents.main([str(argument) for argument in arguments])


def refused(capsys, folder, *more):
    """The one line that a mistake ends in, as the command prints it."""
    with pytest.raises(SystemExit) as ended, mistakes_in_one_line("stable_diffusion", "data.convert_latents"):
        convert(folder, *more)
    said = capsys.readouterr()
    assert (ended.value.code, said.out, said.err.count("\n")) == (2, "", 1), said
    assert said.err.startswith("python -m stable_diffusion.data.convert_latents: ")
    return said.err.removeprefix("python -m stable_diffusion.data.convert_latents: ").rstrip("\n")


def keys(path):
    """The keys of a shard's samples, from its metadata."""
    return safetensors_header.read(path, "")[1]["keys"].splitlines()


def values(folder):
    samples = Samples(folder, *SIZES)
    found = []
    for index in range(len(samples)):
        moments, context = samples.read(index).values()
        assert np.unique(moments).tolist() == np.unique(context).tolist() and moments.shape == (8, 8, 8)
        found.append(float(moments[0, 0, 0]))
    return found


# --- what is converted


def test_a_converted_folder_gives_the_batches_of_its_samples(folder, capsys):
    generator = np.random.default_rng(0)
    stored = {}
    for shard in range(2):
        part = {}
        for place in range(4):
            part[f"{shard}-{place}"] = {
                "image_embed": generator.standard_normal((1, 8, 8, 8), np.float32),
                "captions_embed": generator.standard_normal((4, 16), np.float32),
            }
        write_tar(folder / f"{shard:05d}.tar", part)
        stored |= part
    assert convert(folder) == 0
    out = folder.parent / "new"
    assert capsys.readouterr() == (f"{out}: 8 samples written, 0 dropped\n", "")
    assert sorted(os.listdir(out)) == ["00000.safetensors", "00001.safetensors"]
    samples = Samples(out, *SIZES)
    assert [key for shard in samples.shards for key in keys(out / shard)] == list(stored)
    given = list(stored.values())
    order = np.random.default_rng([0, 0]).permutation(8)
    batches = Batches(samples, 4)
    for step in range(2):
        batch = batches.next()
        for row, index in enumerate(order[4 * step : 4 * step + 4]):
            assert np.array_equal(batch["moments"][row].numpy(), given[index]["image_embed"][0])
            assert np.array_equal(batch["context"][row].numpy(), given[index]["captions_embed"])


def test_tar_files_as_the_benchmark_writes_them(folder):
    """As encode_captions.py does: files on disk, sorted, added with their own times, which makes pax headers."""
    files = folder.parent / "files"
    files.mkdir()
    for number in (2, 0, 1):
        (files / f"{number:09d}.pyd").write_bytes(pickle.dumps(arrays(number), protocol=4))
        (files / f"{number:09d}.txt").write_text("a photo of something")
        os.utime(files / f"{number:09d}.pyd", ns=(0, 1_700_000_000_123_456_789))
    with tarfile.open(folder / "00001.tar", "w") as tar:
        for file in sorted(files.iterdir()):
            tar.add(file, arcname=file.name)
    assert convert(folder) == 0 and values(folder.parent / "new") == [0, 1, 2, 3, 0, 1, 2]


def test_pickles_of_numpy_1_of_protocol_5_and_halves_without_the_leading_one(folder):
    old = pickle.dumps(arrays(3.0), protocol=3).replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n")
    assert b"numpy.core.multiarray" in old
    write_tar(folder / "00000.tar", {"0": old, "1": pickle.dumps(arrays(4.0), protocol=5)})
    halves = {name: array.astype(np.float16) for name, array in arrays(2.5).items()}
    halves["image_embed"] = halves["image_embed"][0]
    write_tar(folder / "00001.tar", {"0": halves})
    assert convert(folder) == 0
    (folder.parent / "halves").mkdir()
    (folder.parent / "new" / "00001.safetensors").rename(folder.parent / "halves" / "00001.safetensors")
    assert values(folder.parent / "new") == [3, 4] and values(folder.parent / "halves") == [2.5]
    assert Samples(folder.parent / "halves", *SIZES).dtypes == {"moments": "float16", "context": "float16"}


def test_names_with_folders_long_names_and_more_dots(folder):
    names = {"part/00000001": 1.0, "k" * 150: 2.0, "caf\u00e9": 3.0}
    write_tar(folder / "00000.tar", {name: arrays(value) for name, value in names.items()} | {"x.other": arrays(9.0)})
    (folder / "00001.tar").unlink()
    convert(folder)
    new = folder.parent / "new"
    found = dict(zip(keys(new / "00000.safetensors"), values(new), strict=True))
    assert found == {"00000001": 1.0, "k" * 150: 2.0, "caf\u00e9": 3.0}


def test_a_conversion_that_was_stopped_goes_on(folder, capsys):
    convert(folder)
    kept = folder.parent / "new" / "00000.safetensors"
    before = kept.stat().st_mtime_ns
    (folder.parent / "new" / "00001.safetensors").unlink()
    capsys.readouterr()
    assert convert(folder) == 0
    assert "4 samples written" in capsys.readouterr().out and kept.stat().st_mtime_ns == before
    assert values(folder.parent / "new") == list(range(8))


# --- what is dropped


def changed(key, change):
    sample = arrays()
    sample[key] = change(sample[key])
    return sample


def spoilt(value):
    def change(array):
        array[..., 3] = value
        return array

    return change


BAD = {
    "moments of shape (8, 16, 16), not (8, 8, 8)": changed("image_embed", lambda a: np.zeros((1, 8, 16, 16), a.dtype)),
    "moments of shape (4, 8, 8), not (8, 8, 8)": changed("image_embed", lambda a: a[:, :4]),
    "moments of shape (2, 8, 8, 8), not (8, 8, 8)": changed("image_embed", lambda a: np.concatenate([a, a])),
    "context of shape (1, 4, 16), not (4, 16)": changed("captions_embed", lambda a: a[None]),
    "moments of dtype float64, not float32 or float16": changed("image_embed", lambda a: a.astype(np.float64)),
    # Earlier protocols bring the bytes into order.
    "moments of dtype >f4, not float32 or float16": pickle.dumps(
        changed("image_embed", lambda a: a.astype(">f4")), protocol=5
    ),
    "context of dtype object, not float32 or float16": changed("captions_embed", lambda a: a.astype(object)),
    "moments of dtype float16 where the others are float32": changed("image_embed", lambda a: a.astype(np.float16)),
    "NaN or infinity in the moments": changed("image_embed", spoilt(np.nan)),
    "NaN or infinity in the context": changed("captions_embed", spoilt(-np.inf)),
    "no array captions_embed in it": {"image_embed": arrays()["image_embed"]},
    "no array image_embed in it": changed("image_embed", lambda a: a.tolist()),
    "a pickled list instead of a dict": [1, 2],
    "cannot be unpickled: Ran out of input": b"",
    "cannot be unpickled: pickle data was truncated": pickle.dumps(arrays())[:-1000],
    "cannot be unpickled: invalid load key, '<'.": b"<html>",
}


def test_bad_samples_are_named_and_left_out(folder, capsys):
    for start in (0, 8):
        bad = dict(list(BAD.items())[start : start + 8])
        samples = {"good": arrays(1.0)} | {f"bad{place}": sample for place, sample in enumerate(bad.values())}
        write_tar(folder / f"{start:05d}.tar", samples)
    (folder / "00001.tar").unlink()
    assert convert(folder) == 1
    said = capsys.readouterr()
    assert said.out == f"{folder.parent / 'new'}: 2 samples written, 16 dropped\n"
    named = [f"data: dropped {8 * (place // 8):05d}.tar bad{place % 8}: {reason}" for place, reason in enumerate(BAD)]
    assert said.err.splitlines() == named[:10]
    assert values(folder.parent / "new") == [1, 1]


def cut(num_bytes):
    return lambda path: path.write_bytes(path.read_bytes()[:num_bytes])


def overwrite(offset, content):
    def damage(path):
        whole = bytearray(path.read_bytes())
        whole[offset : offset + len(content)] = content
        path.write_bytes(whole)

    return damage


def replace_by(content):
    return lambda path: path.write_bytes(content)


def with_members(*names):
    def damage(path):
        with tarfile.open(path, "w") as tar:
            for name in names:
                tar.addfile(tarfile.TarInfo(name))

    return damage


# A sample takes 512 + 2560 bytes for the .pyd, of which the pickle fills most, and 512 + 512 for the .txt.
SAMPLE = 512 + 2560 + 1024


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (cut(3 * SAMPLE + 1000), "000000007.pyd is cut off"),
        (cut(3 * SAMPLE + 200), "no end of the archive"),
        (cut(3 * SAMPLE), "no end of the archive"),
        (cut(3 * SAMPLE - 510), "000000006.txt is cut off"),
        (cut(3 * SAMPLE - 400), "unexpected end of data"),
        (overwrite(3 * SAMPLE, b"garbage" * 73), "no end of the archive"),
    ],
)
def test_what_is_readable_of_a_damaged_tar_file_is_converted(folder, capsys, damage, reason):
    damage(folder / "00001.tar")
    assert convert(folder) == 1
    told = f"data: dropped 00001.tar: damaged after 000000006, the rest is lost: {reason}\n"
    assert capsys.readouterr().err == told
    assert values(folder.parent / "new") == list(range(7))


NO_PICKLES = "no .pyd, which the benchmark's encode_captions.py makes"


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (replace_by(b"not a tar" * 1000), "damaged after its start, the rest is lost: invalid header"),
        (replace_by(b""), "damaged after its start, the rest is lost: empty file"),
        (replace_by(bytes(10240)), f"holds nothing and {NO_PICKLES}"),
        (with_members("0.jpg", "0.txt"), f"holds .jpg, .txt and {NO_PICKLES}"),
        # As MLCommons hands out moments: the captions are not encoded.
        (with_members("0.npy", "0.txt"), f"holds .npy, .txt and {NO_PICKLES}"),
        (with_members("0.pyd", "1.pyd"), "0: cannot be unpickled: Ran out of input"),
    ],
)
def test_a_tar_file_without_a_good_sample_is_one_line(folder, capsys, damage, reason):
    damage(folder / "00001.tar")
    assert refused(capsys, folder) == f"--in: {folder}/00001.tar: no sample is good: {reason}"
    # What was done is kept.
    assert os.listdir(folder.parent / "new") == ["00000.safetensors"]


def test_what_cannot_be_read_or_written(folder, capsys):
    (folder.parent / "empty").mkdir()
    for name in ("none", "empty", "tars/00000.tar"):
        assert refused(capsys, folder.parent / name) == f"--in {folder.parent}/{name}: no folder with tar files (*.tar)"
    told = "argument --latent-size: '0' is not a number from 1 to 1,048,576"
    assert refused(capsys, folder, "--latent-size", "0").startswith(told)
    assert refused(capsys, folder, "--memory-gib", "0").startswith("argument --memory-gib: '0' is not a number above 0")
    (folder.parent / "new").write_text("")
    assert refused(capsys, folder).startswith(f"--out {folder.parent}/new: cannot write there (")
    (folder.parent / "new").unlink()
    (folder / "00001.tar").unlink()
    os.mkfifo(folder / "00001.tar")
    assert refused(capsys, folder) == f"--in: cannot read {folder}/00001.tar (it is a pipe, a socket or a device)"


def test_limits_of_the_child_are_one_line(folder, capsys):
    write_tar(folder / "00000.tar", {"0": b"cbuiltins\nbytearray\n(I2000000000\ntR."})
    assert refused(capsys, folder, "--memory-gib", "0.5") == (
        f"--in: {folder}/00000.tar: takes more than 0.5 GiB to unpickle: give a larger --memory-gib"
    )
    write_tar(folder / "00000.tar", {"0": b"ctime\nsleep\n(I100\ntR."})
    assert refused(capsys, folder, "--minutes", "0.03") == (
        f"--in: {folder}/00000.tar: not converted after 0.03 minutes: give a larger --minutes"
    )
    assert os.listdir(folder.parent / "new") == []


# --- training reads no pickle


@pytest.mark.parametrize("content", ["calls", "pointer"])
def test_training_refuses_tar_files_and_never_loads_them(folder, content):
    hostile = {"calls": Calls(folder.parent / "harmed"), "pointer": Pointer()}[content]
    for shard in range(2):
        write_tar(folder / f"{shard:05d}.tar", {"0": arrays() | {"image_embed": hostile}})
    told = (
        "samples in tar files are pickled, which can run code, and are not read: convert them once, python -m "
        f"stable_diffusion.data.convert_latents --in {folder} --out NEW --trust-input"
    )
    for data in (folder, folder / "00000.tar"):
        with pytest.raises(ValueError) as caught:
            Samples(data, *SIZES)
        assert str(caught.value) == f"--data {data}: {told}"
    # Beside shards they are left alone.
    (folder.parent / "other").mkdir()
    write_tar(folder.parent / "other" / "00000.tar", {"0": arrays(5.0)})
    assert (
        convert_latents.main(["--in", str(folder.parent / "other"), "--out", str(folder), "--trust-input", *FLAGS]) == 0
    )
    samples = Samples(folder, *SIZES)
    assert len(samples) == 1 and samples.read(0)["moments"].max() == 5
    assert not (folder.parent / "harmed").exists()


def test_the_command_of_training_refuses_them(folder):
    write_tar(folder / "00000.tar", {"0": arrays() | {"image_embed": Pointer()}})
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    arguments = ["--preset", "tiny", "--variant", "eager", "--data", str(folder)]
    answer = forked.run("stable_diffusion.train", arguments, environment, timeout_s=100)
    # It is refused before anything is built.
    assert answer.returncode == 2 and "Traceback" not in answer.stderr, answer
    said = (answer.stdout + answer.stderr).splitlines()
    assert sum("samples in tar files are pickled, which can run code" in line for line in said) == 1


def test_the_command_needs_trust_and_says_its_mistakes_in_one_line(folder):
    write_tar(folder / "00000.tar", {"0": arrays() | {"image_embed": Calls(folder.parent / "harmed")}})
    command = [sys.executable, "-m", "stable_diffusion.data.convert_latents", "--in", str(folder)]
    command += ["--out", str(folder.parent / "new"), *FLAGS]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (
        2,
        "",
        "python -m stable_diffusion.data.convert_latents: the input is pickled, and a pickle can run any code as you: "
        "where you trust who made the file and how it came to you, say so by --trust-input\n",
    )
    assert not (folder.parent / "harmed").exists() and not (folder.parent / "new").exists()
    (folder / "00000.tar").unlink()
    ended = subprocess.run([*command, "--trust-input"], cwd=ROOT, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "") and "4 samples written, 0 dropped" in ended.stdout
    command[command.index("--in") + 1] = str(folder.parent / "none")
    ended = subprocess.run([*command, "--trust-input"], cwd=ROOT, capture_output=True, text=True)
    told = f"--in {folder.parent}/none: no folder with tar files (*.tar)"
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == f"python -m stable_diffusion.data.convert_latents: {told}\n"
