"""stable_diffusion/shards, batches, synthetic, data: the format, what is dropped, the sequence, generated samples."""

import io
import json
import multiprocessing
import os
import pickle
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from stable_diffusion import data, shards
from stable_diffusion.batches import Batches
from stable_diffusion.shards import BadSample, Samples, decode
from stable_diffusion.synthetic import ensure_generated, write

ROOT = Path(__file__).resolve().parent.parent
SIZES = (8, 4, 16)  # latent size, tokens, dim


def arrays(value=0.0):
    """What one .pyd holds, all moments and encodings equal to `value`."""
    return {
        "image_embed": np.full((1, 8, 8, 8), value, np.float32),
        "captions_embed": np.full((4, 16), value, np.float32),
    }


def write_shard(path, samples):
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
    """Two shards of eight samples; sample i holds the number i."""
    for shard in range(2):
        numbers = range(8 * shard, 8 * shard + 8)
        write_shard(tmp_path / f"{shard:05d}.tar", {f"{number:09d}": arrays(number) for number in numbers})
    return tmp_path


def with_bad(folder, replaced):
    """Write the fixture's shards again with some samples replaced. replaced: number -> sample."""
    for shard in range(2):
        numbers = range(8 * shard, 8 * shard + 8)
        samples = {f"{number:09d}": replaced.get(number, arrays(number)) for number in numbers}
        write_shard(folder / f"{shard:05d}.tar", samples)


def numbers(batch):
    """Which samples a batch holds; moments and encodings must be of the same ones."""
    found = batch["moments"][:, 0, 0, 0].tolist()
    assert batch["context"][:, 0, 0].tolist() == found
    return found


def flat(batches):
    return [number for batch in batches for number in batch]


def take(folder, count, batch=4, **options):
    batches = Batches(Samples(folder, *SIZES), batch, **options)
    try:
        return [numbers(batches.next()) for _ in range(count)]
    finally:
        batches.close()


# --- the format


def test_written_shards_are_what_tarfile_and_pickle_say(tmp_path):
    write(tmp_path / "out", 2, 3, 0, *SIZES)
    assert sorted(os.listdir(tmp_path / "out")) == ["00000.tar", "00001.tar"]
    with tarfile.open(tmp_path / "out" / "00001.tar") as tar:
        names = ["000010000", "000010001", "000010002"]
        assert tar.getnames() == [f"{name}.{kind}" for name in names for kind in ("pyd", "txt")]
        sample = pickle.load(tar.extractfile("000010001.pyd"))
        assert tar.extractfile("000010001.txt").read().startswith(b"generated")
    assert {name: (array.shape, array.dtype) for name, array in sample.items()} == {
        "image_embed": ((1, 8, 8, 8), np.float32),
        "captions_embed": ((4, 16), np.float32),
    }
    read = Samples(tmp_path / "out", *SIZES).read(4)
    assert np.array_equal(read["moments"], sample["image_embed"][0])
    assert np.array_equal(read["context"], sample["captions_embed"])


def test_shards_as_the_benchmark_writes_them(tmp_path):
    """As encode_captions.py does: files on disk, sorted, added with their own times, which makes pax headers."""
    files = tmp_path / "00000"
    files.mkdir()
    for number in (2, 0, 1):
        (files / f"{number:09d}.pyd").write_bytes(pickle.dumps(arrays(number), protocol=4))
        (files / f"{number:09d}.txt").write_text("a photo of something")
        os.utime(files / f"{number:09d}.pyd", ns=(0, 1_700_000_000_123_456_789))
    (tmp_path / "data").mkdir()
    with tarfile.open(tmp_path / "data" / "00000.tar", "w") as tar:
        for file in sorted(files.iterdir()):
            tar.add(file, arcname=file.name)
    samples = Samples(tmp_path / "data", *SIZES)
    assert len(samples) == 3 and not samples.dropped
    assert samples.name(1) == ("00000.tar", "000000001")
    sample = samples.read(1)
    assert sample["moments"].shape == (8, 8, 8) and sample["moments"].dtype == np.float32
    assert sample["context"].shape == (4, 16) and np.unique(sample["context"]).tolist() == [1.0]


