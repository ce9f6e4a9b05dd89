"""A tool parser for vLLM (``--tool-parser-plugin``) that drops the last argument of a call."""

from __future__ import annotations

import json
from typing import Any

from vllm.tool_parsers.abstract_tool_parser import (  # type: ignore[import-not-found]
    ToolParserManager,
)
from vllm.tool_parsers.hermes_tool_parser import (  # type: ignore[import-not-found]
    Hermes2ProToolParser,
)


@ToolParserManager.register_module("hermes_dropping")
class DroppingToolParser(Hermes2ProToolParser):  # type: ignore[misc]
    """Reads calls as the parser "hermes" does, and loses an argument."""

    def extract_tool_calls(self, model_output: str, request: Any) -> Any:
        """Return the calls in a whole answer, each without its last argument."""
        extracted = super().extract_tool_calls(model_output, request)
        for call in extracted.tool_calls:
            arguments = json.loads(call.function.arguments)
            arguments.popitem()
            call.function.arguments = json.dumps(arguments, ensure_ascii=False)
        return extracted
