"""One prompt in, text out: a model from a folder or the hub, decoded with ReSET.

    python examples/generate.py --model Qwen/Qwen3-8B --preset Qwen3-8B "How many primes are there?"

--preset is the name of a published one, or a file that reset-calibrate wrote.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from reset import ReSETConfig
from reset.engine import answer, generate, load_engine, make_prompt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompt")
    parser.add_argument("--model", required=True, help="folder or hub name; NVFP4 or 16 bits")
    parser.add_argument(
        "--preset", required=True, help="name of a published preset, or a file of reset-calibrate"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    if Path(arguments.preset).is_file():
        config = ReSETConfig.from_file(arguments.preset)
    else:
        config = ReSETConfig.preset(arguments.preset)
    engine = load_engine(arguments.model, device=arguments.device)
    prompt = make_prompt(engine, arguments.prompt)
    (trace,) = generate(
        engine, [prompt], config, max_new_tokens=arguments.max_tokens, seed=arguments.seed
    )
    print(answer(engine, trace))


if __name__ == "__main__":
    main()