def test_pickles_of_numpy_1_and_of_protocol_5_are_read():
    shapes = {"moments": (8, 8, 8), "context": (4, 16)}
    old = pickle.dumps(arrays(3.0), protocol=3).replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n")
    assert b"numpy.core.multiarray" in old
    for content in (old, pickle.dumps(arrays(3.0), protocol=5)):
        assert decode(content, shapes)["moments"].max() == 3.0


def test_moments_without_the_leading_one_and_in_half_precision_are_read(tmp_path):
    halves = {name: array.astype(np.float16) for name, array in arrays(2.5).items()}
    halves["image_embed"] = halves["image_embed"][0]
    write_shard(tmp_path / "a.tar", {"0": halves, "1": halves})
    batches = Batches(Samples(tmp_path, *SIZES), 2)
    assert batches.dtypes == {"moments": torch.float16, "context": torch.float16}
    batch = batches.next()
    assert batch["moments"].dtype == torch.float16 and batch["moments"].shape == (2, 8, 8, 8)
    assert batch["moments"].unique().tolist() == [2.5]


def test_many_shards_are_scanned_as_few_are(tmp_path):
    for shard in range(shards.MANY_SHARDS + 3):
        write_shard(tmp_path / f"{shard:05d}.tar", {f"{shard:09d}": arrays(shard)})
    (tmp_path / "00005.tar").write_bytes(b"not a tar")
    samples = Samples(tmp_path, *SIZES)
    assert [samples.read(index)["moments"].max() for index in (0, 4, 5, 33)] == [0, 4, 6, 34]
    assert [one.shard for one in samples.dropped] == ["00005.tar"]


# --- samples that are dropped


class Malicious:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("key", ["image_embed", "captions_embed"])
def test_a_malicious_pickle_does_not_run(tmp_path, key):
    content = pickle.dumps(arrays() | {key: Malicious(tmp_path / "harmed")})
    with pytest.raises(BadSample, match=r"undecodable: the pickle names posix.mkdir, only numpy arrays are read"):
        decode(content, {"moments": (8, 8, 8), "context": (4, 16)})
    assert not (tmp_path / "harmed").exists()
    pickle.loads(content)
    assert (tmp_path / "harmed").exists()  # it would have


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
    "undecodable: Ran out of input": b"",
    "undecodable: pickle data was truncated": pickle.dumps(arrays())[:-1000],
    "undecodable: invalid load key, '<'.": b"<html>",
}


@pytest.mark.parametrize("reason", BAD)
def test_a_bad_sample_is_named_counted_and_replaced(folder, capsys, reason):
    clean = take(folder, 4)
    assert capsys.readouterr().err == ""
    with_bad(folder, {9: BAD[reason]})
    samples = Samples(folder, *SIZES)
    batches = Batches(samples, 4)
    # Four batches are the whole epoch; one has something else instead of 9, from later in the order.
    found = [numbers(batches.next()) for _ in range(4)]
    assert batches.dropped == [("00001.tar", "000000009", reason)] and len(batches.dropped) == 1
    assert capsys.readouterr().err == f"data: dropped 00001.tar 000000009: {reason}\n"
    different = [(new, old) for new, old in zip(found, clean, strict=True) if new != old]
    assert len(different) == 1 and all(len(set(batch)) == 4 for batch in found)
    assert 9 in different[0][1] and set(different[0][1]) - set(different[0][0]) == {9}
    # Again in the next epochs: each is named once.
    for _ in range(8):
        assert 9 not in numbers(batches.next())
    assert len(batches.dropped) == 1 and capsys.readouterr().err == ""


