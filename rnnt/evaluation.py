"""Greedy decoding after training: how fast it is, eager and graphed, and the word error rate where words are known."""

import statistics
import time

import torch

from common.variant import synchronize
from rnnt.config import GENERATED
from rnnt.greedy_decoder import EagerDecoder, GraphDecoder
from rnnt.transcripts import open_tokenizer, word_errors

REPEATS = 5
# As many as LibriSpeech's dev-clean has, which the benchmark is evaluated on.
MAX_UTTERANCES = 2703
EVALUATION_SEED = 0


def make_decoders(model, batch: int, frames: int, **limits) -> dict:
    return {"eager": EagerDecoder(model, batch, **limits), "graph": GraphDecoder(model, batch, frames, **limits)}


@torch.no_grad()
def measure(state) -> dict:
    """Times of both decoders on one batch of training data, with the averaged weights; medians of REPEATS, in ms.

    loop: all symbol steps, from the first frame to the end of the last utterance. whole: encoder (eager in both), loop
    and the labels on the host. num_cut_off: utterances that ended at the search's largest number of labels.
    labels_equal: of both decoders, utterance by utterance.
    """
    # The next batch of training; what it advances is reset before anything is trained again.
    batch, _ = state.inputs.load(state.plan.fit)
    found, labels = {}, {}
    with state.averaged():
        f, lengths = state.model.encoder(batch.features, batch.feature_lengths)
        decoders = make_decoders(state.model, *f.shape[:2])
        for name, decoder in decoders.items():
            labels[name] = decoder.decode(f, lengths)
            times = [_time(state, decoder, batch) for _ in range(REPEATS)]
            found[f"{name}_loop_ms"], found[f"{name}_whole_ms"] = map(statistics.median, zip(*times, strict=True))
            found[f"{name}_utterances_per_s"] = len(f) / found[f"{name}_whole_ms"] * 1e3
            decoder.close()
    return found | {
        "loop_speedup": found["eager_loop_ms"] / found["graph_loop_ms"],
        "whole_speedup": found["eager_whole_ms"] / found["graph_whole_ms"],
        "num_utterances": len(f),
        "num_labels": sum(map(len, labels["eager"])),
        "num_cut_off": sum(len(ids) >= decoders["eager"].search.max_symbols for ids in labels["eager"]),
        "labels_equal": labels["eager"] == labels["graph"],
    }


def _time(state, decoder, batch):
    """(loop, whole) in ms."""
    synchronize()
    start = time.perf_counter()
    decoder.load(*state.model.encoder(batch.features, batch.feature_lengths))
    synchronize()
    loop_start = time.perf_counter()
    decoder.loop()
    synchronize()
    loop_end = time.perf_counter()
    decoder.results()
    return (loop_end - loop_start) * 1e3, (time.perf_counter() - start) * 1e3


