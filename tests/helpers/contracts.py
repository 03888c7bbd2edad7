"""Models and variants as a script's session has them, for tests that make states themselves."""

import importlib

import torch

from graph_worth import contract
from graph_worth.made_variant import enter
from graph_worth.script.session import Model


def request(name, *arguments):
    """The request that a command line makes of a model of the suite. Its config.py has Config, PRESETS and FACTS."""
    config = importlib.import_module(f"{name}.config")
    return contract.parse(name, config.Config, config.PRESETS, argv=list(arguments), **config.FACTS)


def model(name, *arguments, device=None):
    """A `session.Model`, not built, of a command line such as ("--preset", "tiny", "--layers", "4")."""
    build = importlib.import_module(f"{name}.train").build
    return Model(request(name, *arguments), build, device or torch.device("cpu"))


def model_of(name, state, config=None):
    """A model with a state in the place of its build's. config: the state's unless given."""
    own = model(name, device=state.device)
    own.config = config or state.config
    own.training = contract.Training(state=state, results={})
    return own


def made(name, variant, state, config=None):
    """A variant made from a state of the model, and entered. config: the state's unless given."""
    variant = model_of(name, state, config).make(variant)
    enter(variant)
    return variant