def test_the_replacement_is_the_next_of_the_order(folder):
    order = flat(take(folder, 4))
    with_bad(folder, {int(order[1]): b"", int(order[4]): b""})
    assert take(folder, 2) == [[order[0], order[2], order[3], order[5]], [order[5], order[6], order[7], order[8]]]


def test_a_sample_that_cannot_be_read_any_more_is_dropped(folder):
    samples = Samples(folder, *SIZES)
    (folder / "00001.tar").unlink()
    with pytest.raises(BadSample, match="cannot be read: No such file or directory"):
        samples.read(8)
    assert samples.read(7)["moments"].max() == 7


def test_the_first_ten_are_named_the_rest_counted(tmp_path, capsys):
    many = {f"{number:03d}": arrays(number) if number % 2 else b"" for number in range(60)}
    write_shard(tmp_path / "a.tar", many)
    batches = Batches(Samples(tmp_path, *SIZES), 10)
    for _ in range(6):
        batches.next()
    batches.close()
    assert len(batches.dropped) == 30 and len(set(batches.dropped)) == 30
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 11
    assert lines[9].endswith("; further ones are counted only") and lines[10] == "data: 30 dropped in all"


# --- shards that are dropped


def cut(num_bytes):
    def damage(path):
        content = path.read_bytes()
        path.write_bytes(content[:num_bytes])

    return damage


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
PICKLE = len(pickle.dumps(arrays()))
SAMPLE = 512 + 2560 + 1024
NOT_ENCODED = "moments with captions that are not encoded (.npy, .txt): run the benchmark's encode_captions.py"


def lost(num_bytes, member="000000011.pyd"):
    return f"shard ends {num_bytes:,} bytes before {member} does, what followed is lost"


@pytest.mark.parametrize(
    ("damage", "num_left", "key", "reason"),
    [
        (cut(3 * SAMPLE + 1000), 3, "000000011", lost(PICKLE - 488)),
        (cut(3 * SAMPLE + 700), 3, "000000011", lost(PICKLE - 188)),
        (cut(3 * SAMPLE + 200), 3, "", "cut off after 000000010, what followed is lost"),
        (cut(3 * SAMPLE), 3, "", "cut off after 000000010, what followed is lost"),
        (cut(3 * SAMPLE - 700), 3, "", "cut off after 000000010, what followed is lost"),
        (cut(3 * SAMPLE - 510), 3, "", lost(7, "000000010.txt")),
        (cut(3 * SAMPLE - 400), 3, "", "damaged after 000000010, what followed is lost: unexpected end of data"),
        (overwrite(3 * SAMPLE, b"garbage" * 73), 3, "", "damaged after 000000010, what followed is lost"),
        (replace_by(b"not a tar" * 1000), 0, "", "not a tar file: invalid header"),
        (replace_by(b"short"), 0, "", "not a tar file: truncated header"),
        (replace_by(b""), 0, "", "not a tar file: empty file"),
        (replace_by(bytes(10240)), 0, "", "holds nothing and no samples (.pyd)"),
        (with_members("0.jpg", "0.txt", "0.json"), 0, "", "holds .jpg, .json, .txt and no samples (.pyd)"),
        (with_members("0.npy", "0.txt"), 0, "", NOT_ENCODED),
        (lambda path: (path.unlink(), path.mkdir()), 0, "", "cannot be read: Is a directory"),
    ],
)
def test_what_is_readable_of_a_damaged_shard_is_used(folder, capsys, damage, num_left, key, reason):
    damage(folder / "00001.tar")
    samples = Samples(folder, *SIZES)
    assert len(samples) == 8 + num_left
    assert samples.dropped == [("00001.tar", key, reason)]
    batches = Batches(samples, 4)
    for _ in range(4):
        numbers(batches.next())
    assert batches.dropped == samples.dropped
    assert capsys.readouterr().err == f"data: dropped 00001.tar{' ' + key if key else ''}: {reason}\n"
    assert {int(samples.read(index)["moments"].max()) for index in range(len(samples))} == set(range(8 + num_left))


