"""Policy and detector step for many requests, entropy of a row, and the step table.

    python benchmarks/policy.py

Goals: policy + detector for 256 requests <= 1 ms on one CPU core; table of a 152k vocabulary
<= 2 s.
"""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from harness import microseconds, record, seconds
from reset import ReSETConfig, StepDetector, TemperaturePolicy, entropy_nats

CONFIG = ReSETConfig(t_low=0.1, tau_0=0.55)
VOCABULARY = 151_936


def large_tokenizer(size: int) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with `size` distinct tokens, newline tokens among them."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(letters)}
    for text in ("ĊĊ", ".ĊĊ", "ĠĊĊ"):
        vocabulary[text] = len(vocabulary)
    number = 0
    while len(vocabulary) < size:
        vocabulary.setdefault(f"Ġw{number}", len(vocabulary))
        number += 1
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def step_table() -> StepDetector:
    tokenizer = large_tokenizer(VOCABULARY)
    figures = seconds(lambda: StepDetector.from_tokenizer(tokenizer), repeats=5)
    record("policy", "step_table", vocabulary=VOCABULARY, **figures)
    return StepDetector.from_tokenizer(tokenizer)


def policy_step(detector: StepDetector, requests: int, device: str) -> None:
    detector = detector.to(device)
    policy = TemperaturePolicy(CONFIG, slots=requests, device=device)
    generator = torch.Generator().manual_seed(0)
    entropy = torch.rand(requests, generator=generator).to(device)
    token = torch.randint(0, VOCABULARY, (requests,), generator=generator).to(device)
    state = detector.initial_state(requests)

    def step() -> None:
        nonlocal state
        state, ended = detector.advance(state, token)
        policy.step(entropy, ended)

    figures = microseconds(step, repeats=300, warmup=20)
    record("policy", f"policy_and_detector_{device}", requests=requests, **figures)


def entropy(rows: int, device: str) -> None:
    logits = torch.randn(rows, VOCABULARY, device=device) * 3
    figures = microseconds(lambda: entropy_nats(logits), repeats=30)
    record("policy", f"entropy_{device}", rows=rows, vocabulary=VOCABULARY, **figures)


def main() -> None:
    torch.set_num_threads(1)
    detector = step_table()
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    for device in devices:
        for requests in (1, 8, 256):
            policy_step(detector, requests, device)
        for rows in (1, 8):
            entropy(rows, device)


if __name__ == "__main__":
    main()
