"""stable_diffusion/data: the format of shards, what is refused, the sequence of batches, generated samples."""

import json
import multiprocessing
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from common.training.data import safetensors_header
from stable_diffusion.data import shards
from stable_diffusion.data.batches import Batches
from stable_diffusion.data.shards import BadSample, Samples
from stable_diffusion.data.synthetic import ensure_generated, write

ROOT = Path(__file__).resolve().parents[2]
SIZES = (8, 4, 16)  # latent size, tokens, dim


def arrays(value=0.0):
    """One sample, all moments and encodings equal to `value`."""
    return {"moments": np.full((8, 8, 8), value, np.float32), "context": np.full((4, 16), value, np.float32)}


def write_shard(path, samples):
    """samples: key -> arrays by name."""
    shards.write_shard(path, samples.items())
    return path


def write_tensors(path, tensors, metadata=None):
    """Any tensors as a safetensors file, without the code that is tested. tensors: name -> (dtype, array)."""
    header, begin = {"__metadata__": metadata} if metadata else {}, 0
    for name, (dtype, array) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [begin, begin + array.nbytes]}
        begin += array.nbytes
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(array.tobytes() for _, array in tensors.values()))


@pytest.fixture
def folder(tmp_path):
    """Two shards of eight samples; sample i holds the number i."""
    for shard in range(2):
        numbers = range(8 * shard, 8 * shard + 8)
        write_shard(tmp_path / f"{shard:05d}.safetensors", {f"{number:09d}": arrays(number) for number in numbers})
    return tmp_path


def numbers(batch):
    """Return the sample numbers of a batch; check that moments and encodings are of the same samples."""
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


def test_written_shards_are_what_the_safetensors_package_says(tmp_path):
    package = pytest.importorskip("safetensors.numpy", reason="./setup.sh peft installs safetensors")
    (tmp_path / "out").mkdir()
    write(tmp_path / "out", 2, 3, 0, *SIZES)
    assert sorted(os.listdir(tmp_path / "out")) == ["00000.safetensors", "00001.safetensors"]
    stored = package.load_file(tmp_path / "out" / "00001.safetensors")
    assert {name: (array.shape, array.dtype) for name, array in stored.items()} == {
        "moments": ((3, 8, 8, 8), np.float32),
        "context": ((3, 4, 16), np.float32),
    }
    _, metadata = safetensors_header.read(tmp_path / "out" / "00001.safetensors", "")
    assert metadata == {"keys": "000010000\n000010001\n000010002"}
    read = Samples(tmp_path / "out", *SIZES).read(4)
    assert all(np.array_equal(read[name], stored[name][1]) for name in stored)


def test_shards_of_other_writers_need_no_keys(tmp_path):
    """The order of the tensors, further ones and metadata are theirs, too."""
    moments, context = np.zeros((3, 8, 8, 8), "<f2"), np.zeros((3, 4, 16), "<f4")
    moments[:] = np.arange(3).reshape(3, 1, 1, 1)
    more = np.arange(5, dtype="<i8")
    write_tensors(
        tmp_path / "a.safetensors", {"more": ("I64", more), "context": ("F32", context), "moments": ("F16", moments)}
    )
    samples = Samples(tmp_path, *SIZES)
    assert [samples.read(index)["moments"].max() for index in range(3)] == [0, 1, 2]
    assert samples.dtypes == {"moments": "float16", "context": "float32"}


def test_half_precision_is_read_as_it_is_stored(tmp_path):
    halves = {name: array.astype(np.float16) for name, array in arrays(2.5).items()}
    write_shard(tmp_path / "a.safetensors", {"0": halves, "1": halves})
    batches = Batches(Samples(tmp_path, *SIZES), 2)
    assert batches.dtypes == {"moments": torch.float16, "context": torch.float16}
    batch = batches.next()
    assert batch["moments"].dtype == torch.float16 and batch["moments"].shape == (2, 8, 8, 8)
    assert batch["moments"].unique().tolist() == [2.5]