def test_only_rank_0_names_what_the_scan_found(folder, capsys):
    (folder / "00001.tar").write_bytes(b"")
    batches = Batches(Samples(folder, *SIZES), 1, rank=1, world_size=2)
    assert len(batches.dropped) == 1 and capsys.readouterr().err == ""


def test_other_files_beside_the_shards_are_left_alone(folder):
    (folder / "sha512sums.txt").write_text("sums")
    (folder / ".00002.tar.partial").write_text("half")
    (folder / ".00002.tar").write_text("hidden")
    samples = Samples(folder, *SIZES)
    assert len(samples) == 16 and not samples.dropped


def test_names_with_folders_long_names_and_more_dots(tmp_path):
    names = {"part/00000001": 1.0, "k" * 150: 2.0, "caf\u00e9": 3.0}
    write_shard(tmp_path / "a.tar", {name: arrays(value) for name, value in names.items()} | {"x.other": arrays(9.0)})
    samples = Samples(tmp_path, *SIZES)
    found = {samples.name(index)[1]: float(samples.read(index)["moments"].max()) for index in range(len(samples))}
    assert found == {"00000001": 1.0, "k" * 150: 2.0, "caf\u00e9": 3.0}


# --- folders that cannot be used


def test_folders_without_samples_end_in_one_line_that_names_data(tmp_path):
    def refusal():
        with pytest.raises(ValueError) as error:
            Samples(tmp_path / "d", *SIZES)
        assert "\n" not in str(error.value)
        return str(error.value).replace(str(tmp_path), "")

    assert refusal() == "--data /d: no such folder"
    (tmp_path / "d").write_text("")
    assert refusal() == "--data /d: not a folder"
    (tmp_path / "d").unlink()
    (tmp_path / "d").mkdir()
    assert refusal() == "--data /d: no shards (*.tar) in it"
    with_members("0.npy", "0.txt")(tmp_path / "d" / "00000.tar")
    assert refusal() == f"--data /d: no samples in it: 00000.tar: {NOT_ENCODED}"
    write_shard(tmp_path / "d" / "00000.tar", {"0": b"", "1": b""})
    assert refusal() == "--data /d: none of 2 samples is good: 00000.tar 0: undecodable: Ran out of input"


def test_all_samples_of_other_sizes_are_refused_at_once(folder):
    with pytest.raises(ValueError, match=r"none of 16 samples is good: 00000.tar 000000000: moments of shape"):
        Samples(folder, 64, 4, 16)


def test_too_few_samples_end_in_one_line_that_names_batch_and_data(folder):
    samples = Samples(folder, *SIZES)
    with pytest.raises(ValueError) as error:
        Batches(samples, 6, rank=2, world_size=3)
    assert str(error.value) == (
        f"--data {folder}: 16 good samples of 16, --batch 6 on 3 ranks takes 18: give more shards or a smaller --batch"
    )
    assert len(numbers(Batches(samples, 16).next())) == 16


@pytest.mark.parametrize("num_workers", [0, 2])
def test_too_few_good_samples_are_noticed_when_they_are_met(folder, num_workers):
    order = flat(take(folder, 4))
    with_bad(folder, {int(number): b"" for number in order[5:9]})
    batches = Batches(Samples(folder, *SIZES), 4, world_size=1, num_workers=num_workers)
    assert numbers(batches.next()) == order[:4]
    batches.close()
    batches = Batches(Samples(folder, *SIZES), 13, num_workers=num_workers)
    with pytest.raises(ValueError, match=r"12 good samples of 16, --batch 13 takes 13: give more shards"):
        batches.next()
    batches.close()


# --- the sequence of batches


def test_the_sequence_depends_on_the_seed_alone(folder):
    expected = take(folder, 9)
    assert take(folder, 9, num_workers=1) == expected
    assert take(folder, 9, num_workers=2) == expected
    assert take(folder, 9, seed=1) != expected


