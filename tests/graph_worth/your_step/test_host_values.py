"""graph_worth/your_step/host_values.py: counts and rates on the host that a step moves are put back."""

import torch

from graph_worth.your_step.host_values import Moving

seen = 0


class Trainer:
    def __init__(self):
        self.count, self.rates, self.log = 0, {"lr": [0.1]}, []

    def step(self, batch):
        self.count += 1
        self.rates["lr"][0] *= 0.5
        self.log.append(batch)


def closed_over():
    total, counts, fixed = 0, {"it": 0}, 7

    def step(batch):
        nonlocal total
        global seen
        total, seen = total + fixed, seen + 1
        counts["it"] += 1
        model.calls += 1
        return total, seen, counts["it"], model.calls

    model = torch.nn.Linear(2, 2)
    model.calls = 0
    return step, model


def test_what_a_step_moves_is_named_and_put_back_wherever_it_is():
    step, model = closed_over()
    step(None)
    moving = Moving(step, [model])
    kept = step(None)
    moving.note()
    moving.keep()
    assert sorted(moving.names) == ["counts['it']", "model 0.calls", "seen", "total"]
    assert step(None) != kept
    for _ in range(2):
        moving.put_back()
        assert step(None) == tuple(a + b for a, b in zip(kept, (7, 1, 1, 1), strict=True))


def test_the_state_of_the_object_whose_method_is_the_step_is_put_back():
    trainer = Trainer()
    moving = Moving(trainer.step, [])
    trainer.step(None)
    moving.note()
    moving.keep()
    assert sorted(moving.names) == ["self.count", "self.rates['lr'][0]"]
    trainer.step(None)
    moving.put_back()
    assert (trainer.count, trainer.rates) == (1, {"lr": [0.05]})


class Counting(torch.nn.Linear):
    calls = 0


class Loader:
    drawn = 0


def test_a_counter_that_is_an_attribute_of_a_class_is_named_and_put_back():
    model, loader = Counting(2, 2), Loader()

    class Steps:
        made, model, loader = 0, None, None

        def step(self, batch):
            Steps.made += 1
            Counting.calls += 1
            type(loader).drawn += 1

    moving = Moving(Steps().step, [model])
    Steps().step(None)
    moving.note()
    moving.keep()
    assert {"Counting.calls", "Loader.drawn", "Steps.made"} == set(moving.names)
    Steps().step(None)
    moving.put_back()
    assert (Counting.calls, Loader.drawn, Steps.made) == (1, 1, 1)


def test_what_changes_in_some_steps_only_is_put_back():
    flips = {"is_on": False, "every third": 0}
    calls = 0

    def step(batch):
        nonlocal calls
        calls += 1
        flips["is_on"] = not flips["is_on"]
        flips["every third"] += calls % 3 == 0

    moving = Moving(step, [])
    for _ in range(4):
        step(None)
        moving.note()
    moving.keep()
    for _ in range(3):
        step(None)
    moving.put_back()
    assert (flips, calls) == ({"is_on": False, "every third": 1}, 4)


def test_a_value_that_a_class_refuses_stays_and_others_are_put_back():
    class Strict:
        def __init__(self):
            self.__dict__["count"] = 0

        def __setattr__(self, name, value):
            raise ValueError("frozen")

    strict, counts = Strict(), {"it": 0}

    def step(batch):
        strict.__dict__["count"] += 1
        counts["it"] += 1

    moving = Moving(step, [])
    step(None)
    moving.note()
    moving.keep()
    step(None)
    moving.put_back()
    assert counts["it"] == 1 and strict.count == 2
