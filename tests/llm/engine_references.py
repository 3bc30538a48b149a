"""Slow, obvious references for the engine: whole forward passes, replays and filters."""

import numpy as np
import torch

from sharpwave.llm.generators import Sampling
from sharpwave.llm.model import KVCache, load_state, small_model

VOCABULARY = 40


SAMPLINGS = {
    "plain": Sampling(max_tokens=30),
    "temperature": Sampling(max_tokens=30, temperature=0.6),
    "top-k": Sampling(max_tokens=30, top_k=5),
    "top-p": Sampling(max_tokens=30, top_p=0.7),
    "min-p": Sampling(max_tokens=30, min_p=0.2),
    "all": Sampling(max_tokens=30, temperature=1.5, top_k=12, top_p=0.9, min_p=0.05),
}


def made(**changes):
    given = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "head_dim": 8,
        "initializer_range": 0.2,
    }
    return small_model(**{**given, "max_position_embeddings": 160, **changes})


def prompt_of(size, seed=0):
    return np.random.default_rng(seed).integers(3, VOCABULARY, size).tolist()


def states_of(model, count):
    """Versions of weights that differ much."""
    state = {name: tensor.clone() for name, tensor in model.weights()}
    source = torch.Generator().manual_seed(5)
    made = [state]
    for _ in range(count - 1):
        made.append({n: t + torch.randn(t.shape, generator=source) * 0.05 for n, t in state.items()})
    return made


def filtered(logits, sampling):
    """The slow, obvious filter: log-probabilities over the vocabulary, -inf where a token cannot be drawn."""
    logits = np.asarray(logits, np.float64) / sampling.temperature
    chances = np.exp(logits - logits.max())
    order = np.argsort(-chances, kind="stable")
    if sampling.top_k:
        chances[order[sampling.top_k :]] = 0
    chances /= chances.sum()
    if sampling.top_p < 1:
        before = np.cumsum(chances[order]) - chances[order]
        chances[order[before >= sampling.top_p]] = 0
    chances[chances < sampling.min_p * chances.max()] = 0
    with np.errstate(divide="ignore"):
        return np.log(chances / chances.sum())


@torch.no_grad()
def scores_of(model, request):
    """Log-probabilities of an answer by one whole forward pass."""
    whole = torch.tensor([[*request.prompt.tolist(), *request.answer.tokens]])
    logits = model(whole)[0, len(request.prompt) - 1 : -1].float()
    return [filtered(row, request.sampling)[token] for row, token in zip(logits, request.answer.tokens, strict=True)]


@torch.no_grad()
def replayed(model, states, request, prompt_versions):
    """Log-probabilities where each place's keys and values stay as the version that fed it made them."""
    cache, prompt, answer = KVCache(model.config, 1, 160), request.prompt.tolist(), request.answer
    fed, versions = [*prompt, *answer.tokens], [*prompt_versions, *answer.versions]
    found = []
    for place, version in enumerate(versions):
        load_state(model, states[version % len(states)])
        hidden = model.extend(torch.tensor([[fed[place]]]), torch.tensor([[place]]), cache, slot=0)
        if place >= len(prompt) - 1:
            found.append(float(model.logits(hidden)[0, 0].log_softmax(-1)[fed[place + 1]]))
    return found
