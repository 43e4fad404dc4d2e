"""langchain-openai against the server, by the standard suite that LangChain's own integrations must pass."""

from __future__ import annotations

import pytest
from langchain_core.exceptions import OutputParserException
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

from tests.conformance.server import MODEL, base_url, serves

CHAT = "/v1/chat/completions"
WEAK = {
    "test_tool_calling": "it calls the function, but with other arguments than it was told",
    "test_tool_calling_async": "it calls the function, but with other arguments than it was told",
    "test_json_mode": "it writes JSON, but not with the keys it was told",
    "test_agent_loop": "it answers without the function that it may call",
    "test_unicode_tool_call_integration": "it calls the function, but the argument goes on past the limit",
}
"""What fails by what the model says.  An error from the server is no such thing, and stays a failure."""


class CheckChatOpenAI(ChatModelIntegrationTests):
    """What is not overridden here is theirs."""

    @property
    def chat_model_class(self):
        return ChatOpenAI

    @property
    def chat_model_params(self):
        return {
            "model": MODEL,
            "base_url": f"{base_url()}/v1",
            "api_key": "none",
            "temperature": 0,
            "max_tokens": 120,
            # a model this small would go on calling
            "extra_body": {"parallel_tool_calls": False},
            # by itself it asks only OpenAI for usage in streams
            "stream_usage": True,
        }

    @property
    def has_tool_calling(self):
        return serves(CHAT, "tools")

    @property
    def has_tool_choice(self):
        return serves(CHAT, "tools")

    @property
    def has_structured_output(self):
        return serves(CHAT, "response_format")

    @property
    def structured_output_kwargs(self):
        return {"method": "json_schema"}

    @property
    def supports_json_mode(self):
        return serves(CHAT, "response_format")

    @property
    def supported_usage_metadata_details(self):
        return {"invoke": [], "stream": []}

    @property
    def model_override_value(self):
        return MODEL


@pytest.fixture(autouse=True)
def _local(socket_enabled, request):
    """LangChain's plug-in shuts sockets; these tests need one."""
    if reason := WEAK.get(request.node.originalname):
        said = (AssertionError, OutputParserException)
        request.node.add_marker(pytest.mark.xfail(reason=reason, raises=said))
