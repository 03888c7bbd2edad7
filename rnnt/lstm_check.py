"""cuDNN's LSTM kernels and ours on this GPU: errors against FP32, bitwise repeats, and milliseconds. Takes seconds.

    python -m rnnt.lstm_check              every way to split the work
    python -m rnnt.lstm_check 1024:16:1    one of them, hidden:forward units:cluster

Exit status 1 where a kernel is wrong. Ends by itself after WATCHDOG_S, whatever the GPU does.
"""

import copy
import faulthandler
import statistics
import sys
import time

import torch
from torch import nn

from rnnt import lstm as lstm_module
from rnnt import lstm_kernel
from rnnt.config import Config
from rnnt.lstm import lstm, turns
from rnnt.model import Encoder, Prediction, flatten

WATCHDOG_S = 75
START = time.perf_counter()
DEVICE = torch.device("cuda", 0)
PROBLEMS = []


def say(*words):
    print(f"[{time.perf_counter() - START:5.1f} s]", *words, flush=True)


# ------------------------------------------------------------------------------------------------
# Errors


def make(hidden, steps, num_layers=1):
    """(FP16 layers, their input, the gradient of their output)"""
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.LSTM(hidden, hidden, device=DEVICE) for _ in range(num_layers)).half()
    flatten(layers)
    x = torch.randn(steps, 8, hidden, device=DEVICE).half().requires_grad_()
    return layers, x, (torch.randn(steps, 8, hidden, device=DEVICE) * 0.1).half()


def by_torch(layers, x, grad):
    """Output and gradients of input and weights, by cuDNN on a GPU."""
    output = x
    for layer in layers:
        output = layer(output)[0]
    return output, *torch.autograd.grad(output, (x, *layers.parameters()), grad)


def by_ours(layers, x, grad, *how):
    """The same by our kernels; how: lengths, extra, dropout, at_once."""
    output = lstm(x, [list(layer.parameters()) for layer in layers], *how)
    return output, *torch.autograd.grad(output, (x, *layers.parameters()), grad)


def error(found, wanted):
    return [
        ((a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1e-30)).item()
        for a, b in zip(found, wanted, strict=True)
    ]


def check(hidden, steps, num_layers=1, padding=0, at_once=1):
    """padding: time steps after the longest utterance, where h is 0 and no gradient counts."""
    layers, x, grad = make(hidden, steps, num_layers)
    end = steps - padding
    lengths = torch.full((8,), end - 1, dtype=torch.int32, device=DEVICE) if padding else None
    (h, grad_x, *grads), *again = (by_ours(layers, x, grad, lengths, 1, 0.0, at_once) for _ in range(4))
    lstm_kernel.check(DEVICE)
    repeated = all(torch.equal(a, b) for other in again for a, b in zip((h, grad_x, *grads), other, strict=True))
    is_empty = not h[end:].any() and not grad_x[end:].any()
    short = x[:end].detach().requires_grad_()
    wide = by_torch(copy.deepcopy(layers).float(), short.detach().float().requires_grad_(), grad[:end].float())
    found = error((h[:end], grad_x[:end], *grads), wide)
    reference = error(by_torch(layers, short, grad[:end]), wide)
    good = repeated and is_empty and all(a <= max(2 * b, 5e-3) for a, b in zip(found, reference, strict=True))
    worst = [f"{name} {max(found[part]):.1e}/{max(reference[part]):.1e}" for name, part in PARTS.items()]
    say(
        f"{'OK ' if good else 'BAD'} H {hidden} T {steps} layers {num_layers}, {at_once} at once, padding {padding}: "
        f"bitwise repeat {repeated}; error of ours/cuDNN against FP32: {', '.join(worst)}"
    )
    if not good:
        PROBLEMS.append((hidden, steps, num_layers, padding, at_once))


PARTS = {"h": slice(1), "dx": slice(1, 2), "weights": slice(2, None)}


# ------------------------------------------------------------------------------------------------
# Milliseconds


def time_ms(fn, repeats=4, replays=5):
    """Median per call in a graph of `repeats` calls."""
    fn()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for _ in range(repeats):
            fn()
    times = []
    for index in range(replays + 1):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        graph.replay()
        events[1].record()
        events[1].synchronize()
        if index:
            times.append(events[0].elapsed_time(events[1]) / repeats)
    return statistics.median(times)