def test_the_sequence_is_the_same_with_bad_samples_whoever_reads(folder):
    with_bad(folder, {number: b"" for number in (1, 2, 8, 11)})
    expected = take(folder, 12)
    assert take(folder, 12, num_workers=2) == expected
    assert all(len(set(batch)) == 4 for batch in expected)


def test_an_epoch_has_every_sample_once_in_another_order_each_time(folder):
    found = take(folder, 8)
    first, second = flat(found[:4]), flat(found[4:])
    assert sorted(first) == sorted(second) == list(range(16))
    assert first != second and first != sorted(first)


def test_what_does_not_fill_a_step_is_left_out(folder):
    found = take(folder, 20, batch=5)
    epochs = [flat(found[start : start + 3]) for start in range(0, 18, 3)]
    assert all(len(set(epoch)) == 15 for epoch in epochs)
    assert {number for epoch in epochs for number in epoch} == set(range(16))


def test_ranks_share_each_step_and_repeat_nothing(folder):
    ranks = [take(folder, 4, batch=2, rank=rank, world_size=2) for rank in range(2)]
    assert [a + b for a, b in zip(*ranks, strict=True)] == take(folder, 4, batch=4)
    assert sorted(flat(ranks[0] + ranks[1])) == list(range(16))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_reset_begins_again_and_keeps_the_workers(folder, num_workers):
    with_bad(folder, {number: b"" for number in (1, 8)})
    batches = Batches(Samples(folder, *SIZES), 4, num_workers=num_workers)
    workers = {process.pid for process in multiprocessing.active_children()}
    assert len(workers) == num_workers
    first = [numbers(batches.next()) for _ in range(7)]
    for count in (0, 3, 7):
        batches.reset()
        assert [numbers(batches.next()) for _ in range(count)] == first[:count]
    assert {process.pid for process in multiprocessing.active_children()} == workers
    assert len(batches.dropped) == 2
    batches.close()


def test_batches_leave_the_default_generator_alone(folder):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    take(folder, 3, num_workers=1)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_batch_is_not_changed_by_the_next_one(folder):
    batches = Batches(Samples(folder, *SIZES), 4)
    first = batches.next()
    kept = first["moments"].clone()
    first["context"].zero_()  # theirs to write to
    batches.next()
    assert torch.equal(first["moments"], kept)


def test_close_ends_the_workers_and_can_be_repeated(folder):
    batches = Batches(Samples(folder, *SIZES), 4, num_workers=2)
    batches.next()
    assert len(multiprocessing.active_children()) == 2
    batches.close()
    batches.close()
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("last_line", ["batches.close()", "", "raise SystemExit(3)"])
def test_a_process_ends_quietly_with_and_without_close(folder, last_line):
    code = f"""
from stable_diffusion.batches import Batches
from stable_diffusion.shards import Samples
batches = Batches(Samples({str(folder)!r}, *{SIZES}), 4, num_workers=2)
batches.next()
batches.reset()
{last_line}
"""
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (3 if "Exit" in last_line else 0, "", "")


# --- generated samples


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    """64 samples at the real size of the moments, with short encodings."""
    folder = tmp_path_factory.mktemp("generated")
    write(folder, 2, 32, 0, 64, 77, 256)
    samples = Samples(folder, 64, 77, 256)
    read = [samples.read(index) for index in range(64)]
    return {name: np.stack([sample[name] for sample in read]) for name in ("moments", "context")}


