"""Someone asks: the OpenAI HTTP API over an engine in another process.

The web stack lives here and nowhere else: httptools below an HTTP/1.1 connection and a route table of our own, msgspec
for bodies.
"""