def kernel_ms(fn):
    """Of our recurrent kernels in one call: forwards, backwards."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        fn()
        torch.cuda.synchronize()
    found = {event.key: event.device_time_total / 1e3 for event in profile.key_averages()}
    return found["lstm_forward"], found["lstm_backward"]


def layer_ms(run):
    """(forwards, forwards and backwards) of a layer of the benchmark's; run: by_torch or by_ours."""
    layers, x, grad = make(1024, 409)
    forward = layers[0] if run is by_torch else lambda x: lstm(x, [list(layers[0].parameters())])
    return time_ms(lambda: forward(x)), time_ms(lambda: run(layers, x, grad))


def networks_ms(which):
    """Of encoder and prediction network forwards, and of both forwards and backwards."""
    config = Config(lstm=which)
    torch.manual_seed(0)
    with torch.device(DEVICE):
        encoder, prediction = Encoder(config).half(), Prediction(config).half()
    flatten(encoder), flatten(prediction)
    features = torch.randn(409, 8, 256, device=DEVICE).half()
    lengths, token_lengths = (torch.full((8,), length, dtype=torch.int32, device=DEVICE) for length in (409, 56))
    tokens = torch.randint(0, 1023, (8, 56), device=DEVICE)
    parameters = [*encoder.parameters(), *prediction.parameters()]

    def whole():
        f, g = encoder(features, lengths)[0], prediction(tokens, token_lengths)
        torch.autograd.grad((f, g), parameters, (torch.ones_like(f), torch.ones_like(g)))

    calls = lambda: encoder(features, lengths), lambda: prediction(tokens, token_lengths), whole
    return [time_ms(call, 2) for call in calls]


def row(label, times):
    print(f"{label:24}", *(f"{each:9.3f}" for each in times), flush=True)


# ------------------------------------------------------------------------------------------------
# All of it


def split(hidden, units, cluster):
    """Check and time one way to split the work; its row, None where it fails."""
    lstm_kernel.FORWARD_UNITS, lstm_kernel.CLUSTER = units, cluster
    lstm_kernel.forget(DEVICE)
    say(f"hidden {hidden}, units {units}, cluster {cluster}")
    try:
        # The shortest first: what is wrong shows there.
        for steps in (1, 2, 3, 37, 409):
            check(hidden, steps)
        check(512, 57)
        check(1024, 409, padding=30)
        check(512, 57, padding=56)
        layers, x, grad = make(1024, 409)
        return kernel_ms(lambda: by_ours(layers, x, grad)) + layer_ms(by_ours)
    except RuntimeError as failure:
        say("FAILED", hidden, units, cluster, failure)
        PROBLEMS.append((hidden, units, cluster))
        return None


def main():
    if not torch.cuda.is_available():
        sys.exit("python -m rnnt.lstm_check: needs a GPU")
    faulthandler.dump_traceback_later(WATCHDOG_S, exit=True)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    say(torch.cuda.get_device_name(DEVICE), torch.__version__)
    settings = [tuple(map(int, word.split(":"))) for word in sys.argv[1:]]
    settings = settings or [(1024, 16, 1), (1024, 16, 4), (1024, 8, 4), (1024, 16, 2)]
    with torch.cuda.stream(torch.cuda.Stream()):
        table = {setting: split(*setting) for setting in settings}
        print("\nH 1024, T 409, B 8, ms: recurrence forwards, backwards; layer forwards, both")
        row(f"{'cuDNN':43}", layer_ms(by_torch))
        for (_, units, cluster), times in table.items():
            row(f"units {units:2} cluster {cluster}", times or ())
        # Two layers fit side by side with 16 units in a block.
        fitting = {setting: times for setting, times in table.items() if times and setting[1] == 16}
        if fitting:
            _, units, cluster = min(fitting, key=lambda setting: fitting[setting][-1])
            lstm_kernel.FORWARD_UNITS, lstm_kernel.CLUSTER = units, cluster
            for num, steps, padding in ((2, 409, 30), (3, 205, 0), (3, 205, 150)):
                check(1024, steps, num, padding, at_once=2)
            print(f"\nencoder fwd, prediction fwd, both fwd+bwd, ms; ours with units {units}, cluster {cluster}")
            for which in ("cudnn", "persistent", "wavefront"):
                row(which, networks_ms(which))
            for cost in (2, 5, 20, 40):
                lstm_module.TURN_COST = cost
                turns.cache_clear()
                row(f"  TURN_COST {cost}, {len(turns(2, 409, 2))} + {len(turns(3, 205, 2))}", networks_ms("wavefront"))
            lstm_kernel.check(DEVICE)
    say("PROBLEMS " + str(PROBLEMS) if PROBLEMS else "no problems")
    return 1 if PROBLEMS else 0


if __name__ == "__main__":
    sys.exit(main())
