"""`model.generate(..., custom_generate=THIS, assistant_model=..., trust_remote_code=True)`, decoded by `monge.speculate`.

`generate` hands over its arguments as they were given. Those that it would drop before a callable
sees them are renamed here.
"""

from transformers import StoppingCriteriaList
from transformers.generation import StopStringCriteria

from monge import speculate


def generate(
    model,
    inputs=None,
    *,
    assistant_model=None,
    streamer=None,
    tokenizer=None,
    assistant_tokenizer=None,
    **arguments,
):
    if assistant_tokenizer is not None:
        raise ValueError(
            "assistant_tokenizer: the assistant must share the model's tokenizer; leave it out"
        )
    if (strings := arguments.pop("stop_strings", None)) is not None:
        if tokenizer is None:
            raise ValueError("stop_strings: give tokenizer= as well")
        own = StopStringCriteria(tokenizer, strings)
        arguments["stopping_criteria"] = StoppingCriteriaList(
            [*(arguments.get("stopping_criteria") or ()), own]
        )
    if (count := arguments.pop("num_assistant_tokens", None)) is not None:
        arguments["tree"] = f"chain({count})"
    arguments |= {"draft_model": assistant_model, "token_streamer": streamer}
    return model.generate(inputs, custom_generate=speculate, **arguments)
