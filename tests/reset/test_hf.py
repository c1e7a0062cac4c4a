"""The transformers adapter: real generate() calls against the scalar specification."""

import math

import pytest
import torch

from reset import ReSETConfig, StepDetector
from reset.hf import ReSETLogitsProcessor, sampling_arguments
from tests.reset.spec import Request
from tests.reset.test_entropy import entropy_fp64
from tests.reset.toy_model import toy_llama, toy_tokenizer

CONFIG = ReSETConfig(t_low=0.3, tau_0=2.0, window=4)
TOKENIZER = toy_tokenizer()
MODEL = toy_llama(len(TOKENIZER))


def padded(prompts: list[str]) -> dict[str, torch.Tensor]:
    return TOKENIZER(prompts, return_tensors="pt", padding=True, padding_side="left")


def run(prompts: list[str], config: ReSETConfig = CONFIG, seed: int = 0, **arguments):
    processor = ReSETLogitsProcessor(config, TOKENIZER, record=True)
    torch.manual_seed(seed)
    encoded = padded(prompts)
    sequences = MODEL.generate(
        **encoded,
        logits_processor=[processor],
        **sampling_arguments(**{"max_new_tokens": 60, **arguments}),
    )
    return processor, encoded, sequences


def raw_entropies(row_ids: torch.Tensor, mask: torch.Tensor, start: int) -> list[float]:
    """H_t of every output token, recomputed from one forward pass over the finished row."""
    with torch.no_grad():
        logits = MODEL(input_ids=row_ids[None], attention_mask=mask[None]).logits[0]
    return [entropy_fp64(row) for row in logits[start - 1 : -1].double().tolist()]


