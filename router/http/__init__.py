"""The data plane's HTTP/1.1: callbacks of asyncio protocols, no task for a request, answers passed on unparsed."""
