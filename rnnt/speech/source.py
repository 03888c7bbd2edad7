"""Batches of real speech, made ahead of the step.

    source = open_speech(config, device, rank, world_size, torch.float16, seed=1, training=True)
    batch = source.next()           a Batch (rnnt/data/batches.py); its transcripts are in source.texts
    source.reset()                  batch 0 again, bit for bit

Training: every epoch is shuffled anew from (seed, epoch). A step of all ranks takes the next batch * world_size
utterances, and the last ones that do not fill a step are left out. Speed, dither and masks of a batch are drawn from
(seed, rank, its number), so a batch can be made again without those before it.

Evaluation: the same utterances in the order of their names, at their own speed, without masks. Dither is added as in
training, but always the same: the logarithm of samples that are zero would lie far below all values of training. The
last batch of a pass is filled up with further utterances, for which `texts` has no entry.

Files that cannot be decoded, or hold no speech, are found here. In the place of each the batch takes the rank's next
good utterance beyond the batch. So the sequence depends on the files only, and a transcript stays with its audio.
"""

import collections
import concurrent.futures
import functools
import io
import itertools
import sys

import numpy as np
import torch

from rnnt.config import Config, limits
from rnnt.data.batches import Batch
from rnnt.speech import features, transcripts
from rnnt.speech import folder as speech_folder
from rnnt.speech.folder import SAMPLE_RATE, BadAudio, Corpus, Dropped, num_frames, require_room, resampled, spliced

# Batches that are made, or being made, before they are asked for.
AHEAD = 3
# Batches that buckets are chosen by.
NUM_SCANNED = 64
# A recording must have this share left without the silence at its ends.
LEAST_SHARE = 0.1
# Dropped files that stderr names; further ones are counted.
MAX_NAMED = 10


def open_speech(
    config: Config, device: torch.device, rank: int, world_size: int, dtype: torch.dtype, seed: int, training: bool
) -> "Speech":
    """The source of batches for --data with a folder in LibriSpeech's layout.

    Features come in `dtype`, on the device. Raises ValueError that names the flag to change.
    """
    # The same scan for training and evaluation, though evaluation needs no room for slowing down.
    found = _scan(config.data, config.tokenizer, config.vocab, *limits(config), config.speed_perturbation)
    return Speech(found, config, device, rank, world_size, dtype, seed, training)


@functools.lru_cache(maxsize=1)
def _scan(folder, tokenizer, vocab, max_frames, max_tokens, perturbed):
    return Corpus(folder, transcripts.open_tokenizer(tokenizer, vocab), max_frames, max_tokens, perturbed)