def test_samples_of_many_shards_are_found(tmp_path):
    """Shards of one and of two samples, and one of none."""
    numbers = []
    for shard in range(35):
        count = 0 if shard == 5 else 1 + shard % 2
        moments, context = np.zeros((count, 8, 8, 8), "<f4"), np.zeros((count, 4, 16), "<f4")
        own = 10 * shard + np.arange(count)
        moments[:], context[:] = own.reshape(-1, 1, 1, 1), own.reshape(-1, 1, 1)
        write_tensors(tmp_path / f"{shard:05d}.safetensors", {"moments": ("F32", moments), "context": ("F32", context)})
        numbers += own.tolist()

    def held(samples):
        read = [samples.read(index) for index in range(len(samples))]
        assert all(np.unique(one["moments"]).tolist() == np.unique(one["context"]).tolist() for one in read)
        return [one["moments"].max() for one in read]

    samples = Samples(tmp_path, *SIZES)
    assert held(samples) == numbers and len(numbers) == 50
    assert held(samples.part(4, 9)) == numbers[4:9] == [30, 31, 40, 60, 70]
    assert held(samples.part(4, 9).part(2, 4)) == [40, 60]


def test_a_shard_appears_whole_or_not_at_all(tmp_path):
    def cut():
        yield "0", arrays()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        shards.write_shard(tmp_path / "a.safetensors", cut())
    assert os.listdir(tmp_path) == []


# --- samples and shards that are refused


def spoilt(name, value):
    sample = arrays()
    sample[name][..., 3] = value
    return sample


NAN = spoilt("moments", np.nan)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    ("sample", "reason"),
    [(NAN, "NaN or infinity in the moments"), (spoilt("context", -np.inf), "NaN or infinity in the context")],
)
def test_a_bad_sample_ends_training_in_one_line_that_names_it(folder, sample, reason, num_workers):
    order = flat(take(folder, 4))
    later = {f"{number:09d}": sample if number == 9 else arrays(number) for number in range(8, 16)}
    write_shard(folder / "00001.safetensors", later)
    batches = Batches(Samples(folder, *SIZES), 4, num_workers=num_workers)
    good = order.index(9) // 4
    assert [numbers(batches.next()) for _ in range(good)] == [order[4 * step : 4 * step + 4] for step in range(good)]
    with pytest.raises(ValueError) as caught:
        batches.next()
    assert str(caught.value) == f"--data: sample 1 of {folder}/00001.safetensors: {reason}"
    batches.close()


def test_a_sample_that_cannot_be_read_any_more_is_named(folder):
    samples = Samples(folder, *SIZES)
    (folder / "00001.safetensors").unlink()
    with pytest.raises(BadSample) as caught:
        samples.read(8)
    told = "cannot be read (No such file or directory)"
    assert str(caught.value) == f"--data: sample 0 of {folder}/00001.safetensors: {told}"
    assert samples.read(7)["moments"].max() == 7


def replace_by(content):
    return lambda path: path.write_bytes(content)


def cut(num_bytes):
    return lambda path: path.write_bytes(path.read_bytes()[:-num_bytes])


def holding(metadata=None, **changes):
    """A shard of eight good samples with other tensors in place of some; None: without it."""
    tensors = {"moments": ("F32", np.zeros((8, 8, 8, 8), "<f4")), "context": ("F32", np.zeros((8, 4, 16), "<f4"))}
    tensors = {name: value for name, value in (tensors | changes).items() if value is not None}
    return lambda path: write_tensors(path, tensors, metadata)


def of(dtype, *shape, kind="<f4"):
    return dtype, np.zeros(shape, kind)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (cut(1), "{} is truncated, it ends 1 bytes before context does"),
        (cut(8 * 4 * 16 * 4 + 5), "{} is truncated, it ends 5 bytes before moments does"),
        (replace_by(b"not a shard" * 1000), "{} is not a safetensors file"),
        (replace_by(b""), "{} is not a safetensors file"),
        (replace_by(bytes(10240)), "{} is not a safetensors file"),
        (replace_by(struct.pack("<Q", 100_000) + b"[" * 100_000), "the header of {} is damaged"),
        (holding(moments=None), "{} has no tensor moments"),
        (holding(context=None), "{} has no tensor context"),
        (holding(moments=of("F32", 8, 8, 16, 16)), "{} has moments of shape (8, 16, 16), not (8, 8, 8)"),
        (holding(moments=of("F32", 8, 1, 8, 8, 8)), "{} has moments of shape (1, 8, 8, 8), not (8, 8, 8)"),
        (holding(context=of("F32", 8, 4, 8)), "{} has context of shape (4, 8), not (4, 16)"),
        (holding(context=of("F32", 1)), "{} has context of shape (), not (4, 16)"),
        (holding(moments=of("F64", 8, 8, 8, 8, kind="<f8")), "{} has moments of dtype F64, not float32 or float16"),
        (
            holding(context=of("\x1b[31m", 8, 4, 16)),
            r"{} has context of dtype '\x1b[31m', not float32 or float16",
        ),
        (
            holding(moments=of("F16", 8, 8, 8, 8, kind="<f2")),
            "{} has moments of dtype float16 where earlier shards have float32",
        ),
        (holding(moments=of("F32", 7, 8, 8, 8)), "{} has 7 moments, 8 encodings"),
        (lambda path: (path.unlink(), path.mkdir()), "cannot read {} (Is a directory)"),
        (lambda path: (path.unlink(), os.mkfifo(path)), "cannot read {} (it is a pipe, a socket or a device)"),
    ],
)
def test_a_shard_that_cannot_be_used_is_refused_in_one_line_that_names_it(folder, damage, told):
    path = folder / "00001.safetensors"
    damage(path)
    with pytest.raises(ValueError) as caught:
        Samples(folder, *SIZES)
    assert str(caught.value) == "--data: " + told.format(path)


