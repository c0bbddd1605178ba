"""An MCP server with two tools, for `tools: ["mcp:python examples/mcp_server.py"]`. It needs the package `mcp`.

accelerate launch recipes/search.py --tools "mcp:python examples/mcp_server.py"
python examples/mcp_server.py --http 8000     # then: --tools mcp:http://127.0.0.1:8000/mcp
"""

import sys
from typing import Annotated

from mcp.server.mcpserver import MCPServer
from mcp.types import ToolAnnotations
from pydantic import Field

PRICES = {"desk lamp": 39, "office chair": 189, "standing desk": 420, "monitor arm": 75}
READS = ToolAnnotations(read_only_hint=True)  # such a call may be repeated after a failure

server = MCPServer("catalogue", log_level="WARNING")


@server.tool(annotations=READS)
def search(query: Annotated[str, Field(description="What to look for, in a few words.")]) -> str:
    """Searches the catalogue."""
    words = query.lower().split()
    found = [f"{name}: {price} euros" for name, price in PRICES.items() if any(word in name for word in words)]
    return "\n".join(found) or "Nothing found."


@server.tool(annotations=READS)
def discount(
    price: Annotated[float, Field(description="In euros.", ge=0)],
    percent: Annotated[int, Field(description="Off the price.", ge=0, le=50)] = 10,
) -> str:
    """Computes a discounted price."""
    return f"{price * (100 - percent) / 100:.2f} euros"


if __name__ == "__main__":
    if "--http" in sys.argv:
        server.run("streamable-http", port=int(sys.argv[sys.argv.index("--http") + 1]))
    else:
        server.run()