class Speech:
    """A source of batches of speech, see rnnt/data/batches.py.

    `texts`: normalised transcripts of the batch that `next` gave last. `dropped`: list of speech_folder.Dropped.
    `num_batches`: of this rank in one pass over the utterances. `max_frames`, `max_tokens`: longest utterance, at its
    slowest.

    A thread makes batches ahead, on CUDA on a stream of its own. `next` waits for that thread where no batch is ready,
    and lets the current stream wait for the features.
    """

    # Lengths never come again.
    period = None

    def __init__(self, found: Corpus, config: Config, device, rank, world_size, dtype, seed, training):
        self.corpus, self.config, self.device, self.dtype = found, config, torch.device(device), dtype
        self.rank, self.world_size, self.seed, self.training = rank, world_size, seed, training
        self.perturbed = training and config.speed_perturbation
        # Rows of utterances that decoding showed to be bad, or to be good in spite of long silence.
        self._bad, self._good = set(), set()
        self.dropped = list(found.dropped)
        if rank == 0 and training:
            self._tell_of_folder()
        step, count = config.batch * world_size, len(found.utterances)
        self.num_batches = count // step if training else -(-count // step)
        self._require_enough()
        self._permutation = (None, None)
        slowest = speech_folder.SLOWEST if self.perturbed else 1.0
        longest = max(resampled(one.num_samples, slowest * SAMPLE_RATE / one.sample_rate) for one in found.utterances)
        self.max_frames = spliced(num_frames(longest))
        self.max_tokens = max(len(one.tokens) for one in found.utterances)
        noise = features.make_noise(longest)
        self._max_offset = noise.max_offset
        self._extract = _make_extractor(config, noise, self.device)
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._thread = concurrent.futures.ThreadPoolExecutor(1)
        self._pending, self._numbers = collections.deque(), itertools.count()
        self.texts: list[str] = []

    @property
    def num_samples(self) -> int:
        """Utterances to train on."""
        return len(self.corpus.utterances) - len(self._bad)

    def next(self) -> Batch:
        """The next batch, ready for work on the current stream."""
        while len(self._pending) < AHEAD + 1:
            self._pending.append(self._thread.submit(self._make_on_stream, next(self._numbers)))
        # An error stays in front: the next call raises it again.
        batch, self.texts, event = self._pending[0].result()
        self._pending.popleft()
        if event is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(event)
            batch.features.record_stream(stream)
        return batch

    def reset(self) -> None:
        """Start again at batch 0; batches made ahead are thrown away."""
        for future in self._pending:
            future.cancel()
        concurrent.futures.wait(self._pending)
        self._pending.clear()
        self._numbers = itertools.count()

    def close(self) -> None:
        """End the thread, and print the number of dropped files where not all were named. Can be called again."""
        self.reset()
        self._thread.shutdown()
        if self._extract is not None and self.training and len(self.dropped) > MAX_NAMED:
            print(f"data: {len(self.dropped)} dropped in all", file=sys.stderr)
        self._extract = None

    def batch_shapes(self) -> list[tuple[int, int]]:
        """(T, U) of this rank's first batches: lengths of speech are known only from its features."""
        shapes = [self.next().shape for _ in range(NUM_SCANNED)]
        self.reset()
        return shapes

    def _make_on_stream(self, number):
        if self._stream is None:
            return *self.make(number), None
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            batch, texts = self.make(number)
            event = torch.cuda.Event(blocking=True)
            event.record(self._stream)
            # Only this thread waits: afterwards the host memory of the copies may be used again.
            event.synchronize()
        return batch, texts, event

    # -- one batch

    def make(self, number: int) -> tuple[Batch, list[str]]:
        """Batch `number` and its transcripts, from (seed, rank, number) and the files."""
        draws = np.random.default_rng([self.seed, self.rank, number])
        size = self.config.batch
        factors = draws.uniform(speech_folder.FASTEST, speech_folder.SLOWEST, size) if self.perturbed else np.ones(size)
        offsets = draws.integers(self._max_offset, size=size).tolist() if self.training else [0] * size
        rows, num_texts, mel, frames = self._read(number, factors.tolist(), offsets)
        chosen = [self.corpus.utterances[row] for row in rows]
        lengths, masks = torch.tensor([spliced(count) for count in frames], dtype=torch.int32), None
        if self.training and self.config.spec_augment:
            masks = self._upload(torch.from_numpy(features.draw_masks(draws, frames)))
        finished = features.finish(self._upload(mel), self._upload(lengths), masks, self.config.features, self.dtype)
        token_lengths = torch.tensor([len(one.tokens) for one in chosen], dtype=torch.int32)
        tokens = torch.nn.utils.rnn.pad_sequence([torch.tensor(one.tokens) for one in chosen], batch_first=True)
        host = (self._pinned(tensor) for tensor in (lengths, tokens, token_lengths))
        return Batch(finished, *host), [one.text for one in chosen[:num_texts]]

    def _read(self, number, factors, offsets):
        """(rows, number of texts, features [B, 80, T], frames of 10 ms of each), all good, of batch `number`."""
        while True:
            rows, num_texts = self._rows(number)
            chosen = [self.corpus.utterances[row] for row in rows]
            scales = [factor * SAMPLE_RATE / one.sample_rate for factor, one in zip(factors, chosen, strict=True)]
            encoded, faults = [], {}
            for place, one in enumerate(chosen):
                try:
                    encoded.append(np.fromfile(one.path, np.uint8))
                except OSError as error:
                    faults[place] = BadAudio(f"cannot be read: {error.strerror}")
            if not faults:
                answer = self._extract(encoded, scales, offsets)
                faults = answer if isinstance(answer, dict) else self._silent(rows, encoded, scales, answer[1])
                if not faults:
                    return rows, num_texts, *answer
            for place, error in faults.items():
                if rows[place] not in self._bad:
                    self._bad.add(rows[place])
                    self.dropped.append(Dropped(chosen[place].name, str(error)))
                    self._tell_of(self.dropped[-1])
            self._require_enough()

    def _silent(self, rows, encoded, scales, frames):
        """{place: BadAudio} where little is left without silence, as of a click: no pair with its transcript.

        An utterance's own speed decides, so that the draws of its batch do not matter.
        """
        faults = {}
        for place, (row, scale, left) in enumerate(zip(rows, scales, frames, strict=True)):
            one = self.corpus.utterances[row]
            if row in self._good or left > num_frames(resampled(one.num_samples, scale)) / 2:
                continue
            scale = SAMPLE_RATE / one.sample_rate
            _, (left,) = self._extract(encoded[place : place + 1], [scale], [0])
            try:
                require_share(left, num_frames(resampled(one.num_samples, scale)))
                require_room(left, len(one.tokens))
                self._good.add(row)
            except BadAudio as error:
                faults[place] = error
        return faults

    def _rows(self, number):
        """(utterances of batch `number` without bad ones, number of them that do not fill up the batch)."""
        count, batch = len(self.corpus.utterances), self.config.batch
        if self.training:
            later = itertools.chain.from_iterable(self._indices(after) for after in itertools.count(number))
            good = (index for index in later if index not in self._bad)
            return list(itertools.islice(good, batch)), batch
        start = (number % self.num_batches * self.world_size + self.rank) * batch
        own = [index for index in range(start, min(start + batch, count)) if index not in self._bad]
        filling = (index for index in itertools.cycle(range(count)) if index not in self._bad)
        return own + list(itertools.islice(filling, batch - len(own))), len(own)

    def _indices(self, number):
        """This rank's utterances in training step `number` if all are good."""
        epoch, step = divmod(number, self.num_batches)
        if self._permutation[0] != epoch:
            generator = np.random.default_rng([self.seed, epoch])
            self._permutation = epoch, generator.permutation(len(self.corpus.utterances))
        start = (step * self.world_size + self.rank) * self.config.batch
        return self._permutation[1][start : start + self.config.batch].tolist()

    def _upload(self, tensor):
        if tensor.device.type == self.device.type:
            return tensor
        return self._pinned(tensor).to(self.device, non_blocking=True)

    def _pinned(self, tensor):
        return tensor.pin_memory() if self._stream is not None else tensor

    # -- messages

    def _tell_of_folder(self):
        for dropped in self.corpus.dropped:
            self._tell_of(dropped)
        others = [one for one in self.corpus.utterances if one.sample_rate != SAMPLE_RATE]
        if others:
            print(
                f"data: {len(others)} of {len(self.corpus.utterances)} utterances resampled to {SAMPLE_RATE} Hz, the "
                f"first is {others[0].name} with {others[0].sample_rate} Hz; frequencies above {SAMPLE_RATE // 2} Hz "
                "are folded back",
                file=sys.stderr,
            )

    def _tell_of(self, dropped):
        # Evaluation finds again what training has named.
        named = self.corpus.named
        if dropped.name not in named and len(named) < MAX_NAMED:
            named.add(dropped.name)
            more = "; further ones are counted only" if len(named) == MAX_NAMED else ""
            print(f"data: dropped {dropped}{more}", file=sys.stderr)

    def _require_enough(self):
        needed = self.config.batch * self.world_size if self.training else 1
        if self.num_samples < needed:
            ranks = f" on {self.world_size} ranks" if self.world_size > 1 else ""
            first = f" (the first dropped: {self.dropped[0]})" if self.dropped else ""
            raise ValueError(
                f"--data {self.corpus.folder}: {self.num_samples} utterances can be trained on{first}, --batch "
                f"{self.config.batch}{ranks} takes {needed}: give more speech or a smaller --batch"
            )


