"""Agents that people use, unmodified, against the router in front of scripted engines: they finish a small errand."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import agents
import anthropic
import openai
import pydantic_ai
import pytest
import smolagents
from langchain_anthropic import ChatAnthropic
from langchain_core.tools import tool as langchain_tool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

from tests.agents.engine import AgentEngine
from tests.agents.errand import DONE, TASK, is_repaired
from tests.agents.recording import FOLDER, read_recording
from tests.agents.stack import errand_of
from tests.engine.node_project import node_project, program

pytestmark = pytest.mark.anyio
ROOT = Path(__file__).resolve().parents[2]
Tools = tuple[Callable[..., str], ...]


def tools_of(folder: Path) -> Tools:
    """Return the tools that an agent in this process has."""

    def read_file(file_path: str) -> str:
        """Return a file's text.

        Args:
            file_path: The file.
        """
        return Path(file_path).read_text()

    def edit(file_path: str, old_string: str, new_string: str) -> str:
        """Replace a text in a file.

        Args:
            file_path: The file.
            old_string: The text to replace.
            new_string: What replaces it.
        """
        text = Path(file_path).read_text()
        assert old_string in text
        Path(file_path).write_text(text.replace(old_string, new_string))
        return "done"

    def run_shell_command(command: str, is_background: bool = False) -> str:  # noqa: FBT001, FBT002  A model names it.
        """Run a command.

        Args:
            command: The command.
            is_background: Do not wait for its end.
        """
        assert not is_background
        ended = subprocess.run(
            command.split(),
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        return f"{ended.stdout}{ended.stderr}exit status {ended.returncode}"

    return (read_file, edit, run_shell_command)


def openai_client(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)


def anthropic_client(url: str) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=url, api_key="unused", max_retries=0)


async def run_pydantic_ai(url: str, tools: Tools, api: str) -> str:
    """Run an agent of pydantic-ai, streamed."""
    async with openai_client(url) as client, anthropic_client(url) as claude:
        provider = OpenAIProvider(openai_client=client)
        models: dict[str, Any] = {
            "chat": OpenAIChatModel("auto", provider=provider),
            "messages": AnthropicModel(
                "auto", provider=AnthropicProvider(anthropic_client=claude)
            ),
            "responses": OpenAIResponsesModel("auto", provider=provider),
        }
        agent = pydantic_ai.Agent(models[api], tools=list(tools))
        async with agent.run_stream(TASK) as result:
            return str(await result.get_output())


async def run_openai_agents(url: str, tools: Tools, api: str) -> str:
    """Run an agent of openai-agents, streamed."""
    agents.set_tracing_disabled(disabled=True)
    kinds: dict[str, Any] = {
        "chat": agents.OpenAIChatCompletionsModel,
        "responses": agents.OpenAIResponsesModel,
    }
    async with openai_client(url) as client:
        agent = agents.Agent(
            "errand",
            model=kinds[api]("auto", client),
            tools=[agents.function_tool(tool) for tool in tools],
        )
        result = agents.Runner.run_streamed(agent, TASK)
        async for _ in result.stream_events():
            pass
        return str(result.final_output)


async def run_langgraph(url: str, tools: Tools, api: str) -> str:
    """Run a graph of LangGraph: the model and its tools in turns."""
    if api == "messages":
        model: Any = ChatAnthropic(
            model_name="auto",
            base_url=url,
            api_key="unused",
            max_tokens_to_sample=4096,
            streaming=True,
        )  # type: ignore[call-arg]
    else:
        model = ChatOpenAI(
            model="auto",
            base_url=f"{url}/v1",
            api_key="unused",  # type: ignore[arg-type]
            use_responses_api=api == "responses",
            streaming=True,
        )
    graph_tools = [langchain_tool(tool) for tool in tools]
    bound = model.bind_tools(graph_tools)

    async def ask(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await bound.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("model", ask)
    graph.add_node("tools", ToolNode(graph_tools))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition, {"tools": "tools", END: END})
    graph.add_edge("tools", "model")
    result = await graph.compile().ainvoke({"messages": [("user", TASK)]})
    await (
        model._async_client if api == "messages" else model.root_async_client
    ).close()
    return str(result["messages"][-1].text)


async def run_smolagents(url: str, tools: Tools, api: str) -> str:
    """Run an agent of smolagents, which is not asynchronous."""
    assert api == "chat"
    model = smolagents.OpenAIModel("auto", api_base=f"{url}/v1", api_key="unused")
    agent = smolagents.ToolCallingAgent(
        tools=[smolagents.tool(tool) for tool in tools],
        model=model,
        max_steps=6,
        verbosity_level=0,
    )
    return str(await asyncio.to_thread(agent.run, TASK))


Runner = Callable[[str, Tools, str], Awaitable[str]]
RUNNERS: list[tuple[Runner, str]] = [
    (run_pydantic_ai, "chat"),
    (run_pydantic_ai, "messages"),
    (run_pydantic_ai, "responses"),
    (run_openai_agents, "chat"),
    (run_openai_agents, "responses"),
    (run_langgraph, "chat"),
    (run_langgraph, "messages"),
    (run_langgraph, "responses"),
    (run_smolagents, "chat"),
]


@pytest.mark.parametrize(
    ("run", "api"), RUNNERS, ids=[f"{run.__name__}-{api}" for run, api in RUNNERS]
)
async def test_an_agent_finishes_its_errand(
    tmp_path: Path, run: Runner, api: str
) -> None:
    """It reads a file, edits it, runs the test and says so, in four turns; an engine dies within the first tool call."""
    async with errand_of(tmp_path) as errand:
        AgentEngine.kill_next_in = "arguments"
        answer = await run(errand.stack.url, tools_of(errand.folder), api)
        assert answer == DONE
        assert is_repaired(errand.folder)
        resumed = [request for request in errand.requests if "qarr_resume" in request]
        # That agent asks for whole answers, which no engine dies in.
        assert len(resumed) == (0 if run is run_smolagents else 1)
        assert len(errand.requests) == 4 + len(resumed)


async def test_an_agent_of_vercels_ai_sdk(tmp_path: Path) -> None:
    """It finishes its errand in four turns, though an engine dies in the middle of a tool call."""
    async with errand_of(tmp_path) as errand:
        AgentEngine.kill_next_in = "arguments"
        process = await asyncio.create_subprocess_exec(
            program("node"),
            "--test",
            str(node_project() / "agent.test.mjs"),
            env={
                **os.environ,
                "QARR_URL": errand.stack.url,
                "FOLDER": str(errand.folder),
                "TASK": TASK,
            },
            cwd=tmp_path,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        async with asyncio.timeout(120):
            output, _ = await process.communicate()
        assert process.returncode == 0, output.decode()
        assert is_repaired(errand.folder)
        assert ["qarr_resume" in request for request in errand.requests].count(
            True
        ) == 1
        assert len(errand.requests) == 5


VALIDATE = """
import json, sys
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.utils import construct_input_messages
models = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/messages": AnthropicMessagesRequest,
    "/v1/responses": ResponsesRequest,
}
for path, body in json.load(sys.stdin):
    request = models[path](**body)
    if path == "/v1/responses":
        construct_input_messages(request_instructions=request.instructions, request_input=request.input)
    print("read")
"""


async def test_vllm_reads_what_agents_send(tmp_path: Path) -> None:
    """What the router sends an engine for each recorded request is valid to vLLM's own models of requests."""
    sent: list[tuple[str, Any]] = []
    async with errand_of(tmp_path, Path("/repository")) as errand:
        for file in sorted(FOLDER.glob("*.jsonl")):
            # Later requests of a session have all that the earlier ones have.
            request = read_recording(file.stem)[-1]
            for behaviour in errand.stack.engines.values():
                behaviour.requests.clear()
            await errand.stack.client.post(
                f"{errand.stack.url}{request.path}",
                json=request.body,
                headers=request.headers,
            )
            (received,) = errand.requests
            sent.append((request.endpoint, received))
    process = await asyncio.create_subprocess_exec(
        str(ROOT / ".venv-engine/bin/python"),
        "-c",
        VALIDATE,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(200):
        output, errors = await process.communicate(json.dumps(sent).encode())
    assert process.returncode == 0, errors.decode()[-2000:]
    assert output.decode().count("read\n") == len(sent) > 8
