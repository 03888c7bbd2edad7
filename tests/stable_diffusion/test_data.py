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
import safetensors.numpy
import torch

from common.data import safetensors_file
from stable_diffusion.data import shards
from stable_diffusion.data.batches import Batches
from stable_diffusion.data.shards import Samples
from stable_diffusion.data.synthetic import ensure_generated, write
from tests.helpers import contracts, forked

ROOT = Path(__file__).resolve().parents[2]
SIZES = (8, 4, 16)  # latent size, tokens, dim


def arrays(value=0.0, dtype=np.float32):
    """One sample, all moments and encodings equal to `value`."""
    return {"moments": np.full((8, 8, 8), value, dtype), "context": np.full((4, 16), value, dtype)}


def write_tensors(path, tensors):
    """Any tensors as a safetensors file, without the code that is tested. tensors: name -> (dtype, array)."""
    header, begin = {}, 0
    for name, (dtype, array) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [begin, begin + array.nbytes]}
        begin += array.nbytes
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(array.tobytes() for _, array in tensors.values()))


def write_shard(path, samples):
    samples = list(samples)
    safetensors.numpy.save_file({name: np.stack([each[name] for each in samples]) for name in shards.NAMES}, path)


@pytest.fixture
def folder(tmp_path):
    """Two shards of eight samples; sample i holds the number i."""
    for shard in range(2):
        numbers = range(8 * shard, 8 * shard + 8)
        write_shard(tmp_path / f"{shard:05d}.safetensors", map(arrays, numbers))
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
    write(tmp_path, 2, 3, 0, *SIZES)
    assert sorted(os.listdir(tmp_path)) == ["00000.safetensors", "00001.safetensors"]
    stored = safetensors.numpy.load_file(tmp_path / "00001.safetensors")
    assert {name: (array.shape, array.dtype) for name, array in stored.items()} == {
        "moments": ((3, 8, 8, 8), np.float32),
        "context": ((3, 4, 16), np.float32),
    }
    read = Samples(tmp_path, *SIZES).read(4)
    assert all(np.array_equal(read[name], stored[name][1]) for name in stored)


def test_half_precision_is_read_as_it_is_stored(tmp_path):
    """From another writer: the order of the tensors and further ones are theirs."""
    moments, context = np.full((2, 8, 8, 8), 2.5, "<f2"), np.zeros((2, 4, 16), "<f4")
    more = np.arange(5, dtype="<i8")
    stored = {"more": ("I64", more), "context": ("F32", context), "moments": ("F16", moments)}
    write_tensors(tmp_path / "a.safetensors", stored)
    batches = Batches(Samples(tmp_path, *SIZES), 2)
    assert batches.dtypes == {"moments": torch.float16, "context": torch.float32}
    batch = batches.next()
    assert batch["moments"].dtype == torch.float16 and batch["moments"].shape == (2, 8, 8, 8)
    assert batch["moments"].unique().tolist() == [2.5]


def test_samples_of_many_shards_are_found(tmp_path):
    """Shards of one and of two samples, and one of none."""
    numbers = []
    for shard in range(9):
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
    assert held(samples) == numbers and len(numbers) == 11


# --- samples, shards and folders that are refused


@pytest.mark.parametrize(("num_workers", "name", "value"), [(0, "moments", np.nan), (2, "context", -np.inf)])
def test_a_bad_sample_ends_training_in_one_line_that_names_it(folder, num_workers, name, value):
    order = flat(take(folder, 4))
    samples = {number: arrays(number) for number in range(8, 16)}
    samples[9][name][..., 3] = value
    write_shard(folder / "00001.safetensors", samples.values())
    batches = Batches(Samples(folder, *SIZES), 4, num_workers=num_workers)
    good = order.index(9) // 4
    assert [numbers(batches.next()) for _ in range(good)] == [order[4 * step : 4 * step + 4] for step in range(good)]
    with pytest.raises(ValueError) as caught:
        batches.next()
    assert str(caught.value) == f"--data: sample 1 of {folder}/00001.safetensors: NaN or infinity in the {name}"
    batches.close()


def test_a_sample_that_cannot_be_read_any_more_is_named(folder):
    samples = Samples(folder, *SIZES)
    cut(4 * 16 * 4)(folder / "00001.safetensors")
    with pytest.raises(ValueError, match=r"sample 7 of .*/00001.safetensors: cannot be read \(.*not fully covered\)$"):
        samples.read(15)
    (folder / "00001.safetensors").unlink()
    with pytest.raises(ValueError, match=r"^--data: sample 0 of .*/00001.safetensors: cannot be read \(No such file"):
        samples.read(8)
    assert samples.read(7)["moments"].max() == 7


def replace_by(content):
    return lambda path: path.write_bytes(content)


def cut(num_bytes):
    return lambda path: path.write_bytes(path.read_bytes()[:-num_bytes])