def test_a_shard_that_became_shorter_loses_its_last_samples(folder):
    samples = Samples(folder, *SIZES)
    cut(4 * 16 * 4)(folder / "00001.safetensors")
    with pytest.raises(BadSample, match=r"sample 7 of .*/00001.safetensors: the shard has become shorter$"):
        samples.read(15)
    assert samples.read(14)["moments"].max() == 14


def test_damaged_bytes_are_never_a_traceback(folder):
    generator = np.random.default_rng(0)
    path = folder / "00001.safetensors"
    whole = path.read_bytes()
    for _ in range(200):
        content = bytearray(whole)
        for place in generator.integers(0, 300, generator.integers(1, 5)):
            content[place] = generator.integers(256)
        path.write_bytes(content)
        try:
            samples = Samples(folder, *SIZES)
            for index in (0, len(samples) - 1):
                samples.read(index)
        except ValueError as error:
            assert "\n" not in str(error) and str(error).startswith("--data: ")


def test_limits_are_one_line(folder, monkeypatch):
    monkeypatch.setattr(shards, "MAX_ROWS", 15)
    with pytest.raises(ValueError, match="^--data .*: 16 samples, at most 15 are read$"):
        Samples(folder, *SIZES)
    monkeypatch.setattr(shards, "MAX_HEADER_BYTES", 15)
    with pytest.raises(ValueError, match="^--data: .*/00000.safetensors has a header of [0-9]+ bytes, at most 15 are"):
        Samples(folder, *SIZES)


def test_other_files_beside_the_shards_are_left_alone(folder):
    (folder / "sha512sums.txt").write_text("sums")
    (folder / ".00002.safetensors.partial").write_text("half")
    (folder / ".00002.safetensors").write_text("hidden")
    assert len(Samples(folder, *SIZES)) == 16


def test_keys_are_kept_one_a_line(tmp_path):
    keys = {"part/00000001": "part/00000001", "k" * 300: "k" * 200, "caf\u00e9": "caf\u00e9", "a\nb\x1b[1m": "a?b?[1m"}
    path = write_shard(tmp_path / "a.safetensors", {key: arrays(place) for place, key in enumerate(keys)})
    assert safetensors_header.read(path, "")[1]["keys"].split("\n") == list(keys.values())
    samples = Samples(tmp_path, *SIZES)
    assert [samples.read(index)["moments"].max() for index in range(4)] == [0, 1, 2, 3]


# --- folders that cannot be used


def test_folders_without_samples_end_in_one_line_that_names_data(tmp_path):
    def refusal():
        with pytest.raises(ValueError) as error:
            Samples(tmp_path / "d", *SIZES)
        assert "\n" not in str(error.value)
        return str(error.value).replace(str(tmp_path), "")

    assert refusal() == "--data /d: cannot be read (No such file or directory)"
    (tmp_path / "d").write_text("")
    assert refusal() == "--data /d: cannot be read (Not a directory)"
    (tmp_path / "d").unlink()
    (tmp_path / "d").mkdir()
    assert refusal() == "--data /d: no shards (*.safetensors) in it"
    (tmp_path / "d" / "00000.safetensors").write_bytes(b"")
    assert refusal() == "--data: /d/00000.safetensors is not a safetensors file"


def test_all_samples_of_other_sizes_are_refused_at_once(folder):
    with pytest.raises(
        ValueError, match=r"^--data: .*/00000.safetensors has moments of shape \(8, 8, 8\), not \(8, 64"
    ):
        Samples(folder, 64, 4, 16)