def require_share(left: int, frames: int) -> None:
    """Raises BadAudio where silence takes more than nine tenths. left: frames of 10 ms without silence."""
    if left < LEAST_SHARE * frames:
        raise BadAudio(f"{left / 100:.2f} of {frames / 100:.2f} s are left without silence")


# ------------------------------------------------------------------------------------------------
# Features by --audio


def _make_extractor(config, noise, device):
    """A callable (encoded files, scales, offsets) -> (features, frames), or {row: BadAudio}."""
    if config.audio == "torch":
        return TorchExtractor(noise, config.workers)
    try:
        from rnnt.speech.dali_pipeline import DaliExtractor
    except ImportError:
        raise ValueError("--audio dali: nvidia-dali is not installed: ./setup.sh dali, or --audio torch") from None
    return DaliExtractor(config.batch, noise, config.workers, device)


class TorchExtractor:
    """Features on the CPU, decoded by libsndfile and computed by torch; arguments as in dali_pipeline.py."""

    def __init__(self, noise: features.Noise, workers: int):
        try:
            import soundfile
        except ImportError:
            raise ValueError("--audio torch: soundfile is not installed: ./setup.sh speech, or --audio dali") from None
        self._soundfile, self._noise = soundfile, torch.from_numpy(noise.table)
        self._threads = concurrent.futures.ThreadPoolExecutor(workers)

    def __call__(self, encoded, scales, offsets):
        answers = list(self._threads.map(self._try_one, encoded, scales, offsets))
        faults = {row: answer for row, answer in enumerate(answers) if isinstance(answer, BadAudio)}
        if faults:
            return faults
        frames = [answer.shape[1] for answer in answers]
        batch = torch.zeros(len(answers), features.NUM_MELS, max(frames))
        for row, answer in zip(batch, answers, strict=True):
            row[:, : answer.shape[1]] = answer
        return batch, frames

    def _try_one(self, encoded, scale, offset):
        try:
            return features.extract(self._decode(encoded), scale, self._noise[offset:])
        except BadAudio as error:
            return error

    def _decode(self, encoded):
        try:
            audio, _ = self._soundfile.read(io.BytesIO(encoded.tobytes()), dtype="float32", always_2d=True)
        except (self._soundfile.LibsndfileError, RuntimeError) as error:
            raise BadAudio(f"cannot be decoded: {error}") from None
        return torch.from_numpy(audio.mean(axis=1))
