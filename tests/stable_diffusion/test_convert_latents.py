"""stable_diffusion/data/convert_latents: MLPerf's tar files give the same samples; bad ones are named."""

import io
import os
import pickle
import tarfile

import numpy as np
import pytest

from common.config import mistakes_in_one_line
from stable_diffusion.data import convert_latents
from stable_diffusion.data.shards import Samples
from tests.helpers import forked
from tests.helpers.hostile_pickles import Calls, Pointer


def arrays(value=0.0):
    """Return the arrays of one .pyd, with all moments and encodings equal to `value`."""
    return {
        "image_embed": np.full((1, 8, 64, 64), value, np.float32),
        "captions_embed": np.full((77, 1024), value, np.float32),
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
    """Two tar files of two samples; sample i holds the number i."""
    (tmp_path / "tars").mkdir()
    for shard in range(2):
        numbers = range(2 * shard, 2 * shard + 2)
        write_tar(tmp_path / "tars" / f"{shard:05d}.tar", {f"{number:09d}": arrays(number) for number in numbers})
    return tmp_path / "tars"


def convert(folder, *more):
    arguments = ["--in", folder, "--out", folder.parent / "new", "--trust-input", *more]
    return convert_latents.main([str(argument) for argument in arguments])


def refused(capsys, folder, *more):
    """The one line that a mistake ends in, as the command prints it."""
    with pytest.raises(SystemExit) as ended, mistakes_in_one_line("stable_diffusion", "data.convert_latents"):
        convert(folder, *more)
    said = capsys.readouterr()
    assert (ended.value.code, said.out, said.err.count("\n")) == (2, "", 1), said
    assert said.err.startswith("python -m stable_diffusion.data.convert_latents: ")
    return said.err.removeprefix("python -m stable_diffusion.data.convert_latents: ").rstrip("\n")


def values(folder):
    samples = Samples(folder, 64, 77, 1024)
    found = []
    for index in range(len(samples)):
        moments, context = samples.read(index).values()
        assert moments.min() == moments.max() == context.min() == context.max() and moments.shape == (8, 64, 64)
        found.append(float(moments[0, 0, 0]))
    return found


# --- what is converted


def test_tar_files_as_the_benchmark_writes_them(folder, capsys):
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
    out = folder.parent / "new"
    assert convert(folder) == 0 and values(out) == [0, 1, 0, 1, 2]
    assert capsys.readouterr() == (f"{out}: 5 samples written, 0 dropped\n", "")
    assert sorted(os.listdir(out)) == ["00000.safetensors", "00001.safetensors"]


def test_each_number_is_where_it_was(folder):
    generator = np.random.default_rng(0)
    stored = arrays()
    for array in stored.values():
        array[:] = generator.standard_normal(array.shape)
    write_tar(folder / "00001.tar", {"x": stored})
    convert(folder)
    read = Samples(folder.parent / "new", 64, 77, 1024).read(2)
    assert np.array_equal(read["moments"], stored["image_embed"][0])
    assert np.array_equal(read["context"], stored["captions_embed"])


def test_pickles_of_numpy_1_and_halves_without_the_leading_one(folder):
    old = pickle.dumps(arrays(3.0), protocol=3).replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n")
    assert b"numpy.core.multiarray" in old
    write_tar(folder / "00000.tar", {"part/0": old, "k" * 150: pickle.dumps(arrays(4.0), protocol=5)})
    # Another extension, as webdataset splits names.
    halves = {name: array.astype(np.float16) for name, array in arrays(2.5).items()}
    halves["image_embed"] = halves["image_embed"][0]
    write_tar(folder / "00001.tar", {"0": halves, "0.other": arrays(9.0)})
    assert convert(folder) == 0
    (folder.parent / "halves").mkdir()
    (folder.parent / "new" / "00001.safetensors").rename(folder.parent / "halves" / "00001.safetensors")
    assert values(folder.parent / "new") == [3, 4] and values(folder.parent / "halves") == [2.5]
    assert Samples(folder.parent / "halves", 64, 77, 1024).dtypes == {"moments": "float16", "context": "float16"}


def test_a_conversion_that_was_stopped_goes_on(folder, capsys):
    convert(folder)
    kept = folder.parent / "new" / "00000.safetensors"
    before = kept.stat().st_mtime_ns
    (folder.parent / "new" / "00001.safetensors").unlink()
    capsys.readouterr()
    assert convert(folder) == 0
    assert "2 samples written" in capsys.readouterr().out and kept.stat().st_mtime_ns == before
    assert values(folder.parent / "new") == list(range(4))


# --- what is dropped


def changed(key, change):
    sample = arrays()
    sample[key] = change(sample[key])
    return sample


BAD = {
    "moments of float32 (4, 64, 64), not": changed("image_embed", lambda a: a[:, :4]),
    "moments of float32 (2, 8, 64, 64), not": changed("image_embed", lambda a: np.concatenate([a, a])),
    "moments of float64 (8, 64, 64), not": changed("image_embed", lambda a: a.astype(np.float64)),
    # Earlier protocols bring the bytes into order.
    "moments of >f4 (8, 64, 64), not": pickle.dumps(changed("image_embed", lambda a: a.astype(">f4")), protocol=5),
    "context of object (77, 1024), not": changed("captions_embed", lambda a: a.astype(object)),
    "moments of dtype float16 where the others are float32": changed("image_embed", lambda a: a.astype(np.float16)),
    "NaN or infinity in the context": changed("captions_embed", lambda a: a - np.inf),
    "no array captions_embed in it": {"image_embed": arrays()["image_embed"]},
    "no array image_embed in it": [1, 2],
    "cannot be unpickled: Ran out of input": b"",
    "cannot be unpickled: invalid load key": b"<html>",
}


def test_bad_samples_are_named_and_left_out(folder, capsys):
    samples = {"good": arrays(1.0)} | {f"bad{place}": sample for place, sample in enumerate(BAD.values())}
    write_tar(folder / "00000.tar", samples)
    (folder / "00001.tar").unlink()
    assert convert(folder) == 1
    said = capsys.readouterr()
    assert said.out == f"{folder.parent / 'new'}: 1 samples written, 11 dropped\n"
    lines = said.err.splitlines()
    assert len(lines) == 10
    for place, (line, reason) in enumerate(zip(lines, BAD, strict=False)):
        assert line.startswith(f"data: dropped 00000.tar bad{place}: {reason}")
    assert values(folder.parent / "new") == [1]


def cut(num_bytes):
    return lambda path: path.write_bytes(path.read_bytes()[:num_bytes])


def overwrite(offset, content):
    def damage(path):
        whole = bytearray(path.read_bytes())
        whole[offset : offset + len(content)] = content
        path.write_bytes(whole)

    return damage


# A sample takes a header and the pickle, in blocks of 512 bytes, and two blocks for the .txt.
SAMPLE = 512 + -(-len(pickle.dumps(arrays())) // 512) * 512 + 1024


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (cut(SAMPLE + 1000), "000000003.pyd is cut off"),
        (cut(SAMPLE + 200), "no end of the archive"),
        (cut(SAMPLE - 510), "000000002.txt is cut off"),
        (overwrite(SAMPLE, b"garbage" * 73), "no end of the archive"),
    ],
)
def test_what_is_readable_of_a_damaged_tar_file_is_converted(folder, capsys, damage, reason):
    damage(folder / "00001.tar")
    assert convert(folder) == 1
    told = f"data: dropped 00001.tar: damaged after 000000002, the rest is lost: {reason}\n"
    assert capsys.readouterr().err == told
    assert values(folder.parent / "new") == list(range(3))