def holding(**changes):
    """A shard of eight good samples with other tensors in place of some; None: without it."""
    tensors = {"moments": ("F32", np.zeros((8, 8, 8, 8), "<f4")), "context": ("F32", np.zeros((8, 4, 16), "<f4"))}
    tensors = {name: value for name, value in (tensors | changes).items() if value is not None}
    return lambda path: write_tensors(path, tensors)


def of(dtype, *shape, kind="<f4"):
    return dtype, np.zeros(shape, kind)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (cut(1), "truncated"),
        (replace_by(bytes(10240)), "not a safetensors file"),
        (holding(moments=None), "has no tensor moments"),
        (holding(moments=of("F32", 8, 8, 16, 16)), r"moments of dtype F32 and shape \(8, 16, 16\), not .*\(8, 8, 8\)"),
        (holding(context=of("F32", 1)), r"context of dtype F32 and shape \(\), not .*\(4, 16\)"),
        (holding(moments=of("F64", 8, 8, 8, 8, kind="<f8")), "moments of dtype F64 .*not float32 "),
        (holding(moments=of("F32", 7, 8, 8, 8)), "has 7 moments, 8 encodings"),
        (lambda path: (path.unlink(), os.mkfifo(path)), "a pipe"),
    ],
)
def test_a_shard_that_cannot_be_used_is_refused_in_one_line_that_names_it(folder, damage, told):
    path = folder / "00001.safetensors"
    damage(path)
    with pytest.raises(ValueError, match=told) as caught:
        Samples(folder, *SIZES)
    said = str(caught.value)
    assert said.startswith("--data: ") and str(path) in said and said.isprintable()


def test_limits_are_one_line(folder, monkeypatch):
    monkeypatch.setattr(shards, "MAX_ROWS", 15)
    with pytest.raises(ValueError, match="^--data .*: 16 samples, at most 15 are read$"):
        Samples(folder, *SIZES)
    monkeypatch.setattr(safetensors_file, "MAX_HEADER_BYTES", 15)
    with pytest.raises(ValueError, match="^--data: .*/00000.safetensors .*15 are"):
        Samples(folder, *SIZES)


def test_other_files_beside_the_shards_are_left_alone(folder):
    for name in ("sha512sums.txt", ".00002.safetensors.partial", ".00002.safetensors", "0.tar"):
        (folder / name).write_text("sums")
    assert len(Samples(folder, *SIZES)) == 16


def test_folders_without_samples_end_in_one_line_that_names_data(tmp_path):
    def refusal():
        with pytest.raises(ValueError) as error:
            Samples(tmp_path / "d", *SIZES)
        return str(error.value).replace(str(tmp_path), "")

    assert refusal() == "--data /d: cannot be read (No such file or directory)"
    (tmp_path / "d").mkdir()
    assert refusal() == "--data /d: no shards (*.safetensors) in it"
    # MLPerf's files are pickles in tar files: none is read.
    (tmp_path / "d" / "0.tar").write_text("pickles")
    assert refusal() == "--data /d: no shards (*.safetensors) in it"


def test_a_folder_without_samples_ends_training_before_anything_is_built(tmp_path, monkeypatch):
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    arguments = ["--preset", "tiny", "--variant", "eager", "--data", str(tmp_path)]
    answer = forked.run("stable_diffusion.train", arguments, environment, timeout_s=300)
    assert answer.returncode == 2 and answer.stdout.splitlines()[1:] == ["building stable_diffusion/tiny"], answer
    assert answer.stderr.splitlines()[-1].endswith("no shards (*.safetensors) in it")
    monkeypatch.setattr("stable_diffusion.train.State", None)
    with pytest.raises(ValueError, match=r"no shards \(\*.safetensors\) in it"):
        contracts.model("stable_diffusion", *arguments).build()


def test_too_few_samples_end_in_one_line_that_names_batch_and_data(folder):
    samples = Samples(folder, *SIZES)
    with pytest.raises(ValueError) as error:
        Batches(samples, 6, rank=2, world_size=3)
    assert str(error.value) == (
        f"--data {folder}: 16 samples, --batch 6 on 3 ranks takes 18: give more shards or a smaller --batch"
    )
    assert len(numbers(Batches(samples, 16).next())) == 16


# --- the sequence of batches


def test_the_sequence_depends_on_the_seed_alone(folder):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    expected = take(folder, 9)
    assert take(folder, 9, num_workers=2) == expected
    assert take(folder, 9, seed=1) != expected
    assert torch.equal(torch.get_rng_state(), before)


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
def test_reset_begins_again_and_close_ends_the_workers(folder, num_workers):
    batches = Batches(Samples(folder, *SIZES), 4, num_workers=num_workers)
    workers = {process.pid for process in multiprocessing.active_children()}
    assert len(workers) == num_workers
    first = [numbers(batches.next()) for _ in range(7)]
    for count in (0, 3, 7):
        batches.reset()
        assert [numbers(batches.next()) for _ in range(count)] == first[:count]
    assert {process.pid for process in multiprocessing.active_children()} == workers
    batches.close()
    batches.close()
    assert multiprocessing.active_children() == []