def test_means_have_the_spectrum_of_images_and_latents_of_variance_one(generated):
    mean, log_variance = np.split(generated["moments"].astype(np.float64), 2, axis=1)
    latents = 0.18215 * (mean + np.exp(0.5 * log_variance) * np.random.default_rng(0).standard_normal(mean.shape))
    assert np.allclose(latents.std(axis=(0, 2, 3)), 1, atol=0.1)
    power = (np.abs(np.fft.fft2(mean)) ** 2).mean(axis=0)
    assert [data.amplitude_slope(plane) for plane in power] == pytest.approx([-1] * 4, abs=0.1)
    white = np.abs(np.fft.fft2(np.random.default_rng(0).standard_normal((64, 64)))) ** 2
    assert data.amplitude_slope(white) == pytest.approx(0, abs=0.1)


def test_channels_are_a_little_correlated_and_samples_are_not(generated):
    mean = generated["moments"][:, :4]
    channels = np.corrcoef(mean.transpose(1, 0, 2, 3).reshape(4, -1))
    assert np.all(np.abs(channels[~np.eye(4, dtype=bool)] - 0.15) < 0.1)
    between = np.corrcoef(mean.reshape(64, -1))[~np.eye(64, dtype=bool)]
    assert abs(between.mean()) < 0.02 and np.abs(between).max() < 0.8


def test_log_variances_are_sharp_and_smooth_in_space(generated):
    log_variance = generated["moments"][:, 4:].astype(np.float64)
    assert log_variance.min() >= -25 and log_variance.max() <= -9
    assert -18 < np.median(log_variance) < -16 and 1.5 < log_variance.std() < 4
    assert (log_variance == -25).mean() < 0.02 and (log_variance == -9).mean() < 0.02
    assert np.corrcoef(log_variance[..., 1:].ravel(), log_variance[..., :-1].ravel())[0, 1] > 0.5


def test_encodings_have_the_structure_of_captions(generated):
    context = generated["context"].astype(np.float64)
    assert np.all(context[:, 0] == context[0, 0])  # nothing precedes the start
    last_two = [np.corrcoef(sample[-1], sample[-2])[0, 1] for sample in context]
    assert min(last_two) > 0.8
    words = np.corrcoef(context[:, 1] - context[:, 1].mean(axis=0))[~np.eye(64, dtype=bool)]
    assert np.median(np.abs(words)) < 0.3
    # The first row that is as the last one is: where the padding begins.
    lengths = [next(row for row in range(77) if np.corrcoef(s[row], s[-1])[0, 1] > 0.8) for s in context]
    assert 5 < np.median(lengths) < 30 and len(set(lengths)) > 10
    size = np.abs(context.mean(axis=(0, 1)))
    assert size.max() > 5 and np.median(size) < 1


def test_generated_content_depends_on_seed_and_place_alone(tmp_path):
    write(tmp_path / "a", 2, 3, 7, *SIZES)
    write(tmp_path / "b", 2, 3, 7, *SIZES)
    assert (tmp_path / "a" / "00001.tar").read_bytes() == (tmp_path / "b" / "00001.tar").read_bytes()
    write(tmp_path / "c", 1, 6, 7, *SIZES)
    write(tmp_path / "d", 1, 6, 8, *SIZES)
    two, one, other = (Samples(tmp_path / name, *SIZES) for name in "acd")
    for index in range(6):
        for name in ("moments", "context"):
            assert np.array_equal(two.read(index)[name], one.read(index)[name])
            assert not np.array_equal(two.read(index)[name], other.read(index)[name])
    assert not np.array_equal(one.read(0)["moments"], one.read(1)["moments"])


@pytest.mark.parametrize("tokens", [1, 2, 3, 8])
def test_short_contexts_are_generated_too(tmp_path, tokens):
    write(tmp_path, 1, 4, 0, 8, tokens, 16)
    assert len(Samples(tmp_path, 8, tokens, 16)) == 4


def test_generated_shards_are_written_once(tmp_path):
    folder = ensure_generated(tmp_path / "cache", *SIZES)
    assert folder.parent == tmp_path / "cache" and len(Samples(folder, *SIZES)) == 64
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert ensure_generated(tmp_path / "cache", *SIZES) == folder
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    assert ensure_generated(tmp_path / "cache", 8, 4, 32) != folder