def test_a_tar_file_without_a_good_sample_is_one_line(folder, capsys):
    path = folder / "00001.tar"
    path.write_bytes(b"not a tar" * 1000)
    told = f"--in: {path}: no sample is good: "
    assert refused(capsys, folder) == f"{told}damaged after its start, the rest is lost: invalid header"
    # As MLCommons hands out moments: the captions are not encoded.
    with tarfile.open(path, "w") as tar:
        tar.addfile(tarfile.TarInfo("0.npy"))
    assert refused(capsys, folder).startswith(f"{told}holds no .pyd")
    # What was done is kept.
    assert os.listdir(folder.parent / "new") == ["00000.safetensors"]


def test_what_cannot_be_read_or_written(folder, capsys):
    assert refused(capsys, folder.parent / "none") == f"--in {folder.parent}/none: no folder with tar files (*.tar)"
    assert refused(capsys, folder, "--memory-gib", "0").startswith("argument --memory-gib: '0' is not a number above 0")
    (folder.parent / "new").write_text("")
    assert refused(capsys, folder).startswith(f"--out {folder.parent}/new: cannot write there (")
    (folder.parent / "new").unlink()
    (folder / "00001.tar").unlink()
    os.mkfifo(folder / "00001.tar")
    assert refused(capsys, folder) == f"--in: cannot read {folder}/00001.tar (it is a pipe, a socket or a device)"


def test_a_limit_of_the_child_is_one_line(folder, capsys):
    write_tar(folder / "00000.tar", {"0": b"cbuiltins\nbytearray\n(I2000000000\ntR."})
    assert refused(capsys, folder, "--memory-gib", "0.5") == (
        f"--in: {folder}/00000.tar: takes more than 0.5 GiB to unpickle: give a larger --memory-gib"
    )
    assert os.listdir(folder.parent / "new") == []


# --- training reads no pickle


@pytest.mark.parametrize("content", ["calls", "pointer"])
def test_training_refuses_tar_files_and_never_loads_them(folder, content):
    hostile = {"calls": Calls(folder.parent / "harmed"), "pointer": Pointer()}[content]
    for shard in range(2):
        write_tar(folder / f"{shard:05d}.tar", {"0": arrays() | {"image_embed": hostile}})
    for data in (folder, folder / "00000.tar"):
        with pytest.raises(ValueError, match="convert them once, python -m stable_diffusion.data.convert_latents"):
            Samples(data, 64, 77, 1024)
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    arguments = ["--preset", "tiny", "--variant", "eager", "--data", str(folder)]
    answer = forked.run("stable_diffusion.train", arguments, environment, timeout_s=300)
    # It is refused before anything is built.
    assert answer.returncode == 2 and "Traceback" not in answer.stderr, answer
    said = (answer.stdout + answer.stderr).splitlines()
    assert sum("samples in tar files are pickled, which can run code" in line for line in said) == 1
    assert not (folder.parent / "harmed").exists()


def test_nothing_is_unpickled_without_trust(folder, capsys):
    write_tar(folder / "00000.tar", {"0": arrays() | {"image_embed": Calls(folder.parent / "harmed")}})
    with pytest.raises(SystemExit) as ended:
        convert_latents.main(["--in", str(folder), "--out", str(folder.parent / "new")])
    said = capsys.readouterr()
    assert (ended.value.code, said.out, said.err.count("\n")) == (2, "", 1) and "--trust-input" in said.err
    assert not (folder.parent / "harmed").exists() and not (folder.parent / "new").exists()
