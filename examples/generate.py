"""Complete two prompts that share a long prefix, and see the second one hit the prefix cache.

python examples/generate.py [MODEL]
"""

import sys

from gdn_jax import LLM, SamplingParams

if __name__ == "__main__":
    model = sys.argv[1] if len(sys.argv) > 1 else "pico"
    llm = LLM(model, max_model_len=1024, max_num_seqs=2)
    story = "The river ran past the mill, and the miller's boat lay where the water was slow. " * 3
    for question in ("Who had a boat?", "Where did it lie?"):
        (output,) = llm.generate([story + question], SamplingParams(temperature=0.0, max_tokens=16))
        sys.stdout.write(f"{output.outputs[0].text!r}  ({output.num_cached_tokens} prompt tokens were cached)\n")