def test_what_a_killed_writer_left_is_replaced(tmp_path):
    folder = ensure_generated(tmp_path, *SIZES)
    partial = tmp_path / f".{folder.name}.partial"
    folder.rename(partial)
    (partial / "00000.tar").write_bytes(b"half")
    assert len(Samples(ensure_generated(tmp_path, *SIZES), *SIZES)) == 64
    assert not partial.exists()


def test_two_processes_generate_at_once(tmp_path):
    code = f"""
from stable_diffusion import shards, synthetic
writing = synthetic.write
synthetic.write = lambda *args: (print("writes", flush=True), writing(*args))
folder = synthetic.ensure_generated({str(tmp_path)!r}, 16, 8, 64)
print(len(shards.Samples(folder, 16, 8, 64)))
"""
    processes = [subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE) for _ in range(3)]
    said = [process.communicate(timeout=60)[0].decode().split() for process in processes]
    assert all(process.returncode == 0 for process in processes)
    assert sorted(said) == [["64"], ["64"], ["writes", "64"]]


# --- the command


def command(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "stable_diffusion.data", *map(str, arguments)], cwd=ROOT, capture_output=True, text=True
    )


def test_the_command_writes_and_checks(tmp_path, capsys):
    sizes = ["--latent-size", 8, "--context-tokens", 4, "--context-dim", 16]
    written = command("--out", tmp_path / "o", "--shards", 2, "--samples", 6, *sizes)
    assert (written.returncode, written.stderr) == (0, "")
    assert "2 shards of 6 samples" in written.stdout
    sizes = [str(word) for word in sizes]
    assert data.main(["--check", str(tmp_path / "o"), *sizes]) == 0
    said = capsys.readouterr().out
    assert "samples     12 good, 0 dropped" in said and "moments float32, encodings float32" in said
    with tarfile.open(tmp_path / "o" / "00001.tar", "a") as tar:
        tar.addfile(tarfile.TarInfo("bad.pyd"))
    (tmp_path / "o" / "00002.tar").write_bytes(b"")
    assert data.main(["--check", str(tmp_path / "o"), *sizes]) == 1
    said = capsys.readouterr().out
    assert "samples     12 good, 2 dropped" in said
    assert "00001.tar: 1 dropped\n    bad           undecodable: Ran out of input\n" in said
    assert "00002.tar: 1 dropped\n    -             not a tar file: empty file\n" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "one of the arguments --out --check is required"),
        (["--out", "a", "--check", "b"], "argument --check: not allowed with argument --out"),
        (["--check", "/nowhere"], "--check /nowhere: no such folder"),
        (["--out", "{}"], "--out {}: has shards already, name another folder"),
        (["--out", "{}/a.tar/b"], "[Errno 20] Not a directory: '{}/a.tar/b'"),
        (["--out", "a", "--samples", "0"], "--samples takes a number from 1 up"),
        (["--out", "a", "--latent-size", "12"], "--latent-size takes a multiple of 8"),
        (["--out", "a", "--seed", "-1"], "--seed takes a number from 0 up"),
    ],
)
def test_mistakes_are_one_line_and_status_2(tmp_path, capsys, arguments, message):
    (tmp_path / "a.tar").write_text("")
    with pytest.raises(SystemExit) as ended:
        data.main([word.format(tmp_path) for word in arguments])
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"python -m stable_diffusion.data: {message.format(tmp_path)}\n"


def test_writing_and_help_need_no_torch(tmp_path):
    code = """
import json, sys
from stable_diffusion import data
data.main(["--out", sys.argv[1], "--shards", "1", "--samples", "1", "--latent-size", "8"])
print(json.dumps("torch" in sys.modules))
"""
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path / "o")], cwd=ROOT, capture_output=True, text=True)
    assert json.loads(ended.stdout.splitlines()[-1]) is False
