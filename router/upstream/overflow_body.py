"""What the overflow is asked: the members of a request that mean the same at any server of OpenAI's API.

What is the router's own or names the caller is left out. So is a parameter of vLLM's whose value changes nothing. With any
other member the request cannot be asked elsewhere: a server may refuse it, or leave it out without a word.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic_core import to_json

from router.upstream.engine_request import ChatRequest, RelayRequest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from router.upstream.engine_request import EngineRequest

_SHARED = {
    "frequency_penalty",
    "logprobs",
    "max_tokens",
    "model",
    "n",
    "presence_penalty",
    "seed",
    "stop",
    "stream",
    "stream_options",
    "temperature",
    "top_p",
}
_CHAT = _SHARED | {
    "function_call",
    "functions",
    "max_completion_tokens",
    "messages",
    "parallel_tool_calls",
    "reasoning_effort",
    "response_format",
    "tool_choice",
    "tools",
    "top_logprobs",
    "verbosity",
}
_COMPLETION = _SHARED | {"best_of", "echo", "prompt", "suffix"}
# Of no effect on the answer; some tell who asks, make the server keep it, or change what it costs.
_LEFT_OUT = {
    "cache_salt",
    "metadata",
    "priority",
    "prompt_cache_key",
    "provider",
    "qarr",
    "request_id",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
}
# Values of vLLM's parameters that change nothing (vLLM 0.32, SamplingParams and its OpenAI protocol).
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "bad_words": ([],),
    "continue_final_message": (False,),
    "echo": (False,),
    "ignore_eos": (False,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "min_p": (0,),
    "min_tokens": (0,),
    "repetition_penalty": (1,),
    "return_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stop_token_ids": ([],),
    "stream_options": ({},),
    "top_k": (0, -1),
    "use_beam_search": (False,),
}


def body_for(request: EngineRequest, model: str) -> bytes | None:
    """Return the body of a request to a foreign server; None where it cannot be asked there.

    Args:
        request: As an engine would be asked.
        model: The server's name for its model.
    """
    if request.adapter is not None:
        return None
    if isinstance(request, ChatRequest):
        if (sampling := _portable(request.sampling, _CHAT)) is None:
            return None
        whole = {"model": model, "messages": request.messages, "max_tokens": request.max_tokens, **sampling}
        return to_json({**whole, "stream": True, "stream_options": {"include_usage": True}})
    if not isinstance(request, RelayRequest):
        return None
    values, known = request.document.values, _CHAT if request.operation == "chat" else _COMPLETION
    kept = _portable(values, known)
    if kept is None or not _is_text(values.get("prompt")) or not _plain_options(values.get("stream_options")):
        return None
    changes: dict[str, Any] = {name: None for name in values if name not in kept}
    changes |= {"model": model, "stream_options": {"include_usage": True} if request.streamed else None}
    return request.document.edited(changes)


def _portable(values: Mapping[str, Any], known: set[str]) -> dict[str, Any] | None:
    """Return the members that any server knows; None where another one changes the answer."""
    given = {name: value for name, value in values.items() if value is not None and name not in _LEFT_OUT}
    if any(name not in known and value not in _NEUTRAL.get(name, ()) for name, value in given.items()):
        return None
    return {name: value for name, value in given.items() if name in known}


def _is_text(prompt: Any) -> bool:
    """Tell whether a completion's prompt, where there is one, is text: token ids are of the fleet's tokenizer."""
    prompts = prompt if isinstance(prompt, list) else [prompt]
    return all(one is None or isinstance(one, str) for one in prompts)


def _plain_options(options: Any) -> bool:
    return options is None or (
        isinstance(options, dict) and all(name == "include_usage" or not on for name, on in options.items())
    )