def test_too_few_samples_end_in_one_line_that_names_batch_and_data(folder):
    samples = Samples(folder, *SIZES)
    with pytest.raises(ValueError) as error:
        Batches(samples, 6, rank=2, world_size=3)
    assert str(error.value) == (
        f"--data {folder}: 16 samples, --batch 6 on 3 ranks takes 18: give more shards or a smaller --batch"
    )
    with pytest.raises(ValueError, match=r": 16 samples, --batch 17 takes 17: give more shards or a smaller --batch$"):
        Batches(samples, 17)
    assert len(numbers(Batches(samples, 16).next())) == 16
    empty = {"moments": of("F32", 0, 8, 8, 8), "context": of("F32", 0, 4, 16)}
    for path in folder.iterdir():
        write_tensors(path, empty)
    with pytest.raises(ValueError, match=r": 0 samples, --batch 1 takes 1: "):
        Batches(Samples(folder, *SIZES), 1)


# --- the sequence of batches


def test_the_sequence_depends_on_the_seed_alone(folder):
    expected = take(folder, 9)
    assert take(folder, 9, num_workers=1) == expected
    assert take(folder, 9, num_workers=2) == expected
    assert take(folder, 9, seed=1) != expected


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
    batches = Batches(Samples(folder, *SIZES), 4, num_workers=num_workers)
    workers = {process.pid for process in multiprocessing.active_children()}
    assert len(workers) == num_workers
    first = [numbers(batches.next()) for _ in range(7)]
    for count in (0, 3, 7):
        batches.reset()
        assert [numbers(batches.next()) for _ in range(count)] == first[:count]
    assert {process.pid for process in multiprocessing.active_children()} == workers
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
from stable_diffusion.data.batches import Batches
from stable_diffusion.data.shards import Samples
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


def amplitude_slope(power):
    """Slope of log amplitude over log frequency, from a power spectrum [size, size] as fft2 orders it; -1 is 1/f."""
    size = len(power)
    rows = np.fft.fftfreq(size, 1 / size)[:, None]
    frequency = np.rint(np.hypot(rows, rows.T)).astype(int)
    rings = np.arange(1, size // 2)
    amplitude = np.sqrt([power[frequency == ring].mean() for ring in rings])
    return float(np.polyfit(np.log(rings), np.log(amplitude), 1)[0])


def test_means_have_the_spectrum_of_images_and_latents_of_variance_one(generated):
    mean, log_variance = np.split(generated["moments"].astype(np.float64), 2, axis=1)
    latents = 0.18215 * (mean + np.exp(0.5 * log_variance) * np.random.default_rng(0).standard_normal(mean.shape))
    assert np.allclose(latents.std(axis=(0, 2, 3)), 1, atol=0.1)
    power = (np.abs(np.fft.fft2(mean)) ** 2).mean(axis=0)
    assert [amplitude_slope(plane) for plane in power] == pytest.approx([-1] * 4, abs=0.1)
    white = np.abs(np.fft.fft2(np.random.default_rng(0).standard_normal((64, 64)))) ** 2
    assert amplitude_slope(white) == pytest.approx(0, abs=0.1)


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
    for name in "abcd":
        (tmp_path / name).mkdir()
    write(tmp_path / "a", 2, 3, 7, *SIZES)
    write(tmp_path / "b", 2, 3, 7, *SIZES)
    assert (tmp_path / "a" / "00001.safetensors").read_bytes() == (tmp_path / "b" / "00001.safetensors").read_bytes()
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
    (partial / "00000.safetensors").write_bytes(b"half")
    assert len(Samples(ensure_generated(tmp_path, *SIZES), *SIZES)) == 64
    assert not partial.exists()


def test_two_processes_generate_at_once(tmp_path):
    code = f"""
from stable_diffusion.data import shards, synthetic
writing = synthetic.write
synthetic.write = lambda *args: (print("writes", flush=True), writing(*args))
folder = synthetic.ensure_generated({str(tmp_path)!r}, 16, 8, 64)
print(len(shards.Samples(folder, 16, 8, 64)))
"""
    processes = [subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE) for _ in range(3)]
    said = [process.communicate(timeout=60)[0].decode().split() for process in processes]
    assert all(process.returncode == 0 for process in processes)
    assert sorted(said) == [["64"], ["64"], ["writes", "64"]]


def test_making_shards_needs_no_torch(tmp_path):
    code = f"""
import sys
from stable_diffusion.data import shards, synthetic
synthetic.write({str(tmp_path)!r}, 1, 2, 0, *{SIZES})
print(len(shards.Samples({str(tmp_path)!r}, *{SIZES})), "torch" in sys.modules)
"""
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (ended.stdout, ended.stderr) == ("2 False\n", "")
