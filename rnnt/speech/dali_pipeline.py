"""The benchmark's DALI pipeline: FLAC files in, normalised log-mel features out, on the CPU or on a GPU.

It decodes, resamples and trims silence on the CPU; dither, pre-emphasis, spectrogram, mel, dB, normalise and pad run on
the GPU where there is one. Order and numbers are those of NVIDIA's submission to MLPerf v3.1,
common/data/dali/pipeline.py. One difference: the host draws the random numbers, so that any batch can be made again.

Needs nvidia-dali: ./setup.sh dali.
"""

import math

import numpy as np
import torch
from nvidia.dali import fn, pipeline_def, types
from nvidia.dali.plugin.pytorch import feed_ndarray

from rnnt.speech.features import NUM_MELS
from rnnt.speech.folder import HOP, SAMPLE_RATE, num_frames, require_decodable

FFT_SIZE = 512
WINDOW = 320
PREEMPHASIS = 0.97
DITHER = 1e-5
SILENCE_DB = -60.0
SILENCE_WINDOW = 2048
LOG_FLOOR = 1e-20


@pipeline_def
def _pipeline(noise, on_gpu):
    encoded = fn.external_source(name="encoded", dtype=types.UINT8, ndim=1)
    scale = fn.external_source(name="scale", dtype=types.FLOAT, ndim=0)
    audio, _ = fn.decoders.audio(encoded, dtype=types.FLOAT, downmix=True)
    loudness = fn.reductions.rms(audio)
    audio = fn.audio_resample(audio, scale=scale)
    begin, length = fn.nonsilent_region(audio, cutoff_db=SILENCE_DB, window_length=SILENCE_WINDOW)
    audio = fn.slice(audio, start=begin, shape=length, axes=[0])
    if on_gpu:
        audio = audio.gpu()
    offset = fn.external_source(name="offset", dtype=types.INT32, ndim=0)
    table = types.Constant(noise, device="gpu" if on_gpu else "cpu")
    audio = audio + fn.slice(table, start=offset, shape=length, axes=[0])
    audio = fn.preemphasis_filter(audio, preemph_coeff=PREEMPHASIS)
    power = fn.spectrogram(audio, nfft=FFT_SIZE, window_length=WINDOW, window_step=HOP)
    mel = fn.mel_filter_bank(power, sample_rate=SAMPLE_RATE, nfilter=NUM_MELS)
    # Decibels with multiplier ln(10) over a reference of 1 are ln.
    log = fn.to_decibels(mel, multiplier=math.log(10), reference=1.0, cutoff_db=math.log(LOG_FLOOR))
    return fn.pad(fn.normalize(log, axes=[1])), length, loudness


class DaliExtractor:
    """Features of batches of FLAC files, on CUDA made on the current stream."""

    def __init__(self, batch: int, max_samples: int, workers: int, device: torch.device):
        """max_samples: longest utterance, above all offsets into the dither's table. workers: threads that decode."""
        self.device = device
        on_gpu = device.type == "cuda"
        # One table of dither, from random offsets: two million numbers a batch would cost the host more than the rest.
        table = np.random.default_rng(0).standard_normal(2 * max_samples, dtype=np.float32)
        self._pipe = _pipeline(
            np.float32(DITHER) * table,
            on_gpu,
            batch_size=batch,
            num_threads=workers,
            device_id=device.index or 0 if on_gpu else None,
            prefetch_queue_depth=1,  # the caller's thread makes batches ahead
        )
        self._pipe.build()

    def __call__(self, paths: list[str], scales: list[float], offsets: list[int]):
        """(features FP32 [B, 80, frames of 10 ms] on the device, frames of each utterance).

        scales: new sample rate over old. offsets: into the dither. A file that cannot be decoded or is silent ends the
        run: ValueError that names it.
        """
        inputs = {"scale": np.float32(scales), "offset": np.int32(offsets)}
        stream = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None
        try:
            encoded = [np.fromfile(path, np.uint8) for path in paths]
            features, *others = self._pipe.run(stream, encoded=encoded, **inputs)
        except (OSError, RuntimeError):
            for path in paths:
                require_decodable(path)  # DALI does not name the file
            raise
        lengths, loudness = ([values.at(row).item() for row in range(len(paths))] for values in others)
        if not all(loudness):
            raise ValueError(f"--data: {paths[loudness.index(0.0)]} holds nothing but silence")
        out = torch.empty([len(paths), *features.shape()[0]], device=self.device)
        feed_ndarray(features.as_tensor(), out, cuda_stream=stream)
        return out, [num_frames(length) for length in lengths]
