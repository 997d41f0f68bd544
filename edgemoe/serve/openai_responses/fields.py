"""The fields of OpenAI's responses, and the chat that they mean. An unknown field is an error that names it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, FiniteFloat

from edgemoe.serve.errors import ApiError
from edgemoe.serve.openai_responses.items import INPUT, InputItem
from edgemoe.serve.protocol.reply import Shape
from edgemoe.serve.request.chat import MOST_TOOLS, ChatRequest, FunctionFields, NamedFunction
from edgemoe.serve.request.fields import Fields, Known, Limit, Name, checked
from edgemoe.serve.request.thinking import Effort


class FunctionTool(FunctionFields):
    """A function that the model may call."""

    type: Literal["function"]

    def as_tool(self) -> Shape:
        """The tool of a chat."""
        given = self.model_dump(exclude_none=True, exclude={"type"})
        return {"type": "function", "function": given}


class Namespace(Known):
    """Functions with a common name. A model gets them by their own names; a call of one says its namespace."""

    type: Literal["namespace"]
    name: Name
    description: str | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MOST_TOOLS)]


class WebSearch(Fields):
    """A search of OpenAI's servers, which agents offer with every request. It is not in the prompt."""

    type: Literal["web_search"]


Tool = Annotated[FunctionTool | Namespace | WebSearch, Field(discriminator="type")]


class NamedTool(NamedFunction):
    """A tool that must be called."""

    type: Literal["function"]

    def as_choice(self) -> Shape:
        """The tool_choice of a chat."""
        return {"type": self.type, "function": {"name": self.name}}


class TextFormat(Known):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None

    def as_format(self) -> Shape:
        """The response_format of a chat."""
        if self.type != "json_schema":
            return {"type": self.type}
        return {"type": self.type, "json_schema": {"name": self.name, "schema": self.schema_}}


class TextConfig(Known):
    """How the answer is to be."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(Known):
    """How much the model reasons. A summary is never made: reasoning comes as it is."""

    effort: Effort | None = None
    summary: Name | None = None
    generate_summary: Name | None = None


class ResponsesFields(Known):
    """The body of /v1/responses."""

    model: Name
    input: str | Annotated[list[InputItem], Field(min_length=1)]
    instructions: str | None = None
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    max_output_tokens: Limit | None = None
    temperature: FiniteFloat | None = None
    top_p: FiniteFloat | None = None
    top_logprobs: Literal[0] | None = None
    stream: bool | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None
    metadata: dict[Name, Annotated[str, Field(max_length=512)]] | None = None
    previous_response_id: Any = None
    store: bool | None = None
    stream_options: Any = None
    user: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    prompt_cache_options: Any = None
    client_metadata: Any = None

    def as_chat(self) -> ChatRequest:
        """The body of /v1/chat/completions that means the same.

        Raises:
            ApiError: a field that chats do not have, or a wrong one.
        """
        if self.previous_response_id is not None:
            message = "expected no previous_response_id, got one: responses are not stored, so send all items as input"
            raise ApiError(400, message, param="previous_response_id", code="unsupported_parameter")
        given = {name: value for name, value in self._as_chat().items() if value is not None}
        return checked(ChatRequest, given)

    def _as_chat(self) -> Shape:
        form = self.text.format if self.text else None
        choice = self.tool_choice
        same = ("parallel_tool_calls", "temperature", "top_p", "stream")
        return {
            "messages": self._messages(),
            "tools": [tool.as_tool() for tool, _ in self._functions()] or None,
            "tool_choice": choice.as_choice() if isinstance(choice, NamedTool) else choice,
            "response_format": form.as_format() if form else None,
            "reasoning_effort": self.reasoning.effort if self.reasoning else None,
            "max_tokens": self.max_output_tokens,
            **{name: getattr(self, name) for name in same},
        }

    def _functions(self) -> list[tuple[FunctionTool, str | None]]:
        """The functions that the model may call, each with its namespace."""
        found = list[tuple[FunctionTool, str | None]]()
        for tool in self.tools or ():
            if isinstance(tool, FunctionTool):
                found.append((tool, None))
            elif isinstance(tool, Namespace):
                found += [(each, tool.name) for each in tool.tools]
        return found

    def namespaces(self) -> dict[str, str]:
        """Function -> its namespace, where it has one."""
        return {tool.name: namespace for tool, namespace in self._functions() if namespace}

    def _messages(self) -> list[Shape]:
        messages = [{"role": "system", "content": self.instructions}] if self.instructions else []
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        for item in self.input:
            item.add_to(messages)
        if messages[-1]["role"] == "assistant":
            message = "expected input that ends with the user or a tool's output, got an answer: its text cannot be "
            raise ApiError(400, f"{message}continued", param=INPUT)
        return messages

    def echo(self) -> Shape:
        """The fields that the response repeats, with the values that hold where they are left out."""
        tools = [tool.model_dump(exclude_unset=True) for tool in self.tools or ()]
        form = self.text.format if self.text else None
        choice = self.tool_choice
        return {
            "background": False,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "model": self.model,
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": self.reasoning.effort if self.reasoning else None, "summary": None},
            "store": False,
            "temperature": self.temperature,
            "text": {
                "format": form.model_dump(by_alias=True, exclude_unset=True) if form else {"type": "text"}
            },
            "tool_choice": choice.model_dump() if isinstance(choice, NamedTool) else choice or "auto",
            "tools": tools,
            "top_p": self.top_p,
            "truncation": "disabled",
        }
