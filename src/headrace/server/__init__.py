"""Someone asks: the OpenAI HTTP API over an engine in another process.

The web stack lives here and nowhere else: uvicorn's HTTP/1.1 connection, a route table of our own, msgspec for bodies.
"""