@pytest.mark.parametrize("returned", [1, 3])
def test_generate_follows_the_specification(returned):
    """Batch of three lengths with left padding, each row with its own finish, n sequences each."""
    prompts = ["a", "What is 2+2?\n", "Hello there, count: 1, 2, 3"]
    processor, encoded, sequences = run(prompts, num_return_sequences=returned)
    start = encoded["input_ids"].shape[1]
    detector = StepDetector.from_tokenizer(TOKENIZER)
    traces = processor.traces(sequences, TOKENIZER)
    assert len(traces) == 3 * returned
    temperatures = []
    for row, trace in enumerate(traces):
        mask = torch.ones(start + len(trace), dtype=torch.int64)
        mask[:start] = encoded["attention_mask"][row // returned]
        ids = sequences[row, : start + len(trace)]
        entropies = raw_entropies(ids, mask, start)
        request = Request(**CONFIG.to_dict())
        state, new_step = detector.initial_state(1), False
        for token, entropy in zip(trace, entropies, strict=True):
            # Cached and uncached attention round differently: 1e-3 nats on logits of +-30.
            assert token.entropy_nats == pytest.approx(entropy, abs=1e-3)
            expected = request.feed(token.entropy_nats, new_step)
            assert token.temperature == pytest.approx(expected.temperature)
            assert token.step_entropy_nats == pytest.approx(expected.step_entropy, abs=1e-5)
            assert token.mean_entropy_nats == pytest.approx(expected.mean_entropy, abs=1e-5)
            state, ended = detector.advance(state, torch.tensor([token.token_id]))
            new_step = bool(ended)
            assert token.ends_step == new_step
            temperatures.append(token.temperature)
    assert len(set(temperatures)) == 2  # both temperatures occurred


def test_finished_rows_are_ignored_and_others_go_on():
    """A row that ended is padded by generate(); its trace stops at the end token."""
    end = TOKENIZER.eos_token_id
    processor, encoded, sequences = run(["a"] * 12, seed=5, max_new_tokens=200)
    start = encoded["input_ids"].shape[1]
    lengths = processor.output_lengths(sequences)
    assert len(set(lengths)) > 1
    for row, trace in enumerate(processor.traces(sequences, TOKENIZER)):
        ids = [token.token_id for token in trace]
        assert ids == sequences[row, start : start + len(ids)].tolist()
        assert end not in ids[:-1]
        assert (ids[-1] == end) or len(ids) == sequences.shape[1] - start


def scripted(processor: ReSETLogitsProcessor, rows: list[list[int]], logits: torch.Tensor):
    """Feed a scripted batch: rows of output ids after the one-token prompt 0; logits [T, B, V]."""
    outputs = []
    for position, step_logits in enumerate(logits):
        ids = torch.tensor([[0, *row[:position]] for row in rows])
        outputs.append(processor(ids, step_logits))
    return torch.stack(outputs)


def test_scores_are_divided_by_the_temperature_and_not_changed():
    processor = ReSETLogitsProcessor(CONFIG, TOKENIZER)
    logits = torch.randn(1, 2, 300) * 5
    before = logits.clone()
    scaled = scripted(processor, [[], []], logits)
    assert torch.equal(logits, before)
    for row in range(2):
        temperature = Request(**CONFIG.to_dict()).feed(
            entropy_fp64(logits[0, row].double().tolist()), False
        )
        expected = logits[0, row] / torch.tensor(temperature.temperature)
        assert torch.equal(scaled[0, row], expected)


def test_e4_nan_logits_name_the_row_and_position():
    processor = ReSETLogitsProcessor(CONFIG, TOKENIZER)
    logits = torch.randn(2, 2, 300)
    logits[1, 1, 5] = math.nan
    with pytest.raises(ValueError, match="row 1: the logits at output position 1 hold NaN"):
        scripted(processor, [[1], [1]], logits)


def test_e4_nan_logits_of_a_finished_row_do_not_matter():
    processor = ReSETLogitsProcessor(CONFIG, TOKENIZER)
    logits = torch.randn(3, 2, 300)
    logits[1:, 1] = math.nan
    end = TOKENIZER.eos_token_id
    scaled = scripted(processor, [[1, 1], [end, end]], logits)
    assert scaled[:, 0].isfinite().all()


def test_r4_c1_recorded_entropies_are_of_raw_logits():
    """Also when the text is sampled at T = 0.6 with top-k and top-p: those come later."""
    config = ReSETConfig(policy="fixed", base_temp=0.6)
    processor, encoded, sequences = run(["a"], config, top_p=0.5, top_k=5, max_new_tokens=20)
    start, entropies = encoded["input_ids"].shape[1], processor.entropies(sequences)[0]
    ids = sequences[0, : start + len(entropies)]
    assert entropies.tolist() == pytest.approx(
        raw_entropies(ids, torch.ones_like(ids), start), abs=1e-3
    )


def test_a_second_call_starts_with_empty_history():
    processor = ReSETLogitsProcessor(CONFIG, TOKENIZER, record=True)
    runs = []
    for _ in range(2):
        torch.manual_seed(3)
        sequences = MODEL.generate(
            **padded(["a b"]), logits_processor=[processor], **sampling_arguments(max_new_tokens=30)
        )
        runs.append(processor.traces(sequences, TOKENIZER))
    assert runs[0] == runs[1]


def test_a_new_prompt_one_token_longer_is_a_new_batch():
    """Same length as a continuation would have, other ids."""
    processor = ReSETLogitsProcessor(CONFIG, TOKENIZER)
    processor(torch.tensor([[1, 2]]), torch.randn(1, 300) * 9)
    fresh = ReSETLogitsProcessor(CONFIG, TOKENIZER)
    scores = torch.randn(1, 300)
    ids = torch.tensor([[4, 5, 6]])
    assert torch.equal(processor(ids, scores), fresh(ids, scores))
    assert processor._policy.state[0, 4] == 1  # one entropy in the history


def test_s4_a_newline_at_the_end_of_the_prompt_does_not_count():
    newline = TOKENIZER.encode("\n")[0]
    processor = ReSETLogitsProcessor(CONFIG, TOKENIZER, record=True)
    logits = torch.randn(2, 1, 300)
    processor(torch.tensor([[newline]]), logits[0])
    processor(torch.tensor([[newline, newline]]), logits[1])
    sequences = torch.tensor([[newline, newline, newline]])
    assert [t.ends_step for t in processor.traces(sequences, TOKENIZER)[0]] == [False, True]


def test_beam_search_is_refused():
    with pytest.raises(ValueError, match=r"reordered.*num_beams=1"):
        run(["a", "b"], num_beams=3, max_new_tokens=30)


def test_more_than_one_end_token():
    processor = ReSETLogitsProcessor(CONFIG, TOKENIZER, eos_token_id=[7, 9], record=True)
    scripted(processor, [[9, 0, 0], [1, 7, 0]], torch.randn(4, 2, 300))
    assert processor.output_lengths(torch.tensor([[0, 9, 0, 0, 0], [0, 1, 7, 0, 0]])) == [1, 2]


def test_traces_need_a_recording():
    processor = ReSETLogitsProcessor(CONFIG, TOKENIZER)
    processor(torch.tensor([[1]]), torch.randn(1, 300))
    with pytest.raises(RuntimeError, match="record=True"):
        processor.traces(torch.tensor([[1, 2]]), TOKENIZER)


def test_a_compiled_detector_serves_instead_of_the_tokenizer():
    detector = StepDetector.from_tokenizer(TOKENIZER)
    scores, ids = torch.randn(1, 300), torch.tensor([[1]])
    one = ReSETLogitsProcessor(CONFIG, detector)(ids, scores)
    two = ReSETLogitsProcessor(CONFIG, TOKENIZER)(ids, scores)
    assert torch.equal(one, two)