class SpeechEvaluator:
    """Decodes unchanged speech with both decoders and the averaged weights, MAX_UTTERANCES of the folder's at most."""

    @torch.no_grad()
    def __init__(self, state):
        config = self.config = state.config
        self.state, self.tokenizer = state, open_tokenizer(config.tokenizer, config.vocab)
        self.source = state.open_source(0, 1, EVALUATION_SEED, training=False)
        self.num_batches = min(self.source.num_batches, max(1, MAX_UTTERANCES // config.batch))
        frames, longest = (max(state.plan.audio) + 1) // 2, max(300, *state.plan.text)
        self.decoders = make_decoders(state.model, config.batch, frames, max_symbols=longest)

    @torch.no_grad()
    def word_error_rate(self) -> dict:
        """Of both decoders, and whether their labels are equal. Training goes on afterwards as if nothing had been."""
        errors, num_words, labels_equal = dict.fromkeys(self.decoders, 0), 0, True
        with self.state.averaged():
            for decoder in self.decoders.values():
                decoder.refresh()
            for _ in range(self.num_batches):
                batch = self.source.next()
                features, lengths = (tensor.to(self.state.device) for tensor in batch[:2])
                f, lengths = self.state.model.encoder(features, lengths)
                labels = {name: decoder.decode(f, lengths) for name, decoder in self.decoders.items()}
                labels_equal = labels_equal and labels["eager"] == labels["graph"]
                texts = self.source.texts
                num_words += sum(len(text.split()) for text in texts)
                for name, found in labels.items():
                    # The last batch may be filled up with rows that have no text.
                    pairs = zip(texts, found[: len(texts)], strict=True)
                    errors[name] += sum(word_errors(text, self.tokenizer.decode(ids)) for text, ids in pairs)
        self.source.reset()
        rates = {name: count / num_words for name, count in errors.items()}
        return {"num_words": num_words, **rates, "labels_equal": labels_equal}

    def close(self) -> None:
        for decoder in self.decoders.values():
            decoder.close()
        self.source.close()


def finish(state, record) -> None:
    """Put both into the record's extra, with a report for its tables, and print them with what buckets cost."""
    record["extra"]["decode"] = measure(state)
    if state.config.data not in GENERATED:
        evaluator = SpeechEvaluator(state)
        record["extra"]["wer"] = evaluator.word_error_rate()
        evaluator.close()
    record["extra"]["report"] = table_row(record["extra"], record["device"])
    doubt = unlike_speech(record["extra"]["decode"])
    if doubt:
        record["extra"]["notes"].append(f"decode: {doubt}")
    if state.rank == 0:
        for line in lines(record["extra"]):
            print(line)


def table_row(extra: dict, device: str) -> dict:
    """extra's buckets and decode as columns of a table (see State.finish in common/variant.py).

    Without the decoders' rates on a CPU, where a host graph says nothing about speed.
    """
    report, decode = extra["buckets"], extra["decode"]
    rates = {
        "eager decode/s": decode["eager_utterances_per_s"],
        "graph decode/s": decode["graph_utterances_per_s"],
        "loop speed-up": decode["loop_speedup"],
    }
    return {
        "LSTM padding %": 100 * report["padding"]["time_steps"],
        "lattice padding %": 100 * report["padding"]["cells"],
        "useful/executed FLOP": report["useful_flops_per_step"] / report["executed_flops_per_step"],
        **(rates if device == "cuda" else {}),
        "labels equal": decode["labels_equal"],
    }


def unlike_speech(decode: dict) -> str | None:
    """Why the decoders' times say little of a trained model's, or None."""
    if decode["num_labels"] == 0:
        return "no label was found, the times are those of blanks alone: not representative"
    if decode["num_cut_off"]:
        return "utterances ended at the largest number of labels that a search gives: not representative"
    return None


def lines(extra: dict) -> list[str]:
    """What a person wants to see of extra's buckets, decode and wer."""
    report, decode = extra["buckets"], extra["decode"]
    padding = ", ".join(f"{what.replace('_', ' ')} {100 * value:.1f} %" for what, value in report["padding"].items())
    useful, executed = report["useful_flops_per_step"], report["executed_flops_per_step"]
    out = [
        f"padding    {padding} over the longest of each batch, {len(report['steps_per_shape'])} shapes",
        f"compute    {useful / 1e12:.3g} TFLOP/step useful, {executed / 1e12:.3g} executed",
        f"decode     loop {decode['eager_loop_ms']:.2f} ms eager, {decode['graph_loop_ms']:.2f} ms graph "
        f"({decode['loop_speedup']:.2f}x), whole {decode['whole_speedup']:.2f}x, "
        f"{decode['graph_utterances_per_s']:,.0f} utterances/s, "
        f"labels {'equal' if decode['labels_equal'] else 'DIFFER'}",
        f"labels     {decode['num_labels']} in {decode['num_utterances']} utterances, "
        + (unlike_speech(decode) or "none cut off"),
    ]
    if "wer" in extra:
        wer = extra["wer"]
        equal = "equal" if wer["labels_equal"] else "DIFFER"
        out.append(f"words      {100 * wer['eager']:.2f} % wrong, {100 * wer['graph']:.2f} % graphed, labels {equal}")
    return out