def test_a_batch_is_not_changed_by_the_next_one(folder):
    batches = Batches(Samples(folder, *SIZES), 4)
    first = batches.next()
    kept = first["moments"].clone()
    first["context"].zero_()  # theirs to write to
    batches.next()
    assert torch.equal(first["moments"], kept)


@pytest.mark.slow
def test_a_process_ends_quietly_without_close(folder):
    code = f"""
from stable_diffusion.data.batches import Batches
from stable_diffusion.data.shards import Samples
batches = Batches(Samples({str(folder)!r}, *{SIZES}), 4, num_workers=2)
batches.next()
batches.reset()
raise SystemExit(3)
"""
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, "", "")


# --- generated samples


def amplitude_slope(power):
    """Slope of log amplitude over log frequency, from a power spectrum [size, size] as fft2 orders it; -1 is 1/f."""
    size = len(power)
    rows = np.fft.fftfreq(size, 1 / size)[:, None]
    frequency = np.rint(np.hypot(rows, rows.T)).astype(int)
    rings = np.arange(1, size // 2)
    amplitude = np.sqrt([power[frequency == ring].mean() for ring in rings])
    return float(np.polyfit(np.log(rings), np.log(amplitude), 1)[0])


def test_generated_samples_look_like_images_and_captions(tmp_path):
    """At the real size of the moments, with short encodings."""
    write(tmp_path, 1, 64, 0, 64, 77, 256)
    samples = Samples(tmp_path, 64, 77, 256)
    read = [samples.read(index) for index in range(64)]
    moments, context = (np.stack([sample[name] for sample in read]).astype(float) for name in shards.NAMES)
    mean, log_variance = np.split(moments, 2, axis=1)
    assert np.allclose(0.18215 * mean.std(axis=(0, 2, 3)), 1, atol=0.1)
    power = (np.abs(np.fft.fft2(mean)) ** 2).mean(axis=0)
    assert [amplitude_slope(plane) for plane in power] == pytest.approx([-1] * 4, abs=0.1)
    assert log_variance.min() >= -25 and log_variance.max() <= -9 and 1.5 < log_variance.std() < 4
    assert np.all(context[:, 0] == context[0, 0])  # nothing precedes the start
    assert context.mean() == pytest.approx(0, abs=1e-3) and context.std() == pytest.approx(1, rel=1e-3)
    # The first row that is as the last one is: where the padding begins.
    lengths = [next(row for row in range(77) if np.corrcoef(s[row], s[-1])[0, 1] > 0.8) for s in context]
    assert 5 < np.median(lengths) < 30 and len(set(lengths)) > 10


def test_generated_content_depends_on_seed_and_place_alone(tmp_path):
    for name, *arguments in (("a", 2, 3, 7), ("b", 1, 6, 7), ("c", 1, 6, 8)):
        (tmp_path / name).mkdir()
        write(tmp_path / name, *arguments, *SIZES)
    two, one, other = (Samples(tmp_path / name, *SIZES) for name in "abc")
    for index in range(6):
        for name in ("moments", "context"):
            assert np.array_equal(two.read(index)[name], one.read(index)[name])
            assert not np.array_equal(two.read(index)[name], other.read(index)[name])
    assert not np.array_equal(one.read(0)["moments"], one.read(1)["moments"])


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_short_contexts_are_generated_too(tmp_path, tokens):
    write(tmp_path, 1, 4, 0, 8, tokens, 16)
    assert len(Samples(tmp_path, 8, tokens, 16)) == 4


def test_generated_shards_are_written_once_and_whole(tmp_path):
    folder = ensure_generated(tmp_path / "cache", *SIZES)
    assert folder.parent == tmp_path / "cache" and len(Samples(folder, *SIZES)) == 64
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert ensure_generated(tmp_path / "cache", *SIZES) == folder
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    assert ensure_generated(tmp_path / "cache", 8, 4, 32) != folder
    # As a killed writer leaves it.
    partial = folder.with_name(f".{folder.name}.partial")
    folder.rename(partial)
    (partial / "00000.safetensors").write_bytes(b"half")
    assert len(Samples(ensure_generated(tmp_path / "cache", *SIZES), *SIZES)) == 64
    assert not partial.exists()


def test_processes_generate_at_once_and_without_torch(tmp_path):
    code = f"""
import sys
from stable_diffusion.data import shards, synthetic
writing = synthetic.write
synthetic.write = lambda *args: (print("writes", flush=True), writing(*args))
folder = synthetic.ensure_generated({str(tmp_path)!r}, 16, 8, 64)
print(len(shards.Samples(folder, 16, 8, 64)), "torch" in sys.modules)
"""
    processes = [subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE) for _ in range(3)]
    said = [process.communicate(timeout=300)[0].decode().split() for process in processes]
    assert all(process.returncode == 0 for process in processes)
    assert sorted(said) == [["64", "False"], ["64", "False"], ["writes", "64", "False"]]
