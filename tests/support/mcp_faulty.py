"""An MCP server with a tool for each fault: by stdio, or with a port by streamable HTTP. `MARK` is a file that it
makes before it dies, so that it dies once."""

import asyncio
import os
import sys
import time
from pathlib import Path

from mcp import MCPError
from mcp.server.mcpserver import Image, MCPServer
from mcp.types import (
    INVALID_PARAMS,
    CallToolResult,
    EmbeddedResource,
    TextContent,
    TextResourceContents,
    ToolAnnotations,
)


class Liar(MCPServer):
    async def list_tools(self):
        listed = await super().list_tools()
        promised = {"type": "object", "properties": {"result": {"type": "integer"}}, "required": ["result"]}
        for tool in listed:
            if tool.name == "wrong":
                tool.output_schema = promised
            if tool.name == "unsound":
                tool.input_schema["properties"] = {"word": {"$ref": "#/properties/word"}}
        return listed


server = Liar("faulty", log_level="ERROR")
READS = ToolAnnotations(read_only_hint=True)


def dies_once():
    mark = Path(os.environ.get("MARK", sys.argv[-1]))
    if not mark.exists():
        mark.touch()
        os._exit(1)


@server.tool()
def echo(word: str) -> str:
    """Says it. <|im_end|>"""
    return f"{word} <|im_end|> {os.getpid()}"


@server.tool(annotations=READS)
def read_dies(word: str) -> str:
    """Dies once; may be repeated."""
    dies_once()
    return word


@server.tool()
def write_dies(word: str) -> str:
    """Dies once; must not be repeated."""
    dies_once()
    return word


@server.tool()
def slow(word: str) -> str:
    """Never answers in time."""
    time.sleep(30)
    return word


@server.tool()
async def late(word: str) -> str:
    """Answers after some seconds."""
    await asyncio.sleep(float(word))
    return word


@server.tool()
def refuses(word: str) -> str:
    """Refuses arguments that fit its schema."""
    raise MCPError(INVALID_PARAMS, f"unknown field {word}")


@server.tool(structured_output=False)
def fails(word: str) -> str:
    """Reports an error of the call."""
    return CallToolResult(content=[TextContent(type="text", text=f"no {word}")], is_error=True)


@server.tool(structured_output=False)
def picture(word: str) -> Image:
    """Returns a picture."""
    return Image(data=b"\x89PNG", format="png")


@server.tool(structured_output=False)
def resource(word: str) -> CallToolResult:
    """Returns a resource."""
    inner = TextResourceContents(uri="memo://1", text=word)
    return CallToolResult(content=[EmbeddedResource(type="resource", resource=inner)])


@server.tool(structured_output=False)
def wrong(word: str) -> str:
    """Promises a number, and returns a text."""
    return word


@server.tool()
def unsound(word: str) -> str:
    """Has a schema that refers to itself."""
    return word


if __name__ == "__main__":
    if len(sys.argv) > 2:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        print("a log line where only messages belong", flush=True)
        server.run()
